"""Transfers between the hosts of a group: one rank of each host, over connections of their own, point to point.

Every transfer goes directly from the host that has the bytes to the one that needs them; only a broadcast, which one
host would have to send to all, goes along a tree. What is reduced is combined in the order of the hosts, whoever does
it, so all hosts have the same bits.

Each call begins with a *frame* from each leader to each other, with a digest of this call and all before it: before
a leader takes anything of a tensor in, it knows whether their hosts are in the same call, and if not, who is in which.
The tensor travels in the frame, or its first piece, and the others right behind: nobody waits for an answer. A leader
whose host's ranks were in different calls says so in its next frame.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from device_communicators.base.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError
from device_communicators.base.helper_threads import run_in_thread
from device_communicators.calls.memory import as_bytes
from device_communicators.calls.user_call import UserCall, begin_sending
from device_communicators.hierarchical.reduction import Reduction
from device_communicators.hierarchical.streams import Frame, FramesDiffer, StreamError, Streams, head_of, part_of
from device_communicators.liveness.health import NOTICE_S
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import attributed, died, kind_of_failure
from device_communicators.routing.waiting import abandon

DIRECT_BYTES = 64 << 10
"""Of a broadcast, what the host that has it sends to all others itself."""

MOST_UNDER_WAY = 4
"""The most chunks of a reduction that have begun, and have not ended."""

_COPIED_BYTES = 1 << 20
_ALIGNMENT = 64  # elements; slices begin at whole cache lines
_NOBODYS_TAG = 1 << 30
PAYLOADS, RESULTS, BLOCKS = 1, 2, 3
"""Kinds of what follows the frames, of what goes back (the receives of a call are started in another order), and of
what goes from one rank to another."""
_AGREES, _DISAGREES = b"PSFA", b"PSFD"
"""Magic of a frame whose text is the call in words; and of one whose text is JSON, of what the host's ranks disagree
about and which ranks these are."""
_END_OF_WORDS = b"\0"
"""Of a frame's text; then come the splits."""
_TEXT_BYTES = 2000
_STEP, _DIGESTS = 0x9E3779B97F4A7C17, 1 << 64
"""The digest of calls is that of the last one, plus that of all before by this odd number: of calls in another order it
is another, as one less is no multiple of four."""
_MOST_SUSPECTS = 64


T = TypeVar("T")


class Leaders:
    """This rank's part in the transfers between hosts; `leaders[h]` is the rank that speaks for host h."""

    def __init__(
        self,
        context: GroupContext,
        leaders: Sequence[int],
        host: int,
        streams: Streams | None = None,
        ranks: Sequence[Sequence[int]] = (),
    ) -> None:
        """`ranks`: those of each host, where they aren't the leaders alone."""
        self.context = context
        self._ranks = ranks or [(leader,) for leader in leaders]
        self._streams = streams or Streams({}, 0.0)
        self.leaders = tuple(leaders)
        self.host = host
        self.others = [each for each in range(len(self.leaders)) if each != host]
        self.is_leader = self.leaders[host] == context.rank
        self._call = UserCall("")
        self._digest = 0
        self._words = b""
        """The call in words, as frames have it."""
        self._noticed = 0.0
        self._agreed = True
        self._is_first = False
        self._bare: list[int] = []
        """The call's frames that are heads alone."""
        self.splits: tuple[int, ...] = ()
        """Of each rank of this host, how many rows go to each rank, then how many come from each: others compare."""
        self._combined = 0
        self.scratch = Scratch()
        self.disagreement = ("", [0])
        """The hosts' different calls in words, and the global ranks to blame."""
        self._started = 0.0

    @property
    def _operation(self) -> str:
        return self._call.method

    def begin(self, call: UserCall, *facts: object) -> None:
        """Starts a step of `call`; in `facts`, and in what is compared of the call, all leaders must agree."""
        self._call, self._agreed, self._is_first, self.splits = call, False, True, ()
        self._combined = 0
        if self.is_leader:  # with those before: hosts that came through different calls differ from then on
            digest, self._words = _told(call, facts)
            self._digest = (self._digest * _STEP + digest) % _DIGESTS
        self._started, self._noticed = time.monotonic(), 0.0

    def send(self, x: Tensor, host: int, kind: int = PAYLOADS) -> int:
        """Starts to send contiguous `x`, which is unchanged until the transfer's wait."""
        begin_sending()
        return self._streams.send(part_of(self.leaders[host], x), kind)

    def recv(self, out: Tensor, host: int, kind: int = PAYLOADS) -> int:
        """Starts to receive into contiguous `out`."""
        return self._streams.receive(part_of(self.leaders[host], out), kind)

    def copy_meanwhile(self, out: Tensor, x: Tensor) -> None:
        """Copies contiguous `x` while others are on their way: behind each piece the kernel gets what it has room for.

        A copy to fresh memory takes a third of the time in which as much is sent, and the kernel holds less than that.
        """
        if x.nbytes <= _COPIED_BYTES:
            out.copy_(x)
            return
        for piece, given in zip(as_bytes(out).split(_COPIED_BYTES), as_bytes(x).split(_COPIED_BYTES), strict=True):
            piece.copy_(given)
            self._streams.flush()

    def send_block(self, x: Tensor, rank: int, kind: int = BLOCKS) -> int:
        """Starts to send contiguous `x` to a rank on another host, which needn't be a leader, as this one."""
        begin_sending()
        return self._streams.send(part_of(rank, x), kind)

    def recv_block(self, out: Tensor, rank: int, kind: int = BLOCKS) -> int:
        return self._streams.receive(part_of(rank, out), kind)

    def expect(self, received: Mapping[int, Tensor]) -> Expected:
        """Starts to receive from hosts what an exchange brings, whose turn may come after others' of the call."""
        is_first, self._is_first = self._is_first, False
        transfers = [] if is_first else [self.recv(x, host) for host, x in received.items() if x.numel()]
        return Expected(received if is_first else None, transfers)

    def exchange(self, sent: Mapping[int, Tensor], expected: Expected) -> list[int]:
        """Starts to send to hosts what they expect; empty tensors stay where they are. Returns all transfers.

        The first exchange of a call compares the calls, and waits for that.
        """
        if expected.in_frames is not None:
            sends = self.begin_exchange(sent)
            return [*self.end_exchange(expected.in_frames), *sends]
        return [*expected.transfers, *(self.send(x, host) for host, x in sent.items() if x.numel())]

    def receive_sized(self, host: int, most_bytes: int) -> Tensor:
        """Receives what `host` alone has in its frame, of whatever size."""
        made: list[Tensor] = []

        def make(size_bytes: int) -> Tensor:
            if size_bytes > most_bytes:
                raise self.context.failure(
                    CommunicationError,
                    f"{self._operation} of {self.context}: global rank {self.context.ranks[self.leaders[host]]} sends "
                    f"{size_bytes} bytes, more than {most_bytes}. The group can't be used further; send less at once",
                    self._operation,
                    suspect_ranks=(self.context.ranks[self.leaders[host]],),
                )
            made.append(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))
            return made[0]

        sends = self.begin_exchange({})
        self.wait_for([*self.end_exchange({host: make}), *sends])
        return made[0]

    def exchange_at_once(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Does the first exchange of a call, and waits for it."""
        begin_sending()
        self._is_first = False
        incoming = self._parts(received)
        try:
            self._wait(self._streams.exchange, self._head(), self._parts(sent), incoming)
        except FramesDiffer:
            self._agreed = True
            self._check(self._frames(), received)
            raise self._unknown_frame() from None
        self._agreed = True

    # Frames.

    def agree(self) -> None:
        """Raises CollectiveMismatchError on all leaders whose hosts are not in the same call; once a call."""
        if not self._agreed:
            self.exchange_at_once({}, {})

    def _head(self) -> bytes:
        words = self._words
        if self.splits:
            words += struct.pack(f"<{len(self.splits)}q", *self.splits)
        return head_of(_AGREES, self._digest.to_bytes(8, "little"), words)

    def _parts(self, tensors: Mapping[int, Tensor]) -> list[object]:
        """Returns the parts of all hosts, one after the other."""
        parts: list[object] = []
        for host in self.others:
            parts += part_of(self.leaders[host], tensors.get(host))
        return parts

    def _frames(self) -> dict[int, Frame]:
        found = {host: self._streams.frame(self.leaders[host]) for host in self.others}
        return {host: frame for host, frame in found.items() if frame is not None}

    def begin_exchange(self, sent: Mapping[int, Tensor]) -> list[int]:
        """Starts to send the frames of the call's first exchange, in which `sent` travels: contiguous."""
        begin_sending()
        self._is_first = False
        transfers = list(self._streams.send_frames(self._head(), self._parts(sent)))
        bodies = {host for host, x in sent.items() if x.nbytes}
        self._bare = [each for each, host in zip(transfers, self.others, strict=True) if host not in bodies]
        return transfers

    def end_exchange(
        self, received: Mapping[int, Tensor | Callable[[int], Tensor]], follows: Callable[[], None] | None = None
    ) -> list[int]:
        """Waits for the others' frames, compares the calls, and starts to receive what travels in them.

        `received` holds tensors, or what makes one of a number of bytes. `follows` starts to receive what comes next,
        before any of it is read.
        """
        known = {host: x for host, x in received.items() if isinstance(x, Tensor)}
        at_once = follows is None and not self.splits and len(known) == len(received)
        head, parts = self._head(), self._parts(known)
        try:
            transfers = self._wait(self._streams.meet, head, at_once, parts)
        except FramesDiffer:
            at_once = False
        self._agreed = True
        if not at_once:
            frames = self._frames()
            known |= self._check(frames, received)
            if follows is not None:
                follows()
            try:
                transfers = self._wait(self._streams.meet, head, True, self._parts(known))
            except FramesDiffer:
                raise self._unknown_frame() from None
        return list(transfers)

    def _unknown_frame(self) -> CommunicationError:
        """Returns the error for a frame that isn't this call's, nor says of which it is."""
        first = self.leaders[next(iter(self._frames()), self.others[0])]
        return self._failure(StreamError("what came is of no call that is known", first), first)

    def _check(
        self, frames: Mapping[int, Frame], received: Mapping[int, Tensor | Callable[[int], Tensor]]
    ) -> dict[int, Tensor]:
        """Raises where the frames aren't those of this call. Returns what was made for them."""
        if any(frame[:2] != (_AGREES, self._digest.to_bytes(8, "little")) for frame in frames.values()):
            self._compare({host: _read(frame) for host, frame in frames.items()})
        if self.splits:
            self._check_splits(frames)
        made = {}
        for host, frame in frames.items():
            x = received.get(host)
            if callable(x):
                x = made[host] = x(frame.body_bytes)
            self._check_size(host, frame.body_bytes, 0 if x is None else x.nbytes)
        return made

    def _check_splits(self, frames: Mapping[int, Frame]) -> None:
        size = self.context.size
        rows: dict[int, Sequence[int]] = {}
        for host, ranks in enumerate(self._ranks):
            count = 2 * size * len(ranks)
            flat = self.splits if host == self.host else struct.unpack(f"<{count}q", frames[host].text[-8 * count :])
            rows.update((rank, flat[2 * size * place :][: 2 * size]) for place, rank in enumerate(ranks))
        for src, dst in itertools.product(range(size), repeat=2):
            sent, expected = rows[src][dst], rows[dst][size + src]
            if sent != expected:
                # The others find the same in this host's frame, if all of it has left.
                with contextlib.suppress(CommunicationError):
                    self.wait_for(self._bare)
                ranks = [self.context.ranks[rank] for rank in (src, dst)]
                raise self._mismatch(
                    f"all ranks' splits must match, but global rank {ranks[0]} sends {sent} rows to global rank "
                    f"{ranks[1]}, which expects {expected}",
                    ranks,
                )

    def _check_size(self, host: int, found: int, expected: int) -> None:
        if found != expected:
            rank = self.context.ranks[self.leaders[host]]
            raise self._mismatch(
                f"{expected} bytes were to come with the call of global rank {rank}, and {found} came", [rank]
            )

    def _compare(self, heads: dict[int, _Head]) -> None:
        for head in heads.values():
            if head.disagreement:  # of that host's ranks, who know better than a digest
                raise self._mismatch(head.disagreement, head.suspects)
        own_digest = self._digest.to_bytes(8, "little")
        digests = {host: head.digest for host, head in heads.items()} | {self.host: own_digest}
        others = [host for host in sorted(heads) if digests[host] != own_digest]
        if not others:
            return
        [(usual, count), *_] = Counter(digests.values()).most_common(1)
        if 2 * count <= len(digests):  # nobody can tell who is wrong: those that differ from this rank's host
            usual = own_digest
        suspects = [self.context.ranks[self.leaders[host]] for host in sorted(digests) if digests[host] != usual]
        leader = self.context.ranks[self.leaders[others[0]]]
        own, other = str(self._call), heads[others[0]].call
        earlier = ", after another call earlier" if own == other else ""
        raise self._mismatch(
            f"the ranks of this host are in {own}, and global rank {leader}, with its host, in {other}{earlier}",
            suspects,
        )

    def _mismatch(self, what: str, suspects: Sequence[int]) -> CollectiveMismatchError:
        self.disagreement = (what, list(suspects)[:_MOST_SUSPECTS])
        return self.context.mismatch(self._operation, what, suspects, timeout_s=self.context.timeout_s)

    def tell_disagreement(self, failure: CollectiveMismatchError) -> None:
        """Tells the other leaders what this host's ranks disagree about, who wait for its frame, or will."""
        if self._agreed:  # they know, or are past it
            return
        self._agreed = True
        _, _, what = str(failure.args[0]).partition(" met another call: ")
        what = what.partition(". The group can't")[0].replace(
            "this rank", f"global rank {self.context.ranks[self.context.rank]}"
        )
        words = json.dumps([what[: _TEXT_BYTES // 4], list(failure.suspect_ranks)[:_MOST_SUSPECTS]]).encode()
        head = head_of(_DISAGREES, self._digest.to_bytes(8, "little"), words)
        self._streams.send_frames(head, self._parts({}))
        self.abandon()

    def combine_at_once(
        self, part: Tensor, out: Tensor, reduction: Reduction, slices: Mapping[int, slice] | None = None
    ) -> None:
        """Combines as `combine` does, in the frames of the call alone; without `slices` all of `part` on all hosts."""
        dtypes, own, count = reduction.travelling_of_all(slices is None), self.host, out.numel()
        parts = {host: self.scratch.take((0, host), count, dtypes[host]) for host in self.others}
        if slices is None:
            mine = part
            sent = dict.fromkeys(self.others, part if part.dtype == dtypes[own] else part.to(dtypes[own]))
        else:
            mine = part[slices[own]]
            sent = {host: part[slices[host]].to(dtypes[own]) for host in self.others}
        self.exchange_at_once(sent, parts)
        parts[own] = mine
        reduction.combine([parts[host] for host in range(len(dtypes))], out)

    def all_reduce(self, part: Callable[[], Tensor], out: Tensor, reduction: Reduction) -> Iterator[None]:
        """Reduces a flat part of each host to flat `out` on all.

        `part` returns this host's once it is there, after the first yield; it may be `out`. Yields once it has started
        to receive, then where it would wait for others, having started what they wait for.
        """
        if reduction.in_one_round(out.numel()):
            everything = slice(0, out.numel())
            yield from self.combine(part, dict.fromkeys(range(len(self.leaders)), everything), out, reduction, True)
            return
        slices = dict(enumerate(slices_of(out.numel(), len(self.leaders))))
        mine = out[slices[self.host]]
        results = [self.recv(out[slices[host]], host, RESULTS) for host in self.others]
        yield from self.combine(part, slices, mine, reduction)
        results += [self.send(mine, host, RESULTS) for host in self.others]
        yield
        self.wait_for(results)

    def combine(
        self,
        part: Callable[[], Tensor],
        slices: Mapping[int, slice],
        out: Tensor,
        reduction: Reduction,
        in_one_round: bool = False,
    ) -> Iterator[None]:
        """Gives each host its slice of `part()`, and combines what they give, in the hosts' order, into flat `out`.

        Yields as `all_reduce` does.
        """
        dtypes = reduction.travelling_of_all(in_one_round)
        turn, self._combined = self._combined % MOST_UNDER_WAY, self._combined + 1
        received = {host: self.scratch.take((turn, host), out.numel(), dtypes[host]) for host in self.others}
        expected = self.expect(received)
        yield
        x, dtype = part(), dtypes[self.host]
        sent = {each.start: x[each].to(dtype) for host, each in slices.items() if host != self.host}
        transfers = self.exchange({host: sent[slices[host].start] for host in self.others}, expected)
        yield
        self.wait_for(transfers)
        received[self.host] = x[slices[self.host]]
        reduction.combine([received[host] for host in sorted(received)], out)

    def tree(self, root: int) -> tuple[int | None, list[int]]:
        """Returns this host's parent, none for the root, and its children in a binomial tree."""
        size = len(self.leaders)
        place = (self.host - root) % size
        step = 1
        while step < size and not place & step:
            step *= 2
        parent = None if place == 0 else (place - step + root) % size
        children = []
        while step > 1:
            step //= 2
            if place + step < size:
                children.append((place + step + root) % size)
        return parent, children

    def wait_for(self, transfers: Sequence[int]) -> None:
        """Waits until all are done, one fails, or a rank of the failure domain has ended."""
        if transfers:
            self._wait(self._streams.wait, transfers)

    def _limit(self) -> float:
        """Returns how many seconds this call has. It ends a little before those of the ranks that wait for this one, so
        that they hear why."""
        now, timeout_s = time.monotonic(), self.context.timeout_s
        if self.context.deaths():
            self._noticed = self._noticed or now  # what the dead rank sent before may still be on its way
            if now - self._noticed > NOTICE_S:
                raise died(self.context, self._operation, self._started)
        return self._started + timeout_s - min(1.0, timeout_s / 10) - now

    def _wait(self, wait: Callable[..., T], *args: object) -> T:
        try:
            return wait(*args, self._limit)
        except StreamError as error:
            if self.context.deaths():
                raise died(self.context, self._operation, self._started) from error
            if not self._agreed:  # who is in another call may have said so, and left
                self._compare({host: _read(frame) for host, frame in self._frames().items()})
            raise self._failure(error, error.rank) from error

    def _failure(self, error: RuntimeError, rank: int) -> CommunicationError:
        """Returns the error for a failed transfer with `rank`."""
        context = self.context
        text = str(error)
        suspect = context.ranks[rank]
        kind = kind_of_failure(text)
        failure = context.failure(
            kind,
            f"{self._operation} of {context} failed between hosts, in a transfer with global rank {suspect}: "
            f"{error}. The group can't be used further; look at that rank, and at the network to its host",
            self._operation,
            started=self._started,
            suspect_ranks=(suspect,),
        )
        return (
            failure if kind is CollectiveTimeoutError else attributed(context, self._operation, self._started, failure)
        )

    def abandon(self, ranks: Iterable[int] | None = None) -> None:
        """Lets others know at once, the leaders if not `ranks`, that this rank doesn't go on.

        They needn't wait until their deadline, be it for this communicator's part or for that of one over gloo. There
        it may have to be connected first, where that is left to the first use, which lasts if a rank has stopped.
        """
        self._streams.end_sending()
        ranks = [self.leaders[host] for host in self.others] if ranks is None else ranks
        dead = {death.rank for death in self.context.deaths()}
        alive = [rank for rank in ranks if self.context.ranks[rank] not in dead]
        cpu_group = self.context.cpu_group  # None where the call was interrupted by who ended the group
        if alive and cpu_group is not None:
            run_in_thread(functools.partial(abandon, cpu_group, alive, _NOBODYS_TAG))

    def close(self) -> None:
        self._streams.close()


class Expected(NamedTuple):
    """The receives of an exchange."""

    in_frames: Mapping[int, Tensor] | None
    """Of a call's first one."""
    transfers: list[int]


class _Head(NamedTuple):
    """The facts of a frame beside its payload."""

    digest: bytes
    disagreement: str
    """Of the ranks of the host that sent it."""
    suspects: list[int]
    call: str


class Scratch:
    """Memory that calls use again: fresh pages cost more than what is done with them."""

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}
        self._last: dict[object, Tensor] = {}
        """Views of those, as they were last taken: making one takes microseconds."""

    def take(self, key: object, count: int, dtype: torch.dtype) -> Tensor:
        last = self._last.get(key)
        if last is not None and last.numel() == count and last.dtype == dtype:
            return last
        size_bytes = count * dtype.itemsize
        kept = self._kept.get(key)
        with torch.inference_mode(False):
            if kept is None or kept.numel() < size_bytes:
                kept = self._kept[key] = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            last = self._last[key] = kept[:size_bytes].view(dtype)
        return last


@functools.lru_cache(maxsize=1024)
def _told(call: UserCall, facts: tuple[object, ...]) -> tuple[int, bytes]:
    """Returns a digest of what is compared of a call, and the call in words."""
    digest = hashlib.blake2b(repr((facts, call.compared)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little"), str(call).encode()[:_TEXT_BYTES] + _END_OF_WORDS


def _read(frame: Frame) -> _Head:
    """Parses a frame, for its words."""
    text = frame.text.partition(_END_OF_WORDS)[0].decode(errors="replace")
    if frame.magic != _DISAGREES:
        return _Head(frame.digest, "", [], text)
    disagreement, suspects = json.loads(text)
    return _Head(frame.digest, disagreement, suspects, "")


def slices_of(count: int, parts: int) -> list[slice]:
    """Cuts `count` elements into slices, the last ones shorter or empty."""
    step = -(-count // (parts * _ALIGNMENT)) * _ALIGNMENT
    return [slice(min(count, part * step), min(count, (part + 1) * step)) for part in range(parts)]
