"""Each rank allocates its own buffers in shared memory (slots), so that they are on its NUMA node."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from device_communicators.cpu import native
from device_communicators.cpu.host_memory import back_slots, mapped_bytes
from device_communicators.cpu.segment import Segment

SIZE = 4

try:
    LIBRARY = native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no compiled library: {error}", allow_module_level=True)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.make()
    made.unlink()
    yield made
    made.close()


def _allocated(segment: Segment) -> int:
    return os.fstat(segment.descriptor).st_blocks * 512


def _slots_of(rank: int) -> tuple[int, int]:
    return LIBRARY.ps_slots_offset(SIZE, rank), LIBRARY.ps_slots_offset(SIZE, rank + 1)


@pytest.mark.parametrize("order", [range(SIZE), reversed(range(SIZE))], ids=["first to last", "last to first"])
def test_each_rank_backs_its_own_slots(segment: Segment, order: Iterator[int]) -> None:
    size_bytes = mapped_bytes(LIBRARY, SIZE)
    address = LIBRARY.ps_map(segment.descriptor, size_bytes, 0)
    done: set[int] = set()
    try:
        for rank in order:
            back_slots(LIBRARY, segment, address, rank, SIZE)
            done.add(rank)
            own = sum(end - start for start, end in map(_slots_of, done))
            shared = size_bytes - (_slots_of(SIZE - 1)[1] - _slots_of(0)[0])
            allocated = own + (shared if 0 in done else 0)
            assert _allocated(segment) == allocated, rank
            start, end = _slots_of(rank)
            for page in range(start, end, os.sysconf("SC_PAGESIZE")):
                os.pwrite(segment.descriptor, b"1", page)
            assert _allocated(segment) == allocated, f"rank {rank} didn't allocate its own slots"
    finally:
        LIBRARY.ps_unmap(address, size_bytes)


def test_slots_begin_on_pages() -> None:
    for size in (2, 3, 4, 7, 8, 9, 16, 64):
        starts = [LIBRARY.ps_slots_offset(size, rank) for rank in range(size + 1)]
        assert not any(start % os.sysconf("SC_PAGESIZE") for start in starts)
        assert starts == sorted(set(starts))
        assert starts[-1] < LIBRARY.ps_segment_bytes(size)
