"""Collectives timed by the ranks themselves: on GPUs and under torchrun every rank runs this, and the first one prints.

Each communicator of the group's route by itself, the route as a whole, and torch.distributed, eagerly, compiled
(`torch.compile(fullgraph=True)`) and in CUDA graphs. Every candidate is checked before and after it is timed; they
take turns, round by round; a round is timed by events of the device, after a barrier and some untimed calls, and the
slowest rank's time counts. algbw and busbw are nccl-tests' (doc/PERFORMANCE.md there), as are sizes: the bytes of an
all_reduce's, broadcast's and all_to_all's tensor, of an all_gather's output and of a reduce_scatter's input. `host` is
what a call costs the host from Python's entry to its return, the device not waited for. torch's eager all_reduce and
broadcast work in place, as does what says so; the others give new tensors.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from harness.collectives import count_of, ours_by_op
from harness.picture import draw
from torch import Tensor

import parallel_state as ps
from device_communicators import Route, register_route, unique_name
from device_communicators.base import settings
from device_communicators.base.errors import UnsupportedError
from device_communicators.base.torch_internals import dynamo, functional_collectives
from parallel_state.collectives.capture_stream import GraphCaptureContext, prepared, side_stream
from parallel_state.startup import environment
from parallel_state.tools.bench import collectives
from parallel_state.tools.bench.collectives import Call
from parallel_state.tools.bench.devices import Clock, captured, describe, share_gpus
from parallel_state.tools.bench.report import bandwidths, p50, p99, recorded, write_json
from parallel_state.tools.bench.rounds import Plan, Row

OPERATIONS = collectives.OPERATIONS[:-1]  # a barrier has no size
TORCH = "torch.distributed"
ROUTE = "parallel_state"
MODES = ("eager", "compiled", "graph")
SIZES = tuple(1 << power for power in range(10, 31, 2))
FEW, MANY, LARGE_BYTES = 4, 20, 4 << 20
"""Calls in one graph, by which a replay's own cost is divided; with large tensors, few."""
HOST_CALLS, HOST_ROUNDS = 20, 10
RUN_S = 3600.0

# The candidates: how each is called, and which answer is right.


@dataclass(frozen=True)
class Way:
    """One carrier of an operation."""

    name: str
    call: Call
    """Gives the result, which may be the input."""
    compilable: Call | None
    """The function that torch.compile is given; None where there is none."""
    capture: Callable[[], AbstractContextManager[GraphCaptureContext]]
    """Within it CUDA graphs are captured."""


class Ways:
    """The ways of one group; every rank makes it."""

    def __init__(self, group: ps.GroupCoordinator) -> None:
        self._group = group
        self._routes: dict[str, Route] = {}
        for each in group.route.communicators:
            # The group's own communicator, under a name by which ops find it alone.
            context = replace(group.context, name=unique_name(f"only_{each.name}"))
            self._routes[each.name] = Route(context, [each], {}, group.route.paths)
            register_route(self._routes[each.name])

    def close(self) -> None:
        """Unregisters the routes; the communicators go on, under the group's name only."""
        for route in self._routes.values():
            route.serve_ops(False)
        self._routes.clear()

    def of(self, operation: str) -> list[Way]:
        """Returns every way, the same on all ranks."""
        return [*self._ours(operation), *self._torchs(operation)]

    def _ours(self, operation: str) -> Iterator[Way]:
        group = self._group
        call, in_place = collectives.ours_by_method(group, operation)
        yield Way(ROUTE, call, call, group.graph_capture)
        if in_place:
            yield Way(ROUTE + ", in place", in_place, None, group.graph_capture)
        for name, route in self._routes.items():
            op = ours_by_op(group, operation, route.context.key)
            yield Way(name, op, op, partial(prepared, route, None, group.device))

    def _torchs(self, operation: str) -> Iterator[Way]:
        group = self._group.device_group
        eager = collectives.torch_by_call(operation, group, self._group.world_size)
        yield Way(TORCH, eager, compilable_of_torch(operation, group), lambda: side_stream(self._group.device))


def compilable_of_torch(operation: str, group: Any) -> Call:
    """Returns torch's functional collective, which the compiler knows."""
    functional = functional_collectives()
    calls: dict[str, Call] = {
        "all_reduce": lambda x: functional.all_reduce(x, "sum", group),
        "all_gather": lambda x: functional.all_gather_tensor(x, 0, group),
        "reduce_scatter": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, group),
        "broadcast": lambda x: functional.broadcast(x, 0, group),
        "all_to_all": lambda x: functional.all_to_all_single(x, None, None, group),
    }
    return calls[operation]


# This rank's part.


@dataclass
class RankRow(Row):
    """A case's samples, and what follows from them."""

    refused: dict[str, str] = field(default_factory=dict)
    """Candidates that don't carry the case, and why."""
    host_us: dict[str, float] = field(default_factory=dict)
    """Of eager candidates: the median of a call, as the host sees it."""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Candidate:
    """A way in a mode."""

    name: str
    run: Callable[[int], object]
    """Makes so many calls, a multiple of `step`."""
    check: Callable[[], Tensor]
    """One call, on the input as it is."""
    step: int = 1


class Ranks:
    """This rank's part: candidates, checks and times of one case after the other."""

    def __init__(self, group: ps.GroupCoordinator, options: argparse.Namespace) -> None:
        self.group = group
        self.rank, self.size, self.device = group.rank_in_group, group.world_size, group.device
        self.plan = Plan(options.rounds, options.round_ms / 1e3, case_s=options.case_s)
        self.modes, self.left_out = usable_modes(options.modes, self.device)
        self.ways = Ways(group)
        self.clock = Clock(self.device)
        self._compiled: dict[tuple[str, str], Any] = {}

    def measure(self, operation: str, size_bytes: int, dtype: torch.dtype) -> RankRow:
        case = {"ranks": self.size, "operation": operation, "bytes": size_bytes, "dtype": str(dtype).split(".")[1]}
        row = RankRow(case)
        count = count_of(operation, size_bytes, dtype, self.size)
        self.source = collectives.given(count, self.rank, dtype, self.device)
        self.x = self.source.clone()
        self.zero = operation == "all_reduce"  # in place, anything else would grow
        self.expected = collectives.answer(operation, count, self.rank, self.size, dtype, self.device)
        candidates = [
            candidate
            for way in self.ways.of(operation)
            for mode in self.modes
            if (candidate := self._made(operation, way, mode, row)) is not None and self._right(candidate, row)
        ]
        calls = {each.name: self._calls(each) for each in candidates}
        samples = self._rounds(candidates, calls)
        for candidate in candidates:
            if self._right(candidate, row):
                row.us[candidate.name], row.calls[candidate.name] = samples[candidate.name], calls[candidate.name]
        self._host(candidates, row)
        for name, us in row.us.items():
            row.figures[name] = figures(operation, size_bytes, us, self.size)
        candidates.clear()
        self.clock.release()
        return row

    def _made(self, operation: str, way: Way, mode: str, row: RankRow) -> Candidate | None:
        """A way in a mode; None on every rank where it can't be had on one of them."""
        name, x = f"{way.name}, {mode}", self.x
        made: Candidate | None = None
        problem: str | None = None
        try:
            if mode == "graph":
                made = self._graph(name, way, FEW if x.nbytes > LARGE_BYTES else MANY)
            elif mode == "compiled" and way.compilable is not None:
                made = _repeated(name, self._compile(operation, way), x)
                made.check()
            elif mode == "eager":
                made = _repeated(name, way.call, x)
                made.check()
        except UnsupportedError as error:
            problem = str(error)
        problems = [each for each in self.group.all_gather_object(problem) if each is not None]
        if problems:
            row.refused[name] = problems[0]
            return None
        return made

    def _compile(self, operation: str, way: Way) -> Callable[[Tensor], Tensor]:
        """Once for all sizes."""
        key = operation, way.name
        if key not in self._compiled:
            self._compiled[key] = torch.compile(way.compilable, fullgraph=True, dynamic=True)
        return self._compiled[key]

    def _graph(self, name: str, way: Way, step: int) -> Candidate:
        x, call = self.x, way.call

        def several() -> Tensor:
            for _ in range(step):
                y = call(x)
            return y

        with way.capture() as capture:
            call(x)
            one, many = captured(lambda: call(x), capture.stream), captured(several, capture.stream)

        def run(calls: int) -> None:
            for _ in range(calls // step):
                many.replay()

        return Candidate(name, run, one.replay, step)

    def _right(self, candidate: Candidate, row: RankRow) -> bool:
        """Returns True if its answer is right on every rank; else the row says so, and has no figures of it."""
        self.x.copy_(self.source)
        y = candidate.check()
        self.clock.finish()
        right = y.shape == self.expected.shape and torch.equal(y, self.expected)
        wrong = [rank for rank, each in enumerate(self.group.all_gather_object(right)) if not each]
        if wrong:
            row.wrong[candidate.name] = f"its answer is wrong on ranks {wrong}"
            row.us.pop(candidate.name, None)
        return not wrong

    def _calls(self, candidate: Candidate) -> int:
        """Returns how many calls fill a round: the same number on all ranks."""
        least = max(2, candidate.step)
        took = [self._timed(candidate, least) / least for _ in range(2)][-1]
        call_s = max(self.group.all_gather_object(took))
        wanted = min(self.plan.most_calls, int(self.plan.round_s / max(call_s, 1e-9)))
        return max(least, wanted // candidate.step * candidate.step)

    def _timed(self, candidate: Candidate, calls: int) -> float:
        self.x.zero_() if self.zero else self.x.copy_(self.source)
        self.clock.finish()
        self.group.barrier()
        candidate.run(max(candidate.step, calls // 10 // candidate.step * candidate.step))
        return self.clock.seconds(lambda: candidate.run(calls))

    def _rounds(self, candidates: Sequence[Candidate], calls: dict[str, int]) -> dict[str, list[float]]:
        """Microseconds a call of the slowest rank, a sample for each round."""
        mine: dict[str, list[float]] = {each.name: [] for each in candidates}
        rounds = self.plan.rounds
        for number in range(rounds):
            start = number % max(1, len(candidates))
            took = 0.0
            for each in (*candidates[start:], *candidates[:start]):
                seconds = self._timed(each, calls[each.name])
                mine[each.name].append(seconds / calls[each.name] * 1e6)
                took += seconds
            if number + 1 >= 3 and (number + 1) * max(self.group.all_gather_object(took)) > self.plan.case_s:
                break
        by_rank = self.group.all_gather_object(mine)
        return {name: [max(each) for each in zip(*(rank[name] for rank in by_rank), strict=True)] for name in mine}

    def _host(self, candidates: Sequence[Candidate], row: RankRow) -> None:
        """Rank 0's median: what differs between ranks is how long they wait, and nobody waits here."""
        for each in candidates:
            if each.name.endswith(", eager") and each.name in row.us:
                self.x.zero_()
                found: list[float] = []
                for _ in range(HOST_ROUNDS):
                    self.group.barrier()
                    found += self.clock.host_seconds(partial(each.run, 1), HOST_CALLS)
                row.host_us[each.name] = p50(found) * 1e6


def _repeated(name: str, call: Callable[[Tensor], Tensor], x: Tensor) -> Candidate:
    def run(calls: int) -> None:
        for _ in range(calls):
            call(x)

    return Candidate(name, run, lambda: call(x))


def usable_modes(asked: Sequence[str], device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Returns the modes that the device has, and why it lacks the others."""
    if device.type == "cuda" or "graph" not in asked:
        return list(asked), {}
    return [mode for mode in asked if mode != "graph"], {"graph": "the CPU has no CUDA graphs"}


def figures(operation: str, size_bytes: int, us: Sequence[float], ranks: int) -> dict[str, float]:
    """Returns p50 and p99 in microseconds; bandwidths by the median, in 10⁹ B/s."""
    algbw, busbw = bandwidths(operation, size_bytes, p50(us), ranks)
    return {"p50_us": p50(us), "p99_us": p99(us), "algbw": algbw, "busbw": busbw}


# What rank 0 writes.


def picture(rows: Sequence[RankRow]) -> str:
    """A panel for each operation and mode, a line for each carrier."""
    panels = []
    for operation in dict.fromkeys(row.case["operation"] for row in rows):
        for mode in MODES:
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in (row for row in rows if row.case["operation"] == operation):
                for name, found in row.figures.items():
                    carrier, _, of = name.rpartition(", ")
                    if of == mode:
                        lines.setdefault(carrier, []).append((row.case["bytes"], found["p50_us"]))
            if lines:
                panels.append((f"{operation}, {rows[0].case['ranks']} ranks, {mode}", lines))
    names = {name for _, lines in panels for name in lines}
    return draw(panels, sorted(names - {TORCH}, key=lambda name: (not name.startswith(ROUTE), name)))


# Starting.


def run_rank(options: argparse.Namespace) -> tuple[bool, list[RankRow], dict[str, str]]:
    """Lives one rank's life; returns if every answer was right; on the first rank, rows and left-out modes."""
    on_gpu = options.device == "cuda"
    sharing = share_gpus() if on_gpu else ""
    os.environ.setdefault(settings.NCCL.name, "on")  # to be measured, whatever the default is
    torch.set_num_threads(1)
    config = dynamo().config  # takes seconds, which whoever reads rows or asks for help would wait for
    for name in ("recompile_limit", "cache_size_limit"):  # a graph for each carrier and operation, by either name
        if hasattr(config, name):
            setattr(config, name, 256)
    ps.init_distributed_environment(backend="nccl" if on_gpu else "gloo")
    try:
        ps.initialize_model_parallel(ps.get_world_group().world_size, warm_up=True)
        group = ps.get_tp_group()
        ranks = Ranks(group, options)
        if group.is_first_rank:
            print("\n".join(filter(None, (group.explain(), sharing))), flush=True)
        with torch.inference_mode():
            rows: list[RankRow] = []
            for operation in options.operations:
                for size in options.sizes:
                    rows.append(ranks.measure(operation, size, getattr(torch, options.dtype)))
                    if group.is_first_rank:
                        _write(rows, ranks, options, sharing)  # whoever ends this early has what there was
        ranks.ways.close()
        shown = (rows, ranks.left_out) if group.is_first_rank else ([], {})
        return not any(row.wrong for row in rows), *shown
    finally:
        ps.destroy_distributed_environment()


def _write(rows: Sequence[RankRow], ranks: Ranks, options: argparse.Namespace, sharing: str) -> None:
    about = {**describe(ranks.device), "sharing": sharing, "route": ranks.group.explain(), "left_out": ranks.left_out}
    if options.json:
        write_json(options.json, rows, {**recorded(options), **about})
    if options.svg:
        options.svg.write_text(picture(rows))


def main(options: argparse.Namespace) -> tuple[int, list[RankRow], dict[str, str]]:
    """Runs in the ranks that somebody else started, or in own ones.

    Returns the exit code, 1 where an answer was wrong, and, in the first rank or without, its rows and left-out modes.
    """
    if environment.detect(rendezvous=False).world_size > 1:
        found = [run_rank(options)]
    else:
        count = options.ranks[0] if options.ranks else max(2, torch.cuda.device_count())
        found = ps.launch(run_rank, count, args=(options,), timeout=RUN_S)
    _, rows, left_out = found[0]
    return int(not all(right for right, *_ in found)), rows, left_out
