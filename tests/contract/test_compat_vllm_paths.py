from __future__ import annotations

import pytest

from parallel_state.compat import vllm
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
