"""All-reduces of middle sizes over torch's symmetric memory: by the NVLink switches' multicast, or in two shots.

A tensor is copied into a staging buffer that all ranks have mapped, reduced there by torch's kernel, and copied out.
torch's kernels wait for their peers without a deadline, and nothing can end them: a watch like NCCL's looks at deaths
and at the device, so that the *next* call raises, but who waits for the device itself waits on. Therefore, and because
it has not run on a GPU, it is off unless PARALLEL_STATE_SYMMETRIC_MEMORY_BYTES gives it memory.

Multicast adds in the switch, in an order of its own; each element is added in one place, so all ranks have the same
bits, but not those of the kernels in peer memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from device_communicators import settings
from device_communicators.cuda.streams import StreamOrder
from device_communicators.cuda.watch import GOODBYE_S, Watch
from device_communicators.errors import UnsupportedError
from device_communicators.peer.device import PeerDevice, start
from device_communicators.peer.memory import (
    NotSharedError,
    PeerMemory,
    SymmetricSharing,
    SymmetricWay,
    Way,
    share,
    together,
)
from device_communicators.peer.thresholds import Thresholds, agree
from device_communicators.routing.communicator import GroupContext, PartialCommunicator, Request
from device_communicators.routing.reductions import REDUCING

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that torch's kernels reduce."""

_SUMS = ("all_reduce", "all_reduce_", *(name for name in REDUCING if name.startswith("all_reduce_add_rms_norm")))
_ROUND = 16
"""Bytes to whose multiples a tensor's length is rounded in the staging buffer: what moves fastest."""
_PROOF_S = 30.0
_STEP_S = 0.0005


class SymmetricMemoryCommunicator(PartialCommunicator):
    """all_reduce of float32 and bfloat16, on the current stream; with a norm, by the base class over it."""

    name = "symmetric_memory"
    picks_by_size = True

    def __init__(
        self,
        context: GroupContext,
        device: PeerDevice | None = None,
        thresholds: Thresholds | None = None,
        ways: Sequence[Way] = (),
    ) -> None:
        """`thresholds`: instead of the table's."""
        super().__init__(context)
        self._thresholds = thresholds
        self._device = device
        self._ways = ways or (SymmetricWay(),)
        self._memory: PeerMemory | None = None
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        """Of the staging buffer."""
        self._limit = 0
        self._multimem = False

    def admit(self) -> str | None:
        try:
            self._set_up()
        except NotSharedError as error:
            self.close()
            return str(error)
        except BaseException:
            self.close()
            raise
        return None

    def _set_up(self) -> None:
        context = self.context
        device = start(context, self._device)
        self._streams, self._order = device.streams, StreamOrder(device.streams)
        admission = agree(context, device, self._thresholds)
        limit = min(admission.thresholds.symmetric, settings.SYMMETRIC_MEMORY_BYTES.get()) // _ROUND * _ROUND
        limits = together(context, "symmetric memory", lambda: limit)
        limit = min(limits)
        if admission.pinned is not None:
            raise NotSharedError(f"{settings.PEER_MEMORY_ALGORITHM.name} has another algorithm for every size")
        if limit == 0:
            raise NotSharedError(
                f"no size is preferred for {context.size} ranks of architecture {admission.thresholds.arch}"
            )
        self._memory = share(context, limit, self._ways)
        multicasts = together(context, "multicast", self._look)
        self._multimem = admission.thresholds.multimem and all(multicasts)
        self._limit = limit
        together(context, "prove symmetric memory", self._prove)

    def _look(self) -> bool:
        """Begins to watch the device; whether this rank has multicast."""
        self._watch = Watch(self.context, self._streams.marker, self._streams.enter_relaxed)
        return bool(self._sharing().handle.multicast_ptr)

    def _prove(self) -> None:
        """Makes a first call: nothing is first done within a capture, and what can't work shows here."""
        with self._streams.guard():
            count = min(1001, self._limit // torch.float32.itemsize)
            x = torch.full((count,), self.context.rank + 1.0, device=self.context.device)
            found = self.all_reduce(x, "sum")
            deadline = time.monotonic() + min(_PROOF_S, self.context.timeout_s / 2)
            while self._watch is not None and not self._watch.device_is_done():
                if time.monotonic() > deadline:
                    raise NotSharedError("the first all_reduce was not done in time")
                time.sleep(_STEP_S)
            if not bool((found == self.context.size * (self.context.size + 1) / 2).all()):
                raise NotSharedError("the first all_reduce gave a wrong result")

    def _sharing(self) -> SymmetricSharing:
        sharing = None if self._memory is None else self._memory.sharing
        if sharing is None:
            raise UnsupportedError(f"{self.context} has no symmetric memory: it was not admitted, or closed")
        return sharing  # type: ignore[return-value]  # of the only way

    def __str__(self) -> str:
        how = "multicast in the switches" if self._multimem else "two-shot"
        return f"torch's symmetric memory, {how}, {self._memory}; its kernels have no deadline on the device"

    def refusal(self, request: Request) -> str | None:
        if request.device_type != self.context.device.type:
            return f"a tensor on {request.device_type}"
        if request.operation not in _SUMS:
            return f"it has no {request.operation}"
        if request.reduce_op not in (None, "sum") or request.dtype not in DTYPES:
            return f"its kernels sum float32 and bfloat16, and know no {request.reduce_op} of {request.dtype}"
        size_bytes = request.numel * request.dtype.itemsize
        return None if size_bytes <= self._limit else f"{size_bytes} bytes, and {self._limit} is the most"

    def all_reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._reduce(out, x)
        return out

    def all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        self._reduce(x, x)

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        self._reduce(x, x)

    def _reduce(self, out: Tensor, x: Tensor) -> None:
        """Reduces `x` to `out`, which may be one tensor; neither need be contiguous."""
        if x.numel() == 0:
            return
        watch, memory, sharing = self._watch, self._memory, self._sharing()
        if watch is not None and watch.failure is not None:
            raise watch.failure
        per = _ROUND // x.dtype.itemsize
        rounded = -(-x.numel() // per) * per
        if memory is not None:
            what = f"an all_reduce of {x.numel()} × {x.dtype}"
            memory.require(rounded * x.dtype.itemsize, what, settings.SYMMETRIC_MEMORY_BYTES.name)
        staged = sharing.tensor.view(x.dtype)[:rounded]
        mine = staged[: x.numel()].view(x.shape)
        with self._lock:  # another thread's call would come between the copies
            if watch is not None:
                watch.begin("all_reduce")
            stream = self._order.next()
            mine.copy_(x)
            self._run(staged)
            out.copy_(mine)
            if watch is not None:
                watch.end(None if self._streams.is_capturing() else stream)

    def _run(self, staged: Tensor) -> None:
        """Sums a part of the staging buffer over all ranks, in place."""
        op = torch.ops.symm_mem.multimem_all_reduce_ if self._multimem else torch.ops.symm_mem.two_shot_all_reduce_
        op(staged, "sum", self.context.cpu_group.group_name)

    def close(self) -> None:
        watch, self._watch = self._watch, None
        memory, self._memory = self._memory, None
        done = watch is None or watch.drain(GOODBYE_S)
        if watch is not None:
            watch.close()
        if memory is not None:
            # Unmapping waits for the device, which may wait for a rank that never comes.
            if done:
                memory.close()
            else:
                memory.leave()
