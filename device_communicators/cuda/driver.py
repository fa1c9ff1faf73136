"""What a launch of the kernels in `peer/csrc` is told: the structure, the constants, the names, the grid, the reports.

Mirrors `call.cuh`, with which a test compares it. Nothing here touches a GPU or needs a package: how kernels are
compiled and launched is `peer.kernels`, and who launches what when is the communicator's. Not run on a GPU.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import ClassVar, Protocol

MAX_RANKS = 8
MAX_BLOCKS = 128
MAX_THREADS = 512
PART_PACKETS = 256
"""Packets (8 bytes of data each) that a block sends to a rank in one epoch."""
STAGE_BYTES = 32 << 10
"""What a block stages in one epoch."""
REGION_ALIGNMENT = 256
PACKETS_OFFSET = 64 << 10
STAGES_OFFSET = PACKETS_OFFSET + 2 * MAX_BLOCKS * MAX_RANKS * PART_PACKETS * 16
REGION_BYTES = STAGES_OFFSET + 2 * MAX_BLOCKS * STAGE_BYTES
"""Of each rank's region, whatever the size of the tensors: all zero before any rank's first launch."""

START_NEXT_EARLY = 1
"""In `flags`: see CallFlag in call.cuh."""


class Call(ctypes.Structure):
    """The one argument of every kernel, by value. Addresses are the device's; 0 where a kernel doesn't use one."""

    _fields_: ClassVar = [
        ("regions", c_uint64 * MAX_RANKS),
        ("input", c_uint64),
        ("output", c_uint64),
        ("residual", c_uint64),
        ("residual_out", c_uint64),
        ("weight", c_uint64),
        ("scale", c_uint64),
        ("scale_out", c_uint64),
        ("report", c_uint64),
        ("abort", c_uint64),
        ("numel", c_uint64),
        ("deadline_ns", c_uint64),
        ("rank", c_uint32),
        ("size", c_uint32),
        ("operation", c_uint32),
        ("flags", c_uint32),
        ("rows", c_uint32),
        ("hidden", c_uint32),
        ("eps", c_float),
        ("reserved", c_uint32),
    ]


_OF_EACH_DTYPE = (
    "all_reduce_push", "all_reduce_pull", "all_reduce_two_shot", "reduce_scatter_push", "reduce_scatter_pull",
)  # fmt: skip
_NORMS = (
    "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_static_fp8", "all_reduce_add_rms_norm_token_fp8",
)  # fmt: skip
_DTYPES = ("float32", "float16", "bfloat16")
KERNELS: tuple[str, ...] = (
    *(f"{what}_{dtype}" for what in _OF_EACH_DTYPE for dtype in _DTYPES),
    "all_gather_push",
    "all_gather_pull",
    *(f"{what}_{dtype}" for what in _NORMS for dtype in _DTYPES),
)
"""By number: `operation` of a call. The last one to be added comes last."""
OPERATIONS = {name: number for number, name in enumerate(KERNELS)}


class Launcher(Protocol):
    """Something that runs the kernels: a GPU, or what stands in for one in tests."""

    def launch(self, name: str, blocks: int, threads: int, call: Call, stream: int) -> None:
        """Enqueues a kernel on a stream (a cudaStream_t as a number) of the current device, which is the launcher's.

        The call is copied; it may be changed and used again at once. Capturable. Raises KernelError.
        """

    def resident_blocks(self, name: str, threads: int) -> int:
        """How many blocks a launch of this kernel may have: they wait for peers, so the device must hold all at once.

        On a GPU as many as half of its multiprocessors: the other half is left to kernels that wait as well, NCCL's or
        another group's, as two that each have half of their blocks on the device wait for ever. Take the least over all
        ranks of a group, and divide it by the number of ranks on one GPU, which under MPS are on it at once.
        """


class KernelError(RuntimeError):
    """A kernel can't be loaded or launched; the text says why."""


@dataclass(frozen=True)
class KernelReport:
    """What a kernel that gave up left in its report word."""

    reason: str
    """"deadline" or "abort"."""
    peer: int
    """The rank in the group that it was waiting for; 255: another of its own blocks, so this doesn't say."""
    kernel: str
    block: int
    epoch: int


def read_report(word: int) -> KernelReport | None:
    """What the word says; None where nothing was reported."""
    if word == 0:
        return None
    operation = word >> 40 & 0xFF
    return KernelReport(
        reason={1: "deadline", 2: "abort"}.get(word >> 56, f"code {word >> 56}"),
        peer=word >> 48 & 0xFF,
        kernel=KERNELS[operation] if operation < len(KERNELS) else f"kernel {operation}",
        block=word >> 32 & 0xFF,
        epoch=word & 0xFFFFFFFF,
    )


THREADS = {"push": 256, "pull": 512, "two_shot": 512}
"""Of a block, by how a kernel moves the data."""
_BYTES = {"push": 8, "pull": 16, "two_shot": 16}


def grid(how: str, nbytes: int, size: int, limit: int) -> tuple[int, int]:
    """Blocks and threads for a kernel ("push", "pull" or "two_shot") that moves `nbytes` of each rank or row.

    So many that each thread has one thing to move, as long as there are blocks; what is left is taken in turns. From
    what is equal on all ranks only, so the blocks of all ranks match: `limit` is the least `resident_blocks` of any
    rank. No blocks: there is nothing to do, and nothing may be launched.
    """
    shards = size if how == "two_shot" else 1  # a block's threads sum a shard of what it stages
    each = min(_BYTES[how] * THREADS[how] * shards, STAGE_BYTES)
    return min(-(-nbytes // each), limit, MAX_BLOCKS), THREADS[how]


def norm_grid(row_bytes: int, rows: int, limit: int) -> tuple[int, int]:
    """As `grid`, for the kernels with a norm: as many blocks to a row as a push carries at once, for some of the rows.

    No blocks: a row (of the input's dtype) is too long, or there is none.
    """
    members = -(-row_bytes // (8 * PART_PACKETS))
    if members == 0:
        return 0, THREADS["push"]
    return min(rows, min(limit, MAX_BLOCKS) // members) * members, THREADS["push"]
