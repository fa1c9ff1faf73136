from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.examples import FOLDER, WITH_ENGINES, WITH_TORCH_ALONE, check, promised
from tests.programs import FORK_SERVERS, Program, script


@pytest.mark.slow
@pytest.mark.parametrize("example", WITH_TORCH_ALONE, ids=lambda path: path.stem)
def test_it_prints_what_it_says(example: Path) -> None:
    program = Program(FORK_SERVERS + script(example, []), {**os.environ, "PYTHONPATH": str(FOLDER.parent)})
    out, err = program.communicate(120)
    assert program.returncode == 0, err
    check(example, out)


def test_each_says_what_it_prints() -> None:
    assert all(promised(example) for example in WITH_TORCH_ALONE + WITH_ENGINES)


def test_what_is_missing_or_out_of_order_is_seen() -> None:
    example, lines = WITH_TORCH_ALONE[0], promised(WITH_TORCH_ALONE[0])
    check(example, "\n".join(["[Gloo] a line", *lines, "the end"]))
    for wrong in (lines[1:], lines[::-1]):
        with pytest.raises(AssertionError, match="missing, or out of order"):
            check(example, "\n".join(wrong))
