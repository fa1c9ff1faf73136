"""Communicators for transfers between two ranks of a group: one for each direction.

What is on one communicator goes in its order, so two ranks that send to each other first, and a ring in which everyone
does, would wait for each other for ever if both directions, or all pairs, had one.

Two ranks make theirs at the first transfer between them, to which both must come; a thread does that, as a transfer
that is started must not wait for the other rank to start its own. What is started meanwhile is put behind it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from device_communicators.base.helper_threads import HelperThread
from device_communicators.calls.work import Work
from device_communicators.cuda.nccl_library import BYTE, NcclLibrary
from device_communicators.cuda.streams import CudaStreams
from device_communicators.nccl.handle import Handle, end_all, exchange_records, make_record
from device_communicators.routing.communicator import GroupContext

_MEETING = 3
"""The kind of tag of what two ranks tell each other; that of sends within a host, whose groups have no device."""
_LOOK_S = 0.5

Transfer = Callable[["Link", str, Tensor, int], None]
"""Puts `send` or `recv` of a tensor on a stream, once the link is made."""


class Link:
    """Connects two ranks: `send` goes to the peer, `recv` comes from it."""

    def __init__(self, library: NcclLibrary, streams: CudaStreams, place: int) -> None:
        """`place`: this rank's among the two."""
        self.handles: dict[str, Handle] = {}
        self.failure: BaseException | None = None
        self._functions = {"send": library.ncclSend, "recv": library.ncclRecv}
        self._peer = 1 - place
        self._sides = {operation: streams.side() for operation in self._functions}
        self._waiting: list[_Started] = []
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def is_made(self) -> bool:
        """Returns True once transfers go straight into it."""
        return self._done.is_set() and self.failure is None

    def put(self, operation: str, x: Tensor, stream: int) -> None:
        """Transfers contiguous `x` to or from the peer."""
        handle = self.handles[operation]
        with handle.lock:
            result = self._functions[operation](x.data_ptr(), x.nbytes, BYTE, self._peer, handle.comm, stream)
            if result:
                handle.check(operation, result)

    def put_list(self, operation: str, tensors: Sequence[Tensor], stream: int) -> None:
        """Transfers contiguous tensors to or from the peer, which has as many, in one launch."""
        handle = self.handles[operation]
        with handle.lock, handle.group(operation):
            for x in tensors:
                handle.check(
                    operation,
                    self._functions[operation](x.data_ptr(), x.nbytes, BYTE, self._peer, handle.comm, stream),
                )

    def start(self, operation: str, x: Tensor, transfer: Transfer) -> Work:
        """Puts it on the stream beside for this direction, behind what the current stream does now."""
        begun = self._sides[operation].begin((x,))
        started = _Started(self, lambda: begun.finish(functools.partial(transfer, self, operation, x)))
        with self._lock:
            if not self._done.is_set():
                self._waiting.append(started)
                return started
        self._raise_failure()
        return started.go()

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits until it is made. Raises what went wrong, here or by `check`."""
        while not self._done.wait(_LOOK_S):
            check()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def make(self, meet: Callable[[], dict[str, Handle]], device: torch.device, transfer: Transfer) -> None:
        """Makes it, and sends a byte each way: NCCL connects ranks at their first transfer, and the host waits."""
        try:
            self.handles = meet()
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            for operation in self.handles:  # in an order in which both ranks are in the same communicator at a time
                put = functools.partial(transfer, self, operation, byte)
                self._sides[operation].begin((byte,)).finish(put)
            while not self._is_drained():
                pass
        except BaseException as error:
            self.failure = error
        finally:
            self._done.set()

    def _is_drained(self) -> bool:
        """Starts what waits; True where nothing did, and nothing will."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if not waiting:
                self._done.set()
        for started in waiting:
            started.go()
        return not waiting


class _Started:
    """A started transfer, which may have to wait for its link."""

    def __init__(self, link: Link, put: Callable[[], Work]) -> None:
        self._link = link
        self._put = put
        self._work: Work | None = None

    def go(self) -> Work:
        self._work = self._put()
        return self._work

    def wait(self) -> None:
        if self._work is None:
            self._link.wait()
        if self._work is not None:
            self._work.wait()

    def is_completed(self) -> bool:
        return self._link.failure is not None or (self._work is not None and self._work.is_completed())


class Links:
    """Keeps the links of one rank of a group, by peer."""

    def __init__(self, library: NcclLibrary, context: GroupContext, streams: CudaStreams) -> None:
        self._library = library
        self._context = context
        self._streams = streams
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        """Of the first link that could not be made."""
        self.closed = False
        """True once the group has ended; a link that is still being made ends with its making."""

    def get(self, peer: int) -> Link | None:
        return self._links.get(peer)

    def all(self) -> list[Link]:
        return list(self._links.values())

    def handles(self) -> list[Handle]:
        return [handle for link in self.all() for handle in list(link.handles.values())]

    def begin(self, peer: int, transfer: Transfer) -> Link:
        """Starts to make the link to a peer, which calls it as well. `transfer` isn't kept."""
        context = self._context
        context.check_cpu_group("a transfer")
        with self._lock:
            link = self._links.get(peer)
            if link is None:
                place = int(context.rank > peer)
                link = self._links[peer] = Link(self._library, self._streams, place)
                HelperThread("nccl-link", self._make, link, peer, transfer).start()
            return link

    def _make(self, link: Link, peer: int, transfer: Transfer) -> None:
        self._streams.enter_relaxed()  # a capture of another thread's is not disturbed by what NCCL does here
        link.make(lambda: self._meet(peer), self._context.device, transfer)
        self.failure = self.failure or link.failure
        if self.closed:
            end_all(list(link.handles.values()), in_order=False)

    def _meet(self, peer: int) -> dict[str, Handle]:
        context = self._context
        lower = context.rank < peer
        mine = make_record(self._library, context, makes_id=lower)
        theirs = exchange_records(context, mine, peer, context.tag(_MEETING))
        place = int(not lower)
        with self._streams.guard():
            parent = Handle.meet(self._library, context, (mine if lower else theirs).unique_id, 2, place)
            up, down = (parent.split(context, 0, place) for _ in range(2))
            parent.close()
        return {"send": up, "recv": down} if lower else {"recv": up, "send": down}
