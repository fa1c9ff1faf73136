"""Messages whose bytes no sender of this library makes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from tests.contract.test_objects import (
    AT_ONCE_S,
    DEADLINE_S,
    OVER,
    Pools,
    check_decode_error,
    check_failed,
    check_usable,
    own_group,
)
from tests.internals import raw_messages
from tests.internals.raw_messages import Outgoing, garbage, send_raw


def hostile_head(what: str, way: str, over: str) -> None:
    with own_group(over=over) as group:
        head = garbage()[what]
        if group.rank_in_group == 0:
            if way in ("send", "broadcast"):
                send_raw(group, Outgoing(head, []), way)
            else:
                tensors = [torch.zeros(13 if what == "tensor bytes" else 12, dtype=torch.uint8)]
                with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ps.MessageDecodeError):
                    raw_messages.send_encoded_as(patch, Outgoing(head, tensors))
                    group.all_gather_object(1)
            return
        if way == "send":
            if group.rank_in_group > 1:
                return
            incoming, next_one = group.irecv_object(0), group.irecv_object(0)
            receive: Callable[[], Any] = incoming.wait
        elif way == "broadcast":
            receive = lambda: group.broadcast_object(None, 0)  # noqa: E731
        else:
            receive = lambda: group.all_gather_object(1)  # noqa: E731
        with pytest.raises(ps.MessageDecodeError) as raised:
            receive()
        check_decode_error(raised.value, group, 0)
        check_failed(group, raised.value)
        if way == "send":
            with pytest.raises(ps.MessageDecodeError):
                incoming.wait()
            started = time.monotonic()
            with pytest.raises(ps.GroupFailedError):
                next_one.wait()
            assert next_one.is_completed()
            assert time.monotonic() - started < AT_ONCE_S


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("way", ["send", "broadcast", "all_gather"])
def test_a_head_that_is_none_poisons_the_group(pools: Pools, way: str, over: str) -> None:
    pool = pools(4)
    for what in garbage():
        pool.run(hostile_head, what, way, over, tp=1, timeout_s=DEADLINE_S)
    pool.run(usable_world, tp=1, timeout_s=DEADLINE_S)


def usable_world() -> None:
    check_usable(ps.get_world_group())


def false_reference(way: str, over: str) -> None:
    with own_group(over=over) as group:
        if group.rank_in_group == 0:
            send_raw(group, raw_messages.false_reference(), way)
            return
        incoming = group.irecv_object(0) if way == "send" else None
        for _ in range(2 if way == "send" else 1):
            with pytest.raises(ps.MessageDecodeError, match="refers to tensor number 7, but has 1") as raised:
                incoming.wait() if incoming is not None else group.broadcast_object(None, 0)
        check_decode_error(raised.value, group, 0)
        check_failed(group, raised.value)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("way", ["send", "broadcast"])
def test_a_message_that_can_not_be_built_poisons_the_group(pools: Pools, way: str, over: str) -> None:
    pools(2).run(false_reference, way, over, tp=1, timeout_s=DEADLINE_S)


def claimed_memory(size: int) -> int:
    with own_group(over="queue") as group:
        if group.rank_in_group == 0:
            send_raw(group, raw_messages.lists_that_claim(size, 60), "send")
            return 0
        status = Path("/proc/self/status")
        before = int(status.read_text(encoding="utf-8").partition("VmPeak:")[2].split()[0])
        with pytest.raises(ps.MessageDecodeError):
            group.recv_object(0)
        return (int(status.read_text(encoding="utf-8").partition("VmPeak:")[2].split()[0]) - before) << 10


def test_lists_can_not_claim_more_items_than_there_are_bytes(pools: Pools) -> None:
    size = 8 << 20
    assert pools(2).run(claimed_memory, size, tp=1, timeout_s=DEADLINE_S)[1] < 12 * size


def told_of(numel: int, over: str, error: type[ps.CommunicationError], words: str) -> None:
    with own_group(over=over) as group:
        if group.rank_in_group == 0:
            send_raw(group, raw_messages.head_of_tensor(numel), "send")
            return
        with pytest.raises(error, match=words) as raised:
            group.recv_object(0)
        assert raised.value.suspect_ranks == (0,)
        check_failed(group, raised.value)
        shared = Path("/proc/self/status").read_text(encoding="utf-8").partition("RssShmem:")[2].split()[0]
        assert int(shared) << 10 < 4 * numel / 4


def test_a_tensor_that_finds_no_room_poisons_the_group(pools: Pools) -> None:
    numel = 1 << 45
    words = rf"rank 0 of group .* cpu has no room for .*{numel}"
    pools(2).run(told_of, numel, "route", ps.CommunicationError, words, tp=1, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("over", ["queue", "connections"])
def test_no_memory_is_taken_for_a_tensor_that_does_not_follow_its_head(pools: Pools, over: str) -> None:
    words = "rank 0 of group .* 0 bytes of tensors follow its metadata, which announces 1073741824"
    pools(2).run(told_of, 1 << 28, over, ps.MessageDecodeError, words, tp=1, timeout_s=DEADLINE_S)
