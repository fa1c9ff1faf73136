"""The memory of a group's message queues: a stretch of the segment that its ranks share.

control part                      | data part
backed by memory from the start   | address space only, backed queue by queue
"""

from __future__ import annotations

import os
from typing import Any

from device_communicators.channels import region_bytes
from device_communicators.segment import Segment, SegmentError

_PAGE_BYTES = 4096


class QueueMapping:
    """The queues' stretch as this process has mapped it: a `channels.QueueMemory`."""

    def __init__(self, library: Any, segment: Segment, offset: int, size: int, makes: bool) -> None:
        """For a group of `size` ranks, from `offset` on; one of them `makes` the stretch. Raises SegmentError."""
        control_bytes, data_bytes = region_bytes(size)
        control_bytes = -(-control_bytes // _PAGE_BYTES) * _PAGE_BYTES
        if makes:
            segment.resize(offset + control_bytes + data_bytes)
            segment.allocate(control_bytes, offset)
        self._library = library
        self._size_bytes = control_bytes + data_bytes
        self._data_offset = offset + control_bytes
        self._address = library.ps_map(segment.descriptor, self._size_bytes, offset)
        if not self._address:
            raise SegmentError(f"{self._size_bytes >> 20} MiB of address space for message queues can't be had")
        self.control_address = self._address
        self.data_address = self._address + control_bytes
        self._descriptor = os.dup(segment.descriptor)

    def commit(self, offset: int, size_bytes: int) -> None:
        """Backs bytes of the data part with memory. OSError where there is none left, instead of SIGBUS later."""
        os.posix_fallocate(self._descriptor, self._data_offset + offset, size_bytes)

    def close(self) -> None:
        """Nothing is committed any more."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def unmap(self) -> None:
        """Nobody is in a queue any more."""
        address, self._address = self._address, 0
        if address:
            self._library.ps_unmap(address, self._size_bytes)
