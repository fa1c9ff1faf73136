"""Row 37 of docs/failures.md: strangers at the ports of a running job. torch's TCPStore and gloo have no
secret: they withstand junk and silence, but no stranger that speaks their protocol."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import parallel_state as ps
from tests.failure.jobs import (
    DEADLINE_S,
    SLACK_S,
    STEPS_AFTER,
    compute,
    connected,
    pids_then_compute,
    running_job,
    send_all,
    until_closed,
)
from tests.failure.launchers import program
from tests.failure.ranks import Ranks
from tests.helpers.control_store import (
    ANSWER_BYTES,
    GREETING_BYTES,
    HANDSHAKE_S,
    IDENTITY_BYTES,
    MAGIC,
    identity,
    opening,
    read_secret,
)
from tests.helpers.control_store import store_of as open_tcp_store

OVER_GLOO = {"PARALLEL_STATE_SHARED_MEMORY": "off"}

JUNK = {
    "noise": secrets.token_bytes(4096),
    "zeros": bytes(1 << 20),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a browser that looks around\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "a ping of TCPStore": bytes([0]) + (0x3C85F7CE).to_bytes(4, "little") + bytes([13]) + bytes(64),
    "a pickle": b"\x80\x05\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R." * 4,
    "a length of 2**62": (1 << 62).to_bytes(8, "little") * 16,
}


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.getbasetemp() / "secret of a job"
    path.touch(0o600)
    path.write_bytes(secrets.token_bytes(32))
    return read_secret(path)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, secret: bytes) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("job")
    file = str(tmp_path_factory.getbasetemp() / "secret of a job")
    options: dict[str, Any] = {"tensor_model_parallel_size": 4, "timeout": 4 * DEADLINE_S, "secret_file": file}
    with running_job(folder, lambda: ps.launch(compute, 4, args=(str(folder), False), **options)) as port:
        yield port


@pytest.fixture
def torch_port(tmp_path: Path, ranks: Ranks) -> Iterator[int]:
    with running_job(tmp_path, lambda: ranks.run(compute, str(tmp_path), True, timeout_s=DEADLINE_S)) as port:
        yield port


def store_of(port: int, secret: bytes) -> Any:
    return open_tcp_store(port, secret, DEADLINE_S)


def test_row_37_junk(port: int) -> None:
    for junk in [*JUNK.values()] * 10:
        with connected(port) as stranger:
            send_all(stranger, junk)
            assert until_closed(stranger, SLACK_S)[GREETING_BYTES:] == b""


def test_row_37_strangers_that_leave(port: int) -> None:
    for sent in (0, 1, ANSWER_BYTES - 1) * 50:
        with connected(port) as stranger:
            send_all(stranger, bytes(sent))


def test_row_37_a_wrong_secret(port: int, secret: bytes) -> None:
    for wrong in (secrets.token_bytes(32), secret[:-1] + bytes([secret[-1] ^ 1]), b""):
        with pytest.raises(dist.DistNetworkError, match="don't share a secret: the server can't prove"):
            store_of(port, wrong).set("a", "b")
    assert store_of(port, secret).num_keys() > 0


def test_row_37_a_stranger_that_shows_the_servers_own_proof(port: int) -> None:
    """The stranger echoes the server's nonce and proof; the proof is for the server's role."""
    with connected(port) as stranger:
        greeting = stranger.recv(GREETING_BYTES, socket.MSG_WAITALL)
        assert greeting.startswith(MAGIC)
        send_all(stranger, greeting)
        assert until_closed(stranger, SLACK_S) == b"", "it takes the number of the server itself"
    with connected(port) as stranger:
        greeting = stranger.recv(GREETING_BYTES, socket.MSG_WAITALL)
        send_all(stranger, opening(greeting, greeting[-16:]))
        proof = stranger.recv(IDENTITY_BYTES, socket.MSG_WAITALL)[-32:]
        send_all(stranger, identity(greeting, proof))
        assert until_closed(stranger, SLACK_S) == b""


class Tap:
    def __init__(self, port: int, stack: ExitStack) -> None:
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self._listener.getsockname()[1]
        self.server = stack.enter_context(connected(port))
        self.sent: list[bytes] = []
        self.closed = threading.Event()
        thread = threading.Thread(target=self._forward, daemon=True)
        thread.start()
        stack.callback(thread.join, SLACK_S)
        stack.callback(self._end)

    def _end(self) -> None:
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)

    def _forward(self) -> None:
        client, _ = self._listener.accept()
        with client:
            back = threading.Thread(target=self._return, args=(client,), daemon=True)
            back.start()
            self._copy(client, self.server, self.sent)
            back.join(SLACK_S)

    def _return(self, client: socket.socket) -> None:
        self._copy(self.server, client)
        self.closed.set()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, kept: list[bytes] | None = None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if kept is not None:
                    kept.append(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def test_row_37_a_replay(port: int, secret: bytes) -> None:
    with ExitStack() as stack:
        tap = Tap(port, stack)
        client = store_of(tap.port, secret)
        stack.callback(client.close)
        assert client.add("replayed", 1) == 1
        recorded = b"".join(tap.sent)
        for end in (ANSWER_BYTES, len(recorded)):
            with connected(port) as stranger:
                send_all(stranger, recorded[:end])
                assert len(until_closed(stranger, SLACK_S)) <= GREETING_BYTES + IDENTITY_BYTES
        tap.server.sendall(recorded[ANSWER_BYTES:])
        assert tap.closed.wait(SLACK_S)
    other = store_of(port, secret)
    assert other.get("replayed") == b"1"
    other.close()


def test_row_37_bytes_into_an_open_connection(port: int, secret: bytes) -> None:
    for injected in (bytes(64), b"\xff" * 64, (40).to_bytes(4, "little") + bytes(72)):
        with ExitStack() as stack:
            tap = Tap(port, stack)
            client = store_of(tap.port, secret)
            stack.callback(client.close)
            client.set("injected", "no")
            tap.server.sendall(injected)
            assert tap.closed.wait(SLACK_S)


def _drip(port: int) -> float:
    with connected(port) as stranger:
        began = time.monotonic()
        greeting = stranger.recv(GREETING_BYTES, socket.MSG_WAITALL)
        with suppress(ConnectionError):
            for number in range(int(20 * (HANDSHAKE_S + SLACK_S) / HANDSHAKE_S)):
                stranger.sendall(opening(greeting)[number : number + 1])
                time.sleep(HANDSHAKE_S / 20)
        return time.monotonic() - began


def test_row_37_a_silent_hold(port: int, secret: bytes) -> None:
    with ExitStack() as stack:
        dripping = stack.enter_context(ThreadPoolExecutor(1)).submit(_drip, port)
        began = time.monotonic()
        strangers = []
        for sent in (0, 1, GREETING_BYTES, ANSWER_BYTES - 1) * 8:
            strangers.append(stack.enter_context(connected(port)))
            greeting = strangers[-1].recv(GREETING_BYTES, socket.MSG_WAITALL)
            send_all(strangers[-1], (opening(greeting) + identity(greeting, secrets.token_bytes(32)))[:sent])
        for number in range(5):
            other = store_of(port, secret)
            other.set(f"meanwhile {number}", "here")
            other.close()
        assert time.monotonic() - began < HANDSHAKE_S, "they came in before the first one was turned away"
        for stranger in strangers:
            assert len(until_closed(stranger, HANDSHAKE_S + SLACK_S)) in (0, IDENTITY_BYTES)
        assert time.monotonic() - began > HANDSHAKE_S / 2, "their deadline, and not their number, turned them away"
        assert HANDSHAKE_S / 2 < dripping.result(DEADLINE_S) < HANDSHAKE_S + SLACK_S


def test_row_37_many_at_once(port: int, secret: bytes) -> None:
    kept, more = 1024, 300
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * (kept + more)
    if hard < needed:
        pytest.skip(f"needs {needed} open files; the limit is {hard}")
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        strangers = []
        began = time.monotonic()
        for number in range(kept + more):
            strangers.append(stack.enter_context(connected(port)))
            if number % 200 == 199:
                other = store_of(port, secret)
                other.set(f"among many {number}", "here")
                other.close()
        for stranger in strangers[:more]:
            left = HANDSHAKE_S - (time.monotonic() - began) - 0.5
            assert left > 0, "this machine opens connections too slowly: their deadline could close them"
            assert len(until_closed(stranger, left)) <= GREETING_BYTES


def _launch_and_log(folder: str, secret_file: str) -> None:
    logging.basicConfig(level="DEBUG", force=True)
    ps.launch(
        compute, 4, args=(folder, False), tensor_model_parallel_size=4, timeout=DEADLINE_S, log_level="DEBUG",
        secret_file=secret_file,
    )  # fmt: skip


def test_row_37_what_launch_says_of_strangers(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(secrets.token_hex(32).encode())
    with program(_launch_and_log, str(tmp_path), str(path)) as launcher:

        def run() -> list[int]:
            assert launcher.wait(DEADLINE_S) == 0, launcher.said
            return [STEPS_AFTER + 1] * 4

        with running_job(tmp_path, run) as port:
            for _ in range(25):
                with connected(port) as stranger:
                    send_all(stranger, bytes(ANSWER_BYTES))
                    until_closed(stranger, SLACK_S)
        said = launcher.printed + launcher.said
    assert said.count("refused a connection") == said.count("(from 127.0.0.1:") == 2, said
    assert "the store of launch, which requires the job's secret" in said, "each rank says where it meets"
    assert path.read_text() not in said


def test_row_37_junk_and_silence_at_torchs_store(torch_port: int) -> None:
    """TCPStore closes other protocols' connections, but never silent ones. Many of these delay new clients by 10 s."""
    with ExitStack() as stack:
        for junk in [junk for kind, junk in JUNK.items() if kind != "a ping of TCPStore"] * 5:
            with connected(torch_port) as stranger:
                send_all(stranger, junk)
        for _ in range(20):
            stack.enter_context(connected(torch_port))
        store = dist.TCPStore("127.0.0.1", torch_port, timeout=timedelta(seconds=DEADLINE_S))
        store.set("meanwhile", "here")


def _listening(pid: int) -> list[int]:
    sockets = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_row_37_strangers_at_the_ports_of_gloo(tmp_path: Path) -> None:
    """Each rank listens for one group; gloo drops unexpected connections."""
    options: dict[str, Any] = {"tensor_model_parallel_size": 4, "timeout": DEADLINE_S}
    job = (tmp_path, lambda: ps.launch(pids_then_compute, 4, args=(str(tmp_path),), env=OVER_GLOO, **options))
    came = dict.fromkeys(("silence", "a word", "zeros", "noise"), 0)
    with running_job(*job), ExitStack() as stack:
        pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(4)]
        for kind, sent in zip(came, (b"", b"abc", bytes(1000), JUNK["noise"]), strict=True):
            for port in [port for pid in pids for port in _listening(pid)] * 3:
                with suppress(ConnectionRefusedError):
                    stranger = stack.enter_context(connected(port))
                    send_all(stranger, sent)
                    came[kind] += 1
    assert all(came.values()), came
