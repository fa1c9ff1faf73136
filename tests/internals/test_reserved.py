"""Ports for the store of the next world: nobody else is given them, others reach them, and nothing is left of them."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from parallel_state.startup import reserved
from parallel_state.startup.reserved import ReservedPort, address_of, listener_at

SERVER = ("127.0.0.1", 29_500)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("rank", [0, 3])
def test_nobody_else_is_given_the_port(rank: int) -> None:
    port = ReservedPort.beside(SERVER, rank)
    host, number = address_of(port.where) or pytest.fail("no address")
    assert host == "127.0.0.1" and number != SERVER[1]
    for taker in ("127.0.0.1", ""):  # a server has SO_REUSEADDR
        with pytest.raises(OSError, match="in use") as refused:
            socket.create_server((taker, number))
        assert refused.value.errno == errno.EADDRINUSE
    port.close()
    socket.create_server((host, number)).close()


def test_a_server_of_this_process_gets_what_was_handed_on() -> None:
    port = ReservedPort.beside(SERVER, 1)
    address = address_of(port.where) or pytest.fail("no address")
    assert listener_at(address, 8) is None
    with port.handed_on():
        port.close()  # the old world lets go of what is no longer its own
        listener = listener_at(address, 8)
        assert listener is not None
        with listener, socket.create_connection(address, timeout=5.0):
            assert listener.accept()[1][0] == "127.0.0.1"
        assert listener_at(address, 8) is None


def test_what_nobody_took_is_given_back() -> None:
    before = _open_files()
    with ReservedPort.beside(SERVER, 1).handed_on():
        assert _open_files() == before + 1
    assert _open_files() == before
    with ReservedPort().handed_on():
        pass


def test_rank_0_stays_at_the_name_that_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    name = socket.gethostname()
    monkeypatch.setattr(reserved, "is_own_name", lambda host: True)
    by_name = ReservedPort.beside((name, 29_500), 0)
    assert by_name.where.startswith(f"{name}:") and not by_name.where.endswith(":29500")
    by_name.close()


def test_a_name_that_leads_to_loopback_here_is_what_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `127.0.1.1 n1` in rank 0's own /etc/hosts: others reach its neighbours by that name, too."""
    monkeypatch.setattr(reserved, "address_towards", lambda server: "127.0.0.1")
    port = ReservedPort.beside(("n1", 29_500), 1)
    assert port.where.startswith("n1:")
    port.close()


def test_an_address_in_front_of_this_host_passes_on_one_port_only() -> None:
    """A service's address, say: rank 0 stays at the port that is known to lead here."""
    assert ReservedPort.beside(("192.0.2.1", 29_500), 0).where == "192.0.2.1:29500"


def test_without_an_address_there_is_no_port(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved, "address_towards", lambda server: "")
    monkeypatch.setattr(reserved, "_bind", lambda host: pytest.fail("bound where nobody could come"))
    assert ReservedPort.beside(SERVER, 2).where == ""


def test_without_descriptors_a_warning_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(host: str | None) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(reserved, "_bind", no_descriptor)
    assert ReservedPort.beside(SERVER, 2).where == ""
    assert "rank 2" in caplog.text and "Too many open files" in caplog.text


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_loopback_by_other_names(host: str) -> None:
    port = ReservedPort.beside((host, 29_500), 0)
    address = address_of(port.where) or pytest.fail("no address")
    assert address[0] == host
    with port.handed_on():
        listener = listener_at(address, 8)
        assert listener is not None
        with listener, socket.create_connection(address, timeout=5.0):
            pass
