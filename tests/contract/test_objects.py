from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallel_state as ps
from device_communicators import GroupContext, Handle, Route
from device_communicators.base import settings
from device_communicators.base.member import Timeout
from parallel_state import GroupCoordinator
from tests.contract.attempts import attempt
from tests.helpers.doors import destroy, group_of
from tests.helpers.host_faults import as_too_many_to_mesh
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3, 4])
DEADLINE_S = 30.0
AT_ONCE_S = 2.0  # bound for calls that wait for no peer, on a busy machine
BODY_TAG = 2
OVER = ["queue", "connections", "route"]
"""Through queues, over connections, or as transfers of the route."""
FRAME_BYTES = 4096
"""`traffic` counts at least this for each message."""


class Custom:
    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


LOADED: list[str] = []


def note_load(text: str) -> str:
    LOADED.append(text)
    return text


class Bomb:
    def __reduce__(self) -> Any:
        return note_load, ("loaded",)


def same(x: object, y: object) -> bool:
    if type(x) is not type(y):
        return False
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same, x, y))  # type: ignore[arg-type]
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[key], y[key]) for key in x)  # type: ignore[call-overload, index]
    return x == y


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def tensor_zoo(seed: int) -> dict[str, Any]:
    base = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return {
        "nested": {"deep": [{"tensor": base}, (base[0], "text")]},
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "empty last": torch.zeros(2, 0, dtype=torch.int64),
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": base[:1].expand(5, 4),
        "offset": base[2:],
        "bfloat16": base.bfloat16(),
        "bool": base > 0,
        "float8": base.to(torch.float8_e4m3fn).view(torch.uint8),
        "0-d": torch.tensor(seed),
        "0-d bool": torch.tensor(True),
        "conjugate": torch.view_as_complex(base.view(6, 2, 2)).conj(),
        "grad": base.clone().requires_grad_(),
        "with history": base.clone().requires_grad_() * 2,
        "parameter": nn.Parameter(base[1]),
        "large": torch.arange(70_000, dtype=torch.int32) + seed,
    }


def arrived_zoo(seed: int) -> dict[str, Any]:
    zoo = tensor_zoo(seed)
    for key in ("grad", "with history", "parameter"):
        zoo[key] = zoo[key].detach()
    return zoo


def plain_zoo(seed: int) -> dict[Any, Any]:
    return {
        "numbers": [None, True, seed, -(2**70), 1.5, 2j, float("inf")],
        "texts": ["é", b"\x00\xff", bytearray(b"ab"), ""],
        "containers": (1, [2, (3,)], {4}, frozenset({5}), OrderedDict(b=1, a=2), [], {}, ()),
        7: {None: 1, (1, 2): 2},
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
    }


OVER = (
    pytest.param("queue", marks=pytest.mark.over("shared memory")),
    "connections",
    pytest.param("route", marks=pytest.mark.over("connections")),
)


@contextlib.contextmanager
def own_group(over: str = "queue", **kwargs: Any) -> Iterator[GroupCoordinator]:
    """A group with its own process groups, for tests that make it fail. All ranks must enter it. `over`: "queue"
    (shared memory), "connections", or "route" (not all ranks are connected)."""
    world = ps.get_world_group()
    with pytest.MonkeyPatch.context() as patch, as_too_many_to_mesh() if over == "route" else contextlib.nullcontext():
        if over != "queue":
            patch.setenv(settings.SHARED_MEMORY.name, "off")
        group = group_of([world.ranks], DEADLINE_S - 5, **kwargs)
    assert group.cpu_group is not world.cpu_group
    assert over == "queue" or group.route.communicators[0].name != "shared_memory"
    try:
        yield group
    finally:
        world.barrier()
        destroy(group)


@contextlib.contextmanager
def metadata_limit(limit_bytes: int) -> Iterator[None]:
    os.environ[settings.MAX_METADATA_BYTES.name] = str(limit_bytes)
    try:
        yield
    finally:
        del os.environ[settings.MAX_METADATA_BYTES.name]


def check_usable(group: GroupCoordinator) -> None:
    size, rank = group.world_size, group.rank_in_group
    assert group.all_gather_object(("here", rank)) == [("here", other) for other in range(size)]
    assert group.all_reduce(torch.ones(3)).tolist() == [size] * 3
    incoming = group.irecv_object()
    group.send_object([rank, torch.full((4,), rank)])
    assert same(incoming.wait(), [(rank - 1) % size, torch.full((4,), (rank - 1) % size)])
    assert group.broadcast_object(rank, size - 1) == size - 1


def broadcast_every_source() -> None:
    group = ps.get_world_group()
    for src in range(group.world_size):
        is_src = group.rank_in_group == src
        for seed, (make, arrived) in enumerate([(tensor_zoo, arrived_zoo), (plain_zoo, plain_zoo)]):
            mine = make(10 * src + seed) if is_src else "what the others pass is ignored"
            got = group.broadcast_object(mine, src)
            if is_src:
                assert got is mine
            else:
                assert same(got, arrived(10 * src + seed))
                for tensor in tensors_in(got):
                    assert tensor.is_contiguous()
                    assert not tensor.requires_grad


@WORLD_SIZES
def test_broadcast_object_from_every_source(pools: Pools, world_size: int) -> None:
    pools(world_size).run(broadcast_every_source, tp=1, timeout_s=DEADLINE_S)


def broadcast_sizes() -> list[int]:
    group = ps.get_world_group()
    flags = [torch.tensor(i) for i in range(5)]
    transfers: dict[int, int] = {}

    def last_number() -> int:
        return max((each.sequence for each in group.route.operations()), default=0)

    for src in range(group.world_size):
        is_src = group.rank_in_group == src
        for size in [*range(FRAME_BYTES - 100, FRAME_BYTES), 1 << 20]:
            before = last_number()
            assert group.broadcast_object("x" * size if is_src else None, src) == "x" * size
            taken = last_number() - before
            assert transfers.setdefault(size, taken) == taken
        for size in range(FRAME_BYTES - 200, FRAME_BYTES - 50, 4):
            value = ["y" * size, *flags]
            assert same(group.broadcast_object(value if is_src else None, src), value)
    return list(transfers.values())


@WORLD_SIZES
def test_broadcast_object_around_the_frame_size(pools: Pools, world_size: int) -> None:
    for transfers in pools(world_size).run(broadcast_sizes, tp=1, timeout_s=DEADLINE_S):
        assert transfers == sorted(transfers)
        assert {*transfers} in ({1, 2}, {1})


def broadcast_in_pipeline_groups() -> None:
    group = ps.get_pp_group()
    assert group.ranks in ([0, 2], [1, 3])
    for src in range(2):
        assert group.broadcast_object(("from", group.rank), src) == ("from", group.ranks[src])
    with pytest.raises(ps.InvalidArgumentError, match=r"must be a rank in the group, 0 … 1, but is 2"):
        group.broadcast_object("x", 2)
    with pytest.raises(ps.InvalidArgumentError, match="a rank can't send to itself"):
        group.send_object("x", group.rank_in_group)
    check_usable(group)


def test_source_is_a_rank_in_the_group(pools: Pools) -> None:
    pools(4).run(broadcast_in_pipeline_groups, tp=2, pp=2, timeout_s=DEADLINE_S)


def alone() -> None:
    group = ps.get_tp_group()
    value = [{"a": 1}]
    assert group.world_size == 1
    assert group.broadcast_object(value) is value
    assert group.broadcast_object_list(value) is value
    assert group.all_gather_object(value)[0] is value
    assert group.broadcast_flag(True) is True
    assert group.all_sum(3) == 3
    for call in (group.send_object, group.isend_object):
        with pytest.raises(ps.InvalidArgumentError, match="a rank can't send to itself"):
            call(1)
    with pytest.raises(ps.InvalidArgumentError, match="must be a rank in the group"):
        group.broadcast_object(1, src=1)


def test_a_group_of_one_rank_sends_nothing(pools: Pools) -> None:
    pools(2).run(alone, tp=1, timeout_s=DEADLINE_S)


def broadcast_lists() -> None:
    group = ps.get_world_group()
    rank, size = group.rank_in_group, group.world_size
    for src in range(size):
        mine: list[Any] = [src, torch.full((3,), src), {"k": [src]}] if rank == src else [None, None, None]
        items = list(mine)
        assert group.broadcast_object_list(mine, src) is mine
        assert same(mine, [src, torch.full((3,), src), {"k": [src]}])
        if rank == src:
            assert all(map(lambda x, y: x is y, mine, items))
    short: list[Any] = [0] * (3 if rank == 0 else 2)
    if rank == 0:
        group.broadcast_object_list(short, 0)
    else:
        with pytest.raises(ps.InvalidArgumentError, match="must be a list as long as rank 0's, 3, but has 2"):
            group.broadcast_object_list(short, 0)
    check_usable(group)
    no_list: Any = (1, 2)
    if rank == 0:
        with pytest.raises(ps.InvalidArgumentError, match="an object list must be a list, but is a tuple"):
            group.broadcast_object_list(no_list, 0)
    else:
        with pytest.raises(ps.RemoteError, match=r"rank 0 .* an object list must be a list, but is a tuple"):
            group.broadcast_object_list([0, 0], 0)
    if rank != 0:
        with pytest.raises(ps.InvalidArgumentError, match="must be a list, but is a tuple"):
            group.broadcast_object_list(no_list, 0)
    check_usable(group)


@WORLD_SIZES
def test_broadcast_object_list(pools: Pools, world_size: int) -> None:
    pools(world_size).run(broadcast_lists, tp=1, timeout_s=DEADLINE_S)


def flags_and_sums() -> None:
    group = ps.get_world_group()
    rank, size = group.rank_in_group, group.world_size
    for src in range(size):
        for flag in (True, False):
            assert group.broadcast_flag(flag if rank == src else not flag, src) is flag
    total = group.all_sum(2**60 + rank)
    assert total == size * 2**60 + sum(range(size))
    assert type(total) is int
    numbers = [0.1, 1e16, -1e16, 0.3][:size]  # so that the sum depends on the order
    assert group.all_sum(numbers[rank]) == sum(numbers)
    assert type(group.all_sum(0.5)) is float
    assert group.all_sum(rank == 0) == 1


@WORLD_SIZES
def test_broadcast_flag_and_all_sum(pools: Pools, world_size: int) -> None:
    pools(world_size).run(flags_and_sums, tp=1, timeout_s=DEADLINE_S)


def all_gather_everything() -> None:
    group = ps.get_world_group()
    rank, size = group.rank_in_group, group.world_size
    rounds: list[Callable[[int], Any]] = [
        lambda r: r,
        lambda r: [None, "x" * 5000, {"t": torch.full((r + 1, 2), r)}, list(range(3000))][r],
        lambda r: tensor_zoo(r) if r % 2 else plain_zoo(r),
        lambda r: torch.empty(0) if r else torch.ones(2, dtype=torch.bfloat16),
        lambda r: "y" * (1 << 20) if r == size - 1 else b"",
    ]
    for shift in range(size):
        for make in rounds:
            mine = make((rank + shift) % size)
            got = group.all_gather_object(mine)
            assert got[rank] is mine
            for src in range(size):
                of = (src + shift) % size
                arrived = arrived_zoo(of) if make is rounds[2] and of % 2 else make(of)
                assert src == rank or same(got[src], arrived)


@WORLD_SIZES
def test_all_gather_object_of_different_kinds(pools: Pools, world_size: int) -> None:
    pools(world_size).run(all_gather_everything, tp=1, timeout_s=DEADLINE_S)


def ring() -> None:
    group = ps.get_world_group()
    rank, size = group.rank_in_group, group.world_size
    before = (rank - 1) % size
    incoming = group.irecv_object()
    group.send_object(tensor_zoo(rank))
    got = incoming.wait()
    assert same(got, arrived_zoo(before))
    assert incoming.wait() is got
    assert incoming.is_completed()
    for src in range(size):
        for dst in range(size):
            if rank == src != dst:
                group.send_object([src, dst, "x" * 4100], dst)
            elif rank == dst != src:
                assert group.recv_object(src) == [src, dst, "x" * 4100]


@WORLD_SIZES
def test_send_and_recv_object(pools: Pools, world_size: int) -> None:
    pools(world_size).run(ring, tp=1, timeout_s=DEADLINE_S)


def many_in_flight() -> None:
    """Long metadata needs a second transfer, which must not match a receive for another frame."""
    group = ps.get_world_group()
    values = [["x" * size, torch.full((size,), size)] for size in (1, 5000, 0, 9000, 4100, 3)]
    if group.rank_in_group == 0:
        sends = [group.isend_object(value, 1) for value in values]
        for send in reversed(sends):
            send.wait()
    else:
        receives = [group.irecv_object(0) for _ in values]
        for index in (3, 5, 0, 1, 4, 2):
            assert same(receives[index].wait(), values[index])
        for receive, value in zip(receives, values, strict=True):
            assert receive.is_completed()
            assert same(receive.wait(), value)


def test_several_objects_in_flight_are_waited_out_of_order(pools: Pools) -> None:
    pools(2).run(many_in_flight, tp=1, timeout_s=DEADLINE_S)


def mixed_sender(group: GroupCoordinator, peer: int) -> None:
    first = group.isend_object("x" * 6000, peer)
    second = group.isend_tensor_dict(tensor_zoo(1), peer)
    group.send(torch.arange(5), peer)
    third = group.isend_object([torch.ones(3)], peer)
    group.send(torch.zeros(2, 2, dtype=torch.bool), peer)
    for send in (third, first, second):
        send.wait()
    group.send_tensor_dict({"last": torch.ones(1)}, peer)


def mixed_receiver(group: GroupCoordinator, peer: int) -> None:
    first = group.irecv_object(peer)
    tensor = group.recv([5], torch.int64, peer)
    second = group.irecv_tensor_dict(peer)
    third = group.irecv_object(peer)
    assert third.is_completed() in (True, False)
    assert same(tensor, torch.arange(5))
    assert same(group.recv([2, 2], torch.bool, peer), torch.zeros(2, 2, dtype=torch.bool))
    assert same(third.wait(), [torch.ones(3)])
    assert same(second.wait(), arrived_zoo(1))
    assert first.wait() == "x" * 6000
    assert same(group.recv_tensor_dict(peer), {"last": torch.ones(1)})


def mixed() -> None:
    group = ps.get_world_group()
    peer = group.rank_in_group ^ 1
    for turn in range(2):
        (mixed_sender if group.rank_in_group % 2 == turn else mixed_receiver)(group, peer)
    check_usable(group)


@pytest.mark.parametrize("world_size", [2, 4])
def test_objects_tensors_and_dicts_between_the_same_ranks(pools: Pools, world_size: int) -> None:
    pools(world_size).run(mixed, tp=1, timeout_s=DEADLINE_S)


def receive_leaves_nothing_behind() -> None:
    group = ps.get_world_group()
    if group.rank_in_group == 0:
        for _ in range(2):
            group.send_object([torch.ones(100)], 1)
        return
    received = group.recv_object(0)
    handle = group.irecv_object(0)
    received_later = handle.wait()
    watched = [weakref.ref(received[0]), weakref.ref(received_later[0])]
    del received, received_later, handle
    gc.collect()
    assert [tensor() for tensor in watched] == [None, None]


def test_a_received_object_lives_as_long_as_its_receiver_keeps_it(pools: Pools) -> None:
    pools(2).run(receive_leaves_nothing_behind, tp=1, timeout_s=DEADLINE_S)


def calls_of_every_kind(group: GroupCoordinator, src: int) -> list[Callable[[Any], Any]]:
    rank, size = group.rank_in_group, group.world_size

    def to_each(obj: Any) -> Any:
        if rank != src:
            return group.recv_object(src)
        errors: list[Exception] = []
        for dst in range(size):
            if dst != src:
                try:
                    group.send_object(obj, dst)
                except Exception as error:
                    errors.append(error)
        if errors:
            assert len(errors) == size - 1
            raise errors[0]
        return obj

    def in_a_list(obj: Any) -> Any:
        return group.broadcast_object_list([obj], src)[0]

    def in_all_gather(obj: Any) -> Any:
        return group.all_gather_object(obj if rank == src else ("short", "x" * 5000)[src % 2])[src]

    def in_a_dict(obj: Any) -> Any:
        return group.broadcast_tensor_dict({"value": obj}, src)["value"]

    return [lambda obj: group.broadcast_object(obj, src), to_each, in_a_list, in_all_gather, in_a_dict]


def refused_everywhere(obj: Any, error: type[Exception], match: str) -> None:
    group = ps.get_world_group()
    for src in range(group.world_size):
        for call in calls_of_every_kind(group, src):
            is_src = group.rank_in_group == src
            with pytest.raises(error if is_src else ps.RemoteError, match=match) as raised:
                call(obj if is_src else None)
            if not is_src:
                assert f"rank {src} of group" in str(raised.value)
                assert isinstance(raised.value, ps.RemoteError)
                assert raised.value.rank == src
            assert same(call([src, torch.ones(2)]), [src, torch.ones(2)])
    check_usable(group)


def refuse_types() -> None:
    deep = {"requests": [1, {"callback": note_load}]}
    refused_everywhere(deep, ps.MessageEncodeError, r"value at .*\['requests'\]\[1\]\['callback'\] is a function")
    refused_everywhere(
        [Custom(1)], ps.MessageEncodeError, r"value at .*\[0\] is a tests\.contract\.test_objects\.Custom"
    )
    refused_everywhere(torch.ones(2).to_sparse(), ps.MessageEncodeError, "only dense strided tensors can be sent")


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_type_that_does_not_travel_raises_on_every_rank(pools: Pools, world_size: int) -> None:
    pools(world_size).run(refuse_types, tp=1, timeout_s=DEADLINE_S)


def refuse_for_lack_of_memory() -> None:
    unreal = torch.zeros(1).expand(1 << 45)  # 128 TiB if made contiguous
    refused_everywhere({"unreal": unreal}, RuntimeError, "memory")


def test_whatever_fails_while_encoding_is_told_to_the_readers(pools: Pools) -> None:
    pools(2).run(refuse_for_lack_of_memory, tp=1, timeout_s=DEADLINE_S)


def refuse_long_metadata() -> None:
    group = ps.get_world_group()
    with metadata_limit(10_000):
        assert group.broadcast_object("x" * 9_900) == "x" * 9_900
        bulk = torch.ones(20_000)
        assert same(group.broadcast_object(bulk), bulk)
        refused_everywhere("x" * 10_000, ps.UsageError, "at most 10000 bytes")
        tensors = [torch.tensor(number) for number in range(20)]
        told = attempt(group.broadcast_object, ["x" * 10_000, *tensors])
        room = 20_000 - int(re.search(r"but is (\d+)", told.text)[1])  # type: ignore[index]
        fits, too_long = (["x" * size, *tensors] for size in (room, room + 1))
        assert same(group.broadcast_object(fits), fits)
        refused_everywhere(too_long, ps.UsageError, "at most 10000 bytes")
    with metadata_limit(64):
        with pytest.raises(ps.UsageError if group.is_first_rank else ps.RemoteError, match="at most 64 bytes"):
            group.broadcast_object("x" * 100)
        check_usable(group)


def test_metadata_over_the_limit_is_refused_by_the_sender(pools: Pools) -> None:
    pools(2).run(refuse_long_metadata, tp=1, timeout_s=DEADLINE_S)


def refuse_between_others() -> None:
    group = ps.get_world_group()
    if group.rank_in_group == 0:
        before = group.isend_object("x" * 5000, 1)
        with pytest.raises(ps.MessageEncodeError, match="is a function"):
            group.isend_object(note_load, 1)
        after = group.isend_object("y" * 5000, 1)
        after.wait()
        before.wait()
    else:
        before, wrong, after = (group.irecv_object(0) for _ in range(3))
        assert after.wait() == "y" * 5000
        for _ in range(2):
            with pytest.raises(ps.RemoteError, match=r"rank 0 of group .* is a function"):
                wrong.wait()
        assert before.wait() == "x" * 5000
    check_usable(group)


def test_an_object_that_fails_between_others_fails_alone(pools: Pools) -> None:
    pools(2).run(refuse_between_others, tp=1, timeout_s=DEADLINE_S)


def refuse_on_several() -> None:
    group = ps.get_world_group()
    bad = group.rank_in_group in (1, 2)
    expected = ps.MessageEncodeError if bad else ps.RemoteError
    with pytest.raises(expected, match="is a function" if bad else "rank 1 of group"):
        group.all_gather_object([note_load, torch.ones(3)] if bad else [torch.ones(2), "x" * 5000])
    check_usable(group)


def test_all_gather_object_where_two_ranks_fail(pools: Pools) -> None:
    pools(4).run(refuse_on_several, tp=1, timeout_s=DEADLINE_S)


def pickled_values_travel(group: GroupCoordinator) -> None:
    value = {"custom": [Custom({"a": 1})], "type": Custom, "tensor": torch.ones(2)}
    for src in range(group.world_size):
        for call in calls_of_every_kind(group, src):
            assert same(call(value), value)


def pickle_where_all_allow_it() -> None:
    ps.destroy_model_parallel()
    try:
        ps.initialize_model_parallel(2, allow_pickle=True)
        pickled_values_travel(ps.get_tp_group())
        with pytest.raises(
            ps.MessageEncodeError if ps.get_tp_group().is_first_rank else ps.RemoteError, match="can't be pickled"
        ):
            ps.get_tp_group().broadcast_object(lambda: 1)
        pickled_values_travel(ps.get_tp_group())
    finally:
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(2)
    with pytest.raises(ps.MessageEncodeError if ps.get_tp_group().is_first_rank else ps.RemoteError):
        ps.get_tp_group().broadcast_object(Custom(1))


def test_initialize_model_parallel_allows_pickle(pools: Pools) -> None:
    pools(2).run(pickle_where_all_allow_it, tp=2, timeout_s=DEADLINE_S)


def pickle_where_the_reader_does_not() -> None:
    sender = ps.get_world_group().rank_in_group == 0
    for way in range(3):
        with own_group(allow_pickle=sender) as group:
            call = [
                lambda obj: group.broadcast_object(obj, 0),
                lambda obj: group.send_object(obj, 1) if sender else group.recv_object(0),
                lambda obj: group.all_gather_object(obj if sender else 1),
            ][way]  # fmt: skip
            if sender:
                call(Bomb())
            else:
                with pytest.raises(ps.MessageDecodeError, match=r"rank 0 .*pickled value") as raised:
                    call(None)
                assert raised.value.suspect_ranks == (0,)
                with pytest.raises(ps.GroupFailedError):
                    group.barrier()
    assert LOADED == [], "a refused pickle was loaded"


def test_a_pickled_value_is_not_loaded_where_the_reader_did_not_allow_it(pools: Pools) -> None:
    pools(2).run(pickle_where_the_reader_does_not, tp=1, timeout_s=DEADLINE_S)


def check_failed(group: GroupCoordinator, first: BaseException) -> None:
    x = torch.ones(2)
    for call in (
        lambda: group.all_reduce(x),
        lambda: group.send(x),
        lambda: group.recv([2], torch.float32),
        lambda: group.broadcast_object(1),
        lambda: group.all_gather_object(1),
        lambda: group.isend_object(1),
        lambda: group.irecv_object(),
        lambda: group.recv_tensor_dict(),
        lambda: group.broadcast_flag(True),
        lambda: group.barrier(),
    ):
        started = time.monotonic()
        with pytest.raises(ps.GroupFailedError, match="failed earlier") as raised:
            call()
        assert raised.value.__cause__ is first
        assert time.monotonic() - started < AT_ONCE_S


def check_decode_error(error: BaseException, group: GroupCoordinator, src: int) -> None:
    assert isinstance(error, ps.MessageDecodeError)
    assert f"rank {src} of group {group.unique_name!r}" in str(error)
    assert error.group == group.unique_name
    assert error.rank == group.rank_in_group
    assert error.suspect_ranks == (group.ranks[src],)


def a_thousand_in_flight() -> None:
    """More than the interpreter's recursion limit, and more than a sender buffers."""
    group = ps.get_world_group()
    count = sys.getrecursionlimit() + 200
    if group.rank_in_group == 0:
        sends = [group.isend_object(("number", i), 1) for i in range(count)]
        for send in sends:
            send.wait()
            send.wait()
            assert send.is_completed()
    else:
        receives = [group.irecv_object(0) for _ in range(count)]
        assert receives[-1].wait() == ("number", count - 1)
        assert all(receive.is_completed() for receive in receives)
        assert [receive.wait() for receive in receives] == [("number", i) for i in range(count)]


def test_a_thousand_objects_in_flight(pools: Pools) -> None:
    pools(2).run(a_thousand_in_flight, tp=1, timeout_s=DEADLINE_S)


def wait_after_destroy() -> None:
    with own_group() as group:
        incoming = group.irecv_object()
        kept = group
    started = time.monotonic()
    with pytest.raises(ps.GroupDestroyedError):
        incoming.wait()
    with pytest.raises(ps.GroupDestroyedError):
        kept.send_object(1)
    assert time.monotonic() - started < AT_ONCE_S


def test_waiting_after_the_group_was_destroyed(pools: Pools) -> None:
    pools(2).run(wait_after_destroy, tp=1, timeout_s=DEADLINE_S)


class FakeWork:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.waited_by: list[threading.Thread] = []
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.waited_by.append(threading.current_thread())
        assert self.done.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error


def handle_of(work: FakeWork, device: str) -> Handle:
    context = GroupContext("fake:0", (0, 1), 0, torch.device("cpu"), Timeout(DEADLINE_S))
    route = Route(context, (), {})
    return Handle(route, route.note("irecv_", None), work, torch.empty(1, device=device))


def until_completed(handle: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not handle.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_handle_of_cpu_tensors_completes_without_wait() -> None:
    work = FakeWork()
    handle = handle_of(work, "cpu")
    assert not handle.is_completed()
    work.done.set()
    until_completed(handle)
    handle.wait()
    handle.wait()
    assert len(work.waited_by) == 1
    assert work.waited_by[0] is not threading.main_thread()


def test_a_handle_of_device_tensors_is_waited_for_by_its_caller() -> None:
    """A wait for NCCL makes the calling thread's stream wait, so no other thread may wait instead."""
    work = FakeWork()
    handle = handle_of(work, "meta")
    assert not handle.is_completed()
    work.done.set()
    assert not handle.is_completed()
    assert work.waited_by == []
    handle.wait()
    assert work.waited_by == [threading.main_thread()]
    assert handle.is_completed()


def test_a_handle_keeps_its_error() -> None:
    work = FakeWork()
    work.error = RuntimeError("Connection closed by peer")
    work.done.set()
    handle = handle_of(work, "cpu")
    until_completed(handle)
    for _ in range(2):
        with pytest.raises(ps.PeerDiedError) as raised:
            handle.wait()
        assert raised.value.__cause__ is work.error
    assert handle.is_completed()
    assert len(work.waited_by) == 1


def on_two_groups_of_the_same_ranks() -> None:
    world, tp = ps.get_world_group(), ps.get_tp_group()
    assert tp.device_group is world.device_group, "equal rank sets share a process group"
    if tp.rank_in_group == 0:
        for handle in [world.isend_object("world", 1), tp.isend_object("tp", 1)]:
            handle.wait()
    else:
        assert tp.recv_object(0) == "tp"
        assert world.recv_object(0) == "world"


def test_groups_that_share_process_groups_keep_their_messages_apart(pools: Pools) -> None:
    pools(2).run(on_two_groups_of_the_same_ranks, tp=2, timeout_s=DEADLINE_S)


def on_groups_made_in_turns() -> None:
    ps.init_distributed_environment()
    world = ps.get_world_group()
    for _ in range(3):
        world.make_sub_group([0, 1])
    ps.initialize_model_parallel(2)
    tp = ps.get_tp_group()
    for _ in range(3):
        sub = world.make_sub_group([2, 3])
        if sub is not None and sub.rank_in_group == 0:
            for handle in [tp.isend_object("tp"), sub.isend_object("sub")]:
                handle.wait()
        elif sub is not None:
            assert (sub.recv_object(), tp.recv_object()) == ("sub", "tp")
    ps.destroy_distributed_environment()


def test_groups_made_in_turns_keep_their_messages_apart(pools: Pools) -> None:
    pools(4).run(on_groups_made_in_turns, timeout_s=DEADLINE_S)


def plain_tensors_without_waiting() -> None:
    group = ps.get_tp_group()
    x = torch.arange(6.0).view(2, 3).t()
    if group.rank_in_group == 0:
        sent = [group.isend(x * n) for n in range(3)]
        for handle in sent:
            handle.wait()
    else:
        handles = [group.irecv((3, 2), torch.float32) for _ in range(3)]
        for n, handle in enumerate(handles):
            assert torch.equal(handle.wait(), x * n)
            assert handle.wait() is handle.wait()
            assert handle.is_completed()
    with pytest.raises(ps.InvalidArgumentError, match="a rank can't send to itself"):
        group.isend(x, group.rank_in_group)
    with pytest.raises(ps.InvalidArgumentError, match="size of irecv"):
        group.irecv(3, torch.float32)  # type: ignore[arg-type]


def test_tensors_without_waiting(pools: Pools) -> None:
    pools(2).run(plain_tensors_without_waiting, tp=2, timeout_s=DEADLINE_S)


def after_the_end() -> None:
    tp, pp = ps.get_tp_group(), ps.get_pp_group()
    assert pp.world_size == 1
    assert tp.world_size == 2
    ps.destroy_model_parallel()
    for group in (tp, pp):
        for call in (
            lambda group=group: group.all_reduce(torch.ones(1)),
            lambda group=group: group.barrier(),
            lambda group=group: group.broadcast_object(1),
            lambda group=group: group.all_gather_object(1),
            lambda group=group: group.broadcast_tensor_dict({}),
            lambda group=group: group.device_group,
            lambda group=group: group.cpu_group,
        ):
            with pytest.raises(ps.GroupDestroyedError):
                call()
    ps.initialize_model_parallel(2)


def test_nothing_goes_on_after_destroy(pools: Pools) -> None:
    pools(2).run(after_the_end, tp=2, timeout_s=DEADLINE_S)
