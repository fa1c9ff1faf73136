from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import promises
from tests.promises import Item

pytestmark = pytest.mark.slow

KILLED = Item("tests/failure/test_killed.py::test_row_03_in_every_operation[send_object-gloo]")
OF_A_ROW = Item(
    "tests/failure/test_mismatches.py::test_rows_06_to_10_calls_that_differ[row 8: reductions-shared memory]"
)
OVER_TORCH = Item("tests/failure/test_c10d.py::test_row_46_as_row_03_in_every_operation[gather]")
ELSEWHERE = Item("tests/contract/test_usage_errors.py::test_a_mistake_of_one_rank_is_its_own[hierarchical-3]")
MARKED = Item("tests/failure/test_queues.py::test_row_35_a_slow_reader[gloo-5]", ("hosts", "connections"), "compiled")

PROGRAM = """
import pytest

@pytest.mark.parametrize("which", [
    pytest.param(1, marks=[pytest.mark.over("gloo"), pytest.mark.door("compiled")]),
    pytest.param(2, marks=pytest.mark.over("hosts", "gloo")),
])
def test_it(which):
    if which == 2:
        pytest.skip("it fails today")

@pytest.mark.xfail
def test_xfail():
    assert False
"""


def test_what_ids_promise() -> None:
    found = promises.promises_of([KILLED, OF_A_ROW, OVER_TORCH, ELSEWHERE])
    assert "row 03 | gloo | coordinator | send_object" in found
    assert "row 08 | shared memory | coordinator | row 8: reductions" in found
    assert not any(line.startswith("row 06") for line in found)
    assert "row 46 | any | torch.distributed | gather" in found
    assert "row 43 | hosts | coordinator | 3" in found


def test_markers_name_transports_and_door() -> None:
    assert promises.promises_of([MARKED]) == {"row 35 | hosts | compiled | 5", "row 35 | connections | compiled | 5"}


def test_a_test_whose_skip_is_not_the_machines_promises_nothing() -> None:
    assert promises.promises_of([KILLED._replace(skipped="needs torch >= 2.15")]) == promises.promises_of([KILLED])
    assert promises.promises_of([KILLED._replace(skipped="it fails today")]) == set()


def test_runs_note_their_tests_and_skips(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(PROGRAM, encoding="utf-8")
    notes = tmp_path / "notes"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(promises.ROOT), promises.COLLECTED: str(notes)}
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, check=True, stdout=subprocess.DEVNULL)
    assert promises.collected(notes) == [
        Item("test_it.py::test_it[1]", ("gloo",), "compiled"),
        Item("test_it.py::test_it[2]", ("hosts", "gloo"), "", "it fails today"),
        Item("test_it.py::test_xfail"),
    ]


def test_digests_promise_each_call_and_dtype() -> None:
    found = promises.promises_of(
        [Item("tests/contract/test_digests.py::test_bits_are_the_stored_ones[shared_memory 0-0]")]
    )
    assert "bits | shared_memory 0-0 | all_reduce_async sum | float32" in found
    assert "bits | shared_memory 0-0 | all_gather | float4_e2m1fn_x2" in found
    assert not any(line.startswith("bits | shared_memory 0-0-0") for line in found)


def test_a_removed_test_and_a_new_one_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = promises.promises_of([KILLED, OF_A_ROW])
    file = tmp_path / "promises.txt"
    file.write_text("\n".join([*sorted(held), "withdrawn:", "row 99 | any | coordinator | gone", ""]), encoding="utf-8")
    monkeypatch.setattr(promises, "FILE", file)
    silent = "withdrawn, but CHANGELOG.md doesn't quote it: row 99 | any | coordinator | gone"
    assert promises.problems(held) == [silent]
    lost, *rest = promises.problems(promises.promises_of([OF_A_ROW]))
    assert (lost, rest) == ("vanished: row 03 | gloo | coordinator | send_object", [silent])
    new, *rest = promises.problems(held | promises.promises_of([OVER_TORCH]))
    assert new.startswith("new, ") and new.endswith("row 46 | any | torch.distributed | gather")
    assert rest == [silent]


def test_a_line_removed_by_hand_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tests" / "promises.txt"
    file.parent.mkdir()
    monkeypatch.setattr(promises, "ROOT", tmp_path)
    monkeypatch.setattr(promises, "FILE", file)
    (tmp_path / "CHANGELOG.md").touch()
    assert promises.stored_in_git() == set()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    for lines in ("row 01\nrow 02\nwithdrawn:\n", "row 01\nwithdrawn:\n"):
        file.write_text(lines, encoding="utf-8")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "a change"], check=True)
    before = promises.stored_in_git()
    assert promises.problems({"row 01"}, before) == ["vanished: row 02"]
    file.write_text("row 01\nwithdrawn:\nrow 02\n", encoding="utf-8")
    assert promises.problems({"row 01"}, before) == ["withdrawn, but CHANGELOG.md doesn't quote it: row 02"]


def test_a_line_that_changelog_quotes_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "CHANGELOG.md").write_text("- Row 99 went (`row 99 | any | coordinator | gone`).", encoding="utf-8")
    (tmp_path / "promises.txt").write_text("withdrawn:\nrow 99 | any | coordinator | gone\n", encoding="utf-8")
    monkeypatch.setattr(promises, "ROOT", tmp_path)
    monkeypatch.setattr(promises, "FILE", tmp_path / "promises.txt")
    assert promises.problems(set()) == []
