"""Runs a group's collectives on CPU tensors in C++, and turns failures into errors."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from device_communicators.base import settings
from device_communicators.base.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    HostUnreachableError,
    MessageDecodeError,
    PeerDiedError,
    UsageError,
    format_ranks,
)
from device_communicators.base.member import LEFT as LEFT
from device_communicators.base.member import LOST, Failure, GroupMember, Timeout
from device_communicators.calls.recorder import Operation
from device_communicators.calls.reductions import reducible
from device_communicators.calls.user_call import (
    TRANSFERS,
    UserCall,
    begin_sending,
    current,
    in_words,
    key_of,
    method_of,
    overlap_error,
)
from device_communicators.calls.work import TransferError
from device_communicators.cpu.connections import Connections
from device_communicators.cpu.native import NativeLibrary

_TIMED_OUT, _PEER_DIED, _MISMATCH, _CLOSED, _INTERRUPTED = 1, 2, 3, 4, 5
_FAILED, _BUSY, _UNMAPPED, _BROKEN, _TOO_LARGE, _UNREACHABLE = 7, 8, 9, 10, 11, 13
"""Values of `Status` in csrc/group.h."""
_TORCH_DTYPES = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64",
                 11: "bool", 15: "bfloat16"}  # fmt: skip
OUTSIDE = 1 << 15
"""`kOutside` in csrc/liveness.h: a rank outside of the group."""
_REPORTED: dict[int, tuple[type[CommunicationError], str]] = {
    _TIMED_OUT: (CollectiveTimeoutError, "timed out"),
    _PEER_DIED: (PeerDiedError, "waited for a rank that has left"),
    _MISMATCH: (CollectiveMismatchError, "detected a mismatched call"),
    _INTERRUPTED: (CommunicationError, "was interrupted by a signal"),
    _UNMAPPED: (CommunicationError, "had no address space left (ulimit -v) to map a tensor"),
    _UNREACHABLE: (HostUnreachableError, "was reported as unreachable"),
}
_COUNTED = (
    "all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "broadcast", "broadcast_", "all_to_all", "barrier",
    "all_reduce_add_rms_norm", "gather", "scatter", "all_gatherv", "reduce_scatterv", "send_list", "recv_list",
    "broadcast_list", "send_message", "recv_message", "broadcast_message", "send", "recv",
)  # fmt: skip
"""Operations counted in C++, in the order of `Counted` in csrc/handle.h."""
_TO_ALL = ("broadcast_list", "broadcast_message")
_MESSAGES_TO_ONE = ("send_list", "recv_list", "send_message", "recv_message")
DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.int8: 4, torch.int16: 5,
    torch.int32: 6, torch.int64: 7, torch.uint8: 8,
}  # fmt: skip
"""Numbers of `Dtype` in csrc/reduce.h."""
_PARTS = 64
"""Must equal kMaxRanks in csrc/tuning.h."""


_METHODS = 256
"""Must equal Meter::kMethods in csrc/handle.h."""


class QueueStatus:
    """Result codes of queues and transfers, as in csrc/queue.h."""

    DONE, TIMED_OUT, PEER_DIED, MALFORMED, INTERRUPTED, GIVEN_UP = range(6)


class Taken(NamedTuple):
    """The number and total times of calls to one method. `waited_s` is the part of `took_s` spent waiting for other
    ranks.
    """

    calls: int
    took_s: float
    waited_s: float


class Meter(NamedTuple):
    """Statistics of a group's calls: `taken` by method; `last`: how often each global rank was the last to begin a
    call.
    """

    taken: dict[str, Taken]
    last: dict[int, int]


@dataclass(frozen=True)
class Members(GroupMember):
    name: str
    ranks: tuple[int, ...]
    """Global ranks."""
    rank: int
    timeout: Timeout

    def __str__(self) -> str:
        return f"group {self.name!r}, rank {self.rank} of {len(self.ranks)}"


class NativeGroup:
    def __init__(self, library: NativeLibrary, number: int, members: Members) -> None:
        self.library = library
        self.number = number
        self.members = members
        self.connections = Connections({}, {}, 0)
        self._host_of_rank: Sequence[int] = ()
        self._lock = threading.Lock()
        self._served: set[str] = set()
        members.timeout.follow(partial(library.ps_group_timeout, number))
        self._failed_with = _FAILED

    def span(self, host_of_rank: Sequence[int], connections: Connections, *, meshed: bool, rounded: bool) -> None:
        """Extends the group over several hosts. Call this before the first collective. The group then owns the
        descriptors of `connections`, which lead to ranks on other hosts.

        `host_of_rank`: host number by rank. `meshed`: all ranks of different hosts are connected. `rounded`: sums of
        bfloat16 are sent as bfloat16, not as float32.
        """
        self.connections = connections
        self._host_of_rank = host_of_rank
        ends = [(rank, each.fileno()) for rank, sockets in connections.sockets.items() for each in sockets]
        peers = (ctypes.c_int * len(ends))(*(rank for rank, _ in ends))
        descriptors = (ctypes.c_int * len(ends))(*(descriptor for _, descriptor in ends))
        hosts = (ctypes.c_int * self.size)(*host_of_rank)
        self.library.ps_group_span(
            self.number, self.rank, self.size, hosts, peers, descriptors, len(ends), meshed, rounded
        )

    @property
    def size(self) -> int:
        return len(self.members.ranks)

    @property
    def rank(self) -> int:
        return self.members.rank

    def silent_peers(self, limit_s: float) -> list[int]:
        with self._lock:  # descriptors may be closed meanwhile
            return self.connections.silent_peers(limit_s)

    def call(self, operation: str, *args: Any, user_call: UserCall | None = None) -> None:
        """Runs the collective `operation` in C++ with `args`. Raises the collective's failure, or UsageError if another
        call is running. `user_call`: names the call in errors.
        """
        user_call = user_call or current(operation)
        begin_sending()
        started = time.monotonic()
        status = getattr(self.library, f"ps_{operation}")(self.number, *user_call.words, *args)
        if status != 0:
            self.fail(status, user_call, started)

    def announce(self, src: int, spin_ns: int, user_call: UserCall) -> None:
        """Fixes the order of a broadcast from rank `src` of the group among the group's collectives. Every rank must
        call this before the message is sent or received. `spin_ns`: how long a wait polls before it sleeps.
        """
        begin_sending()
        started = time.monotonic()
        status = self.library.ps_announcing(self.number, *user_call.words, src, spin_ns)
        if status != 0:
            self.fail(status, user_call, started)

    def fail(self, status: int, user_call: UserCall, started: float) -> NoReturn:
        if status == _INTERRUPTED:
            self.library.raise_interruption()
        raise self.failure(status, user_call.method, time.monotonic() - started)

    def enter(self, operation: str) -> None:
        """Makes the group's calls in other threads raise UsageError until `exit()`. Raises UsageError if a call is
        running.
        """
        if self.library.ps_entering(self.number) == _BUSY:
            raise overlap_error(operation, str(self.members))

    def exit(self) -> None:
        self.library.ps_exiting(self.number)

    @property
    def is_busy(self) -> bool:
        return bool(self.library.ps_group_is_busy(self.number))

    def failure(self, status: int, operation: str, elapsed_s: float) -> CommunicationError | UsageError | TransferError:
        members = self.members
        if status == _CLOSED:
            return members.destroyed()
        if status == _BUSY:
            return overlap_error(operation, str(members))
        words = (ctypes.c_int64 * (7 + 2 * (3 + _PARTS)))()
        self.library.ps_group_failure(self.number, words)
        if status == _PEER_DIED and words[0] == OUTSIDE:
            return outsider_died(members, operation, elapsed_s)
        place, elapsed_us, reporter, *misfit = words[:7]
        suspect = members.ranks[place] if 0 <= place < self.size else -1
        elapsed_s = max(elapsed_s, elapsed_us / 1e6)
        if status == _UNREACHABLE:
            return self._unreachable_from(place, operation, elapsed_s)
        if reporter >= 0 and status == _BROKEN:  # a death may be known there first
            with_whom = f" with global rank {suspect}" if suspect >= 0 else ""
            text = f"global rank {members.ranks[reporter]} gave up: a connection{with_whom} was closed by peer"
            return TransferError(text, place if place >= 0 else reporter)
        if reporter >= 0 and status == _MISMATCH and (words[7] or misfit[0] >= 0):
            who = members.ranks[reporter]
            difference = self._difference(list(words), f"global rank {who}", suspect, misfit)
            blamed = who if suspect in (-1, members.ranks[members.rank]) else suspect
            facts = {"elapsed_s": elapsed_s, "timeout_s": members.timeout_s}
            return members.mismatch(operation, difference, (blamed,), **facts)
        if reporter >= 0:
            return given_up(members, operation, suspect, elapsed_s, status, members.ranks[reporter])
        if status == _BROKEN:
            self._failed_with = status
            return TransferError(self._failure_text(), max(place, 0))
        if status == _TOO_LARGE:
            _, _, sent, expected = misfit
            return _failure(
                members, CommunicationError, operation, suspect, elapsed_s,
                f"{operation} of {members} failed: global rank {suspect} sends {sent} bytes, more than the {expected} "
                f"that this rank accepts. {LOST}; send less at once, or raise {settings.MAX_METADATA_BYTES.name}",
            )  # fmt: skip
        if status == _FAILED:
            return _failure(
                members, CommunicationError, operation, suspect, elapsed_s,
                f"an earlier call of {members} received an invalid message from global rank {suspect}. {LOST}; destroy "
                "the group and initialise again",
            )  # fmt: skip
        if status == _INTERRUPTED:
            return _failure(
                members, CommunicationError, operation, suspect, elapsed_s,
                f"an earlier call of {members} was interrupted by a signal, so this rank left that call before "
                f"its peers. {LOST}; destroy the group and initialise again",
            )  # fmt: skip
        self._failed_with = status
        if status == _UNMAPPED:
            return _failure(
                members, CommunicationError, operation, suspect, elapsed_s,
                f"{operation} of {members}: this process has no address space left (ulimit -v) to map another rank's "
                f"tensor. {LOST}; allow more address space, or set PARALLEL_STATE_SYMMETRIC_BYTES=0 on all ranks",
            )  # fmt: skip
        if status == _TIMED_OUT:
            return timed_out(members, operation, suspect, elapsed_s)
        if status == _PEER_DIED:
            has_left = place >= 0 and self.has_left(place)
            return peer_died(members, operation, suspect, elapsed_s, LEFT if has_left else "has ended")
        if status != _MISMATCH:
            raise RuntimeError(f"{operation} of {members} returned the unknown status {status}; report this as a bug")
        difference, facts = self._difference(list(words), "this rank", suspect, misfit), {"elapsed_s": elapsed_s}
        return members.mismatch(operation, difference, (suspect,), timeout_s=members.timeout_s, **facts)

    def _unreachable_from(self, reporter: int, operation: str, elapsed_s: float) -> CommunicationError:
        members, hosts = self.members, self._host_of_rank
        there = [rank for rank, host in zip(members.ranks, hosts, strict=True) if host == hosts[reporter]]
        why = (
            f"global rank {members.ranks[reporter]} reports this rank's host as unreachable, so its host receives "
            "nothing from here"
        )
        advice = f"look at the network to the host of global ranks {format_ranks(there)}"
        return members.lost(HostUnreachableError, operation, why, advice, elapsed_s, there)

    def _failure_text(self) -> str:
        text = ctypes.create_string_buffer(512)
        self.library.ps_group_failure_text(self.number, text, len(text))
        return text.value.decode(errors="replace")

    def _difference(self, words: Sequence[int], who: str, suspect: int, misfit: Sequence[int]) -> str:
        src, dst, sent, expected = misfit
        if src >= 0:
            ranks = [self.members.ranks[place] for place in (src, dst)]
            return (
                f"all ranks' splits must match, but global rank {ranks[0]} sends {sent} bytes to global rank "
                f"{ranks[1]}, which expects {expected}"
            )
        own, other = (
            in_words(word, shape, parts[:count])
            for word, shape, count, *parts in (words[7 : 10 + _PARTS], words[10 + _PARTS :])
        )
        return f"{who} is in {own}, global rank {suspect} in {other}"

    def serve(self, key: str, after: int = 0) -> None:
        """Lets torch ops on group `key` call the compiled library without Python. `after`: number of calls that the
        group has made so far.
        """
        if self.library.has_ops:
            self._served.add(key)
            self.library.ps_serve(key.encode(), self.number)
            self.library.ps_served_go_on(key.encode(), after)

    def stop_serving(self, key: str) -> dict[str, tuple[int, int]]:
        """Ends `serve`. Returns by operation the number of calls and bytes that C++ counted."""
        counts = self.traffic(key)
        if key in self._served:
            self._served.remove(key)
            self.library.ps_stop_serving(key.encode())
        return counts

    def meter(self) -> Meter:
        words = (ctypes.c_uint64 * (3 * _METHODS + max(_PARTS, self.size)))()
        self.library.ps_group_meter(self.number, words)
        taken = {
            method_of(number): Taken(words[3 * number], words[3 * number + 1] / 1e9, words[3 * number + 2] / 1e9)
            for number in range(_METHODS)
            if words[3 * number]
        }
        last = {rank: words[3 * _METHODS + place] for place, rank in enumerate(self.members.ranks)}
        return Meter(taken, last)

    def traffic(self, key: str) -> dict[str, tuple[int, int]]:
        if key not in self._served:
            return {}
        words = (ctypes.c_uint64 * (2 * len(_COUNTED)))()
        self.library.ps_served_traffic(key.encode(), words)
        return {name: (words[2 * i], words[2 * i + 1]) for i, name in enumerate(_COUNTED) if words[2 * i]}

    def next_operation(self, key: str) -> int:
        return int(self.library.ps_served_next(key.encode()))

    def operations(self, key: str) -> list[Operation]:
        count = self.library.ps_served_records()
        words = (ctypes.c_int64 * (14 * count))()
        self.library.ps_served_recorded(key.encode(), words)
        found = []
        for start in range(0, 14 * count, 14):
            sequence, operation, dtype, dims, peer, method, started_us, ended_us, *sizes = words[start : start + 14]
            if not started_us:
                continue
            name = _COUNTED[operation]
            record = Operation(sequence, name, "", (), started_us / 1e6, ended_us / 1e6 or None, peer=peer)
            if peer < 0:
                record.key = key_of(method)
            if name in _TO_ALL:
                record.call_text = in_words(method, 0)
            elif name in _MESSAGES_TO_ONE:
                record.call_text = TRANSFERS[method]
            elif name != "barrier":
                record.dtype = _TORCH_DTYPES.get(dtype, f"dtype {dtype}")
                record.shape = tuple(sizes[: min(dims, len(sizes))])
            found.append(record)
        return found

    def has_transfers(self, key: str) -> bool:
        return bool(self.library.ps_served_has_transfers(key.encode()))

    def give_up(self, error: CommunicationError) -> None:
        kinds = {CollectiveTimeoutError: _TIMED_OUT, CollectiveMismatchError: _MISMATCH}
        kind = self._failed_with if self._failed_with in (_INTERRUPTED, _UNMAPPED) else _FAILED
        places = {rank: place for place, rank in enumerate(self.members.ranks)}
        suspect = next((places[rank] for rank in error.suspect_ranks if rank in places), -1)
        self.library.ps_group_fail(self.number, kinds.get(type(error), kind), suspect)

    def doom(self) -> None:
        self.library.ps_group_doom(self.number)

    def leave(self) -> None:
        """Tells other ranks that this rank leaves the group, so that its exit isn't reported as a death."""
        self.library.ps_group_leave(self.number)

    def has_left(self, rank: int) -> bool:
        return bool(self.library.ps_group_has_left(self.number, rank))

    def close(self) -> None:
        """Closes the group on this rank. Its memory is freed when the last call returns."""
        for key in list(self._served):
            self.stop_serving(key)
        self.leave()
        with self._lock:
            self.connections.release()
            self.library.ps_group_close(self.number)

    def __del__(self) -> None:
        self.close()


def reducible_in_memory(x: Tensor, reduce_op: str) -> tuple[Tensor, str, Tensor | None]:
    return (x, reduce_op, None) if x.dtype in DTYPES else reducible(x, reduce_op)


# Suspects are global ranks, -1 if unknown.


def _failure(
    members: Members, kind: type[Failure], operation: str, suspect: int, elapsed_s: float, text: str
) -> Failure:
    return members.failure(
        kind, text, operation, suspect_ranks=(suspect,), elapsed_s=elapsed_s, timeout_s=members.timeout_s
    )


def timed_out(members: Members, operation: str, suspect: int, elapsed_s: float) -> CollectiveTimeoutError:
    return _failure(
        members, CollectiveTimeoutError, operation, suspect, elapsed_s,
        f"{operation} of {members} timed out after {elapsed_s:.3f} s (the timeout is {members.timeout_s:g} s): global "
        f"rank {suspect} has not arrived. {LOST}; look at that rank (its log, `py-spy dump`), or raise the timeout",
    )  # fmt: skip


_SEE_ITS_LOG = "look at that rank's log"


def peer_died(members: Members, operation: str, suspect: int, elapsed_s: float, how: str) -> PeerDiedError:
    return members.lost(PeerDiedError, operation, f"global rank {suspect} {how}", _SEE_ITS_LOG, elapsed_s, (suspect,))


def outsider_died(members: Members, operation: str, elapsed_s: float) -> PeerDiedError:
    why = "a rank outside this group has ended, and its death fails this group too (see failure_domain)"
    return members.lost(PeerDiedError, operation, why, _SEE_ITS_LOG, elapsed_s)


def given_up(
    members: Members, operation: str, suspect: int, elapsed_s: float, status: int, reporter: int
) -> CommunicationError:
    kind, what = _REPORTED.get(status, (CommunicationError, "failed"))
    about = "" if suspect in (-1, reporter) else f" (about global rank {suspect})"
    why, blamed = f"global rank {reporter} gave up, because it {what}{about}", suspect if suspect >= 0 else reporter
    return members.lost(kind, operation, why, _SEE_ITS_LOG, elapsed_s, (blamed,))


def wait_failure(
    members: Members, operation: str, status: int, place: int, elapsed_s: float, reporter: int, reason: int
) -> CommunicationError:
    """Returns the error of a failed wait. `status`: a `QueueStatus`. `place`: rank in the group that is to blame, or
    OUTSIDE for a rank of another group.

    For GIVEN_UP, rank `reporter` of the group failed first, in a call with the `Status` `reason`. For PEER_DIED,
    `reason` is 1 if the peer left on purpose.
    """
    suspect = members.ranks[place] if 0 <= place < len(members.ranks) else -1
    if status == QueueStatus.TIMED_OUT:
        return timed_out(members, operation, suspect, elapsed_s)
    if place == OUTSIDE:
        return outsider_died(members, operation, elapsed_s)
    if status == QueueStatus.GIVEN_UP:
        return given_up(members, operation, suspect, elapsed_s, reason, members.ranks[reporter])
    if status == QueueStatus.PEER_DIED:
        return peer_died(
            members, operation, suspect, elapsed_s, LEFT if reason else "has ended, or has destroyed its group"
        )
    text = (
        f"{operation} of {members} failed: global rank {suspect} wrote something that isn't the next part of a "
        f"message. {LOST}; every rank must run the same version of parallel_state"
    )
    return members.failure(MessageDecodeError, text, operation, suspect_ranks=(suspect,))
