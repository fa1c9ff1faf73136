from __future__ import annotations

import ast
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallel_state as ps
from device_communicators.base import host
from device_communicators.control.store import ControlStore
from device_communicators.cpu import native
from tests.sources import nodes_of

ROOT = Path(__file__).parents[2]
NO_NAMES = ("job-0..default.svc", "m" * 64, "." * 3, "é" * 64)
"""An empty label, or labels above 63 letters. `socket` raises UnicodeError, a ValueError, for them."""
LOOK_UPS = {"getaddrinfo", "create_connection", "gethostbyname", "gethostbyname_ex", "getfqdn", "getnameinfo"}


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_does_not_resolve(name: str) -> None:
    with pytest.raises(UnicodeError):
        socket.getaddrinfo(name, 1)
    for look_up in (host.resolve, lambda each: host.connect_to((each, 1), 1.0)):
        with pytest.raises(socket.gaierror, match="can't be a host name") as caught:
            look_up(name)
        assert caught.value.errno == socket.EAI_NONAME and name in str(caught.value)
    assert host.address_towards((name, 1)) == ""


def test_an_address_resolves_to_itself() -> None:
    assert host.resolve("127.0.0.1", 5) == socket.getaddrinfo("127.0.0.1", 5, type=socket.SOCK_STREAM)


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_master_without_a_name_is_told_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": name,
        "MASTER_PORT": "29571", "TORCHELASTIC_USE_AGENT_STORE": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    started = time.monotonic()
    with pytest.raises(ps.RendezvousError, match="does not resolve") as caught:
        ps.init_distributed_environment()
    assert name in str(caught.value) and time.monotonic() - started < 2.0


def test_the_store_of_launch_at_no_name_is_not_reached() -> None:
    store = ControlStore(native.load(), (NO_NAMES[0], 1), "token", 0.1)
    with pytest.raises(Exception, match="can't be a host name") as caught:
        store.check(["key"])
    assert type(caught.value).__name__ == "DistNetworkError"


def test_a_host_whose_own_name_is_none_takes_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "m" * 64)
    monkeypatch.delenv(host.INTERFACES_VARIABLE, raising=False)
    host._address_of.cache_clear()
    try:
        assert host.gloo_address() == "127.0.0.1"
    finally:
        host._address_of.cache_clear()


def _calls() -> Iterator[str]:
    for package in ("device_communicators", "parallel_state"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in nodes_of(file):
                name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
                if name in LOOK_UPS:
                    yield f"{file.relative_to(ROOT)}: {name}"


def test_all_look_ups_go_through_one_file() -> None:
    assert {each.partition(":")[0] for each in _calls()} == {"device_communicators/base/host.py"}, list(_calls())
