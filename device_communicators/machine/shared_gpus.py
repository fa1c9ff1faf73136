"""Do ranks of a group share a GPU? They may, for tests and on laptops, but mostly it is a mistake that nobody sees."""

from __future__ import annotations

from collections import defaultdict

import torch

from device_communicators.errors import format_ranks
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.waiting import Watched

_BYTES = 64


def find_shared_gpus(context: GroupContext, uuid: str | None) -> dict[str, list[int]]:
    """UUIDs of the GPUs that several ranks of the group use -> their global ranks.

    Every rank of the group calls it with its own GPU's UUID, None for one that has none.
    """
    mine = torch.frombuffer(bytearray((uuid or "").encode()[:_BYTES].ljust(_BYTES)), dtype=torch.uint8)
    out = torch.empty(context.size * _BYTES, dtype=torch.uint8)
    Watched(context.cpu_group._allgather_base(out, mine), context, "comparison of GPUs").wait()
    users: dict[str, list[int]] = defaultdict(list)
    for rank, row in zip(context.ranks, out.view(context.size, _BYTES).tolist(), strict=True):
        users[bytes(row).decode(errors="replace").strip()].append(rank)
    return {gpu: ranks for gpu, ranks in users.items() if gpu and len(ranks) > 1}


def warning(context: GroupContext, shared: dict[str, list[int]]) -> str:
    """What to tell the user."""
    which = "; ".join(f"global ranks {format_ranks(ranks)} share GPU {gpu}" for gpu, ranks in shared.items())
    return (
        f"{which} in group {context.name!r}: they take turns on it, and NCCL refuses them unless it is told otherwise "
        "(from 2.30.3 on by NCCL_MULTI_RANK_GPU_ENABLE=1). Give each rank its own, with "
        "torch.cuda.set_device(local_rank) or CUDA_VISIBLE_DEVICES, or use fewer ranks"
    )
