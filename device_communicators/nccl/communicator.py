"""Runs calls over NCCL on the current stream. Calls that return a `Work` run on a side stream.

8-bit floats are reduced in a wider dtype, because NCCL rounds each partial sum.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from device_communicators.base import settings
from device_communicators.base.errors import (
    CommunicationError,
    GroupNotInitializedError,
    InvalidArgumentError,
    UnsupportedError,
)
from device_communicators.calls.memory import as_bytes
from device_communicators.calls.reductions import (
    REDUCING,
    UNSIGNED,
    finish_reduction,
    is_native,
    reducible,
    reduction_refusal,
)
from device_communicators.calls.work import DONE, ContinuedWork, Work
from device_communicators.cuda.nccl_library import (
    BYTE,
    DTYPES,
    IN_PROGRESS,
    REDUCE_OPS,
    SUCCESS,
    SUSPEND_MEMORY,
    NcclLibrary,
    load,
)
from device_communicators.cuda.streams import CudaStreams
from device_communicators.nccl.deadlines import GOODBYE_S, Watch
from device_communicators.nccl.handle import Deadline, Handle, end_all, expect_sum, gather_records, make_record
from device_communicators.nccl.links import Link, Links
from device_communicators.nccl.windows import Windows
from device_communicators.routing.communicator import Communicator, GroupContext, Request, call_each_once
from device_communicators.routing.waiting import Watched

logger = logging.getLogger("parallel_state")

_Transfers = Sequence[tuple[Tensor, int]]


class NcclCommunicator(Communicator):
    name = "nccl"
    carries_the_device = True

    def __init__(
        self, context: GroupContext, library: NcclLibrary | None = None, streams: CudaStreams | None = None
    ) -> None:
        super().__init__(context)
        self.library = library or load()
        self.streams = streams or CudaStreams(context.device, context.high_priority_stream)
        self._handle: Handle | None = None
        self._parent: Handle | None = None
        """The non-blocking communicator that `divide` splits; None if `set_up` was called without `divisible=True`."""
        self._watch: Watch | None = None
        self._links = Links(self.library, context, self.streams)
        self._windows = Windows(context, self.library, self.streams)
        self._has_proven_window = False
        self._side: Any = None
        self._making = threading.RLock()
        self._is_warm = False
        self._suspended = False
        self._closed = False

    def refusal(self, request: Request) -> str | None:
        if request.device_type != self.context.device.type:
            return f"a tensor on {request.device_type}"
        if request.operation not in REDUCING or request.dtype is None or request.dtype in UNSIGNED:
            return None
        return reduction_refusal(request.dtype, request.reduce_op)

    def __str__(self) -> str:
        count = len(self._handles())
        made = f"{count} of NCCL's communicators" if count else "made at the first call"
        device = self.context.device.type
        return f"{self.library}, {device} tensors on the current stream, {made}; {self._windows}"

    def set_up(self, *, divisible: bool = False) -> None:
        """Creates and tests the group's NCCL communicator. If `divisible`, keeps a communicator from which `divide`
        splits those of sub-groups. Every rank calls this. Idempotent.

        Raises ConfigMismatchError if NCCL versions differ, and GroupNotInitializedError during a CUDA graph capture.
        """
        context, started = self.context, time.monotonic()
        with self._making:
            if self._handle is not None:
                return
            self._refuse_capture("all ranks of the group make NCCL's communicator together")
            records = gather_records(context, make_record(self.library, context, makes_id=context.rank == 0))
            with self.streams.guard():
                parent = Handle.meet(self.library, context, records[0].unique_id, context.size, context.rank)
                handle = parent.split(context, 0, context.rank)
                if divisible:
                    self._parent = parent
                else:
                    parent.close()
                self._use(handle, started)

    def divide(self, part: Communicator | None, color: int) -> None:
        with self._making, self.streams.guard():
            if self._parent is None:
                return
            started = time.monotonic()
            if not isinstance(part, NcclCommunicator):
                self._parent.join_split()
                return
            part._use(self._parent.split(part.context, color, part.context.rank), started)

    def _use(self, handle: Handle, started: float) -> None:
        self._handle = handle
        try:
            one = torch.ones(1, device=self.context.device)
            self._prove(one, started, "NCCL_P2P_DISABLE=1 shows whether peer access is at fault")
        except BaseException:
            self._abort()
            raise
        logger.info("%s: %s, ready after %.2f s", self.context, self.library, time.monotonic() - started)

    def _prove(self, one: Tensor, started: float, advice: str) -> None:
        watch = self._watched()
        self._all_reduce(one, one, "sum")
        deadline = Deadline(self.context, "the first all_reduce over NCCL")
        while not watch.device_is_done():
            self._raise_failure()
            deadline.step()
        expect_sum(self.context, one.item(), started, advice)

    def _watched(self) -> Watch:
        if self._watch is None:
            self._watch = Watch(
                self.context, self.streams.marker, self.streams.enter_relaxed, self._find_failure, self._abort
            )
        return self._watch

    def _refuse_capture(self, why: str) -> None:
        if self.streams.is_capturing():
            raise GroupNotInitializedError(
                f"{self.context} was not used before the capture of this CUDA graph, so its calls can't be captured: "
                f"{why}. Make the same calls once before the capture, or use initialize_model_parallel(warm_up=True)"
            )

    def connect(self, peer: int) -> None:
        self._link(peer)

    def _link(self, peer: int) -> Link:
        link = self._begin_link(peer)
        if not link.is_made:
            link.wait(self._raise_failure)
        return link

    def _begin_link(self, peer: int) -> Link:
        link = self._links.get(peer)
        if link is None or not link.is_made:
            self._refuse_capture(f"ranks {self.context.rank} and {peer} must first make their communicators together")
            self._watched()
            link = self._links.begin(peer, self._put)
        return link

    def wait_for_links(self) -> None:
        for link in self._links.all():
            link.wait(self._raise_failure)

    @contextmanager
    def capture(self) -> Iterator[None]:
        if not self.streams.is_capturing():  # else the first call of a cold group raises
            if not self._is_warm:
                call_each_once(self)
                size = self.context.size
                self.reduce_scatterv(torch.zeros(size, device=self.context.device), 0, [1] * size, "sum")
                self._is_warm = True
            self.wait_for_links()
        yield

    def close(self) -> None:
        """Frees the group's NCCL communicators. Aborts them if the device doesn't finish within 10 s. Idempotent."""
        if self._closed:
            return
        self._closed = self._links.closed = True
        in_order = self._watch is None or self._watch.drain(GOODBYE_S)
        if self._watch is not None:
            self._watch.close()
        end_all(self._handles(), in_order=in_order)
        self._windows.close(deregistered=self._handle is not None and self._handle.ended_in_order)

    def _abort(self) -> None:
        end_all(self._handles(), in_order=False)

    def _handles(self) -> list[Handle]:
        own = [handle for handle in (self._handle, self._parent) if handle is not None]
        return [*own, *self._links.handles()]

    def _find_failure(self, operation: str, since: float) -> CommunicationError | None:
        for handle in self._handles():
            state = handle.state()
            if state not in (SUCCESS, IN_PROGRESS):
                return handle.error(operation, state, since)
        return None

    def _raise_failure(self) -> None:
        if self._watch is not None and self._watch.failure is not None:
            raise self._watch.failure
        if self._links.failure is not None:
            raise self._links.failure

    def suspend(self) -> None:
        function = self._function("ncclCommSuspend")
        self._ready()
        for handle in self._handles():
            with handle.lock:
                handle.check("ncclCommSuspend", function(handle.comm, SUSPEND_MEMORY))
        self._suspended = True

    def resume(self) -> None:
        if self._suspended:
            function = self._function("ncclCommResume")
            self._raise_failure()
            for handle in self._handles():
                with handle.lock:
                    handle.check("ncclCommResume", function(handle.comm))
            self._suspended = False

    def _function(self, name: str) -> Any:
        if name in self.library.missing:
            raise UnsupportedError(f"{self.context} can't do this with the loaded NCCL: {self.library.missing[name]}")
        return getattr(self.library, name)

    @property
    def has_memory(self) -> bool:
        return self._windows.problem is None and not self.streams.is_capturing()

    def allocate(self, size_bytes: int) -> Tensor | None:
        handle, watch, started = self._ready(), self._watched(), time.monotonic()

        def register(address: int, window_bytes: int) -> str | None:
            with self._watching("empty", self.streams.current()):
                problem = handle.register(address, window_bytes)
            self._raise_failure()  # the watch aborts a call that misses its deadline
            return problem

        made = self._windows.allocate(size_bytes, register, watch.streams)
        if made is not None and not self._has_proven_window and size_bytes >= 4:
            one = made[:4].view(torch.float32).fill_(1)
            self._prove(one, started, f"{settings.SYMMETRIC_BYTES.name}=0 turns off registered memory")
            self._has_proven_window = True
        return made

    def _compare(self, operation: str, symmetric: Sequence[Tensor], own: Sequence[Tensor] = ()) -> None:
        memory = self.context.host_memory
        if memory is not None and memory.debug:
            self._windows.compare(operation, symmetric, own)

    def _check(self, *tensors: Tensor) -> None:
        for x in tensors:
            if x.device != self.context.device:
                raise InvalidArgumentError(
                    f"tensors of {self.context} must be on {self.context.device}, but one is on {x.device}; move that "
                    "tensor"
                )

    def _check_awake(self) -> None:
        self._raise_failure()
        if self._suspended:
            raise UnsupportedError(f"{self.context} is suspended; call resume() on every rank first")

    def _ready(self) -> Handle:
        if self._handle is None:
            self._raise_failure()
            self.set_up()
        self._check_awake()
        return self._handle  # type: ignore[return-value]  # set_up makes it or raises

    def _call(self, operation: str, function: Any, *args: Any, stream: int | None = None) -> None:
        handle = self._ready()
        stream = self.streams.current() if stream is None else stream
        watch = self._watched()
        watch.begin(operation)  # inlined _watching: the context manager costs 1 µs
        try:
            with handle.lock:
                result = function(*args, handle.comm, stream)
                if result:
                    handle.check(operation, result)
        except BaseException as error:
            self._blame(watch, error)
            raise
        watch.end(None if self.streams.is_capturing() else stream)

    @contextmanager
    def _launch(self, operation: str) -> Iterator[Callable[..., None]]:
        handle, stream = self._ready(), self.streams.current()

        def add(function: Any, *args: Any) -> None:
            result = function(*args, handle.comm, stream)
            if result:
                handle.check(operation, result)

        with self._watching(operation, stream), handle.lock, handle.group(operation):
            yield add

    @contextmanager
    def _watching(self, operation: str, stream: int) -> Iterator[None]:
        """Gives the block's NCCL call on `stream` a deadline. If the thread that watches deadlines aborts the call,
        raises that thread's error.
        """
        watch = self._watched()
        watch.begin(operation)
        try:
            yield
        except BaseException as error:
            self._blame(watch, error)
            raise
        watch.end(None if self.streams.is_capturing() else stream)

    def _blame(self, watch: Watch, error: BaseException) -> None:
        watch.end(None)
        if isinstance(error, CommunicationError) and watch.failure not in (None, error):
            raise watch.failure from error

    def _run_beside(self, enqueue: Callable[[int], None], *tensors: Tensor) -> Work:
        self._ready()
        if self._side is None:
            self._side = self.streams.side()
        return self._side.run(enqueue, tensors)

    def _finish(self, wide: Tensor, op: str, narrow: Tensor | None) -> None:
        by_nccl = op == "avg" and _op_of(op, wide, narrow) == "avg"
        finish_reduction(wide, "sum" if by_nccl else op, narrow, self.context.size)

    def _all_reduce(self, out: Tensor, x: Tensor, op: str, stream: int | None = None) -> None:
        self._check(x)
        self._compare("all_reduce", (x, out))
        what = (x.data_ptr(), out.data_ptr(), x.numel(), DTYPES[x.dtype], REDUCE_OPS[op])
        self._call("all_reduce", self.library.ncclAllReduce, *what, stream=stream)

    def all_reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        if x.numel() == 0 or reduce_op == "avg" or not is_native(x.dtype) or not x.is_contiguous():
            return super().all_reduce(x, reduce_op)
        out = torch.empty_like(x)
        self._all_reduce(out, x, reduce_op)
        return out

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        if x.numel():
            wide, op, narrow = reducible(x, reduce_op)
            self._all_reduce(wide, wide, _op_of(op, wide, narrow))
            self._finish(wide, op, narrow)

    def iall_reduce_(self, x: Tensor, reduce_op: str) -> Work:
        if x.numel() == 0:
            return DONE
        wide, op, narrow = reducible(x, reduce_op)
        work = self._run_beside(lambda stream: self._all_reduce(wide, wide, _op_of(op, wide, narrow), stream), wide)
        return ContinuedWork(work, lambda: self._finish(wide, op, narrow))

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, stream: int | None = None) -> None:
        self._check(x)
        self._compare("reduce_scatter", (x,), (out,))
        what = (x.data_ptr(), out.data_ptr(), out.numel(), DTYPES[x.dtype], REDUCE_OPS[op])
        self._call("reduce_scatter", self.library.ncclReduceScatter, *what, stream=stream)

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        if x.numel():
            wide_out, op, narrow = reducible(out, reduce_op)
            self._reduce_scatter(wide_out, reducible(x, reduce_op)[0], _op_of(op, wide_out, narrow))
            self._finish(wide_out, op, narrow)

    def ireduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> Work:
        if x.numel() == 0:
            return DONE
        wide_out, op, narrow = reducible(out, reduce_op)
        wide = reducible(x, reduce_op)[0]
        work = self._run_beside(
            lambda stream: self._reduce_scatter(wide_out, wide, _op_of(op, wide, narrow), stream), wide_out, wide
        )
        return ContinuedWork(work, lambda: self._finish(wide_out, op, narrow))

    def reduce_scatterv(self, x: Tensor, dim: int, sizes: Sequence[int], reduce_op: str) -> Tensor:
        self._check(x)
        rows = x.movedim(dim, 0).contiguous()
        out = x.new_empty((sizes[self.context.rank], *rows.shape[1:]))
        if rows.numel():
            wide_out, op, narrow = reducible(out, reduce_op)
            wide = reducible(rows, reduce_op)[0]
            numbers = (DTYPES[wide.dtype], REDUCE_OPS[_op_of(op, wide, narrow)])
            with self._launch("reduce_scatterv") as add:
                row = wide.numel() // len(rows)  # `wide`: `rows` in the dtype of the reduction
                for dst, block in enumerate(wide.view(-1).split([size * row for size in sizes])):
                    if block.numel():
                        what = (block.data_ptr(), wide_out.data_ptr(), block.numel(), *numbers, dst)
                        add(self.library.ncclReduce, *what)
            self._finish(wide_out, op, narrow)
        return out.movedim(0, dim).contiguous()

    def _all_gather(self, out: Tensor, x: Tensor, stream: int | None = None) -> None:
        self._check(x)
        self._compare("all_gather", (out,), (x,))
        what = (x.data_ptr(), out.data_ptr(), x.nbytes, BYTE)
        self._call("all_gather", self.library.ncclAllGather, *what, stream=stream)

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        if x.numel():
            self._all_gather(out, x)

    def iall_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._run_beside(lambda stream: self._all_gather(out, x, stream), out, x) if x.numel() else DONE

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        self._check(x)
        if any(out.numel() for out in outs):
            with self._launch("all_gatherv") as add:
                for src, out in enumerate(outs):
                    if out.numel():
                        own = x if src == self.context.rank else out
                        add(self.library.ncclBroadcast, own.data_ptr(), out.data_ptr(), out.nbytes, BYTE, src)

    def _broadcast(self, x: Tensor, src: int, stream: int | None = None) -> None:
        self._check(x)
        what = (x.data_ptr(), x.data_ptr(), x.nbytes, BYTE, src)
        self._call("broadcast", self.library.ncclBroadcast, *what, stream=stream)

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        return self._run_beside(lambda stream: self._broadcast(x, src, stream), x) if x.numel() else DONE

    def flat_broadcast_(self, x: Tensor, src: int) -> None:
        if x.numel():
            self._broadcast(x, src)

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        self._exchange("gather", [(x, dst)], _by_rank([] if out is None else out.unbind(0)))

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        self._exchange("scatter", _by_rank([] if x is None else x.unbind(0)), [(out, src)])

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        self._exchange("all_to_all", _by_rank(x.split(input_splits)), _by_rank(out.split(output_splits)))

    def _exchange(self, operation: str, sends: _Transfers, receives: _Transfers) -> None:
        """Enqueues all transfers, each a pair of tensor and peer rank, in one launch, so that no transfer waits for
        another.
        """
        rank = self.context.rank
        own = zip([out for out, src in receives if src == rank], [x for x, dst in sends if dst == rank], strict=True)
        sends = [(x, dst) for x, dst in sends if x.numel() and dst != rank]
        receives = [(x, src) for x, src in receives if x.numel() and src != rank]
        self._check(*(x for x, _ in (*sends, *receives)))
        # Even without data here: peers with data wait for this rank to make the communicator.
        self.set_up()
        if sends or receives:
            with self._launch(operation) as add:
                for x, dst in sends:
                    add(self.library.ncclSend, x.data_ptr(), x.nbytes, BYTE, dst)
                for x, src in receives:
                    add(self.library.ncclRecv, x.data_ptr(), x.nbytes, BYTE, src)
        for out, x in own:
            if x.numel():
                as_bytes(out).copy_(as_bytes(x))

    def send(self, x: Tensor, dst: int) -> None:
        self._transfer("send", [x], dst)

    def recv(self, out: Tensor, src: int) -> None:
        self._transfer("recv", [out], src)

    def run_list(self, operation: str, tensors: Sequence[Tensor], peer: int) -> None:
        if operation != "broadcast_":
            self._transfer(operation, tensors, peer)
            return
        tensors = [each for each in tensors if each.numel()]
        self._check(*tensors)
        if tensors:
            with self._launch("broadcast") as add:
                for each in tensors:
                    add(self.library.ncclBroadcast, each.data_ptr(), each.data_ptr(), each.nbytes, BYTE, peer)

    def _transfer(self, operation: str, tensors: Sequence[Tensor], peer: int) -> None:
        tensors = [each.contiguous() if operation == "send" else each for each in tensors if each.numel()]
        self._check(*tensors)
        if tensors:
            self._check_awake()
            self._put(self._link(peer), operation, tensors, self.streams.current())

    def _put(self, link: Link, operation: str, tensors: Sequence[Tensor], stream: int) -> None:
        with self._watching(operation, stream):
            link.put(operation, tensors, stream)

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        return self._start("send", x, dst)

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        return self._start("recv", out, src)

    def _start(self, operation: str, x: Tensor, peer: int) -> Work:
        if x.numel() == 0:
            return DONE
        self._check(x)
        self._check_awake()
        return self._begin_link(peer).start(operation, x, self._put)

    def barrier(self) -> None:
        """Runs over gloo instead of NCCL, because a barrier must block the host."""
        Watched(self.context.cpu_group.barrier(), self.context, "barrier").wait()


def _op_of(op: str, wide: Tensor, narrow: Tensor | None) -> str:
    return "sum" if op == "avg" and (narrow is not None or wide.is_floating_point()) else op


def _by_rank(blocks: Sequence[Tensor]) -> _Transfers:
    return [(block, rank) for rank, block in enumerate(blocks)]
