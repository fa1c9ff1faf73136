"""Ranks in processes of their own, whose control planes a test drives one by one."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from device_communicators.base.host import local_namespace, namespace_id, start_time
from device_communicators.control.plane import Answer, Change, Endpoint, Member, Verdict, World
from device_communicators.cpu import native
from tests.workers import WorkerPool, WorkersFailedError

LIMIT_S, BEAT_S = 2.0, 0.3
DEADLINE_S = 60.0
THREAD = "ps-control"


class Seen(NamedTuple):
    at_s: float
    change: Change


class _Rank:
    world: World
    seen: list[Seen]


class Party:
    def __init__(self, pool: WorkerPool, hosts: Sequence[object], addresses: Sequence[str] | None = None) -> None:
        self.pool, self.hosts = pool, hosts
        self.addresses = addresses or ["127.0.0.1"] * len(hosts)
        self.size = len(hosts)
        self.endpoints: list[Endpoint] = []
        self.members: list[Member] = []

    def join(
        self,
        limit_s: float = LIMIT_S,
        beat_s: float = BEAT_S,
        port_range: str = "",
        only: Sequence[int] | None = None,
    ) -> None:
        if not self.pool._processes:
            self.pool._start()
        for rank, address in enumerate(self.addresses):
            self.begin(rank, open_world, address, limit_s, beat_s, port_range)
        self.members = []
        for rank, host in enumerate(self.hosts):
            pid, began, domain, endpoint = self.end(rank)
            self.members.append(Member(rank, f"{domain}/{host}", pid, began, Endpoint.parse(endpoint)))
        self.endpoints = [each.endpoint for each in self.members]
        self.meet(range(self.size) if only is None else only)

    def meet(self, ranks: Iterable[int]) -> None:
        self.each(ranks, meet, self.members)

    def begin(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self.pool._connections[rank].send_bytes(pickle.dumps((function, args, None)))

    def end(self, rank: int) -> Any:
        connection = self.pool._connections[rank]
        if not connection.poll(DEADLINE_S):
            raise WorkersFailedError({rank: f"no answer within {DEADLINE_S} s"})
        ok, value = pickle.loads(connection.recv_bytes())
        if not ok:
            raise WorkersFailedError({rank: value})
        return value

    def each(self, ranks: Iterable[int], function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        chosen = list(ranks)
        for rank in chosen:
            self.begin(rank, function, *args)
        return {rank: self.end(rank) for rank in chosen}

    def others(self, *ranks: int) -> list[int]:
        return [rank for rank in range(self.size) if rank not in ranks]

    def signal(self, number: int, *ranks: int) -> float:
        """Returns the time. After SIGSTOP all threads of the ranks have stopped."""
        pids = [self.pool._processes[rank].pid for rank in ranks]
        for pid in pids:
            os.kill(pid, number)
        sent_s = time.time()
        while number == signal.SIGSTOP and not all(map(_has_stopped, pids)):
            time.sleep(0.001)
        return sent_s

    def latest(self, ranks: Iterable[int], kind: str, about: Iterable[int], since_s: float, timeout_s: float) -> float:
        found = self.each(ranks, wait_for, [(kind, each) for each in about], timeout_s)
        return max(seen.at_s for each in found.values() for seen in each) - since_s

    def changes(self, rank: int) -> list[tuple[str, int]]:
        return [(seen.change.kind, seen.change.rank) for seen in self.each([rank], seen_so_far)[rank]]

    def restart(self) -> None:
        for process in self.pool._processes:
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive():
                    os.kill(process.pid, signal.SIGCONT)
        self.pool.kill()


def open_world(address: str, limit_s: float, beat_s: float, port_range: str) -> tuple[int, str, str, str]:
    os.environ.update({"PARALLEL_STATE_PORTS": port_range})
    _Rank.seen = []
    _Rank.world = World(native.load(), address, limit_s=limit_s, beat_s=beat_s)
    pid = int(os.readlink("/proc/self"))
    domain = f"{namespace_id('pid')}/{local_namespace('time')}"
    return pid, start_time(pid), domain, str(_Rank.world.endpoint)


def meet(members: list[Member]) -> None:
    _Rank.world.meet(members, lambda change: _Rank.seen.append(Seen(time.time(), change)), _reply)


def _reply(rank: int, question: bytes) -> Answer:
    if question == b"later":
        return lambda reply: threading.Timer(0.1, reply, (b"%d: now" % rank,)).start()
    if question == b"never":
        return lambda reply: None
    return b"%d: %s" % (rank, question)


def world() -> World:
    return _Rank.world


def seen_so_far() -> list[Seen]:
    return list(_Rank.seen)


def wait_for(wanted: list[tuple[str, int]], timeout_s: float) -> list[Seen]:
    until_s = time.time() + timeout_s
    while True:
        found = {(seen.change.kind, seen.change.rank): seen for seen in reversed(seen_so_far())}
        if set(wanted) <= set(found):
            return [found[each] for each in wanted]
        if time.time() > until_s:
            raise AssertionError(f"{wanted} not seen within {timeout_s} s, but {found}")
        time.sleep(0.005)


def agree(purpose: str, ranks: list[int], value: bytes, timeout_s: float, attempt: int = 0) -> tuple[Verdict, float]:
    began_s = time.monotonic()
    verdict = _Rank.world.agree(purpose, attempt, ranks, value, timeout_s)
    return verdict, time.monotonic() - began_s


def leave(linger_s: float = 1.0) -> float:
    began_s = time.monotonic()
    _Rank.world.leave(linger_s)
    return time.monotonic() - began_s


def threads() -> dict[int, str]:
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
            found[int(thread)] = file.read().strip()
    return found


def _has_stopped(pid: int) -> bool:
    stats = [each.read_text(errors="replace") for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(") ")[2][:1] in "TZX" for stat in stats)
