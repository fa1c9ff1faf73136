"""Measures collectives on GPUs and under torchrun: by each communicator of the group alone, by the group, and by
torch.distributed; eager, compiled and in CUDA graphs.

Device events time a round of calls; the slowest rank's time counts. algbw, busbw and sizes are those of nccl-tests
(doc/PERFORMANCE.md there). `host` is the CPU's time of a call. torch's eager all_reduce and broadcast, and candidates
named "in place", overwrite their input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import parallel_state as ps
from device_communicators import Route, register_route, unique_name
from device_communicators.base.errors import UnsupportedError
from device_communicators.base.torch_internals import dynamo
from harness.collectives import count_of, ours_by_op
from harness.picture import draw
from harness.rounds import Plan, RankRow
from harness.timing import host_seconds, release
from parallel_state.collectives.capture_stream import GraphCaptureContext, prepared, side_stream
from parallel_state.startup import environment
from parallel_state.tools.bench import collectives, rounds
from parallel_state.tools.bench.collectives import Call, Prepared
from parallel_state.tools.bench.devices import Captured, captured
from parallel_state.tools.bench.ranks import GroupTeam, one_group
from parallel_state.tools.bench.report import bandwidths, p50, p99, recorded, write_json
from parallel_state.tools.bench.rounds import measure

OPERATIONS = rounds.OPERATIONS[:-1]
TORCH = "torch.distributed"
ROUTE = "parallel_state"
MODES = ("eager", "compiled", "graph")
SIZES = tuple(1 << power for power in range(10, 31, 2))
FEW, MANY, LARGE_BYTES = 4, 20, 4 << 20
"""Calls in one graph, which share the cost of a replay: FEW above LARGE_BYTES, else MANY."""
HOST_CALLS, HOST_ROUNDS = 20, 10
RUN_S = 3600.0


@dataclass(frozen=True)
class Way:
    name: str
    call: Call
    compilable: Call | None
    capture: Callable[[], AbstractContextManager[GraphCaptureContext]]


class Ways:
    """The ways to run a group's collectives: by one communicator, by all in order of preference, or by torch. Every
    rank must create this.
    """

    def __init__(self, group: ps.GroupCoordinator) -> None:
        self._group = group
        self._routes: dict[str, Route] = {}
        for each in group.route.communicators:
            context = replace(group.context, name=unique_name(f"only_{each.name}"))
            self._routes[each.name] = Route(context, [each], {}, group.route.paths)
            register_route(self._routes[each.name])

    def close(self) -> None:
        for route in self._routes.values():
            route.serve_ops(False)
        self._routes.clear()

    def of(self, operation: str) -> list[Way]:
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
    # Newer versions of torch warn about the old names.
    all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    calls: dict[str, Call] = {
        "all_reduce": lambda x: functional.all_reduce(x, "sum", group),
        "all_gather": lambda x: all_gather(x, 0, group),
        "reduce_scatter": lambda x: reduce_scatter(x, "sum", 0, group),
        "broadcast": lambda x: functional.broadcast(x, 0, group),
        "all_to_all": lambda x: functional.all_to_all_single(x, None, None, group),
    }
    return calls[operation]


class Ranks(GroupTeam):
    """Measures each `Way` in each mode (eager, compiled, CUDA graph), with the same input."""

    def __init__(self, group: ps.GroupCoordinator, modes: Sequence[str]) -> None:
        super().__init__(group)
        self.modes, self.left_out = usable_modes(modes, self.device)
        self.ways = Ways(group)
        self._compiled: dict[tuple[str, str], Any] = {}

    def measure(self, operation: str, size_bytes: int, dtype: str, plan: Plan) -> RankRow:
        case = {"ranks": self.size, "operation": operation, "bytes": size_bytes, "dtype": dtype}
        self._refused: dict[str, str] = {}
        row = RankRow(**vars(measure([self], case, plan)), refused=self._refused)
        for name, us in row.us.items():
            row.figures[name] = figures(operation, size_bytes, us, self.size)
            if name.endswith(", eager"):
                row.host_us[name] = self._host_us(self._prepared[name].call)
        self._prepared.clear()
        self._graphs.clear()
        release(self.clock)
        return row

    def prepare(self, values: dict[str, Any]) -> list[str]:
        operation = self._operation = values["operation"]
        dtype = getattr(torch, values["dtype"])
        count = count_of(operation, values["bytes"], dtype, self.size)
        self._source = collectives.given(count, self.rank, dtype, self.device)
        self._expected = collectives.answer(operation, count, self.rank, self.size, dtype, self.device)
        self._zero = operation == "all_reduce"  # zeros: repeated in-place sums of other values would grow
        self._x = self._source.clone()
        self._graphs: dict[Call, tuple[Captured, int]] = {}
        self._prepared = {
            f"{way.name}, {mode}": Prepared(call, self._x)
            for way in self.ways.of(operation)
            for mode in self.modes
            if (call := self._made(way, mode)) is not None
        }
        return list(self._prepared)

    def _made(self, way: Way, mode: str) -> Call | None:
        call: Call | None = None
        problem: str | None = None
        try:
            if mode == "graph":
                call = self._graph(way, FEW if self._x.nbytes > LARGE_BYTES else MANY)
            elif call := (way.call if mode == "eager" else way.compilable and self._compile(way)):
                call(self._x)
        except UnsupportedError as error:
            problem = str(error)
        problems = [each for each in self.group.all_gather_object(problem) if each is not None]
        if problems:
            self._refused[f"{way.name}, {mode}"] = problems[0]
        return None if problems else call

    def _compile(self, way: Way) -> Call:
        key = self._operation, way.name
        if key not in self._compiled:
            self._compiled[key] = torch.compile(way.compilable, fullgraph=True, dynamic=True)
        return self._compiled[key]

    def _graph(self, way: Way, step: int) -> Call:
        x, call = self._x, way.call

        def several() -> Tensor:
            for _ in range(step):
                y = call(x)
            return y

        with way.capture() as capture:
            call(x)
            one, many = captured(lambda: call(x), capture.stream), captured(several, capture.stream)

        def replay(x: Tensor) -> Tensor:
            return one.replay()

        self._graphs[replay] = many, step
        return replay

    def _run_tight(self, call: Call, x: Tensor, calls: int) -> float:
        if call not in self._graphs:
            return super()._run_tight(call, x, calls)
        graph, step = self._graphs[call]
        replays = -(-calls // step)
        seconds = self.clock.seconds(lambda: [graph.replay() for _ in range(replays)] and None)
        return seconds * calls / (replays * step)

    def _host_us(self, call: Call) -> float:
        self._x.zero_()
        found: list[float] = []
        for _ in range(HOST_ROUNDS):
            self.group.barrier()
            found += host_seconds(self.clock, partial(call, self._x), HOST_CALLS)
        return p50(found) * 1e6


def usable_modes(asked: Sequence[str], device: torch.device) -> tuple[list[str], dict[str, str]]:
    if device.type == "cuda" or "graph" not in asked:
        return list(asked), {}
    return [mode for mode in asked if mode != "graph"], {"graph": "the CPU has no CUDA graphs"}


def figures(operation: str, size_bytes: int, us: Sequence[float], ranks: int) -> dict[str, float]:
    algbw, busbw = bandwidths(operation, size_bytes, p50(us), ranks)
    return {"p50_us": p50(us), "p99_us": p99(us), "algbw": algbw, "busbw": busbw}


def picture(rows: Sequence[RankRow]) -> str:
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


def run_rank(options: argparse.Namespace) -> tuple[bool, list[RankRow], dict[str, str]]:
    """Measures all cases. Returns True if all results were right, the rows, and the omitted modes with reasons. Rows
    and modes are empty on all but the first rank.
    """
    config = dynamo().config  # takes seconds, which `--help` doesn't need
    for name in ("recompile_limit", "cache_size_limit"):  # allow a graph per carrier and operation; torch renamed it
        if hasattr(config, name):
            setattr(config, name, 256)
    plan = Plan(options.rounds, options.round_ms / 1e3, case_s=options.case_s)
    with one_group(options.device) as (group, about), torch.inference_mode():
        ranks, rows = Ranks(group, options.modes), list[RankRow]()
        if group.is_first_rank:
            print("\n".join(filter(None, (about["route"], about["sharing"]))), flush=True)
        for operation in options.operations:
            for size in options.sizes:
                rows.append(ranks.measure(operation, size, options.dtype, plan))
                if group.is_first_rank and options.json:
                    write_json(options.json, rows, {**recorded(options), **about, "left_out": ranks.left_out})
                if group.is_first_rank and options.svg:
                    options.svg.write_text(picture(rows))
        ranks.ways.close()
        return not any(row.wrong for row in rows), *((rows, ranks.left_out) if group.is_first_rank else ([], {}))


def main(options: argparse.Namespace) -> tuple[int, list[RankRow], dict[str, str]]:
    """Measures in this process if a launcher such as torchrun started it, else in new ranks. Returns the exit code (1:
    a result was wrong), and the rows and omitted modes of `run_rank`.
    """
    if environment.detect(rendezvous=False).world_size > 1:
        found = [run_rank(options)]
    else:
        count = options.ranks[0] if options.ranks else max(2, torch.cuda.device_count())
        found = ps.launch(run_rank, count, args=(options,), timeout=RUN_S)
    _, rows, left_out = found[0]
    return int(not all(right for right, *_ in found)), rows, left_out
