"""The memory of a group's message queues: a stretch of the segment that its ranks share.

control part                               | data part
mapped and backed by memory from the start | mapped and backed queue by queue
"""

from __future__ import annotations

import errno
import os
from typing import Any

from device_communicators.cpu.channels import region_bytes
from device_communicators.cpu.segment import Segment, SegmentError
from device_communicators.limits import describe_address_space

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
        self._control_bytes = control_bytes
        self._data_offset = offset + control_bytes
        self.control_address: int = library.ps_map(segment.descriptor, control_bytes, offset) or 0
        first_page = library.ps_map(segment.descriptor, _PAGE_BYTES, self._data_offset)
        if not self.control_address or not first_page:
            if self.control_address:
                library.ps_unmap(self.control_address, control_bytes)
            raise SegmentError(f"{control_bytes >> 10} KiB can't be mapped: {describe_address_space()}")
        self._windows: int | None = library.ps_windows_new(first_page, data_bytes, _PAGE_BYTES)
        # A descriptor for each group would soon be one too many; older kernels back nothing without one.
        self._descriptor = -1 if library.ps_has_populate() else os.dup(segment.descriptor)

    def map(self, offset: int, size_bytes: int) -> int:
        """Returns the address of bytes of the data part. OSError where the process has no address space left."""
        address: int | None = self._library.ps_windows_at(self._windows, offset, size_bytes)
        if not address:
            raise OSError(errno.ENOMEM, f"this process has no address space left ({describe_address_space()})")
        return address

    def commit(self, offset: int, size_bytes: int) -> None:
        """Backs bytes of the data part with memory. OSError where there is none left, instead of SIGBUS later."""
        address = self.map(offset, size_bytes)
        if not self._library.ps_back(address, size_bytes, self._descriptor, self._data_offset + offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Nothing is committed any more."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def unmap(self) -> None:
        """Nobody is in a queue any more."""
        address, self.control_address = self.control_address, 0
        windows, self._windows = self._windows, None
        if address:
            self._library.ps_unmap(address, self._control_bytes)
        if windows:
            self._library.ps_windows_delete(windows)
