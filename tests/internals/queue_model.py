"""Explores every interleaving of the message queue's protocol: csrc/queue.cpp and the waiting in
csrc/wait.cpp. An atomic variable is the list of its stores. A process's view holds the oldest store of each
variable that it may still load. An acquire load merges the view that a release store left. Accesses to a
chunk's bytes race unless the process's view orders them. No test compares the model with the C++."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Variant:
    """With `barriers`, sleepers use membarrier and publishers no fence."""

    barriers: bool = True
    writer_releases: bool = True
    reader_acquires: bool = True
    reader_releases: bool = True
    writer_acquires: bool = True
    sleeper_orders: bool = True
    """Otherwise the sleeper may read the value before its announcement is visible."""
    publisher_orders: bool = True
    rechecks: bool = True
    """A sleeper reads the value again after its announcement, and the kernel compares it."""
    wakes_all: bool = True
    awaits_all: bool = True
    slots: int = 2
    believed_slots: int = 2


class Process(NamedTuple):
    at: str
    chunk: int
    peer: int
    seen: int
    view: tuple[int, ...]


View = tuple[int, ...]
Store = tuple[int, View]


class State(NamedTuple):
    processes: tuple[Process, ...]
    stores: tuple[tuple[Store, ...], ...]
    """Index 2 p is the counter of process p, 2 p + 1 its sleepers. A counter's last store is its true value."""
    fence_view: View
    kernel_view: View
    """The kernel's lock passes the view of the last wake-up to the next process that sleeps."""


class Violation(Exception):
    pass


class Model:
    def __init__(self, variant: Variant, readers: int, chunks: int) -> None:
        self.variant = variant
        self.readers = readers
        self.chunks = chunks
        self.atomics = 2 * (readers + 1)
        # After the atomics, a view counts the writes of each slot, then each reader's reads of it.
        self.width = self.atomics + variant.slots * (1 + readers)
        self.nothing = (0,) * self.width
        self.of_use = [self._of_use(process) for process in range(readers + 1)]

    def _of_use(self, me: int) -> tuple[bool, ...]:
        """Masking the unused rest merges equal states."""
        slots = range(self.atomics, self.atomics + self.variant.slots)
        useful = {2 * me, 2 * me + 1, *(2 * peer for peer in self._peers(me)), *slots}
        useful.update(2 * peer + 1 for peer in self._peers(me))
        if me == 0:
            useful.update(range(self.atomics, self.width))
        else:
            useful.update(slot + self.variant.slots * me for slot in slots)
        return tuple(index in useful for index in range(self.width))

    def _peers(self, me: int) -> range:
        return range(1, self.readers + 1) if me == 0 else range(1)

    def first(self) -> State:
        zero = self.nothing
        writer = Process("await", 1, 1, 0, zero)
        readers = [Process("await", 1, 0, 0, zero) for _ in range(self.readers)]
        return State((writer, *readers), (((0, zero),),) * self.atomics, zero, zero)

    def explore(self) -> int:
        start = self._normal(self.first())
        known, waiting = {start}, deque([start])
        while waiting:
            state = waiting.popleft()
            moved = False
            for following in self._following(state):
                moved = True
                normal = self._normal(following)
                if normal not in known:
                    known.add(normal)
                    waiting.append(normal)
            if not moved and any(process.at != "done" for process in state.processes):
                told = ", ".join(f"{process.at} of chunk {process.chunk}" for process in state.processes)
                raise Violation(f"nobody moves any more: {told}")
        return len(known)

    def _normal(self, state: State) -> State:
        processes = tuple(
            process._replace(view=_masked(process.view, of_use))
            for process, of_use in zip(state.processes, self.of_use, strict=True)
        )
        # A counter is loaded by the processes that wait for it, its sleepers by its owner.
        gone = []
        for owner, process in enumerate(processes):
            gone.append(min(processes[peer].view[2 * owner] for peer in self._peers(owner)))
            gone.append(process.view[2 * owner + 1])
        if not any(gone):
            return state._replace(processes=processes)
        shift = (*gone, *self.nothing[self.atomics :])
        return State(
            tuple(process._replace(view=_shifted(process.view, shift)) for process in processes),
            tuple(
                tuple((value, _shifted(view, shift)) for value, view in stores[by:])
                for stores, by in zip(state.stores, gone, strict=True)
            ),
            _shifted(state.fence_view, shift),
            _shifted(state.kernel_view, shift),
        )

    def _following(self, state: State) -> Iterator[State]:
        for me, process in enumerate(state.processes):
            if process.at not in ("done", "asleep"):
                yield from getattr(self, f"_{process.at}")(state, me, process)

    def _target(self, me: int, process: Process) -> int:
        return process.chunk - self.variant.believed_slots if me == 0 else process.chunk

    def _loads(self, state: State, process: Process, variable: int, acquires: bool) -> Iterator[tuple[int, Process]]:
        stores = state.stores[variable]
        for at in range(process.view[variable], len(stores)):
            value, left = stores[at]
            view = _with(process.view, variable, at)
            yield value, process._replace(view=_join(view, left) if acquires else view)

    def _await(self, state: State, me: int, process: Process) -> Iterator[State]:
        if self._target(me, process) <= 0:
            yield self._reached(state, me, process)
            return
        acquires = self.variant.writer_acquires if me == 0 else self.variant.reader_acquires
        for value, after in self._loads(state, process, 2 * process.peer, acquires):
            if value >= self._target(me, process):
                yield self._reached(state, me, after)
            else:
                yield _put(state, me, after._replace(at="announce"))

    def _announce(self, state: State, me: int, process: Process) -> Iterator[State]:
        state = self._add_sleeper(state, me, process, 1)
        following = "barrier" if self.variant.sleeper_orders else "recheck"
        process = state.processes[me]
        if not self.variant.rechecks:
            stale = process.seen
            yield _put(state, me, process._replace(at="futex_wait", seen=stale))
            return
        yield _put(state, me, process._replace(at=following))

    def _barrier(self, state: State, me: int, process: Process) -> Iterator[State]:
        if self.variant.barriers:
            everything = self._of_atomics(_join(*(other.view for other in state.processes)))
            processes = tuple(other._replace(view=_join(other.view, everything)) for other in state.processes)
            yield _put(state._replace(processes=processes), me, processes[me]._replace(at="recheck"))
        else:
            yield self._fenced(state, me, process._replace(at="recheck"))

    def _recheck(self, state: State, me: int, process: Process) -> Iterator[State]:
        acquires = self.variant.writer_acquires if me == 0 else self.variant.reader_acquires
        for value, after in self._loads(state, process, 2 * process.peer, acquires):
            reached = value >= self._target(me, process)
            yield _put(state, me, after._replace(at="retract" if reached else "futex_wait", seen=value))

    def _futex_wait(self, state: State, me: int, process: Process) -> Iterator[State]:
        process = process._replace(view=_join(process.view, state.kernel_view))
        for value, after in self._loads(state, process, 2 * process.peer, False):
            same = value == process.seen or not self.variant.rechecks
            yield _put(state, me, after._replace(at="asleep" if same else "recheck", seen=0))

    def _retract(self, state: State, me: int, process: Process) -> Iterator[State]:
        state = self._add_sleeper(state, me, process, -1)
        yield self._reached(state, me, state.processes[me]._replace(seen=0))

    def _reached(self, state: State, me: int, process: Process) -> State:
        if me == 0 and process.peer < self.readers and self.variant.awaits_all:
            return _put(state, me, process._replace(at="await", peer=process.peer + 1))
        reordered = self.variant.barriers and not self.variant.publisher_orders
        return _put(state, me, process._replace(at="look_early" if reordered else "publish"))

    def _add_sleeper(self, state: State, me: int, process: Process, by: int) -> State:
        """Passes no view, unlike a sequentially consistent operation: the protocol needs no more."""
        variable = 2 * process.peer + 1
        value, _ = state.stores[variable][-1]
        view = _with(process.view, variable, len(state.stores[variable]))
        return _put(_store(state, variable, value + by, self.nothing), me, process._replace(view=view))

    # A chunk is accessed and its counter published in one step. Overlaps are found by comparing views.

    def _touched(self, me: int, process: Process, state: State) -> Process:
        slots, view = self.variant.slots, process.view
        slot = (process.chunk - 1) % slots
        written = self.atomics + slot
        writes = max(other.view[written] for other in state.processes)
        if view[written] != writes:
            raise Violation(f"reader {me} reads chunk {process.chunk} while it is written")
        if me == 0:
            for reader in range(1, self.readers + 1):
                read = self.atomics + slots * reader + slot
                if view[read] != state.processes[reader].view[read]:
                    raise Violation(f"chunk {process.chunk} is written while reader {reader} reads what was there")
                if writes and state.processes[reader].view[read] != writes:
                    raise Violation(f"chunk {process.chunk} is written where reader {reader} has not been")
            return process._replace(view=_with(view, written, writes + 1))
        if slot + 1 + (writes - 1) * slots != process.chunk:
            raise Violation(f"reader {me} finds another chunk than {process.chunk}")
        return process._replace(view=_with(view, self.atomics + slots * me + slot, writes))

    def _publish(self, state: State, me: int, process: Process) -> Iterator[State]:
        yield self._published(state, me, process, "fence" if not self.variant.barriers else "look")

    def _published(self, state: State, me: int, process: Process, following: str) -> State:
        process = self._touched(me, process, state)
        at = len(state.stores[2 * me])
        view = _with(process.view, 2 * me, at)
        releases = self.variant.writer_releases if me == 0 else self.variant.reader_releases
        left = tuple(
            at if index == 2 * me or (releases and index >= self.atomics) else 0 for index, at in enumerate(view)
        )
        state = _store(state, 2 * me, process.chunk, left)
        return _put(state, me, process._replace(at=following, view=view))

    def _fence(self, state: State, me: int, process: Process) -> Iterator[State]:
        process = process._replace(at="look")
        yield self._fenced(state, me, process) if self.variant.publisher_orders else _put(state, me, process)

    def _fenced(self, state: State, me: int, process: Process) -> State:
        view = _join(process.view, state.fence_view)
        return _put(state, me, process._replace(view=view))._replace(fence_view=self._of_atomics(view))

    def _of_atomics(self, view: View) -> View:
        """Barriers, fences and the kernel order atomics only in this model: the protocol needs no more."""
        return (*view[: self.atomics], *self.nothing[self.atomics :])

    def _look(self, state: State, me: int, process: Process) -> Iterator[State]:
        for sleepers, after in self._loads(state, process, 2 * me + 1, False):
            yield _put(state, me, after._replace(at="wake")) if sleepers else self._next(state, me, after)

    def _look_early(self, state: State, me: int, process: Process) -> Iterator[State]:
        """A compiler could load the sleepers before the store."""
        for sleepers, after in self._loads(state, process, 2 * me + 1, False):
            yield _put(state, me, after._replace(at="publish_late", seen=sleepers))

    def _publish_late(self, state: State, me: int, process: Process) -> Iterator[State]:
        sleepers = process.seen
        state = self._published(state, me, process._replace(seen=0), "wake")
        yield state if sleepers else self._next(state, me, state.processes[me])

    def _wake(self, state: State, me: int, process: Process) -> Iterator[State]:
        view = _with(state.kernel_view, 2 * me, process.view[2 * me])
        state = self._next(state._replace(kernel_view=view), me, process)
        for other, sleeper in enumerate(state.processes):
            if sleeper.at == "asleep" and sleeper.peer == me:
                state = _put(state, other, sleeper._replace(at="recheck", view=_join(sleeper.view, view)))
                if not self.variant.wakes_all:
                    break
        yield state

    def _next(self, state: State, me: int, process: Process) -> State:
        done = process.chunk == self.chunks
        peer = 1 if me == 0 else 0
        return _put(state, me, process._replace(at="done" if done else "await", chunk=process.chunk + 1, peer=peer))


@functools.lru_cache(maxsize=1 << 16)
def _masked(view: View, of_use: tuple[bool, ...]) -> View:
    return tuple(at if useful else 0 for at, useful in zip(view, of_use, strict=True))


@functools.lru_cache(maxsize=1 << 16)
def _shifted(view: View, shift: View) -> View:
    return tuple(max(0, at - by) for at, by in zip(view, shift, strict=True))


def _put(state: State, me: int, process: Process) -> State:
    return state._replace(processes=(*state.processes[:me], process, *state.processes[me + 1 :]))


def _store(state: State, variable: int, value: int, view: View) -> State:
    stores = (*state.stores[variable], (value, view))
    return state._replace(stores=(*state.stores[:variable], stores, *state.stores[variable + 1 :]))


def _with(view: View, index: int, value: int) -> View:
    return (*view[:index], max(view[index], value), *view[index + 1 :])


def _join(*views: View) -> View:
    return tuple(map(max, *views))
