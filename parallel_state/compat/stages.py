"""Divisions of a model that several engines name alike: by ranks without remainder, and its layers by a variable."""

from __future__ import annotations

import os

from device_communicators.base.errors import InvalidArgumentError
from parallel_state.functions import utilities

divide = utilities.divide


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises InvalidArgumentError unless the quotient is whole."""
    divide(numerator, denominator)


def layers_in(variable: str, num_hidden_layers: int, pp_size: int) -> list[int] | None:
    """Returns each stage's number of layers as the variable lists them (`5,2`); None where it isn't set.

    Raises InvalidArgumentError where that doesn't fit.
    """
    given = os.environ.get(variable)
    if not given:
        return None
    layers = [int(each) if each.strip().isdecimal() else -1 for each in given.split(",")]
    if -1 in layers or len(layers) != pp_size or sum(layers) != num_hidden_layers:
        raise InvalidArgumentError(
            f"{variable} must be {pp_size} numbers with the sum {num_hidden_layers}, but is {given!r}"
        )
    return layers
