from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from device_communicators.base.errors import PeerDiedError, UnsupportedError, UsageError
from device_communicators.cpu.segment import DIRECTORY
from parallel_state.compat.vllm.message_queue import Handle, MessageQueue

Ends = tuple[MessageQueue, list[MessageQueue]]


def made(readers: int, **sizes: Any) -> Ends:
    writer = MessageQueue(readers, readers, [2 * each + 1 for each in range(readers)], **sizes)
    handle: Handle = pickle.loads(pickle.dumps(writer.export_handle()))
    ends = [MessageQueue.create_from_handle(handle, rank) for rank in handle.local_reader_ranks]
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
    assert set(os.listdir(DIRECTORY)) <= before, "the segment's name must be removed when all readers are connected"
    yield writer, reader


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and (all(map(equal, a, b)) if isinstance(a, (list, tuple)) else a == b)


OBJECTS = [
    None, {"a": [1, 2.5], "b": "text"}, b"x" * 3_000_000, "y" * 70_000, torch.arange(12).reshape(3, 4).t(),
    [torch.empty(0, 3), torch.ones(3, dtype=torch.bfloat16), torch.tensor(True)], torch.randn(600, 700), (b"", ()),
]  # fmt: skip


@pytest.mark.parametrize("readers", [0, 1, 3])
def test_objects_arrive_at_all_readers(readers: int) -> None:
    writer, ends = made(readers)

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
    for result in results:
        result[4] += 1


def test_a_timeout_sends_and_takes_nothing(pair: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = pair
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.05)
    sent = 0
    with pytest.raises(TimeoutError):
        while True:
            writer.enqueue(sent, timeout=0.1)
            sent += 1
    assert sent >= 9
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


def test_readers_on_other_hosts_are_refused(pair: tuple[MessageQueue, MessageQueue]) -> None:
    with pytest.raises(UnsupportedError, match=r"2 of 3 are on other hosts\. Use vLLM's own MessageQueue"):
        MessageQueue(3, 1)
    with pytest.raises(UsageError, match="rank 99 isn't a reader of this message queue; its readers are ranks \\[1\\]"):
        MessageQueue.create_from_handle(pair[0].export_handle(), 99)
