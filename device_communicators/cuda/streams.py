"""Wraps streams and events of one CUDA device."""

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


class StreamWork:
    """Work on a CUDA stream. `wait` makes the current stream wait for the work; the host never waits."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())


class SideStream:
    def __init__(self, device: torch.device, priority: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)

    def begin(self, tensors: Sequence[Tensor]) -> SideStream:
        """Makes this side stream wait for the current stream, and keeps the tensors' memory until this stream has used
        it. Returns this object.

        Also works during a CUDA graph capture. The program must then call `wait` on the result of `finish`, which joins
        this stream to the captured stream.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for x in tensors:
            x.record_stream(self._stream)
        return self

    def finish(self, enqueue: Callable[[int], None]) -> Work:
        """Calls `enqueue` with this stream's handle. Returns a Work for all work so far on this stream. Thread-safe."""
        enqueue(self._stream.cuda_stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return StreamWork(event, self._device)

    def run(self, enqueue: Callable[[int], None], tensors: Sequence[Tensor]) -> Work:
        return self.begin(tensors).finish(enqueue)


def stream_of(handle: int, device: torch.device) -> Any:
    """Returns torch's stream for a cudaStream_t. Handle 0 is the default stream, unlike in `ExternalStream(0)`."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


class Marker:
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
        return self._stream is None or bool(self._event.query())


class CudaStreams:
    def __init__(self, device: torch.device, high_priority: bool = False) -> None:
        self._device = device
        self._priority = -1 if high_priority else 0
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._raw = current_raw_stream()

    def current(self) -> int:
        return self._raw(self._index)

    def wait_for(self, stream: int, earlier: int) -> None:
        event = torch.cuda.Event()
        event.record(stream_of(earlier, self._device))
        stream_of(stream, self._device).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        with self.guard():  # torch checks the current device's stream
            return torch.cuda.is_current_stream_capturing()

    def side(self) -> SideStream:
        return SideStream(self._device, self._priority)

    def marker(self) -> Marker:
        return Marker(self._device)

    def guard(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self._index)

    def is_current_device(self) -> bool:
        return current_cuda_device() == self._index

    def enter_relaxed(self) -> bool:
        """Lets this thread call CUDA while another thread captures a CUDA graph in torch's default mode, `global`. Also
        sets the thread's device.

        Returns False if CUDA's runtime lacks the necessary function.
        """
        enter(self._device)
        function = getattr(ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None) or _from_runtime()
        if function is None:
            return False
        function.restype, function.argtypes = ctypes.c_int, (ctypes.POINTER(ctypes.c_int),)
        return function(ctypes.byref(ctypes.c_int(_RELAXED))) == 0


class StreamOrder:
    """Orders calls that use one buffer on different streams: each call waits for the previous call. In a CUDA graph
    capture, the program must order the calls.
    """

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self.last: int | None = None

    def next(self) -> int:
        stream = self._streams.current()
        if stream != self.last and not self._streams.is_capturing():
            if self.last is not None:
                self._streams.wait_for(stream, self.last)
            self.last = stream
        return stream


def enter(device: torch.device) -> None:
    """Makes `device` the thread's current CUDA device. Otherwise a new thread's first CUDA call would create a context
    of hundreds of MB on the first GPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _from_runtime() -> Any:
    with (
        contextlib.suppress(OSError, AttributeError),
        open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file,
    ):
        for line in file:
            if "libcudart.so" in line:
                return ctypes.CDLL(line.split(maxsplit=5)[5].strip()).cudaThreadExchangeStreamCaptureMode
    return None
