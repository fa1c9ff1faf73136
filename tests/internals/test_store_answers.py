from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from device_communicators.control.client import ForeignServiceError
from device_communicators.control.plane import World
from device_communicators.control.store import ControlStore
from device_communicators.cpu import native
from parallel_state.startup.stores import ask_for_store
from tests.helpers.services import greets, hangs_up, is_silent, reads_lines, refuses, service


@pytest.mark.parametrize("libuv", [True, False])
def test_a_store_of_torch_answers_and_works_on(libuv: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    for _ in range(3):
        ask_for_store(("127.0.0.1", store.port), time.monotonic() + 20.0)
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False).get("key") == b"value"


@pytest.mark.slow
def test_a_store_of_torch_may_answer_late() -> None:
    """A proxy delays all bytes beyond the time in which another service would answer."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def passes_on(connection: socket.socket) -> None:
        time.sleep(1.2)
        with socket.create_connection(("127.0.0.1", store.port)) as behind:
            behind.sendall(connection.recv(64))
            connection.sendall(behind.recv(64))

    with service(passes_on) as address:
        ask_for_store(address, time.monotonic() + 20.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "told"),
    [(greets, "SSH listens there.*SSH-2.0-OpenSSH_9.2"), (refuses, "HTTP listens there"), (reads_lines, "400 Bad")],
)
def test_another_service_is_named_at_once(answer: Callable[[socket.socket], None], told: str) -> None:
    started = time.monotonic()
    with service(answer) as address, pytest.raises(ForeignServiceError, match=told):
        ask_for_store(address, started + 60.0)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize(("answer", "kind"), [(hangs_up, ConnectionResetError), (is_silent, TimeoutError)])
@pytest.mark.parametrize("limit_s", [0.3, -1.0])
def test_what_answers_nothing_may_yet_be_a_store(
    answer: Callable[[socket.socket], None], kind: type[OSError], limit_s: float
) -> None:
    with service(answer) as address, pytest.raises(kind):
        ask_for_store(address, time.monotonic() + limit_s)


def test_the_store_of_a_launch_is_named() -> None:
    world = World(native.load(), "127.0.0.1", limit_s=20.0, beat_s=1.0)
    try:
        with pytest.raises(ForeignServiceError, match="another launch"):
            ask_for_store(("127.0.0.1", world.endpoint.port), time.monotonic() + 20.0)
    finally:
        world.leave()


def test_a_rank_of_launch_names_another_service_too() -> None:
    started = time.monotonic()
    with service(greets) as address, pytest.raises(Exception, match="SSH listens there") as caught:
        ControlStore(native.load(), address, "token", 30.0).reach(started + 30.0)
    assert isinstance(caught.value, dist.DistNetworkError) and time.monotonic() - started < 2.0
