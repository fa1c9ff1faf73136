from __future__ import annotations

from pathlib import Path

import pytest

from tests import promises

pytestmark = pytest.mark.slow

KILLED = "tests/failure/test_killed.py::test_row_03_in_every_operation[send_object-gloo]"
OF_A_ROW = "tests/failure/test_mismatches.py::test_rows_06_to_10_calls_that_differ[row 8: reductions-shared memory]"
OVER_TORCH = "tests/failure/test_c10d.py::test_row_46_as_row_03_in_every_operation[gather]"
ELSEWHERE = "tests/contract/test_usage_errors.py::test_a_mistake_of_one_rank_is_its_own[hierarchical-3]"


def test_what_ids_promise() -> None:
    found = promises.promises_of([KILLED, OF_A_ROW, OVER_TORCH, ELSEWHERE])
    assert "row 03 | gloo | coordinator | send_object" in found
    assert "row 08 | shared memory | coordinator | row 8: reductions" in found
    assert not any(line.startswith("row 06") for line in found)
    assert "row 46 | any | torch.distributed | gather" in found
    assert "row 43 | hosts | coordinator | 3" in found


def test_digests_promise_each_call_and_dtype() -> None:
    found = promises.promises_of(["tests/contract/test_digests.py::test_bits_are_the_stored_ones[shared_memory 0-0]"])
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


def test_a_line_that_changelog_quotes_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "CHANGELOG.md").write_text("- Row 99 went (`row 99 | any | coordinator | gone`).", encoding="utf-8")
    (tmp_path / "promises.txt").write_text("withdrawn:\nrow 99 | any | coordinator | gone\n", encoding="utf-8")
    monkeypatch.setattr(promises, "ROOT", tmp_path)
    monkeypatch.setattr(promises, "FILE", tmp_path / "promises.txt")
    assert promises.problems(set()) == []
