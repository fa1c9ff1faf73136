"""Runs the check on one rank."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import msgspec
import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.errors import LayoutError, ParallelStateError
from device_communicators.base.helper_threads import Call
from parallel_state.launch.launcher import launch
from parallel_state.layout.resolution import resolve_layout
from parallel_state.tools.check import links, system, traffic
from parallel_state.tools.check.evidence import Evidence
from parallel_state.tools.check.facts import ERROR, EXIT_CODES, Facts, Finding, Link, Measured, Traffic, worst
from parallel_state.tools.check.meeting import NotMetError, Plan, open_meeting
from parallel_state.tools.check.rules import finding, judge, sorted_by_severity

SCHEMA = "parallel_state check 1"
_PASSES = 2
"""Number of measurements of each link. The better one counts."""
_LINKS_S, _PAIR_S = 5.0, (0.03, 0.2)
_END_S = 1.5
"""Time reserved for the report and its acknowledgement."""
MOST_RANKS = 64
_START_S = 15.0
_SETTLE_S = 0.2


class Options(msgspec.Struct, frozen=True):
    sizes: dict[str, int] = {}
    order: str | None = None
    quick: bool = False
    timeout_s: float = 30.0


class Report(msgspec.Struct, dict=True):
    """The output of `check --json`. `schema`: version of the format. `complete`: True if each rank registered."""

    schema: str
    world_size: int
    sizes: dict[str, int]
    seconds: float
    complete: bool
    severity: str
    exit_code: int
    findings: list[Finding]
    hosts: dict[str, list[int]]
    ranks: list[Facts]
    """The keys of `measured` and `traffic` are positions in this list, from 1."""
    measured: dict[int, Measured]
    traffic: dict[int, Traffic]

    @cached_property
    def evidence(self) -> Evidence:
        return Evidence(self.ranks, self.world_size, self.sizes, None, self.measured, self.traffic)


@dataclass
class Outcome:
    exit_code: int
    report: Report | None = None
    """Set on the leader, and on a rank that couldn't reach the leader."""
    met: bool = True


@dataclass
class Session:
    """Runs the check on one rank. `run` ends at most `options.timeout_s` after `began`."""

    options: Options
    began: float = field(default_factory=time.monotonic)
    facts: Facts = field(default_factory=Facts)

    @property
    def deadline(self) -> float:
        return self.began + self.options.timeout_s

    def _until(self, share: float) -> float:
        return self.began + share * self.options.timeout_s

    def run(self) -> Outcome:
        self.facts = system.collect(max(self._until(0.4), time.monotonic() + 1.0))
        address = self.facts.network.gloo_address
        if not address:
            return self._run()
        with contextlib.closing(links.Listener(address)) as listener:
            self.facts.probe = listener.entry
            if listener.problem is not None:
                why = listener.problem.strerror or listener.problem
                self.facts.late["links"] = f"can't listen at {address}: {why}"
            return self._run()

    def _run(self) -> Outcome:
        place = self.facts.place
        try:
            self.meeting = open_meeting(place, max(self._until(0.5), time.monotonic() + 3.0))
        except NotMetError as error:
            return self.alone(finding(error.kind, str(error), [place.rank], [self.facts.network.hostname]))
        except (OSError, RuntimeError) as error:
            text = f"the store at {place.master_addr}:{place.master_port} failed: {str(error).splitlines()[0]}"
            return self.alone(finding("master-stranger", text, [place.rank], [self.facts.network.hostname]))
        try:
            self.meeting.arrive(self.facts)
            return self._lead() if self.meeting.leads else self._follow()
        except (dist.DistError, OSError) as error:
            problem = str(error).splitlines()[0]
            text = f"the store at {place.master_addr}:{place.master_port} stopped answering: {problem}"
            return self.alone(finding("rank-lost", text, [0] if not place.agent_store else []))

    def alone(self, *found: Finding) -> Outcome:
        evidence = Evidence(
            [self.facts], self.facts.place.world_size, self.options.sizes, self.options.order, met=False
        )
        if self.facts.place.problem:
            found = tuple(each for each in found if each.code != "environment")
        report = self.report(evidence, [*found, *judge(evidence)])
        return Outcome(report.exit_code, report, met=False)

    def _lead(self) -> Outcome:
        meeting, options = self.meeting, self.options
        meeting.put("left_s", self.deadline - time.monotonic())
        arrivals = meeting.gather(self.facts.place.world_size, max(self._until(0.5), time.monotonic() + 2.0))
        if self.facts.place.world_size > 1:
            time.sleep(_SETTLE_S)  # for surplus ranks
            arrivals = meeting.arrivals(arrivals)
        world_size = _most_common(arrivals)
        complete = sorted(each.place.rank for each in arrivals) == list(range(world_size))
        rounds = links.schedule(links.host_leaders(arrivals)) * _PASSES
        plan = Plan(arrivals, rounds)
        meeting.put("plan", plan)
        own = meeting.arrival
        measured = {own: self._measure(plan)}
        until = max(self._until(0.7), time.monotonic() + 2.0)
        measured |= meeting.take_all("measured", len(arrivals), Measured, until, skip=own)
        lost = {number: "measuring" for number in range(1, len(arrivals) + 1) if number not in measured}
        evidence = Evidence(arrivals, world_size, options.sizes, options.order, measured, {}, lost)
        go = complete and not any(each.severity == ERROR for each in judge(evidence))
        # Groups must have the same timeout on all ranks.
        left_s = round(max(2.0, self.deadline - _END_S - 0.5 - time.monotonic()), 3) if go else 0.0
        meeting.put("go", left_s)
        found: dict[int, Traffic] = {}
        if go:
            found = {own: self._send_traffic(left_s)}
            found |= meeting.take_all("traffic", len(arrivals), Traffic, self.deadline - _END_S, skip=own)
            for number in range(1, len(arrivals) + 1):
                if number not in found:
                    lost[number] = meeting.take(f"stage/{number}", str, time.monotonic()) or "nothing"
        arrivals = meeting.arrivals(arrivals)  # surplus ranks may have arrived meanwhile
        evidence = Evidence(arrivals, world_size, options.sizes, options.order, measured, found, lost)
        report = self.report(evidence, judge(evidence))
        meeting.put("end", report.exit_code)
        others = len(arrivals) - 1 - len(lost)
        meeting.meet("heard", 0, others, time.monotonic() + _END_S)
        return Outcome(report.exit_code, report)

    def _follow(self) -> Outcome:
        meeting = self.meeting
        left_s = meeting.take("left_s", float, time.monotonic() + 2.0)
        if left_s is not None:  # the leader's time limit counts: it may have been started later
            self.began = max(self.began, time.monotonic() + left_s - self.options.timeout_s)
        plan = meeting.take("plan", Plan, max(self._until(0.6), time.monotonic() + 2.0))
        if plan is None:
            return self.alone(finding("rank-lost", "the leader, which writes the report, stopped answering"))
        if meeting.arrival > len(plan.arrivals):  # this rank arrived too late; the report names it
            return self._receive_exit_code()
        meeting.put(f"measured/{meeting.arrival}", self._measure(plan))
        left_s = meeting.take("go", float, max(self._until(0.8), time.monotonic() + 2.0))
        if left_s:
            meeting.put(f"traffic/{meeting.arrival}", self._send_traffic(left_s))
        return self._receive_exit_code()

    def _receive_exit_code(self) -> Outcome:
        exit_code = self.meeting.take("end", int, self.deadline)
        if exit_code is None:
            return self.alone(finding("rank-lost", "the leader, which writes the report, stopped answering"))
        with contextlib.suppress(dist.DistError):  # the serving rank may exit once all have the exit code
            self.meeting.meet("heard", 1, 0, time.monotonic())
        return Outcome(exit_code)

    def _measure(self, plan: Plan) -> Measured:
        meeting, found = self.meeting, Measured()
        found.cpu_ms.append(system.run_cpu())
        taking_part = {number for pairs in plan.links for pair in pairs for number in pair}
        shortest, longest = _PAIR_S
        budget_s = min(longest, max(shortest, _LINKS_S / max(1, len(plan.links))))
        if meeting.arrival in taking_part:
            known: dict[int, Link] = {}
            for at, pairs in enumerate(plan.links):
                mine = [target for source, target in pairs if source == meeting.arrival]
                for target in mine:
                    if target not in known or not known[target].problem:
                        entry = plan.arrivals[target - 1].probe
                        link = links.measure(meeting.arrival, target, entry, budget_s)
                        known[target] = links.better(known.get(target, link), link)
                meeting.meet(f"round/{at}", len(mine), len(pairs), min(self._until(0.7), time.monotonic() + 3.0))
            found.links = list(known.values())
        found.cpu_ms.append(system.run_cpu())
        return found

    def _send_traffic(self, left_s: float) -> Traffic:
        os.environ[settings.START_TIMEOUT_S.name] = f"{left_s:.3f}"
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this check's store occupies the port
        stage = "nothing"

        def note(text: str) -> None:
            nonlocal stage
            stage = text
            self.meeting.put(f"stage/{self.meeting.arrival}", text)

        options = self.options
        until = time.monotonic() + left_s
        run = partial(traffic.run, options.sizes, options.order, left_s, options.quick, note)
        call = Call(run)
        if not call.wait(max(time.monotonic() + 0.1, until + 0.3)):
            return Traffic(problem=f"not finished within {left_s:.0f} s", stage=stage)
        return call.result()

    def report(self, evidence: Evidence, found: list[Finding]) -> Report:
        found = sorted_by_severity(list({(each.code, each.found): each for each in found}.values()))
        severity = worst(found)
        return Report(
            SCHEMA,
            evidence.world_size,
            dict(self.options.sizes),
            time.monotonic() - self.began,
            evidence.met and sorted(evidence.ranks) == list(range(evidence.world_size)),
            severity,
            EXIT_CODES[severity],
            found,
            {name: sorted(each.place.rank for each in ranks) for name, ranks in evidence.hosts.items()},
            list(evidence.arrivals),
            dict(evidence.measured),
            dict(evidence.traffic),
        )


def _most_common(arrivals: list[Facts]) -> int:
    sizes: Mapping[int, int] = Counter(each.place.world_size for each in arrivals)
    return max(sizes, key=lambda size: (sizes[size], size))


def ranks_for(sizes: dict[str, int], order: str | None) -> int:
    if not sizes:
        gpus = len(system.gpus().visible)
        return gpus if gpus > 1 else max(2, min(4, len(os.sched_getaffinity(0))))
    problem: LayoutError | None = None
    for ranks in range(1, MOST_RANKS + 1):
        try:
            resolve_layout(ranks, sizes, *filter(None, (order,)))
            return ranks
        except LayoutError as error:
            problem = problem or error
    raise problem or LayoutError("no number of ranks fits the sizes")


def run_local_rank(options: Options) -> tuple[int, bool, bytes]:
    outcome = Session(options).run()
    return outcome.exit_code, outcome.met, b"" if outcome.report is None else msgspec.json.encode(outcome.report)


def run_locally(ranks: int, options: Options) -> Outcome:
    began = time.monotonic()
    try:
        ends = launch(
            run_local_rank, ranks, args=(options,), timeout=2 * options.timeout_s + _START_S, name="check"
        )  # fmt: skip
    except ParallelStateError as error:
        session = Session(options, began, system.collect(time.monotonic() + 3.0))
        place, host = session.facts.place, session.facts.network.hostname
        place.world_size = place.local_world_size = ranks
        text = re.split(r"\nwhere (?:it|rank \d+) was:", str(error))[0].strip()
        return session.alone(finding("launch-failed", text, hosts=[host]))
    exit_code, met, content = next((end for end in ends if end[2]), ends[0])
    return Outcome(exit_code, msgspec.json.decode(content, type=Report) if content else None, met)
