"""Finds the ranks of a group that can share memory, and allocates this memory.

Each rank creates an empty file in shared memory, a *segment*, with a random name. Ranks that can open the file share
memory. All ranks of a host use the segment of the host's lowest rank. Each rank allocates its own buffers in this
segment, on its own NUMA node. Then all names are removed.

The ranks that use one segment are a *memory domain*. Collectives treat a memory domain as a host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from device_communicators.base import cores, limits, settings
from device_communicators.base.errors import ConfigMismatchError, format_ranks
from device_communicators.base.host import process_domain
from device_communicators.base.limits import describe_address_space
from device_communicators.cpu import native
from device_communicators.cpu.channels import SHAPE, Channels, QueueMemory
from device_communicators.cpu.connections import Connections, Meeting, connect
from device_communicators.cpu.message_streams import MessageStreams
from device_communicators.cpu.native import NativeLibrary
from device_communicators.cpu.native_group import Members, NativeGroup
from device_communicators.cpu.segment import DIRECTORY, Segment, SegmentError
from device_communicators.liveness.health import FailureDomain, Watcher

logger = logging.getLogger("parallel_state")

MAX_RANKS = 64  # csrc/group.h
_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_MESSAGE_SPIN_NS = 2_000_000
MOST_MESHED = 256
"""In larger groups, only the lowest of the ranks that share memory has TCP connections."""
MESHED_UNASKED = 32
"""In larger groups, ranks that share no memory connect directly only if each rank can open enough files."""
_MOST_AREAS = 4  # a sum that passes more areas is slow


def prepare() -> None:
    """Does slow work (19 ms) that this process's first group needs, so that other ranks don't wait for it later."""
    cores.area_of(frozenset(cores.usable_cores()))
    with contextlib.suppress(native.NativeUnavailableError):
        native.load().ps_group_close(native.load().ps_group_new(None, 0, 0, 1, 0, 0, 0.0))


class HostMemory:
    def __init__(self, members: Members, neighbours: Sequence[int] = ()) -> None:
        """`neighbours`: CPU core masks of all ranks on this host, if some ranks are outside of the group."""
        self.members = members
        self.cores: tuple[int, ...] = ()
        self.areas: tuple[cores.Area, ...] = ()
        self.area_ranks = 0
        """Ranks per NUMA node or shared cache. If 0, collectives ignore nodes and caches."""
        self._neighbours = tuple(neighbours)
        self.waiting = (0, 0)
        self.attached = False
        self._slots = (0, 0)  # address and bytes of the whole pages in this rank's slots
        self._is_suspended = False
        self._address: str | None = None
        self.hosts: tuple[tuple[int, ...], ...] = ()
        """Ranks by host, sorted by first rank."""
        self.domains: tuple[tuple[int, ...], ...] = ()
        """Ranks that share memory, sorted by first rank."""
        self.apart = ""
        """Why some ranks of one host share no memory, or empty. Equal on all ranks."""
        self.problem: str | None = "it isn't attached yet"
        """Why there are no compiled collectives, or None. Equal on all ranks."""
        self.collectives: NativeGroup | None = None
        self.is_meshed = False
        """True if each rank has a TCP connection to every rank with which it shares no memory."""
        self.channels: Channels | None = None
        self.streams: MessageStreams | None = None
        self.debug = False
        self.rounding: tuple[bool, ...] = ()
        self.pids: tuple[int, ...] = ()
        """PIDs of this host's ranks; -1 in another PID namespace."""

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return next((host for host in self.hosts if self.members.rank in host), (self.members.rank,))

    @property
    def domain_ranks(self) -> tuple[int, ...]:
        return next((domain for domain in self.domains if self.members.rank in domain), (self.members.rank,))

    @property
    def in_one_segment(self) -> bool:
        return self.problem is None and len(self.domains) == 1

    @property
    def has_subtrees(self) -> bool:
        """True if sums in tree order (TREE_SUM) are possible: each memory domain (ranks that share memory) computes a
        subtree.

        They need at most 64 domains, each with as many consecutive ranks as the first.
        """
        ranks, each = range(len(self.members.ranks)), len(self.domains[0])
        blocks = tuple(tuple(range(start, start + each)) for start in ranks[::each])
        return self.domains == blocks and len(blocks) <= MAX_RANKS

    def attach(
        self,
        watcher: Watcher | None = None,
        watched: Sequence[int] = (),
        cpu_group: Any = None,
        purpose: str = "shared memory",
        address: str | None = None,
        limit_s: float = float("inf"),
    ) -> None:
        """Maps memory shared by ranks of one host, and connects other ranks by TCP. All ranks must call this.

        `watcher`: its control plane exchanges the ranks' data; without one, the gloo group `cpu_group` does. `purpose`:
        name of this call, equal on all ranks. `address`: this host's, for TCP. Fails at the earliest of the group's
        timeout, the start-up timeout and `limit_s`, or if one of the global ranks `watched` (default: the group's)
        exits. Raises errors of `Watcher.gather` and `connect`, and ConfigMismatchError if ranks' settings differ.
        """
        if self.attached:
            return
        self._address = address
        watcher, members = watcher or Watcher(), self.members
        deadline = time.monotonic() + min(members.timeout_s, settings.START_TIMEOUT_S.get(), limit_s)

        def gather(step: str, record: bytes) -> list[bytes]:
            return watcher.gather(
                f"{purpose} ({step})", members.ranks, record, deadline - time.monotonic(), watched=watched,
                what=f"the ranks of {members} exchange shared-memory segments", group=members, operation="attach",
                gloo=cpu_group,
            )  # fmt: skip

        with contextlib.ExitStack() as stack:
            self._attach(_Meeting(members, stack, gather))
        if self.collectives is not None and len(self.domains) > 1:
            try:
                self._span(self.collectives, watcher, watched or members.ranks, gather)
            except BaseException:
                self.close()
                raise
        self.attached = True

    def _span(
        self,
        collectives: NativeGroup,
        watcher: Watcher,
        watched: Sequence[int],
        gather: Callable[[str, bytes], list[bytes]],
    ) -> None:
        rank, size = self.members.rank, len(self.members.ranks)
        rounded = self._agreed(settings.ROUND_BETWEEN_HOSTS.name, self.rounding)
        others = [other for domain in self.domains if rank not in domain for other in domain]
        self.is_meshed = size <= MOST_MESHED and (
            size <= MESHED_UNASKED or self._all_have_descriptors(len(others) + size, gather)
        )
        leaders = [domain[0] for domain in self.domains]
        if not self.is_meshed:
            others = [other for other in others if other in leaders] if rank in leaders else []
        connections = self.connect(functools.partial(gather, "connect"), watcher, watched, others)
        host_of_rank = [next(i for i, domain in enumerate(self.domains) if each in domain) for each in range(size)]
        collectives.span(host_of_rank, connections, meshed=self.is_meshed, rounded=rounded)
        watcher.connections[collectives] = self.members.ranks

    def connect(
        self,
        gather: Callable[[bytes], list[bytes]],
        watcher: Watcher | None,
        watched: Iterable[int],
        peers: Sequence[int],
    ) -> Connections:
        members = self.members
        timeout_s = min(members.timeout_s, settings.START_TIMEOUT_S.get())
        meeting = Meeting(members, gather, watcher or Watcher(), tuple(watched), timeout_s)
        return connect(meeting, peers, self._address)

    def _agreed(self, setting: str, values: Sequence[bool]) -> bool:
        members = self.members
        if len(set(values)) > 1:
            sides = [
                [members.ranks[rank] for rank, value in enumerate(values) if value is side] for side in (True, False)
            ]
            raise ConfigMismatchError(
                f"{setting} must be the same on all ranks of {members}, but is on for global ranks "
                f"{format_ranks(sides[0])} and off for {format_ranks(sides[1])}; set it on all of them, or on none"
            )
        return values[0]

    def _all_have_descriptors(self, needed: int, gather: Callable[[str, bytes], list[bytes]]) -> bool:
        shortage = limits.descriptor_shortage(needed)
        if shortage:
            logger.info("%s has no connections between each two ranks: %s", self.members, shortage)
        return not any(map(int, gather("descriptors", b"%d" % bool(shortage))))

    def _attach(self, meeting: _Meeting) -> None:
        members = self.members
        meeting.exchange_segments()
        memory = meeting.map_memory()
        try:
            self.hosts, self.domains = meeting.agree()
        except BaseException:
            if memory is not None:
                memory.unmap()
            raise
        self.problem, self.apart = meeting.problem, meeting.apart
        if memory is not None and len(self.domain_ranks) == 1:
            memory.unmap()
            memory = None
        facts = meeting.facts
        self.pids = meeting.pids()
        self.debug = any(each["debug"] for each in facts)
        self.rounding = tuple(each["rounding"] for each in facts)
        self.cores = meeting.core_masks(self.local_ranks)
        self.areas = tuple(cores.Area(*facts[rank]["area"]) for rank in self.domain_ranks)
        per_area = cores.ranks_per_area(self.areas, facts[self.local_ranks[0]]["areas_by"])
        self.area_ranks = per_area if per_area * _MOST_AREAS >= len(self.areas) else 0
        self.waiting = wait_policy(meeting.core_masks(self.domain_ranks), self._neighbours or self.cores)
        if memory is None and self.problem is None:
            number = native.load().ps_group_new(None, 0, 0, 1, *self.waiting, members.timeout_s)
            self.collectives = NativeGroup(native.load(), number, members)
        elif memory is not None:
            self.collectives = memory.hand_over(members, self.domain_ranks, self.waiting)
            self._slots = memory.slots_of(self.domain_ranks.index(members.rank), len(self.domain_ranks))
            if self.area_ranks:
                memory.library.ps_group_areas(self.collectives.number, self.area_ranks, -1)
            if memory.queues is not None:
                self.channels = Channels(
                    memory.library,
                    members,
                    memory.queues,
                    memory.library.ps_liveness_of(self.collectives.number),
                    *message_wait_policy(*self.waiting),
                    self.collectives.number,
                )

    def __str__(self) -> str:
        if self.problem is not None:
            return f"not used, {self.problem}"
        if self.collectives is None:
            return "the group was closed"
        library = self.collectives.library
        waits = "spin" if self.waiting[1] == 0 else "spin briefly, yield"
        ops = "ops in C++" if library.has_ops else f"ops in Python ({library.note})"
        size, set_ = len(self.domain_ranks), library.ps_instruction_set().decode()
        return f"{size} ranks, {set_}, {ops}; waits: {waits}, sleep; {self._describe_cores()}"

    def describe_ways(self) -> str:
        if self.in_one_segment:
            return f"a shared segment: {self}"
        hosts = ", ".join(
            f"host {number}: ranks {format_ranks(ranks)}{' (this one)' if self.members.rank in ranks else ''}"
            for number, ranks in enumerate(self.domains)
        )
        between = "ranks of different hosts" if self.is_meshed else "the hosts' first ranks"
        apart = f" ({self.apart})" if self.apart else ""
        return f"shared memory within a host{apart}, TCP between {between}; {hosts}; {self}"

    def _describe_cores(self) -> str:
        if len(set(self.cores)) == 1:
            return "not bound to cores"
        lists = (cores.spans(core for core in range(mask.bit_length()) if mask >> core & 1) for mask in self.cores)
        nodes = sorted({area.node for area in self.areas} - {cores.UNKNOWN})
        text = f"cores {' | '.join(lists)}" + (f" on NUMA nodes {cores.spans(nodes)}" if len(nodes) > 1 else "")
        kind = "node" if len(nodes) > 1 else "cache"
        return f"{text}; large all_reduce by {kind}, {self.area_ranks} ranks each" if self.area_ranks else text

    def end_waits_at_deaths(self, watcher: Watcher, domain: FailureDomain) -> None:
        if self.collectives is not None:
            watcher.end_waits_of(self.collectives.number, self.members.ranks, domain.ranks)

    def unread(self) -> str:
        unread = [] if self.channels is None else self.channels.written_rings()[1]
        found = format_ranks([self.members.ranks[rank] for rank in unread])
        return f"sent a message that global ranks {found} have not received" if unread else ""

    def suspend(self) -> None:
        """Frees this rank's memory for collectives, message queues and unused tensors. No call may be running on any
        rank.

        Does nothing on Linux before 5.14, which can't allocate the memory again.
        """
        if self.collectives is not None and native.load().ps_has_populate():
            native.load().ps_group_arena(self.collectives.number, True)
            for part in self._parts():
                native.load().ps_unback(*part)
            self._is_suspended = True

    def resume(self) -> str:
        """Allocates the memory that `suspend` freed. Returns how much memory the host lacks, as text, or an empty
        string.
        """
        if self.collectives is None or not native.load().ps_has_populate():
            return ""
        missing = sum(size for address, size in self._parts() if not native.load().ps_back(address, size, -1, 0))
        self._is_suspended = missing > 0
        return f"no room for {max(1, missing >> 20)} MiB in {DIRECTORY}" if missing else ""

    def backed_bytes(self) -> dict[str, int]:
        if self.collectives is None:
            return {}
        slots, *rings = (native.load().ps_backed_bytes(*part) for part in self._parts())
        if not self._is_suspended:
            slots = self._slots[1]  # allocated, but perhaps not used yet, which the kernel reports as 0 bytes
        tensors = native.load().ps_group_arena(self.collectives.number, False)
        return {"slots_bytes": slots, "queues_bytes": sum(rings), "tensors_bytes": tensors}

    def _parts(self) -> list[tuple[int, int]]:
        if self.channels is None:
            return [self._slots]
        rings, memory = self.channels.written_rings()[0], self.channels.memory
        return [self._slots, *((memory.map(each, SHAPE.data_bytes), SHAPE.data_bytes) for each in rings)]

    def close(self) -> None:
        """Frees this rank's memory once no call uses it."""
        self.problem = "the group was closed"
        channels, self.channels = self.channels, None
        self.streams = None
        collectives, self.collectives = self.collectives, None
        try:
            if channels is not None:
                channels.close()
        finally:
            if collectives is not None:
                collectives.close()


class _Memory:
    def __init__(self, library: NativeLibrary, size_bytes: int) -> None:
        self.library = library
        self.size_bytes = size_bytes
        self.arenas_at = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self.address = 0
        self.arenas: list[int] = []
        self.arena_bytes = 0
        self.descriptor = -1
        self.queues: QueueMemory | None = None

    def map(self, segment: Segment, size_bytes: int, offset: int) -> int:
        address = self.library.ps_map(segment.descriptor, size_bytes, offset)
        if not address:
            raise SegmentError(
                f"{size_bytes >> 10} KiB of shared memory can't be mapped into this process: "
                f"{describe_address_space()}; raise the limit of address space (ulimit -v)"
            )
        return address

    def slots_of(self, rank: int, size: int) -> tuple[int, int]:
        start, end = (self.library.ps_slots_offset(size, each) for each in (rank, rank + 1))
        start, end = -(-start // _PAGE_BYTES) * _PAGE_BYTES, end // _PAGE_BYTES * _PAGE_BYTES
        return self.address + start, max(0, end - start)

    def hand_over(self, members: Members, local_ranks: tuple[int, ...], waiting: tuple[int, int]) -> NativeGroup:
        spin_ns, yields = waiting
        number = self.library.ps_group_new(
            self.address, self.size_bytes, local_ranks.index(members.rank), len(local_ranks),
            spin_ns, yields, members.timeout_s,
        )  # fmt: skip
        if self.arenas:
            bases = (ctypes.c_void_p * len(self.arenas))(*self.arenas)
            self.library.ps_group_arenas(number, bases, self.arena_bytes, self.descriptor, self.arenas_at)
        return NativeGroup(self.library, number, members)

    def unmap(self) -> None:
        if self.address:
            self.library.ps_unmap(self.address, self.size_bytes)
        for arena in self.arenas:
            self.library.ps_unmap(arena, _PAGE_BYTES)
        if self.queues is not None:
            self.queues.close()
            self.queues.unmap()


def mapped_bytes(library: NativeLibrary, size: int) -> int:
    return int(library.ps_segment_bytes(size)) + _PAGE_BYTES - 1 & -_PAGE_BYTES


def back_slots(library: NativeLibrary, segment: Segment, address: int, rank: int, size: int) -> None:
    """Allocates rank `rank`'s buffers in `segment`, mapped at `address`, on the rank's NUMA node. `size`: number of
    ranks that share the segment. Rank 0 also allocates the memory that belongs to no rank.
    """
    start, end = (library.ps_slots_offset(size, each) for each in (rank, rank + 1))
    if rank == 0:
        last = library.ps_slots_offset(size, size)
        segment.allocate(start, leave_some=True)  # for messages and tensors
        segment.allocate(mapped_bytes(library, size) - last, last)
    segment.allocate(end - start, start, leave_some=True)
    if settings.HUGE_PAGES.get():
        library.ps_back(address + start, end - start, segment.descriptor, start)


@functools.cache
def _want_huge_pages(library: NativeLibrary) -> None:
    problem = library.ps_want_huge_pages()
    if problem:
        logger.warning(
            "%s is on, but the kernel makes no huge pages of shared memory (%s), so its pages are small",
            settings.HUGE_PAGES.name, os.strerror(problem),
        )  # fmt: skip


class _Meeting:
    def __init__(
        self,
        members: Members,
        stack: contextlib.ExitStack,
        gather: Callable[[str, bytes], list[bytes]],
    ) -> None:
        self._gather = gather
        self.members = members
        self.problem: str | None = None
        self.apart = ""
        self.local_ranks: tuple[int, ...] = (members.rank,)
        self._sharing: tuple[int, ...] = (members.rank,)
        self._stack = stack
        self._opened: dict[int, Segment] = {}
        self.facts: list[dict[str, Any]] = []

    def exchange_segments(self) -> None:
        rank = self.members.rank
        name = ""
        try:
            native.load()
        except native.NativeUnavailableError as error:
            self.problem = limits.with_shortage(error, DIRECTORY)
        try:
            mine = self._opened[rank] = Segment.make()
            self._stack.callback(mine.close)
            self._stack.callback(mine.unlink)
            name = mine.name
        except SegmentError as error:
            self.apart = limits.with_shortage(error, DIRECTORY)
        if not settings.SHARED_MEMORY.get():
            self.apart = f"{settings.SHARED_MEMORY.name} is off"
        self.facts = self._exchange(
            "segments",
            {
                "name": name,
                "pid": os.getpid(),
                "processes": process_domain(),
                "cores": f"{sum(1 << core for core in cores.usable_cores()):x}",
                "areas_by": settings.AREAS.get(),
                "area": cores.area_of(frozenset(cores.usable_cores())),
                "debug": settings.DEBUG.get(),
                "rounding": settings.ROUND_BETWEEN_HOSTS.get(),
                "beats": [settings.HEARTBEAT_S.get(), settings.HEARTBEAT_LIMIT_S.get()],
                "symmetric_bytes": settings.SYMMETRIC_BYTES.get(),
                "problem": self.problem,
                "apart": bool(self.apart),
            },
        )
        self._compare_beats()
        self.problem = self.problem or _first_reason(self.facts, "problem")
        self._open_others()

    def _compare_beats(self) -> None:
        found = [tuple(facts["beats"]) for facts in self.facts]
        other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
        if other is not None:
            names = f"{settings.HEARTBEAT_S.name} and {settings.HEARTBEAT_LIMIT_S.name}"
            raise ConfigMismatchError(
                f"{names} must be the same on all ranks of {self.members}, but are {found[0]} on rank 0 and "
                f"{found[other]} on rank {other} of the group; set them to the same values on all ranks"
            )

    def _open_others(self) -> None:
        for rank, facts in enumerate(self.facts):
            if rank == self.members.rank:
                continue
            try:
                segment = Segment.open(facts["name"])
            except SegmentError as error:
                self.apart = self.apart or limits.with_shortage(error, DIRECTORY)
                continue
            if segment is not None:
                self._stack.callback(segment.close)
                self._opened[rank] = segment
        self.local_ranks = tuple(sorted(self._opened)) or self.local_ranks
        if self.problem is None and not self.apart:
            sharing = [rank for rank in self.local_ranks if not self.facts[rank]["apart"]]
            at = sharing.index(self.members.rank) // MAX_RANKS * MAX_RANKS
            self._sharing = tuple(sharing[at : at + MAX_RANKS])
            if len(sharing) > MAX_RANKS:
                self.apart = f"{len(sharing)} of its ranks are on one host, and {MAX_RANKS} at most share a segment"

    def map_memory(self) -> _Memory | None:
        if len(self._sharing) == 1:
            return None
        try:
            return self._map_memory()
        except (SegmentError, OSError) as error:
            self.apart, self._sharing = limits.with_shortage(error, DIRECTORY), (self.members.rank,)
            return None

    def _map_memory(self) -> _Memory:
        library, own = native.load(), self._opened[self.members.rank]
        if settings.HUGE_PAGES.get():
            _want_huge_pages(library)
        memory = _Memory(library, mapped_bytes(library, len(self._sharing)))
        capacity = min(self.facts[rank]["symmetric_bytes"] for rank in self._sharing) & -_PAGE_BYTES
        try:
            self._map_all(memory, own, capacity)
        except BaseException:
            memory.unmap()
            raise
        return memory

    def _map_all(self, memory: _Memory, own: Segment, capacity: int) -> None:
        library, first, count = memory.library, self._opened[self._sharing[0]], len(self._sharing)
        own.resize(memory.arenas_at + capacity)
        memory.address = memory.map(first, memory.size_bytes, 0)
        back_slots(library, first, memory.address, self._sharing.index(self.members.rank), count)
        if count == len(self.members.ranks):
            memory.queues = QueueMemory(memory.library, first, memory.arenas_at + capacity, count, first is own)
        if capacity:
            memory.arena_bytes = capacity
            for rank in self._sharing:
                memory.arenas.append(memory.map(self._opened[rank], _PAGE_BYTES, memory.arenas_at))
            if not memory.library.ps_has_populate():
                memory.descriptor = own.descriptor

    def agree(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Returns the ranks of each host, and of each memory domain: ranks that can all open each other's memory. Any
        other rank is a domain of its own. All ranks must call this.
        """
        first, sharing = self.local_ranks[0], self._sharing
        facts = self._exchange("hosts", {"first": first, "sharing": sharing, "apart": self.apart})
        hosts = tuple(
            tuple(rank for rank, each in enumerate(facts) if each["first"] == first)
            for first in sorted({each["first"] for each in facts})
        )
        said = [tuple(each["sharing"]) for each in facts]
        found = {
            sharing if all(said[other] == sharing for other in sharing) else (rank,)
            for rank, sharing in enumerate(said)
        }
        self.apart = self.apart or _first_reason(facts, "apart") or ""
        if self.problem is None and not self.apart and len(found) > len(hosts):
            self.apart = "some of its ranks can map segments that other ranks of their host can't"
        return hosts, tuple(sorted(found))

    def core_masks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(self.facts[rank]["cores"], 16) for rank in ranks)

    def pids(self) -> tuple[int, ...]:
        own = self.facts[self.members.rank]["processes"]
        return tuple(
            self.facts[rank]["pid"] if self.facts[rank]["processes"] == own != "" else -1 for rank in self.local_ranks
        )

    def _exchange(self, step: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self._gather(step, json.dumps(mine).encode())]


def _first_reason(facts: Sequence[dict[str, Any]], key: str) -> str | None:
    return next((f"rank {rank} of the group: {each[key]}" for rank, each in enumerate(facts) if each[key]), None)


def wait_policy(group: Sequence[int], everyone: Sequence[int]) -> tuple[int, int]:
    """Returns for how many ns a waiting rank polls, and how many times it then yields its core. `group`, `everyone`:
    masks of the CPU cores that each rank of the group, and each rank on the host, may use.

    With more ranks than cores, ranks yield: polling would delay the awaited rank.
    """
    given = settings.SPIN_US.get()
    cores = functools.reduce(int.__or__, group)
    load = sum((mask & cores).bit_count() / mask.bit_count() for mask in everyone)
    crowded = load > cores.bit_count()
    spin_us = given if given is not None else (5 if crowded else 150)
    return int(spin_us * 1000), 100 if crowded else 0


def message_wait_policy(spin_ns: int, yields: int) -> tuple[int, int]:
    """Converts `wait_policy`'s result for receivers of messages. A receiver polls longer, because after a sleep it
    would get a message 50 us later.
    """
    return (spin_ns if yields or settings.SPIN_US.get() is not None else _MESSAGE_SPIN_NS), yields
