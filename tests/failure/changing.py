"""Ranks of a group whose members change, for tests and benchmarks. They exchange handles through files."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import parallel_state  # noqa: F401 - registers the backend
from parallel_state import error_of
from tests.contract.attempts import ELAPSED_WITHIN_S, check_elapsed

IS_THERE = hasattr(c10d, "_reconfigure")
"""torch has `reconfigure` since 2.15."""
WAIT_S = 60.0
_HEAD_START_S = 0.01
"""In this time each member reads that all are there."""
_WORDS = 2048


def tell(folder: Path, key: str, text: str) -> None:
    part = folder / f"{key}.{os.getpid()}"
    part.write_text(text)
    part.replace(folder / key)


def hear(folder: Path, key: str, nap_s: float = 0.001, wait_s: float = WAIT_S) -> str:
    deadline = time.monotonic() + wait_s
    while not (folder / key).exists():
        assert time.monotonic() < deadline, f"nobody told {key}"
        time.sleep(nap_s)
    return (folder / key).read_text()


class Member:
    """A process with a default group that has no members yet. `name` stays, whatever its rank."""

    def __init__(
        self, folder: Path, backend: str = "parallel_state", timeout_s: float = 30.0, meets: bool = False
    ) -> None:
        """`meets`: members call reconfigure at the same moment."""
        self.folder, self.name, self._meets = folder, int(os.environ["RANK"]), meets
        self._is_gloo = backend == "gloo"
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(folder / "store")) if self._is_gloo else dist.HashStore(),
            rank=self.name if self._is_gloo else 0,
            world_size=int(os.environ["WORLD_SIZE"]) if self._is_gloo else 1,
            timeout=timedelta(seconds=timeout_s),
            enable_reconfigure=True,
        )
        self.prepared_s = 0.0
        """Time of the last `become` before it called reconfigure."""
        tell(folder, f"handle-{self.name}", c10d._get_reconfigure_handle())

    @property
    def backend(self) -> Any:
        return dist.get_backend_impl(device=torch.device("cpu"))  # type: ignore[attr-defined]

    def handles(self, names: Sequence[int], key: str = "handle") -> list[str]:
        return [hear(self.folder, f"{key}-{name}") for name in names]

    def become(self, uuid: int, names: Sequence[int], timeout_s: float = 30.0) -> float:
        called, key = time.monotonic(), f"handle-{uuid}" if self._is_gloo else "handle"
        if self._is_gloo:
            tell(self.folder, f"{key}-{self.name}", c10d._get_reconfigure_handle())
        handles = self.handles(names, key)
        if self._meets:
            begin = max(self.meet(f"begin-{uuid}", names)) + _HEAD_START_S
            time.sleep(max(0.0, begin - time.monotonic()))
        started = time.monotonic()
        self.prepared_s = started - called
        c10d._reconfigure(uuid, handles, timeout=timedelta(seconds=timeout_s)).wait()
        took_s = time.monotonic() - started
        assert (dist.get_rank(), dist.get_world_size()) == (list(names).index(self.name), len(names))
        return took_s

    def meet(self, key: str, names: Sequence[int]) -> list[float]:
        """Waits until all members call this. Returns when each of them did so, by the host's clock."""
        tell(self.folder, f"{key}-{self.name}", repr(time.monotonic()))
        return [float(hear(self.folder, f"{key}-{name}")) for name in names]


def add_up(round_: int = 0) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((_WORDS,), float(round_ % 1000 + rank))
    dist.all_reduce(x)
    expected = float(sum(round_ % 1000 + each for each in range(size)))
    assert x.eq(expected).all(), f"{x.unique().tolist()} is not {expected}"


class Round(NamedTuple):
    error: str
    suspects: tuple[int, ...]
    victim: int
    error_s: float
    """From the SIGKILL to the error of the call under way; 0 without a SIGKILL."""
    right_s: float
    """From the SIGKILL or the abort to the first right collective of the survivors. Without the time in which they
    exchange handles and wait for each other, if they do.
    """
    reconfigure_s: float
    join_s: float
    joined_s: float
    """From the begin of the join to the first right collective with the new member."""


def kill_and_replace(
    folder: str, size: int, rounds: int, backend: str = "parallel_state", seed: int = 0, polite: bool = False
) -> bool:
    """In each round a rank is killed in the middle of traffic; the others go on without it, then with a spare.
    Processes from `size` on are spares, one a round. `seed` chooses the victims. `polite`: all abort
    between two calls, and the victim exits. `rounds_in(folder)` reads the results."""
    # torch's flight recorder imports torch's compiler for its file, which takes seconds.
    os.environ["TORCH_FR_DUMP_ON_TIMEOUT"] = "0"
    member = Member(Path(folder), backend, meets=polite)
    names, chance = list(range(size)), random.Random(seed)
    for round_ in range(rounds):
        if round_ == 0 and member.name in names:
            member.become(0, names)
        if member.name == names[0]:
            tell(member.folder, f"begin-round-{round_}", "")
        if member.name == size + round_:  # spares poll slowly until then, as they share the cores
            hear(member.folder, f"begin-round-{round_}", nap_s=0.02, wait_s=WAIT_S * rounds)
        victim = chance.choice(names)
        rest = [name for name in names if name != victim]
        if member.name in names:
            measured = (_part if polite else _lose)(member, names, victim, rest, round_)
        names = [*rest, size + round_]
        if member.name in names:
            join_s = member.become(2 * round_ + 2, names, timeout_s=WAIT_S)
            returned = time.monotonic()
            add_up(round_)
            if member.name in rest:
                joined_s = join_s + time.monotonic() - returned
                measured = measured._replace(join_s=join_s, joined_s=joined_s)
                tell(member.folder, f"round-{round_}-{member.name}", json.dumps(measured))
    if member.name in names:
        dist.destroy_process_group()
    return True


def _lose(member: Member, names: Sequence[int], victim: int, rest: Sequence[int], round_: int) -> Round:
    if member.name == victim:
        threading.Timer(0.02 + 0.003 * (round_ % 10), _kill_me, [member.folder, round_]).start()
    try:
        number = 0
        while True:
            began = time.monotonic()
            add_up(number)
            number += 1
    except Exception as error:
        ended, known = time.monotonic(), error_of(error)
        check_elapsed(known, ended - began - ELAPSED_WITHIN_S, ended - began + ELAPSED_WITHIN_S)
        kind, suspects = type(error).__name__, getattr(known, "suspect_ranks", ())
        if isinstance(error, AssertionError):
            raise
    reconfigure_s, right = _go_on(member, rest, round_)
    killed = float(hear(member.folder, f"killed-{round_}"))
    return Round(kind, tuple(suspects), names.index(victim), ended - killed, right - killed, reconfigure_s, 0.0, 0.0)


def _part(member: Member, names: Sequence[int], victim: int, rest: Sequence[int], round_: int) -> Round:
    for number in range(20):
        add_up(number)
    started = time.monotonic()
    member.backend.abort()
    if member.name == victim:
        os._exit(0)
    reconfigure_s, right = _go_on(member, rest, round_)
    return Round("", (), names.index(victim), 0.0, right - started - member.prepared_s, reconfigure_s, 0.0, 0.0)


def _go_on(member: Member, rest: Sequence[int], round_: int) -> tuple[float, float]:
    reconfigure_s = member.become(2 * round_ + 1, rest)
    add_up(round_)
    return reconfigure_s, time.monotonic()


def _kill_me(folder: Path, round_: int) -> None:
    tell(folder, f"killed-{round_}", repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def rounds_in(folder: Path, rounds: int) -> list[list[Round]]:
    found = []
    for round_ in range(rounds):
        texts = [each.read_text() for each in sorted(folder.glob(f"round-{round_}-*"))]
        found.append([Round(*json.loads(text)) for text in texts])
    return found


def latest_by_round(found: Sequence[Sequence[Round]], of: str) -> list[float]:
    return [max(getattr(one, of) for one in each) for each in found]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
