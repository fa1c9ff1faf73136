from __future__ import annotations

import inspect
import re
from pathlib import Path

import parallel_state as ps
from tests.references import SGLANG, SGLANG_WIDTHS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming_from.md").read_text()
PAIRS = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE, flags=re.MULTILINE)
ELSEWHERE = {"src", "dst", "parallel_state"}


def test_names_of_ours_exist() -> None:
    public = [*dir(ps), *dir(ps.GroupCoordinator), *dir(ps.TensorHandle), *ELSEWHERE]
    arguments = inspect.signature(ps.initialize_model_parallel).parameters
    known = {*public, *arguments, *(row.name for row in ps.AXES), *(row.size_parameter for row in ps.AXES)}
    found = 0
    for _, ours in PAIRS:
        for code in re.findall(r"`([^`]+)`", ours):
            for name in re.findall(r"^(?:group\.|\.)?([A-Za-z_]+)(?=\(|$)", code):
                assert name in known, code
                found += 1
    assert found > 40


def test_names_of_sglang_exist() -> None:
    section = PAGE.partition("## SGLang")[2].partition("## ")[0]
    theirs = SGLANG.read() + SGLANG_WIDTHS.read()
    names = [name for row in re.findall(r"^\| ([^|]+) \|", section, flags=re.MULTILINE)
             for name in re.findall(r"`(\w+)`", row)]  # fmt: skip
    assert len(names) > 10
    for name in names:
        assert re.search(rf"\b{name}\b", theirs), name
