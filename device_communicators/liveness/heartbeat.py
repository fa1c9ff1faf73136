"""Signs of life between hosts, over the store through which the ranks met.

On each host the lowest rank that lives and hasn't left beats: it writes a number that changes, and which ranks of its
host have died. Where that rank is stopped, or holds its interpreter's lock, the others of its host beat in its place.
Every rank reads all hosts' beats. A host whose number has stood still for longer than the limit is given up with all
its ranks; where the store itself can't be reached, the host that serves it, unless it is known that only the process
has ended which serves it: then the silence says nothing of others. Two threads, because a request to a store behind a
dead link may block for minutes: one asks, the other one looks at the clock.

A rank that can't read doesn't beat: with a link that is dead in one direction only, both sides find out. A rank that
was stopped itself has heard nobody in that time, and doesn't hold it against them. Whoever gives up a host tells all
hosts, so that no rank waits for one that has stopped waiting for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.helper_threads import HelperThread
from device_communicators.liveness.health import Watcher

logger = logging.getLogger("parallel_state")

_LOOKS_PER_INTERVAL = 4


@dataclass
class _Host:
    """One host, as far as it is known."""

    ranks: tuple[int, ...]
    name: str = ""
    beat: int = -1
    seen: float = field(default_factory=time.monotonic)
    given_up: bool = False
    has_left: bool = False
    gave_up: frozenset[int] = frozenset()
    """The hosts that its ranks have given up, by their first ranks."""

    def __str__(self) -> str:
        return f"host {self.name!r}" if self.name else "its host"


class Heartbeats:
    """This rank's part in the beating of all hosts of a world; for worlds over several hosts."""

    def __init__(
        self,
        store: Any,
        hosts: Sequence[Sequence[int]],
        rank: int,
        watcher: Watcher,
        *,
        interval_s: float,
        limit_s: float,
    ) -> None:
        """`store`: a connection of its own. `hosts`: global ranks by host; rank 0's is taken to serve the store."""
        self._store = BoundedStore.of(store)
        self._hosts = [_Host(tuple(ranks)) for ranks in hosts]
        self._own = next(host for host in self._hosts if rank in host.ranks)
        self._serving = next(host for host in self._hosts if 0 in host.ranks)
        self._rank = rank
        self._watcher = watcher
        self._interval_s = interval_s
        self.limit_s = limit_s
        self._reached = self._looked = time.monotonic()
        self._judges_at = 0.0
        """No host is given up before this time: this process was paused, and reads the other hosts' beats first."""
        self._broken = False
        self._stop = threading.Event()
        self._news = threading.Event()
        """Set by the end, and by a death, which is told at once and not with the next beat."""
        self._threads = [
            HelperThread(name, run) for name, run in (("heartbeat", self._exchange), ("beat-limit", self._look))
        ]

    def start(self) -> None:
        """Writes the first beat, and starts the threads. Every rank calls it."""
        self._write()
        self._watcher.on_death.append(self._news.set)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends this rank's part: another of its host beats from now on; without one, the host has left.

        Ends the threads; one that is stuck in the store ends with the process.
        """
        self._stop.set()
        self._news.set()
        with contextlib.suppress(ValueError):
            self._watcher.on_death.remove(self._news.set)
        self._threads[1].join(1.0)
        self._threads[0].join(self._interval_s)
        if not self._threads[0].is_alive() and not self._broken:
            with contextlib.suppress(RuntimeError):
                self._write(leaving=True)

    def _exchange(self) -> None:
        while True:
            self._news.wait(self._interval_s)
            self._news.clear()
            if self._stop.is_set():
                return
            try:
                self._read()
                self._write()
            except dist.DistNetworkError:  # the connection is gone for good: `_look` says so when it is time
                self._broken = True
                return
            except RuntimeError:  # the store didn't answer in time
                continue

    def _write(self, leaving: bool = False) -> None:
        dead = {death.rank for death in self._watcher.deaths_of(self._own.ranks)}
        alive = set(self._own.ranks) - dead
        present = {rank for rank in alive if rank == self._rank or not self._watcher.has_left(rank)}
        gave_up = {host.ranks[0] for host in self._hosts if host.given_up}
        stands_in = self._reached - self._own.seen > self.limit_s / 2 or not gave_up <= self._own.gave_up
        if (leaving and len(present) > 1) or (min(present) != self._rank and not stands_in):
            return
        state = {
            "beat": time.time_ns(),
            "name": socket.gethostname(),
            "dead": sorted(dead),
            "left": leaving,
            "gave_up": sorted(gave_up | self._own.gave_up),
        }
        self._store.set(_key(self._own), json.dumps(state))

    def _read(self) -> None:
        present = [host for host in self._hosts if host.beat >= 0 or self._store.check([_key(host)])]
        answers = self._store.multi_get([_key(host) for host in present]) if present else []
        self._reached = time.monotonic()
        for host, answer in zip(present, answers, strict=True):
            state = json.loads(answer)
            if state["beat"] != host.beat:
                host.beat, host.seen, host.name = state["beat"], self._reached, state["name"]
            host.has_left, host.gave_up = state["left"], frozenset(state["gave_up"])
            if host is not self._own:
                for rank in state["dead"]:
                    self._watcher.report(rank, f"on {host} has ended")
        for host in present:
            self._follow(host)

    def _follow(self, teller: _Host) -> None:
        """Gives up whom another host gave up; where that is this one, the host that did, which waits no longer."""
        for host in self._hosts:
            if host.ranks[0] in teller.gave_up and not host.given_up:
                if host is not self._own:
                    self._give_up(host, f"has not been heard of by {teller}: look at the network between the hosts")
                elif teller is not self._own:
                    self._give_up(teller, "has not heard of this host: look at the network between the hosts")

    def _look(self) -> None:
        while not self._stop.wait(self._interval_s / _LOOKS_PER_INTERVAL):
            now = time.monotonic()
            self._skip_pause(now)
            if now < self._judges_at:
                continue
            silent_s = now - self._reached
            server_ended = any(death.certain for death in self._watcher.deaths_of((0,)))
            if silent_s > self.limit_s and self._serving is not self._own and not server_ended:
                self._give_up(self._serving, _silence(silent_s))
            for host in self._hosts:
                # A host is judged by what the store says, so only for as long as the store answers.
                if host is not self._own and self._reached - host.seen > self.limit_s:
                    self._give_up(host, _silence(self._reached - host.seen))
            self._look_at_connections()

    def _look_at_connections(self) -> None:
        """Gives up hosts that are unreachable over data connections, whose route may differ from the store's."""
        try:
            of_groups = list(self._watcher.connections.items())
        except RuntimeError:  # another thread adds some: the next look, in a moment, has them
            return
        for connections, ranks in of_groups:
            silent = {ranks[peer] for peer in connections.silent_peers(self.limit_s)}
            for host in self._hosts:
                if silent.intersection(host.ranks) and host is not self._own:
                    self._give_up(
                        host,
                        f"has acknowledged nothing on a data connection for {self.limit_s:g} s: look at the network "
                        "between the hosts, at each interface that the connections take",
                    )
        if any(host.given_up and host.ranks[0] not in self._own.gave_up for host in self._hosts):
            self._news.set()  # publishes it at once

    def _skip_pause(self, now: float) -> None:
        """Leaves out the time for which this process itself was stopped, or didn't come to its threads."""
        paused_s = now - self._looked - self._interval_s / _LOOKS_PER_INTERVAL
        self._looked = now
        if paused_s > self._interval_s:
            logger.warning("rank %d was paused for %.1f s", self._rank, paused_s)
            self._judges_at = now + self._interval_s
            self._reached = min(now, self._reached + paused_s)
            for host in self._hosts:
                host.seen = min(now, host.seen + paused_s)

    def _give_up(self, host: _Host, reason: str) -> None:
        if host.given_up or host.has_left:
            return
        host.given_up = True
        for rank in host.ranks:
            self._watcher.report(rank, f"on {host} {reason}", certain=False, unreachable=True)


def _silence(silent_s: float) -> str:
    return f"has not been heard of for {silent_s:.1f} s: look at the network between the hosts"


def _key(host: _Host) -> str:
    return f"heartbeat/{host.ranks[0]}"
