"""Who sends to whom between hosts: arithmetic, without a network."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from device_communicators.base.errors import CollectiveMismatchError, CommunicationError
from device_communicators.calls.user_call import UserCall
from device_communicators.hierarchical.communicator import _Call
from device_communicators.hierarchical.leaders import (
    _AGREES,
    Leaders,
    Scratch,
    _read,
    slices_of,
)
from device_communicators.hierarchical.reduction import Reduction
from device_communicators.hierarchical.streams import Frame, Streams, head_of, part_of
from device_communicators.routing.communicator import GroupContext


def _leaders(hosts: int, host: int) -> Leaders:
    context = GroupContext("test", tuple(range(hosts)), host, torch.device("cpu"), 1.0)
    return Leaders(context, range(hosts), host)


@pytest.mark.parametrize("hosts", range(1, 18))
def test_the_tree_reaches_each_host_once(hosts: int) -> None:
    for root in range(hosts):
        trees = [_leaders(hosts, host).tree(root) for host in range(hosts)]
        assert trees[root][0] is None
        heard = {child: parent for parent, (_, children) in enumerate(trees) for child in children}
        assert heard == {host: trees[host][0] for host in range(hosts) if host != root}
        depth = {root: 0}
        while len(depth) < hosts:
            depth.update({child: depth[parent] + 1 for child, parent in heard.items() if parent in depth})
        assert max(depth.values()) <= max(0, (hosts - 1).bit_length())


@pytest.mark.parametrize("hosts", [2, 3, 7])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, 100_001])
def test_slices_cover_all_elements_in_order(hosts: int, count: int) -> None:
    slices = slices_of(count, hosts)
    assert len(slices) == hosts
    assert [index for part in slices for index in range(count)[part]] == list(range(count))


def _frames(calls: Sequence[Sequence[UserCall]]) -> dict[int, Frame]:
    """What each host sends in its last call, after those before it."""
    frames = {}
    for host, made in enumerate(calls):
        leaders = _leaders(len(calls), host)
        for call in made:
            leaders.begin(call)
        frames[host] = Frame(_AGREES, leaders._digest.to_bytes(8, "little"), 0, leaders._words)
    return frames


def _differ(*calls: Sequence[UserCall]) -> tuple[str, list[int]]:
    frames, leaders = _frames(calls), _leaders(len(calls), 0)
    for call in calls[0]:
        leaders.begin(call)
    try:
        leaders._compare({host: _read(frame) for host, frame in frames.items() if host})
    except CollectiveMismatchError as error:
        return str(error), list(error.suspect_ranks)
    return "", []


REDUCE = UserCall("all_reduce", torch.float32, (8,), "sum")


@pytest.mark.parametrize(
    "other",
    [
        REDUCE._replace(method="all_gather"), REDUCE._replace(dtype=torch.int32), REDUCE._replace(reduce_op="max"),
        REDUCE._replace(dim=1), REDUCE._replace(root=2), REDUCE._replace(sizes=(4, 4)),
    ],
)  # fmt: skip
def test_calls_that_differ_are_told_apart(other: UserCall) -> None:
    text, suspects = _differ([REDUCE], [REDUCE], [other])
    assert f"in {REDUCE}, and" in text and f"in {other}. " in text and suspects == [2]
    assert _differ([REDUCE], [other])[1] == [1]
    assert _differ([REDUCE, REDUCE], [other, REDUCE])[1] == [1], "a host that came through another call is found later"


def test_variants_of_a_call_match() -> None:
    assert _differ([REDUCE], [REDUCE._replace(method="all_reduce_")]) == ("", [])


HALVES = (torch.bfloat16, torch.float16)


def _parts(reduction: Reduction, ranks_of_hosts: Sequence[int], inputs: Sequence[Tensor], own: int) -> list[Tensor]:
    """The hosts' sums, as they lie on the host that combines them."""
    given = iter(inputs)
    sums = [functools.reduce(torch.add, [next(given).float() for _ in range(count)]) for count in ranks_of_hosts]
    dtypes = [reduction.travelling(host) for host in range(len(sums))]
    return [x if host == own and len(inputs) > len(sums) else x.to(dtypes[host]) for host, x in enumerate(sums)]


@pytest.mark.parametrize("ranks_of_hosts", [(1, 1), (2, 2), (1, 3), (1, 1, 1), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_sums_of_halves_are_rounded_once(ranks_of_hosts: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
    size = sum(ranks_of_hosts)
    inputs = [torch.randn(1000).to(dtype) for _ in range(size)]
    reduction = Reduction(inputs[0], op, ranks_of_hosts)
    parts = _parts(reduction, ranks_of_hosts, inputs, 0)
    assert [part.dtype == dtype for part in parts[1:]] == [count == 1 for count in ranks_of_hosts[1:]], (
        "what one rank has travels as it is"
    )
    total = functools.reduce(torch.add, [part.float() for part in parts])
    expected = (total / size if op == "avg" else total).to(dtype)
    out = torch.empty(1000, dtype=dtype)
    reduction.combine(parts, out)
    assert torch.equal(out, expected)


def test_sums_that_travel_as_bfloat16_are_rounded_once_on_their_way() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(10_000, generator=generator).bfloat16() for _ in range(4)]
    reduction = Reduction(inputs[0], "sum", (2, 2), rounded=True)
    own, theirs = _parts(reduction, (2, 2), inputs, 0)
    assert (own.dtype, theirs.dtype) == (torch.float32, torch.bfloat16)
    out = torch.empty(10_000, dtype=torch.bfloat16)
    reduction.combine([own, theirs], out)
    exact = sum(x.double() for x in inputs)
    half_step = 2.0**-8  # of a bfloat16's last place, relative
    bound = half_step * (theirs.double().abs() + out.double().abs())
    assert ((out.double() - exact).abs() <= bound).all()
    assert not torch.equal(out, exact.float().bfloat16()), "else nothing was rounded"
    for dtype, op in [(torch.float16, "sum"), (torch.float32, "sum"), (torch.bfloat16, "max")]:
        other = Reduction(inputs[0].to(dtype), op, (2, 2), rounded=True)
        assert other.travelling(1) == Reduction(inputs[0].to(dtype), op, (2, 2)).travelling(1)


@pytest.mark.parametrize(
    ("dtype", "ranks_of_hosts", "rounded", "one_round"),
    [
        (torch.float32, (2, 2), False, True),
        (torch.float32, (2, 2, 2), False, False),
        (torch.bfloat16, (1, 1), False, True),
        (torch.bfloat16, (2, 2), False, False),  # float32 there, bfloat16 back
        (torch.bfloat16, (2, 2), True, False),  # else both hosts' sums would be rounded
        (torch.bfloat16, (1, 2), False, False),
    ],
)
def test_two_hosts_need_one_round_where_it_sends_no_more(
    dtype: torch.dtype, ranks_of_hosts: tuple[int, ...], rounded: bool, one_round: bool
) -> None:
    reduction = Reduction(torch.zeros(1, dtype=dtype), "sum", ranks_of_hosts, rounded=rounded)
    assert reduction.in_one_round(1_000_000) is one_round
    assert reduction.in_one_round(1000)


def test_a_copy_lets_go_on_what_is_sent() -> None:
    near, far = socket.socketpair()
    far.setblocking(False)
    x = torch.arange(3 << 20, dtype=torch.int32).view(1024, -1)
    with contextlib.closing(Streams({1: [near]}, 0.0)) as streams, far:
        context = GroupContext("test", (0, 1), 0, torch.device("cpu"), 1.0)
        leaders = Leaders(context, (0, 1), 0, streams)
        transfer = leaders.send(x, 1)
        with contextlib.suppress(BlockingIOError):
            while far.recv(x.nbytes):
                pass
        out = torch.empty_like(x)
        leaders.copy_meanwhile(out, x)
        assert torch.equal(out, x)
        assert far.recv(x.nbytes)
        assert not leaders._streams.is_done(transfer)


@pytest.mark.parametrize("wrong", [False, True])
def test_splits_of_many_ranks_on_a_host_are_compared(wrong: bool) -> None:
    ranks = [range(128), range(128, 256)]
    call, splits = UserCall("all_to_all", torch.float32, (4,)), [1] * (2 * 256 * 128)

    def compare(host: int, end: socket.socket) -> None:
        context = GroupContext("test", tuple(range(256)), ranks[host][0], torch.device("cpu"), 10.0)
        with contextlib.closing(Streams({128 * (1 - host): [end]}, 0.0)) as streams:
            leaders = Leaders(context, (0, 128), host, streams, ranks)
            leaders.begin(call)
            leaders.splits = (*splits[:-1], 2) if wrong and host else tuple(splits)
            leaders.wait_for([*leaders.begin_exchange({}), *leaders.end_exchange({})])

    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as other:
        expected = contextlib.nullcontext()
        if wrong:
            expected = pytest.raises(
                CollectiveMismatchError, match="255 sends 1 rows to global rank 255, which expects 2"
            )
        ended = other.submit(compare, 1, far)
        with expected:
            compare(0, near)
        with expected:
            ended.result()


def test_scratch_is_as_it_was_asked_for() -> None:
    scratch = Scratch()
    for count, dtype in (
        (8, torch.float32),
        (8, torch.float32),
        (4, torch.float32),
        (4, torch.bfloat16),
        (100, torch.bool),
    ):
        taken = scratch.take("key", count, dtype)
        assert (taken.shape, taken.dtype) == ((count,), dtype)
        assert not taken.is_inference()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("magic", "text"), [(b"PSFZ", b"words\0"), (b"PSFD", b'["", [1]]')])
def test_a_frame_of_no_call_is_an_error(magic: bytes, text: bytes, at_once: bool) -> None:
    own, other = socket.socketpair()
    with contextlib.closing(Streams({1: [own]}, 0.0)) as near, contextlib.closing(Streams({0: [other]}, 0.0)) as far:
        context = GroupContext("test", (0, 1), 0, torch.device("cpu"), 5.0)
        leaders = Leaders(context, [0, 1], 0, near)
        leaders.begin(UserCall("all_reduce"))
        x, out = torch.ones(10), torch.zeros(10)
        head = head_of(magic, leaders._digest.to_bytes(8, "little"), text)
        far.send_frames(head, part_of(0, x))
        with pytest.raises(CommunicationError, match="no call that is known"):
            if at_once:
                leaders.exchange_at_once({1: x}, {1: out})
            else:
                leaders.begin_exchange({1: x})
                leaders.end_exchange({1: out})
        assert not out.any()


def test_a_call_that_is_interrupted_as_it_begins_lets_go_of_its_lock() -> None:
    class Interrupted:
        def begin(self, *_: object) -> None:
            raise KeyboardInterrupt

    abandoned: list[BaseException] = []
    communicator: Any = SimpleNamespace(
        lock=threading.RLock(),
        is_in_call=False,
        hosts=Interrupted(),
        context=SimpleNamespace(timeout_s=5.0),
        abandon=abandoned.append,
    )
    with pytest.raises(KeyboardInterrupt), _Call(communicator, "barrier", ()):
        pass
    assert abandoned and not communicator.is_in_call
    with ThreadPoolExecutor(1) as another:
        assert another.submit(communicator.lock.acquire, timeout=5).result()
