from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu.report import Recorder, Report

pytestmark = pytest.mark.slow
MACHINE = {"gpu": "NVIDIA H200 (a | b)", "torch": "2.11.0+cu130", "driver": None, "commit": "abc"}


def phase(name: str, when: str, outcome: str, longrepr: Any = "", **found: Any) -> Any:
    return SimpleNamespace(
        nodeid=f"tests/gpu/{name}", when=when, outcome=outcome, duration=0.5, longrepr=longrepr,
        longreprtext=longrepr if isinstance(longrepr, str) else "", user_properties=list(found.items()),
    )  # fmt: skip


def told(recorder: Recorder, name: str, *phases: tuple[str, str, Any], **found: Any) -> None:
    for when, outcome, longrepr in phases:
        recorder.pytest_runtest_logreport(phase(name, when, outcome, longrepr, **found))


PASSED = (("setup", "passed", ""), ("call", "passed", ""), ("teardown", "passed", ""))
SKIPPED = (("setup", "skipped", ("file", 1, "Skipped: needs | more")), ("teardown", "passed", ""))
FAILED = (("setup", "passed", ""), ("call", "failed", "def test()\nassert 1 == 2"), ("teardown", "passed", ""))
UNSTARTED = (("setup", "failed", "no ranks"), ("teardown", "passed", ""))
UNENDED = (("setup", "passed", ""), ("call", "passed", ""), ("teardown", "failed", "left behind"))


def test_outcomes_reasons_and_figures(tmp_path: Path) -> None:
    recorder = Recorder(Report(MACHINE, tmp_path / "new"))
    told(recorder, "test_a.py::test_one", *PASSED, MiB=[1, 2])
    for name, phases in (("skipped", SKIPPED), ("failed", FAILED), ("unstarted", UNSTARTED), ("unended", UNENDED)):
        told(recorder, f"test_a.py::test_{name}", *phases)
    recorder.pytest_deselected([phase(f"test_b.py::test_{n}", "", "") for n in range(3)])
    recorder.pytest_deselected([phase("test_a.py::test_one", "", "")])
    recorder.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    path = recorder.report.path
    assert path.name.startswith("nvidia-h200-a-b-2")
    content = json.loads(path.read_text())
    assert content["outcomes"] == {"passed": 1, "skipped": 1, "failed": 3}
    assert content["complete"]
    assert content["left_out"] == 3
    assert content["machine"] == MACHINE
    one, skipped, failed, unstarted, unended = content["checks"]
    assert one["found"] == {"MiB": [1, 2]}
    assert one["seconds"] == 1.5
    assert skipped["reason"] == "needs | more"
    assert failed["reason"].endswith("assert 1 == 2")
    assert (unstarted["outcome"], unended["outcome"]) == ("failed", "failed")
    text = path.with_suffix(".md").read_text()
    assert "3 failed, 1 passed, 1 skipped. 3 tests were not asked for." in text
    assert "| test_a.py::test_failed | failed | 1.5 | abc | assert 1 == 2 |" in text
    assert "| test_a.py::test_skipped | skipped | 1.0 | abc | needs \\| more |" in text
    assert "| test_a.py::test_one | passed | 1.5 | abc | MiB: [1, 2] |" in text
    assert "| gpu | NVIDIA H200 (a \\| b) |" in text


def test_a_part_of_the_tests_adds_to_the_days_report(tmp_path: Path) -> None:
    first = Recorder(Report(MACHINE, tmp_path))
    told(first, "test_a.py::test_one", *PASSED)
    told(first, "test_a.py::test_other", *FAILED)
    second = Recorder(Report(MACHINE, tmp_path))
    told(second, "test_a.py::test_other", *PASSED)
    content = json.loads(second.report.path.read_text())
    assert [(check["name"], check["outcome"]) for check in content["checks"]] == [
        ("test_a.py::test_one", "passed"),
        ("test_a.py::test_other", "passed"),
    ]
    assert content["checks"][1]["reason"] == ""


def test_another_commits_run_adds_to_the_days_report(tmp_path: Path) -> None:
    first = Recorder(Report(MACHINE, tmp_path))
    told(first, "test_a.py::test_one", *FAILED)
    told(first, "test_a.py::test_third", *PASSED)
    for test in ("one", "other"):
        another = Recorder(Report({**MACHINE, "commit": "another"}, tmp_path))
        told(another, f"test_a.py::test_{test}", *PASSED)
    assert another.report.path == first.report.path
    found = json.loads(another.report.path.read_text())["checks"]
    assert [(each["name"], each["outcome"], each["commit"]) for each in found] == [
        ("test_a.py::test_one", "passed", "another"),
        ("test_a.py::test_third", "passed", MACHINE["commit"]),
        ("test_a.py::test_other", "passed", "another"),
    ]


def test_another_machines_report_of_the_day_is_kept(tmp_path: Path) -> None:
    first = Recorder(Report({**MACHINE, "driver": "1"}, tmp_path))
    told(first, "test_a.py::test_one", *FAILED)
    second = Recorder(Report({**MACHINE, "driver": "2"}, tmp_path))
    told(second, "test_a.py::test_one", *PASSED)
    assert second.report.path.name == first.report.path.stem + "-2.json"
    (check,) = json.loads(first.report.path.read_text())["checks"]
    assert check["outcome"] == "failed"


def session(*arguments: str) -> Any:
    return SimpleNamespace(config=SimpleNamespace(args=arguments))


def test_a_run_of_names_says_that_there_are_others(tmp_path: Path) -> None:
    for arguments, by_name in ((["a.py::b"], True), (["a.py::c"], True), (["tests/gpu"], False), (["a.py::b"], False)):
        recorder = Recorder(Report(MACHINE, tmp_path))
        recorder.pytest_collection_finish(session(*arguments))
        told(recorder, "test_a.py::test_one", *PASSED)
        recorder.pytest_sessionfinish(pytest.ExitCode.OK)
        content = json.loads(recorder.report.path.read_text())
        assert content["complete"]
        assert content["by_name"] == by_name
        text = recorder.report.path.with_suffix(".md").read_text()
        assert ("Only tests that were asked for by name ran." in text) == by_name


def test_a_part_doesnt_hide_that_an_earlier_run_was_cut_off(tmp_path: Path) -> None:
    told(Recorder(Report(MACHINE, tmp_path)), "test_a.py::test_one", *PASSED)
    second = Recorder(Report(MACHINE, tmp_path))
    told(second, "test_a.py::test_other", *PASSED)
    second.pytest_sessionfinish(pytest.ExitCode.OK)
    assert not json.loads(second.report.path.read_text())["complete"]


def test_checks_under_mps_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(Report(MACHINE, tmp_path))
    told(recorder, "test_a.py::test_one[2]", *FAILED)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    told(Recorder(Report(MACHINE, tmp_path)), "test_a.py::test_one[2]", *PASSED)
    content = json.loads(recorder.report.path.read_text())
    assert [(check["name"], check["outcome"]) for check in content["checks"]] == [
        ("test_a.py::test_one[2]", "failed"),
        ("test_a.py::test_one[2] under MPS", "passed"),
    ]


def test_a_run_that_is_killed_leaves_what_it_found_and_where_it_was(tmp_path: Path) -> None:
    recorder = Recorder(Report(MACHINE, tmp_path))
    told(recorder, "test_a.py::test_one", *PASSED)
    recorder.pytest_runtest_logstart("tests/gpu/test_a.py::test_two")
    recorder.pytest_runtest_logreport(phase("test_a.py::test_two", "setup", "passed"))
    content = json.loads(recorder.report.path.read_text())
    assert not content["complete"]
    assert content["outcomes"] == {"passed": 1, "running": 1}
    assert "| test_a.py::test_two | running | 0.0 |" in recorder.report.path.with_suffix(".md").read_text()
    assert "The run didn't come to its end." in recorder.report.path.with_suffix(".md").read_text()


def test_nothing_is_written_where_nothing_ran(tmp_path: Path) -> None:
    recorder = Recorder(Report(MACHINE, tmp_path))
    for nodeid in ("tests/gpu/test_a.py::test_skipped", "tests/unit/test_b.py::test_two"):
        recorder.pytest_runtest_logstart(nodeid)
    told(recorder, "test_a.py::test_skipped", *SKIPPED)
    recorder.pytest_runtest_logreport(SimpleNamespace(nodeid="tests/unit/test_b.py::test_two", when="teardown"))  # type: ignore[arg-type]
    recorder.pytest_sessionfinish(pytest.ExitCode.OK)
    assert not list(tmp_path.iterdir())
