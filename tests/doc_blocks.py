"""Finds the code blocks of README.md and docs/*.md. The comment before a block says how the block is run:

(nothing)                          on 2 ranks, tensor parallel; blocks of one page share their names, in order
<!-- run: 4 ranks, tp=2, pp=2 -->  the same, on other ranks; without sizes the block makes its own world
<!-- run: one process -->          in one process, without a world
<!-- run: program -->              as its own file; a comment after `print(launch(…` has the output
<!-- edit -->, <!-- use -->        by tests/contract/test_extending.py
<!-- not run: reason -->           not at all
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "api").glob("*.md"))]
DEFAULT = "run: 2 ranks, tp=2"
PLAIN = ("text", "json")
DIRECTIVES = ("{toctree}", "{eval-rst}")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    how: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


class Ranks(NamedTuple):
    """The ranks that run a block. If `tp` is None, the block makes its own world."""

    count: int
    tp: int | None
    pp: int


def ranks_of(how: str) -> Ranks | None:
    found = re.fullmatch(r"run: (\d+) ranks(?:, tp=(\d+))?(?:, pp=(\d+))?", how)
    return None if found is None else Ranks(int(found[1]), int(found[2]) if found[2] else None, int(found[3] or 1))


def blocks_of(path: Path) -> list[Block]:
    lines = path.read_text(encoding="utf-8").splitlines()
    page = str(path.relative_to(ROOT))
    found: list[Block] = []
    at = 0
    while at < len(lines):
        opened = re.fullmatch(r"( *)```(\S*)( .*)?", lines[at])
        if opened is None:
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        before = re.fullmatch(r"<!-- (.*) -->", lines[at - 1].strip()) if at else None
        code = "\n".join(lines[at + 1 : end]) + "\n"
        found.append(Block(page, at + 1, opened[2], before[1] if before else DEFAULT, code))
        at = end + 1
    return found


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [block for block in BLOCKS if block.language == "sh"]
