"""`python -m parallel_state peers`: in a checkout, fetches the libraries that `bench --report` compares with."""

from __future__ import annotations

from collections.abc import Sequence

from parallel_state.tools.bench.command import in_checkout


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    return in_checkout("peers", "harness.peers", arguments)
