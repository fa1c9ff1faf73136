"""The store of `launch` beside torch's TCPStore: the same answers, waits that are woken, groups made over it."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators.base.errors import InvalidArgumentError, LaunchError, RendezvousError
from parallel_state import (
    LaunchConfig,
    destroy_distributed_environment,
    get_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
    launch,
)
from parallel_state.store.client import ControlStore
from parallel_state.store.protocol import MAX_CONTENT_BYTES
from parallel_state.store.server import ControlServer
from tests.contract.test_rendezvous import held_port

DEADLINE_S = 60.0
SECRET = secrets.token_bytes(32)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    made = ControlServer(socket.create_server(("127.0.0.1", 0)), SECRET, 4)
    yield made
    made.close()
    made.close()


@pytest.fixture(params=["launch", "TCPStore"])
def make_store(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Gives connections to one store, of either kind."""
    if request.param == "launch":
        server = request.getfixturevalue("server")
        made: list[ControlStore] = []

        def connect() -> ControlStore:
            made.append(ControlStore(("127.0.0.1", server.port), SECRET, DEADLINE_S))
            return made[-1]

        yield connect
        for store in made:
            store.close()
    else:
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", master.port, is_master=False)


@pytest.mark.parametrize("prefixed", [False, True])
def test_the_same_answers(make_store: Callable[[], Any], prefixed: bool) -> None:
    """Also through torch's prefixes, which call it from C++."""
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


def test_threads_of_one_store_do_not_wait_for_each_other(server: ControlServer) -> None:
    store = ControlStore(("127.0.0.1", server.port), SECRET, DEADLINE_S)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(store.get, "late") for _ in range(4)]
        for number in pool.map(lambda _: [store.add("n", 1) for _ in range(200)][-1], range(4)):
            assert number >= 200
        assert store.add("n", 0) == 800
        assert not any(each.done() for each in waiting)
        store.set("late", "now")
        assert [each.result(DEADLINE_S) for each in waiting] == [b"now"] * 4
    store.close()


def test_who_gave_up_waiting_takes_nothing_from_others(server: ControlServer) -> None:
    store = ControlStore(("127.0.0.1", server.port), SECRET, DEADLINE_S)
    for _ in range(20):
        with pytest.raises(dist.DistStoreError):
            store.wait(["key"], timedelta(milliseconds=5))
    store.set("key", "value")
    store.delete_key("key")
    with pytest.raises(dist.DistStoreError):
        store.wait(["key"], timedelta(milliseconds=5))
    assert store.num_keys() == 0
    store.close()


def test_wrong_requests_and_too_large_values(server: ControlServer) -> None:
    store = ControlStore(("127.0.0.1", server.port), SECRET, DEADLINE_S)
    store.set("word", "seven")
    with pytest.raises(dist.DistStoreError, match="invalid literal"):
        store.add("word", 1)
    with pytest.raises(InvalidArgumentError, match="one call to the store must have at most"):
        store.set("large", bytes(MAX_CONTENT_BYTES))
    half = bytes(MAX_CONTENT_BYTES // 2)
    store.set("half", half)
    with pytest.raises(dist.DistStoreError, match="must have less than"):
        store.append("half", half)
    with pytest.raises(dist.DistStoreError, match="ask for fewer at once"):
        store.multi_get(["half", "half"])
    assert store.get("word") == b"seven"
    store.close()


def test_a_server_that_ends(server: ControlServer) -> None:
    store = ControlStore(("127.0.0.1", server.port), SECRET, DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "never")
        store.set("a", "b")
        time.sleep(0.05)
        server.close()
        with pytest.raises(dist.DistNetworkError, match="has ended"):
            waiting.result(DEADLINE_S)
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match=f"127.0.0.1:{server.port}"):
            store.get("a")


def test_a_server_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = ControlStore(silent.getsockname(), SECRET, 0.1)
        began = time.monotonic()
        with pytest.raises(dist.DistNetworkError):
            store.set("a", "b")
        assert time.monotonic() - began < 5.0


def test_another_process_at_the_port_learns_nothing_and_is_not_believed() -> None:
    """It is found out before a request is sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received: list[bytes] = []

        def pretend() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(b"parallel_state/1" + bytes(32))
                received.append(client.recv(64, socket.MSG_WAITALL))
                client.sendall(secrets.token_bytes(32))
                received.append(client.recv(1000))

        thread = threading.Thread(target=pretend)
        thread.start()
        store = ControlStore(listener.getsockname(), SECRET, DEADLINE_S)
        with pytest.raises(dist.DistNetworkError, match="can't prove that it knows it"):
            store.set("a", "private")
        thread.join(DEADLINE_S)
    assert len(received[0]) == 64 and SECRET not in received[0]
    assert received[1] == b""


def test_a_forked_child_has_connections_of_its_own(server: ControlServer) -> None:
    store = ControlStore(("127.0.0.1", server.port), SECRET, DEADLINE_S)
    store.set("parent", "1")
    child = os.fork()
    if child == 0:
        ok = store.add("child", 1) == 1 and store.get("parent") == b"1"
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.add("child", 1) == 2
    store.close()


# In ranks that launch started


def _plain_world() -> float:
    """torch's own env://, with no other reference to the store than torch's."""
    dist.init_process_group("gloo")
    gc.collect()
    total = torch.ones(1)
    dist.all_reduce(total)
    sub = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(total, group=sub)
    dist.monitored_barrier(timeout=timedelta(seconds=DEADLINE_S))
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, dist.get_rank())
    if objects != list(range(dist.get_world_size())):
        raise ValueError(objects)
    dist.destroy_process_group()
    return total.item()


def test_torchs_own_rendezvous_finds_it() -> None:
    assert launch(_plain_world, 4, timeout=DEADLINE_S) == [8.0, 8.0, 4.0, 4.0]


def _worlds() -> list[int]:
    """How many descriptors are open after each of some worlds."""
    counts = []
    for _ in range(10):
        init_distributed_environment()
        initialize_model_parallel(2, 2)
        get_tp_group().all_reduce(torch.ones(1))
        destroy_distributed_environment()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_worlds_that_follow_each_other_leave_no_connections() -> None:
    for counts in launch(_worlds, 4, timeout=DEADLINE_S):
        assert counts[-1] <= counts[0] + 4, counts  # as many free connections as are kept


def _tcp_store() -> str:
    try:
        dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=1))
    except dist.DistError as error:
        return type(error).__name__
    return "it came in"


def test_torchs_client_is_a_stranger_there() -> None:
    assert launch(_tcp_store, 2, timeout=DEADLINE_S) == ["DistNetworkError"] * 2


def _explain() -> str:
    return get_tp_group().explain()


def test_explain_names_the_store(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET)
    for secret_file in (None, str(path)):
        texts = launch(_explain, 2, tensor_model_parallel_size=2, timeout=DEADLINE_S, secret_file=secret_file)
        for text in texts:
            assert "store: the world's store at 127.0.0.1:" in text and "asks for a token that the ranks got at" in text
            assert "the store of launch, which takes ranks with the job's secret" in text
            assert SECRET.hex() not in text


# Several nodes


def _sum() -> float:
    return float(get_tp_group().all_reduce(torch.ones(1)).item())


def _launch_node(offset: int, port: int, path: Path | None) -> list[float]:
    config = LaunchConfig(world_size=4, master_port=port, timeout=DEADLINE_S, tensor_model_parallel_size=4)
    file = None if path is None else str(path)
    return launch(_sum, 2, config=config, rank_offset=offset, secret_file=file)


@pytest.mark.parametrize("given", [True, False])
def test_several_nodes(given: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET)
    with held_port() as port, ThreadPoolExecutor(2) as pool:
        nodes = [pool.submit(_launch_node, offset, port, path if given else None) for offset in (2, 0)]
        assert [node.result(DEADLINE_S) for node in nodes] == [[4.0, 4.0]] * 2
    assert ("several nodes without a secret_file" in caplog.text) is not given


def test_several_nodes_with_different_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that comes to the store's is told at once; the other one goes on waiting for one that has it."""
    monkeypatch.setenv("PARALLEL_STATE_START_TIMEOUT_S", "3")
    paths = [tmp_path / "one", tmp_path / "other"]
    for path in paths:
        path.touch(0o600)
        path.write_bytes(secrets.token_bytes(32))
    with held_port() as port, ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(_launch_node, offset, port, path) for offset, path in zip((0, 2), paths, strict=True)
        )
        with pytest.raises(RendezvousError, match="don't share a secret: it refused the proof"):
            second.result(DEADLINE_S)
        with pytest.raises(LaunchError, match=r"ranks \[2, 3\] did not come"):
            first.result(DEADLINE_S)
