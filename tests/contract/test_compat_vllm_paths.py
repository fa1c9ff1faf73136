"""Other programs find the names of `vllm.distributed` at the same paths in `parallel_state.compat.vllm`."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators.base.errors import InvalidArgumentError
from parallel_state.compat import vllm
from parallel_state.compat.vllm.device_communicators.pynccl import PyNcclCommunicator
from parallel_state.compat.vllm.utils import StatelessProcessGroup
from tests.cases import each

IMPORTED = {
    "": (
        "parallel_state", "utils", "get_pp_group", "get_tp_group", "get_ep_group", "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size", "init_distributed_environment", "tensor_model_parallel_all_gather",
        "tensor_model_parallel_all_reduce", "divide", "split_tensor_along_last_dim",
    ),
    "utils": (
        "StatelessProcessGroup", "create_tcp_store", "divide", "get_pp_indices", "split_tensor_along_last_dim",
        "stateless_destroy_torch_distributed_process_group", "stateless_init_torch_distributed_process_group",
    ),
    "parallel_state": (
        "GroupCoordinator", "cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel",
        "ensure_model_parallel_initialized", "get_dp_group", "get_ep_group", "get_pp_group",
        "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size", "get_tp_group", "get_world_group",
        "init_distributed_environment", "init_model_parallel_group", "init_world_group", "initialize_model_parallel",
        "_TP", "_PP", "_WORLD", "_EP",
    ),
    "communication_op": (
        "broadcast_tensor_dict", "tensor_model_parallel_all_gather", "tensor_model_parallel_all_reduce",
        "tensor_model_parallel_gather",
    ),
    "device_communicators.pynccl": ("PyNcclCommunicator",),
    "device_communicators.shm_broadcast": ("Handle", "MessageQueue"),
}  # fmt: skip
"""Module of vllm.distributed -> names that TRL, verl, OpenRLHF, checkpoint-engine, torchrl and models import."""


def test_imports_of_other_programs() -> None:
    def check(path: str, name: str) -> None:
        exec(f"from parallel_state.compat.vllm{path and '.'}{path} import {name}", {})

    each([(path, name) for path, names in IMPORTED.items() for name in names], check)
    assert vllm.StatelessProcessGroup is StatelessProcessGroup
    assert vllm._TP is None and vllm._EP is None, "without groups, vLLM's globals must be None"
    with pytest.raises(AttributeError, match="no attribute '_ABSENT'"):
        _ = vllm._ABSENT


def _sync_weights(port: int) -> list[Any]:
    """The trainer has the highest rank and broadcasts, as TRL's does."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = StatelessProcessGroup.create("127.0.0.1", port, rank, size, store_timeout=20)
    communicator = PyNcclCommunicator(group, device=torch.device("cpu"))
    assert communicator.available and not communicator.disabled and communicator.group is group
    weights = torch.full((3, 4), float(rank), dtype=torch.bfloat16)
    communicator.broadcast(weights, src=size - 1)
    communicator.group.barrier()
    total = communicator.all_reduce(torch.tensor([float(rank)]))
    largest = communicator.all_reduce(torch.tensor([rank]), op=dist.ReduceOp.MAX)
    gathered = torch.empty(size, dtype=torch.int64)
    communicator.all_gather(gathered, torch.tensor([rank]))
    mine = torch.empty(1)
    communicator.reduce_scatter(mine, torch.arange(float(size)))
    if rank == 0:
        communicator.send(torch.tensor([7]), 1)
    elif rank == 1:
        communicator.recv(gathered[:1], 0)
    with pytest.raises(InvalidArgumentError, match="must be on cpu"):
        communicator.broadcast(torch.empty(1, device="meta"), 0)
    communicator.destroy()
    communicator.destroy()
    assert total is not None and largest is not None
    return [weights.unique().tolist(), total.item(), largest.item(), gathered.tolist(), mine.item()]


def test_weights_are_sent_as_trainers_do(pools: Any) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    first, second = pools(2).run(_sync_weights, port)
    assert first == [[1.0], 1.0, 1, [0, 1], 0.0]
    assert second == [[1.0], 1.0, 1, [7, 1], 2.0]


def _over_a_process_group() -> float:
    communicator = PyNcclCommunicator(dist.new_group(backend="gloo"), torch.device("cpu"))
    found = communicator.all_reduce(torch.ones(1))
    assert found is not None
    return found.item()


def test_it_takes_a_process_group(pools: Any) -> None:
    assert pools(2).run(_over_a_process_group, tp=2) == [2.0, 2.0]


def test_one_rank_is_disabled_and_other_groups_are_refused() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = PyNcclCommunicator(StatelessProcessGroup(0, 1, store), torch.device("cpu"))
    assert alone.disabled and alone.all_reduce(torch.ones(1)) is None
    alone.broadcast(torch.ones(1), 0)
    with pytest.raises(InvalidArgumentError, match="must be a StatelessProcessGroup or"):
        PyNcclCommunicator(None, torch.device("cpu"))  # type: ignore[arg-type]
