"""Several ranks on one GPU, for tests, laptops and the demo: what a rank's environment must say before CUDA starts.

NCCL refuses two ranks on one GPU. From 2.30.3 on it takes them with a variable of its own; before, ranks that seem to
be on different hosts pass, and their traffic goes over sockets of the loopback interface: slow, but right. Either way a
kernel that waits for another rank holds the GPU until its time slice ends, so nothing here is for measuring.

What two ranks of a world on one GPU are told is `shared_gpus`'. Not run on a GPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping

from device_communicators import settings
from device_communicators.cuda import nccl_library

VISIBLE = "CUDA_VISIBLE_DEVICES"


def nccl_variables(rank: int, version: int) -> dict[str, str]:
    """What NCCL of a version (as NCCL_VERSION_CODE) must be told by a rank that shares its GPU.

    One block of threads for each kernel: those of all ranks have to fit on the GPU together.
    """
    if version >= nccl_library.MULTI_RANK_GPU:
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1"}
    return {
        "NCCL_HOSTID": f"{socket.gethostname()}-rank-{rank}",  # ranks of other hosts have the same numbers
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_CTAS": "1",
    }


def means(version: int) -> str:
    """How ranks share a GPU with this version, in words."""
    if version >= nccl_library.MULTI_RANK_GPU:
        return "NCCL_MULTI_RANK_GPU_ENABLE=1"
    return "a NCCL_HOSTID for each rank, over sockets of the loopback interface"


def own_gpu(rank: int, gpus: int, environ: Mapping[str, str] | None = None) -> str:
    """What CUDA_VISIBLE_DEVICES has to be for a rank to see its GPU alone: in turns over those that are visible now."""
    visible = [each.strip() for each in (os.environ if environ is None else environ).get(VISIBLE, "").split(",")]
    visible = [each for each in visible if each]
    return visible[rank % gpus] if len(visible) >= gpus else str(rank % gpus)


def variables_of(
    rank: int, ranks: int, gpus: int, version: int, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """For rank `rank` of `ranks` on a host with `gpus`; `version` is NCCL's. Empty where each has a GPU of its own."""
    if ranks <= gpus:
        return {}
    return {VISIBLE: own_gpu(rank, gpus, environ), settings.SHARE_GPUS.name: "on", **nccl_variables(rank, version)}


def share_gpus(
    rank: int, ranks: int, gpus: int, version: int, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Sets `variables_of` in this process, where it is not too late: before CUDA or NCCL start. Returns what it set.

    What somebody has set for NCCL stays.
    """
    env = os.environ if environ is None else environ
    found = variables_of(rank, ranks, gpus, version, env)
    written = {name: value for name, value in found.items() if name == VISIBLE or not env.get(name)}
    env.update(written)
    return written
