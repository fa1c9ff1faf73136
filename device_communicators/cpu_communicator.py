"""Runs collectives and transfers of CPU tensors in C++ (cpu/csrc/group.h), within a host and between hosts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from device_communicators.base.errors import UnsupportedError
from device_communicators.calls.reductions import REDUCING, TREE_SUM, reduction_refusal
from device_communicators.calls.user_call import REDUCE_OPS, begin_sending
from device_communicators.calls.work import DONE, Work
from device_communicators.cpu.message_streams import MessageStreams
from device_communicators.cpu.native_group import DTYPES, NativeGroup, reducible_in_memory
from device_communicators.cpu.streams import connect_streams
from device_communicators.cpu.transfers import Transfers
from device_communicators.routing.communicator import (
    Communicator,
    GroupContext,
    Request,
    new_gathered,
    new_scattered,
)

_POINT_TO_POINT = ("send", "recv", "isend", "irecv_")
_BETWEEN_RANKS = ("all_to_all", "gather", "scatter", "all_gatherv", "reduce_scatterv")


class CpuCommunicator(Communicator):
    """Runs calls on CPU tensors in C++. A started collective is complete when the method that starts it returns."""

    name = "shared_memory"  # "hierarchical" with several segments
    adds_in_tree_order = True
    tells_sending = True

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        memory = context.host_memory
        if memory is None or memory.collectives is None:
            raise UnsupportedError(
                f"{context} can't use this library's CPU collectives, because their compiled part is missing; see the "
                "warnings in the log"
            )
        if not memory.in_one_segment:
            self.name = "hierarchical"
        self._memory = memory
        self._group = memory.collectives
        self._channels = memory.channels
        self._is_meshed = memory.in_one_segment or memory.is_meshed
        self._streams: Transfers | None = None
        if not memory.in_one_segment and memory.is_meshed:
            gather = partial(context.gather, operation="connect")
            address, self._connections = connect_streams(memory, gather, context.watcher, context.failure_ranks)
            library, tag = self._group.library, context.tag(0)
            self._streams = Transfers(library, memory.members, address, self._group.number, tag=tag)
            memory.streams = MessageStreams(self._streams, context.tag(1))
        self._sizes = ctypes.c_size_t * context.size
        self._pointers = ctypes.c_void_p * context.size

    def refusal(self, request: Request) -> str | None:
        if request.device_type != "cpu":
            return f"a tensor on {request.device_type}"
        if request.operation in _POINT_TO_POINT and self._channels is None and self._streams is None:
            return f"it has no {request.operation}"
        if request.operation in _BETWEEN_RANKS and not self._is_meshed:
            return f"it has no {request.operation}"
        if request.reduce_op == TREE_SUM and not self._memory.has_subtrees:
            return (
                "order='tree' needs equally many ranks on each of at most 64 hosts, numbered host by host, but these "
                f"have the ranks {self._memory.domains}; place the ranks so, or leave out order="
            )
        if request.operation in REDUCING and request.dtype is not None:
            return reduction_refusal(request.dtype, request.reduce_op)
        return None

    def __str__(self) -> str:
        return f"CPU tensors over {self._memory.describe_ways()}"

    @property
    def op_server(self) -> NativeGroup:
        return self._group

    def all_gather(self, x: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
        out = new_gathered(x, dim, self.context.size) if out is None else out
        x = x.contiguous()
        outer = x.shape[:dim].numel() if x.numel() else 1
        self._group.call("all_gather", out.data_ptr(), x.data_ptr(), outer, x.nbytes // outer)
        return out

    def reduce_scatter(self, x: Tensor, dim: int, reduce_op: str, out: Tensor | None = None) -> Tensor:
        out = new_scattered(x, dim, self.context.size) if out is None else out
        self._reduce_scatter(out, x.contiguous(), x.shape[:dim].numel() if x.numel() else 1, reduce_op)
        return out

    def _reduce_scatter(self, out: Tensor, x: Tensor, outer: int, reduce_op: str) -> None:
        wide_out, op, narrow = reducible_in_memory(out, reduce_op)
        wide_x, _, _ = reducible_in_memory(x, reduce_op)
        inner = wide_out.numel() // outer
        what = (wide_out.data_ptr(), wide_x.data_ptr(), outer, inner, DTYPES[wide_out.dtype], REDUCE_OPS[op])
        self._group.call("reduce_scatter", *what)
        if narrow is not None:
            narrow.copy_(wide_out)

    def all_reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        if x.dtype not in DTYPES or not x.is_contiguous():
            return super().all_reduce(x, reduce_op)
        out = torch.empty_like(x)
        self._group.call("all_reduce", out.data_ptr(), x.data_ptr(), x.numel(), DTYPES[x.dtype], REDUCE_OPS[reduce_op])
        return out

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        wide, op, narrow = reducible_in_memory(x, reduce_op)
        self._group.call(
            "all_reduce", wide.data_ptr(), wide.data_ptr(), wide.numel(), DTYPES[wide.dtype], REDUCE_OPS[op]
        )
        if narrow is not None:
            narrow.copy_(wide)

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        self._reduce_scatter(out, x, 1, reduce_op)

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        self._group.call("all_gather", out.data_ptr(), x.data_ptr(), 1, x.nbytes)

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        outs[self.context.rank].copy_(x)
        self._gatherv([out.data_ptr() or 1 for out in outs], [out.nbytes for out in outs], x, -1)

    def _gatherv(self, outs: Sequence[int | None], sizes: Sequence[int], x: Tensor, dst: int) -> None:
        self._group.call("gatherv", self._pointers(*outs), self._sizes(*sizes), x.data_ptr(), dst)

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        pointers = [None] * self.context.size if out is None else [block.data_ptr() or 1 for block in out.unbind(0)]
        self._gatherv(pointers, [x.nbytes] * self.context.size, x, dst)
        if out is not None:
            out[self.context.rank].copy_(x)

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        self._group.call("scatter", out.data_ptr(), None if x is None else x.data_ptr(), out.nbytes, src)

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        row_bytes = x.dtype.itemsize * (x[0:1].numel() if x.shape[0] else out[0:1].numel())
        sizes = (self._sizes(*(rows * row_bytes for rows in splits)) for splits in (output_splits, input_splits))
        self._group.call("all_to_all", out.data_ptr(), x.data_ptr(), *sizes)

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        self._group.call("broadcast", x.data_ptr(), x.nbytes, src)
        return DONE

    def barrier(self) -> None:
        self._group.call("barrier")

    def send(self, x: Tensor, dst: int) -> None:
        x = x.contiguous()  # first: if its allocation fails, nothing has been sent
        self._transfers.send(x, dst, self._tag(self.context.tag(0)))

    def recv(self, out: Tensor, src: int) -> None:
        self._transfers.recv_(out, src, self._tag(self.context.tag(0)))

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        return self._transfers.isend(x, dst, self._tag(tag))

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        return self._transfers.irecv_(out, src, self._tag(tag))

    @property
    def _transfers(self) -> Transfers:
        begin_sending()
        if self._streams is not None:
            return self._streams
        if self._channels is None:
            raise UnsupportedError(
                f"the communicator {self.name!r} doesn't support sends and receives on {self.context}"
            )
        return self._channels.transfers

    def _tag(self, tag: int) -> int:
        if self._streams is not None:
            return tag
        if tag != self.context.tag(0):
            raise UnsupportedError(
                f"the communicator {self.name!r} doesn't support sends and receives with tag {tag} on {self.context}"
            )
        return 0

    def abandon(self) -> None:
        if self._streams is not None:
            self._streams.abandon()

    def close(self) -> None:
        if self._streams is not None:
            self._streams.close()
            self._connections.close()
