from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from device_communicators.cpu import native
from device_communicators.cpu.host_memory import mapped_bytes


def touched_slots(name: str, size: int) -> list[list[float]]:
    """The mapped share of each rank's slots, for each segment with `name` in its path. A read also maps up to
    15 neighbor pages."""
    library = native.load()
    page, size_bytes = os.sysconf("SC_PAGESIZE"), mapped_bytes(library, size)
    starts = [
        int(low, 16)
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if name in line
        for low, high in [line.split()[0].split("-")]
        if int(high, 16) - int(low, 16) == size_bytes
    ]
    slots = [tuple(library.ps_slots_offset(size, each) for each in (rank, rank + 1)) for rank in range(size)]
    with open("/proc/self/pagemap", "rb") as pages:
        return [
            [_mapped(pages, (base + start) // page, (end - start) // page) for start, end in slots] for base in starts
        ]


def _mapped(pages: BinaryIO, first: int, count: int) -> float:
    pages.seek(first * 8)
    return sum(word >> 63 for word in struct.unpack(f"<{count}Q", pages.read(count * 8))) / count
