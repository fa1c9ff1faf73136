"""How the ranks of a group come to a communicator of NCCL: what they tell each other first, and how it is proven.

They tell over the group's gloo group: where NCCL meets, and which version each has.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from device_communicators.cuda.nccl_library import SUCCESS, NcclLibrary, UniqueId, version_text
from device_communicators.errors import CommunicationError, ConfigMismatchError
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.waiting import Watched, WatchedByThread

_ID_BYTES = ctypes.sizeof(UniqueId)
_RECORD_BYTES = 8 + _ID_BYTES


class Told(NamedTuple):
    """What one rank tells the others."""

    version: int
    unique_id: UniqueId

    def pack(self) -> torch.Tensor:
        return torch.frombuffer(
            bytearray(self.version.to_bytes(8, "little") + bytes(self.unique_id)), dtype=torch.uint8
        )

    @classmethod
    def unpack(cls, record: torch.Tensor) -> Told:
        data = bytes(record.tolist())
        return cls(int.from_bytes(data[:8], "little"), UniqueId.from_buffer_copy(data[8:]))


def tell(library: NcclLibrary, context: GroupContext, *, makes_id: bool) -> Told:
    """What this rank has to tell; `makes_id` for the one that opens the place where NCCL meets."""
    unique_id = UniqueId()
    if makes_id:
        result = library.ncclGetUniqueId(ctypes.byref(unique_id))
        if result != SUCCESS:
            raise CommunicationError(
                f"NCCL can't open a place for the ranks of {context} to meet: {library.text_of(result)}. Is the "
                "interface right (NCCL_SOCKET_IFNAME)?",
                group=context.name,
                operation="ncclGetUniqueId",
                rank=context.rank,
            )
    return Told(library.version, unique_id)


def gather(context: GroupContext, mine: Told) -> list[Told]:
    """Every rank of the group calls it; what each tells, by rank. Raises ConfigMismatchError for other versions."""
    out = torch.empty(context.size * _RECORD_BYTES, dtype=torch.uint8)
    Watched(context.cpu_group._allgather_base(out, mine.pack()), context, "nccl set-up").wait()
    told = [Told.unpack(record) for record in out.view(context.size, _RECORD_BYTES)]
    _compare(context, context.ranks, told)
    return told


def swap(context: GroupContext, mine: Told, peer: int, tag: int) -> Told:
    """Two ranks of the group call it, each with the other; what the other tells."""
    theirs = torch.empty(_RECORD_BYTES, dtype=torch.uint8)
    sending = WatchedByThread(context.cpu_group.send([mine.pack()], peer, tag), context, "nccl set-up")
    WatchedByThread(context.cpu_group.recv([theirs], peer, tag), context, "nccl set-up").wait()
    sending.wait()
    told = Told.unpack(theirs)
    _compare(context, (context.ranks[context.rank], context.ranks[peer]), (mine, told))
    return told


def _compare(context: GroupContext, ranks: Sequence[int], told: Sequence[Told]) -> None:
    for rank, each in zip(ranks, told, strict=True):
        if each.version != told[0].version:
            raise ConfigMismatchError(
                f"all ranks of {context} must have one version of NCCL, but global rank {ranks[0]} has "
                f"{version_text(told[0].version)} and global rank {rank} {version_text(each.version)}; give all "
                "of them the same torch, or one library by PARALLEL_STATE_NCCL_LIBRARY"
            )


def expect_sum(context: GroupContext, total: float, started: float) -> None:
    """The first all-reduce, of a one from each rank, has given `total`."""
    if total != context.size:
        raise CommunicationError(
            f"the first all-reduce of {context} over NCCL gave {total:g}, not {context.size}. The group can't be used; "
            "NCCL_DEBUG=INFO tells which way the bytes went: NCCL_P2P_DISABLE=1 shows whether peer access is at fault",
            group=context.name,
            operation="all_reduce",
            rank=context.rank,
            elapsed_s=time.monotonic() - started,
        )
