"""A device's tensors over communicators of NCCL that are the group's own, on the current stream.

torch's NCCL group has streams of its own, between which and the caller's each call has to wait by events; here a call
is a kernel among the caller's. What is started to be waited for later (`iall_reduce_`, `isend`, …) runs on a stream
beside. Transfers between two ranks have communicators of those two, one for each direction, so that no transfer waits
for one that it has nothing to do with; they are made at the first transfer between the two, which both must come to.
What only moves, moves as bytes; what is reduced is widened as `reductions` says: 8-bit floats, which NCCL would round
at each hop, as it does with 16-bit ones.

Set-up, failures and the end are in `nccl.group` and below. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from device_communicators.cuda.nccl_library import BYTE, DTYPES, REDUCE_OPS, NcclLibrary, load
from device_communicators.cuda.streams import CudaStreams
from device_communicators.errors import InvalidArgumentError
from device_communicators.nccl.group import NcclGroup
from device_communicators.routing.communicator import DONE, Communicator, GroupContext, Request, Then, Work
from device_communicators.routing.reductions import (
    REDUCING,
    UNSIGNED,
    as_bytes,
    is_native,
    reducible,
    reduction_refusal,
)
from device_communicators.routing.waiting import Watched

_Transfers = Sequence[tuple[Tensor, int]]


class NcclCommunicator(Communicator):
    """The collectives of a group of GPUs, and its transfers."""

    name = "nccl"
    carries_the_device = True

    def __init__(
        self, context: GroupContext, library: NcclLibrary | None = None, streams: CudaStreams | None = None
    ) -> None:
        super().__init__(context)
        self.library = library or load()
        self._is_warm = False
        self._group = NcclGroup(
            context, self.library, streams or CudaStreams(context.device, context.high_priority_stream)
        )

    def refusal(self, request: Request) -> str | None:
        if request.device_type != self.context.device.type:
            return f"a tensor on {request.device_type}"
        if request.operation in REDUCING and request.dtype is not None:
            if request.dtype in UNSIGNED and request.reduce_op != "avg":
                return None
            return reduction_refusal(request.dtype, request.reduce_op)
        return None

    def __str__(self) -> str:
        return f"{self.library}, {self.context.device.type} tensors on the current stream, {self._group}"

    def set_up(self, *, divisible: bool = False) -> None:
        """Makes the group's communicator now and not at the first call; every rank of the group calls it."""
        self._group.set_up(divisible=divisible)

    def divide(self, part: Communicator | None, color: int) -> None:
        """The parts' communicators are split from this one's, where that was made by `set_up`."""
        self._group.divide(part._group if isinstance(part, NcclCommunicator) else None, color)

    def connect(self, peer: int) -> None:
        """Makes the communicators for transfers with a rank of the group, which calls it as well: before a capture."""
        self._group.link(peer)

    @contextmanager
    def capture(self) -> Iterator[None]:
        if not self._group.streams.is_capturing():  # else it is too late, which the first call will say
            self._warm_up()
            self._group.settle()
        yield

    def _warm_up(self) -> None:
        """Each kind of call once: NCCL connects ranks and allocates at the first one; a capture is no place for it."""
        if not self._is_warm:
            x = torch.zeros(self.context.size, device=self.context.device)
            out = torch.empty_like(x)
            parts = [1] * self.context.size
            self.flat_all_reduce_(x, "sum")
            self.flat_all_gather(out, x[:1])
            self.flat_reduce_scatter(out[:1], x, "sum")
            self.flat_broadcast_(x, 0)
            self.reduce_(x, 0, "sum")
            self.flat_all_to_all(out, x, parts, parts)
            self._is_warm = True

    def close(self) -> None:
        self._group.close()

    def _check(self, *tensors: Tensor) -> None:
        for x in tensors:
            if x.device != self.context.device:
                raise InvalidArgumentError(
                    f"tensors of {self.context} must be on {self.context.device}, but one is on {x.device}; move it"
                )

    # Reductions.

    def _all_reduce(self, out: Tensor, x: Tensor, op: str, stream: int | None = None) -> None:
        self._check(x)
        what = (x.data_ptr(), out.data_ptr(), x.numel(), DTYPES[x.dtype], REDUCE_OPS[op])
        self._group.call("all_reduce", self.library.ncclAllReduce, *what, stream=stream)

    def all_reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        if x.numel() == 0 or reduce_op == "avg" or not is_native(x.dtype) or not x.is_contiguous():
            return super().all_reduce(x, reduce_op)
        out = torch.empty_like(x)
        self._all_reduce(out, x, reduce_op)
        return out

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        if x.numel():
            wide, op, narrow = reducible(x, reduce_op)
            self._all_reduce(wide, wide, _summed(op))
            self._finish(wide, op, narrow)

    def iall_reduce_(self, x: Tensor, reduce_op: str) -> Work:
        if x.numel() == 0:
            return DONE
        wide, op, narrow = reducible(x, reduce_op)
        work = self._group.beside(lambda stream: self._all_reduce(wide, wide, _summed(op), stream), wide)
        return Then(work, lambda: self._finish(wide, op, narrow))

    def _finish(self, wide: Tensor, op: str, narrow: Tensor | None) -> None:
        if op == "avg":
            wide.div_(self.context.size)
        if narrow is not None:
            narrow.copy_(wide)

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, stream: int | None = None) -> None:
        self._check(x)
        what = (x.data_ptr(), out.data_ptr(), out.numel(), DTYPES[x.dtype], REDUCE_OPS[op])
        self._group.call("reduce_scatter", self.library.ncclReduceScatter, *what, stream=stream)

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        if x.numel():
            wide_out, op, narrow = reducible(out, reduce_op)
            self._reduce_scatter(wide_out, reducible(x, reduce_op)[0], _summed(op))
            self._finish(wide_out, op, narrow)

    def ireduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> Work:
        if x.numel() == 0:
            return DONE
        wide_out, op, narrow = reducible(out, reduce_op)
        wide = reducible(x, reduce_op)[0]
        work = self._group.beside(
            lambda stream: self._reduce_scatter(wide_out, wide, _summed(op), stream), wide_out, wide
        )
        return Then(work, lambda: self._finish(wide_out, op, narrow))

    def reduce_scatterv(self, x: Tensor, dim: int, sizes: Sequence[int], reduce_op: str) -> Tensor:
        """A reduction to each rank, all in one launch."""
        self._check(x)
        rows = x.movedim(dim, 0).contiguous()
        out = x.new_empty((sizes[self.context.rank], *rows.shape[1:]))
        if rows.numel():
            wide_out, op, narrow = reducible(out, reduce_op)
            wide = reducible(rows, reduce_op)[0]
            numbers = (DTYPES[wide.dtype], REDUCE_OPS[_summed(op)])
            with self._group.launch("reduce_scatterv") as add:
                for dst, block in enumerate(_blocks(wide, rows, sizes)):
                    if block.numel():
                        what = (block.data_ptr(), wide_out.data_ptr(), block.numel(), *numbers, dst)
                        add(self.library.ncclReduce, *what)
            self._finish(wide_out, op, narrow)
        return out.movedim(0, dim).contiguous()

    def reduce_(self, x: Tensor, dst: int, reduce_op: str) -> None:
        """As all_reduce_ of contiguous `x`, on `dst`; the others' are left as they are. Every rank calls it."""
        if x.numel():
            self._check(x)
            wide, op, narrow = reducible(x, reduce_op)
            place, numbers = wide.data_ptr(), (wide.numel(), DTYPES[wide.dtype], REDUCE_OPS[_summed(op)])
            self._group.call("reduce", self.library.ncclReduce, place, place, *numbers, dst)
            if self.context.rank == dst:
                self._finish(wide, op, narrow)

    # What only moves.

    def _all_gather(self, out: Tensor, x: Tensor, stream: int | None = None) -> None:
        self._check(x)
        what = (x.data_ptr(), out.data_ptr(), x.nbytes, BYTE)
        self._group.call("all_gather", self.library.ncclAllGather, *what, stream=stream)

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        if x.numel():
            self._all_gather(out, x)

    def iall_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._group.beside(lambda stream: self._all_gather(out, x, stream), out, x) if x.numel() else DONE

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        """A broadcast from each rank, all in one launch."""
        self._check(x)
        if any(out.numel() for out in outs):
            with self._group.launch("all_gatherv") as add:
                for src, out in enumerate(outs):
                    if out.numel():
                        own = x if src == self.context.rank else out
                        add(self.library.ncclBroadcast, own.data_ptr(), out.data_ptr(), out.nbytes, BYTE, src)

    def _broadcast(self, x: Tensor, src: int, stream: int | None = None) -> None:
        self._check(x)
        what = (x.data_ptr(), x.data_ptr(), x.nbytes, BYTE, src)
        self._group.call("broadcast", self.library.ncclBroadcast, *what, stream=stream)

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        return self._group.beside(lambda stream: self._broadcast(x, src, stream), x) if x.numel() else DONE

    def flat_broadcast_(self, x: Tensor, src: int) -> None:
        if x.numel():
            self._broadcast(x, src)

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        blocks = [] if out is None else list(out.unbind(0))
        sends = [(x, dst)] if out is None else []
        self._exchange("gather", sends, [(block, src) for src, block in enumerate(blocks) if src != dst])
        if out is not None:
            _copy(blocks[dst], x)

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        blocks = [] if x is None else list(x.unbind(0))
        receives = [(out, src)] if x is None else []
        self._exchange("scatter", [(block, dst) for dst, block in enumerate(blocks) if dst != src], receives)
        if x is not None:
            _copy(out, blocks[src])

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        rank = self.context.rank
        sent, received = x.split(input_splits), out.split(output_splits)
        sends = [(block, dst) for dst, block in enumerate(sent) if dst != rank]
        receives = [(block, src) for src, block in enumerate(received) if src != rank]
        self._exchange("all_to_all", sends, receives)
        _copy(received[rank], sent[rank])

    def exchange(self, sends: _Transfers, receives: _Transfers) -> None:
        """Contiguous tensors to ranks and from ranks, all in one launch, in which none waits for another.

        Who is in it calls it with what the others send and expect; several for one rank go in their order. The group's
        communicator must have been made (`set_up`, or a collective) where not all ranks call.
        """
        self._exchange("exchange", sends, receives)

    def _exchange(self, operation: str, sends: _Transfers, receives: _Transfers) -> None:
        sends = [each for each in sends if each[0].numel()]
        receives = [each for each in receives if each[0].numel()]
        self._check(*(x for x, _ in (*sends, *receives)))
        # Empty on this rank, it may not be on others, which must not wait for this one to make the communicator.
        self.set_up()
        if sends or receives:
            with self._group.launch(operation) as add:
                for x, dst in sends:
                    add(self.library.ncclSend, x.data_ptr(), x.nbytes, BYTE, dst)
                for x, src in receives:
                    add(self.library.ncclRecv, x.data_ptr(), x.nbytes, BYTE, src)

    # Between two ranks.

    def send(self, x: Tensor, dst: int) -> None:
        if x.numel():
            self._check(x)
            self._group.transfer("send", x.contiguous(), dst)

    def recv(self, out: Tensor, src: int) -> None:
        if out.numel():
            self._check(out)
            self._group.transfer("recv", out, src)

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        """NCCL has no tags: what is sent from one rank to another in a group arrives in this order."""
        return self._start("send", x, dst)

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        return self._start("recv", out, src)

    def _start(self, operation: str, x: Tensor, peer: int) -> Work:
        if x.numel() == 0:
            return DONE
        self._check(x)
        return self._group.start(operation, x, peer)

    def barrier(self) -> None:
        """Over gloo: it is the hosts that wait."""
        Watched(self.context.cpu_group.barrier(), self.context, "barrier").wait()

    # What newer versions of NCCL can.

    def suspend(self) -> None:
        """Gives NCCL's memory on the device back until `resume`; the device must be done. Every rank calls it.

        Raises UnsupportedError where NCCL is older than 2.29.7.
        """
        self._group.suspend()

    def resume(self) -> None:
        """Takes the memory again; every rank calls it. Without a `suspend` before it does nothing."""
        self._group.resume()

    def register_window(self, x: Tensor) -> Callable[[], None]:
        """Tells NCCL that `x`, in memory of ncclMemAlloc, lies alike on every rank; returns what takes it back.

        Every rank calls it, with a tensor of the same size: collectives on it then copy nothing in. torch's tensors
        are fit for it where they come from a MemPool over NCCL's allocator.
        """
        self._check(x)
        return self._group.register_window(x)


def _summed(op: str) -> str:
    """What NCCL is told to do: an average is a sum that is divided afterwards."""
    return "sum" if op == "avg" else op


def _blocks(wide: Tensor, rows: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Each rank's rows of `wide`, which holds `rows` in a dtype that is reduced."""
    row = wide.numel() // len(rows)
    return wide.view(-1).split([size * row for size in sizes])


def _copy(out: Tensor, x: Tensor) -> None:
    """Bytes: copy_ doesn't know every dtype."""
    if x.numel():
        as_bytes(out).copy_(as_bytes(x))
