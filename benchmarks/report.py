"""Compares this library with other installed libraries and writes a report page: see `harness/comparison.py` or
`--help`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from device_communicators.base.interrupts import run_interruptible, signals_wait

PROGRAM = "python benchmarks/report.py"


def main(arguments: Sequence[str] | None = None) -> int:
    def compare() -> int:
        with signals_wait():
            module = import_module("harness.comparison")  # imports torch, which takes seconds
        exit_code: int = module.main(arguments)
        return exit_code

    return run_interruptible(PROGRAM, compare)


if __name__ == "__main__":
    sys.exit(main())
