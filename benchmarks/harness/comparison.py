"""Compares this library with other installed libraries and writes a report page.

    python benchmarks/report.py --report DIR              about five minutes on two cores
    python benchmarks/report.py --quick --report DIR      few sizes, half a minute
    python benchmarks/report.py --against COMMIT          ratios of this tree to another commit

Measures collectives (on GPUs if there are any, else in shared memory), objects and tensor dicts, the same calls of
torch.distributed over its backend "parallel_state" and over gloo, and start-up.

The other libraries are gloo through torch.distributed; on GPUs NCCL, directly and through torch; the MPI of this
Python's mpi4py; and what `python benchmarks/harness/peers.py setup` installs. DIR gets index.html, report.svg,
table.txt (nccl-tests' table) and report.json.

The exit code is 1 if a candidate failed or an answer was wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from device_communicators.base.errors import InvalidArgumentError, SettingError
from device_communicators.base.interrupts import report_end, signals_wait
from harness import page, ranks
from harness.collectives import VLLM
from harness.messages import ZMQ, case_bytes
from harness.page import Findings
from harness.peers import DEFAULT, SETUP, SIZES_OF_VLLM, Peers
from harness.rounds import Plan, RankRow, Row, measure_all
from harness.teams import Team, started
from harness.through_torch import BACKENDS, CALLS, ENVIRONMENTS, STEPS, load
from parallel_state.startup import environment
from parallel_state.tools.bench import ranks as in_ranks
from parallel_state.tools.bench.command import QUICK_SIZES, SIZES, add_cases, complete
from parallel_state.tools.bench.progress import Progress
from parallel_state.tools.bench.report import circumstances, recorded
from parallel_state.tools.bench.rounds import GLOO, OPERATIONS, OWN

PROGRAM = "python benchmarks/report.py"
PARTS = ("collectives", "messages", "torch", "start-up")
QUICK_OPERATIONS = ("all_reduce", "all_gather")
ONLY = ("coordinator, in place", "coordinator", "symmetric op, in place", GLOO, "vLLM op, in place", VLLM)
PLAN = Plan(rounds=30, round_s=0.005, case_s=4.0, repeat_s=90.0)
QUICK_PLAN = Plan(rounds=10, round_s=0.002, case_s=0.5, repeat_s=6.0)
RUN_S, QUICK_RUN_S = 300.0, 30.0
"""On a slow machine cases get fewer rounds, so that a run takes about as long as the help says."""
STAGE_S = 6.0
"""Expected time to start the teams of a stage."""
STARTS = 5
MODULES = "harness"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=formatter)
    parser.add_argument("--report", type=Path, metavar="DIR", help="where the page goes; without it, the table only")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    add_cases(parser, OPERATIONS)
    parser.add_argument("--peers", type=Path, default=DEFAULT, metavar="DIR", help=f"where `{SETUP}` put them")
    parser.add_argument("--no-peers", action="store_true", help="torch.distributed only")
    parser.add_argument("--against", metavar="COMMIT", help="this tree's collectives beside that commit's, in turns")
    options = parser.parse_args(arguments)
    if (problem := complete(options)) is not None:
        parser.error(problem)
    try:
        if environment.detect(rendezvous=False).world_size > 1:
            parser.error("it starts ranks of its own; under torchrun there is benchmarks/collectives.py")
    except SettingError as error:
        parser.error(str(error))
    if options.against and (options.report is not None or options.device != "cpu" or options.parts != PARTS):
        parser.error("--against prints ratios of the collectives on the CPU: leave out --report and --parts")
    if options.report is not None and (problem := page.problem_of(options.report)) is not None:
        parser.error(f"--report: {problem}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    if options.against:
        return _compare(options)
    findings = Findings(
        {
            **circumstances(),
            "settings": recorded(options),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "command": " ".join([PROGRAM, *_without_paths(words)]),
        }
    )
    try:
        Bench(options, findings).run()
    except KeyboardInterrupt as end:
        findings.interrupted = report_end(PROGRAM, end)
    written = ""
    if options.report is not None:
        with signals_wait():
            written = _write(options.report, findings)
    print(page.table(findings.part("collectives")), end="")
    for _, text in page.notices(findings):
        print(text)
    for name, reason in findings.left_out.items():
        print(f"left out: {name}: {reason}")
    if written:
        print(written)
    return findings.interrupted or int(bool(findings.wrong))


def _compare(options: argparse.Namespace) -> int:
    from harness import against

    plan = replace(QUICK_PLAN if options.quick else PLAN, rounds=20 if options.quick else 60)
    try:
        rows = against.measure(options.against, cases_of(options), options.ranks, {"only": ONLY}, plan)
    except InvalidArgumentError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    lines, code = against.report(rows)
    print("\n".join(lines))
    return code


def cases_of(options: argparse.Namespace) -> list[dict[str, object]]:
    operations = options.operations or (QUICK_OPERATIONS if options.quick else OPERATIONS)
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    return in_ranks.cases_of(operations, sizes, options.ranks, options.dtype)


def _without_paths(words: Sequence[str]) -> list[str]:
    after = ("", *words)
    return ["DIR" if before in ("--report", "--peers") else word for before, word in zip(after, words, strict=False)]


def _write(folder: Path, findings: Findings) -> str:
    before = page.date_of(folder)
    if findings.interrupted and (before is not None or not findings.rows):
        return f"nothing was written to {folder}" + (f": the report of {before} stays" if before else "")
    page.write(folder, findings)
    return f"{folder / 'index.html'}" + (f" (replaced the report of {before})" if before else "")


class Stage(NamedTuple):
    teams: Callable[[], list[Team]]
    cases: Sequence[dict[str, Any]]


class Bench:
    def __init__(self, options: argparse.Namespace, findings: Findings) -> None:
        self.options, self.findings = options, findings
        self.plan = QUICK_PLAN if options.quick else PLAN
        self.peers = Peers(options.peers.resolve(), with_own_mpi=not options.no_peers)
        self.settings = {"vllm": str(self.peers.root), "site": str(self.peers.site), "only": ONLY}
        self.starts: dict[str, list[float]] = {}
        self.until = time.monotonic() + (QUICK_RUN_S if options.quick else RUN_S)

    def run(self) -> None:
        if self.options.no_peers:
            self.findings.left_out["vLLM, zmq, MPI"] = "--no-peers"
        else:
            for name in self.peers.missing():
                self.findings.left_out[name] = f"not there: {SETUP}"
        parts = {"collectives": self.collectives, "messages": self.messages, "torch": self.through_torch}
        if self.options.device == "cuda":
            del parts["collectives"]
            if "collectives" in self.options.parts:
                self.collectives_on_gpus()
        stages = [part() for name, part in parts.items() if name in self.options.parts]
        if "start-up" in self.options.parts:  # restarts; the first collective checks each start
            count = 1 if self.options.quick else STARTS
            count -= bool(stages) and parts.get(self.options.parts[0]) == self.collectives
            stages += [Stage(self._teams_of_collectives, ())] * count
        self.progress = Progress(sum(self._expected_s(stage) for stage in stages))
        try:
            for at, stage in enumerate(stages):
                later_s = sum(self._expected_s(each) for each in stages[at + 1 :])
                if stage.cases or not self.starts or time.monotonic() < self.until:
                    self._measure(stage, later_s)
        finally:
            self.progress.hide()
            if self.starts and "start-up" in self.options.parts:
                case = {"part": "start-up", "ranks": self.options.ranks}
                self.findings.rows.append(Row(case, us=self.starts))

    def _expected_s(self, stage: Stage) -> float:
        return STAGE_S + len(stage.cases) * self.plan.case_s

    def collectives(self) -> Stage:
        return Stage(self._teams_of_collectives, cases_of(self.options))

    def collectives_on_gpus(self) -> None:
        """Measures each communicator (NCCL, ours, torch's) on GPUs, by `ranks.main`. Not tested on a GPU yet."""
        options = argparse.Namespace(**vars(self.options))
        options.rounds, options.round_ms, options.case_s = self.plan.rounds, self.plan.round_s * 1e3, self.plan.case_s
        options.ranks, options.modes, options.svg = [self.options.ranks], list(ranks.MODES), None
        options.operations = [
            each
            for each in self.options.operations or (QUICK_OPERATIONS if self.options.quick else ranks.OPERATIONS)
            if each in ranks.OPERATIONS
        ]
        options.sizes = self.options.sizes or (QUICK_SIZES if self.options.quick else ranks.SIZES)
        with tempfile.TemporaryDirectory(prefix="bench_") as folder:
            options.json = Path(folder) / "found.json"
            try:
                ranks.main(options)
            finally:
                if options.json.exists():
                    content = json.loads(options.json.read_text())
                    self.findings.used[OWN] = content["settings"]["route"]
                    self.findings.used[ranks.TORCH] = f"NCCL {content['settings'].get('nccl', '')}"
                    for row in content["rows"]:
                        case = {**row.pop("case"), "part": "collectives", "device": content["settings"]["device"]}
                        self.findings.rows.append(RankRow(case, **row))

    def messages(self) -> Stage:
        common = {"part": "messages", "readers": self.options.ranks - 1, "idle_ms": 0, "most_calls": 60}
        objects = ("1 KB", "10 KB") if self.options.quick else ("1 KB", "10 KB", "1 MB many", "1 MB blob")
        cases = [{**common, "kind": "object", "what": what} for what in objects]
        if not self.options.quick:
            cases.append({**cases[0], "idle_ms": 5, "most_calls": 10})
        cases += [{**common, "kind": kind, "what": "decode"} for kind in ("pipeline", "broadcast")]
        cases += [{**common, "kind": kind, "what": "prefill"} for kind in ("pipeline", "broadcast")]
        cases = [case for case in cases if case["kind"] != "pipeline" or self.options.ranks == 2]
        for case in cases:
            case["bytes"] = case_bytes(case["kind"], case["what"])
        with_zmq = not self.options.no_peers and self.peers.site is not None
        names = [OWN, GLOO, *self._vllm(), *[ZMQ] * with_zmq]
        return Stage(lambda: [self._team(name, "messages") for name in names], cases)

    def through_torch(self) -> Stage:
        common = {"part": "torch", "ranks": self.options.ranks, "dtype": self.options.dtype}
        sizes = self.options.sizes or ((1 << 13,) if self.options.quick else (1 << 13, 1 << 20, 1 << 24))
        known = ("all_reduce",) if self.options.quick else ("all_reduce", "all_gather", "reduce_scatter")
        cases: list[dict[str, object]] = [
            {**common, "kind": kind, "operation": operation, "bytes": size}
            for operation in known
            if operation in (self.options.operations or known)
            for kind in (CALLS[:2] if self.options.quick else CALLS)  # a compilation takes seconds on each rank
            for size in sizes
        ]
        cases += [{**common, "kind": kind, "what": "21 M parameters"} for kind in STEPS if not self.options.quick]

        def teams() -> list[Team]:
            if not self.options.quick:
                load(OWN, {"compiled": True})
            return [self._team(name, "through_torch", environment=ENVIRONMENTS.get(name)) for name in BACKENDS]

        return Stage(teams, cases)

    def _vllm(self) -> list[str]:
        if self.options.no_peers or self.peers.vllm is None:
            return []
        if self.options.ranks not in SIZES_OF_VLLM:
            self.findings.left_out[VLLM] = f"its CPU ops know {SIZES_OF_VLLM} ranks, but not {self.options.ranks}"
            return []
        return [VLLM]

    def _team(self, name: str, module: str, **named: Any) -> Team:
        return Team(name, f"{MODULES}.{module}", self.options.ranks, self.settings, **named)

    def _teams_of_collectives(self) -> list[Team]:
        teams = [self._team(name, "collectives") for name in (OWN, GLOO, *self._vllm())]
        for mpi in self.peers.mpis if not self.options.no_peers else ():
            launcher = mpi.command(self.peers.root, self.options.ranks, [])
            teams.append(self._team(mpi.name, "mpi", launcher=launcher, environment=mpi.environment()))
        return teams

    def _measure(self, stage: Stage, later_s: float) -> None:
        """Measures one part of the report. Adds each row at once, so that an interrupted run keeps its rows. `later_s`:
        expected time of later parts; the time left is divided in proportion.
        """
        before = list(self.findings.rows)

        def keep(rows: list[Row]) -> None:
            self.findings.rows[:] = [*before, *rows]

        part = stage.cases[0]["part"] if stage.cases else "start-up"
        with started(stage.teams(), self.findings.left_out) as ready:
            self.progress.step(STAGE_S, part)
            for team in ready:
                if part in ("collectives", "start-up"):
                    self.starts.setdefault(team.name, []).append(team.start_s * 1e6)
                if part != "messages" and team.name not in self.findings.used:
                    self.findings.used[team.name] = str(team.ask("about")[0])
                self.findings.used.setdefault(team.name, "messages only")
            cases_s = len(stage.cases) * self.plan.case_s
            now = time.monotonic()
            until = now + (self.until - now) * cases_s / max(cases_s + later_s, 1e-9)
            share = replace(self.plan, repeat_s=self.plan.repeat_s / 2) if len(self.options.parts) > 1 else self.plan
            keep(measure_all(ready, stage.cases, share, keep, until, self.progress))
