"""Creates the argument parser that all commands share. Doesn't import torch."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

PROGRAM = "parallel-state" if Path(sys.argv[0]).name == "parallel-state" else "python -m parallel_state"


def command_parser(command: str, usage: str, description: str | None, **options: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"{PROGRAM} {command}".strip(),
        usage=f"%(prog)s {usage}",
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        **options,
    )


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the prose of a help text to the terminal's width."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (paragraph.strip("\n") for paragraph in text.split("\n\n"))
        return "\n\n".join(
            paragraph if "\n " in f"\n{paragraph}" else textwrap.fill(paragraph, width) for paragraph in paragraphs
        )


def positive(text: str) -> int:
    if not text.lstrip("+-").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text}")
    return int(text)
