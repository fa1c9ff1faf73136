"""Finds the programs in examples/ and checks their output, which their docstrings promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "examples"
WITH_TORCH_ALONE = [FOLDER / "fsdp2_tp.py"]
WITH_ENGINES = sorted(set(FOLDER.glob("*.py")) - set(WITH_TORCH_ALONE))


def promised(example: Path) -> list[str]:
    text = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    found = re.search(r"^It prints.*:\n\n((?:    .*\n?)+)", text, re.MULTILINE)
    assert found, f"{example.name} must say in its docstring what it prints"
    return [line.strip() for line in found[1].splitlines()]


def check(example: Path, output: str) -> None:
    """Checks that the output has the promised lines in order. In them, `…` matches any text within a line."""
    printed = iter(line.strip() for line in output.splitlines())
    for line in promised(example):
        pattern = ".+".join(map(re.escape, line.split("…")))
        assert any(re.fullmatch(pattern, each) for each in printed), f"{line!r} is missing, or out of order:\n{output}"
