from __future__ import annotations

from device_communicators.nccl import windows
from device_communicators.nccl.windows import WINDOW_BYTES, free_closed

__all__ = ["WINDOW_BYTES", "count_closed", "free_closed"]


def count_closed() -> int:
    return len(windows._CLOSED)
