"""Helper functions of `Watcher.gather`."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from device_communicators.base.torch_internals import all_gather_base
from device_communicators.control.plane import MOST_VALUE_BYTES

_LENGTH = struct.Struct("<I")
_SLICE = timedelta(milliseconds=50)


def in_parts(record: bytes, gather: Callable[[int, bytes], list[bytes]]) -> list[bytes]:
    """Returns all ranks' records. `gather(number, part)` exchanges part `number` of each rank's record."""
    framed = _LENGTH.pack(len(record)) + record
    found = gather(0, framed[:MOST_VALUE_BYTES])
    ends = [_LENGTH.size + _LENGTH.unpack_from(each)[0] for each in found]
    for number in range(1, -(-max(ends) // MOST_VALUE_BYTES)):
        start = number * MOST_VALUE_BYTES
        more = gather(number, framed[start : start + MOST_VALUE_BYTES])
        found = [before + each for before, each in zip(found, more, strict=True)]
    return [each[_LENGTH.size : end] for each, end in zip(found, ends, strict=True)]


def over_gloo(cpu_group: Any, part: bytes, deadline: float, ended: Callable[[], bool]) -> list[bytes]:
    """Exchanges a part of each rank's record over gloo, and returns all parts. Every rank of the group calls this.

    Raises RuntimeError at the deadline, if gloo fails, or within 50 ms after `ended()` becomes true.
    """
    size = cpu_group.size()
    found = bytearray(MOST_VALUE_BYTES * size)
    out, x = (
        torch.frombuffer(each, dtype=torch.uint8) for each in (found, bytearray(part.ljust(MOST_VALUE_BYTES, b"\0")))
    )
    work = all_gather_base(cpu_group, out, x)
    while True:
        try:
            work.wait(_SLICE)
            break
        except RuntimeError:
            if work.is_completed():  # it failed, or completed just after the slice
                work.wait(_SLICE)
                break
            if time.monotonic() >= deadline or ended():
                raise
    return [bytes(found[start : start + MOST_VALUE_BYTES]) for start in range(0, len(found), MOST_VALUE_BYTES)]
