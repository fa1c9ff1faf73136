from __future__ import annotations

import gc
import os
import socket
import sys
import types
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators.base.errors import GroupDestroyedError
from parallel_state import state
from parallel_state.compat import vllm
from parallel_state.compat.vllm.message_queue import MessageQueue
from tests.contract.attempts import environment


def _exercise(tp: int, pp: int) -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    vllm.init_distributed_environment(size, rank, "env://", rank, "nccl")
    vllm.init_distributed_environment(size, rank, "env://", rank, "nccl")
    assert not vllm.model_parallel_is_initialized() and vllm.get_dcp_world_size_and_rank() == (1, 0)
    vllm.ensure_model_parallel_initialized(tp, pp)
    vllm.ensure_model_parallel_initialized(tp, pp, 1, 1, None)
    tp_group, pp_group, world = vllm.get_tp_group(), vllm.get_pp_group(), vllm.get_world_group()
    assert tp_group is vllm.get_tp_group() and tp_group is vllm.get_etp_group()
    x = torch.full((2, 4), float(rank + 1))
    total = tp_group.all_reduce(x)
    assert total.eq(sum(each + 1 for each in tp_group.ranks)).all() and x.eq(rank + 1).all()
    assert tp_group.all_gather(x, 0).shape == (2 * tp, 4)
    assert vllm.tensor_model_parallel_all_gather(x).shape == (2, 4 * tp)
    assert tp_group.reduce_scatter(x, 1).shape == (2, 4 // tp)
    if tp > 1:
        sizes = [each + 1 for each in range(tp)]
        mine = torch.full((sizes[tp_group.rank_in_group], 3), float(rank))
        gathered, other = tp_group.all_gatherv([mine, mine.long()], 0, sizes)
        assert gathered.shape == (sum(sizes), 3) and other.dtype == torch.int64
        out = torch.empty(mine.shape)
        assert tp_group.reduce_scatterv_into_output(gathered, out, 0, sizes) is out and out.equal(mine * tp)
        assert tp_group.device_communicator is tp_group and tp_group.mq_broadcaster is None
        queue = tp_group.create_mq_broadcaster()
        assert isinstance(queue, MessageQueue)
        assert queue.broadcast_object({"step": 1} if tp_group.is_first_rank else None) == {"step": 1}
    filled = world.broadcast(torch.full((3,), float(rank)), 1)
    assert filled.eq(1).all()
    assert world.broadcast_object_list([rank, {1, 2}], 0) == [0, {1, 2}]
    assert world.cpu_all_reduce_(torch.ones(2)).eq(size).all()
    passed: list[Any] = []
    if pp > 1:
        if not pp_group.is_last_rank:
            handles = pp_group.isend_tensor_dict({"hidden": x, "step": 3})
            assert isinstance(handles, list)
            for handle in handles:
                handle.wait()
            pp_group.send(torch.arange(5))
        if not pp_group.is_first_rank:
            tensors, handles, postprocess = pp_group.irecv_tensor_dict()
            for handle in handles:
                handle.wait()
            for after in postprocess:
                after()
            assert tensors is not None
            passed = [tensors["hidden"].flatten()[0].item(), tensors["step"], pp_group.recv(5, torch.int64).tolist()]
    hidden, logits, extra = tp_group.dispatch_router_logits(x, x, extra_tensors=[x])
    assert hidden is x and logits is x and extra == [x] and tp_group.combine(x) is x
    facts = {
        "tp": tp_group.ranks, "next": tp_group.next_rank, "first": pp_group.first_rank, "passed": passed,
        "all_tp": tp_group.group_ranks, "nodes": vllm._node_count(world.cpu_group), "node_count": vllm.get_node_count(),
        "device_index": world.device_index, "model": vllm.get_inner_dp_world_group().ranks,
        "dp": vllm.get_dp_group().world_size, "engram": (vllm.get_engram_dp_group(), vllm.get_engram_dp_size()),
    }  # fmt: skip
    own = vllm.init_model_parallel_group([[each] for each in range(size)], rank, "gloo", group_name="own")
    assert own.world_size == 1 and own.device_communicator is None and own.isend_tensor_dict({}) == []
    own.destroy()
    vllm.suspend_device_comms()
    vllm.resume_device_comms()
    vllm.destroy_model_parallel()
    assert vllm._WORLD is world
    vllm.destroy_distributed_environment()
    assert vllm._WORLD is None and not dist.is_initialized()
    return facts


def test_every_rank_has_what_vllm_has(pools: Any) -> None:
    results = pools(4).run(_exercise, 2, 2)
    assert [each["tp"] for each in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["next"] for each in results] == [1, 0, 3, 2]
    assert [each["first"] for each in results] == [0, 1, 0, 1]
    assert [each["passed"] for each in results] == [[], [], [1.0, 3, [0, 1, 2, 3, 4]], [2.0, 3, [0, 1, 2, 3, 4]]]
    for rank, each in enumerate(results):
        assert each["all_tp"] == [[0, 1], [2, 3]] and each["model"] == [0, 1, 2, 3] and each["dp"] == 1
        assert each["nodes"] == each["node_count"] == 1 and each["engram"] == (None, 1)
        assert each["device_index"] == rank


def _replicas(port: int) -> list[list[int]]:
    """Returns this rank and all ranks of four groups. In vLLM's config each replica counts its ranks from 0, but the
    world has all replicas."""
    me = int(os.environ["RANK"])
    config = types.SimpleNamespace(
        distributed_executor_backend="mp", nnodes=1, data_parallel_size=2, data_parallel_rank=me // 2,
        world_size_across_dp=4, data_parallel_master_ip="127.0.0.1", get_next_dp_init_port=lambda: port,
        cpu_distributed_timeout=None, distributed_timeout_seconds=7,
    )  # fmt: skip
    current = types.SimpleNamespace(parallel_config=config)
    sys.modules["vllm.config"] = types.SimpleNamespace(get_current_vllm_config_or_none=lambda: current)  # type: ignore[assignment]
    try:
        with environment(TORCHELASTIC_USE_AGENT_STORE=None):
            vllm.init_distributed_environment(2, me % 2, "tcp://127.0.0.1:1", me % 2, "gloo")
        vllm.ensure_model_parallel_initialized(2, 1)
        groups = [vllm.get_world_group(), vllm.get_dp_group(), vllm.get_tp_group(), vllm.get_inner_dp_world_group()]
        return [[each.rank, *each.ranks] for each in groups]
    finally:
        del sys.modules["vllm.config"]
        vllm.destroy_distributed_environment()


def test_vllms_config_says_which_replica_a_rank_is_of(pools: Any) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for rank, (world, dp, tp, model) in enumerate(pools(4).run(_replicas, port)):
        assert world == [rank, 0, 1, 2, 3] and dp == [rank, rank % 2, rank % 2 + 2]
        assert tp == model == [rank, rank // 2 * 2, rank // 2 * 2 + 1]


def _unseen() -> tuple[list[str], list[bool]]:
    rank = int(os.environ["RANK"])
    vllm.init_distributed_environment(2, rank, "env://", rank, "gloo")
    called: list[str] = []
    kept: list[weakref.ref[Any]] = []
    for _ in range(2):
        vllm.initialize_model_parallel(2, 1)
        state.get_tp_group().all_reduce(torch.ones(2))
        for each in state.get_tp_group().route.communicators[:1]:
            each.suspend, each.resume = lambda: called.append("suspend"), lambda: called.append("resume")
        vllm.suspend_device_comms()
        vllm.resume_device_comms()
        view = vllm.get_tp_group()
        kept.append(weakref.ref(view._made))
        vllm.destroy_model_parallel()
        assert view.pool is None, "a view has no state but its group's"
        with pytest.raises(GroupDestroyedError):
            view.all_reduce(torch.ones(2))
        view.destroy()
        del view, each
        gc.collect()
    vllm.destroy_distributed_environment()
    return called, [each() is None for each in kept]


def test_groups_without_a_view_and_after_their_end(pools: Any) -> None:
    assert pools(2).run(_unseen) == [(["suspend", "resume"] * 2, [True, True])] * 2


def _dispatch() -> None:
    rank = int(os.environ["RANK"])
    vllm.init_distributed_environment(2, rank, "env://", rank, "gloo")
    group = vllm.GroupCoordinator([[0, 1]], rank, "gloo", True, group_name="ep", use_all2all=True)
    tokens = torch.arange(float(2 * (rank + 1))).reshape(-1, 2) + 10 * rank
    hidden, weights, ids = group.dispatch(tokens, tokens + 1, tokens.long(), is_sequence_parallel=True)
    assert hidden.tolist() == [[0, 1], [10, 11], [12, 13]] and weights.equal(hidden + 1) and ids.equal(hidden.long())
    assert group.combine(hidden, is_sequence_parallel=True).equal(2 * tokens)
    out = torch.empty_like(tokens)
    assert group.combine_into_output(hidden, out, is_sequence_parallel=True).equal(2 * tokens)
    group.destroy()
    vllm.destroy_distributed_environment()


def test_experts_in_the_plain_form(pools: Any) -> None:
    pools(2).run(_dispatch)


def _stateless(port: int, others_port: int) -> list[Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = vllm.StatelessProcessGroup.create("127.0.0.1", port, rank, size, store_timeout=20)
    assert group.all_gather_obj({"rank": rank}) == [{"rank": each} for each in range(size)]
    group.send_obj(rank, (rank + 1) % size)
    assert group.recv_obj((rank - 1) % size) == (rank - 1) % size
    assert group.all_reduce(torch.ones(2) * rank, dist.ReduceOp.MAX).eq(size - 1).all()
    assert group.broadcast(torch.tensor([rank]), 1).tolist() == [1]
    group.barrier()
    nodes = vllm._node_count(group)
    queue = MessageQueue.create_from_process_group(group, 1 << 16, 4, writer_rank=1)
    heard = queue.broadcast_object("x" * 300_000 if rank == 1 else None)
    group.barrier()
    gloo = vllm.stateless_init_torch_distributed_process_group(
        "127.0.0.1", others_port, rank, size, "gloo", group_name=f"stateless {others_port}"
    )
    assert vllm.cpu_all_reduce_(torch.full([3], rank + 1), gloo).tolist() == [3] * 3
    vllm.stateless_destroy_torch_distributed_process_group(gloo)
    return [nodes, len(heard)]


def test_a_stateless_group(pools: Any) -> None:
    with socket.socket() as found, socket.socket() as other:
        for each in (found, other):
            each.bind(("127.0.0.1", 0))
        ports = found.getsockname()[1], other.getsockname()[1]
    assert pools(2).run(_stateless, *ports) == [[1, 300_000]] * 2


def test_without_groups_getters_raise_what_vllms_layers_catch() -> None:
    for get in (vllm.get_pcp_group, vllm.get_world_group, vllm.get_tensor_model_parallel_world_size):
        with pytest.raises(AssertionError, match="call init"):
            get()


def test_names_that_need_no_ranks() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'memory_fence'"):
        _ = vllm.memory_fence
    assert vllm.get_worker_rank_suffix(3) == "rank3"
    assert vllm.is_weak_contiguous(torch.ones(2, 3).T) and not vllm.is_weak_contiguous(torch.ones(4, 3)[:, :1])
    vllm.check_shm_free_space(1)
    with pytest.raises(RuntimeError, match="the arena needs"):
        vllm.check_shm_free_space(1 << 60, allocation_name="the arena")
    vllm.verify_group_size_divides_partition(256, 128)
    with pytest.raises(ValueError, match=r"of layer\.0 on each rank, 200, must be a multiple"):
        vllm.verify_group_size_divides_partition(200, 128, "layer.0")
    with pytest.raises(ValueError):
        vllm.ensure_divisibility(5, 2)
    store = vllm.create_tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = vllm.get_cached_tcp_store_client("127.0.0.1", store.port)
    client.set("key", b"value")
    assert store.get("key") == b"value" and client is vllm.get_cached_tcp_store_client("127.0.0.1", store.port)


def test_layers_are_divided_as_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    assert vllm.get_pp_indices(7, 0, 2) == (0, 4)
    monkeypatch.setitem(os.environ, "VLLM_PP_LAYER_PARTITION", "5,2")
    assert vllm.get_pp_indices(7, 1, 2) == (5, 7)
    with pytest.raises(ValueError, match="VLLM_PP_LAYER_PARTITION"):
        vllm.get_pp_indices(8, 1, 2)
