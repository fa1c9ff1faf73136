from __future__ import annotations

import contextlib
import functools
import gc
import re
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
from device_communicators import Traffic
from device_communicators.cpu import native
from parallel_state import GroupCoordinator
from tests.contract import test_objects
from tests.contract.test_objects import (
    BODY_TAG,
    DEADLINE_S,
    FRAME_BYTES,
    WORLD_SIZES,
    Pools,
    arrived_zoo,
    check_failed,
    check_usable,
    own_group,
    plain_zoo,
    same,
    tensor_zoo,
    tensors_in,
    until_completed,
)
from tests.helpers.doors import call_op, destroy, group_of

LARGE = 2 << 20  # 8 MB of float32, more than any socket buffers


def dict_of(seed: int) -> dict[str, Any]:
    return {**tensor_zoo(seed), "inner": {"dict": {"deep": torch.full((3, 2), seed)}, "n": seed}, "none": None}


def arrived_dict_of(seed: int) -> dict[str, Any]:
    return {**dict_of(seed), **arrived_zoo(seed)}


@contextlib.contextmanager
def counted(group: GroupCoordinator) -> Iterator[dict[str, Traffic]]:
    before = {name: (traffic.calls, traffic.bytes) for name, traffic in group.traffic().items()}
    carried: dict[str, Traffic] = {}
    yield carried
    for name, traffic in group.traffic().items():
        calls, size = before.get(name, (0, 0))
        if traffic.calls > calls:
            carried[name] = Traffic(traffic.calls - calls, traffic.bytes - size)


def broadcast_from_every_source() -> None:
    group = ps.get_world_group()
    for src in range(group.world_size):
        mine = dict_of(src) if group.rank_in_group == src else None
        got = group.broadcast_tensor_dict(mine, src)
        if mine is not None:
            assert got is mine
        else:
            assert same(got, arrived_dict_of(src))
            assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors_in(got))
        ordered = OrderedDict(b=torch.ones(1), a=torch.zeros(1))
        assert same(group.broadcast_tensor_dict(ordered if mine is not None else None, src), ordered)
        assert same(group.broadcast_tensor_dict(plain_zoo(src) if mine is not None else None, src), plain_zoo(src))
        assert group.broadcast_tensor_dict({} if mine is not None else None, src) == {}


@WORLD_SIZES
def test_broadcast_tensor_dict_from_every_source(pools: Pools, world_size: int) -> None:
    pools(world_size).run(broadcast_from_every_source, tp=1, timeout_s=DEADLINE_S)


def send_round() -> None:
    group = ps.get_world_group()
    rank, size = group.rank_in_group, group.world_size
    before = (rank - 1) % size
    sending = group.isend_tensor_dict(dict_of(rank))
    assert same(group.recv_tensor_dict(), arrived_dict_of(before))
    sending.wait()
    incoming = group.irecv_tensor_dict()
    group.send_tensor_dict(dict_of(rank))
    assert same(incoming.wait(), arrived_dict_of(before))
    for src in range(size):
        for dst in range(size):
            if rank == src != dst:
                group.send_tensor_dict({"from": src, "x": torch.full((dst + 1,), src)}, dst)
            elif rank == dst != src:
                assert same(group.recv_tensor_dict(src), {"from": src, "x": torch.full((dst + 1,), src)})


@WORLD_SIZES
def test_send_and_recv_tensor_dict(pools: Pools, world_size: int) -> None:
    pools(world_size).run(send_round, tp=1, timeout_s=DEADLINE_S)


def through_the_stages() -> None:
    pp = ps.get_pp_group()
    if pp.is_first_rank:
        hidden = torch.full((4, 8), float(pp.rank))
    else:
        hidden = pp.recv_tensor_dict()["hidden"]
    hidden = hidden + 100
    if not pp.is_last_rank:
        pp.send_tensor_dict({"hidden": hidden})
    else:
        assert torch.equal(hidden, torch.full((4, 8), pp.first_global_rank + 100.0 * pp.world_size))


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 4)])
def test_default_stages_of_a_pipeline(pools: Pools, tp: int, pp: int) -> None:
    pools(4).run(through_the_stages, tp=tp, pp=pp, timeout_s=DEADLINE_S)


def without_empties() -> None:
    group = ps.get_world_group()
    full = torch.ones(3, 5)
    mine = {
        "a": torch.empty(0),
        "full": full,
        "b": torch.empty(3, 0, 2, dtype=torch.bool),
        "c": torch.empty(0, 1 << 40, dtype=torch.bfloat16),
    }
    rank = group.rank_in_group
    for way in range(2):
        with counted(group) as carried:
            if way == 1:
                got = group.broadcast_tensor_dict(mine if rank == 0 else None)
            elif rank == 0:
                group.send_tensor_dict(mine, 1)
                got = mine
            else:
                got = group.recv_tensor_dict(0)
        assert same(got, mine)
        assert sum(traffic.bytes for traffic in carried.values()) == FRAME_BYTES + full.nbytes
    nothing = {"a": torch.empty(0, 2), "b": torch.empty(2, 0)}
    with counted(group) as carried:
        assert same(group.broadcast_tensor_dict(nothing if rank == 0 else None), nothing)
    assert sum(traffic.bytes for traffic in carried.values()) == FRAME_BYTES


def test_empty_tensors_are_not_sent(pools: Pools) -> None:
    pools(2).run(without_empties, tp=1, timeout_s=DEADLINE_S)


def not_a_dict() -> None:
    group = ps.get_world_group()
    rank = group.rank_in_group
    wrong: list[Any] = [[torch.ones(2)], torch.ones(2), None, "text", 3]
    for value in wrong:
        match = rf"a tensor dict must be a dict, but is a {type(value).__name__}"
        for call in (
            lambda value=value: group.broadcast_tensor_dict(value, 0),
            lambda value=value: group.send_tensor_dict(value, 1) if rank == 0 else group.recv_tensor_dict(0),
            lambda value=value: group.isend_tensor_dict(value, 1) if rank == 0 else group.irecv_tensor_dict(0).wait(),
        ):
            if rank == 0:
                with pytest.raises(ps.InvalidArgumentError, match=match):
                    call()
            else:
                with pytest.raises(ps.RemoteError, match=match):
                    call()
    check_usable(group)


def test_what_is_no_dict_raises_on_every_rank(pools: Pools) -> None:
    pools(2).run(not_a_dict, tp=1, timeout_s=DEADLINE_S)


def a_dict_alone() -> None:
    group = ps.get_tp_group()
    mine = {"x": torch.ones(2, requires_grad=True), "n": 1}
    assert group.broadcast_tensor_dict(mine) is mine
    spec = ps.TensorDictSpec.of(mine)
    assert group.broadcast_tensor_dict(mine, spec=spec) is mine
    wrong: Any = [1]
    with pytest.raises(ps.InvalidArgumentError, match="must be a dict, but is a list"):
        group.broadcast_tensor_dict(wrong)
    assert group.send_tensor_dict(mine) is mine and group.recv_tensor_dict() is None
    group.isend_tensor_dict(mine).wait()
    assert group.irecv_tensor_dict().wait() is None
    with pytest.raises(ps.InvalidArgumentError, match="a rank can't send to itself"):
        group.isend_object(mine)


def test_a_group_of_one_rank(pools: Pools) -> None:
    pools(2).run(a_dict_alone, tp=1, timeout_s=DEADLINE_S)


def sliced_dict(tp_rank: int) -> dict[str, Any]:
    base = torch.arange(24.0).view(6, 4)
    own = base + 1000 * (tp_rank + 1)
    return {
        "even": base,
        "odd": base[:, :3][:5],
        "transposed": base.t(),
        "bool": base > 7,
        "bfloat16": base.bfloat16(),
        "complex": torch.view_as_complex(base.view(6, 2, 2)).conj(),
        "empty": torch.empty(0, 4),
        "0-d": torch.tensor(5),
        "inner": {"tensor": base[2:]},
        "grad": base.clone().requires_grad_(),
        "number": 3,
        "own_plain": own,
        "own_grad": own.clone().requires_grad_(),
        "own_parameter": nn.Parameter(own),
        "own_conjugate": torch.view_as_complex(own.view(6, 2, 2)).conj(),
        "own_0-d": torch.tensor(tp_rank),
        "own_odd": own.view(-1)[:5],
    }


OWN = {key: False for key in sliced_dict(0) if key.startswith("own_")}


def arrived_sliced_dict(tp_rank: int) -> dict[str, Any]:
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in sliced_dict(tp_rank).items()}


def bytes_sent(values: dict[str, Any]) -> int:
    total = 0
    for key, value in values.items():
        for tensor in tensors_in(value):
            cut = key not in OWN and tensor.numel() % 2 == 0
            total += tensor.nbytes // (2 if cut else 1)
    return total


def send_slices() -> None:
    tp, pp = ps.get_tp_group(), ps.get_pp_group()
    mine = sliced_dict(tp.rank_in_group)
    for blocking in (True, False):
        with counted(pp) as carried:
            if pp.is_first_rank:
                if blocking:
                    pp.send_tensor_dict(mine, None, tp, all_gather_tensors={**OWN, "even": True, "absent": False})
                else:
                    pp.isend_tensor_dict(mine, None, tp, all_gather_tensors=OWN).wait()
            elif blocking:
                assert same(pp.recv_tensor_dict(None, tp), arrived_sliced_dict(tp.rank_in_group))
            else:
                assert same(pp.irecv_tensor_dict(None, tp).wait(), arrived_sliced_dict(tp.rank_in_group))
        (operation,) = carried
        assert operation == ("send_message" if pp.is_first_rank else "recv_message")
        assert carried[operation].bytes == FRAME_BYTES + bytes_sent(mine)
    assert same(sliced_dict(tp.rank_in_group), mine), "the sender's dict was changed"


def send_slices_of_long_metadata() -> None:
    """The marks of sliced tensors are the end of the metadata, here beyond the message's first part (the frame)."""
    tp, pp = ps.get_tp_group(), ps.get_pp_group()
    mine = {"text": "x" * 4050, **{f"t{i}": torch.arange(i) for i in range(20)}}
    if pp.is_first_rank:
        pp.send_tensor_dict(mine, 1, tp)
    else:
        assert same(pp.recv_tensor_dict(0, tp), mine)


def send_to_a_group_that_need_not_gather() -> None:
    """The head says which tensors are sliced, so a receiver with an all-gather group also accepts whole ones."""
    tp, pp, whole = ps.get_tp_group(), ps.get_pp_group(), {"x": torch.arange(8.0), "odd": torch.arange(3)}
    odd = {"odd": torch.arange(3), "scalar": torch.tensor(2)}
    if pp.is_first_rank:
        pp.send_tensor_dict(whole)
        pp.send_tensor_dict(odd, None, tp)
        pp.send_tensor_dict(whole, None, tp, all_gather_tensors={"x": False})
        return
    assert same(pp.recv_tensor_dict(None, tp), whole)
    assert same(pp.recv_tensor_dict(), odd)
    assert same(pp.recv_tensor_dict(), whole)


@pytest.mark.parametrize("body", [send_slices, send_slices_of_long_metadata, send_to_a_group_that_need_not_gather])
def test_send_allgather(pools: Pools, body: Callable[[], None]) -> None:
    pools(4).run(body, tp=2, pp=2, timeout_s=DEADLINE_S)


def slices_without_a_group_to_gather(passed: str) -> None:
    world, tp = ps.get_world_group(), ps.get_tp_group()
    pp = group_of([[0, 2], [1, 3]], DEADLINE_S - 5)
    values = {"x": torch.ones(8), "odd": torch.ones(3)}
    if pp.is_first_rank:
        pp.isend_tensor_dict(values, None, tp).wait()
    else:
        receiving_group = {"none": None, "another": world}[passed]
        with pytest.raises(ps.CollectiveMismatchError, match="divided its tensors among 2 ranks") as raised:
            pp.recv_tensor_dict(None, receiving_group)
        assert {"none": "has no ranks", "another": "has 4 ranks"}[passed] in str(raised.value)
        check_failed(pp, raised.value)
        for size in (4, 3) if pp.context.host_memory.problem else ():  # lets the sender's transfers complete
            pp.cpu_group.recv([torch.empty(4 * size, dtype=torch.uint8)], 0, pp.context.tag(BODY_TAG)).wait()
    world.barrier()
    destroy(pp)
    check_usable(ps.get_pp_group())


@pytest.mark.parametrize("passed", ["none", "another"])
def test_different_all_gather_groups(pools: Pools, passed: str) -> None:
    pools(4).run(slices_without_a_group_to_gather, passed, tp=2, pp=2, timeout_s=DEADLINE_S)


def isend_returns_first() -> None:
    group = ps.get_world_group()
    if group.rank_in_group == 0:
        sending = group.isend_tensor_dict({"large": torch.arange(LARGE), "n": 1}, 1)
        assert not sending.is_completed()
        group.send(torch.ones(1), 1)
        until_completed(sending)
        sending.wait()
        sending.wait()
    else:
        assert same(group.recv([1], torch.float32, 0), torch.ones(1))
        got = group.recv_tensor_dict(0)
        assert same(got, {"large": torch.arange(LARGE), "n": 1})


def irecv_returns_first() -> None:
    group = ps.get_world_group()
    if group.rank_in_group == 0:
        for count in (0, 3):
            group.recv([1], torch.float32, 1)
            for i in range(count):
                group.send_tensor_dict({"large": torch.full((LARGE // 4,), i)}, 1)
    else:
        receives = [group.irecv_tensor_dict(0) for _ in range(3)]
        assert not any(receive.is_completed() for receive in receives)
        group.send(torch.ones(1), 0)
        assert not any(receive.is_completed() for receive in receives)
        group.send(torch.ones(1), 0)
        until_completed(receives[2])
        for i, receive in enumerate(receives):
            assert receive.is_completed()
            got = receive.wait()
            assert same(got, {"large": torch.full((LARGE // 4,), i)})
            assert receive.wait() is got


def dropped_handles() -> None:
    group = ps.get_world_group()
    if group.rank_in_group == 0:
        for i in range(3):
            group.isend_tensor_dict({"i": i, "t": torch.full((LARGE,), i).t()}, 1)
            gc.collect()
        overwritten = [torch.full((LARGE,), -1) for _ in range(3)]
        group.send(overwritten[0][:1], 1)
    else:
        group.irecv_tensor_dict(0)
        gc.collect()
        overwritten = [torch.full((FRAME_BYTES,), 7, dtype=torch.uint8) for _ in range(50)]
        assert overwritten[0][0] == 7
        group.recv([1], torch.int64, 0)
        for i in (1, 2):
            assert same(group.recv_tensor_dict(0), {"i": i, "t": torch.full((LARGE,), i)})
    check_usable(group)


def exchange_both_ways() -> None:
    """Each rank must receive during its own blocking send."""
    group = ps.get_world_group()
    peer = 1 - group.rank_in_group
    incoming = [group.irecv_tensor_dict(peer) for _ in range(2)]
    for _ in incoming:
        group.send_tensor_dict({"large": torch.arange(LARGE)}, peer)
    for handle in incoming:
        assert same(handle.wait(), {"large": torch.arange(LARGE)})


def handles_in_lists() -> None:
    group = ps.get_world_group()
    values = {"x": torch.arange(5), "n": {"deep": torch.ones(2)}}
    if group.rank_in_group == 0:
        for sending in group.isend_tensor_dict(values, 1):
            sending.wait()
    else:
        tensors, handles, postprocess = group.irecv_tensor_dict(0)
        assert tensors == {}
        for handle in handles:
            handle.wait()
        for step in postprocess:
            step()
        assert same(tensors, values)


NON_BLOCKING = [
    isend_returns_first,
    irecv_returns_first,
    dropped_handles,
    exchange_both_ways,
    handles_in_lists,
]


@pytest.mark.parametrize("body", NON_BLOCKING)
def test_non_blocking(pools: Pools, body: Callable[[], None]) -> None:
    pools(2).run(body, tp=1, timeout_s=DEADLINE_S)


def delivered_sends(over: str) -> None:
    count, threads = 20, 3
    with own_group(over) as group:
        if group.rank_in_group == 0:
            alive: list[weakref.ref[Tensor]] = []

            def send() -> None:
                for _ in range(count):
                    sent = torch.full((1 << 18,), 1.0)
                    alive.append(weakref.ref(sent))
                    group.isend_tensor_dict({"x": sent}, 1)

            senders = [threading.Thread(target=send) for _ in range(threads)]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
            assert len(alive) == count * threads
            group.recv([1], torch.float32, 1)
            deadline = time.monotonic() + 5
            while any(sent() is not None for sent in alive) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert sum(sent() is not None for sent in alive) == 0
        else:
            for _ in range(count * threads):
                assert group.recv_tensor_dict(0)["x"].sum() == 1 << 18
            group.send(torch.ones(1), 0)
        check_usable(group)


@pytest.mark.parametrize("over", ["queue", "connections", "route"])
def test_delivered_sends(pools: Pools, over: str) -> None:
    pools(2).run(delivered_sends, over, tp=1, timeout_s=DEADLINE_S)


def flat_dict(seed: int) -> dict[str, Any]:
    base = torch.arange(24.0).view(6, 4) + seed
    return {
        "hidden": base,
        "number": 3,
        "transposed": base.t(),
        "none": None,
        "bool": base > 7,
        "bfloat16": base.bfloat16(),
        "empty": torch.empty(0, 4),
        "0-d": torch.tensor(seed),
        "odd": base.view(-1)[:5],
        "texts": ("a", (b"b", 1.5, True)),
        "grad": base.clone().requires_grad_(),
        "complex": torch.view_as_complex(base.view(6, 2, 2)),
    }


def arrived_flat_dict(seed: int) -> dict[str, Any]:
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in flat_dict(seed).items()}


FLAT_BYTES = sum(tensor.nbytes for tensor in tensors_in(flat_dict(0)))


def exchange_with_spec() -> None:
    group = ps.get_world_group()
    rank, size = group.rank_in_group, group.world_size
    spec = ps.TensorDictSpec.of(flat_dict(0))
    for src in range(size):
        mine = flat_dict(src) if rank == src else None
        with counted(group) as carried:
            got = group.broadcast_tensor_dict(mine, src, spec=spec)
        assert carried == {"broadcast_list": Traffic(1, FRAME_BYTES + FLAT_BYTES)}
        if mine is not None:
            assert got is mine
        else:
            assert same(got, arrived_flat_dict(src))
            assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors_in(got))
    if rank == 0:
        with counted(group) as carried:
            group.send_tensor_dict(flat_dict(7), 1, spec=spec)
        assert carried == {"send_list": Traffic(1, FRAME_BYTES + FLAT_BYTES)}
        group.send_tensor_dict(flat_dict(7), 1)
    elif rank == 1:
        with counted(group) as carried:
            got = group.recv_tensor_dict(0, spec=spec)
        assert carried == {"recv_list": Traffic(1, FRAME_BYTES + FLAT_BYTES)}
        with_metadata = group.recv_tensor_dict(0)
        assert same(got, with_metadata)
        assert same(got, arrived_flat_dict(7))
        assert ps.TensorDictSpec.of(with_metadata) == ps.TensorDictSpec.of(got) == spec


@pytest.mark.parametrize("world_size", [2, 3])
def test_with_a_spec_only_tensors_are_sent(pools: Pools, world_size: int) -> None:
    pools(world_size).run(exchange_with_spec, tp=1, timeout_s=DEADLINE_S)


def exchange_lists(over: str) -> None:
    with own_group(over) as group:
        rank = group.rank_in_group
        for values in (flat_dict(1), {**flat_dict(2), "large": torch.arange(LARGE // 4)}):
            spec = ps.TensorDictSpec.of(values)
            arrived = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
            got = group.broadcast_tensor_dict(values if rank == 1 else None, 1, spec=spec)
            assert got is values if rank == 1 else same(got, arrived)
            if rank == 0:
                group.send_object("earlier", 1)
                with counted(group) as carried:
                    group.send_tensor_dict(values, 1, spec=spec)
            else:
                earlier = group.irecv_object(0)
                with counted(group) as carried:
                    assert same(group.recv_tensor_dict(0, spec=spec), arrived)
                assert earlier.wait() == "earlier"
            assert carried["recv_list" if rank else "send_list"] == Traffic(
                1, FRAME_BYTES + sum(tensor.nbytes for tensor in tensors_in(values))
            )
        check_usable(group)


@pytest.mark.parametrize("over", ["queue", "connections", "route"])
def test_lists_over_both_transports(pools: Pools, over: str) -> None:
    pools(2).run(exchange_lists, over, tp=1, timeout_s=DEADLINE_S)


def keep_the_order() -> None:
    values = {"x": torch.arange(5)}
    spec = ps.TensorDictSpec.of(values)
    with own_group() as group:
        for seed in range(3):
            if group.rank_in_group == 0:
                group.send_tensor_dict(values, 1, spec=spec)
                large = group.isend_tensor_dict({"large": torch.arange(LARGE) + seed}, 1)
                small = group.isend_object(seed, 1)
                group.send_tensor_dict(values, 1, spec=spec)
                large.wait()
                small.wait()
                group.send_object("last", 1)
            else:
                assert same(group.recv_tensor_dict(0, spec=spec), values)
                earlier = group.irecv_tensor_dict(0)
                assert group.recv_object(0) == seed
                assert same(group.recv_tensor_dict(0, spec=spec), values)
                assert same(earlier.wait(), {"large": torch.arange(LARGE) + seed})
                last = group.irecv_object(0)
                until_completed(last)
                assert last.wait() == "last"
        check_usable(group)


def test_dicts_with_a_spec_keep_their_place(pools: Pools) -> None:
    pools(2).run(keep_the_order, tp=1, timeout_s=DEADLINE_S)


def large_tensors() -> None:
    """Received tensors are in the group's memory, and outlive the group."""
    with own_group() as group:
        sent = {"x": torch.arange(LARGE // 4), "small": torch.ones(2)}
        kinds: list[Callable[..., dict[str, Any]]] = [group.recv_tensor_dict, group.broadcast_tensor_dict]
        for receive, send in zip(kinds, (group.send_tensor_dict, group.broadcast_tensor_dict), strict=True):
            for spec in (None, ps.TensorDictSpec.of(sent)):
                addresses = set()
                for _ in range(6):
                    if group.rank_in_group:
                        received = receive(src=0, spec=spec)
                        assert same(received, sent)
                        addresses.add(received["x"].data_ptr())
                        del received
                    elif send == group.send_tensor_dict:
                        send(sent, dst=1, spec=spec)
                    else:
                        send(sent, src=0, spec=spec)
                if group.rank_in_group and native.load().has_ops:
                    # An expected message's tensors are allocated in advance, so two buffers alternate.
                    warm = group.empty(sent["x"].shape, sent["x"].dtype).data_ptr()
                    assert warm in addresses and len(addresses) <= 2
        kept = receive(src=0) if group.rank_in_group else send(sent, src=0)
    assert same(kept, sent)


def test_large_tensors_are_received_in_memory_of_the_group(pools: Pools) -> None:
    pools(2).run(large_tensors, tp=1, timeout_s=DEADLINE_S)


def other_specs() -> list[dict[str, Any]]:
    x, y = torch.ones(4), torch.zeros(4)
    return [
        {"y": y, "x": x, "n": 3},
        {"x": x, "z": y, "n": 3},
        {"x": x.int(), "y": y, "n": 3},
        {"x": x.view(2, 2), "y": y, "n": 3},
        {"x": x, "y": y, "n": 4},
    ]


SPEC_MISMATCH = "must pass equal specs, but rank 0|this rank is in broadcast_tensor_dict"


def small_dict() -> dict[str, Any]:
    return {"x": torch.ones(4), "y": torch.zeros(4), "n": 3}


def meet_other_spec(over: str, case: int, broadcasts: bool) -> None:
    spec: ps.TensorDictSpec | None = ps.TensorDictSpec.of(small_dict())
    others = other_specs()
    sent = others[case] if case < len(others) else small_dict()
    sent_spec = None if case == len(others) else ps.TensorDictSpec.of(sent)
    if case == len(others) + 1:
        spec = None
    with short_group(over) as group:
        if case % 2 == 0:
            first = ps.TensorDictSpec.of(small_dict())
            group.broadcast_tensor_dict(small_dict() if group.rank_in_group == 0 else None, 0, spec=first)
            if group.rank_in_group == 0:
                group.send_tensor_dict(small_dict(), 1, spec=first)
            else:
                group.recv_tensor_dict(0, spec=first)
        if group.rank_in_group == 0:
            # In a broadcast the later rank detects it. Over gloo the sender waits for its receiver.
            found = ps.CollectiveTimeoutError if over == "route" else ps.CollectiveMismatchError
            with contextlib.suppress(found):
                if broadcasts:
                    group.broadcast_tensor_dict(sent, 0, spec=sent_spec)
                else:
                    group.send_tensor_dict(sent, 1, spec=sent_spec)
        else:
            with pytest.raises(ps.CollectiveMismatchError, match=SPEC_MISMATCH) as caught:
                if broadcasts:
                    group.broadcast_tensor_dict(None, 0, spec=spec)
                else:
                    group.recv_tensor_dict(0, spec=spec)
            assert caught.value.suspect_ranks == (0,)
            with pytest.raises(ps.GroupFailedError):
                group.recv_tensor_dict(0, spec=spec)


@contextlib.contextmanager
def short_group(over: str) -> Iterator[GroupCoordinator]:
    with pytest.MonkeyPatch.context() as patch:
        if over == "route":
            patch.setattr(test_objects, "DEADLINE_S", 7)
        with own_group(over) as group:
            yield group


def meet_other_specs(over: str, cases: list[int]) -> None:
    for case in cases:
        for broadcasts in (False, True) if over == "queue" else (False,):
            meet_other_spec(over, case, broadcasts)


@pytest.mark.parametrize(
    ("over", "cases"), [("queue", list(range(7))), ("connections", list(range(7))), ("route", [0, 5])]
)
def test_another_spec_is_a_mismatch(pools: Pools, over: str, cases: list[int]) -> None:
    pools(2).run(meet_other_specs, over, cases, tp=1, timeout_s=90)


def meet_other_slices() -> str:
    tp = ps.get_tp_group()
    values = {"x": torch.arange(4.0), "y": torch.arange(4.0) + 4}
    spec = ps.TensorDictSpec.of(values)
    with own_group() as group:
        if group.rank_in_group < 2:
            group.send_tensor_dict(values, group.rank_in_group + 2, tp, {"x": False}, spec=spec)
        else:
            with pytest.raises(ps.CollectiveMismatchError) as caught:
                group.recv_tensor_dict(group.rank_in_group - 2, tp, {"y": False}, spec=spec)
            return str(caught.value)
    return ""


def test_other_slices_are_a_mismatch(pools: Pools) -> None:
    told = pools(4).run(meet_other_slices, tp=2, pp=2, timeout_s=DEADLINE_S)[2:]
    assert any("cut other tensors into slices" in text for text in told), told
    assert all(re.search("cut other tensors into slices|detected a mismatched call", text) for text in told), told


def refuse_gradients() -> None:
    group = ps.get_world_group()
    x = torch.ones(2, requires_grad=True)
    tensors = [torch.ones(1), x]
    none = group.traffic()
    for name in ("send_list", "broadcast_list", "broadcast_list_", "recv_list_"):
        with pytest.raises(ps.InvalidArgumentError, match=f"{name} on .* isn't differentiable, but an input requires"):
            call_op(group, name, tensors, "form", 1 - group.rank_in_group)
    assert group.traffic() == none
    tensors.pop()
    strided = torch.zeros(4, 4).t()
    with torch.no_grad():
        if group.rank_in_group == 0:
            call_op(group, "send_list", [torch.arange(16.0).view(4, 4)], "form", 1)
        else:
            call_op(group, "recv_list_", [strided], "form", 0)
            assert same(strided.contiguous(), torch.arange(16.0).view(4, 4))
            assert strided._version > 0, strided._version


def test_an_op_on_a_list_has_no_gradient(pools: Pools) -> None:
    pools(2).run(refuse_gradients, tp=1, timeout_s=DEADLINE_S)


def slices_with_spec() -> None:
    tp, pp = ps.get_tp_group(), ps.get_pp_group()
    values = {k: v for k, v in sliced_dict(tp.rank_in_group).items() if k != "inner"}
    arrived = {k: v for k, v in arrived_sliced_dict(tp.rank_in_group).items() if k != "inner"}
    spec = ps.TensorDictSpec.of(values)
    with counted(pp) as carried:
        if pp.is_first_rank:
            pp.send_tensor_dict(values, None, tp, all_gather_tensors=OWN, spec=spec)
        else:
            assert same(pp.recv_tensor_dict(None, tp, all_gather_tensors=OWN, spec=spec), arrived)
    assert list(carried.values()) == [Traffic(1, FRAME_BYTES + bytes_sent(values))]


def test_slices_with_a_spec(pools: Pools) -> None:
    pools(4).run(slices_with_spec, tp=2, pp=2, timeout_s=DEADLINE_S)


def misfits() -> list[dict[str, Any]]:
    wrong: list[tuple[str, Any]] = [
        ("hidden", torch.ones(4, 6)),
        ("hidden", torch.ones(6, 4, dtype=torch.float64)),
        ("hidden", torch.ones(6, 4, device="meta")),
        ("hidden", 3),
        ("number", 4),
        ("number", 3.0),
        ("number", torch.tensor(3)),
        ("number", [3]),
        ("none", 0),
        ("texts", ("a", (b"b", 1.5, False))),
        ("texts", ("a", (b"b", 1.5, 1))),
        ("empty", torch.empty(4, 0)),
    ]
    changed = [{**flat_dict(0), key: value} for key, value in wrong]
    missing, renamed = flat_dict(0), flat_dict(0)
    del missing["odd"]
    renamed["even"] = renamed.pop("odd")
    return [*changed, missing, renamed, {**flat_dict(0), "more": 1}, {}]


def receive_into_buffers(over: str, how: str) -> None:
    def buffers() -> dict[str, Tensor]:
        return {"hidden": torch.zeros(3, 4, dtype=torch.bfloat16), "residual": torch.zeros(4, 2).t()}

    def values(seed: int) -> dict[str, Any]:
        hidden, residual = torch.full((3, 4), seed, dtype=torch.bfloat16), torch.arange(8.0).view(2, 4) + seed
        return {"hidden": hidden, "step": 7, "residual": residual}

    small, misfits = buffers(), [buffers() for _ in range(5)]
    misfits[0]["hidden"] = torch.zeros(4, 3, dtype=torch.bfloat16)
    misfits[1]["hidden"] = torch.zeros(3, 4, dtype=torch.float16)
    misfits[2]["more"] = torch.zeros(1)
    del misfits[3]["residual"]
    misfits[4]["other"] = misfits[4].pop("hidden")
    bad: list[Any] = [[small], {1: torch.zeros(1)}, {"hidden": 1}, {"hidden": torch.zeros(1, requires_grad=True)}]
    spec = ps.TensorDictSpec.of(values(0))
    with own_group(over) as group:
        receive: Callable[..., Any] = group.recv_tensor_dict
        send: Callable[..., Any] = functools.partial(group.send_tensor_dict, dst=1)
        method, by_spec = "recv_tensor_dict", True
        if how == "irecv":
            method, by_spec = "irecv_tensor_dict", False
            receive = lambda src, **options: group.irecv_tensor_dict(src, **options).wait()  # noqa: E731
        elif how == "broadcast":
            method, send = "broadcast_tensor_dict", group.broadcast_tensor_dict
            receive = lambda src, **options: group.broadcast_tensor_dict(src=src, **options)  # noqa: E731
        if group.rank_in_group == 0:
            for seed in range(5):
                send(values(seed))
            for seed in range(2 * by_spec):
                send(values(seed), spec=spec)
            for seed in range(10):
                send(values(seed))
            send({"hidden": 1})
            send({"hidden": torch.ones(2)})
            if how == "broadcast":
                with pytest.raises(ps.InvalidArgumentError, match="this is rank 0, which sends"):
                    send(values(0), out=buffers())
        else:
            for seed in range(5 + 2 * by_spec):
                out = buffers()
                versions = {key: x._version for key, x in out.items()}
                got = receive(0, out=out, **({"spec": spec} if seed > 4 else {}))
                assert list(got) == ["hidden", "step", "residual"]
                assert all(got[key] is x for key, x in out.items())
                assert same({key: x.contiguous() if key != "step" else x for key, x in got.items()}, values(seed % 5))
                assert all(x._version > versions[key] for key, x in out.items())
            for wrong in bad:
                with pytest.raises(ps.InvalidArgumentError, match=f"of {method} on"):
                    receive(0, out=wrong)
            for wrong in misfits if by_spec else []:
                with pytest.raises(ps.InvalidArgumentError, match=r"Nothing was received"):
                    receive(0, spec=spec, out=wrong)
            for wrong in misfits:
                with pytest.raises(ps.InvalidArgumentError, match=r"The dict was received and is lost"):
                    receive(0, out=wrong)
                assert not any(x.any() for x in wrong.values())
            for seed in range(5, 10):
                assert same(receive(0), values(seed))
            with pytest.raises(ps.InvalidArgumentError, match=r"rank 0 sent no tensor for \['hidden'\]"):
                receive(0, out={"hidden": torch.zeros(1)})
            assert same(receive(0), {"hidden": torch.ones(2)})
        check_usable(group)


@pytest.mark.parametrize("how", ["recv", "irecv", "broadcast"])
@pytest.mark.parametrize("over", ["queue", "connections", "route"])
def test_receiving_into_buffers(pools: Pools, over: str, how: str) -> None:
    pools(2).run(receive_into_buffers, over, how, tp=1, timeout_s=DEADLINE_S)


def refuse_misfits() -> None:
    group = ps.get_world_group()
    spec = ps.TensorDictSpec.of(flat_dict(0))
    none: Any = None
    rank = group.rank_in_group
    with counted(group) as carried:
        for values in [*misfits(), none, [("hidden", 1)]]:
            for call in (
                lambda values=values: group.broadcast_tensor_dict(values, rank, spec=spec),
                lambda values=values: group.send_tensor_dict(values, spec=spec),
            ):
                with pytest.raises(ps.InvalidArgumentError, match=r"spec|must pass the tensor dict"):
                    call()
    assert carried == {}
    check_usable(group)


def test_a_dict_that_is_not_of_its_spec(pools: Pools) -> None:
    pools(2).run(refuse_misfits, tp=1, timeout_s=DEADLINE_S)


def test_spec_of_a_dict() -> None:
    spec = ps.TensorDictSpec.of({"x": torch.ones(2, 3), "n": (1, "a")})
    x, n = spec.entries
    assert (x.key, x.shape, x.dtype, x.device_type) == ("x", (2, 3), torch.float32, "cpu")
    assert (n.key, n.value) == ("n", (1, "a"))
    assert hash(spec) == hash(ps.TensorDictSpec.of({"x": torch.zeros(2, 3), "n": (1, "a")}))
    assert ps.TensorDictSpec.of({}).entries == ()
    nan = ps.TensorDictSpec.of({"n": float("nan")})
    nan.check({"n": float("nan")})
    wrong: list[Any] = [
        {"inner": {"x": torch.ones(1)}},
        {"list": [1]},
        {"tuple": (1, [2])},
        {"dtype": torch.float32},
        {1: torch.ones(1)},
        {1: 2},
        {("a",): 1},
    ]
    for values in wrong:
        with pytest.raises(
            ps.InvalidArgumentError, match="a TensorDictSpec has str keys, and tensors and constants as values"
        ):
            ps.TensorDictSpec.of(values)


def compiled_exchange() -> None:
    torch._dynamo.reset()
    group = ps.get_world_group()
    rank, peer = group.rank_in_group, 1 - group.rank_in_group
    example = {"hidden": torch.ones(4, 6), "n": 3, "empty": torch.empty(0, 2), "mask": torch.ones(4, dtype=torch.bool)}
    spec = ps.TensorDictSpec.of(example)
    buffers = {key: torch.zeros_like(x) for key, x in example.items() if isinstance(x, Tensor)}

    def first(x: Tensor) -> tuple[Tensor, Tensor]:
        group.send_tensor_dict(
            {"hidden": x.sin(), "n": 3, "empty": x.new_empty(0, 2), "mask": x[:, 0] > 0}, peer, spec=spec
        )
        got = group.recv_tensor_dict(peer, spec=spec, out=buffers)
        told = group.broadcast_tensor_dict(
            {"hidden": got["hidden"] * 2, "n": 3, "empty": got["empty"], "mask": got["mask"]}, 0, spec=spec
        )
        return got["hidden"] + got["n"], told["hidden"] + told["n"]

    def second(x: Tensor) -> tuple[Tensor, Tensor]:
        got = group.recv_tensor_dict(peer, spec=spec)
        group.send_tensor_dict(
            {"hidden": got["hidden"] * x, "n": 3, "empty": got["empty"], "mask": ~got["mask"]}, peer, spec=spec
        )
        told = group.broadcast_tensor_dict(None, 0, spec=spec, out=buffers)
        return torch.where(got["mask"][:, None], got["hidden"], x), told["hidden"] - told["n"]

    step = second if rank else first
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    expected = step(x)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with counted(group) as carried:
            got = compiled(x)
        assert sorted(carried) == ["broadcast_list", "recv_list", "send_list"]
        assert same(got, expected)


@pytest.mark.slow
def test_compiled_with_a_spec(pools: Pools) -> None:
    pools(2).run(compiled_exchange, tp=1, timeout_s=90)


def compiled_on_one_side() -> None:
    torch._dynamo.reset()
    group = ps.get_world_group()
    rank = group.rank_in_group

    def step(x: Tensor) -> Tensor:
        spec = ps.TensorDictSpec.of({"x": x, "n": ("a", 3)})
        told = group.broadcast_tensor_dict({"x": x * 2, "n": ("a", 3)} if rank == 0 else None, 0, spec=spec)
        if rank == 0:
            group.send_tensor_dict({"x": x + 1, "n": ("a", 3)}, 1, spec=spec)
            return told["x"]
        return told["x"] + group.recv_tensor_dict(0, spec=spec)["x"]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = torch.arange(6.0)
    for of_first, of_second in ((step, compiled), (compiled, step)):
        assert same((of_second if rank else of_first)(x), x * 2 + x + 1 if rank else x * 2)


def test_eager_and_compiled_callers_meet(pools: Pools) -> None:
    pools(2).run(compiled_on_one_side, tp=1, timeout_s=90)


def compiled_by_inductor() -> None:
    assert torch._inductor.config.compile_threads == 1, "a fork would wait for threads that its fork server has"
    torch._dynamo.reset()
    group = ps.get_world_group()
    rank, peer = group.rank_in_group, 1 - group.rank_in_group
    spec = ps.TensorDictSpec.of({"x": torch.ones(4, 6), "n": 3})

    def step(x: Tensor) -> Tensor:
        mine = {"x": x, "n": 3}
        if rank == 0:
            group.send_tensor_dict(mine, peer, spec=spec)
            group.recv_tensor_dict(peer, spec=spec)
        else:
            group.recv_tensor_dict(peer, spec=spec)
            group.send_tensor_dict(mine, peer, spec=spec)
        told = group.broadcast_tensor_dict(mine if rank == 1 else None, 1, spec=spec)
        return x + told["x"] + told["n"]

    compiled = torch.compile(step, fullgraph=True, backend="inductor")
    for turn in range(2):
        with counted(group) as carried:
            got = compiled(torch.full((4, 6), float(rank + turn)))
        assert same(got, torch.full((4, 6), float(rank + turn + 1 + turn + 3)))
        assert {name: traffic.calls for name, traffic in carried.items()} == {
            "send_list": 1,
            "recv_list": 1,
            "broadcast_list": 1,
        }


@pytest.mark.slow
def test_compiled_by_inductor_with_a_spec(pools: Pools) -> None:
    pools(2).run(compiled_by_inductor, tp=1, timeout_s=300)


def compiled_slices() -> None:
    torch._dynamo.reset()
    tp, pp = ps.get_tp_group(), ps.get_pp_group()
    values = {"x": torch.arange(24.0).view(6, 4), "odd": torch.arange(3), "own": torch.full((4,), tp.rank_in_group)}
    spec = ps.TensorDictSpec.of(values)

    def send(values: dict[str, Any]) -> None:
        pp.send_tensor_dict({k: v + 1 for k, v in values.items()}, 1, tp, all_gather_tensors={"own": False}, spec=spec)

    def recv() -> dict[str, Any]:
        got = pp.recv_tensor_dict(0, tp, all_gather_tensors={"own": False}, spec=spec)
        return {key: value * 2 for key, value in got.items()}

    with counted(pp) as carried:
        if pp.is_first_rank:
            torch.compile(send, fullgraph=True, backend="aot_eager")(values)
        else:
            got = torch.compile(recv, fullgraph=True, backend="aot_eager")()
            assert same(got, {key: (value + 1) * 2 for key, value in values.items()})
    assert list(carried.values()) == [Traffic(1, FRAME_BYTES + 24 * 4 // 2 + 3 * 8 + 4 * 8)]


@pytest.mark.slow
def test_compiled_slices_with_a_spec(pools: Pools) -> None:
    pools(4).run(compiled_slices, tp=2, pp=2, timeout_s=90)
