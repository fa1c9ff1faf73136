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
import logging
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
from device_communicators.cuda import nccl_library
from device_communicators.machine import group_topology
from device_communicators.peer import thresholds as peer_thresholds
from device_communicators.peer.device import PeerDevice
from device_communicators.peer.thresholds import ALGORITHMS, Thresholds, dump, load, user_path
from parallel_state.startup import environment

logger = logging.getLogger("parallel_state")

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
HIDDEN, ROWS = 4096, 4
"""The longest row of a norm; the rows of a matrix that all_gather gathers along its last dim."""
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
class Plan:
    """Says how long and how much is measured and proven."""

    sizes: Sequence[int] = SIZES
    rounds: int = 20
    round_s: float = 0.005
    proof_calls: int = PROOF_CALLS


class TuneError(RuntimeError):
    """There is nothing to measure, or what was measured is wrong."""


def _add_norm(communicator: Communicator, x: Tensor) -> Tensor:
    """Returns the sum, which is checked: norms differ in their last bits, and were proven when the group was made."""
    rows = x.view(-1, math.gcd(x.numel(), HIDDEN))
    residual = torch.zeros_like(rows)
    return communicator.all_reduce_add_rms_norm(rows, residual, torch.ones_like(rows[0]), 1e-6)[1].view(x.shape)


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

    def candidates(self, operation: str) -> dict[str, Callable[[Tensor], Tensor]]:
        call, other, torchs = CALLS[operation], self._other, self._torchs
        found = {name: self._only(call, name) for name in ORDERS[operation] if name != OTHER}
        found[OTHER] = lambda x: call(other, x)
        if operation == "all_reduce" and torchs is not None and torchs is not other:
            found[TORCHS] = lambda x: call(torchs, x)
        return found

    def _only(self, call: Callable[[Communicator, Tensor], Tensor], name: str) -> Callable[[Tensor], Tensor]:
        """Returns the call with thresholds by which it has this kernel at every size."""
        kinds = {"all_gather_push": "push", "reduce_scatter_push": "push", "fused": "fused"}
        kinds.update({each: each for each in ALGORITHMS})
        never = {bound: 0 for bound, kind in kinds.items() if kind != name}
        return self._by(call, Thresholds(**{**_UNBOUNDED, **never}))

    def _by(self, call: Callable[[Communicator, Tensor], Tensor], thresholds: Thresholds) -> Callable[[Tensor], Tensor]:
        admission = replace(self._peers.group.admission, pinned=None, thresholds=thresholds)

        def chosen(x: Tensor) -> Tensor:
            self._peers.group.admission = admission
            return call(self._peers, x)

        return chosen

    @torch.inference_mode()
    def _times(self, operation: str, size_bytes: int) -> dict[str, float]:
        """Returns medians of the slowest rank's microseconds. Candidates that are wrong on a rank have none."""
        dtype = torch.bfloat16
        numel = max(1, size_bytes // dtype.itemsize // (ROWS * self.size)) * ROWS * self.size
        x, expected = self._given(operation, numel, 0, self.rank), self._answer(operation, numel, 0)
        runs: dict[str, Callable[[int], None]] = {}
        for name, call in self.candidates(operation).items():
            run: Any = None
            problem = _problem(call, x, expected)
            if not any(self._gather(problem)):
                run, problem = _attempt(self._repeated, call, x)
            problems = self._gather(problem)
            if any(problems):
                logger.warning("%s by %s is left out: %s", operation, name, problems)
            else:
                runs[name] = run
        calls = {name: self._calls(run) for name, run in runs.items()}
        us: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.plan.rounds):
            for name, run in runs.items():
                us[name].append(max(self._gather(self._seconds(run, calls[name]))) / calls[name] * 1e6)
        return {name: statistics.median(each) for name, each in us.items()}

    def _given(self, operation: str, numel: int, number: int, rank: int) -> Tensor:
        flat = (torch.arange(numel, device=self.device) % 7 + rank + number % 5).to(torch.bfloat16)
        return flat.view(ROWS, -1) if operation == "all_gather" else flat

    def _answer(self, operation: str, numel: int, number: int) -> Tensor:
        inputs = [self._given(operation, numel, number, rank) for rank in range(self.size)]
        if operation == "all_gather":
            return torch.cat(inputs, 1)
        total = torch.stack([each.float() for each in inputs]).sum(0).to(torch.bfloat16)
        return total.view(self.size, -1)[self.rank] if operation == "reduce_scatter" else total

    def _repeated(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[int], None]:
        """Returns a function that makes so many calls, on a GPU by replays of a graph with CALLS_IN_A_GRAPH of them."""
        if self.device.type != "cuda":

            def run(calls: int) -> None:
                for _ in range(calls):
                    call(x)

            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_IN_A_GRAPH):
                call(x)

        def replay(calls: int) -> None:
            for _ in range(calls // CALLS_IN_A_GRAPH):
                graph.replay()

        return replay

    def _calls(self, run: Callable[[int], None]) -> int:
        """Returns as many calls as fill a round, the same on all ranks."""
        once = max(self._gather(self._seconds(run, CALLS_IN_A_GRAPH)))
        return CALLS_IN_A_GRAPH * max(1, min(1000, int(self.plan.round_s / max(once, 1e-7))))

    def _seconds(self, run: Callable[[int], None], calls: int) -> float:
        self._finish()
        self.group.barrier()
        started = time.perf_counter()
        run(calls)
        self._finish()
        return time.perf_counter() - started

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _gather(self, mine: Any) -> list[Any]:
        """Returns each rank's value, in rank order."""
        return list(self.group.all_gather_object(mine))

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
                answers[operation, numel, number] = (
                    self._given(operation, numel, number, self.rank), self._answer(operation, numel, number),
                )  # fmt: skip
            x, expected = answers[operation, numel, number]
            if own.random() < 0.02:
                self._be_late(own)
            wrong[which] += (calls[operation](x) != expected).any()
        counts = self._gather([int(each) for each in wrong])
        for rank, each in enumerate(counts):
            if any(each):
                operation, numel = cases[max(range(len(cases)), key=each.__getitem__)]
                raise TuneError(
                    f"no row is written: of {self.plan.proof_calls} calls {sum(each)} were wrong on rank {rank}, most "
                    f"of them {operation} of {numel} elements; report this with `python -m parallel_state topology`"
                )

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


def _attempt(call: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """Returns what the call returned, or None and what went wrong."""
    try:
        return call(*arguments), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _problem(call: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> str | None:
    found, problem = _attempt(call, x)
    return problem or (None if torch.equal(found.view(-1), expected.reshape(-1)) else "a wrong answer")


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
        group_topology.share_gpus(place.local_rank, ranks, gpus, nccl_library.load().version)
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
    parser = argparse.ArgumentParser(
        prog="python -m parallel_state tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", help="of its own; default: 2, 4, 6 and 8, as there are GPUs")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes that a rank holds")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--proof-calls", type=int, default=PROOF_CALLS, help="fewer prove less")
    parser.add_argument("--out", type=Path, help="instead of the user's rows")
    options = parser.parse_args(arguments)
    options.plan = Plan(tuple(options.sizes), options.rounds, proof_calls=options.proof_calls)
    path = options.out or user_path()
    gpus = torch.cuda.device_count()
    if gpus == 0:
        print("torch sees no CUDA device: there is nothing to measure here")
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
            print(f"{ranks} ranks: {error}")
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
