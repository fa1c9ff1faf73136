"""The parser that all commands share, with one format of usage and errors. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

PROGRAM = "parallel-state" if Path(sys.argv[0]).name == "parallel-state" else "python -m parallel_state"
"""The command as the user typed it."""


def command_parser(command: str, usage: str, description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Returns a parser that prints one line of usage before an error. Only `--help` lists the options."""
    return argparse.ArgumentParser(
        prog=f"{PROGRAM} {command}".strip(),
        usage=f"%(prog)s {usage}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **options,
    )


def positive(text: str) -> int:
    if not text.lstrip("+-").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text}")
    return int(text)
