"""Trials of row 39 of docs/failures.md. Seed and transport determine a layout, a program and the death of one
or two ranks. All ranks run the program, which calls all their groups. When a call fails, the rank makes one
more call on each of its groups. Its exit would inform its peers, so it stays until all survivors have
reported, or `STAY_S` after the kill."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, attempt_all, environment
from tests.failure.over_torch import OVER_TORCH, groups_of, torch_world
from tests.failure.trials import keep, kept, median_of
from tests.failure.worlds import DEADLINE_S, LONG_TIMEOUT_S, OPERATIONS, calls_of_all, settings_of
from tests.hosts import Hosts
from tests.workers import WorkerPool

TRANSPORTS = ("shared memory", "connections", "two hosts")
STAY_S = 15.0
LAYOUTS = tuple(
    (tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2, 4) for dp in (1, 2, 4) if 3 <= tp * pp * dp <= 8 if tp * pp > 1
)
_START_S = 60.0
_STEPS = 100_000
_BEFORE_S = 0.3


class Told(NamedTuple):
    group: str
    outcome: Outcome
    at_s: float
    slept: bool
    """This rank slept or computed just before: then only the call's own duration counts."""


@dataclass
class Trial:
    transport: str
    seed: int
    layout: tuple[int, int, int] = (0, 0, 0)
    victims: tuple[int, ...] = ()
    store_on_rank_0: bool = False
    late_s: dict[int, float] = field(default_factory=dict)
    latest_s: list[float] = field(default_factory=list)
    began: bool = True
    wrong: list[str] = field(default_factory=list)

    @property
    def last_s(self) -> float:
        return math.inf if self.wrong or not self.late_s else max(self.late_s.values())


def run_trial(transport: str, seed: int, folder: Path, most_ranks: int = 8) -> Trial:
    chance = random.Random(f"{transport} {seed}")
    layout = chance.choice([sizes for sizes in LAYOUTS if math.prod(sizes) <= most_ranks])
    size = math.prod(layout)
    victims = tuple(chance.sample(range(size), chance.choice((1, 1, 2)) if size > 3 else 1))
    trial = Trial(transport, seed, layout, victims, transport == "two hosts" or chance.random() < 0.3)
    delay_s, gap_s = chance.uniform(0.0, _BEFORE_S), chance.choice((0.0, 0.0, 0.02, 0.2))
    with _ranks(transport, size, trial.store_on_rank_0) as pool:
        killed: list[float] = []
        killer = threading.Thread(target=_kill, args=(pool, size, victims, delay_s, gap_s, folder, killed), daemon=True)
        killer.start()
        try:
            results = pool.survivors(
                _live, transport, layout, seed, str(folder), timeout_s=_START_S + DEADLINE_S + STAY_S
            )
        except AssertionError as error:
            trial.wrong.append(f"a rank raised or was late: {error}")
            trial.began = bool(killed)
            return trial
        finally:
            (folder / "stop").touch()
            killer.join(DEADLINE_S)
    _judge(trial, results, killed)
    return trial


@contextlib.contextmanager
def _ranks(transport: str, size: int, store_on_rank_0: bool) -> Iterator[WorkerPool]:
    if transport == "two hosts":
        with Hosts(2) as hosts, hosts.ranks([0] * (size // 2) + [1] * (size - size // 2)) as ranks:
            yield ranks
        return
    pool = _PoolWithStore(size) if store_on_rank_0 else WorkerPool(size)
    try:
        yield pool
    finally:
        pool.kill()


class _PoolWithStore(WorkerPool):
    def _serve_store(self) -> None:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            self._port = holder.getsockname()[1]

    def _environment(self, rank: int) -> dict[str, str]:
        return {**super()._environment(rank), "MASTER_PORT": str(self._port), "TORCHELASTIC_USE_AGENT_STORE": ""}


def _kill(
    pool: WorkerPool, size: int, victims: Sequence[int], delay_s: float, gap_s: float, folder: Path, killed: list[float]
) -> None:
    if not _until(lambda: len(list(folder.glob("begun-*"))) == size, _START_S):
        return
    time.sleep(delay_s)
    for victim in victims:
        os.kill(pool._processes[victim].pid, signal.SIGKILL)
        killed.append(time.monotonic())
        time.sleep(gap_s)
    _until(lambda: len(list(folder.glob("told-*"))) == size - len(victims), STAY_S)
    (folder / "stop").touch()


def _until(true: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _live(transport: str, layout: tuple[int, int, int], seed: int, folder: str) -> list[Told]:
    if transport == OVER_TORCH:
        with torch_world(timeout_s=LONG_TIMEOUT_S) as world:
            return _work(seed, Path(folder), {**groups_of(layout), "world": world}, _CALLS_OVER_TORCH)
    with environment(**settings_of(transport)):
        ps.init_distributed_environment(timeout=LONG_TIMEOUT_S)
        ps.initialize_model_parallel(*layout[:2], data_parallel_size=layout[2])
    try:
        world = ps.get_world_group()
        kinds = {"tp": ps.get_tp_group(), "pp": ps.get_pp_group(), "dp": ps.get_dp_group(), "world": world}
        groups = {name: group for name, group in kinds.items() if group.world_size > 1}
        return _work(seed, Path(folder), groups, _CALLS)
    finally:
        ps.destroy_distributed_environment()


def _work(seed: int, folder: Path, groups: dict[str, Any], calls: Sequence[str]) -> list[Told]:
    world = groups["world"]
    shared, own = random.Random(seed), random.Random(f"{seed} {world.rank}")
    for name in groups:
        _call(name, groups[name], "all_reduce")
    (folder / f"begun-{world.rank}").touch()
    told: list[Told] = []
    for _ in range(_STEPS):
        # All ranks draw the same call. A pipeline's goes from stage to stage, so ranks wait in a chain.
        name, kind = shared.choice([*groups]), shared.choice(calls)
        name = name if name in groups and not (name == "world" and shared.random() < 0.7) else next(iter(groups))
        slept = own.random() < 0.02
        if slept:
            _pass_time(own)
        others = [] if kind != STARTED_IN_ALL else own.sample([*groups], len(groups))
        outcome = attempt(_call, name, groups[name], kind) if not others else attempt_all(_start_in_all, groups, others)
        if outcome.kind != "ok":
            told.append(Told(name, outcome, time.monotonic(), slept))
            break
    if own.random() < 0.3:
        time.sleep(own.uniform(0.0, 1.5))
    for name, group in groups.items():
        told.append(Told(name, attempt(_call, name, group, "all_reduce"), time.monotonic(), True))
    (folder / f"told-{world.rank}").touch()
    _until(lambda: (folder / "stop").exists(), STAY_S + DEADLINE_S)
    return told


_CALLS = (
    "all_reduce",
    "all_reduce_async",
    "all_gather",
    "barrier",
    "broadcast_object",
    "chain",
    "chain of dicts",
    "ring",
)


STARTED_IN_ALL = "all_reduce_async in all groups"
_CALLS_OVER_TORCH = (
    *(name for name in OPERATIONS if name not in ("all_reduce_add_rms_norm", "send_tensor_dict")), "chain", "ring",
    *[STARTED_IN_ALL] * 4,
)  # fmt: skip


def _start_in_all(groups: dict[str, Any], order: Sequence[str]) -> None:
    started = [(groups[name], groups[name].all_reduce_async(torch.full((5,), 1.0))) for name in (*order, *order)]
    for group, work in started[::-1]:
        if not torch.equal(work.wait(), torch.full((5,), float(group.world_size))):
            raise ValueError(f"a started all_reduce of {group.world_size} ranks is wrong")


def _call(name: str, group: Any, kind: str) -> None:
    if kind not in _CALLS:
        calls_of_all(group)[kind]()
        return
    rank, size = group.rank_in_group, group.world_size
    x = torch.full((5,), float(rank))
    total = torch.full((5,), float(size * (size - 1) // 2))
    found, expected = x, x
    if kind == "all_reduce":
        found, expected = group.all_reduce(x), total
    elif kind == "all_reduce_async":
        found, expected = group.all_reduce_async(x).wait(), total
    elif kind == "all_gather":
        found, expected = group.all_gather(x), torch.arange(size).repeat_interleave(5).float()
    elif kind == "barrier":
        group.barrier()
    elif kind == "broadcast_object":
        found = torch.tensor(group.broadcast_object([rank] * 5, size - 1)).float()
        expected = torch.full((5,), size - 1.0)
    elif kind == "chain":
        if rank > 0:
            found, expected = group.recv((5,), torch.float32, rank - 1), x - 1
        if rank < size - 1:
            group.send(x, rank + 1)
    elif kind == "chain of dicts":
        if rank > 0:
            found, expected = group.recv_tensor_dict(rank - 1)["x"], x - 1
        if rank < size - 1:
            group.send_tensor_dict({"x": x, "name": name}, rank + 1)
    else:
        sent = group.isend(x, (rank + 1) % size)
        found = group.irecv((5,), torch.float32, (rank - 1) % size).wait()
        expected = torch.full((5,), float((rank - 1) % size))
        sent.wait()
    if not torch.equal(found, expected):
        raise ValueError(f"{kind} on {group}: {found.tolist()} is not {expected.tolist()}")


def _pass_time(own: random.Random) -> None:
    length_s = own.uniform(0.0, 0.4)
    if own.random() < 0.5:
        time.sleep(length_s)
        return
    until = time.monotonic() + length_s
    while time.monotonic() < until:
        torch.ones(100, 100).exp()


def _judge(trial: Trial, results: dict[int, list[Told]], killed: list[float]) -> None:
    size = math.prod(trial.layout)
    survivors = [rank for rank in range(size) if rank not in trial.victims]
    wrong = trial.wrong
    if sorted(results) != survivors or len(killed) != len(trial.victims):
        wrong.append(f"of the survivors {survivors}, {sorted(results)} told; {len(killed)} ranks were killed")
        return
    for rank, told in results.items():
        first = told[0]
        trial.late_s[rank] = round(first.outcome.seconds if first.slept else first.at_s - killed[0], 3)
        for each in told:
            outcome, what = each.outcome, f"rank {rank}, {each.group}"
            if outcome.kind not in ("PeerDiedError", "GroupFailedError"):
                wrong.append(f"{what}: {outcome.kind} {outcome.text[:300]}")
            elif not outcome.suspect_ranks or not set(outcome.suspect_ranks) <= set(trial.victims):
                wrong.append(f"{what}: names {outcome.suspect_ranks}: {outcome.text[:300]}")
        if first.outcome.kind != "PeerDiedError":
            wrong.append(f"rank {rank}, first: {first.outcome.kind} {first.outcome.text[:300]}")


def run_to_the_bound(transport: str, seed: int, folder: Path, most_ranks: int = 8) -> Trial:
    """Runs a trial. If a survivor took 1 s or more, repeats it: the median of `latest_s` must be below 1 s."""
    numbers = itertools.count()

    def run() -> Trial:
        at = folder / str(next(numbers))
        at.mkdir()
        return run_trial(transport, seed, at, most_ranks)

    def again() -> float:
        repeated = run()
        trial.wrong += repeated.wrong
        return repeated.last_s

    trial = run()
    if trial.began and not trial.wrong:
        trial.latest_s = median_of(again, trial.last_s)
    return trial


def run_trials(transport: str, seeds: Sequence[int], folder: Path) -> None:
    for seed in seeds:

        def run(seed: int = seed) -> dict[str, Any] | None:
            with tempfile.TemporaryDirectory() as scratch:
                trial = run_to_the_bound(transport, seed, Path(scratch))
            return asdict(trial) if trial.began else None

        keep(folder, f"{transport.replace(' ', '-')}-{seed}", run)


def results_in(folder: Path, transport: str) -> list[Trial]:
    return [Trial(**each) for each in kept(folder, transport.replace(" ", "-"))]
