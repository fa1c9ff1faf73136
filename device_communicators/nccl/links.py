"""Links for transfers between two ranks: a link has one NCCL communicator for each direction.

With one communicator for both directions, two ranks that both send first would deadlock. A thread creates the link,
because a started transfer must not wait.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from device_communicators.base.helper_threads import HelperThread
from device_communicators.calls.work import Work
from device_communicators.cuda.nccl_library import BYTE, NcclLibrary
from device_communicators.cuda.streams import CudaStreams
from device_communicators.nccl.handle import Handle, end_all, exchange_records, make_record
from device_communicators.routing.communicator import GroupContext

_SET_UP_TAG = 3
"""Tag of gloo transfers that set up a link."""
_CHECK_S = 0.5

Transfer = Callable[["Link", str, Sequence[Tensor], int], None]


class Link:
    def __init__(self, library: NcclLibrary, streams: CudaStreams, rank: int) -> None:
        self.handles: dict[str, Handle] = {}
        self.failure: BaseException | None = None
        self._functions = {"send": library.ncclSend, "recv": library.ncclRecv}
        self._peer = 1 - rank
        self._sides = {operation: streams.side() for operation in self._functions}
        self._waiting: list[_Started] = []
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def is_made(self) -> bool:
        return self._done.is_set() and self.failure is None

    def put(self, operation: str, tensors: Sequence[Tensor], stream: int) -> None:
        """Enqueues on `stream`, for each tensor, an NCCL call: `operation` is "send" or "recv". The peer must pass the
        same number of contiguous tensors.
        """
        handle, function = self.handles[operation], self._functions[operation]
        with handle.lock, nullcontext() if len(tensors) == 1 else handle.group(operation):
            for x in tensors:
                handle.check(operation, function(x.data_ptr(), x.nbytes, BYTE, self._peer, handle.comm, stream))

    def start(self, operation: str, x: Tensor, transfer: Transfer) -> Work:
        begun = self._sides[operation].begin((x,))
        started = _Started(self, lambda: begun.finish(functools.partial(transfer, self, operation, (x,))))
        with self._lock:
            if not self._done.is_set():
                self._waiting.append(started)
                return started
        self._raise_failure()
        return started.go()

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits until the link is ready. Calls `check` every 0.5 s. Raises the link's failure, or the error that
        `check` raises.
        """
        while not self._done.wait(_CHECK_S):
            check()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def make(self, meet: Callable[[], dict[str, Handle]], device: torch.device, transfer: Transfer) -> None:
        """Creates the link's communicators by `meet`, which returns them as "send" and "recv". Sends a byte in each
        direction with `transfer`, because NCCL's first transfer blocks the host. Then starts queued transfers.
        """
        try:
            self.handles = meet()
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            for operation in self.handles:  # both ranks use the same communicator first
                put = functools.partial(transfer, self, operation, (byte,))
                self._sides[operation].begin((byte,)).finish(put)
            while not self._done.is_set():
                with self._lock:
                    waiting, self._waiting = self._waiting, []
                    if not waiting:
                        self._done.set()
                for started in waiting:
                    started.go()
        except BaseException as error:
            self.failure = error
        finally:
            self._done.set()


class _Started:
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
    def __init__(self, library: NcclLibrary, context: GroupContext, streams: CudaStreams) -> None:
        self._library = library
        self._context = context
        self._streams = streams
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        self.closed = False
        """True once the group is closed. A link that is completed later is aborted immediately."""

    def get(self, peer: int) -> Link | None:
        return self._links.get(peer)

    def all(self) -> list[Link]:
        return list(self._links.values())

    def handles(self) -> list[Handle]:
        return [handle for link in self.all() for handle in list(link.handles.values())]

    def begin(self, peer: int, transfer: Transfer) -> Link:
        """Starts a thread that creates the link with the group's rank `peer`, which must call this, too. `transfer`:
        the function that sends the link's first bytes.
        """
        context = self._context
        context.check_cpu_group("a transfer")
        with self._lock:
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = Link(self._library, self._streams, int(context.rank > peer))
                HelperThread("nccl-link", self._make, link, peer, transfer).start()
            return link

    def _make(self, link: Link, peer: int, transfer: Transfer) -> None:
        self._streams.enter_relaxed()  # must not disturb a capture of another thread
        link.make(lambda: self._meet(peer), self._context.device, transfer)
        self.failure = self.failure or link.failure
        if self.closed:
            end_all(list(link.handles.values()), in_order=False)

    def _meet(self, peer: int) -> dict[str, Handle]:
        context = self._context
        lower = context.rank < peer
        mine = make_record(self._library, context, makes_id=lower)
        theirs = exchange_records(context, mine, peer, context.tag(_SET_UP_TAG))
        rank = int(not lower)
        with self._streams.guard():
            parent = Handle.meet(self._library, context, (mine if lower else theirs).unique_id, 2, rank)
            up, down = (parent.split(context, 0, rank) for _ in range(2))
            parent.close()
        return {"send": up, "recv": down} if lower else {"recv": up, "send": down}
