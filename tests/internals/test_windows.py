"""A file that is mapped on demand (csrc/windows.h): addresses never change, and are found again."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from device_communicators.cpu import native

MIB = 1 << 20
CAPACITY = 4096 * MIB
FIRST = 1 * MIB


class Mapped:
    def __init__(self, capacity: int = CAPACITY) -> None:
        self.library: Any = native.load()
        descriptor = os.memfd_create("windows")
        os.ftruncate(descriptor, capacity)
        page = self.library.ps_map(descriptor, mmap.PAGESIZE, 0)
        os.close(descriptor)
        self.windows = self.library.ps_windows_new(page, capacity, FIRST)

    def at(self, offset: int, size_bytes: int) -> int | None:
        address: int | None = self.library.ps_windows_at(self.windows, offset, size_bytes)
        return address

    def close(self) -> None:
        self.library.ps_windows_delete(self.windows)


@contextmanager
def mapped() -> Iterator[Mapped]:
    made = Mapped()
    try:
        yield made
    finally:
        made.close()


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE


@contextmanager
def address_space_left(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
def test_places_are_found_again_and_never_move(order: str) -> None:
    native.load()  # maps torch
    before = address_space()
    places = [(place * 61 * MIB + place * 4096, 5 * MIB) for place in range(64)]
    if order != "ascending":
        places.reverse()
    if order == "mixed":
        random.Random(1).shuffle(places)
    with mapped() as file:
        found = {}
        for offset, size_bytes in places:
            address = found[offset] = file.at(offset, size_bytes)
            assert address is not None
            ctypes.c_int64.from_address(address + size_bytes - 8).value = offset + 1
        for offset, size_bytes in places:
            # A larger window may also map this place; the first address stays valid.
            for address in (found[offset], file.at(offset, size_bytes)):
                assert address is not None
                assert ctypes.c_int64.from_address(address + size_bytes - 8).value == offset + 1
        assert address_space() - before <= 3 * CAPACITY, "each window is twice the one before"
    assert address_space() - before < 64 * MIB


def test_as_much_is_mapped_as_was_asked_for() -> None:
    with mapped() as file:
        before = address_space()
        file.at(0, 100)
        assert address_space() - before <= FIRST
        file.at(3000 * MIB, MIB)
        assert address_space() - before <= 3 * FIRST


def test_places_outside_are_refused() -> None:
    with mapped() as file:
        for offset, size_bytes in ((CAPACITY, 1), (0, CAPACITY + 1), ((1 << 64) - 4096, 8192), (CAPACITY - 8, 16)):
            assert file.at(offset, size_bytes) is None
        assert file.at(CAPACITY - 8, 8) is not None


def test_without_address_space_less_is_mapped_or_nothing() -> None:
    with mapped() as file:
        first = file.at(0, 64 * MIB)
        with address_space_left(72 * MIB):
            second = file.at(64 * MIB, 60 * MIB)
            assert second is not None
            assert file.at(200 * MIB, 60 * MIB) is None
            assert [file.at(0, 64 * MIB), file.at(64 * MIB, 60 * MIB)] == [first, second]
        assert file.at(200 * MIB, 60 * MIB) is not None
