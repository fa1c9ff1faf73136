"""What travels between the hosts of a group: one rank of each host, over the group's gloo, point to point.

Every transfer goes directly from the host that has the bytes to the one that needs them; only a broadcast, which one
host would have to send to all, goes along a tree. What is reduced is combined in the order of the hosts, whoever does
it, so all hosts have the same bits.

Transfers carry a tag that follows from the call: ranks in different calls don't take each other's bytes, but find
nobody until the deadline.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from device_communicators.base import GroupContext
from device_communicators.errors import CollectiveTimeoutError, CommunicationError
from device_communicators.failures import kind_of_failure
from device_communicators.health import NOTICE_S, Death
from device_communicators.reductions import as_bytes
from device_communicators.user_call import begin_sending
from device_communicators.waiting import abandon, attributed, died

DIRECT_BYTES = 64 << 10
"""Up to here each host sends all it has to all others; above, each reduces a slice, in two rounds.

Of two and three hosts on one machine with two cores, one round took 0.3 to 0.7 of the time of two up to here, and from
256 KiB on the same."""

_ALIGNMENT = 64  # elements; slices begin at whole cache lines
_OWN_TAGS = 1 << 30  # apart from those of plain transfers, which count from 0
_CHANNEL_BITS = 18

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
        self._operation = ""
        self.tag = 0
        self._started = self._deadline = 0.0
        self._waiting = False
        if context.watcher is not None:
            context.watcher.on_death.append(self._hear)

    @property
    def others(self) -> list[int]:
        return [host for host in range(len(self.leaders)) if host != self.host]

    def begin(self, operation: str, *facts: object) -> None:
        """Starts a call, of which all leaders know the same `facts`; `operation` is for errors.

        Its deadline is a little before that of the ranks that wait for this one, so that they hear why.
        """
        digest = zlib.crc32(repr(facts).encode()) & 0xFFF
        channel = self.context.tag(3) & ((1 << _CHANNEL_BITS) - 1)
        self._operation = operation
        self.tag = _OWN_TAGS | digest << _CHANNEL_BITS | channel
        timeout_s = self.context.timeout_s
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s - min(1.0, timeout_s / 10)

    def send(self, x: Tensor, rank: int) -> Transfer:
        """Starts to send contiguous `x`, which is alive and unchanged until the transfer's wait."""
        return Transfer(rank, lambda: self.context.cpu_group.send([as_bytes(x)], rank, self.tag))

    def recv(self, out: Tensor, rank: int) -> Transfer:
        return Transfer(rank, lambda: self.context.cpu_group.recv([as_bytes(out)], rank, self.tag))

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Transfer]:
        """Starts to send to and receive from hosts; empty tensors stay where they are."""
        transfers = [self.recv(x, self.leaders[host]) for host, x in received.items() if x.numel()]
        return transfers + [self.send(x, self.leaders[host]) for host, x in sent.items() if x.numel()]

    def all_reduce(self, partial: Tensor, out: Tensor, reduce_op: str, finish: Finish) -> Iterator[None]:
        """Flat `partial` of each host, which is overwritten, to flat `out` on all; they may be the same tensor.

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
        """The host that this one receives from, none for the root, and those that it sends to: a binomial tree."""
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
        """Until all are done, one fails, or a rank of the failure domain has ended."""
        if not transfers:
            return
        transfer, self._waiting = transfers[0], True
        self._hear()
        try:
            for transfer in transfers:
                transfer.wait(timedelta(seconds=max(0.001, self._deadline - time.monotonic())))
        except RuntimeError as error:
            if self._deaths():
                raise died(self.context, self._operation, self._started) from error
            raise self._failure(error, transfer.rank) from error
        finally:
            self._waiting = False

    def _deaths(self) -> list[Death]:
        return self.context.deaths()

    def _hear(self) -> None:
        """A wait that has begun doesn't look whether ranks have ended: where one has, somebody else ends the wait."""
        if self._waiting and self._deaths():
            threading.Thread(target=self._end_the_wait, daemon=True, name="parallel_state-hosts").start()

    def _end_the_wait(self) -> None:
        time.sleep(NOTICE_S)  # what the dead rank sent before may still be on its way
        if self._waiting:
            self.abandon()

    def _failure(self, error: RuntimeError, rank: int) -> CommunicationError:
        """What became of a transfer with `rank`, as an error that names it."""
        context = self.context
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        suspect = context.ranks[rank]
        kind = kind_of_failure(text)
        failure = kind(
            f"{self._operation} of {context} failed between hosts, in a transfer with global rank {suspect}: {text}. "
            "The group can't be used further; look at that rank, and at the network to its host",
            group=context.name,
            operation=self._operation,
            rank=context.rank,
            suspect_ranks=(suspect,),
            elapsed_s=time.monotonic() - self._started,
            timeout_s=context.timeout_s,
        )
        return (
            failure if kind is CollectiveTimeoutError else attributed(context, self._operation, self._started, failure)
        )

    def abandon(self) -> None:
        """Ends the waits of this rank in gloo, and lets the other leaders know at once that it won't go on."""
        abandon(self.context.cpu_group, [self.leaders[host] for host in self.others], _OWN_TAGS)

    def close(self) -> None:
        if self.context.watcher is not None and self._hear in self.context.watcher.on_death:
            self.context.watcher.on_death.remove(self._hear)


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
    """`count` elements in as many slices, the last ones shorter or empty."""
    step = -(-count // (parts * _ALIGNMENT)) * _ALIGNMENT
    return [slice(min(count, part * step), min(count, (part + 1) * step)) for part in range(parts)]
