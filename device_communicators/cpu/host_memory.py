"""The ranks of a group that share a host, and the segment that they work in.

It is attached once, when the group is made, by all ranks together: so whether there is shared memory is
a fact of the group from its beginning, the same on every rank. Each rank makes an empty segment under a random name
and tells it to the others; those who can open it share its maker's memory, which is the evidence, whatever the hosts
are called. All work in the segment of a host's lowest rank, in which each of them backs its own slots with memory: the
kernel takes it from the NUMA node that the asking process runs on. Then all names are taken away again.

The ranks that work in one segment are a *memory domain*, which the collectives treat as a host. A rank whose memory
can't be shared is a domain by itself, as is each rank of a host without room for the segment.
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
from device_communicators.cpu.channels import Channels, QueueMemory
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
"""Groups of more ranks have no connections but those of the domains' first ranks."""
MESHED_UNASKED = 32
"""Groups of more ranks have connections between each two ranks if each rank has descriptors left for them."""
_MOST_AREAS = 4  # a sum that goes along more of them comes late


class HostMemory:
    """The shared memory of one group; `attach` it once, all ranks together, before anything else is asked."""

    def __init__(self, members: Members, neighbours: Sequence[int] = ()) -> None:
        """`neighbours`: the cores, a bit each, of all ranks on this host, where there are others than the group's."""
        self.members = members
        self.cores: tuple[int, ...] = ()
        """Of the group's ranks on this host: on which cores each may run, a bit each."""
        self.areas: tuple[cores.Area, ...] = ()
        """Of the ranks in this domain: the NUMA node and the cache that its cores have in common."""
        self.area_ranks = 0
        """Ranks of each NUMA node, or cache, where they are on several; 0: collectives don't go by them."""
        self._neighbours = tuple(neighbours)
        self.waiting = (0, 0)
        self.attached = False
        self._address: str | None = None
        self.hosts: tuple[tuple[int, ...], ...] = ()
        """Ranks in the group by host, in the order of the hosts' first ranks; known after `attach`."""
        self.domains: tuple[tuple[int, ...], ...] = ()
        """Ranks in the group by the segment that they work in, in the order of the first ranks."""
        self.apart = ""
        """The reason that ranks of one host are in several domains, equal on all ranks; empty where none are."""
        self.problem: str | None = "it isn't attached yet"
        """The reason that the group has no compiled collectives, equal on all ranks; None where it has them."""
        self.collectives: NativeGroup | None = None
        """None where there is a problem."""
        self.is_meshed = False
        """True if each rank has a connection to each rank of other domains; else only the domains' first ranks do."""
        self.channels: Channels | None = None
        """The message queues; None where the ranks are on several hosts."""
        self.streams: MessageStreams | None = None
        """Messages between hosts; None on one host, and without a connection between each two ranks."""
        self.debug = False
        """True if one rank at least has PARALLEL_STATE_DEBUG on, so that all compare their calls."""
        self.rounding: tuple[bool, ...] = ()
        """By rank: whether it has PARALLEL_STATE_ROUND_BETWEEN_HOSTS on."""
        self.pids: tuple[int, ...] = ()
        """Of this host's ranks; -1 for one in another PID namespace, which can't be watched."""

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Returns the ranks in the group that are on this host, ascending."""
        return next((host for host in self.hosts if self.members.rank in host), (self.members.rank,))

    @property
    def domain_ranks(self) -> tuple[int, ...]:
        """Returns the ranks in the group that work in this rank's segment, ascending."""
        return next((domain for domain in self.domains if self.members.rank in domain), (self.members.rank,))

    @property
    def in_one_segment(self) -> bool:
        """Returns True if all ranks of the group work in one segment."""
        return self.problem is None and len(self.domains) == 1

    def attach(
        self,
        watcher: Watcher | None = None,
        watched: Sequence[int] = (),
        cpu_group: Any = None,
        purpose: str = "shared memory",
        address: str | None = None,
    ) -> None:
        """Finds out who shares memory, maps it, and connects what shares none. All ranks call it.

        The deadline is that of the start. The death of a rank of `watched`, by default the group's, ends the wait.
        `cpu_group`: the gloo group of the same ranks, needed without a control plane. `purpose`: see `Watcher.gather`.
        `address`: at which other hosts reach this rank; None for that which gloo tells them. Raises as `Watcher.gather`
        and `connect` do, and ConfigMismatchError if a setting differs that must not.
        """
        if self.attached:
            return
        self._address = address
        watcher, members = watcher or Watcher(), self.members
        deadline = time.monotonic() + min(members.timeout_s, settings.START_TIMEOUT_S.get())

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
        """Connects the sets of ranks that share memory (domains) by TCP. Every rank calls it."""
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
        """Connects this rank to `peers`; see `connections.connect`. Every rank calls it."""
        members = self.members
        timeout_s = min(members.timeout_s, settings.START_TIMEOUT_S.get())
        meeting = Meeting(members, members.ranks, gather, watcher or Watcher(), tuple(watched), timeout_s)
        return connect(meeting, members.rank, peers, self._address)

    def _agreed(self, setting: str, values: Sequence[bool]) -> bool:
        """Returns the ranks' value of a setting. Raises ConfigMismatchError on all of them where they have two."""
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
        """Returns True on all ranks if each can open `needed` files. Every rank of the group calls it."""
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
        self.pids = meeting.pids()
        self.debug = meeting.debug
        self.rounding = meeting.rounding()
        self.cores = meeting.core_masks(self.local_ranks)
        self.areas = meeting.areas(self.domain_ranks)
        per_area = cores.ranks_per_area(self.areas, meeting.areas_by)
        self.area_ranks = per_area if per_area * _MOST_AREAS >= len(self.areas) else 0
        self.waiting = wait_policy(meeting.core_masks(self.domain_ranks), self._neighbours or self.cores)
        if memory is None and self.problem is None:
            number = native.load().ps_group_new(None, 0, 0, 1, *self.waiting, members.timeout_s)
            self.collectives = NativeGroup(native.load(), number, members)
        elif memory is not None:
            self.collectives = memory.hand_over(members, self.domain_ranks, self.waiting)
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
        """Returns the transports of the collectives, for `explain`."""
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
        """Has the control plane end waits in this memory at deaths in `domain`. Without one they end at deadlines."""
        if self.collectives is not None:
            watcher.end_waits_of(self.collectives.number, self.members.ranks, domain.ranks)

    def close(self) -> None:
        """Lets go of the memory; a call that is under way keeps it until it ends. Twice is fine."""
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
    """Mappings that nobody owns yet."""

    def __init__(self, library: NativeLibrary, size_bytes: int) -> None:
        self.library = library
        self.size_bytes = size_bytes
        self.arenas_at = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        """Where in each rank's segment its memory for tensors begins: on a huge page, which need not be there."""
        self.address = 0
        self.arenas: list[int] = []
        """The first page of each rank's memory for tensors, of which more is mapped as it is used."""
        self.arena_bytes = 0
        self.descriptor = -1
        self.queues: QueueMemory | None = None

    def map(self, segment: Segment, size_bytes: int, offset: int) -> int:
        address = self.library.ps_map(segment.descriptor, size_bytes, offset)
        if not address:
            raise SegmentError(
                f"{size_bytes >> 10} KiB can't be mapped: {describe_address_space()}; allow this process more"
            )
        return address

    def hand_over(self, members: Members, local_ranks: tuple[int, ...], waiting: tuple[int, int]) -> NativeGroup:
        """Makes the C++ group in this memory, which owns it from now on."""
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
    """Returns the bytes, in whole pages, of what the collectives of `size` ranks work in."""
    return int(library.ps_segment_bytes(size)) + _PAGE_BYTES - 1 & -_PAGE_BYTES


def back_slots(library: NativeLibrary, segment: Segment, address: int, rank: int, size: int) -> None:
    """Backs the slots of `rank` with memory and maps their pages: called by that rank, so that they lie on its node.

    The first rank also backs what all share. `address`: of the segment's begin. SegmentError where there is no room.
    """
    start, end = (library.ps_slots_offset(size, each) for each in (rank, rank + 1))
    if rank == 0:
        last = library.ps_slots_offset(size, size)
        segment.allocate(start, leave_some=True)  # for messages and tensors
        segment.allocate(mapped_bytes(library, size) - last, last)
    segment.allocate(end - start, start, leave_some=True)
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
    """The exchange by which the ranks of a group find out who shares memory, and agree on it."""

    def __init__(
        self,
        members: Members,
        stack: contextlib.ExitStack,
        gather: Callable[[str, bytes], list[bytes]],
    ) -> None:
        """`gather(step, record)` returns the record of each rank."""
        self._gather = gather
        self.members = members
        self.problem: str | None = None
        """The reason that a rank has no library."""
        self.apart = ""
        """The reason that this rank, or after `agree` any rank, shares no memory with ranks of its host."""
        self.local_ranks: tuple[int, ...] = (members.rank,)
        self._sharing: tuple[int, ...] = (members.rank,)
        """The ranks whose segment this rank works in, unless one of them can't."""
        self._stack = stack  # segments are closed, and their names taken away, at its end
        self._opened: dict[int, Segment] = {}
        self._facts: list[dict[str, Any]] = []

    def exchange_segments(self) -> None:
        """Makes this rank's segment, hears of the others', and opens those of its host."""
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
        self._facts = self._exchange(
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
        self.problem = self.problem or _first_reason(self._facts, "problem")
        self._open_others()

    def _compare_beats(self) -> None:
        """Raises ConfigMismatchError on all ranks if their heartbeat settings differ."""
        found = [tuple(facts["beats"]) for facts in self._facts]
        other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
        if other is not None:
            names = f"{settings.HEARTBEAT_S.name} and {settings.HEARTBEAT_LIMIT_S.name}"
            raise ConfigMismatchError(
                f"{names} must be the same on all ranks of {self.members}, but are {found[0]} on rank 0 and "
                f"{found[other]} on rank {other} of the group; set them alike on all of them"
            )

    def _open_others(self) -> None:
        for rank, facts in enumerate(self._facts):
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
            sharing = [rank for rank in self.local_ranks if not self._facts[rank]["apart"]]
            at = sharing.index(self.members.rank) // MAX_RANKS * MAX_RANKS
            self._sharing = tuple(sharing[at : at + MAX_RANKS])
            if len(sharing) > MAX_RANKS:
                self.apart = f"{len(sharing)} of its ranks are on one host, and {MAX_RANKS} at most share a segment"

    def map_memory(self) -> _Memory | None:
        """Maps the domain's memory; None for a rank that is alone.

        The segment of the lowest rank begins with what the collectives work in. After that many bytes each rank's
        segment is memory for its tensors, which grows as it is used; at the end of the first one's are the message
        queues, if the whole group is here.
        """
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
        capacity = min(self._facts[rank]["symmetric_bytes"] for rank in self._sharing) & -_PAGE_BYTES
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
        """Returns the hosts, and the domains: ranks of a host that share a segment say the same, or each is alone."""
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
            self.apart = "some of its ranks see memory that others of their host don't"
        return hosts, tuple(sorted(found))

    @property
    def debug(self) -> bool:
        return any(facts["debug"] for facts in self._facts)

    def rounding(self) -> tuple[bool, ...]:
        return tuple(facts["rounding"] for facts in self._facts)

    def core_masks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(self._facts[rank]["cores"], 16) for rank in ranks)

    @property
    def areas_by(self) -> str:
        return str(self._facts[self.local_ranks[0]]["areas_by"])

    def areas(self, ranks: Sequence[int]) -> tuple[cores.Area, ...]:
        return tuple(cores.Area(*self._facts[rank]["area"]) for rank in ranks)

    def pids(self) -> tuple[int, ...]:
        own = self._facts[self.members.rank]["processes"]
        return tuple(
            self._facts[rank]["pid"] if self._facts[rank]["processes"] == own != "" else -1 for rank in self.local_ranks
        )

    def _exchange(self, step: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns every rank's facts."""
        return [json.loads(each) for each in self._gather(step, json.dumps(mine).encode())]


def _first_reason(facts: Sequence[dict[str, Any]], key: str) -> str | None:
    """Returns the reason that the lowest rank with one has given under `key`."""
    return next((f"rank {rank} of the group: {each[key]}" for rank, each in enumerate(facts) if each[key]), None)


def wait_policy(group: Sequence[int], everyone: Sequence[int]) -> tuple[int, int]:
    """Returns nanoseconds to spin, and how often to yield then, before a waiting rank sleeps.

    `group` are the sets of cores (a bit each) of the group's ranks on this host, `everyone` those of all ranks here. A
    rank that spins on the core that the awaited one needs holds up both; so with more ranks than cores briefly only.
    """
    given = settings.SPIN_US.get()
    cores = functools.reduce(int.__or__, group)
    load = sum((mask & cores).bit_count() / mask.bit_count() for mask in everyone)
    crowded = load > cores.bit_count()
    spin_us = given if given is not None else (5 if crowded else 150)
    return int(spin_us * 1000), 100 if crowded else 0


def message_wait_policy(spin_ns: int, yields: int) -> tuple[int, int]:
    """Returns the policy for messages: a sender computes in between, longer than ranks of a collective differ.

    A reader that fell asleep gets its message 50 us later or more. With a core of its own it can afford to look for
    some milliseconds.
    """
    return (spin_ns if yields or settings.SPIN_US.get() is not None else _MESSAGE_SPIN_NS), yields
