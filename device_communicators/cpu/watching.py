"""Starts failure detection for a process group's ranks. The ranks exchange addresses through a store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore
from device_communicators.base.errors import CommunicationError, PeerDiedError, RendezvousError, format_ranks
from device_communicators.base.host import gloo_address, is_loopback, namespace_id, process_domain, start_time
from device_communicators.control.plane import Endpoint
from device_communicators.cpu import native
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.liveness.health import LOOPBACK, Place, Watcher, answer_within

_OWN_NAME_S = 2.0
_ATTEMPT, _FIRST_CALL, _OTHER_CALL = "process/attempt", "process/call", "process/other_call"
_TOKEN_BYTES = 8
_CALLS_DIFFER = "calls differ"
"""Value of the key `_ATTEMPT` after two ranks passed different `call`s. No rank then starts another attempt."""
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.001, 0.02
_LOOKS_PER_S = 10_000
_NEAR_S = 0.5
_NOTHING = "?"
TOGETHER_S = 0.1
"""Ranks that exit within this time are reported together."""


def listen(watcher: Watcher, address: str) -> str:
    """Starts this rank's control plane, unless `watcher` has one. Returns its address, or "" if it can't start.
    Replaces an empty or loopback `address` by the host's address.
    """
    if watcher.endpoint is not None:
        return str(watcher.endpoint)
    if not address or is_loopback(address):  # as /etc/hosts' 127.0.1.1
        address = answer_within(_OWN_NAME_S, gloo_address) or LOOPBACK
    try:
        library: Any = native.load()
    except native.NativeUnavailableError as error:
        library = str(error)
    return str(watcher.listen(library, address) or "")


def meet(
    store: BoundedStore,
    rank: int,
    ranks: Sequence[int],
    watcher: Watcher,
    address: str,
    caller: str,
    *,
    note: str = "",
    limit_s: float = float("inf"),
    call: str = "",
) -> list[str]:
    """Starts to watch the global `ranks` for failures, unless a rank passes a `note`: why that rank can't be watched.
    Each of these ranks must call this. Returns all notes, in the order of `ranks`.

    `store`: must have a prefix that only this call uses. `rank`: this rank. `address`: of this host. `caller`: function
    named in errors. `call`: arguments that must be equal on all ranks. Raises RendezvousError with the missing ranks,
    or PeerDiedError if the rank that serves the store exited. Raises CallsDifferError at most 20 ms after two ranks
    passed different `call`s.
    """
    limit_s, pid = min(limit_s, settings.START_TIMEOUT_S.get()), os.getpid()
    own = Place(socket.gethostname(), namespace_id("net"), process_domain(), pid, start_time(pid), None)
    near, started = Neighbours(own.processes), time.monotonic()
    entry = json.dumps([*own[:-1], listen(watcher, address), note])
    roll = _Roll(store.until(started + limit_s + LAST_WORD_S), rank, ranks, entry, near, call)

    def not_met(kind: type[CommunicationError], why: str, suspects: Sequence[int]) -> CommunicationError:
        return kind(
            f"{caller}() on rank {rank} of {len(ranks)} failed: {why}. Each of the group's ranks must call {caller}()",
            operation=caller,
            rank=rank,
            suspect_ranks=suspects,
            elapsed_s=time.monotonic() - started,
            timeout_s=limit_s,
        )

    try:
        entries, missing = roll.call(started + limit_s)
    except dist.DistError as error:
        kind, why, suspects = watcher.explain_lost_store(store, error, ranks)
        if kind is CommunicationError:  # the server exited, or is exiting
            kind = RendezvousError if store.served_by is None else PeerDiedError
            time.sleep(TOGETHER_S)
            if ended := sorted(near.ended().difference(suspects)):
                suspects, why = [*suspects, *ended], f"{why}; global ranks {format_ranks(ended)} exited"
        raise not_met(kind, why, suspects) from error
    if not entries:
        why = f"ranks {format_ranks(missing)} did not call {caller}() within {limit_s:g} s"
        raise not_met(RendezvousError, why, missing)
    places, notes = {}, []
    for each, (*place, endpoint, its_note) in zip(ranks, entries, strict=True):
        places[each] = Place._make([*place, Endpoint.parse(endpoint) if endpoint else None])
        notes.append(its_note)
    if not any(notes):
        watcher.follow(rank, places)
    return notes


class Neighbours:
    """Finds exited ranks in this PID namespace, among those that have called `meet`, after the connection to the store
    broke.
    """

    def __init__(self, processes: str) -> None:
        self.key = f"near/{processes}" if processes else ""
        self.found: dict[int, tuple[int, str]] = {}

    def enter(self, store: BoundedStore, rank: int, prefix: str = "") -> None:
        if self.key:
            with contextlib.suppress(NotImplementedError):  # another kind of store
                store.append(prefix + self.key, f"{rank} {os.getpid()} {start_time(os.getpid())}\n")

    def read(self, store: BoundedStore, prefix: str = "") -> None:
        found = store.compare_set(prefix + self.key, _NOTHING, _NOTHING).decode() if self.key else _NOTHING
        if found != _NOTHING:
            self.found = {int(rank): (int(pid), began) for rank, pid, began in map(str.split, found.splitlines())}

    def ended(self) -> set[int]:
        return {rank for rank, process in self.found.items() if _has_ended(*process)}


def _has_ended(pid: int, began: str) -> bool:
    with contextlib.suppress(native.NativeUnavailableError):
        if native.load().ps_control_is_ending(pid):
            return True
    return start_time(pid) != began


class CallsDifferError(Exception):
    def __init__(self, first: str, other: str) -> None:
        super().__init__(first, other)
        self.first, self.other = first, other


class _Roll:
    """Exchanges one entry per rank through a store, in attempts. Each rank adds its entry to the current attempt; the
    last rank writes all entries to one key. A rank that gives up closes the attempt, so that a retry doesn't read old
    entries.
    """

    def __init__(
        self, store: BoundedStore, rank: int, ranks: Sequence[int], entry: str, near: Neighbours, call: str = ""
    ) -> None:
        self._store, self._rank, self._ranks, self._near = store, rank, ranks, near
        self._nonce = secrets.token_hex(_TOKEN_BYTES)
        self._entry = json.dumps([self._nonce, json.loads(entry)])
        self._call, self._digest = call, hashlib.sha256(call.encode()).hexdigest() if call else ""
        self._attempts: list[str] = []
        self._near_attempt = ""
        """The last attempt in which this rank published its PID to its neighbours."""

    def call(self, deadline: float) -> tuple[list[list[Any]], list[int]]:
        """Exchanges the ranks' entries. Returns all entries in rank order and [], or at the deadline [] and the missing
        ranks. Raises CallsDifferError on all ranks if two ranks passed a different `call`.
        """
        longest_s = max(_LONGEST_NAP_S, len(self._ranks) / _LOOKS_PER_S)
        nap_s = longest_s if self._store.waits_in_server else _SHORTEST_NAP_S
        look_at = time.monotonic()
        while True:
            attempt = self._open()
            if attempt not in self._attempts:
                self._attempts.append(attempt)
                if entries := self._enter():
                    return self._took(entries), []
            left_s = deadline - time.monotonic()
            if self._store.wait_for([self._key("roll")], min(nap_s, max(left_s, 0.0))):
                if entries := self._read():
                    return self._took(entries), []
                # The attempt is that of an earlier call of this rank, whose keys aren't deleted yet.
                self._store.compare_set(_ATTEMPT, attempt, "")
            if left_s <= 0:
                return [], self._give_up()
            nap_s = min(2 * nap_s, longest_s)
            if self._near_attempt != attempt:
                self._near_attempt = attempt
                self._near.enter(self._store, self._rank, self._key(""))
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _NEAR_S
                self._near.read(self._store, self._key(""))

    def _open(self) -> str:
        own = secrets.token_hex(_TOKEN_BYTES) + self._digest
        found = self._store.compare_set(_ATTEMPT, "", own).decode()
        if found == own and self._call:
            self._store.set(_FIRST_CALL, self._call)
        if self._call and found[2 * _TOKEN_BYTES :] != self._digest:
            if found != _CALLS_DIFFER:
                self._store.set(_OTHER_CALL, self._call)
                self._store.compare_set(_ATTEMPT, found, _CALLS_DIFFER)
            first, other = self._store.multi_get([_FIRST_CALL, _OTHER_CALL])
            raise CallsDifferError(first.decode(), other.decode())
        return found

    def _give_up(self) -> list[int]:
        """Closes the last attempt. Returns the ranks that took part in no attempt. If there are none, returns the ranks
        missing from the last attempt.
        """
        self._store.compare_set(_ATTEMPT, self._attempts[-1], "")
        missing = self._ranks
        for number in range(len(self._attempts)):
            missing = self._absent(missing, number)
        return list(missing) or self._absent(self._ranks, -1)

    def _enter(self) -> list[list[Any]]:
        if self._store.compare_set(self._key(self._rank), "", self._entry).decode() != self._entry:
            # An earlier call of this rank didn't close its attempt.
            self._store.compare_set(_ATTEMPT, self._attempts[-1], "")
            return []
        if self._store.add(self._key("entered"), 1) != len(self._ranks):
            return []
        entries = [json.loads(each) for each in self._store.multi_get([self._key(each) for each in self._ranks])]
        self._store.set(self._key("roll"), zlib.compress(json.dumps(entries).encode()).hex())
        return [entry for _, entry in entries]

    def _read(self) -> list[list[Any]]:
        text = self._store.compare_set(self._key("roll"), _NOTHING, _NOTHING).decode()
        if text == _NOTHING:  # deleted meanwhile; `get` would wait for the key
            return []
        entries = json.loads(zlib.decompress(bytes.fromhex(text)))
        is_own = any(nonce == self._nonce for nonce, _ in entries)
        return [entry for _, entry in entries] if is_own else []

    def _took(self, entries: list[list[Any]]) -> list[list[Any]]:
        self._store.start(self._clean_up)  # not before the entries are used, which all ranks wait for
        return entries

    def _clean_up(self, store: BoundedStore) -> None:
        """Deletes the attempt's keys if all other ranks have called this before."""
        if self._near_attempt:
            store.delete_key(self._key(self._near.key))
        if store.add(self._key("readers"), 1) == len(self._ranks):
            store.compare_set(_ATTEMPT, self._attempts[-1], "")
            for each in (*self._ranks, "entered", "roll", "readers"):
                store.delete_key(self._key(each))

    def _absent(self, ranks: Sequence[int], attempt: int) -> list[int]:
        if not ranks or self._store.check([self._key(each, attempt) for each in ranks]):
            return []
        middle = len(ranks) // 2
        halves = ranks[:middle], ranks[middle:]
        return [rank for half in halves for rank in self._absent(half, attempt)] if middle else list(ranks)

    def _key(self, name: object, attempt: int = -1) -> str:
        return f"process/{self._attempts[attempt][: 2 * _TOKEN_BYTES]}/{name}"


def know_neighbours(memory: HostMemory, watcher: Watcher) -> None:
    """Lets `watcher` detect exits of this host's ranks by their PIDs. `memory` must be attached."""
    ranks = memory.members.ranks
    own = ranks[memory.members.rank]
    pids = {ranks[place]: pid for place, pid in zip(memory.local_ranks, memory.pids, strict=True)}

    def has_left(rank: int) -> bool:
        return rank in pids and memory.collectives is not None and memory.collectives.has_left(ranks.index(rank))

    watcher.know({rank: pid for rank, pid in pids.items() if pid > 0 and rank != own}, has_left)
