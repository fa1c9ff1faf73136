"""The benchmarks' harness: what counts as a sample, and that no figure of a wrong answer gets out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from measure import report
from measure.picture import draw
from measure.rounds import Plan, Row, measure, samples_us
from measure.strangers import Strangers
from measure.teams import TeamError, python_path
from measure.worker import Timing

PLAN = Plan(rounds=5, round_s=0.001)


class FakeTeam:
    """Two ranks that take 1 and 2 us a call; `problems` are the answers of check, call by call."""

    def __init__(self, names: list[str], problems: dict[str, list[str | None]] | None = None, fails: str = "") -> None:
        self.name = "fake"
        self.names, self.problems, self.fails = names, problems or {}, fails
        self.asked: list[tuple[str, Any]] = []

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        self.asked.append((method, arguments))
        if method == self.fails:
            raise TeamError("fake: a rank ended")
        if method == "prepare":
            return [self.names] * 2
        if method == "check":
            problems = self.problems.get(arguments[0])
            return [None, problems.pop(0) if problems else None]
        return [Timing(elapsed_s=us * 1e-6 * arguments[1]) for us in (1, 2)]


def test_the_slowest_rank_counts_and_all_ranks_make_as_many_calls() -> None:
    team = FakeTeam(["one", "other"])
    row = measure([team], {}, PLAN)
    assert row.us == {"one": [pytest.approx(2.0)] * 5, "other": [pytest.approx(2.0)] * 5}
    assert row.calls["one"] == 500  # a millisecond's
    assert [arguments[0] for method, arguments in team.asked if method == "run"][-4:] == [
        "other",
        "one",
        "one",
        "other",
    ]


def test_moments_give_a_sample_for_each_call() -> None:
    timings = [Timing(starts_ns=[0, 10_000]), Timing(ends_ns=[2_000, 11_000]), Timing(ends_ns=[1_000, 15_000])]
    assert samples_us(timings, 2) == [2.0, 5.0]


@pytest.mark.parametrize("answers", [["off by one"], [None, "off by one"]], ids=["before", "after"])
def test_a_wrong_answer_has_no_figures(answers: list[str | None], capsys: pytest.CaptureFixture[str]) -> None:
    row = measure([FakeTeam(["right", "wrong"], {"wrong": answers})], {"bytes": 1024}, PLAN)
    assert set(row.us) == {"right"}
    assert row.wrong == {"wrong": "off by one"}
    report.print_rows("title", [row], lambda row: "column", [("wrong", "right")])
    printed = capsys.readouterr().out
    assert "no figures of wrong, column: off by one" in printed
    assert "÷" not in printed


@pytest.mark.parametrize("method", ["prepare", "check", "run"])
def test_a_team_that_fails_is_dropped(method: str) -> None:
    teams = [FakeTeam(["broken"], fails=method), FakeTeam(["sound"])]
    row = measure(teams, {}, PLAN)
    assert set(row.us) == {"sound"}
    assert len(teams) == 1
    assert "a rank ended" in next(iter(row.wrong.values()))


def test_slow_cases_get_fewer_rounds_but_three() -> None:
    assert len(measure([FakeTeam(["one"])], {}, Plan(rounds=30, round_s=10.0, case_s=0.001)).us["one"]) == 3


def test_what_this_process_does_is_no_strangers_work() -> None:
    strangers, everybody = Strangers([]), Strangers([])
    everybody.pids = []
    everybody.before_s = everybody._others_s()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    others, all_of_it = strangers.cores(), everybody.cores()
    assert others is not None
    assert all_of_it is not None
    assert all_of_it - others > 0.1


def test_ratios_and_percentiles() -> None:
    row = Row({}, {"ours": [1.0, 2.0, 9.0], "peer": [4.0]})
    assert report.ratio(row, "ours", "peer") == 0.5
    assert report.ratio(row, "ours", "absent") is None
    assert report.p99(range(1, 1001)) == 991
    assert report.bandwidths("all_reduce", 1 << 20, 1048.576, 4) == (pytest.approx(1.0), pytest.approx(1.5))


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (12345.6, "12,346"), (99.44, "99.4"), (1.234, "1.23"), (0.01234, "0.0123")]
)
def test_figures_have_three_digits(value: float | None, shown: str) -> None:
    assert report.figure(value) == shown


@pytest.mark.parametrize(("size", "name"), [(1 << 10, "1 KiB"), (3 << 20, "3 MiB"), (1000, "1000 B"), (0, "0 B")])
def test_names_of_sizes(size: int, name: str) -> None:
    assert report.size_name(size) == name


def test_the_json_tells_machine_and_commit(tmp_path: Path) -> None:
    file = tmp_path / "new" / "found.json"
    report.write_json(file, [Row({"bytes": 1}, {"one": [1.23456]})], {"rounds": 1})
    content = json.loads(file.read_text())
    assert content["rows"][0]["us"] == {"one": [1.235]}
    assert content["machine"]["processor"]
    assert content["commit"]


def test_a_machine_without_git_has_the_commit_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    assert report.commit() == "unknown"
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc+")
    assert report.commit() == "abc+"


def test_folders_go_before_those_of_the_callers_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/wheels:/more")
    assert python_path(Path("/ours")) == "/ours:/wheels:/more"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path(Path("/ours"), Path("/own")) == "/ours:/own"


def test_a_picture_has_a_line_for_each_candidate() -> None:
    lines = {"ours": [(1024, 1.0), (4096, 2.0)], "peer & co": [(1024, 3.0), (4096, 5.0)]}
    svg = draw([("title", lines), ("empty", {})], ["ours"])
    assert svg.count("<polyline") == 2
    assert "peer &amp; co" in svg
    assert "4 KiB" in svg
