"""Writes the output of a command to stdout or to files, and the frame of an HTML page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

STDOUT = "-"


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE",
                        help="write everything as JSON, to stdout without FILE")  # fmt: skip


def as_json(content: object) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def write(path: str, text: str) -> None:
    """Writes `text` to a file, or to stdout for `-`."""
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = path  # the error of a full disk has no filename
        raise


def require_writable(parser: argparse.ArgumentParser, *paths: str | Path | None) -> None:
    """Exits with code 2 if a file can't be written; called before the command's work."""
    for path in (Path(path) for path in paths if path is not None and str(path) != STDOUT):
        is_new = not path.exists()
        try:
            path.open("a").close()
        except OSError as error:
            parser.error(f"cannot write {path}: {error.strerror}")
        if is_new:
            path.unlink(missing_ok=True)  # other ranks of this host may test it at the same time


def write_chosen(
    parser: argparse.ArgumentParser, options: argparse.Namespace, makers: Mapping[str, Callable[[], str]]
) -> bool:
    """Writes the output of each maker whose option is set. Returns True if one was written to stdout.

    Exits with code 2 if a file can't be written.
    """
    chosen = {name: path for name in makers if (path := getattr(options, name)) is not None}
    try:
        for name, path in chosen.items():
            write(path, makers[name]())
    except OSError as error:
        if error.filename is None:  # the error is stdout's
            raise
        parser.error(f"cannot write {error.filename}: {error.strerror}")
    return STDOUT in chosen.values()


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Yields each row as a line of aligned cells; columns in `right` are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (text.rjust(width) if at in right else text.ljust(width)
                 for at, (text, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        yield "  ".join(cells).rstrip()


def html_page(title: str, style: str, body: str, scripts: str = "") -> str:
    """Returns an HTML page. Its policy forbids all external resources, and scripts unless `scripts` is set.

    `title` is plain text; `style`, `body` and `scripts` are CSS and HTML.
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
