from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest

from device_communicators.control.plane import MOST_VALUE_BYTES, Endpoint, World
from device_communicators.cpu import native
from parallel_state.startup import reachability
from parallel_state.startup.interfaces import Address
from tests.helpers.services import greets, hangs_up, refuses, service

OWN = Address("1", "127.0.0.1")


@pytest.fixture
def world() -> Iterator[World]:
    made = World(native.load(), "127.0.0.1", limit_s=20.0, beat_s=1.0)
    yield made
    made.leave()


def _found(endpoint: Endpoint, limit_s: float = 5.0) -> dict[int, str]:
    places = {0: OWN, 1: Address("2", "127.0.0.2", endpoint=str(endpoint))}
    return reachability._unreached(places, 0, [0, 1], limit_s)


def test_the_right_process_answers(world: World) -> None:
    assert _found(world.endpoint) == {}


def test_another_process_answers(world: World) -> None:
    assert "another process answers" in _found(world.endpoint._replace(token="of another"))[1]


@pytest.mark.parametrize("answer", [hangs_up, greets, refuses])
def test_another_service_answers(answer: Callable[[socket.socket], None]) -> None:
    with service(answer) as (host, port):
        told = _found(Endpoint(3, host, port, "", 0), 0.5)[1]
    assert told == f"another process answers at that address (port {port})"


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"no answer at port {port} within 0.2 s" in _found(Endpoint(3, "127.0.0.1", port, "", 0), 0.2)[1]
    assert "refused" in _found(Endpoint(3, "127.0.0.1", port, "", 0))[1]


def test_the_kernel_s_reason_is_told() -> None:
    assert "Network is unreachable" in _found(Endpoint(3, "255.255.255.255", 9, "", 0))[1]


def test_what_does_not_fit_is_left_out() -> None:
    found = {rank: "x" * 150 + str(rank) for rank in range(512)}
    value = reachability._encode(7, found)
    assert len(value) <= MOST_VALUE_BYTES and json.loads(value)[0] == 7
    assert len(json.loads(reachability._encode(7, dict.fromkeys(range(512), "no answer")))[1]["no answer"]) == 512


def test_the_host_that_fails_most_often_is_named() -> None:
    assert reachability._worst([(0, 2, "a"), (4, 2, "b"), (2, 0, "c")]) == (0, 2, "a")
    assert reachability._worst([(0, 2, "a"), (0, 4, "b")]) == (0, 2, "a")
