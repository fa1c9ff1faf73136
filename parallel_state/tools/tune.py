"""`python -m parallel_state tune`: which kernel all-reduces what on this machine; measured, proven, written down.

    python -m parallel_state tune                            ranks of its own: 2, 4, 6 and 8, as far as there are GPUs
    python -m parallel_state tune --ranks 8 --out node.json
    torchrun --nproc-per-node 8 -m parallel_state tune       the ranks that torchrun started

Candidates are checked, then take turns; of a round the slowest rank's time counts, so what is chosen is what the whole
group waits for. On GPUs calls are captured, and the graph's replays timed: that is how a decode step has them. What is
chosen is then proven: calls of all kinds, on random sizes, with ranks that come late at random, each compared with its
answer. Only then a row is written, with the conditions that it holds for, among the user's rows, where
PARALLEL_STATE_PEER_MEMORY=auto and PARALLEL_STATE_NCCL=auto find it. Rows of ranks that share a GPU are written as
evidence, and never found.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import random
import statistics
import sys
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
from device_communicators.peer.thresholds import ALGORITHMS, Thresholds, dump, load, user_path
from device_communicators.routing.communicator import method_of
from parallel_state.collectives.capture_stream import side_stream
from parallel_state.startup import environment
from parallel_state.tools.arguments import command_parser, positive
from parallel_state.tools.bench.collectives import ROWS, Call, Exchange, answer, beside, given
from parallel_state.tools.bench.devices import Captured, captured, share_gpus
from parallel_state.tools.bench.ranks import GroupTeam
from parallel_state.tools.bench.rounds import Plan as CasePlan
from parallel_state.tools.bench.rounds import measure
from parallel_state.tools.output import require_writable

SIZES = tuple(1 << power for power in range(10, 27))
OTHER, TORCHS = "other", "torch's"
"""Names of candidates: the communicator that carries the rest, and torch's own group beside NCCL of our own."""
FUSED = "all_reduce_add_rms_norm"
ORDERS = {
    "all_reduce": (*ALGORITHMS, OTHER),
    "all_gather": ("push", "pull", OTHER),
    "reduce_scatter": ("push", "pull", OTHER),
    FUSED: ("fused", *ALGORITHMS, OTHER),
}
PROOF_CALLS = 100_000
CALLS_IN_A_GRAPH = 20
HIDDEN = 4096
"""The longest row of a norm."""
RUN_S = 3600.0
_BOUNDS = (*ALGORITHMS, "all_gather", "all_gather_push", "reduce_scatter", "reduce_scatter_push", "fused")
_UNBOUNDED: dict[str, Any] = {
    **dict.fromkeys(_BOUNDS, 1 << 40),
    "arch": "any",
    "world_size": 8,
    "measured": False,
    "source": "for who measures them",
}
UNBOUNDED = Thresholds(**_UNBOUNDED)
Times = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Plan(CasePlan):
    """Sets how long and how much is measured and proven."""

    rounds: int = 20
    sizes: Sequence[int] = SIZES
    proof_calls: int = PROOF_CALLS


class TuneError(RuntimeError):
    """There is nothing to measure, or what was measured is wrong."""


def _add_norm(communicator: Communicator, x: Tensor) -> Tensor:
    """Returns the sum, which is checked: norms differ in their last bits, and were proven when the group was made."""
    rows = x.view(-1, math.gcd(x.numel(), HIDDEN))
    residual = torch.zeros_like(rows)
    norm = method_of(communicator, "all_reduce_add_rms_norm")
    return norm(rows, residual, torch.ones_like(rows[0]), 1e-6)[1].view(x.shape)


CALLS: dict[str, Callable[[Communicator, Tensor], Tensor]] = {
    "all_reduce": lambda communicator, x: communicator.all_reduce(x, "sum"),
    "all_gather": lambda communicator, x: communicator.all_gather(x, 1),
    "reduce_scatter": lambda communicator, x: communicator.reduce_scatter(x, 0, "sum"),
    FUSED: _add_norm,
}


def other_of(route: Iterable[Communicator], device_type: str) -> Communicator:
    """Returns who carries the tensors of this device where none of ours does."""
    request = Request("all_reduce", torch.bfloat16, device_type, 1, "sum")
    for each in route:
        if each.name != "peer_memory" and each.refusal(request) is None:
            return each
    raise TuneError(f"there is nothing to compare with: no communicator carries tensors on {device_type}")


class Tuning:
    """One rank's part; all ranks of the group make the same calls of it."""

    def __init__(self, group: ps.GroupCoordinator, peers: Any, plan: Plan | None = None) -> None:
        """`peers`: the communicator in peer memory, admitted with UNBOUNDED thresholds."""
        self.group, self.plan = group, plan or Plan()
        self.rank, self.size, self.device = group.rank_in_group, group.world_size, group.device
        self._peers = peers
        self._other = other_of(group.route.communicators, self.device.type)
        self._torchs = next((each for each in group.route.communicators if each.name == "device_group"), None)

    def row(self, conditions: peer_thresholds.Conditions, source: str) -> Thresholds:
        """Measures, chooses and proves. Raises TuneError on all ranks alike."""
        times = {
            operation: {size: self._times(operation, size) for size in self.plan.sizes} for operation in ORDERS
        }  # fmt: skip
        chosen = choose(times, conditions, source)
        self.prove(chosen)
        return replace(chosen, proven_calls=self.plan.proof_calls)

    # Measuring.

    def candidates(self, operation: str) -> dict[str, Call]:
        call, other, torchs = CALLS[operation], self._other, self._torchs
        found = {name: self._only(call, name) for name in ORDERS[operation] if name != OTHER}
        found[OTHER] = lambda x: call(other, x)
        if operation == "all_reduce" and torchs is not None and torchs is not other:
            found[TORCHS] = lambda x: call(torchs, x)
        return found

    def _only(self, call: Callable[[Communicator, Tensor], Tensor], name: str) -> Call:
        """Returns the call with thresholds by which it has this kernel at every size."""
        kinds = {"all_gather_push": "push", "reduce_scatter_push": "push", "fused": "fused"}
        kinds.update({each: each for each in ALGORITHMS})
        never = {bound: 0 for bound, kind in kinds.items() if kind != name}
        return self._by(call, Thresholds(**{**_UNBOUNDED, **never}))

    def _by(self, call: Callable[[Communicator, Tensor], Tensor], thresholds: Thresholds) -> Call:
        admission = replace(self._peers.group.admission, pinned=None, thresholds=thresholds)

        def chosen(x: Tensor) -> Tensor:
            self._peers.group.admission = admission
            return call(self._peers, x)

        return chosen

    def _times(self, operation: str, size_bytes: int) -> dict[str, float]:
        """Returns medians of the slowest rank's microseconds. Candidates that are wrong on a rank have none."""
        case = {"operation": _collective(operation), "bytes": size_bytes, "dtype": "bfloat16", "loop": "tight"}
        row = measure([Candidates(self.group, self.candidates(operation))], case, self.plan)
        return {name: statistics.median(us) for name, us in row.us.items()}

    # Proving.

    @torch.inference_mode()
    def prove(self, chosen: Thresholds) -> None:
        """Makes calls as `chosen` has them, some ranks late at random, and compares each result with its answer.

        Raises TuneError on all ranks where one result was wrong on one of them.
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
                self._be_late(own)
            wrong[which] += (calls[operation](x) != expected).any()
        counts = self.group.all_gather_object([int(each) for each in wrong])
        for rank, each in enumerate(counts):
            if any(each):
                operation, numel = cases[max(range(len(cases)), key=each.__getitem__)]
                raise TuneError(
                    f"no row is written: of {self.plan.proof_calls} calls {sum(each)} were wrong on rank {rank}, most "
                    f"of them {operation} of {numel} elements; report this with `python -m parallel_state topology`"
                )

    def _case(self, operation: str, numel: int, number: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's input and answer. Each element of the input is `number` larger than the harness's."""
        name, kind = _collective(operation), (torch.bfloat16, self.device)
        x = given(numel, self.rank + number, *kind)
        expected = answer(name, numel, self.rank, self.size, *kind)
        if name == "all_gather":
            x = x.view(ROWS, -1)
            return x, beside(expected, self.size, tuple(x.shape)) + number
        return x, expected + number * self.size

    def _proof_sizes(self, operation: str, chosen: Thresholds) -> list[int]:
        """Returns numbers of elements: the smallest, and around each bound, up to 1 MiB."""
        bounds = {"all_gather": ("all_gather_push", "all_gather"), FUSED: ("fused",)}
        bounds["reduce_scatter"] = ("reduce_scatter_push", "reduce_scatter")
        at = [getattr(chosen, name) for name in bounds.get(operation, ALGORITHMS)]
        found = {ROWS * self.size}
        for limit in at:
            few = min(limit, 1 << 20) // 2 // (ROWS * self.size) * ROWS * self.size
            found |= {each for each in (few, few + ROWS * self.size) if each}
        return sorted(found)

    def _be_late(self, own: random.Random) -> None:
        if self.device.type == "cuda" and own.random() < 0.5:
            keep_cuda_busy(own.randrange(200_000))
        else:
            time.sleep(own.random() * 2e-4)


class Candidates(GroupTeam):
    """Measures one operation's candidates with the benchmark's harness; every rank makes one."""

    name = "tune"

    def __init__(self, group: ps.GroupCoordinator, calls: Mapping[str, Call]) -> None:
        super().__init__(group)
        self._candidates = calls
        self._graphs: dict[Call, Captured] = {}

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        return {name: Exchange(call) for name, call in self._candidates.items()}

    def check(self, name: str) -> str | None:
        """Checks a candidate's answer, and captures the candidate in a graph once it was right on all ranks."""
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
        """Replays the graph until at least `calls` calls are made, and scales the time to `calls`."""
        graph, replays = self._graphs[call], -(-calls // CALLS_IN_A_GRAPH)
        seconds = self.clock.seconds(lambda: [graph.replay() for _ in range(replays)])
        return seconds * calls / (replays * CALLS_IN_A_GRAPH)


def _collective(operation: str) -> str:
    """Returns the harness's name of the operation's collective."""
    return "all_reduce" if operation == FUSED else operation


def choose(times: Mapping[str, Times], conditions: peer_thresholds.Conditions, source: str) -> Thresholds:
    """Returns the thresholds for a number of ranks; raises TuneError where an operation has no times."""
    ranks = conditions.world_size
    for operation in ORDERS:
        if not any(times.get(operation, {}).values()):
            raise TuneError(f"no row is written: nothing was measured of {operation} on {ranks} ranks")
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
        # Measured by a rank's input, bounded by its output.
        reduce_scatter=max(scatter.values()) // ranks,
        reduce_scatter_push=scatter["push"] // ranks,
        fused=bounds[FUSED]["fused"],
        measured=True,
        source=source,
        own_nccl=bool(ratios) and sum(ratios) < 0,
    )


def write(row: Thresholds, path: Path) -> None:
    """Adds a row to the file, in the place of one with the same conditions."""
    names = [field.name for field in fields(peer_thresholds.Conditions)]
    key = [getattr(row, name) for name in names]
    others = load(path).rows if path.exists() else ()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    dump([*(each for each in others if [getattr(each, name) for name in names] != key), row], whole, "measured")
    whole.replace(path)


# Starting.


def tune_rank(options: argparse.Namespace) -> Thresholds | None:
    """Runs one rank's part from its init to its destroy. Returns the row on the first rank."""
    place, gpus = environment.detect(rendezvous=False), torch.cuda.device_count()
    ranks = place.local_world_size or place.world_size
    os.environ.update({settings.NCCL.name: "on", settings.PEER_MEMORY.name: "off"})  # ours is made below, unbounded
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
            raise TuneError(f"there is nothing to measure: {problem}")
        conditions = peer_thresholds.conditions_of(device.arch(), peers.group.admission.topology, device.versions())
        name = torch.cuda.get_device_name(group.device)
        tuning = Tuning(group, peers, options.plan)
        row = tuning.row(conditions, f"python -m parallel_state tune, {name}, {datetime.date.today()}")
        return row if group.is_first_rank else None
    finally:
        if peers is not None:
            peers.close()
        ps.destroy_distributed_environment()


def _report(row: Thresholds, path: Path) -> None:
    print(f"{row.world_size} ranks, {row.arch}, {row.link}: {row}; {row.proven_calls} calls proven")
    if row.one_gpu_each:
        print(f"written to {path}: PARALLEL_STATE_PEER_MEMORY=auto, the default, goes by it from now on")
    else:
        print(f"written to {path} as evidence: the ranks shared a GPU, so auto never goes by it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where nothing was written for one of the numbers of ranks, 2 without a GPU."""
    parser = command_parser("tune", "[options]", __doc__)
    parser.add_argument("--ranks", type=positive, nargs="+", help="default: 2, 4, 6 and 8, as there are GPUs")
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, help="bytes that a rank holds")
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--proof-calls", type=positive, default=PROOF_CALLS, help="fewer prove less")
    parser.add_argument("--out", type=Path, help="instead of the user's rows")
    options = parser.parse_args(arguments)
    options.plan = Plan(options.rounds, sizes=tuple(options.sizes), proof_calls=options.proof_calls)
    path = options.out or user_path()
    require_writable(parser, options.out)
    gpus = torch.cuda.device_count()
    if gpus == 0:
        print("torch sees no CUDA device: there is nothing to measure here", file=sys.stderr)
        return 2
    if environment.detect(rendezvous=False).world_size > 1:
        found = tune_rank(options)
        if found is not None:
            write(found, path)
            _report(found, path)
        return 0
    code = 0
    for ranks in options.ranks or [each for each in (2, 4, 6, 8) if each <= gpus] or [2]:
        try:
            row = ps.launch(tune_rank, ranks, args=(options,), timeout=RUN_S)[0]
        except ps.LaunchError as error:
            print(f"{ranks} ranks: {error}", file=sys.stderr)
            code = 1
            continue
        if row is not None:
            write(row, path)
            _report(row, path)
    return code


def boundaries(times: Mapping[int, Mapping[str, float]], order: Sequence[str]) -> dict[str, int]:
    """Returns, for each candidate but the last of `order`, the largest size in bytes that it gets; 0 if it gets none.

    Candidates stand in an order, from the one for small messages to the one for all that is larger; each begins where
    the one before it ends. Among all such divisions the one is chosen whose times are least, as ratios: each size
    counts alike, whether it takes a microsecond or a second.

    `times`: size -> candidate -> its time, of the slowest rank. A candidate that has none at a size (it was wrong, or
    the size doesn't fit) isn't chosen there; sizes at which only one candidate has a time still count. Of divisions
    that are equally good, the one that leaves more to later candidates is taken.
    """
    sizes = sorted(size for size, by_name in times.items() if any(name in by_name for name in order))
    # best[c]: of the sizes so far, the cost of the best division whose last size has candidate c, and where each ended.
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
