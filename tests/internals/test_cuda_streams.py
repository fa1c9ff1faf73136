from __future__ import annotations

from typing import Any

import pytest
import torch

from device_communicators.cuda import streams as cuda_streams

DEVICE = torch.device("cuda", 0)


class _Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.log: list[Any] = []

    def wait_event(self, event: _Event) -> None:
        self.log.append(event.recorded)


class _Event:
    made = 0

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def record(self, stream: _Stream) -> None:
        self.recorded.append(stream.cuda_stream)

    def query(self) -> bool:
        return False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[_Stream]:
    """Lists the streams made. As in torch, an external stream of handle 0 isn't the default stream."""
    found: list[_Stream] = []

    def give(handle: int) -> _Stream:
        found.append(_Stream(handle))
        return found[-1]

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: give(handle or 0xBAD))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: give(0))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    return found


def test_a_marker_is_on_the_stream_that_it_is_told(made: list[_Stream]) -> None:
    marker: Any = cuda_streams.Marker(DEVICE)
    assert marker.is_reached(), "nothing was put on a stream yet"
    for handle in (0, 0, 7, 7, 0):
        marker.record(handle)
    assert marker._event.recorded == [0, 0, 7, 7, 0]
    assert [stream.cuda_stream for stream in made] == [0, 7, 0], "made anew for another stream only"
    assert not marker.is_reached()


@pytest.mark.parametrize(("stream", "earlier"), [(0, 7), (7, 0), (7, 8)])
def test_one_stream_waits_for_another(
    made: list[_Stream], monkeypatch: pytest.MonkeyPatch, stream: int, earlier: int
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    cuda_streams.CudaStreams(DEVICE).wait_for(stream, earlier)
    assert [each.cuda_stream for each in made] == [earlier, stream]
    assert made[1].log == [[earlier]]


def test_a_capture_is_looked_for_on_the_groups_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports the current device's stream, which may be another device's."""
    inside: list[int] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self._index = index

        def __enter__(self) -> None:
            inside.append(self._index)

        def __exit__(self, *error: object) -> None:
            inside.pop()

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: inside == [3])
    assert cuda_streams.CudaStreams(torch.device("cuda", 3)).is_capturing()
