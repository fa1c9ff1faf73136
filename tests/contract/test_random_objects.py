from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators.base.errors import InvalidArgumentError, MessageEncodeError, RemoteError
from device_communicators.calls.memory import QUANTIZED
from parallel_state import GroupCoordinator, TensorDictSpec
from tests.contract import random_objects
from tests.contract.random_objects import check_arrived, tensor, tensors, value
from tests.contract.test_objects import OVER, own_group
from tests.extent import LONG
from tests.helpers.doors import CALLS_OF_MESSAGES
from tests.hosts import HostRanks
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
SEEDS = 300 if LONG else 12
DEADLINE_S = 60.0
Call = Callable[[GroupCoordinator, Any], Any]
SENT = object()


def _sends(group: GroupCoordinator) -> bool:
    return group.rank_in_group == 0


def _pair(send: Call, receive: Callable[[GroupCoordinator, Any], Any]) -> Call:
    def call(group: GroupCoordinator, given: Any) -> Any:
        if _sends(group):
            send(group, given)
            return SENT
        return receive(group, given) if group.is_last_rank else SENT

    return call


def _gathered(group: GroupCoordinator, given: Any) -> Any:
    mine = [group.rank_in_group, given]
    everyone = group.all_gather_object(mine)
    assert [rank for rank, _ in everyone] == list(range(group.world_size)) and everyone[group.rank_in_group] is mine
    return everyone[(group.rank_in_group + 1) % group.world_size][1]


def _last(group: GroupCoordinator) -> int:
    return group.world_size - 1


def _out(given: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, each in given.items():
        if isinstance(each, torch.Tensor):
            room = torch.empty(each.shape, dtype=each.dtype)
            strided = each.numel() > 1 and each.dtype.is_floating_point and each.itemsize >= 4
            found[key] = torch._neg_view(room) if strided else room
    return found


OF_OBJECTS: dict[str, Call] = {
    "broadcast_object": lambda group, given: group.broadcast_object(given if _sends(group) else None),
    "broadcast_object_list": lambda group, given: group.broadcast_object_list([given if _sends(group) else 0])[0],
    "all_gather_object": _gathered,
    "send_object": _pair(lambda g, given: g.send_object(given, _last(g)), lambda g, _: g.recv_object(0)),
    "isend_object": _pair(
        lambda g, given: g.isend_object(given, _last(g)).wait(), lambda g, _: g.irecv_object(0).wait()
    ),
}
OF_DICTS: dict[str, Call] = {
    "broadcast_tensor_dict": lambda group, given: group.broadcast_tensor_dict(given if _sends(group) else None),
    "broadcast_tensor_dict with views": lambda group, given: group.broadcast_tensor_dict(
        given if _sends(group) else None, views=True
    ),
    "broadcast_tensor_dict with out": lambda group, given: group.broadcast_tensor_dict(
        given if _sends(group) else None, out=None if _sends(group) else _out(given)
    ),
    "broadcast_tensor_dict with a spec": lambda group, given: group.broadcast_tensor_dict(
        given if _sends(group) else None, spec=TensorDictSpec.of(given)
    ),
    "send_tensor_dict": _pair(lambda g, given: g.send_tensor_dict(given, _last(g)), lambda g, _: g.recv_tensor_dict(0)),
    "send_tensor_dict with views": _pair(
        lambda g, given: g.send_tensor_dict(given, _last(g)), lambda g, _: g.recv_tensor_dict(0, views=True)
    ),
    "send_tensor_dict with out": _pair(
        lambda g, given: g.send_tensor_dict(given, _last(g)), lambda g, given: g.recv_tensor_dict(0, out=_out(given))
    ),
    "send_tensor_dict with a spec": _pair(
        lambda g, given: g.send_tensor_dict(given, _last(g), spec=TensorDictSpec.of(given)),
        lambda g, given: g.recv_tensor_dict(0, spec=TensorDictSpec.of(given)),
    ),
    "send_tensor_dict with a spec and out": _pair(
        lambda g, given: g.send_tensor_dict(given, _last(g), spec=TensorDictSpec.of(given)),
        lambda g, given: g.recv_tensor_dict(0, spec=TensorDictSpec.of(given), out=_out(given)),
    ),
    "isend_tensor_dict": _pair(
        lambda g, given: g.isend_tensor_dict(given, _last(g)).wait(), lambda g, _: g.irecv_tensor_dict(0).wait()
    ),
    "isend_tensor_dict with out": _pair(
        lambda g, given: g.isend_tensor_dict(given, _last(g)).wait(),
        lambda g, given: g.irecv_tensor_dict(0, out=_out(given)).wait(),
    ),
}
RECEIVING = {"recv_object", "irecv_object", "recv_tensor_dict", "irecv_tensor_dict"}


def test_no_message_call_is_left_out() -> None:
    calls = {name.partition(" ")[0] for name in (*OF_OBJECTS, *OF_DICTS)} | RECEIVING | {"all_sum"}
    assert CALLS_OF_MESSAGES - calls == set()


def _objects(seed: int) -> Iterator[Any]:
    source = random.Random(seed)
    yield value(source)
    yield value(source, only_empty=True)
    yield tensor(source)
    yield tensor(source, only_empty=True)


def _dicts(seed: int) -> Iterator[dict[str, Any]]:
    source = random.Random(seed)
    for only_empty in (False, True):
        found = tensors(source, only_empty=only_empty)
        yield found
        yield found


def _exchange(group: GroupCoordinator, name: str, call: Call, given: Any) -> None:
    found = call(group, given)
    if found is not SENT and (found is not given or not _sends(group)):
        check_arrived(found, given, name)


def _body(group: GroupCoordinator, seeds: Sequence[int]) -> None:
    for seed in seeds:
        for calls, all_given in ((OF_OBJECTS, _objects), (OF_DICTS, _dicts)):
            for number, given in enumerate(all_given(seed)):
                for name, call in calls.items():
                    try:
                        _exchange(group, name, call, given)
                    except Exception as error:
                        raise AssertionError(f"{name} of object {number} of seed {seed}: {error}") from error
    group.barrier()


def _on_transport(over: str, name: str, seeds: Sequence[int]) -> None:
    found = contextlib.nullcontext(ps.get_group(name)) if over == "as it is" else own_group(over)
    with found as group:
        _body(group, seeds)


@pytest.mark.parametrize("over", OVER)
def test_on_one_host(pools: Pools, over: str) -> None:
    pools(3).run(_on_transport, over, "tp", range(SEEDS), tp=3, timeout_s=DEADLINE_S * (10 if LONG else 1))


@pytest.mark.parametrize(
    ("placement", "tp", "pp", "name"),
    [((0, 1), 2, 1, "tp"), ((0, 0, 1, 1), 2, 2, "pp"), ((0, 0, 1, 1), 2, 2, "world")],
)
def test_between_hosts(
    on_hosts: Callable[[Sequence[int]], HostRanks], placement: tuple[int, ...], tp: int, pp: int, name: str
) -> None:
    seeds = range(SEEDS if LONG else SEEDS // 2)
    on_hosts(placement).run(_on_hosts, name, seeds, tp=tp, pp=pp, timeout_s=DEADLINE_S * (10 if LONG else 1))


def _on_hosts(name: str, seeds: Sequence[int]) -> None:
    _body(ps.get_world_group() if name == "world" else ps.get_group(name), seeds)


def _sliced(seeds: Sequence[int]) -> None:
    pp, tp = ps.get_pp_group(), ps.get_tp_group()
    for seed in seeds:
        for given in _dicts(seed):
            if pp.is_first_rank:
                pp.send_tensor_dict(given, 1, all_gather_group=tp)
            else:
                check_arrived(pp.recv_tensor_dict(0, all_gather_group=tp), given, f"seed {seed}")


@pytest.mark.over("shared memory")
def test_in_slices(pools: Pools) -> None:
    pools(4).run(_sliced, range(SEEDS), tp=2, pp=2, timeout_s=DEADLINE_S)


def test_in_slices_between_hosts(on_hosts: Callable[[Sequence[int]], HostRanks]) -> None:
    on_hosts((0, 0, 1, 1)).run(_sliced, range(SEEDS // 2), tp=2, pp=2, timeout_s=DEADLINE_S)


def _of(dtype: torch.dtype, rank: int) -> torch.Tensor:
    data = torch.arange(64) + rank
    return (data % 2 if dtype == torch.bool else data).to(torch.uint8).view(dtype)


def _every_dtype(over: str) -> None:
    with own_group(over) as group:
        rank = group.rank_in_group
        for dtype in random_objects.DTYPES:
            x, first = _of(dtype, rank), _of(dtype, 0)
            spec = TensorDictSpec.of({"x": x})
            check_arrived(_gathered(group, x), _of(dtype, (rank + 1) % group.world_size), f"all_gather of {dtype}")
            received = group.broadcast_tensor_dict({"x": x} if rank == 0 else None)
            check_arrived(received, {"x": first}, f"broadcast of {dtype}")
            if rank == 0:
                group.send(x, 1)
                group.send_tensor_dict({"x": x}, 1, spec=spec)
            elif rank == 1:
                check_arrived(group.recv(x.shape, dtype, 0), first, f"send of {dtype}")
                check_arrived(group.recv_tensor_dict(0, spec=spec), {"x": first}, f"send_tensor_dict of {dtype}")


@pytest.mark.parametrize("over", OVER)
def test_every_dtype_of_torch(pools: Pools, over: str) -> None:
    pools(3).run(_every_dtype, over, tp=3, timeout_s=DEADLINE_S)


def _refused(over: str) -> None:
    with own_group(over) as group:
        _refuse_all(group, _sends(group))


def _refuse_all(group: GroupCoordinator, is_src: bool) -> None:
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "broadcast_object": lambda x: group.broadcast_object([x] if is_src else None),
        "broadcast_tensor_dict": lambda x: group.broadcast_tensor_dict({"x": x} if is_src else None),
        "send_object": lambda x: group.send_object(x, 1) if is_src else group.recv_object(0),
        "send_tensor_dict": lambda x: group.send_tensor_dict({"x": x}, 1) if is_src else group.recv_tensor_dict(0),
    }
    for dtype in sorted(QUANTIZED, key=str):
        x = torch.arange(8, dtype=torch.uint8).view(dtype)
        for name, call in calls.items():
            with pytest.raises(MessageEncodeError if is_src else RemoteError, match="quantized tensor"):
                call(x)
            assert group.all_sum(1) == group.world_size, name
        wrong: dict[str, Callable[[], Any]] = {
            "send": lambda x=x: group.send(x),
            "isend": lambda x=x: group.isend(x),
            "recv": lambda dtype=dtype: group.recv((8,), dtype),
            "irecv": lambda dtype=dtype: group.irecv((8,), dtype),
            "broadcast": lambda x=x: group.broadcast(x),
            "all_gather": lambda x=x: group.all_gather(x),
            "empty": lambda dtype=dtype: group.empty((8,), dtype),
            "TensorDictSpec": lambda x=x: TensorDictSpec.of({"x": x}),
        }
        for name, call_wrong in wrong.items():
            with pytest.raises(InvalidArgumentError) as caught:
                call_wrong()
            assert "quantized" in str(caught.value) or name == "TensorDictSpec"
    assert group.broadcast_object("on" if is_src else None) == "on"


@pytest.mark.parametrize("over", OVER)
def test_dtypes_that_do_not_travel(pools: Pools, over: str) -> None:
    pools(2).run(_refused, over, tp=2, timeout_s=DEADLINE_S)
