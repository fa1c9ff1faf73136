"""NCCL's variables are set in mappings: os.environ stays unchanged."""

from __future__ import annotations

import logging
import socket

import pytest

from parallel_state.startup import interfaces
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.interfaces import set_nccl_environment

ONE_NODE = ProcessEnvironment(0, 0, 8, 8, "127.0.0.1", 20000, "torchrun")
TWO_NODES = ProcessEnvironment(0, 0, 16, 8, "node1", 20000, "torchrun")
ALL = {
    "NCCL_SOCKET_IFNAME": "=ib0",
    "GLOO_SOCKET_IFNAME": "ib0",
    "NCCL_IB_DISABLE": "0",
    "NCCL_NET_GDR_LEVEL": "PXB",
}


def test_several_nodes_talk_over_infiniband(caplog: pytest.LogCaptureFixture) -> None:
    env: dict[str, str] = {}
    with caplog.at_level(logging.INFO, "parallel_state"):
        assert set_nccl_environment(TWO_NODES, env, lambda: "ib0") == ALL
    assert env == ALL
    for name, value in ALL.items():
        assert f"{name}={value}: " in caplog.text


def test_what_somebody_has_set_stays(caplog: pytest.LogCaptureFixture) -> None:
    env = {"NCCL_SOCKET_IFNAME": "^docker", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": ""}
    with caplog.at_level(logging.INFO, "parallel_state"):
        written = set_nccl_environment(TWO_NODES, env, lambda: "ib0")
    assert written == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_NET_GDR_LEVEL": "PXB"}
    assert env == {"NCCL_SOCKET_IFNAME": "^docker", "NCCL_IB_DISABLE": "1", **written}
    assert "NCCL_IB_DISABLE is set: 1 is kept" in caplog.text


@pytest.mark.parametrize("place", [ONE_NODE, ProcessEnvironment(0, 0, 16, None, "node1", 20000, "explicit")])
def test_on_one_node_and_where_that_is_unknown_nothing_is_set(place: ProcessEnvironment) -> None:
    assert set_nccl_environment(place, {}, lambda: "ib0") == {}


def test_where_the_number_of_nodes_is_unknown_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "parallel_state"):
        assert (
            set_nccl_environment(ProcessEnvironment(0, 0, 16, None, "node1", 20000, "explicit"), {}, lambda: "ib0")
            == {}
        )
    assert "no network interface is chosen" in caplog.text
    assert "set LOCAL_WORLD_SIZE" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "parallel_state"):
        set_nccl_environment(ONE_NODE, {}, lambda: "ib0")
        set_nccl_environment(ProcessEnvironment(0, 0, 1, None, None, None, "single"), {}, lambda: "ib0")
    assert not caplog.text


def test_a_world_over_gloo_alone_is_bound_too() -> None:
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert set_nccl_environment(TWO_NODES, env, lambda: "ib0", uses_nccl=False) == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_switched_off_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_STATE_NCCL_ENVIRONMENT", "off")
    assert set_nccl_environment(TWO_NODES, {}, lambda: "ib0") == {}


def test_without_infiniband_nothing_is_set() -> None:
    assert set_nccl_environment(TWO_NODES, {}, lambda: None) == {}


@pytest.mark.parametrize(("value", "warns"), [("0", True), (" 0", True), ("1", False), ("", False), (None, False)])
def test_switched_off_error_handling_stays_with_a_warning(
    value: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    env = {} if value is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": value}
    before = dict(env)
    set_nccl_environment(ONE_NODE, env, lambda: None)
    assert env == before
    assert ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0 is set" in caplog.text) == warns


def test_the_first_infiniband_interface_that_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(5, "ib2"), (4, "ib1"), (3, "ib0"), (2, "eth0"), (6, "lo")])
    monkeypatch.setattr(interfaces, "_is_up", lambda name: name != "ib0")
    monkeypatch.setattr(interfaces, "ipv4_of", lambda name: None if name == "ib1" else "10.0.0.1")
    assert interfaces.first_infiniband() == "ib2"
    monkeypatch.setattr(interfaces, "_is_up", lambda name: False)
    assert interfaces.first_infiniband() is None


def test_a_system_that_tells_nothing_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[tuple[int, str]]:
        raise OSError("no such thing")

    monkeypatch.setattr(socket, "if_nameindex", fails)
    assert interfaces.first_infiniband() is None


def test_what_the_system_tells_is_understood() -> None:
    assert interfaces.ipv4_of("lo") == "127.0.0.1"
    assert interfaces.ipv4_of("nowhere") is None
    assert not interfaces._is_up("nowhere")
