"""Transfers between the hosts of a group: one rank of each host, over the group's gloo, point to point.

Every transfer goes directly from the host that has the bytes to the one that needs them; only a broadcast, which one
host would have to send to all, goes along a tree. What is reduced is combined in the order of the hosts, whoever does
it, so all hosts have the same bits.

Each call begins with a *frame* from each leader to each other, with a digest of this call and all before it: before
any other tensor is received, all leaders know whether their hosts are in the same call, and if not, who is in which.
A small tensor travels in the frame. A leader whose host's ranks were in different calls says so in its next frame.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from device_communicators.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError, plain
from device_communicators.liveness.health import NEWS_S, NOTICE_S
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import attributed, died, kind_of_failure
from device_communicators.routing.reductions import as_bytes
from device_communicators.routing.user_call import UserCall, begin_sending
from device_communicators.routing.waiting import abandon

DIRECT_BYTES = 64 << 10
"""Up to here each host sends all it has to all others; above, each reduces a slice, in two rounds.

Of two and three hosts on one machine with two cores, one round took 0.3 to 0.7 of the time of two up to here, and from
256 KiB on the same. It is also what a frame takes in."""

_ALIGNMENT = 64  # elements; slices begin at whole cache lines
_OWN_TAGS = 1 << 30  # apart from those of plain transfers, which count from 0
_CHANNEL_BITS = 18
_PAYLOADS = 1 << _CHANNEL_BITS  # in the tags of what follows the frames

_HEAD = struct.Struct("<4s8sQI")
"""Magic, digest, bytes of the payload, bytes of the text; then the text, a JSON list: what the ranks disagree about, or
null, the ranks that disagree, the call in words. Then the payload."""
_MAGIC = b"PSH1"
_TEXT_BYTES = 2000
_PAYLOAD_AT = 2048
_MOST_SUSPECTS = 64

_COMBINE: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}

Finish = Callable[[Tensor, Tensor], None]
"""`finish(out, total)` writes what all hosts' `total` comes to."""


class Leaders:
    """This rank's part in the transfers between hosts; `leaders[h]` is the rank that speaks for host h."""

    def __init__(self, context: GroupContext, leaders: Sequence[int], host: int) -> None:
        self.context = context
        self.leaders = tuple(leaders)
        self.host = host
        self.is_leader = self.leaders[host] == context.rank
        self._call = UserCall("")
        self._digest = b""
        self._agreed = True
        self.disagreement = ("", [0])
        """The hosts' different calls in words, and the global ranks to blame."""
        self._frames: Tensor | None = None
        self.tag = _OWN_TAGS | (context.tag(3) & (_PAYLOADS - 1))
        self._started = self._deadline = 0.0
        self._waiting = False
        if context.watcher is not None:
            context.watcher.on_death.append(self._end_wait_on_death)

    @property
    def others(self) -> list[int]:
        return [host for host in range(len(self.leaders)) if host != self.host]

    @property
    def _operation(self) -> str:
        return self._call.method

    def begin(self, call: UserCall, *facts: object) -> None:
        """Starts a step of `call`; in `facts`, and in what is compared of the call, all leaders must agree.

        Its deadline is a little before that of the ranks that wait for this one, so that they hear why.
        """
        self._call, self._agreed = call, False
        if self.is_leader:  # with those before: hosts that came through different calls differ from then on
            record = self._digest + repr((facts, call.compared)).encode()
            self._digest = hashlib.blake2b(record, digest_size=8).digest()
        timeout_s = self.context.timeout_s
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s - min(1.0, timeout_s / 10)

    def send(self, x: Tensor, rank: int) -> Transfer:
        """Starts to send contiguous `x`, which is alive and unchanged until the transfer's wait."""
        return Transfer(rank, lambda: self.context.cpu_group.send([as_bytes(x)], rank, self.tag | _PAYLOADS))

    def recv(self, out: Tensor, rank: int) -> Transfer:
        return Transfer(rank, lambda: self.context.cpu_group.recv([as_bytes(out)], rank, self.tag | _PAYLOADS))

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Transfer]:
        """Starts to send to and receive from hosts; empty tensors stay where they are.

        The first of a call compares the calls, and waits for that; what is small is there then.
        """
        if not self._agreed:
            self.agree({host: x for host, x in sent.items() if x.nbytes <= DIRECT_BYTES}, received)
            sent = {host: x for host, x in sent.items() if x.nbytes > DIRECT_BYTES}
            received = {host: x for host, x in received.items() if x.nbytes > DIRECT_BYTES}
        transfers = [self.recv(x, self.leaders[host]) for host, x in received.items() if x.numel()]
        return transfers + [self.send(x, self.leaders[host]) for host, x in sent.items() if x.numel()]

    # Frames.

    def agree(self, sent: Mapping[int, Tensor] | None = None, received: Mapping[int, Tensor] | None = None) -> None:
        """Raises CollectiveMismatchError on all leaders whose hosts are not in the same call; once a call.

        What is `sent`, small and contiguous, is in the frames; what is `received` and small comes out of them.
        """
        if self._agreed:
            return
        frames = self._exchange_frames(sent or {})
        self._agreed = True
        heads = {host: _read(frame) for host, frame in frames.items()}
        self._compare(heads)
        for host, x in (received or {}).items():
            if 0 < x.nbytes <= DIRECT_BYTES:
                as_bytes(x).copy_(frames[host][_PAYLOAD_AT : _PAYLOAD_AT + x.nbytes])

    def _exchange_frames(self, sent: Mapping[int, Tensor]) -> dict[int, Tensor]:
        if self._frames is None:  # kept: memory that was used before costs less than fresh pages
            self._frames = torch.empty(len(self.leaders), _PAYLOAD_AT + DIRECT_BYTES, dtype=torch.uint8)
        theirs = {host: self._frames[host] for host in self.others}
        made: dict[int, Tensor] = {}
        for x in (*sent.values(), None):
            if id(x) not in made:
                made[id(x)] = _framed(self._digest, [None, [], str(self._call)], x)
        mine = {host: made[id(sent.get(host))] for host in self.others}
        self.wait_for([*self._start_frames(theirs, "recv"), *self._start_frames(mine, "send")])
        return theirs

    def _start_frames(self, frames: Mapping[int, Tensor], direction: str) -> list[Transfer]:
        start = getattr(self.context.cpu_group, direction)

        def transfer(frame: Tensor, rank: int) -> Transfer:
            return Transfer(rank, lambda: start([frame], rank, self.tag))

        return [transfer(frame, self.leaders[host]) for host, frame in frames.items()]

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
        frame = _framed(self._digest, [what, list(failure.suspect_ranks)[:_MOST_SUSPECTS], ""], None)
        theirs = {host: torch.empty(_PAYLOAD_AT + DIRECT_BYTES, dtype=torch.uint8) for host in self.others}
        transfers = self._start_frames(theirs, "recv")  # or theirs would not be done with this exchange
        transfers += self._start_frames(dict.fromkeys(self.others, frame), "send")

        def finish() -> None:
            with contextlib.suppress(RuntimeError):  # the others have ended, or given up
                for transfer in transfers:
                    transfer.wait(timedelta(seconds=self.context.timeout_s))
            self.abandon()

        thread = threading.Thread(target=finish, daemon=True, name="parallel_state-hosts")
        thread.start()
        thread.join(NEWS_S)  # as a rule they wait; who comes later hears of it as long as this process lives

    def all_reduce(self, partial: Tensor, out: Tensor, reduce_op: str, finish: Finish) -> Iterator[None]:
        """Reduces flat `partial` of each host, which is overwritten, to flat `out` on all; both may be one tensor.

        Yields where it would wait for others, having started what they wait for.
        """
        if partial.nbytes <= DIRECT_BYTES:
            yield from self.combine(dict.fromkeys(self.others, partial), partial, reduce_op)
            finish(out, partial)
            return
        slices = slices_of(partial.numel(), len(self.leaders))
        mine = slices[self.host]
        yield from self.combine({host: partial[slices[host]] for host in self.others}, partial[mine], reduce_op)
        finish(out[mine], partial[mine])
        received = {host: out[slices[host]] for host in self.others}
        transfers = self.exchange(dict.fromkeys(self.others, out[mine]), received)
        yield
        self.wait_for(transfers)

    def combine(self, sent: Mapping[int, Tensor], mine: Tensor, reduce_op: str) -> Iterator[None]:
        """Gives the others what is `sent`, and combines what they give with `mine`, in place, in the hosts' order."""
        blocks = [mine if host == self.host else torch.empty_like(mine) for host in range(len(self.leaders))]
        transfers = self.exchange(sent, {host: blocks[host] for host in self.others})
        yield
        self.wait_for(transfers)
        total = blocks[0]
        for block in blocks[1:]:
            # Into memory that nobody needs any more; in the end that is `mine`.
            total = _COMBINE[reduce_op](total, block, out=total if block is not blocks[-1] else mine)

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


class _Head(NamedTuple):
    """The head of a frame."""

    digest: bytes
    disagreement: str | None
    """Of the ranks of the host that sent it."""
    suspects: list[int]
    call: str


def _framed(digest: bytes, text: list[object], payload: Tensor | None) -> Tensor:
    words = json.dumps(text, ensure_ascii=False).encode()
    if len(words) > _TEXT_BYTES:
        words = json.dumps([each[: _TEXT_BYTES // 4] if isinstance(each, str) else each for each in text]).encode()
    size_bytes = 0 if payload is None else payload.nbytes
    frame = torch.empty(_PAYLOAD_AT + size_bytes, dtype=torch.uint8)
    head = bytearray(_HEAD.pack(_MAGIC, digest, size_bytes, len(words)) + words)
    frame[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
    if payload is not None and size_bytes:
        frame[_PAYLOAD_AT:] = as_bytes(payload)
    return frame


def _read(frame: Tensor) -> _Head:
    head = frame[:_PAYLOAD_AT].numpy().tobytes()
    _, digest, _, length = _HEAD.unpack_from(head)
    return _Head(digest, *json.loads(head[_HEAD.size : _HEAD.size + length]))


class Transfer:
    """A started transfer with one rank. What goes wrong with it, be it at its start, is raised by `wait`."""

    def __init__(self, rank: int, start: Callable[[], Any]) -> None:
        self.rank = rank
        self._work: Any = None
        self._error: RuntimeError | None = None
        begin_sending()
        try:
            self._work = start()
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
