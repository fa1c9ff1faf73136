from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from device_communicators import GroupContext
from device_communicators.base.errors import CollectiveTimeoutError
from device_communicators.base.member import Timeout
from device_communicators.nccl.deadlines import Watch

CONTEXT = GroupContext("tp:0", (0, 1), 0, torch.device("cpu"), Timeout(1.0))


class Device:
    def __init__(self) -> None:
        self.records = 0
        self.done = 0
        self.lost = False

    def marker(self) -> Marker:
        return Marker(self)


class Marker:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0

    def record(self, stream: int) -> None:
        self.device.records += 1
        self.at = self.device.records

    def is_reached(self) -> bool:
        if self.device.lost:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore of it")
        return self.at <= self.device.done


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def watch(device: Device) -> Watch:
    return Watch(CONTEXT, device.marker, lambda: True)


def _call(watch: Watch) -> None:
    watch.begin("all_reduce")
    watch.end(7)


def _until(condition: Callable[[], bool], limit_s: float = 20.0) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + limit_s
        time.sleep(0.01)
    return time.monotonic() - started


@pytest.mark.slow
def test_more_work_on_a_device_that_is_stuck_does_not_move_its_deadline(watch: Watch, device: Device) -> None:
    def goes_on() -> bool:
        _call(watch)
        return watch.failure is not None

    assert _until(goes_on) >= 1.0
    assert isinstance(watch.failure, CollectiveTimeoutError)
    assert not watch.device_is_done()
    watch.close()


@pytest.mark.slow
def test_a_device_that_gets_on_has_no_deadline_however_far_behind_it_is(watch: Watch, device: Device) -> None:
    started = time.monotonic()
    while time.monotonic() < started + 2.5:
        _call(watch)
        device.done = max(0, device.records - 20)
        time.sleep(0.01)
    assert watch.failure is None
    assert not watch.device_is_done()
    device.done = device.records
    assert watch.device_is_done()
    watch.close()


def test_the_end_waits_for_the_device_and_not_for_ever(watch: Watch, device: Device) -> None:
    _call(watch)
    threading.Timer(0.3, setattr, (device, "done", 1)).start()
    assert watch.drain(10.0)
    _call(watch)
    started = time.monotonic()
    assert not watch.drain(0.2)
    assert time.monotonic() - started < 5.0
    watch.close()


@pytest.mark.slow
def test_the_last_of_several_calls_has_a_deadline_too(watch: Watch, device: Device) -> None:
    for _ in range(5):
        _call(watch)
    device.done = 4
    _until(lambda: watch.failure is not None)
    watch.close()


def test_a_device_that_is_lost_is_a_failure(watch: Watch, device: Device) -> None:
    _call(watch)
    device.lost = True
    _until(lambda: watch.failure is not None)
    assert "unspecified launch failure. This group is unusable now" in str(watch.failure)
    assert not watch.device_is_done(), "its communicators are aborted then, not ended in order"
    watch.close()
