"""Output of a command: files that its options name, or stdout; and the frame of an HTML page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

STDOUT = "-"


def add_json(parser: argparse._ActionsContainer) -> None:
    """Adds the option --json."""
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE",
                        help="everything for programs; without FILE to stdout, instead of text")  # fmt: skip


def as_json(content: object) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def write(path: str, text: str) -> None:
    """Writes to a file, or to stdout."""
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = path  # where it is full, the error doesn't name it
        raise


def require_writable(parser: argparse.ArgumentParser, *paths: str | Path | None) -> None:
    """Ends the command with exit code 2 if a file can't be written, before the work whose result it gets."""
    for path in (Path(path) for path in paths if path is not None and str(path) != STDOUT):
        is_new = not path.exists()
        try:
            path.open("a").close()
        except OSError as error:
            parser.error(f"cannot write {path}: {error.strerror}")
        if is_new:
            path.unlink(missing_ok=True)  # other ranks of the host test it, too


def write_chosen(
    parser: argparse.ArgumentParser, options: argparse.Namespace, makers: Mapping[str, Callable[[], str]]
) -> bool:
    """Writes what the options ask for, by their names. Returns True if something went to stdout.

    Ends the command with exit code 2 if a file can't be written.
    """
    chosen = {name: path for name in makers if (path := getattr(options, name)) is not None}
    try:
        for name, path in chosen.items():
            write(path, makers[name]())
    except OSError as error:
        if error.filename is None:  # stdout's
            raise
        parser.error(f"cannot write {error.filename}: {error.strerror}")
    return STDOUT in chosen.values()


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Yields the rows with their cells in columns; `right` are those that are aligned there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (text.rjust(width) if at in right else text.ljust(width)
                 for at, (text, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        yield "  ".join(cells).rstrip()


def html_page(title: str, style: str, body: str, scripts: str = "") -> str:
    """Returns a page that works from a file: it may load nothing, and run only the scripts in it if it has `scripts`.

    `title` is text; `style` and `body` are CSS and HTML.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'" + ("; script-src 'unsafe-inline'" if scripts else "")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
{scripts}</body>
</html>
"""
