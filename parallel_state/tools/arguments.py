"""The commands' argument parser and output. Doesn't import torch."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STDOUT = "-"
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
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (paragraph.strip("\n") for paragraph in text.split("\n\n"))
        return "\n\n".join(
            paragraph if "\n " in f"\n{paragraph}" else textwrap.fill(paragraph, width) for paragraph in paragraphs
        )


def positive(text: str) -> int:
    if not text.lstrip("+-").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text}")
    return int(text)


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE",
                        help="write everything as JSON, to stdout without FILE")  # fmt: skip


def as_json(content: object) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def write(parser: argparse.ArgumentParser, path: str, text: str) -> None:
    """Writes `text` to the file `path`, or to stdout if `path` is `-`. If that fails, exits with code 2."""
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"cannot write {path}: {error.strerror}")


def require_writable(parser: argparse.ArgumentParser, *paths: str | Path | None) -> None:
    for path in (Path(path) for path in paths if path is not None and str(path) != STDOUT):
        is_new = not path.exists()
        try:
            path.open("a").close()
        except OSError as error:
            parser.error(f"cannot write {path}: {error.strerror}")
        if is_new:
            path.unlink(missing_ok=True)  # other ranks of this host may test it at the same time


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (text.rjust(width) if at in right else text.ljust(width)
                 for at, (text, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        yield "  ".join(cells).rstrip()
