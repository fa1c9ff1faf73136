"""Transfers between the hosts of a group: one rank of each host, over the group's gloo, point to point.

Every transfer goes directly from the host that has the bytes to the one that needs them; only a broadcast, which one
host would have to send to all, goes along a tree. What is reduced is combined in the order of the hosts, whoever does
it, so all hosts have the same bits.

Each call begins with a *frame* from each leader to each other, with a digest of this call and all before it: before
a leader sends more, all know whether their hosts are in the same call, and if not, who is in which. The first
DIRECT_BYTES of a tensor travel in the frame, so what is small needs no other transfer. A leader whose host's ranks were
in different calls says so in its next frame.

gloo sends once the receiver has said that it receives. So the receives of a call's frames are started at the end of
the call before it, and those of what follows the frames before these are waited for: nobody waits for that word.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from device_communicators.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError, plain
from device_communicators.hierarchical.reduction import Reduction
from device_communicators.liveness.health import NEWS_S, NOTICE_S
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import attributed, died, kind_of_failure
from device_communicators.routing.reductions import as_bytes
from device_communicators.routing.user_call import UserCall, begin_sending
from device_communicators.routing.waiting import abandon

DIRECT_BYTES = 64 << 10
"""Room for a tensor in a frame."""

MOST_UNDER_WAY = 4
"""How many chunks of a reduction have begun at most, and have not ended."""

_ALIGNMENT = 64  # elements; slices begin at whole cache lines
_OWN_TAGS = 1 << 30  # apart from those of plain transfers, which count from 0
_CHANNEL_BITS = 18
_PAYLOADS = 1 << _CHANNEL_BITS  # in the tags of what follows the frames
_RESULTS = 2 << _CHANNEL_BITS  # … and of what goes back: the receives of a call are started in another order
_GENERATION_AT = _CHANNEL_BITS + 2
_GENERATIONS = 1 << 8
_MADE: weakref.WeakKeyDictionary[Any, Counter[int]] = weakref.WeakKeyDictionary()
"""By process group: how many of a tag were made."""

_HEAD = struct.Struct("<4s8sQI8x")
"""Magic, digest, bytes of the payload, bytes of the text; then the payload, then the text."""
_AGREES, _DISAGREES = b"PSH3", b"PSD3"
"""Magic of a frame whose text is the call in words; and of one whose text is JSON, of what the host's ranks disagree
about and which ranks these are."""
_TEXT_BYTES = 2000
_FRAME_BYTES = _HEAD.size + DIRECT_BYTES + _TEXT_BYTES
_MOST_SUSPECTS = 64


class Leaders:
    """This rank's part in the transfers between hosts; `leaders[h]` is the rank that speaks for host h."""

    def __init__(self, context: GroupContext, leaders: Sequence[int], host: int) -> None:
        self.context = context
        self.leaders = tuple(leaders)
        self.host = host
        self.others = [each for each in range(len(self.leaders)) if each != host]
        self.is_leader = self.leaders[host] == context.rank
        self._call = UserCall("")
        self._digest = b""
        self._agreed = True
        self._is_first = False
        self._splits: tuple[int, ...] = ()
        self._combined = 0
        self.scratch = Scratch()
        self.disagreement = ("", [0])
        """The hosts' different calls in words, and the global ranks to blame."""
        self._outgoing, self._incoming = _Frames(len(self.leaders)), _Frames(len(self.leaders))
        self._posted: list[Transfer] = []
        """The receives of the next frames, of all others in their order."""
        tag = context.tag(3) & (_PAYLOADS - 1)
        self.tag = _OWN_TAGS | _generation(context, tag) << _GENERATION_AT | tag
        self._started = self._deadline = 0.0
        self._waiting = False
        if context.watcher is not None:
            context.watcher.on_death.append(self._end_wait_on_death)

    @property
    def _operation(self) -> str:
        return self._call.method

    def begin(self, call: UserCall, *facts: object, splits: Sequence[int] = ()) -> None:
        """Starts a step of `call`; in `facts`, and in what is compared of the call, all leaders must agree.

        `splits`: how many rows go to each host, then how many come from each; what one sends another must expect.
        Its deadline is a little before that of the ranks that wait for this one, so that they hear why.
        """
        self._call, self._agreed, self._is_first, self._splits = call, False, True, tuple(splits)
        self._combined = 0
        if self.is_leader:  # with those before: hosts that came through different calls differ from then on
            self._digest = hashlib.blake2b(self._digest + _compared(call, facts), digest_size=8).digest()
        timeout_s = self.context.timeout_s
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s - min(1.0, timeout_s / 10)

    def send(self, x: Tensor, rank: int, kind: int = _PAYLOADS) -> Transfer:
        """Starts to send contiguous `x`, which is alive and unchanged until the transfer's wait."""
        return Transfer(self.context.cpu_group.send, as_bytes(x), rank, self.tag | kind)

    def recv(self, out: Tensor, rank: int, kind: int = _PAYLOADS) -> Transfer:
        return Transfer(self.context.cpu_group.recv, as_bytes(out), rank, self.tag | kind)

    def expect(self, received: Mapping[int, Tensor]) -> Expected:
        """Starts to receive from hosts what an exchange brings, whose turn may come after others' of the call.

        gloo tells the sender on the connection on which it sends itself: behind what is under way there.
        """
        is_first, self._is_first = self._is_first, False
        heads, rests = _cut(received) if is_first else ({}, received)
        return Expected(is_first, heads, [self.recv(x, self.leaders[host]) for host, x in rests.items() if x.numel()])

    def exchange(self, sent: Mapping[int, Tensor], expected: Expected) -> list[Transfer]:
        """Starts to send to hosts what they expect; empty tensors stay where they are. Returns all transfers.

        The first exchange of a call compares the calls, and waits for that: the beginning of each tensor is there then,
        and the rest is sent.
        """
        starts: list[Transfer] = []
        if expected.is_first:
            heads, sent = _cut(sent)
            starts = self._agree(heads, expected.heads)
        sends = [self.send(x, self.leaders[host]) for host, x in sent.items() if x.numel()]
        return [*starts, *expected.transfers, *sends]

    def exchange_at_once(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Exchanges, and waits for it."""
        self.wait_for(self.exchange(sent, self.expect(received)))

    # Frames.

    def agree(self) -> None:
        """Raises CollectiveMismatchError on all leaders whose hosts are not in the same call; once a call."""
        if not self._agreed:
            self.wait_for(self._agree({}, {}))

    def _agree(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Transfer]:
        """Compares the calls by frames, in which `sent` and `received` travel: contiguous, of DIRECT_BYTES at most.

        Returns the transfers of this host's frames.
        """
        receives, send, tag = self._receive_frames(), self.context.cpu_group.send, self.tag
        words = _in_words(self._call) + struct.pack(f"<{len(self._splits)}q", *self._splits)
        made: dict[int, Tensor] = {}
        sends = []
        for host in self.others:
            x = sent.get(host)
            frame = made.get(id(x))
            if frame is None:
                made[id(x)] = frame = self._outgoing.fill(host, self._digest, x, words)
            sends.append(Transfer(send, frame, self.leaders[host], tag))
        self.wait_for(receives)
        self._posted = []
        self._agreed = True
        heads = {host: self._incoming.head(host) for host in self.others}
        if any(head[:2] != (_AGREES, self._digest) for head in heads.values()):
            self._compare({host: _read(self._incoming.rows[host]) for host in heads})
        if self._splits:
            self._check_splits()
        for host, x in received.items():
            self._check_size(host, heads[host][2], x.nbytes)
            as_bytes(x).copy_(self._incoming.payload(host, x.nbytes))
        self._receive_frames()
        return sends

    def _check_splits(self) -> None:
        size = len(self.leaders)
        rows = [
            self._splits
            if host == self.host
            else struct.unpack(f"<{2 * size}q", self._incoming.text(host)[-16 * size :])
            for host in range(size)
        ]
        for src, dst in itertools.product(range(size), repeat=2):
            sent, expected = rows[src][dst], rows[dst][size + src]
            if sent != expected:
                ranks = [self.context.ranks[self.leaders[host]] for host in (src, dst)]
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

    def _receive_frames(self) -> list[Transfer]:
        """Starts to receive the next frames, unless that is under way."""
        if not self._posted:
            recv, rows = self.context.cpu_group.recv, self._incoming.rows
            self._posted = [Transfer(recv, rows[host], self.leaders[host], self.tag) for host in self.others]
        return self._posted

    def _compare(self, heads: dict[int, _Head]) -> None:
        for head in heads.values():
            if head.disagreement:  # of that host's ranks, who know better than a digest
                raise self._mismatch(head.disagreement, head.suspects)
        digests = {host: head.digest for host, head in heads.items()} | {self.host: self._digest}
        others = [host for host in sorted(heads) if digests[host] != self._digest]
        if not others:
            return
        [(usual, count), *_] = Counter(digests.values()).most_common(1)
        if 2 * count <= len(digests):  # nobody can tell who is wrong: those that differ from this rank's host
            usual = self._digest
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
        frame = self._outgoing.fill(self.host, self._digest, None, words, _DISAGREES)
        transfers = [*self._receive_frames()]  # or theirs would not be done with this exchange
        transfers += [
            Transfer(self.context.cpu_group.send, frame, self.leaders[host], self.tag) for host in self.others
        ]

        def finish() -> None:
            with contextlib.suppress(RuntimeError):  # the others have ended, or given up
                for transfer in transfers:
                    transfer.wait(timedelta(seconds=self.context.timeout_s))
            self.abandon()

        thread = threading.Thread(target=finish, daemon=True, name="parallel_state-hosts")
        thread.start()
        thread.join(NEWS_S)  # as a rule they wait; who comes later hears of it as long as this process lives

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
        results = [self.recv(out[slices[host]], self.leaders[host], _RESULTS) for host in self.others]
        yield from self.combine(part, slices, mine, reduction)
        results += [self.send(mine, self.leaders[host], _RESULTS) for host in self.others]
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
        dtypes = [reduction.travelling(host, in_one_round) for host in range(len(self.leaders))]
        turn, self._combined = self._combined % MOST_UNDER_WAY, self._combined + 1
        received = {host: self.scratch.take((turn, host), out.numel(), dtypes[host]) for host in self.others}
        expected = self.expect(received)
        yield
        x, dtype = part(), dtypes[self.host]
        # One tensor for all where all get the same, so that it goes into one frame.
        sent = {each.start: x[each].to(dtype) for host, each in slices.items() if host != self.host}
        transfers = self.exchange({host: sent[slices[host].start] for host in self.others}, expected)
        yield
        self.wait_for(transfers)
        mine = received[self.host] = x[slices[self.host]]
        reduction.combine([received[host] for host in sorted(received)], out, mine if x is not out else None)

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

    def wait_for(self, transfers: Sequence[Transfer]) -> None:
        """Waits until all are done, one fails, or a rank of the failure domain has ended."""
        if not transfers:
            return
        transfer, self._waiting = transfers[0], True
        self._end_wait_on_death()
        try:
            for transfer in transfers:
                transfer.wait(timedelta(seconds=max(0.001, self._deadline - time.monotonic())))
        except RuntimeError as error:
            if self.context.deaths():
                raise died(self.context, self._operation, self._started) from error
            raise self._failure(error, transfer.rank) from error
        finally:
            self._waiting = False

    def _end_wait_on_death(self) -> None:
        """Ends a wait that has begun if a rank has ended: gloo's waits don't look."""
        if self._waiting and self.context.deaths():
            threading.Thread(target=self._end_the_wait, daemon=True, name="parallel_state-hosts").start()

    def _end_the_wait(self) -> None:
        time.sleep(NOTICE_S)  # what the dead rank sent before may still be on its way
        if self._waiting:
            self.abandon()

    def _failure(self, error: RuntimeError, rank: int) -> CommunicationError:
        """Returns the error for a failed transfer with `rank`."""
        context = self.context
        text = str(error)
        suspect = context.ranks[rank]
        kind = kind_of_failure(text)
        failure = context.failure(
            kind,
            f"{self._operation} of {context} failed between hosts, in a transfer with global rank {suspect}: "
            f"{plain(error)}. The group can't be used further; look at that rank, and at the network to its host",
            self._operation,
            started=self._started,
            suspect_ranks=(suspect,),
        )
        return (
            failure if kind is CollectiveTimeoutError else attributed(context, self._operation, self._started, failure)
        )

    def abandon(self, ranks: Iterable[int] | None = None) -> None:
        """Ends the waits of this rank in gloo, and lets others know at once, the leaders if not `ranks`, that it does.

        They needn't wait until their deadline.
        """
        ranks = [self.leaders[host] for host in self.others] if ranks is None else ranks
        abandon(self.context.cpu_group, ranks, _OWN_TAGS)

    def close(self) -> None:
        if self.context.watcher is not None and self._end_wait_on_death in self.context.watcher.on_death:
            self.context.watcher.on_death.remove(self._end_wait_on_death)


def _generation(context: GroupContext, tag: int) -> int:
    """Returns the number of this user of a tag; every rank of the group calls it alike.

    One that is closed leaves receives, which gloo can't take back: a later one's frames would go there.
    """
    if context.cpu_group is None:
        return 0
    made = _MADE.setdefault(context.cpu_group, Counter())
    made[tag] += 1
    return (made[tag] - 1) % _GENERATIONS


class Expected(NamedTuple):
    """What an exchange brings."""

    is_first: bool
    """True of a call's first one, in whose frames `heads` come."""
    heads: dict[int, Tensor]
    transfers: list[Transfer]


class _Head(NamedTuple):
    """What a frame says beside its payload."""

    digest: bytes
    disagreement: str
    """Of the ranks of the host that sent it."""
    suspects: list[int]
    call: str


class Scratch:
    """Memory that calls use again: fresh pages cost more than what is done with them."""

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}

    def take(self, key: object, count: int, dtype: torch.dtype) -> Tensor:
        size_bytes = count * dtype.itemsize
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size_bytes:
            with torch.inference_mode(False):
                kept = self._kept[key] = torch.empty(size_bytes, dtype=torch.uint8)
        return kept[:size_bytes].view(dtype)


class _Frames:
    """Memory for a frame of each host, which is kept: memory that was used before costs less than fresh pages."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts

    @functools.cached_property
    def rows(self) -> Sequence[Tensor]:
        with torch.inference_mode(False):
            return torch.empty(self._hosts, _FRAME_BYTES + 16 * self._hosts, dtype=torch.uint8).unbind(0)

    @functools.cached_property
    def _bytes(self) -> Sequence[memoryview]:
        return [row.numpy().data for row in self.rows]

    def fill(self, host: int, digest: bytes, payload: Tensor | None, text: bytes, magic: bytes = _AGREES) -> Tensor:
        size_bytes = 0 if payload is None else payload.nbytes
        text_at = _HEAD.size + size_bytes
        end = text_at + len(text)
        view = self._bytes[host]
        _HEAD.pack_into(view, 0, magic, digest, size_bytes, len(text))
        view[text_at:end] = text
        if payload is not None and size_bytes:
            self.payload(host, size_bytes).copy_(as_bytes(payload))
        return self.rows[host][:end]

    def head(self, host: int) -> tuple[bytes, bytes, int, int]:
        return _HEAD.unpack_from(self._bytes[host])

    def text(self, host: int) -> bytes:
        _, _, size_bytes, length = self.head(host)
        return bytes(self._bytes[host][_HEAD.size + size_bytes : _HEAD.size + size_bytes + length])

    def payload(self, host: int, size_bytes: int) -> Tensor:
        return self.rows[host][_HEAD.size : _HEAD.size + size_bytes]


@functools.lru_cache(maxsize=1024)
def _in_words(call: UserCall) -> bytes:
    return str(call).encode()[:_TEXT_BYTES]


@functools.lru_cache(maxsize=1024)
def _compared(call: UserCall, facts: tuple[object, ...]) -> bytes:
    return repr((facts, call.compared)).encode()


def _read(frame: Tensor) -> _Head:
    """Parses a frame, for its words."""
    data = frame.numpy()
    magic, digest, size_bytes, length = _HEAD.unpack(data[: _HEAD.size].tobytes())
    text_at = min(_HEAD.size + size_bytes, len(data))
    text = data[text_at : text_at + length].tobytes().decode(errors="replace")
    if magic != _DISAGREES:
        return _Head(digest, "", [], text)
    disagreement, suspects = json.loads(text)
    return _Head(digest, disagreement, suspects, "")


def _cut(tensors: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Returns what of contiguous tensors travels in the frames, and what follows, of the same the same."""
    heads: dict[int, Tensor] = {}
    rests: dict[int, Tensor] = {}
    cut: dict[int, tuple[Tensor, Tensor]] = {}
    for host, x in tensors.items():
        if x.nbytes <= DIRECT_BYTES:
            heads[host] = x
            continue
        if id(x) not in cut:
            data = as_bytes(x)
            cut[id(x)] = data[:DIRECT_BYTES], data[DIRECT_BYTES:]
        heads[host], rests[host] = cut[id(x)]
    return heads, rests


class Transfer:
    """A started transfer with one rank. What goes wrong with it, be it at its start, is raised by `wait`."""

    def __init__(self, start: Callable[[list[Tensor], int, int], Any], x: Tensor, rank: int, tag: int) -> None:
        self.rank = rank
        self._work: Any = None
        self._error: RuntimeError | None = None
        begin_sending()
        try:
            self._work = start([x], rank, tag)
        except RuntimeError as error:
            self._error = error

    def wait(self, limit: timedelta) -> None:
        if self._error is not None:
            raise self._error
        self._work.wait(limit)


def slices_of(count: int, parts: int) -> list[slice]:
    """Cuts `count` elements into slices, the last ones shorter or empty."""
    step = -(-count // (parts * _ALIGNMENT)) * _ALIGNMENT
    return [slice(min(count, part * step), min(count, (part + 1) * step)) for part in range(parts)]
