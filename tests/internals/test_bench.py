from __future__ import annotations

import html
import io
import json
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command_line
import pytest
import torch
from harness import page, ranks
from harness.against import ratio_of
from harness.against import report as report_against
from harness.messages import COPY, SPEC_VIEWS, VIEWS, WITH_SPEC
from harness.page import SYMMETRIC, Findings
from harness.picture import Panel, draw
from harness.rounds import Plan, Row, Strangers, measure_all
from harness.teams import python_path
from harness.through_torch import CARRIED, LAYERS, OP, OP_AND_LAYERS

from parallel_state.tools.bench import command, progress, report
from parallel_state.tools.bench.progress import Progress
from parallel_state.tools.bench.rounds import OWN, TeamError, Timing, WrongAnswer, measure, samples_us

PLAN = Plan(rounds=5, round_s=0.001)


class FakeTeam:
    def __init__(self, names: list[str], problems: dict[str, list[str | None]] | None = None, fails: str = "") -> None:
        self.name, self.pids = "fake", []
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
    assert row.calls["one"] == 500
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
    row = Row(**vars(measure([FakeTeam(["right", "wrong"], {"wrong": answers})], {"bytes": 1024}, PLAN)))
    assert set(row.us) == {"right"}
    assert row.wrong == {"wrong": "off by one"}
    command_line.print_rows("title", [row], lambda row: "column", [("wrong", "right")])
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


@pytest.mark.slow
def test_what_this_process_does_is_no_strangers_work() -> None:
    strangers, everybody = Strangers([]), Strangers([])
    everybody.pids = []
    everybody.before_s = everybody._others_s()
    started, until = time.monotonic(), time.process_time() + 0.3
    while time.process_time() < until:
        pass
    others, all_of_it = strangers.cores(), everybody.cores()
    assert others is not None
    assert all_of_it is not None
    assert all_of_it - others > 0.2 / (time.monotonic() - started)


def test_ratios_and_percentiles() -> None:
    row = Row({}, {"ours": [1.0, 2.0, 9.0], "peer": [4.0]})
    assert command_line.ratio(row, "ours", "peer") == 0.5
    assert command_line.ratio(row, "ours", "absent") is None
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


@pytest.mark.slow
def test_folders_go_before_those_of_the_callers_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/wheels:/more")
    assert python_path(Path("/ours")) == "/ours:/wheels:/more"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path(Path("/ours"), Path("/own")) == "/ours:/own"


@pytest.mark.slow
def test_a_picture_has_a_line_for_each_candidate() -> None:
    lines = {"ours": [(1024, 1.0), (4096, 2.0)], "peer & co": [(1024, 3.0), (4096, 5.0)]}
    svg = draw([("title", lines), ("empty", {})], ["ours"])
    assert svg.count("<polyline") == 2
    assert "peer &amp; co" in svg
    assert "4 KiB" in svg


@pytest.mark.parametrize(
    ("operation", "factor"),  # factors of nccl-tests, doc/PERFORMANCE.md, for 8 ranks
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("broadcast", 1.0), ("all_to_all", 0.875)],
)
def test_bus_bandwidths_are_those_of_nccl_tests(operation: str, factor: float) -> None:
    algbw, busbw = report.bandwidths(operation, 1 << 20, 1048.576, 8)
    assert (algbw, busbw) == (pytest.approx(1.0), pytest.approx(factor))
    assert report.nccl_bytes(operation, 1 << 20, 8) == (8 << 20 if operation == "all_gather" else 1 << 20)


def test_the_table_of_every_installation_has_ratios_and_bandwidths() -> None:
    case = {"operation": "all_reduce", "bytes": 1 << 20, "ranks": 2, "dtype": "bfloat16"}
    us = {"parallel_state": [2000.0], "parallel_state in place": [1048.576], "torch over gloo": [2097.152]}
    lines = command.table([Row(case, us), Row({**case, "operation": "object"}, us, wrong={"other": "its answer"})])
    assert lines[1] == "all_reduce, 2 ranks, bfloat16: us"
    assert lines[3].split() == ["1", "MiB", "2,000", "1,049", "2,097", "1,049", "0.50", "1.00", "1.00"]
    assert lines[7].split()[-3:] == ["0.50", "–", "–"]
    assert lines[8] == "no figures of other: its answer"


def test_a_graph_of_several_calls_gives_the_time_of_those_that_were_asked_for() -> None:
    team, replays = object.__new__(ranks.Ranks), []
    graph, call = SimpleNamespace(replay=lambda: replays.append(1)), torch.neg
    team._graphs = {call: (graph, 20)}
    team.clock = SimpleNamespace(seconds=lambda run: (run(), 2.0 * len(replays))[1])
    assert team._run_tight(call, torch.ones(1), 18) == pytest.approx(1.8)
    assert len(replays) == 1
    replays.clear()
    assert team._run_tight(call, torch.ones(1), 21) == pytest.approx(2.1)
    assert len(replays) == 2


def busy_machine(monkeypatch: pytest.MonkeyPatch, cores: list[float]) -> None:
    monkeypatch.setattr(Strangers, "cores", lambda self: cores.pop(0))


@pytest.mark.slow
def test_a_disturbed_case_is_measured_again_and_the_quietest_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    busy_machine(monkeypatch, [0.0, 0.9, 0.5, 0.7, 0.05])
    plan = Plan(rounds=3, round_s=0.001, repeat_s=60.0)
    rows = measure_all([FakeTeam(["one"])], [{"bytes": 1}, {"bytes": 2}], plan)
    assert [(row.strangers_cores, row.repeats) for row in rows] == [(0.0, 0), (0.05, 3)]
    assert rows[1].case == {"bytes": 2}


@pytest.mark.slow
def test_a_machine_that_stays_busy_ends_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    busy_machine(monkeypatch, [1.0] * 4)
    (row,) = measure_all([FakeTeam(["one"])], [{}], Plan(rounds=3, round_s=0.001, repeat_s=60.0))
    assert (row.repeats, row.disturbed) == (3, True)
    busy_machine(monkeypatch, [1.0])
    (row,) = measure_all([FakeTeam(["one"])], [{}], Plan(rounds=3, round_s=0.001, repeat_s=0.0))
    assert row.repeats == 0


@pytest.mark.slow
def test_a_run_without_time_left_measures_three_rounds_of_each_case() -> None:
    team = FakeTeam(["one"])
    rows = measure_all([team], [{}, {}], Plan(rounds=30, round_s=0.001, repeat_s=60.0), until=time.monotonic())
    assert [len(row.us["one"]) for row in rows] == [3, 3]


def test_progress_has_the_time_left_and_a_line_each_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = Progress(40.0, stream)
    assert shown.left_s == 40.0
    for step in ("first", "second", "third"):
        clock[0] += 8.0
        shown.step(4.0, step)
    shown.hide()
    assert stream.getvalue() == "20 %, about 64 s left: second\n"
    assert shown.left_s == 28.0 * 2


def test_progress_on_a_terminal_is_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    shown = Progress(40.0, stream)
    shown.step(20.0, "messages")
    shown.hide()
    assert "50 %" in stream.getvalue() and "left: messages" in stream.getvalue()
    assert all(len(line) < 160 for line in stream.getvalue().splitlines())


def findings(**changes: Any) -> Findings:
    about = {**report.circumstances(), "settings": {"ranks": 2}, "date": "2030-01-01 00:00 UTC", "command": "bench <x>"}
    case = {"part": "collectives", "ranks": 2, "dtype": "bfloat16", "operation": "all_gather", "bytes": 1 << 20}
    us = {"coordinator": [1048.576] * 3, "gloo": [2097.152] * 3}
    row = Row(case, us, strangers_cores=changes.pop("cores", 0.0), wrong=changes.pop("wrong", {}))
    return Findings(about, [row], {"parallel_state": "route", "gloo": "gloo <1>"}, {"vLLM": "no AVX-512 & more"})


@pytest.mark.slow
def test_the_table_is_nccl_tests() -> None:
    found = findings().rows
    lines = page.table(found).splitlines()
    assert lines[0] == "# all_gather, 2 ranks: parallel_state"
    assert [line.split() for line in lines if not line.startswith("#") and line] == [
        ["2097152", "524288", "bfloat16", "none", "1048.58", "2.00", "1.00", "0", "N/A", "N/A", "N/A", "N/A"],
        ["2097152", "524288", "bfloat16", "none", "2097.15", "1.00", "0.50", "0", "N/A", "N/A", "N/A", "N/A"],
    ]


@pytest.mark.slow
def test_all_reduce_of_peers_is_in_place_and_wrong_elements_are_counted() -> None:
    found = findings(wrong={"Intel MPI": WrongAnswer.of(7, "7 are off"), "vLLM op, in place": "it raised"})
    found.rows[0].case["operation"] = "all_reduce"
    found.rows[0].us = {"coordinator": [1.0], "coordinator, in place": [1.0], "gloo": [1.0]}
    figures = {(each.library, each.in_place): each.wrong for each in page.measured(found.rows[0])}
    ours = {("parallel_state", False): 0, ("parallel_state", True): 0}
    assert figures == {**ours, ("gloo", True): 0, ("Intel MPI", True): 7, ("vLLM", True): 1}
    assert ("bad", "2 candidates failed or gave wrong answers: see the page's end.") in page.notices(found)


@pytest.mark.slow
def test_ranks_on_gpus_have_a_table_for_each_mode() -> None:
    case = {"part": "collectives", "ranks": 8, "dtype": "bfloat16", "operation": "all_reduce", "bytes": 1024}
    names = ("parallel_state, eager", "parallel_state, in place, eager", "nccl, eager", "torch.distributed, eager")
    row = Row({**case, "device": "a GPU"}, {name: [1.0] for name in names})
    assert [(each.library, each.mode, each.in_place) for each in page.measured(row)] == [
        ("parallel_state", "eager", False),
        ("parallel_state", "eager", True),
        ("nccl", "eager", False),
        ("torch.distributed", "eager", True),
    ]
    assert page.size_of(row) == 1024
    heads = [line for line in page.table([row]).splitlines() if "ranks" in line]
    assert heads[0] == "# all_reduce, 8 ranks: parallel_state, eager"
    assert len(heads) == 3


@pytest.mark.parametrize(
    ("cores", "said"), [(0.0, "The machine was quiet"), (1.5, "This machine was busy: others used")]
)
@pytest.mark.slow
def test_the_page_says_first_whether_the_machine_was_quiet(cores: float, said: str) -> None:
    text = page.page(findings(cores=cores))
    assert text.index(said) < text.index("<h2>")
    assert "left out: no AVX-512 &amp; more" in text
    assert "bench &lt;x&gt;" in text
    assert '<span class="faster">0.50</span>' in text
    assert text.count("<polyline") == 4


@pytest.mark.slow
def test_a_report_replaces_one_of_its_own_only(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    assert page.problem_of(folder) is None
    page.write(folder, findings())
    assert {each.name for each in folder.iterdir()} == set(page.FILES)
    assert page.date_of(folder) == "2030-01-01 00:00 UTC"
    assert page.problem_of(folder) is None
    (folder / "report.json").write_text('{"benchmark": "another"}')
    assert "would be overwritten" in str(page.problem_of(folder))
    assert "is no folder" in str(page.problem_of(folder / "report.json"))
    assert "is no folder" in str(page.problem_of(folder / "report.json" / "below"))


@pytest.mark.slow
def test_the_interval_of_a_ratio_holds_what_the_rounds_leave_open() -> None:
    chance = random.Random(1)
    before = [100 * chance.uniform(0.95, 1.05) for _ in range(60)]
    same = ratio_of([100 * chance.uniform(0.95, 1.05) for _ in range(60)], before)
    assert same.low < 1 < same.high
    assert not same.is_slower
    slower = ratio_of([each * 1.1 for each in before], before)
    assert slower.value == pytest.approx(1.1)
    assert slower.low <= slower.value <= slower.high
    assert slower.is_slower
    assert not ratio_of([each * 1.02 for each in before], before).is_slower
    assert ratio_of(before, before) == (1.0, 1.0, 1.0), "rounds go in pairs"


@pytest.mark.slow
def test_a_version_that_became_slower_is_named_and_gives_the_exit_code() -> None:
    case = {"operation": "all_reduce", "bytes": 8192, "part": "collectives"}
    quick, slow = [10.0, 10.1, 9.9] * 10, [11.0, 11.1, 10.9] * 10
    row = Row(case, us={"now: op": slow, "before: op": quick, "now: new": quick})
    lines, code = report_against([row])
    assert code == 1
    assert "slower, the interval lies above 1.03: all_reduce 8 KiB, op" in lines
    assert sum("all_reduce 8 KiB" in line for line in lines) == 2, "what one version lacks has no ratio"
    lines, code = report_against([Row(case, us={"now: op": quick, "before: op": slow})])
    assert (lines[-1], code) == ("no interval lies above 1.03", 0)
    row.wrong["before: op"] = "the answer is wrong"
    assert "wrong: before: op: the answer is wrong" in report_against([row])[0]


@pytest.mark.slow
def test_variants_and_lower_bounds_are_not_judged() -> None:
    found = findings()
    names = (OWN, OP, OP_AND_LAYERS, LAYERS, CARRIED, COPY, VIEWS, "gloo")
    case = {"part": "torch", "kind": "dist", "operation": "all_reduce", "bytes": 8192}
    found.rows.append(Row(case, {name: [2.0] for name in names}))
    text = page.page(found)
    table = text[text.index("dist, all_reduce, 8 KiB") :]
    table = table[: table.index("</table>")]
    judged = {line.split("</td>")[0]: "<span" in line for line in table.split("<tr><td>")[1:]}
    assert judged == {html.escape(name): name == "gloo" for name in names}
    assert table.count("lower bound") == 2


@pytest.mark.slow
def test_names_have_no_commas_which_separate_them_in_lists() -> None:
    assert not [name for name in (OP, OP_AND_LAYERS, CARRIED, VIEWS, SPEC_VIEWS, WITH_SPEC, SYMMETRIC) if "," in name]


@pytest.mark.slow
def test_every_line_of_a_picture_has_a_style_of_its_own() -> None:
    names = [f"{kind} {number}" for kind in ("ours", "peer") for number in range(12)]
    svg = draw([Panel("title", {name: [(1024, 1.0), (4096, 2.0)] for name in names})], names[:12])
    styles = re.findall(r'<polyline points="[^"]*" fill="none" (stroke="[^>]*)/>', svg)
    assert len(styles) == len(set(styles)) == len(names)


@pytest.mark.slow
def test_a_picture_names_its_axes_and_follows_the_scheme() -> None:
    svg = draw([Panel("title", {"ours": [(1024, 1.0), (4096, 2.0)]}, x_name="bytes of a message")], ["ours"])
    assert ">bytes of a message</text>" in svg
    assert "prefers-color-scheme:dark" in svg
    assert not re.findall(r'(?:fill|stroke)="#(?:24292f|dde1e6|eef1f4|57606a)', svg), "these follow the scheme"
    text = page.page(findings())
    assert "prefers-color-scheme:dark" in text and 'name="color-scheme" content="light dark"' in text
    assert text.count("<svg") == 2, "each panel scrolls by itself on a narrow screen"
