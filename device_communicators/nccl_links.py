"""The communicators for transfers between two ranks of a group: one for each direction.

What is on one communicator goes in its order, so two ranks that send to each other first, and a ring in which everyone
does, would wait for each other for ever if both directions, or all pairs, had one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from device_communicators.base import GroupContext
from device_communicators.cuda_streams import CudaStreams
from device_communicators.errors import GroupNotInitializedError
from device_communicators.nccl_handle import Handle
from device_communicators.nccl_library import BYTE, NcclLibrary
from device_communicators.nccl_meeting import swap, tell

_MEETING = 3
"""The kind of tag of what two ranks tell each other; that of sends within a host, whose groups have no device."""


class Link:
    """Two ranks: `send` goes to the peer, `recv` comes from it."""

    def __init__(self, library: NcclLibrary, handles: dict[str, Handle], peer: int, streams: CudaStreams) -> None:
        self.handles = handles
        self.order = tuple(handles)
        """Of the operations, such that both ranks are in the same communicator at a time."""
        self._functions = {"send": library.ncclSend, "recv": library.ncclRecv}
        self._peer = peer
        self._streams = streams
        self._sides: dict[str, Any] = {}

    def transfer(self, operation: str, x: Tensor, stream: int) -> None:
        """Contiguous `x` to or from the peer."""
        handle = self.handles[operation]
        with handle.lock:
            result = self._functions[operation](x.data_ptr(), x.nbytes, BYTE, self._peer, handle.comm, stream)
            if result:
                handle.check(operation, result)

    def side_of(self, operation: str) -> Any:
        """The stream beside the current one for this direction."""
        if operation not in self._sides:
            self._sides[operation] = self._streams.side()
        return self._sides[operation]


class Links:
    """Those of one rank of a group, by peer."""

    def __init__(self, library: NcclLibrary, context: GroupContext, streams: CudaStreams) -> None:
        self._library = library
        self._context = context
        self._streams = streams
        self._links: dict[int, Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def get(self, peer: int) -> Link | None:
        return self._links.get(peer)

    def handles(self) -> list[Handle]:
        return [handle for link in list(self._links.values()) for handle in link.handles.values()]

    def make(self, peer: int) -> Link:
        """Both ranks call it, once, each with the other."""
        context = self._context
        if context.size > 2 and not context.cpu_group_is_made:
            raise GroupNotInitializedError(
                f"a transfer on {context} needs the gloo group beside the device group, which all ranks of the group "
                "make together at its first use; call barrier() on every rank once before"
            )
        lower = context.rank < peer
        mine = tell(self._library, context, makes_id=lower)
        theirs = swap(context, mine, peer, context.tag(_MEETING))
        place = int(not lower)
        with self._streams.guard():
            meeting = Handle.meet(self._library, context, (mine if lower else theirs).unique_id, 2, place)
            up, down = (meeting.split(context, 0, place, size=2, rank=place) for _ in range(2))
            meeting.close()
        ways = {"send": up, "recv": down} if lower else {"recv": up, "send": down}
        self._links[peer] = Link(self._library, ways, 1 - place, self._streams)
        return self._links[peer]
