from __future__ import annotations

import socket

import pytest

from parallel_state.startup.stores import interface_of, listen_on


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.1"])
def test_loopback_is_listened_on_alone(host: str) -> None:
    with listen_on(interface_of(host), 0, 8) as listener:
        with socket.create_connection((host, listener.getsockname()[1]), timeout=5.0):
            pass
        assert listener.getsockname()[0] in ("::1", "127.0.0.1")


@pytest.mark.parametrize("host", ["a-name", "192.0.2.1"])
def test_a_name_or_an_address_in_front_of_this_host_means_all_interfaces(host: str) -> None:
    assert interface_of(host) is None
