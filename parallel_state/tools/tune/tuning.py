"""Measures kernels, chooses the sizes for which each is used, tests the choice, and writes a row of thresholds."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import parallel_state as ps
from device_communicators import CATALOG, Communicator, Request
from device_communicators.base import settings
from device_communicators.base.torch_internals import keep_cuda_busy
from device_communicators.peer import thresholds as peer_thresholds
from device_communicators.peer.device import PeerDevice
from device_communicators.peer.thresholds import ALGORITHMS, Thresholds, dump, load
from device_communicators.routing.communicator import method_of
from parallel_state.collectives.capture_stream import side_stream
from parallel_state.startup import environment
from parallel_state.tools.bench.collectives import ROWS, Call, Exchange, answer, beside, given
from parallel_state.tools.bench.devices import Captured, captured, share_gpus
from parallel_state.tools.bench.ranks import GroupTeam
from parallel_state.tools.bench.rounds import Plan as CasePlan
from parallel_state.tools.bench.rounds import measure
from parallel_state.tools.tune import PROOF_CALLS, SIZES

OTHER, TORCHS = "other", "torch's"
"""Candidates: the communicator that is used without peer memory, and torch's group if that is another one."""
FUSED = "all_reduce_add_rms_norm"
ORDERS = {
    "all_reduce": (*ALGORITHMS, OTHER),
    "all_gather": ("push", "pull", OTHER),
    "reduce_scatter": ("push", "pull", OTHER),
    FUSED: ("fused", *ALGORITHMS, OTHER),
}
CALLS_IN_A_GRAPH = 20
HIDDEN = 4096
"""Largest row length for which the norm is measured."""
_BOUNDS = (*ALGORITHMS, "all_gather", "all_gather_push", "reduce_scatter", "reduce_scatter_push", "fused")
_MOST: dict[str, Any] = dict.fromkeys(_BOUNDS, 1 << 40)
UNBOUNDED = Thresholds("any", 8, **_MOST, source="for measurements only")
Times = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Plan(CasePlan):
    rounds: int = 20
    sizes: Sequence[int] = SIZES
    proof_calls: int = PROOF_CALLS


class TuneError(RuntimeError):
    """Raised if nothing can be measured, or if a result is wrong."""


def _add_norm(communicator: Communicator, x: Tensor) -> Tensor:
    rows = x.view(-1, math.gcd(x.numel(), HIDDEN))
    residual = torch.zeros_like(rows)
    norm = method_of(communicator, "all_reduce_add_rms_norm")
    # Returns only the sum: the norm's last bits vary, and tuning compares results exactly.
    return norm(rows, residual, torch.ones_like(rows[0]), 1e-6)[1].view(x.shape)


CALLS: dict[str, Callable[[Communicator, Tensor], Tensor]] = {
    "all_reduce": lambda communicator, x: communicator.all_reduce(x, "sum"),
    "all_gather": lambda communicator, x: communicator.all_gather(x, 1),
    "reduce_scatter": lambda communicator, x: communicator.reduce_scatter(x, 0, "sum"),
    FUSED: _add_norm,
}


def other_of(route: Iterable[Communicator], device_type: str) -> Communicator:
    request = Request("all_reduce", torch.bfloat16, device_type, 1, "sum")
    for each in route:
        if each.name != "peer_memory" and each.refusal(request) is None:
            return each
    raise TuneError(
        f"tune has nothing to compare its kernels with: neither NCCL nor gloo supports {device_type} tensors here"
    )


class Tuning:
    """Measures the kernels of `peers`, a communicator over GPU peer memory. All ranks of `group` must make the same
    calls.
    """

    def __init__(self, group: ps.GroupCoordinator, peers: Any, plan: Plan | None = None) -> None:
        self.group, self.plan = group, plan or Plan()
        self.rank, self.size, self.device = group.rank_in_group, group.world_size, group.device
        self._peers = peers
        self._other = other_of(group.route.communicators, self.device.type)
        self._torchs = next((each for each in group.route.communicators if each.name == "device_group"), None)

    def row(self, conditions: peer_thresholds.Conditions, source: str) -> Thresholds:
        """Returns the measured and tested thresholds: the sizes up to which each kernel is used. `source`: text to
        store with the thresholds.

        Raises TuneError on all ranks or on none.
        """
        times = {
            operation: {size: self._times(operation, size) for size in self.plan.sizes} for operation in ORDERS
        }  # fmt: skip
        chosen = choose(times, conditions, source)
        self.prove(chosen)
        return replace(chosen, proven_calls=self.plan.proof_calls)

    def candidates(self, operation: str) -> dict[str, Call]:
        call, other, torchs = CALLS[operation], self._other, self._torchs
        found = {name: self._only(call, name) for name in ORDERS[operation] if name != OTHER}
        found[OTHER] = lambda x: call(other, x)
        if operation == "all_reduce" and torchs is not None and torchs is not other:
            found[TORCHS] = lambda x: call(torchs, x)
        return found

    def _only(self, call: Callable[[Communicator, Tensor], Tensor], name: str) -> Call:
        kinds = {"all_gather_push": "push", "reduce_scatter_push": "push", "fused": "fused"}
        kinds.update({each: each for each in ALGORITHMS})
        never: dict[str, Any] = {bound: 0 for bound, kind in kinds.items() if kind != name}
        return self._by(call, replace(UNBOUNDED, **never))

    def _by(self, call: Callable[[Communicator, Tensor], Tensor], thresholds: Thresholds) -> Call:
        admission = replace(self._peers.group.admission, pinned=None, thresholds=thresholds)

        def chosen(x: Tensor) -> Tensor:
            self._peers.group.admission = admission
            return call(self._peers, x)

        return chosen

    def _times(self, operation: str, size_bytes: int) -> dict[str, float]:
        case = {"operation": _collective(operation), "bytes": size_bytes, "dtype": "bfloat16", "loop": "tight"}
        row = measure([Candidates(self.group, self.candidates(operation))], case, self.plan)
        return {name: statistics.median(us) for name, us in row.us.items()}

    @torch.inference_mode()
    def prove(self, chosen: Thresholds) -> None:
        """Tests the sizes in `chosen` by calls of random sizes, with random delays of ranks. Raises TuneError on all
        ranks or on none.
        """
        same, own = random.Random(self.size), random.Random(self.rank * 1000 + self.size)
        cases = [(operation, size) for operation in ORDERS for size in self._proof_sizes(operation, chosen)]
        calls = {operation: self._by(CALLS[operation], chosen) for operation in ORDERS}
        answers: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
        wrong = torch.zeros(len(cases), dtype=torch.int64, device=self.device)
        for _ in range(self.plan.proof_calls):
            which, number = same.randrange(len(cases)), same.randrange(5)
            operation, numel = cases[which]
            if (operation, numel, number) not in answers:
                answers[operation, numel, number] = self._case(operation, numel, number)
            x, expected = answers[operation, numel, number]
            if own.random() < 0.02:
                self._delay(own)
            wrong[which] += (calls[operation](x) != expected).any()
        counts = self.group.all_gather_object([int(each) for each in wrong])
        for rank, each in enumerate(counts):
            if any(each):
                operation, numel = cases[max(range(len(cases)), key=each.__getitem__)]
                raise TuneError(
                    f"tune wrote no row to its table: {sum(each)} of {self.plan.proof_calls} calls were wrong on rank "
                    f"{rank}, most of them {operation} of {numel} elements; report this bug, with the output of "
                    "`python -m parallel_state topology`"
                )

    def _case(self, operation: str, numel: int, number: int) -> tuple[Tensor, Tensor]:
        name, kind = _collective(operation), (torch.bfloat16, self.device)
        x = given(numel, self.rank + number, *kind)
        expected = answer(name, numel, self.rank, self.size, *kind)
        if name == "all_gather":
            x = x.view(ROWS, -1)
            return x, beside(expected, self.size, tuple(x.shape)) + number
        return x, expected + number * self.size

    def _proof_sizes(self, operation: str, chosen: Thresholds) -> list[int]:
        bounds = {"all_gather": ("all_gather_push", "all_gather"), FUSED: ("fused",)}
        bounds["reduce_scatter"] = ("reduce_scatter_push", "reduce_scatter")
        at = [getattr(chosen, name) for name in bounds.get(operation, ALGORITHMS)]
        found = {ROWS * self.size}
        for limit in at:
            few = min(limit, 1 << 20) // 2 // (ROWS * self.size) * ROWS * self.size
            found |= {each for each in (few, few + ROWS * self.size) if each}
        return sorted(found)

    def _delay(self, own: random.Random) -> None:
        if self.device.type == "cuda" and own.random() < 0.5:
            keep_cuda_busy(own.randrange(200_000))
        else:
            time.sleep(own.random() * 2e-4)


class Candidates(GroupTeam):
    name = "tune"

    def __init__(self, group: ps.GroupCoordinator, calls: Mapping[str, Call]) -> None:
        super().__init__(group)
        self._candidates = calls
        self._graphs: dict[Call, Captured] = {}

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        return {name: Exchange(call) for name, call in self._candidates.items()}

    def check(self, name: str) -> str | None:
        problem = super().check(name)
        call, x = self._prepared[name]
        if any(self.group.all_gather_object(problem is not None)) or call in self._graphs:
            return problem
        try:
            self._graphs[call] = self._capture(call, x)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    @torch.inference_mode()
    def _capture(self, call: Call, x: Tensor) -> Captured:
        def several() -> Tensor:
            for _ in range(CALLS_IN_A_GRAPH):
                y = call(x)
            return y

        with side_stream(self.device) as capture:
            call(x)
            return captured(several, capture.stream)

    def _run_tight(self, call: Call, x: Tensor, calls: int) -> float:
        graph, replays = self._graphs[call], -(-calls // CALLS_IN_A_GRAPH)
        seconds = self.clock.seconds(lambda: [graph.replay() for _ in range(replays)])
        return seconds * calls / (replays * CALLS_IN_A_GRAPH)


def _collective(operation: str) -> str:
    return "all_reduce" if operation == FUSED else operation


def choose(times: Mapping[str, Times], conditions: peer_thresholds.Conditions, source: str) -> Thresholds:
    ranks = conditions.world_size
    for operation in ORDERS:
        if not any(times.get(operation, {}).values()):
            raise TuneError(
                f"tune wrote no row to its table: every measurement of {operation} on {ranks} ranks failed; see the "
                "errors above"
            )
    bounds = {operation: boundaries(times[operation], order) for operation, order in ORDERS.items()}
    sums, gather, scatter = (bounds[name] for name in ("all_reduce", "all_gather", "reduce_scatter"))
    ratios = [math.log(us[OTHER] / us[TORCHS]) for us in times["all_reduce"].values() if {OTHER, TORCHS} <= us.keys()]
    known: dict[str, Any] = {field.name: getattr(conditions, field.name) for field in fields(conditions)}
    return Thresholds(
        **known,
        push=sums["push"],
        pull=sums["pull"],
        two_shot=sums["two_shot"],
        all_gather=max(gather.values()),
        all_gather_push=gather["push"],
        # Measured sizes are those of the input; thresholds are those of the output.
        reduce_scatter=max(scatter.values()) // ranks,
        reduce_scatter_push=scatter["push"] // ranks,
        fused=bounds[FUSED]["fused"],
        source=source,
        own_nccl=bool(ratios) and sum(ratios) < 0,
    )


def write(row: Thresholds, path: Path) -> None:
    """Writes `row` to the file, in place of a row for the same hardware and software."""
    names = [field.name for field in fields(peer_thresholds.Conditions)]
    key = [getattr(row, name) for name in names]
    others = load(path).rows if path.exists() else ()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    dump([*(each for each in others if [getattr(each, name) for name in names] != key), row], whole, "measured")
    whole.replace(path)


def keep(row: Thresholds | None, path: Path) -> None:
    if row is None:
        return
    write(row, path)
    print(f"{row.world_size} ranks, {row.arch}, {row.link}: {row}; {row.proven_calls} calls proven")
    if row.one_gpu_each:
        print(f"written to {path}: PARALLEL_STATE_PEER_MEMORY=auto, the default, uses it from now on")
    else:
        print(f"written to {path} for the record only: the ranks shared a GPU, so auto never uses it")


def tune_rank(options: argparse.Namespace) -> Thresholds | None:
    """Returns the measured thresholds on the group's first rank, None on others. Every rank must call this."""
    place, gpus = environment.detect(rendezvous=False), torch.cuda.device_count()
    ranks = place.local_world_size or place.world_size
    # The peer-memory communicator is created below, with UNBOUNDED thresholds.
    os.environ.update({settings.NCCL.name: "on", settings.PEER_MEMORY.name: "off"})
    if gpus < ranks:
        share_gpus()
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    torch.set_num_threads(1)
    ps.init_distributed_environment(backend="nccl")
    peers: Any = None
    try:
        ps.initialize_model_parallel(ps.get_world_group().world_size)
        group = ps.get_tp_group()
        device = PeerDevice(group.device)
        make: Any = next(row for row in CATALOG if row.name == "peer_memory").load()
        peers = make(group.context, device, UNBOUNDED)
        problem = peers.admit()
        if problem is not None:
            raise TuneError(f"tune has nothing to measure: {problem}")
        conditions = peer_thresholds.conditions_of(device.arch(), peers.group.admission.topology, device.versions())
        name = torch.cuda.get_device_name(group.device)
        tuning = Tuning(group, peers, options.plan)
        row = tuning.row(conditions, f"python -m parallel_state tune, {name}, {datetime.date.today()}")
        return row if group.is_first_rank else None
    finally:
        if peers is not None:
            peers.close()
        ps.destroy_distributed_environment()


def boundaries(times: Mapping[int, Mapping[str, float]], order: Sequence[str]) -> dict[str, int]:
    """Returns algorithm -> largest size in bytes for which it is used (0: none). `times`: size -> algorithm -> time.

    `order` lists the algorithms, those for small sizes first; the last is used for the rest and isn't in the result.
    The choice minimizes the product of times, so that every size has the same weight.
    """
    sizes = sorted(size for size, by_name in times.items() if any(name in by_name for name in order))
    # best[c]: cost of the best division of the sizes so far that ends with candidate c, and candidate -> its last size.
    best: list[tuple[float, dict[str, int]]] = [(0.0, {})] * len(order)
    for size in sizes:
        after: list[tuple[float, dict[str, int]]] = []
        for at, name in enumerate(order):
            cost, ends = min(best[: at + 1], key=lambda each: each[0])
            time = times[size].get(name)
            after.append((cost + (math.inf if time is None else math.log(time)), {**ends, name: size}))
        best = after
    _, ends = min(reversed(best), key=lambda each: each[0]) if sizes else (0.0, {})
    return {name: ends.get(name, 0) for name in order[:-1]}
