from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.base.errors import UsageError

Group = ps.GroupCoordinator


class Unregistered:
    pass


def _calls() -> dict[str, Callable[[Group, int], Any]]:
    x, odd = torch.ones(4, 6), Unregistered()
    calls: dict[str, Callable[[Group, int], Any]] = {
        "broadcast_object": lambda group, _: group.broadcast_object(odd),
        "broadcast_object, nested": lambda group, _: group.broadcast_object({"a": [odd]}),
        "broadcast_object_list": lambda group, _: group.broadcast_object_list([odd]),
        "all_gather_object": lambda group, _: group.all_gather_object(odd),
        "broadcast_tensor_dict": lambda group, _: group.broadcast_tensor_dict({"x": odd}),
        "broadcast_tensor_dict of a list": lambda group, _: group.broadcast_tensor_dict([x]),  # type: ignore[arg-type]
        "send_tensor_dict": lambda group, _: group.send_tensor_dict({"x": odd}),
        "isend_tensor_dict": lambda group, _: group.isend_tensor_dict({"x": odd}),
        "recv_tensor_dict, out": lambda group, _: group.recv_tensor_dict(out=[x]),  # type: ignore[arg-type]
        "irecv_tensor_dict, out": lambda group, _: group.irecv_tensor_dict(out=[x]),  # type: ignore[arg-type]
        "a value nested too deep": lambda group, _: group.broadcast_object(_nested(200)),
    }
    unknown = torch.ones(4, dtype=torch.complex64)
    for op in ("max", "min", "product"):
        calls |= {
            f"all_reduce, {op} of complex": lambda group, _, op=op: group.all_reduce(unknown, op),
            f"all_reduce_, {op} of complex": lambda group, _, op=op: group.all_reduce_(unknown.clone(), op),
            f"all_reduce_async, {op} of complex": lambda group, _, op=op: group.all_reduce_async(unknown, op).wait(),
            f"reduce_scatter, {op} of complex": lambda group, _, op=op: group.reduce_scatter(unknown, 0, op),
            f"reduce_scatter_async, {op}": lambda group, _, op=op: group.reduce_scatter_async(unknown, 0, op).wait(),
            f"reduce_scatterv, {op}": lambda group, _, op=op: group.reduce_scatterv(unknown, 0, _sizes(group), op),
        }
    return calls


def _sizes(group: Group) -> list[int]:
    return [4 // group.world_size] * group.world_size


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def _kind(call: Callable[[Group, int], Any], group: Group) -> str:
    peer = (group.rank_in_group + 1) % group.world_size
    try:
        call(group, peer)
    except UsageError as error:
        return type(error).__name__
    except ps.RemoteError:
        return "RemoteError"
    return "nothing"


def _of_one_and_of_two() -> dict[str, tuple[str, str]]:
    two = ps.get_tp_group()
    (one,) = [each for each in [ps.get_pp_group()] if each.world_size == 1]
    kept = {name: (_kind(call, one), _kind(call, two)) for name, call in _calls().items()}
    for _ in range(2):  # the failed sends above; a later test would receive them
        with pytest.raises(ps.RemoteError):
            two.recv_tensor_dict()
    assert two.all_sum(1) == 2, "the group must stay usable"
    dist.barrier()
    return kept


def test_what_two_refuse_one_refuses(pools: Any) -> None:
    found = pools(2).run(_of_one_and_of_two, tp=2, timeout_s=60.0)
    for rank, kinds in enumerate(found):
        for name, (alone, together) in kinds.items():
            assert together != "nothing", f"{name} was accepted by the group of two"
            assert alone == together or (together == "RemoteError" and alone == found[0][name][1]), (
                rank,
                name,
                kinds[name],
            )


def _right() -> list[Any]:
    one = ps.get_pp_group()
    x = torch.ones(2)
    given = {"x": x, "n": [1, (2, None)]}
    assert one.broadcast_object(given) is given and one.all_gather_object(given) == [given]
    assert one.broadcast_tensor_dict(given) is given and one.send_tensor_dict(given) is given
    return one.broadcast_object_list([1, given])[:1]


def test_what_two_carry_one_returns(pools: Any) -> None:
    assert pools(2).run(_right, tp=2) == [[1], [1]]
