from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from device_communicators.base.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    GroupDestroyedError,
    PeerDiedError,
)
from device_communicators.cpu import native
from device_communicators.cpu.channels import MESSAGES, Channels
from device_communicators.cpu.message_queue import Message, Receiver, pieces_of
from tests.internals.queue_memory import channels
from tests.workers import WorkerPool, WorkersFailedError

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SOON_S = 2.0
LARGE_BYTES = 5 << 20

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no shared-memory library: {error}", allow_module_level=True)


def _message(seed: int, number: int, limit: int) -> tuple[bytes, list[Tensor]]:
    draw = random.Random(seed * 1_000_003 + number)
    sizes = [
        draw.choice((0, 1, 63, 4096, 65_471, 65_472, 65_473, draw.randrange(limit))) for _ in range(draw.randrange(4))
    ]
    head = draw.randbytes(draw.choice((0, 1, 100, 65_472, draw.randrange(200_000))))
    return head, [torch.frombuffer(bytearray(draw.randbytes(n) or b"-"), dtype=torch.uint8)[:n] for n in sizes]


def _split(head: bytes, tensors: list[Tensor], number: int) -> Message:
    at = len(head) // 3 if number % 2 else len(head)
    return Message(head[:at], tensors, number, head[at:])


def _take(receiver: Receiver, sizes: list[int]) -> tuple[bytes, list[Tensor], int]:
    with receiver.lock:
        head = receiver.next()
        data = bytes(head.data) if head.data else bytes(receiver.read_on(head.head_bytes))
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        receiver.read(*pieces_of(tensors))
        return data, tensors, head.fingerprint


def _same(got: tuple[bytes, list[Tensor], int], message: tuple[bytes, list[Tensor]], number: int) -> bool:
    return got[0] == message[0] and all(map(torch.equal, got[1], message[1])) and got[2] == number


def _broadcasts(path: str, rank: int, size: int, seed: int, count: int) -> None:
    own = random.Random(seed * 64 + rank)
    with channels(Path(path), rank, size) as ends:
        for number in range(count):
            src = number % 7 % size
            message = _message(seed, number, 300_000)
            if own.random() < 0.1:
                time.sleep(own.random() * 0.003)
            if rank == src:
                ends.sender(None, MESSAGES).send(_split(*message, number))
            else:
                receiver = ends.receiver(src, MESSAGES, broadcast=True)
                got = _take(receiver, [x.numel() for x in message[1]])
                assert _same(got, message, number), number
        _leave_together(ends, size)


def _leave_together(ends: Channels, size: int) -> None:
    rank, x = ends.members.rank, torch.zeros(1)
    for other in range(size):
        if other != rank:
            ends.transfers.isend(x, other)
    for other in range(size):
        if other != rank:
            ends.transfers.irecv_(torch.empty(1), other).wait()


def _run(pools: Pools, size: int, body: Callable[..., object], tmp_path: Path, *args: object) -> list[object]:
    path = tmp_path / f"queue-{time.monotonic_ns()}"
    return pools(size).run(_call, body, str(path), size, args, timeout_s=DEADLINE_S)


def _call(body: Callable[..., object], path: str, size: int, args: tuple[object, ...]) -> object:
    return body(path, int(os.environ["RANK"]), size, *args)


@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_any_size_arrive_whole_and_in_order(pools: Pools, tmp_path: Path, size: int) -> None:
    for seed in range(2):
        _run(pools, size, _broadcasts, tmp_path, seed, 150)


def _pairs(path: str, rank: int, size: int) -> None:
    with channels(Path(path), rank, size) as ends:
        others = [other for other in range(size) if other != rank]
        for n in (1, 70_000, LARGE_BYTES):
            into = {src: [torch.empty(n, dtype=torch.uint8) for _ in range(3)] for src in others}
            receipts = [ends.transfers.irecv_(x, src) for src in others for x in into[src]]
            works = [
                ends.transfers.isend(torch.full((n,), rank * 10 + i, dtype=torch.uint8), dst)
                for dst in others
                for i in range(3)
            ]
            for receipt in reversed(receipts):
                receipt.wait()
            for work in works:
                work.wait()
            assert all(work.is_completed() for work in [*works, *receipts])
            for src in others:
                assert all(bool((x == src * 10 + i).all()) for i, x in enumerate(into[src])), (n, src)


@pytest.mark.parametrize("size", [2, 4])
def test_everyone_sends_to_everyone(pools: Pools, tmp_path: Path, size: int) -> None:
    _run(pools, size, _pairs, tmp_path)


def _huge_both_ways(path: str, rank: int, size: int, blocking: bool) -> None:
    with channels(Path(path), rank, size) as ends:
        x, out = torch.full((LARGE_BYTES,), rank, dtype=torch.uint8), torch.empty(LARGE_BYTES, dtype=torch.uint8)
        if blocking:
            receipt = ends.transfers.irecv_(out, 1 - rank)
            ends.transfers.send(x, 1 - rank)
        else:
            work = ends.transfers.isend(x, 1 - rank)
            receipt = ends.transfers.irecv_(out, 1 - rank)
        receipt.wait()
        assert bool((out == 1 - rank).all())
        if not blocking:
            work.wait()
        _leave_together(ends, size)


@pytest.mark.parametrize("blocking", [True, False])
def test_two_ranks_that_send_much_to_each_other(pools: Pools, tmp_path: Path, blocking: bool) -> None:
    _run(pools, 2, _huge_both_ways, tmp_path, blocking)


def _from_two_threads(path: str, rank: int, size: int) -> list[int]:
    with channels(Path(path), rank, size) as ends:
        if rank == 0:
            threads = [threading.Thread(target=_send_many, args=(ends, value)) for value in (1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
            return []
        outs = [torch.empty(300_000, dtype=torch.uint8) for _ in range(40)]
        for out in outs:
            ends.transfers.irecv_(out, 0).wait()
        found = [out.unique().tolist() for out in outs]
        assert all(len(values) == 1 for values in found)
        return sorted(values[0] for values in found)


def _send_many(ends: Channels, value: int) -> None:
    for number in range(20):
        x = torch.full((300_000,), value, dtype=torch.uint8)
        if number % 2:
            ends.transfers.isend(x, 1).wait()
        else:
            ends.transfers.send(x, 1)


def test_two_threads_send_at_once(pools: Pools, tmp_path: Path) -> None:
    assert _run(pools, 2, _from_two_threads, tmp_path)[1] == [1] * 20 + [2] * 20


def _mismatched(path: str, rank: int, size: int, sent: Tensor, wanted: Tensor) -> str:
    with channels(Path(path), rank, size) as ends:
        if rank == 0:
            ends.transfers.isend(sent, 1)
            return ""
        with pytest.raises(CollectiveMismatchError) as raised:
            ends.transfers.irecv_(wanted, 0).wait()
        assert wanted.unique().tolist() == [7], "the buffer was touched"
        assert raised.value.suspect_ranks == (0,)
        with pytest.raises(CollectiveMismatchError):
            ends.transfers.irecv_(torch.empty(100), 0).wait()
        return str(raised.value)


@pytest.mark.parametrize("other", [torch.zeros(99), torch.zeros(300_000), torch.zeros(100, dtype=torch.int32)])
@pytest.mark.parametrize("larger", [True, False])
def test_a_buffer_of_another_form_stays_untouched(pools: Pools, tmp_path: Path, other: Tensor, larger: bool) -> None:
    sent, wanted = (other, torch.full((100,), 7.0)) if larger else (torch.zeros(100), torch.full_like(other, 7))
    text = _run(pools, 2, _mismatched, tmp_path, sent, wanted)[1]
    assert "mismatched: this rank receives" in str(text)


def _report(path: str, call: Callable[[], object]) -> None:
    """A file, because the pool returns nothing after a death."""
    started = time.monotonic()
    try:
        call()
        told = "ok"
    except CommunicationError as error:
        told = f"{type(error).__name__} {error.suspect_ranks} {error}"
    Path(path).write_text(f"{time.monotonic() - started:.3f} {told}", encoding="utf-8")


def _dies(path: str, rank: int, size: int, outcomes: str, who: str) -> None:
    with channels(Path(path), rank, size) as ends:
        killed = 0 if who == "writer" else size - 1
        large = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
        if rank == killed:
            if rank == 0:
                ends.sender(None, MESSAGES).isend(Message(b"head", (large,)))
                ends.transfers.irecv_(torch.empty(1), 1).wait()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            sender = ends.sender(None, MESSAGES)
            _report(f"{outcomes}/{rank}", lambda: sender.send(Message(b"head", (large,))))
        elif who == "writer":
            _report(f"{outcomes}/{rank}", lambda: _read_in_part(ends, large, tell=rank == 1))
        else:
            receiver = ends.receiver(0, MESSAGES, broadcast=True)
            _report(f"{outcomes}/{rank}", lambda: _take(receiver, [LARGE_BYTES]))


def _read_in_part(ends: Channels, large: Tensor, tell: bool) -> None:
    receiver = ends.receiver(0, MESSAGES, broadcast=True)
    with receiver.lock:
        receiver.next()
        receiver.read(*pieces_of([large[: 1 << 20]]))
        if tell:
            ends.transfers.send(torch.zeros(1), 0)
            with pytest.raises(PeerDiedError):
                ends.transfers.irecv_(torch.empty(1), 0).wait()
        receiver.read(*pieces_of([large[1 << 20 :]]))


@pytest.mark.parametrize("who", ["writer", "reader"])
def test_a_rank_that_dies_is_named_at_once(tmp_path: Path, who: str) -> None:
    pool = WorkerPool(4)
    try:
        with pytest.raises(WorkersFailedError):
            pool.run(_call, _dies, str(tmp_path / "queue"), 4, (str(tmp_path), who), timeout_s=DEADLINE_S)
    finally:
        pool.kill()
    outcomes = {path.name: path.read_text().split(" ", 2) for path in tmp_path.iterdir() if path.name != "queue"}
    failed = {"1", "2", "3"} if who == "writer" else {"0", "1", "2"}
    assert outcomes.keys() == failed
    # After the last reader dies, others see that death, or that the writer stopped because of it.
    suspects = {"0": ("(3,)",), "1": ("(0,)", "(3,)"), "2": ("(0,)", "(3,)"), "3": ("(0,)",)}
    for rank, (seconds, kind, told) in outcomes.items():
        assert kind == "PeerDiedError", (rank, told)
        assert told.startswith(suspects[rank]), (rank, told)
        assert float(seconds) < SOON_S


def _late(path: str, rank: int, size: int) -> list[str]:
    told = []
    with channels(Path(path), rank, size, timeout_s=0.5) as ends:
        calls: list[Callable[[], object]] = [
            lambda: ends.transfers.irecv_(torch.empty(1), 1 - rank).wait(),
            lambda: ends.receiver(1 - rank, MESSAGES, broadcast=True).next(),
            lambda: ends.sender(1 - rank, MESSAGES).send(Message(b"x" * LARGE_BYTES)),
            lambda: ends.sender(1 - rank, MESSAGES).isend(Message(b"x")).wait(),
        ]
        for call in calls:
            started = time.monotonic()
            with pytest.raises((CollectiveTimeoutError, PeerDiedError)) as raised:
                call()
            told.append(f"{raised.value.suspect_ranks} {time.monotonic() - started:.1f} {raised.value}")
    return told


def test_who_does_not_come_is_named_at_the_deadline(pools: Pools, tmp_path: Path) -> None:
    for rank, told in enumerate(_run(pools, 2, _late, tmp_path)):
        for text in told:  # type: ignore[attr-defined]
            assert text.startswith(f"({1 - rank},)")
            assert float(text.split()[1]) < 0.5 + SOON_S


def _leaves(path: str, rank: int, size: int) -> str:
    with channels(Path(path), rank, size) as ends:
        if rank == 0:
            ends.transfers.send(torch.ones(5), 1)
            return ""
        time.sleep(0.05)
        out = torch.zeros(5)
        ends.transfers.irecv_(out, 0).wait()
        assert out.tolist() == [1.0] * 5
        with pytest.raises(PeerDiedError) as raised:
            ends.transfers.irecv_(out, 0).wait()
        return str(raised.value)


def test_a_writer_that_has_left_is_told_from_one_that_is_late(pools: Pools, tmp_path: Path) -> None:
    assert "global rank 0 has ended, or has destroyed its group" in str(_run(pools, 2, _leaves, tmp_path)[1])


def _closed_amid(path: str, rank: int, size: int) -> list[str]:
    told: list[str] = []
    with channels(Path(path), rank, size) as ends:
        if rank == 0:
            calls: list[Callable[[], object]] = [
                lambda: ends.transfers.irecv_(torch.empty(1), 1).wait(),
                lambda: ends.sender(1, MESSAGES).send(Message(b"x" * LARGE_BYTES)),
            ]

            def attempt(call: Callable[[], object]) -> None:
                try:
                    call()
                except (CommunicationError, GroupDestroyedError) as error:
                    told.append(type(error).__name__)

            threads = [threading.Thread(target=attempt, args=(call,)) for call in calls]
            for thread in threads:
                thread.start()
            time.sleep(0.1)
            assert ends.close()
            for thread in threads:
                thread.join(DEADLINE_S)
            with pytest.raises(GroupDestroyedError):
                ends.transfers.send(torch.ones(1), 1)
        else:
            time.sleep(0.3)
    return told


def test_closing_ends_the_waits_of_other_threads(pools: Pools, tmp_path: Path) -> None:
    assert _run(pools, 2, _closed_amid, tmp_path)[0] == ["GroupDestroyedError"] * 2
