"""NCCL's communicators of one group: made together, used by calls, looked after, and ended.

What a call is given (tensors, counts, dtypes) is `nccl`'s business. Not run on a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from device_communicators.cuda.nccl_library import (
    DTYPES,
    IN_PROGRESS,
    REDUCE_OPS,
    SUCCESS,
    SUSPEND_MEMORY,
    WINDOW_SYMMETRIC,
    NcclLibrary,
)
from device_communicators.cuda.streams import CudaStreams
from device_communicators.cuda.watch import GOODBYE_S, Watch
from device_communicators.errors import CommunicationError, GroupNotInitializedError, UnsupportedError
from device_communicators.nccl.handle import Handle, Patience, end_all
from device_communicators.nccl.links import Link, Links
from device_communicators.nccl.meeting import expect_sum, gather, tell
from device_communicators.routing.communicator import GroupContext, Work

logger = logging.getLogger("parallel_state")


class NcclGroup:
    """One communicator of all ranks, which they make at the first call; and those of two ranks each."""

    def __init__(self, context: GroupContext, library: NcclLibrary, streams: CudaStreams) -> None:
        self.context = context
        self.library = library
        self.streams = streams
        self._handle: Handle | None = None
        self._meeting: Handle | None = None
        """The non-blocking one that it was split from, where others will be."""
        self._watch: Watch | None = None
        self._links = Links(library, context, streams)
        self._side: Any = None
        self._making = threading.RLock()
        self._suspended = False
        self._closed = False

    def __str__(self) -> str:
        made = len(self._handles())
        return f"{made} of NCCL's communicators" if made else "made at the first call"

    # Set-up and end.

    def set_up(self, *, divisible: bool = False) -> None:
        """Makes the communicator, if that hasn't been done, and shows by a small all-reduce that it works.

        `divisible`: it will be divided, see `divide`.

        Every rank of the group calls it. Raises PeerDiedError, CollectiveTimeoutError, ConfigMismatchError where ranks
        have different versions, CommunicationError; GroupNotInitializedError within a capture, where it can't be.
        """
        with self._making:
            if self._handle is None:
                self._set_up(divisible)

    def _set_up(self, divisible: bool) -> None:
        context, started = self.context, time.monotonic()
        self._must_not_capture("all ranks of the group make NCCL's communicator together")
        told = gather(context, tell(self.library, context, makes_id=context.rank == 0))
        with self.streams.guard():
            meeting = Handle.meet(self.library, context, told[0].unique_id, context.size, context.rank)
            handle = meeting.split(context, 0, context.rank, size=context.size, rank=context.rank)
            if divisible:
                self._meeting = meeting
            else:
                meeting.close()
            self._take(handle, started)

    def _take(self, handle: Handle, started: float) -> None:
        self._handle = handle
        try:
            self._prove(started)
        except BaseException:
            self._abort()
            raise
        logger.info("%s: %s, ready after %.2f s", self.context, self.library, time.monotonic() - started)

    def divide(self, part: NcclGroup | None, color: int) -> None:
        """As Communicator.divide. Parts of a communicator that isn't divisible make their own at their first call."""
        with self._making, self.streams.guard():
            if self._meeting is None:
                return
            started = time.monotonic()
            if part is None:
                self._meeting.stand_aside()
                return
            context = part.context
            handle = self._meeting.split(context, color, context.rank, size=context.size, rank=context.rank)
            part._take(handle, started)

    def _prove(self, started: float) -> None:
        watch = self._watched()
        one = torch.ones(1, device=self.context.device)
        place, numbers = one.data_ptr(), (DTYPES[one.dtype], REDUCE_OPS["sum"])
        self.call("all_reduce", self.library.ncclAllReduce, place, place, 1, *numbers)
        patience = Patience(self.context, "the first all_reduce over NCCL")
        while not watch.device_is_done():
            self.check_usable()
            patience.step()
        expect_sum(self.context, one.item(), started)

    def _watched(self) -> Watch:
        if self._watch is None:
            self._watch = Watch(
                self.context, self.streams.marker, self.streams.enter_relaxed, self._find_failure, self._abort
            )
        return self._watch

    def _must_not_capture(self, why: str) -> None:
        if self.streams.is_capturing():
            raise GroupNotInitializedError(
                f"{self.context} was not used before the capture of this CUDA graph, but {why}, which can't be "
                "captured; make the same calls once before it, or initialize_model_parallel(warm_up=True)"
            )

    def link(self, peer: int) -> Link:
        """The communicators for transfers with a rank; where they aren't made yet, that rank has to call as well."""
        link = self._begin_link(peer)
        if not link.is_made:
            link.wait(self.check_usable)
        return link

    def _begin_link(self, peer: int) -> Link:
        link = self._links.get(peer)
        if link is None or not link.is_made:
            self._must_not_capture(f"ranks {self.context.rank} and {peer} first have to make theirs together")
            self._watched()
            link = self._links.begin(peer, self._put)
        return link

    def settle(self) -> None:
        """Waits for the communicators that are being made."""
        for link in self._links.all():
            link.wait(self.check_usable)

    def _find_failure(self, operation: str, since: float) -> CommunicationError | None:
        """Returns the error of a communicator that failed in the background."""
        for handle in self._handles():
            state = handle.state()
            if state not in (SUCCESS, IN_PROGRESS):
                return handle.error(operation, state, since)
        return None

    def _handles(self) -> list[Handle]:
        own = [handle for handle in (self._handle, self._meeting) if handle is not None]
        return [*own, *self._links.handles()]

    def _abort(self) -> None:
        end_all(self._handles(), in_order=False)

    def close(self) -> None:
        """Ends all communicators: in order once the device is done, else, after a while, by an abort. Twice is fine."""
        if self._closed:
            return
        self._closed = self._links.closed = True
        in_order = self._watch is None or self._watch.settle(GOODBYE_S)
        if self._watch is not None:
            self._watch.close()
        end_all(self._handles(), in_order=in_order)

    # A call.

    def check_usable(self) -> None:
        """Raises what the watch has found."""
        if self._watch is not None and self._watch.failure is not None:
            raise self._watch.failure
        if self._links.failure is not None:
            raise self._links.failure

    def _ready(self) -> Handle:
        self.check_usable()
        if self._handle is None:
            self.set_up()
        self._must_be_awake()
        return self._handle  # type: ignore[return-value]  # set_up has made it, or raised

    def _must_be_awake(self) -> None:
        if self._suspended:
            raise UnsupportedError(f"{self.context} is suspended; call resume() on every rank first")

    def call(self, operation: str, function: Any, *args: Any, stream: int | None = None) -> None:
        """`function(*args, comm, stream)` of NCCL; on the current stream unless another is given."""
        handle = self._ready()
        stream = self.streams.current() if stream is None else stream
        watch = self._watched()
        watch.begin(operation)  # as _watching, which would cost a microsecond
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
    def launch(self, operation: str) -> Iterator[Callable[..., None]]:
        """All calls of what it gives, `add(function, *args)`, are one launch on the current stream."""
        handle, stream = self._ready(), self.streams.current()

        def add(function: Any, *args: Any) -> None:
            result = function(*args, handle.comm, stream)
            if result:
                handle.check(operation, result)

        with self._watching(operation, stream), handle.lock, handle.group(operation):
            yield add

    def transfer(self, operation: str, x: Tensor, peer: int) -> None:
        """`send` or `recv` of contiguous `x`, on the current stream."""
        self.check_usable()
        self._must_be_awake()
        self._put(self.link(peer), operation, x, self.streams.current())

    def start(self, operation: str, x: Tensor, peer: int) -> Work:
        """As `transfer`, on a stream beside the current one; doesn't wait for the peer."""
        self.check_usable()
        self._must_be_awake()
        return self._begin_link(peer).start(operation, x, self._put)

    def _put(self, link: Link, operation: str, x: Tensor, stream: int) -> None:
        with self._watching(operation, stream):
            link.put(operation, x, stream)

    def beside(self, enqueue: Callable[[int], None], *tensors: Tensor) -> Work:
        """Starts what `enqueue(stream)` puts on a stream beside the current one."""
        self._ready()
        if self._side is None:
            self._side = self.streams.side()
        return self._side.run(enqueue, tensors)

    @contextmanager
    def _watching(self, operation: str, stream: int) -> Iterator[None]:
        """A call into NCCL. Where it fails because the watch has aborted it, what the watch has found is raised."""
        watch = self._watched()
        watch.begin(operation)
        try:
            yield
        except BaseException as error:
            self._blame(watch, error)
            raise
        watch.end(None if self.streams.is_capturing() else stream)

    def _blame(self, watch: Watch, error: BaseException) -> None:
        """A call has failed; raises what the watch has found, where that is why."""
        watch.end(None)
        if isinstance(error, CommunicationError) and watch.failure not in (None, error):
            raise watch.failure from error

    # What newer versions of NCCL can.

    def _function(self, name: str) -> Any:
        if name in self.library.missing:
            raise UnsupportedError(f"{self.context}: {self.library.missing[name]}")
        return getattr(self.library, name)

    def suspend(self) -> None:
        """As NcclCommunicator's."""
        function = self._function("ncclCommSuspend")
        self._ready()
        for handle in self._handles():
            with handle.lock:
                handle.check("ncclCommSuspend", function(handle.comm, SUSPEND_MEMORY))
        self._suspended = True

    def resume(self) -> None:
        """As NcclCommunicator's."""
        function = self._function("ncclCommResume")
        if self._suspended:
            self.check_usable()
            for handle in self._handles():
                with handle.lock:
                    handle.check("ncclCommResume", function(handle.comm))
            self._suspended = False

    def register_window(self, x: Tensor) -> Callable[[], None]:
        """As NcclCommunicator's."""
        handle, window = self._ready(), ctypes.c_void_p()
        register = self._function("ncclCommWindowRegister")
        with handle.lock:
            result = register(handle.comm, x.data_ptr(), x.nbytes, ctypes.byref(window), WINDOW_SYMMETRIC)
            handle.check("ncclCommWindowRegister", result)

        def deregister() -> None:
            with handle.lock:
                known, window.value = window.value, None
                if known is not None and handle.comm is not None:
                    function = self._function("ncclCommWindowDeregister")
                    handle.check("ncclCommWindowDeregister", function(handle.comm, known))

        return deregister
