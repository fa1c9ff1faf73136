from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import InvalidArgumentError
from device_communicators.c10d.extension import for_torch
from device_communicators.control.client import MOST_BYTES, ForeignServiceError
from device_communicators.control.plane import Member, World
from device_communicators.control.store import ControlStore
from device_communicators.cpu import native
from tests.helpers.services import greets, is_silent, service

DEADLINE_S = 60.0
TOKEN = secrets.token_hex(32)


def world_at(port: int | None = None, token: str = TOKEN) -> World:
    return World(native.load(), "127.0.0.1", limit_s=20.0, beat_s=1.0, port=port, token=token)


def store_of(world: World, token: str = TOKEN, timeout_s: float = DEADLINE_S) -> ControlStore:
    return ControlStore(native.load(), ("127.0.0.1", world.endpoint.port), token, timeout_s)


@pytest.fixture
def world() -> Iterator[World]:
    made = world_at()
    yield made
    made.leave()


@pytest.fixture(params=["world", "world, for torch", "TCPStore"])
def make_store(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    if request.param.startswith("world"):
        world, wrap = request.getfixturevalue("world"), for_torch if "torch" in request.param else lambda store: store
        yield lambda: wrap(store_of(world))
    else:
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", master.port, is_master=False)


@pytest.mark.parametrize("prefixed", [False, True])
def test_the_same_answers(make_store: Callable[[], Any], prefixed: bool) -> None:
    inner = make_store()
    store = dist.PrefixStore("a", dist.PrefixStore("b", inner)) if prefixed else inner
    store.set("text", "é")
    store.set("bytes", b"\x00\xff")
    assert (store.get("text"), store.get("bytes")) == ("é".encode(), b"\x00\xff")
    assert [store.add("n", 5), store.add("n", -7), store.add("n", 0)] == [5, -2, -2]
    assert store.get("n") == b"-2"
    store.set("m", "40")
    assert store.add("m", 2) == 42
    assert store.check(["text", "n"]) is True
    assert store.check(["text", "nothing"]) is False
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "", "second") == b"first"
    assert store.compare_set("c", "first", "second") == b"second"
    assert store.compare_set("none", "some", "other") == b"some"
    assert not store.check(["none"])
    store.append("list", "a")
    store.append("list", "b")
    assert store.get("list") == b"ab"
    store.multi_set(["x", "y"], ["1", "2"])
    assert store.multi_get(["y", "x"]) == [b"2", b"1"]
    before = inner.num_keys()
    assert store.delete_key("x") is True
    assert store.delete_key("x") is False
    assert inner.num_keys() == before - 1
    store.wait(["y", "c"])
    store.set_timeout(timedelta(seconds=0.2))
    for wait in (
        lambda: store.wait(["y", "nothing"], timedelta(seconds=0.1)),
        lambda: store.wait(["nothing"]),
        lambda: store.get("nothing"),
        lambda: store.multi_get(["y", "nothing"]),
    ):
        with pytest.raises(dist.DistStoreError, match="wait timeout after"):
            wait()
    assert store.get("y") == b"2"
    large = secrets.token_bytes(5 << 20)
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    store.set("large", large)
    assert store.get("large") == large


def test_who_waits_is_woken_by_whatever_makes_the_key(make_store: Callable[[], Any]) -> None:
    ways: dict[str, Callable[[Any, str], object]] = {
        "set": lambda store, key: store.set(key, "1"),
        "add": lambda store, key: store.add(key, 1),
        "append": lambda store, key: store.append(key, "1"),
        "compare_set": lambda store, key: store.compare_set(key, "", "1"),
        "multi_set": lambda store, key: store.multi_set([key], ["1"]),
    }
    with ThreadPoolExecutor(4) as pool:
        for name, make in ways.items():
            keys = [f"{name}/{number}" for number in range(3)]
            waiting = [pool.submit(make_store().get, keys[0]), pool.submit(make_store().wait, keys)]
            waiting.append(pool.submit(make_store().multi_get, keys[::-1]))
            maker = make_store()
            for key in keys:
                time.sleep(0.01)
                make(maker, key)
            results = [each.result(DEADLINE_S) for each in waiting]
            assert results == [b"1", None, [b"1"] * 3]


def test_threads_of_one_store_do_not_wait_for_each_other(world: World) -> None:
    store = store_of(world)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(store.get, "late") for _ in range(4)]
        for number in pool.map(lambda _: [store.add("n", 1) for _ in range(200)][-1], range(4)):
            assert number >= 200
        assert store.add("n", 0) == 800
        assert not any(each.done() for each in waiting)
        store.set("late", "now")
        assert [each.result(DEADLINE_S) for each in waiting] == [b"now"] * 4


def test_who_gave_up_waiting_takes_nothing_from_others(world: World) -> None:
    store = store_of(world)
    for _ in range(20):
        with pytest.raises(dist.DistStoreError):
            store.wait(["key"], timedelta(milliseconds=5))
    store.set("key", "value")
    store.delete_key("key")
    with pytest.raises(dist.DistStoreError):
        store.wait(["key"], timedelta(milliseconds=5))
    assert store.num_keys() == 0


def sockets() -> set[str]:
    return {found for each in os.listdir("/proc/self/fd") if (found := _target_of(each)).startswith("socket:")}


def _target_of(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def test_a_wait_that_times_out_keeps_its_connection(world: World) -> None:
    store = store_of(world)
    store.set("other", "1")
    before = sockets()
    for _ in range(10):
        for wait in (
            lambda: store.wait(["key"], timedelta(milliseconds=5)),
            lambda: store.wait(["other", "key"], timedelta(0)),
        ):
            with pytest.raises(dist.DistStoreError, match="wait timeout"):
                wait()
    assert sockets() == before
    store.set("key", "value")
    assert store.multi_get(["key", "other"]) == [b"value", b"1"] and sockets() == before


def test_the_end_of_a_vanished_host_s_connections_is_noticed(world: World) -> None:
    """Both ends probe idle connections; this test reads their socket options."""
    before = sockets()
    store_of(world).set("key", "value")
    limits = []
    for number in os.listdir("/proc/self/fd"):
        if _target_of(number) in sockets() - before:
            with socket.socket(fileno=os.dup(int(number))) as one:
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                idle_s, interval_s, probes = (one.getsockopt(socket.IPPROTO_TCP, each) for each in options)
                limits.append(idle_s + interval_s * probes)
    assert sorted(limits) == [20, 70], "the world's heartbeat limit, and the client's"


def test_a_name_server_that_is_silent_ends_no_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ControlStore(native.load(), ("no.name.of.a.host", world.endpoint.port), TOKEN, 0.1)
    released = threading.Event()
    monkeypatch.setattr("device_communicators.control.store.resolve", lambda *address: released.wait(DEADLINE_S))
    began = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="did not answer"):
        store.wait(["key"], timedelta(seconds=0.1))
    assert time.monotonic() - began < 3.0
    released.set()


def test_torch_s_store_says_where_it_is(world: World) -> None:
    prefix = dist.PrefixStore("a", for_torch(store_of(world)))
    gc.collect()
    address = "127.0.0.1", world.endpoint.port
    inner: Any = prefix.underlying_store
    assert (inner.address, inner.served_by, str(inner)) == (address, None, f"the store at 127.0.0.1:{address[1]}")
    assert BoundedStore(prefix).served_by is None and "which the launcher serves" in str(BoundedStore(prefix))


class _HandledError(Exception):
    pass


@contextlib.contextmanager
def _ended_by_a_handler() -> Iterator[None]:
    def handle(number: int, frame: object) -> None:
        raise _HandledError

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        began = time.monotonic()
        with pytest.raises(_HandledError):
            yield
        assert time.monotonic() - began < 1.0
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_torch_s_store_ends_waits_for_a_signal(world: World) -> None:
    with _ended_by_a_handler():
        for_torch(store_of(world)).get("never")


RANK = """
import ctypes, sys, time
import torch, torch.distributed as dist
from device_communicators.c10d.extension import for_torch
from device_communicators.control.store import ControlStore
from device_communicators.cpu import native

rank, port, token = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = for_torch(ControlStore(native.load(), ("127.0.0.1", port), token, 30.0))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
sleep = ctypes.PyDLL(None).usleep  # holds the interpreter lock
tensor = torch.ones(4)
began = time.monotonic()
if rank == 0:
    work = dist.all_reduce(tensor, async_op=True)
    sleep(5_000_000)
    work.wait()
else:
    dist.all_reduce(tensor)
print(f"{time.monotonic() - began:.3f}", tensor.tolist() == [2.0] * 4)
dist.destroy_process_group()
"""


def test_torch_s_threads_need_no_interpreter_lock(world: World) -> None:
    """gloo's threads read addresses in the store at the first message, while rank 0 holds its interpreter lock."""
    command = [sys.executable, "-c", RANK]
    variables = {**os.environ, "TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world.endpoint.port), TOKEN],
            env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [each.communicate(timeout=DEADLINE_S) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0], outputs
    seconds, right = zip(*(output.split() for output, _ in outputs), strict=True)
    assert right == ("True", "True")
    assert float(seconds[0]) > 4.9 and float(seconds[1]) < 3.0, seconds


def test_wrong_requests_and_too_large_values(world: World) -> None:
    store = store_of(world)
    store.set("word", "seven")
    with pytest.raises(dist.DistStoreError, match="add needs integers"):
        store.add("word", 1)
    with pytest.raises(InvalidArgumentError, match="one call to the store must have at most"):
        store.set("large", bytes(MOST_BYTES))
    half = bytes(MOST_BYTES // 2)
    store.set("half", half)
    with pytest.raises(dist.DistStoreError, match="must have less than"):
        store.append("half", half)
    with pytest.raises(dist.DistStoreError, match="request fewer keys in one call"):
        store.multi_get(["half", "half"])
    assert store.get("half") == half
    assert store.get("word") == b"seven"


def test_a_world_that_leaves(world: World) -> None:
    store = store_of(world)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "never")
        store.set("a", "b")
        time.sleep(0.05)
        began = time.monotonic()
        world.leave()
        with pytest.raises(dist.DistNetworkError, match="has ended"):
            waiting.result(DEADLINE_S)
    assert time.monotonic() - began < 1.0
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match=f"127.0.0.1:{world.endpoint.port}.* refused"):
            store.get("a")


def test_a_world_that_starts_again_at_its_port(world: World) -> None:
    store = store_of(world)
    store.set("a", "old")
    world.leave()
    again = world_at(world.endpoint.port)
    try:
        assert store.num_keys() == 0
        store.set("a", "new")
        assert store.get("a") == b"new"
    finally:
        again.leave()


def test_reach_waits_for_a_world_that_starts(world: World) -> None:
    store = store_of(world)
    world.leave()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.reach, time.monotonic() + DEADLINE_S)
        time.sleep(0.1)
        assert not waiting.done()
        again = world_at(world.endpoint.port)
        try:
            waiting.result(DEADLINE_S)
        finally:
            again.leave()
    with pytest.raises(dist.DistNetworkError, match="refused"):
        store.reach(time.monotonic() + 0.2)


def test_another_token(world: World) -> None:
    for wrong in (secrets.token_hex(32), TOKEN[:-1] + "x", ""):
        with pytest.raises(dist.DistNetworkError, match="don't share a secret") as caught:
            store_of(world, wrong).set("a", "b")
        assert isinstance(caught.value.__cause__, PermissionError)
    assert store_of(world).num_keys() == 0


def test_another_service_at_the_port() -> None:
    with service(greets) as address:
        store = ControlStore(native.load(), address, TOKEN, DEADLINE_S)
        with pytest.raises(dist.DistNetworkError, match="SSH listens there") as caught:
            store.get("a")
        assert isinstance(caught.value.__cause__, ForeignServiceError)


def test_a_server_that_is_silent() -> None:
    with service(is_silent) as address:
        store = ControlStore(native.load(), address, TOKEN, 0.1)
        began = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match=r"did not answer within 0\.1 s"):
            store.set("a", "b")
        assert time.monotonic() - began < 1.0


def test_another_process_at_the_port_learns_nothing_and_is_not_believed(world: World) -> None:
    with socket.create_connection(("127.0.0.1", world.endpoint.port)) as stranger:
        greeting = stranger.recv(20 + 24 + 16, socket.MSG_WAITALL)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received: list[bytes] = []

        def pretend() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(greeting)
                received.append(client.recv(20 + 2 * 24 + 16 + 32, socket.MSG_WAITALL))
                client.sendall((32).to_bytes(4, "little") + greeting[24:26] + b"\2\0" + greeting[28:44] + bytes(32))
                received.append(client.recv(1000))

        thread = threading.Thread(target=pretend)
        thread.start()
        store = ControlStore(native.load(), listener.getsockname(), TOKEN, DEADLINE_S)
        with pytest.raises(dist.DistNetworkError, match="can't prove that it has the secret"):
            store.set("a", "private")
        thread.join(DEADLINE_S)
    assert len(received[0]) == 116 and TOKEN.encode() not in received[0]
    assert received[1] == b""


def test_a_held_key_ends_with_its_store(world: World) -> None:
    one, other = store_of(world), store_of(world)
    one.hold("rank/1", "here")
    one.hold("rank/2", "here too")
    assert other.multi_get(["rank/1", "rank/2"]) == [b"here", b"here too"]
    assert one.delete_key("rank/2")
    assert not other.check(["gone/rank/1"])
    one.close()
    assert other.get("gone/rank/1") == b"here"
    assert not other.check(["rank/1"]) and not other.check(["gone/rank/2"])


def test_a_held_key_ends_with_its_process(world: World) -> None:
    """A forked child keeps no key, even if it outlives the process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        held = store_of(world)
        held.hold("rank/1", "here")
        grandchild = os.fork()
        if grandchild == 0:
            os.close(writer)
            time.sleep(3.0)
            os._exit(0)
        os.write(writer, b"1")
        signal.pause()
    try:
        assert os.read(reader, 1) == b"1"
        store = store_of(world)
        assert store.get("rank/1") == b"here"
        began = time.monotonic()
        os.kill(child, signal.SIGKILL)
        assert store.get("gone/rank/1") == b"here"
        assert time.monotonic() - began < 1.0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_forked_child_has_connections_of_its_own(world: World) -> None:
    store = store_of(world)
    store.set("parent", "1")
    child = os.fork()
    if child == 0:
        ok = store.add("child", 1) == 1 and store.get("parent") == b"1"
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.add("child", 1) == 2


def test_a_signal_handler_ends_a_wait(world: World) -> None:
    store = store_of(world)
    with _ended_by_a_handler():
        store.get("never")
    assert store.num_keys() == 0, "the connection of the wait is gone, and its reply with it"


def test_a_world_that_is_met_goes_on_serving(world: World) -> None:
    store = store_of(world)
    store.set("before", "1")
    world.meet([Member(0, "here", os.getpid(), "", world.endpoint)], lambda change: None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "after")
        assert store.get("before") == b"1"
        store.set("after", "2")
        assert waiting.result(DEADLINE_S) == b"2"


def test_stores_of_one_server_share_connections(world: World) -> None:
    stores = [store_of(world) for _ in range(20)]
    before = len(os.listdir("/proc/self/fd"))
    for store in stores:
        store.add("n", 1)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    stores[0].close()
    assert stores[1].get("n") == b"20"


class _InterruptedAtEnd:
    """A library in which Ctrl-C arrives while a request ends."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def ps_store_end(self, request: int) -> None:
        self.library.ps_store_end(request)
        raise KeyboardInterrupt


def test_an_interrupt_while_a_request_ends_is_raised(world: World) -> None:
    store = store_of(world)
    library, store.library = store.library, _InterruptedAtEnd(store.library)
    with pytest.raises(KeyboardInterrupt):
        store.set("key", "value")
    store.library = library
    assert store.get("key") == b"value"
