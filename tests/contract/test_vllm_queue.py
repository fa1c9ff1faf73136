"""The queue behind vLLM's interface: what is sent arrives, waits end by their deadline, and by who is gone."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from device_communicators.base.errors import PeerDiedError, UsageError
from device_communicators.cpu.segment import DIRECTORY
from parallel_state.compat.vllm.message_queue import Handle, MessageQueue

Ends = tuple[MessageQueue, list[MessageQueue]]


def made(readers: int, local: int | None = None, **sizes: Any) -> Ends:
    local = readers if local is None else local
    writer = MessageQueue(readers, local, [2 * each + 1 for each in range(local)], connect_ip="127.0.0.1", **sizes)
    handle: Handle = pickle.loads(pickle.dumps(writer.export_handle()))
    ranks = [*handle.local_reader_ranks, *[99] * (readers - local)]
    ends = [MessageQueue.create_from_handle(handle, rank) for rank in ranks]
    threads = [threading.Thread(target=each.wait_until_ready) for each in (writer, *ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return writer, ends


@pytest.fixture
def pair() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    before = set(os.listdir(DIRECTORY))
    writer, (reader,) = made(1)
    assert set(os.listdir(DIRECTORY)) <= before, "the name is gone when all have come"
    yield writer, reader


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and (all(map(equal, a, b)) if isinstance(a, (list, tuple)) else a == b)


OBJECTS = [
    None, {"a": [1, 2.5], "b": "text"}, b"x" * 3_000_000, "y" * 70_000, torch.arange(12).reshape(3, 4).t(),
    [torch.empty(0, 3), torch.ones(3, dtype=torch.bfloat16), torch.tensor(True)], torch.randn(600, 700), (b"", ()),
]  # fmt: skip


@pytest.mark.parametrize(("readers", "local"), [(1, 1), (3, 3), (2, 1), (1, 0)])
def test_objects_arrive_at_all_readers(readers: int, local: int) -> None:
    writer, ends = made(readers, local)

    def write() -> None:
        for each in OBJECTS * 3:
            writer.enqueue(each)

    thread = threading.Thread(target=write)
    thread.start()
    results: list[list[Any]] = [[] for _ in ends]
    threads = [
        threading.Thread(target=lambda e=end, r=result: r.extend(e.dequeue(timeout=20) for _ in OBJECTS * 3))
        for end, result in zip(ends, results, strict=True)
    ]
    for each in threads:
        each.start()
    for each in (thread, *threads):
        each.join(30)
    for result in results:
        assert equal(result, OBJECTS * 3)
    tensor = results[0][4]
    tensor += 1  # what arrives may be written to


def test_a_timeout_sends_and_takes_nothing(pair: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = pair
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.05)
    sent = 0
    with pytest.raises(TimeoutError):
        while True:
            writer.enqueue(sent, timeout=0.1)
            sent += 1
    assert sent >= 9  # max_chunks, but for what the handshake may hold
    assert [reader.dequeue(timeout=1) for _ in range(sent)] == list(range(sent))
    writer.enqueue("after", timeout=1)
    assert reader.dequeue(timeout=1) == "after"


def test_shutdown_ends_a_wait(pair: tuple[MessageQueue, MessageQueue]) -> None:
    _, reader = pair
    threading.Timer(0.2, reader.shutdown).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(indefinite=True)
    assert time.monotonic() - started < 2


def test_a_signal_ends_a_wait_and_the_queue_goes_on(pair: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = pair

    def stop(*_: object) -> None:
        raise KeyError("the handler's")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyError, match="the handler's"):
            reader.dequeue(indefinite=True)
    finally:
        signal.signal(signal.SIGALRM, before)
    writer.enqueue("after")
    assert reader.dequeue(timeout=1) == "after"


def test_what_was_sent_is_read_before_the_writers_end_is_told(pair: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = pair
    writer.enqueue("last")
    writer.shutdown()
    assert reader.dequeue() == "last"
    with pytest.raises(PeerDiedError, match=f"the writer, process {os.getpid()}"):
        reader.dequeue()


def test_only_the_writer_writes(pair: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = pair
    with pytest.raises(UsageError):
        reader.enqueue(1)
    with pytest.raises(UsageError):
        writer.dequeue()
    with pytest.raises(UsageError, match="n_local_reader must be in 0 … 1"):
        MessageQueue(1, 2)
    assert writer.broadcast_object("both") == reader.broadcast_object() == "both"


def test_shutdown_ends_the_wait_of_a_reader_on_another_host_and_tells_the_writer() -> None:
    writer, (reader,) = made(1, 0)
    threading.Timer(0.2, reader.shutdown).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(indefinite=True)
    assert time.monotonic() - started < 2
    with pytest.raises(PeerDiedError, match="a reader on another host has closed it"):
        for _ in range(100):  # the first ones may still find room
            writer.enqueue(b"x" * 100_000)


def test_a_writers_end_is_told_to_readers_on_other_hosts_after_what_it_sent() -> None:
    writer, (reader,) = made(1, 0)
    writer.enqueue("last")
    writer.shutdown()
    assert reader.dequeue(timeout=20) == "last"
    with pytest.raises(PeerDiedError, match=r"readers of other hosts, from 127.0.0.1:\d+: the writer, on another host"):
        reader.dequeue(timeout=20)


def test_a_writer_waits_for_its_reader_on_another_host_until_shutdown_and_takes_no_stranger() -> None:
    writer = MessageQueue(1, 0, [], connect_ip="127.0.0.1")
    handle: Handle = pickle.loads(pickle.dumps(writer.export_handle()))
    found: list[BaseException] = []

    def wait() -> None:
        try:
            writer.wait_until_ready()
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    stranger = MessageQueue.create_from_handle(dataclasses.replace(handle, secret=b"guessed"), 99)
    with pytest.raises(multiprocessing.AuthenticationError):
        stranger.wait_until_ready()
    assert thread.is_alive() and not found
    writer.shutdown()
    thread.join(20)
    assert [str(each) for each in found] == ["cancelled"]
