"""Collectives over gloo that are started now and waited for later.

Each is made of transfers between two ranks with a tag of its own, so it needs no place in the order of the group's
other collectives, and ranks may start and wait as they like. Frames go first (`checked_calls`); a larger tensor
follows, from each rank that has a part of it directly to each that needs it, once all are known to be in the same
call. What is reduced is reduced in the order of the ranks: all have the same bits.

One thread per group, made at the first of them, does what comes after the start.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

from device_communicators.base.helper_threads import HelperThread
from device_communicators.calls.memory import as_bytes
from device_communicators.calls.user_call import begin_sending
from device_communicators.process_group.checked_calls import Call, Frames, checked, fill, frame_bytes, room_for
from device_communicators.process_group.plain import PlainProcessGroup
from device_communicators.routing.communicator import GroupContext, reduce_in_rank_order
from device_communicators.routing.waiting import limit_of, until

_OWN_TAGS = 1 << 29  # apart from those of plain transfers, and of the ones between hosts
_CHANNEL_BITS = 18
_NUMBERS = 1 << 10


Transport = Union[PlainProcessGroup, "Exchange"]
"""Carriers of tensors that are too large for frames: gloo's own collectives, or the transfers of a started call."""


class Steps(NamedTuple):
    """A collective: the frames that are exchanged first, and what remains once the ranks are known to agree."""

    call: Call
    payload: Tensor | None
    """Travels in the frame if it is small; None on a rank that sends nothing."""
    size_bytes: int
    """Of the payload of any rank."""
    finish: Callable[[Transport, Frames | None], object]
    """Its `frames` are None if the tensors exceeded a frame."""


class StartedCalls:
    """This rank's part in them."""

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        self._number = 0
        self._jobs: queue.SimpleQueue[StartedCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, steps: Steps) -> StartedCall:
        """Starts a call; what remains to be done runs in the thread."""
        with self._lock:  # frames and tags go in the order of the calls
            exchange = Exchange(self.context, self._number)
            self._number = (self._number + 1) % _NUMBERS
            started = StartedCall(exchange, steps)
            self._jobs.put(started)
            if self._thread is None:
                self._thread = HelperThread("started", _work_off, self._jobs)
                self._thread.start()
                weakref.finalize(self, self._jobs.put, None)
        return started

    def close(self) -> None:
        self._jobs.put(None)


def _work_off(jobs: queue.SimpleQueue[StartedCall | None]) -> None:
    with torch.inference_mode():  # it writes into the callers' tensors, which may be inference tensors
        while (job := jobs.get()) is not None:
            job.run()
            del job  # with it the caller's tensors


class Exchange:
    """Transfers of one call, between this rank and others; each is waited for as long as an operation may take."""

    def __init__(self, context: GroupContext, number: int) -> None:
        self.context = context
        self._tag = _OWN_TAGS | number << _CHANNEL_BITS | context.tag(0)

    def start(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[tuple[Any, Tensor]]:
        """Starts transfers of contiguous tensors; returns the works, with what they read or write."""
        group = self.context.cpu_group
        begin_sending()
        works = [(group.recv([as_bytes(x)], rank, self._tag), x) for rank, x in received.items() if x.numel()]
        return works + [(group.send([as_bytes(x)], rank, self._tag), x) for rank, x in sent.items() if x.numel()]

    def run(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        for work, _ in self.start(sent, received):
            work.wait(limit_of(self.context))

    @property
    def others(self) -> list[int]:
        """Returns the other ranks from the next one on, so that not all send to the same one at first."""
        size, rank = self.context.size, self.context.rank
        return [(rank + step) % size for step in range(1, size)]

    # As a Transport.

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        out[self.context.rank].copy_(x)
        self.run(dict.fromkeys(self.others, x), {rank: out[rank] for rank in self.others})

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        self._reduce(out.view(-1), list(x.view(self.context.size, -1)), reduce_op)

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        """Reduces a slice on each rank, which gives it to all."""
        slices = list(x.view(-1).tensor_split(self.context.size))
        mine = slices[self.context.rank]
        self._reduce(mine, slices, reduce_op)
        self.run(dict.fromkeys(self.others, mine), {rank: slices[rank] for rank in self.others})

    def _reduce(self, out: Tensor, slices: list[Tensor], reduce_op: str) -> None:
        """Reduces this rank's slice of all ranks' to `out`, in rank order."""
        mine = slices[self.context.rank]
        blocks = mine.new_empty((self.context.size, mine.numel()))
        blocks[self.context.rank].copy_(mine)
        self.run({rank: slices[rank] for rank in self.others}, {rank: blocks[rank] for rank in self.others})
        out.copy_(reduce_in_rank_order(blocks, reduce_op))

    def flat_broadcast_(self, x: Tensor, src: int) -> None:
        """Broadcasts in parts, which each rank gives to all others: no rank sends it all more than twice."""
        mine = self.context.rank
        parts = list(as_bytes(x).tensor_split(self.context.size))
        if mine == src:
            self.run({rank: parts[rank] for rank in self.others}, {})
            self.run(dict.fromkeys(self.others, parts[src]), {})
            return
        self.run({}, {src: parts[mine]})
        between = [rank for rank in self.others if rank != src]
        self.run(dict.fromkeys(between, parts[mine]), {rank: parts[rank] for rank in self.others})


class StartedCall:
    """A work, as c10d's: `wait` may be called by any thread, and again."""

    def __init__(self, exchange: Exchange, steps: Steps) -> None:
        self._exchange = exchange
        self._call = steps.call
        self._steps: Steps | None = steps  # with it the caller's tensors
        self._done = threading.Event()
        self._error: BaseException | None = None
        context = exchange.context
        self._fits_in = steps.size_bytes <= room_for(context.size)
        self._frames = torch.zeros(context.size, frame_bytes(context.size), dtype=torch.uint8, device="cpu")
        mine = self._frames[context.rank]
        length = fill(mine, steps.call, steps.payload if self._fits_in else None)
        self._works = exchange.start(
            dict.fromkeys(exchange.others, mine[:length]), {rank: self._frames[rank] for rank in exchange.others}
        )

    def run(self) -> None:
        """Finishes the call, in the group's thread."""
        steps, self._steps = self._steps, None
        try:
            for work, _ in self._works:
                work.wait(limit_of(self._exchange.context))
            if steps is not None:
                frames = checked(self._exchange.context, self._call, self._frames)
                steps.finish(self._exchange, frames if self._fits_in else None)
        except BaseException as error:  # for `wait`, in the caller's thread
            self._error = error
        self._works = []
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        until(self._done.wait, self._exchange.context, self._call.operation)
        if self._error is not None:
            raise self._error
