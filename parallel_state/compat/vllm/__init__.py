"""vLLM's `parallel_state`, `communication_op` and message queue, over this library's groups.

    from parallel_state.compat import vllm as ps

    ps.init_distributed_environment(world_size, rank, "tcp://…", local_rank, "gloo")
    ps.ensure_model_parallel_initialized(2, 2)

Names, parameters and return types are those of vLLM 0.33; docs/compat.md lists the differences. Only
`plugin`, `platform` and `communicator` import vLLM.
"""

from __future__ import annotations

import functools
import pickle as pickle  # vLLM's modules import it from its utils
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from device_communicators.base.errors import GroupNotInitializedError
from device_communicators.routing.registry import routes
from parallel_state import state
from parallel_state.collectives import capture_stream
from parallel_state.collectives.capture_stream import GraphCaptureContext
from parallel_state.compat.errors import NotInitializedError, as_assertion
from parallel_state.compat.tables import absent, collect, forward, named, reasons
from parallel_state.compat.vllm import group, message_queue, stateless, utils
from parallel_state.compat.vllm.group import GroupCoordinator
from parallel_state.compat.vllm.utils import parallel_config
from parallel_state.functions import aliases
from parallel_state.groups import same_node
from parallel_state.state import model_parallel_is_initialized

MISSING = reasons({
    "patches torch's float8 op on CUDA; torch has this fix now": (
        "patched_fused_scaled_matmul_reduce_scatter patched_fused_scaled_matmul_reduce_scatter_fake"
    ),
    "elastic expert parallelism; use `parallel_state.reinitialize` to make a new world": (
        "_replace_active_groups _init_stateless_group"
    ),
})  # fmt: skip

_NAMES = {
    utils: ("* SHM_PATH divide ensure_divisibility get_cached_tcp_store_client split_tensor_along_last_dim"),
    state: (
        "destroy_model_parallel get_node_count is_global_first_rank is_local_first_rank model_parallel_is_initialized "
        "set_custom_all_reduce"
    ),
    group: "GroupCoordinator Handle",
    message_queue: "MessageQueue",
    stateless: "*",
    capture_stream: "GraphCaptureContext",
}
globals().update(collect(_NAMES))


def suspend_device_comms() -> None:
    """Frees the groups' memory. Every rank must call this, while no other call is in progress."""
    for route in routes():
        route.suspend()


def resume_device_comms() -> None:
    """Allocates the memory that suspend_device_comms freed. Every rank must call this."""
    for route in routes():
        route.resume()


checkpoint_prepare_distributed_state, checkpoint_restore_distributed_state = suspend_device_comms, resume_device_comms


def _usable(backend: str | None) -> str | None:
    is_there = backend is None or (
        dist.is_backend_available(backend) and (backend != "nccl" or torch.cuda.is_available())
    )
    return backend if is_there else "gloo"


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "nccl",
    timeout: timedelta | None = None,
) -> None:
    """Creates the world group. Every rank must call this. Idempotent.

    If vLLM's config has several data-parallel replicas, `rank` and `world_size` count within one replica. The world has
    the ranks of all replicas.
    """
    config = parallel_config()
    is_part = config is not None and config.distributed_executor_backend != "external_launcher"
    if is_part and (config.nnodes > 1 or config.data_parallel_size > 1):
        rank += config.data_parallel_rank * world_size
        world_size = config.world_size_across_dp
        if config.nnodes > 1:
            address, port = config.master_addr, config.master_port
        else:
            address, port = config.data_parallel_master_ip, config.get_next_dp_init_port()
        distributed_init_method = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
    if state.try_get_world_group() is not None:
        return
    if not dist.is_initialized() and distributed_init_method.startswith("file://"):
        dist.init_process_group(_usable(backend), distributed_init_method, timeout, world_size, rank)
    state.init_distributed_environment(
        world_size, rank, distributed_init_method, local_rank, _usable(backend), timeout, allow_pickle=True
    )


_AXES = ("_TP", "_PP", "_DP", "_PCP", "_DCP", "_EP")


def __getattr__(name: str) -> Any:
    if name == "_WORLD":
        world = state.try_get_world_group()
        return None if world is None else GroupCoordinator.of(world)
    if name in _AXES:  # programs test these for None
        return globals()[f"get{name.lower()}_group"]() if model_parallel_is_initialized() else None
    if name == "_ENABLE_CUSTOM_ALL_REDUCE":
        return state._CUSTOM_ALL_REDUCE
    raise absent(__name__, name, MISSING)


def init_world_group(ranks: list[int], local_rank: int, backend: str) -> GroupCoordinator:
    return GroupCoordinator.of(state.init_world_group(ranks, local_rank, _usable(backend) or "gloo", allow_pickle=True))


def init_model_parallel_group(
    group_ranks: list[list[int]],
    local_rank: int,
    backend: str,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    use_device_communicator: bool = True,
    use_all2all: bool = False,
) -> GroupCoordinator:
    """Creates a group for each list of global ranks, and returns this rank's group. Arguments are those of
    GroupCoordinator.
    """
    with_queue = use_message_queue_broadcaster
    return GroupCoordinator(
        group_ranks, local_rank, backend, use_device_communicator, with_queue, group_name, use_all2all
    )


def destroy_distributed_environment() -> None:
    """Destroys all groups and torch's default group. Every rank must call this. Idempotent."""
    state.destroy_distributed_environment()
    if dist.is_initialized():
        dist.destroy_process_group()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    aliases.cleanup_dist_env_and_memory(shutdown_ray)
    destroy_distributed_environment()


def _node_count(pg: Any) -> int:
    return len(same_node.nodes_of(pg, stateless.in_the_same_node_as))


def _divide(divide: Callable[..., None], backend: str | None, **sizes: int | None) -> None:
    config = parallel_config()
    if config is not None:
        sizes |= {"data_parallel_size": config.data_parallel_size, "external_data_parallel_size": -1}
    divide(**sizes, backend=_usable(backend), order="vllm")


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
) -> None:
    """Creates the parallel groups. Every rank must call this.

    Without vLLM's config, the data-parallel size is world size / (tp × pp × prefill context).
    """
    _divide(functools.partial(state.initialize_model_parallel, allow_pickle=True), **locals())


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
) -> None:
    """Creates the parallel groups if there are none. Every rank must call this. Raises ConfigMismatchError if existing
    groups have other sizes.
    """
    given = locals()
    if not model_parallel_is_initialized():
        initialize_model_parallel(**given)
    else:
        _divide(state.ensure_model_parallel_initialized, **given)


# Getters raise NotInitializedError, which is an AssertionError: vLLM's attention layers catch that.


def get_world_group() -> GroupCoordinator:
    with as_assertion():
        return GroupCoordinator.of(state.get_world_group())


def _getter(axis: str, name: str = "", all2all: bool = False) -> Callable[[], GroupCoordinator]:
    def get() -> GroupCoordinator:
        try:  # as_assertion() would cost more than the rest of the getter
            made = state.get_group(axis)
        except GroupNotInitializedError as error:
            raise NotInitializedError(str(error)) from error
        view = GroupCoordinator.of(made, None, True, all2all)
        if len(view.group_ranks) == 1 and view.world_size < state.get_world_group().world_size:
            view.group_ranks = state.get_parallel_groups().layout.groups(axis)
        return view

    text = f"Returns this rank's {axis} group. Every rank of it makes the first call, which may make the group."
    return named(__name__, get, f"get_{name or axis}_group", text)


get_tp_group, get_pp_group, get_dp_group = _getter("tp"), _getter("pp"), _getter("dp")
get_pcp_group, get_dcp_group, get_ep_group = _getter("pcp"), _getter("dcp"), _getter("ep", all2all=True)
get_inner_dp_world_group = _getter("model", "inner_dp_world")
get_etp_group, get_eplb_group = get_tp_group, get_ep_group


def get_engram_dp_group() -> GroupCoordinator | None:
    """Returns None: no group shares vLLM's table of n-gram embeddings ("engram"), which each replica holds whole."""
    return None


def get_engram_dp_size() -> int:
    return 1


def get_dcp_world_size_and_rank(enabled: bool = True) -> tuple[int, int]:
    if not enabled or not model_parallel_is_initialized():
        return 1, 0
    return len(state.get_group_ranks("dcp")), state.get_group_rank("dcp")


for _fact, _find in {
    "tensor_model_parallel_world_size": lambda: len(state.get_group_ranks("tp")),
    "tensor_model_parallel_rank": lambda: state.get_group_rank("tp"),
    "pipeline_model_parallel_rank": lambda: state.get_group_rank("pp"),
}.items():
    _text = f"Returns this rank's {_fact.replace('_', '-')}."
    globals()[f"get_{_fact}"] = named(__name__, as_assertion()(_find), f"get_{_fact}", _text)


def graph_capture(device: torch.device) -> AbstractContextManager[GraphCaptureContext]:
    return aliases.graph_capture(device)


for _method in ("all_reduce", "all_gather", "reduce_scatter", "gather"):
    _name = f"tensor_model_parallel_{_method}"
    globals()[_name] = forward(__name__, _name, getattr(GroupCoordinator, _method), get_tp_group, "the tp group")


def broadcast_tensor_dict(tensor_dict: dict[Any, Any] | None = None, src: int = 0) -> dict[Any, Any] | None:
    return get_tp_group().broadcast_tensor_dict(tensor_dict, src)
