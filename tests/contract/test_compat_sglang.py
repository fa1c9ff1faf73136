from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators.base.errors import (
    GroupNotInitializedError,
    InvalidArgumentError,
    LayoutError,
    UnsupportedError,
)
from parallel_state import state
from parallel_state.compat import sglang
from parallel_state.compat.sglang.context import GROUPS
from tests.unit.test_engine_layouts import SGLANG_GROUPS, Sglang
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
PLAIN = {"tp_size": 1, "pp_size": 1, "attn_dp_size": 1, "attn_cp_size": 1, "attn_dcp_size": 1, "moe_ep_size": 1,
         "moe_dp_size": 1}  # fmt: skip
LAYOUTS = {
    4: [
        {"tp_size": 4},
        {"tp_size": 2, "pp_size": 2, "moe_ep_size": 2},
        {"tp_size": 4, "attn_dp_size": 2, "moe_ep_size": 4},
        {"tp_size": 4, "attn_cp_size": 2, "moe_ep_size": 2},
        {"tp_size": 4, "attn_cp_size": 2, "moe_dp_size": 2, "moe_ep_size": 2},
        {"tp_size": 4, "attn_dp_size": 2, "attn_dcp_size": 4},
        {"tp_size": 4, "attn_dcp_size": 2, "moe_dp_size": 4},
    ],
    8: [
        {"tp_size": 8, "attn_dp_size": 2, "attn_cp_size": 2, "moe_ep_size": 2, "moe_dp_size": 2},
        {"tp_size": 4, "pp_size": 2, "attn_dp_size": 2, "moe_ep_size": 2},
    ],
}


def _begin(**sizes: Any) -> Any:
    sglang.init_distributed_environment(backend="gloo")
    sglang.get_parallel().override_permanently(**{**PLAIN, **sizes})
    sglang.initialize_model_parallel()
    return sglang.get_parallel()


def _lists(cases: list[dict[str, int]]) -> list[dict[str, list[int]]]:
    found = []
    for sizes in cases:
        at = _begin(**sizes)
        lists = {name: group.ranks for name in SGLANG_GROUPS if (group := getattr(sglang, name)) is not None}
        assert lists["_ATTN_TP"] == sglang.get_attn_tp_group().ranks == at.attn_tp_group.ranks
        for short, group in GROUPS.items():
            if short in ("shared_experts_tp", "dcp", "world"):
                continue
            made = getattr(at, group)
            assert made.ranks[made.rank_in_group] == dist.get_rank() == made.rank
            assert (made is at.tp_group) == (made.ranks == at.tp_group.ranks) or short == "pp", short
            assert getattr(at, f"{short}_rank") == made.rank_in_group
            assert made.all_reduce(torch.tensor([2.0**made.rank])).item() == sum(2.0**rank for rank in made.ranks)
        assert at.attn_dp_rank == sglang.dp_gather_slot() == at.tp_rank // (at.attn_tp_size * at.attn_cp_size)
        assert sglang.get_self_pp_group().ranks == [dist.get_rank()]
        found.append(lists)
        sglang.destroy_model_parallel()
        assert not sglang.model_parallel_is_initialized()
        assert sglang._TP is None
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_its_groups_are_those_that_its_own_code_lays_out(pools: Pools, world_size: int) -> None:
    theirs = Sglang()
    ranks = pools(world_size).run(_lists, LAYOUTS[world_size])
    for at, sizes in enumerate(LAYOUTS[world_size]):
        expected = theirs.groups(world_size, **{**PLAIN, **sizes})
        assert isinstance(expected, dict)
        for rank, found in enumerate(ranks):
            assert found[at].keys() == expected.keys()
            for name, lists in expected.items():
                (mine,) = [each for each in lists if rank in each]
                assert found[at][name] == mine, (sizes, name)


def _tensors() -> None:
    at = _begin(tp_size=2, moe_ep_size=2)
    group, rank = at.tp_group, at.tp_rank
    x = torch.arange(8.0).reshape(4, 2) + 10 * rank
    both = [torch.arange(8.0).reshape(4, 2) + 10 * each for each in range(2)]
    total = both[0] + both[1]
    for call in (
        sglang.tensor_model_parallel_all_reduce, sglang.moe_expert_parallel_all_reduce, sglang.attn_tp_all_reduce,
        sglang.attention_tensor_model_parallel_all_reduce, sglang.tensor_model_parallel_quant_all_reduce,
        lambda y: sglang.inplace_all_reduce(y, group.unique_name) or y,
    ):  # fmt: skip
        y = x.clone()
        assert call(y) is y
        assert torch.equal(y, total)
    y = x.clone()
    assert torch.equal(sglang.flashinfer_allreduce(y, group.unique_name), total)
    assert torch.equal(y, x)
    assert torch.equal(sglang.moe_tensor_model_parallel_all_reduce(x.clone()), x)
    for dim in (0, 1, -1):
        assert torch.equal(sglang.tensor_model_parallel_all_gather(x, dim), torch.cat(both, dim))
        gathered = sglang.tensor_model_parallel_gather(x, 1, dim)
        assert gathered is None if rank == 0 else torch.equal(gathered, torch.cat(both, dim))
    out = torch.empty(8, 2)
    assert group.all_gather_into_tensor(out, x) is None
    assert torch.equal(out, torch.cat(both))
    out.zero_()
    sglang.attn_tp_all_gather_into_tensor(out, x)
    assert torch.equal(out, torch.cat(both))
    stacked = torch.empty(2, 4, 2)
    group.all_gather_into_tensor(stacked, x)
    assert torch.equal(stacked, torch.stack(both))
    outs = [torch.empty(4, 2), torch.empty(4, 2)]
    assert sglang.attn_tp_all_gather(outs, x) is None
    assert torch.equal(torch.stack(outs), torch.stack(both))
    share = torch.empty(2, 2)
    group.reduce_scatter_tensor(share, x)
    assert torch.equal(share, total.chunk(2)[rank])
    assert group.reduce_scatter(share.zero_(), list(x.chunk(2))) is share
    assert torch.equal(share, total.chunk(2)[rank])
    assert torch.equal(group.reduce_scatter_along_dim(x, 1), total.chunk(2, 1)[rank])
    assert torch.equal(group.reduce_scatterv(x, sizes=[1, 3]), total.split([1, 3])[rank])
    rows = torch.empty((1, 3)[rank], 2)
    assert group.reduce_scatterv(x, rows, [1, 3]) is rows
    exchanged = torch.empty(4, 2)
    group.all_to_all_single(exchanged, x)
    assert torch.equal(exchanged, torch.cat([each.chunk(2)[rank] for each in both]))
    uneven = [both[0][:1], both[1][:3]]
    lists = group.all_gatherv([uneven[rank], uneven[rank] * 2], sizes=[1, 3])
    assert [each.tolist() for each in lists] == [torch.cat(uneven).tolist(), (torch.cat(uneven) * 2).tolist()]
    into = torch.empty(4, 2)
    assert group.all_gatherv(uneven[rank], [1, 3], into)[0] is into
    assert torch.equal(into, torch.cat(uneven))
    y = x.clone()
    assert group.broadcast(y, 1) is y
    assert torch.equal(y, both[1])
    normed, summed = sglang.tensor_model_parallel_fused_allreduce_rmsnorm(x, torch.ones(4, 2), torch.ones(2), 1e-6)
    assert torch.equal(summed, total + 1)
    assert torch.allclose(normed, torch.nn.functional.rms_norm(total + 1, (2,), eps=1e-6))
    with pytest.raises(InvalidArgumentError):
        group.all_gatherv([x], output=into)


def _messages() -> None:
    at = _begin(tp_size=1, pp_size=2)
    pp, rank, other = at.pp_group, at.pp_rank, 1 - at.pp_rank
    assert (pp.first_rank, pp.last_rank, pp.next_rank, pp.prev_rank) == (0, 1, other, other)
    assert (pp.is_first_rank, pp.is_last_rank) == (rank == 0, rank == 1)
    values = {"hidden": torch.full((2, 3), float(rank)), "n": rank, "empty": torch.empty(0)}
    received = pp.send_recv_tensor_dict(values)
    assert received["n"] == other
    assert torch.equal(received["hidden"], torch.full((2, 3), float(other)))
    unregistered = SimpleNamespace(text="by pickle, as SGLang's", n=3)
    if rank == 0:
        assert pp.send_tensor_dict(values) == []
        works = [*pp.send_tensor_dict(values, async_send=True), *pp.send_object([unregistered], 1, async_send=True)]
        works += pp.send_object("late", 1, async_send=True, tag=7)
        works += pp.send_object({"tensor": torch.ones(2)}, 1, async_send=True, tag=5)
        assert all(isinstance(each, sglang.P2PWork) for each in works)
        for each in works:
            each.work.wait()
        pp.send(torch.ones(3))
        assert pp.send_object("again", 1, tag=7) == []
    else:
        for _ in range(2):
            assert pp.recv_tensor_dict()["n"] == 0
        assert pp.recv_object(0, tag=5)["tensor"].tolist() == [1, 1]
        assert pp.recv_object(0) == [unregistered]
        assert pp.recv_object(0, tag=7) == "late"
        assert pp.recv(torch.Size([3]), torch.float32).tolist() == [1, 1, 1]
        assert pp.recv_object(0, tag=7) == "again"
    assert pp.broadcast_object("from one" if rank == 1 else None, 1) == "from one"
    assert pp.broadcast_object_list([rank, 2], 1) == [1, 2]
    assert pp.all_gather_object(rank) == [0, 1]
    assert pp.broadcast_tensor_dict(values if rank == 0 else None)["n"] == 0
    assert sglang.attn_cp_tp_broadcast_pyobj([rank]) == [rank]
    assert sglang.in_the_same_node_as(pp.cpu_group) == sglang.in_the_same_node_as(pp) == [True, True]
    pp.barrier()
    alone = sglang.get_self_pp_group()
    assert alone.send_tensor_dict(values) is values
    assert alone.recv_tensor_dict() is None
    with sglang.patch_pipeline_parallel_group(alone):
        assert sglang.get_pp_group() is alone is sglang._PP
        assert (at.pp_size, at.pp_rank, sglang.get_pipeline_model_parallel_world_size()) == (1, 0, 1)
    assert sglang.get_pp_group() is pp is sglang._PP
    mine = sglang.create_custom_parallel_group([rank])
    assert dist.get_process_group_ranks(mine) == [rank]


def _scopes() -> None:
    sglang.init_distributed_environment(backend="gloo")
    at = sglang.get_parallel()
    at.override_permanently(**{**PLAIN, "tp_size": 2, "attn_dp_size": 2, "shared_experts_tp_size": 1})
    sglang.initialize_model_parallel(duplicate_tp_group=True)
    tp = sglang.get_tp_group()
    assert sglang.is_dp_attention_enabled()
    assert sglang.get_dp_tp_group() is sglang.get_attn_tp_group() is sglang.get_attention_tp_group() is not tp
    assert (sglang.get_attention_dp_rank(), sglang.dp_slot_in("ab"), sglang.dp_slot_in("a")) == (tp.rank, tp.rank, 0)
    with sglang.pdmux_prefill_tp_group():
        assert sglang.get_tp_group() is not tp
        assert sglang.get_tp_group().ranks == tp.ranks
        assert sglang.tensor_model_parallel_all_reduce(torch.ones(1)).item() == 2
    draft = sglang.get_self_pp_group()
    with sglang.patch_tensor_parallel_group(draft, owns_attention=True):
        assert sglang.get_tensor_model_parallel_world_size() == at.attn_tp_size == at.moe_tp_size == 1
        assert at.attn_cp_group is None
        assert sglang.tensor_model_parallel_all_reduce(torch.ones(1)).item() == 1
    assert sglang.get_tp_group() is tp
    with sglang.graph_capture() as capture:
        assert capture.stream is None
    with pytest.raises(LayoutError), at.override(tp_size=4):
        pass
    with pytest.raises(InvalidArgumentError):
        at.override_permanently(tensor_size=4)
    with pytest.raises(UnsupportedError):
        sglang.initialize_model_parallel(recovered_rank=True)
    sglang.destroy_model_parallel()
    for call in (sglang.get_tp_group, sglang.get_self_pp_group, sglang.get_moe_expert_parallel_rank):
        with pytest.raises(GroupNotInitializedError):
            call()
    sglang.init_distributed_environment(backend="gloo")  # as in SGLang, whose destroy also forgets the world's group
    assert sglang.get_world_size() == 2
    lists = [[0], [1]]
    made = sglang.GroupCoordinator(lists, 0, "gloo", False, False, False, False, False, False, group_name="own")
    assert made.ranks == [dist.get_rank()]
    assert made.device_group is not None
    made.destroy()
    sglang.destroy_distributed_environment()
    assert not dist.is_initialized()
    assert state.try_get_world_group() is None


@pytest.mark.parametrize("program", [_tensors, _messages, _scopes])
def test_two_ranks(pools: Pools, program: Callable[[], None]) -> None:
    pools(2).run(_ended, program)


def _ended(program: Callable[[], None]) -> None:
    program()
    if state.try_get_world_group() is not None:
        sglang.destroy_model_parallel()


def test_a_group_over_a_store_and_nothing_else() -> None:
    store = dist.HashStore()
    one, other = (sglang.StatelessProcessGroup(rank, 2, store) for rank in range(2))
    message = {"tensor": torch.arange(3), "object": SimpleNamespace(n=1), "none": torch.empty(0, 2)}
    one.send_obj(message, 1)
    found = other.recv_obj(0)
    assert torch.equal(found["tensor"], message["tensor"])
    assert found["object"] == message["object"]
    assert found["none"].shape == (0, 2)
    other.broadcast_obj("b", 1)
    assert one.broadcast_obj(None, 1) == "b"
    one.data_expiration_seconds = -1
    one.expire_data()
    assert not one.entries
    assert not store.check(["send_to/1/0/0"])


def test_layers_of_a_stage_as_its_own_code_divides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from tests.references import SGLANG_UTILS

    theirs: dict[str, Any] = {"os": os}
    exec(SGLANG_UTILS.cut("get_pp_indices"), theirs)
    for layers in range(1, 12):
        for size in range(1, layers + 1):
            for rank in range(size):
                assert sglang.get_pp_indices(layers, rank, size) == theirs["get_pp_indices"](layers, rank, size)
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "2,5")
    assert [sglang.get_pp_indices(7, rank, 2) for rank in range(2)] == [(0, 2), (2, 7)]
    for layers, size in ((7, 3), (8, 2)):
        with pytest.raises(ValueError, match="2,5"):
            sglang.get_pp_indices(layers, 0, size)
    assert sglang.get_pp_indices(3, 0, 1) == (0, 3)
