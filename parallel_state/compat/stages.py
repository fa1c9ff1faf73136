"""Computes the layers of pipeline stages, as vLLM and SGLang define them."""

from __future__ import annotations

import os

from device_communicators.base.errors import InvalidArgumentError
from parallel_state.functions import utilities

divide = utilities.divide


def ensure_divisibility(numerator: int, denominator: int) -> None:
    divide(numerator, denominator)


def layers_in(variable: str, num_hidden_layers: int, pp_size: int) -> list[int] | None:
    """Returns the numbers of layers in the environment variable `variable`, such as `5,2`; None if unset. Raises
    InvalidArgumentError unless the variable lists `pp_size` numbers whose sum is `num_hidden_layers`.
    """
    given = os.environ.get(variable)
    if not given:
        return None
    layers = [int(each) if each.strip().isdecimal() else -1 for each in given.split(",")]
    if -1 in layers or len(layers) != pp_size or sum(layers) != num_hidden_layers:
        raise InvalidArgumentError(
            f"{variable} must list {pp_size} numbers whose sum is {num_hidden_layers}, but is {given!r}"
        )
    return layers
