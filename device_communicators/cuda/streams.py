"""Streams and events of one CUDA device, as far as `nccl` needs them: its one seam to CUDA.

Tests without a GPU put a stand-in with the same methods in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from device_communicators.base.torch_internals import current_cuda_device, current_raw_stream
from device_communicators.calls.work import Work

_RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


class StreamWork:
    """The work of a side stream: `wait` makes the current stream wait for it, and never the host."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())


class SideStream:
    """A stream beside the current one, for what is started now and waited for later."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)

    def begin(self, tensors: Sequence[Tensor]) -> SideStream:
        """Orders what comes behind the current stream's work so far. `tensors` may be freed before it has run.

        Works within a capture, too: what the side stream does is captured, and joined by the work's `wait`.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for x in tensors:
            x.record_stream(self._stream)
        return self

    def finish(self, enqueue: Callable[[int], None]) -> Work:
        """Calls `enqueue(stream)`, and returns its work; from any thread."""
        enqueue(self._stream.cuda_stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return StreamWork(event, self._device)

    def run(self, enqueue: Callable[[int], None], tensors: Sequence[Tensor]) -> Work:
        return self.begin(tensors).finish(enqueue)


def stream_of(handle: int, device: torch.device) -> Any:
    """Returns torch's object for CUDA's handle. `ExternalStream(0)` is not the default stream: it is any of a pool."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


class Marker:
    """Marks how far the device has come: an event, recorded again behind each call on a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._stream: Any = None
        self._handle = -1

    def record(self, stream: int) -> None:
        if self._handle != stream:
            self._handle, self._stream = stream, stream_of(stream, self._device)
        self._event.record(self._stream)

    def is_reached(self) -> bool:
        """Returns True if the device has done all that was before the last record."""
        return self._stream is None or bool(self._event.query())


class CudaStreams:
    """The streams of one device."""

    def __init__(self, device: torch.device, high_priority: bool = False) -> None:
        self._device = device
        self._priority = -1 if high_priority else 0
        self._index = torch.cuda.current_device() if device.index is None else device.index
        # What current_stream() is made of, without the Stream object: half a microsecond instead of three.
        self._raw = current_raw_stream()

    def current(self) -> int:
        """Returns the current stream, as CUDA's handle."""
        return self._raw(self._index)

    def wait_for(self, stream: int, earlier: int) -> None:
        """Orders `stream` behind what is on `earlier` so far; both as CUDA's handles."""
        event = torch.cuda.Event()
        event.record(stream_of(earlier, self._device))
        stream_of(stream, self._device).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    def release_cached_memory(self) -> None:
        """Gives memory that torch keeps for later tensors back to the device."""
        torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        """Returns True if the current stream's work goes into a CUDA graph, and isn't done now."""
        with self.guard():  # it asks about the current device's
            return torch.cuda.is_current_stream_capturing()

    def side(self) -> SideStream:
        return SideStream(self._device, self._priority)

    def marker(self) -> Marker:
        return Marker(self._device)

    def guard(self) -> contextlib.AbstractContextManager[object]:
        """Makes the device the current one within a block."""
        return torch.cuda.device(self._index)

    def is_current_device(self) -> bool:
        return current_cuda_device() == self._index

    def enter_relaxed(self) -> bool:
        """Makes the device the calling thread's, and lets the thread query events, allocate and so on while another one
        captures a graph; False where that can't be had.

        In a capture of the mode `global`, which is torch's default, such a call by any other thread makes the capture
        fail, unless that thread has said that it is none of its business.
        """
        enter(self._device)
        function = getattr(ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None) or _from_runtime()
        if function is None:
            return False
        function.restype, function.argtypes = ctypes.c_int, (ctypes.POINTER(ctypes.c_int),)
        return function(ctypes.byref(ctypes.c_int(_RELAXED))) == 0


class StreamOrder:
    """Has calls go one after the other on the device, whatever streams they are made on: those that share a buffer.

    Within a capture they are ordered by whoever captures, by one stream or by events: nothing is added to a graph.
    """

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self.last: int | None = None
        """The stream of the last call outside of captures."""

    def next(self) -> int:
        """Returns the current stream, which from now on waits for the last call's."""
        stream = self._streams.current()
        if stream != self.last and not self._streams.is_capturing():
            if self.last is not None:
                self._streams.wait_for(stream, self.last)
            self.last = stream
        return stream


def enter(device: torch.device) -> None:
    """Makes a CUDA device the current one of a thread that has just begun: without one it would be the first GPU,
    where anything of CUDA's makes a context, which takes hundreds of MB there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _from_runtime() -> Any:
    """Returns the function in the CUDA runtime that torch has loaded, where it isn't visible to the whole process."""
    with (
        contextlib.suppress(OSError, AttributeError),
        open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file,
    ):
        for line in file:
            if "libcudart.so" in line:
                return ctypes.CDLL(line.split(maxsplit=5)[5].strip()).cudaThreadExchangeStreamCaptureMode
    return None
