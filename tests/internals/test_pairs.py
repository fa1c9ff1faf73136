"""Sends and receives between two ranks, over a pair of sockets in one process: each rank is a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from device_communicators.base.errors import CollectiveMismatchError, InvalidArgumentError
from device_communicators.cpu.pairs import ANSWERED_BYTES, MOST_TAG, Pairs
from device_communicators.cpu.streams import Streams
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.waiting import TransferError

LIMIT_S = 20.0
SMALL, LARGE = 1000, 20 * ANSWERED_BYTES


@pytest.fixture(params=[64 << 20, 3 * SMALL, 0], ids="{} early bytes".format)
def early_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def pairs(early_bytes: int) -> Iterator[tuple[Pairs, Pairs]]:
    made = []
    for rank, end in enumerate(socket.socketpair()):
        context = GroupContext("test", (0, 1), rank, torch.device("cpu"), 5.0)
        streams = Streams({1 - rank: [end]}, 0.0, {1 - rank: early_bytes})
        made.append(Pairs(context, streams, lambda operation, started: None))
    yield made[0], made[1]
    for each in made:
        each.close()


def _both(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the ranks; returns what they return, or raise."""
    found: list[Any] = [None] * len(calls)

    def run(rank: int) -> None:
        try:
            found[rank] = calls[rank]()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("count", [0, 1, SMALL, LARGE])
def test_tensors_come_by_tag(pairs: tuple[Pairs, Pairs], count: int) -> None:
    def send() -> None:
        started = [pairs[0].isend(torch.full((count,), each, dtype=torch.int16), 1, each).begin() for each in range(4)]
        for each in started:
            each.wait()

    def receive() -> list[torch.Tensor]:
        outs = [torch.empty(count, dtype=torch.int16) for _ in range(4)]
        for tag in (2, 0, 3, 1):
            pairs[1].irecv(outs[tag], 0, tag).wait()
        return outs

    sent, outs = _both(send, receive)
    assert sent is None
    assert all(torch.equal(out, torch.full((count,), tag, dtype=torch.int16)) for tag, out in enumerate(outs))


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_what_was_started_moves_while_nobody_waits(pairs: tuple[Pairs, Pairs], count: int) -> None:
    out = torch.zeros(count)
    received = pairs[1].irecv(out, 0, 0).begin()
    sent = pairs[0].isend(torch.ones(count), 1, 0).begin()
    until = time.monotonic() + LIMIT_S
    while not (received.is_completed() and sent.is_completed()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert int(out.sum()) == count


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_ranks_that_receive_first_may_both_send(pairs: tuple[Pairs, Pairs], count: int) -> None:
    def exchange(rank: int) -> torch.Tensor:
        out = torch.zeros(count)
        received = pairs[rank].irecv(out, 1 - rank, 0).begin()
        pairs[rank].isend(torch.full((count,), float(rank)), 1 - rank, 0).wait()
        received.wait()
        return out

    for rank, out in enumerate(_both(lambda: exchange(0), lambda: exchange(1))):
        assert torch.equal(out, torch.full((count,), 1.0 - rank))


def test_threads_wait_at_once(pairs: tuple[Pairs, Pairs]) -> None:
    def run(rank: int, tag: int) -> int:
        total = 0
        for number in range(50):
            if (number + tag) % 2 == rank:
                pairs[rank].isend(torch.full((number * 1000,), tag), 1 - rank, tag).wait()
            else:
                out = torch.empty(number * 1000, dtype=torch.int64)
                pairs[rank].irecv(out, 1 - rank, tag).wait()
                total += int((out == tag).all())
        return total

    found = _both(*(lambda rank=rank, tag=tag: run(rank, tag) for rank in (0, 1) for tag in (0, 1, 2)))  # type: ignore[misc]
    assert found == [25] * 6


def _kept_bytes(pairs: Pairs) -> int:
    (rank,) = pairs.streams.sockets
    return pairs.streams.facts(rank)[0]


@pytest.mark.parametrize("count", [SMALL, LARGE // 4])
def test_only_so_much_is_kept_before_it_is_received(pairs: tuple[Pairs, Pairs], count: int, early_bytes: int) -> None:
    """A hundred tensors before the one that the receiver waits for; what is kept comes to no more than the bound."""
    xs = [torch.full((count,), float(number)) for number in range(100)]
    kept: list[int] = []

    def send() -> None:
        started = [pairs[0].isend(x, 1, 0).begin() for x in xs]
        pairs[0].isend(torch.ones(3), 1, 1).begin().wait()
        for each in started:
            each.wait()

    def receive() -> bool:
        last, outs = torch.zeros(3), [torch.empty(count) for _ in xs]
        pairs[1].irecv(last, 0, 1).wait()
        kept.append(_kept_bytes(pairs[1]))
        for out in outs:
            pairs[1].irecv(out, 0, 0).wait()
        return bool(last.all()) and all(torch.equal(out, x) for out, x in zip(outs, xs, strict=True))

    assert _both(send, receive) == [None, True]
    assert kept[0] <= early_bytes and _kept_bytes(pairs[1]) == 0
    if early_bytes > 4 * count:
        assert kept[0], "else the bound is lower than it says"


def test_room_comes_back_with_what_was_received(pairs: tuple[Pairs, Pairs], early_bytes: int) -> None:
    """Else all that follows the first 64 MiB would wait for its receive."""
    count = max(1, early_bytes // 16)
    for number in range(12):
        sent = pairs[0].isend(torch.full((count,), float(number)), 1, 0).begin()
        out = torch.empty(count)
        pairs[1].irecv(out, 0, 0).begin().wait()
        sent.wait()
        assert out.eq(number).all()
    assert pairs[0].streams.facts(1)[1] >= 1.5 * early_bytes, "of three times as much"


@pytest.mark.parametrize("sent", [SMALL, LARGE])
@pytest.mark.parametrize("expected", [SMALL // 2, 2 * LARGE])
def test_another_size_is_named_on_the_receiver_and_of_a_large_one_on_both(
    pairs: tuple[Pairs, Pairs], sent: int, expected: int, early_bytes: int
) -> None:
    out = torch.zeros(expected)
    there, here = _both(
        pairs[0].isend(torch.ones(sent), 1, 0).wait,
        pairs[1].irecv(out, 0, 0).wait,
    )
    assert isinstance(here, CollectiveMismatchError) and here.suspect_ranks == (0,), here
    assert f"this rank is in recv of {expected} × float32, and global rank 0 in send of {sent} × float32" in str(here)
    assert not out.any()
    if sent == LARGE or 4 * sent > early_bytes:
        assert f"this rank is in send of {sent} × float32, and global rank 1 in recv of {expected}" in str(there)
    else:
        assert there is None


def test_a_peer_that_goes_ends_the_wait(pairs: tuple[Pairs, Pairs]) -> None:
    received = pairs[1].irecv(torch.zeros(3), 0, 0)
    pairs[0].close()
    with pytest.raises(TransferError, match="closed by peer"):
        received.wait()


def test_tags_are_those_that_messages_have_room_for(pairs: tuple[Pairs, Pairs]) -> None:
    out = torch.zeros(1)
    received = pairs[1].irecv(out, 0, MOST_TAG).begin()
    pairs[0].isend(torch.ones(1), 1, MOST_TAG).begin()
    received.wait()
    assert out == 1
    for tag in (-8, MOST_TAG + 1, 1 << 62):
        with pytest.raises(InvalidArgumentError, match=f"must be from 0 to {MOST_TAG}, but is {tag}"):
            pairs[0].isend(out, 1, tag)
