"""Groups of ranks, and the transports that move tensors between them.

    init_distributed_environment()               # torchrun, SLURM, MPI, explicit arguments, or alone
    initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    y = get_tp_group().all_reduce(x)             # in a layer: eager and under torch.compile
    get_pp_group().send_tensor_dict({"hidden": y})
    destroy_model_parallel()
    destroy_distributed_environment()

`GroupCoordinator` has all operations of a group. `launch` starts local processes. `simulate` imitates any rank of any
layout in one process. Importing starts nothing and changes no environment variable.
"""

import os
import sys
from typing import Any

import device_communicators.base.errors  # noqa: F401
from device_communicators.base.public_names import load_on_use, name_classes

__version__ = "0.2.0"

_NAMES = {
    "device_communicators.base.errors": [
        "AlreadyInitializedError", "CollectiveMismatchError", "CollectiveTimeoutError", "CommunicationError",
        "ConfigMismatchError", "ForkedError", "GroupDestroyedError", "GroupFailedError", "GroupNotInitializedError",
        "HostUnreachableError", "InvalidArgumentError", "LaunchError", "LayoutError", "MessageDecodeError",
        "MessageEncodeError", "ParallelStateError", "PeerDiedError", "RemoteError", "RenamedError", "RendezvousError",
        "ResourceLimitError", "SettingError", "UnsupportedError", "UsageError",
    ],
    "device_communicators.base.member": ["extended_deadline"],
    "device_communicators.cpu.window": ["Window"],
    "device_communicators.routing.failures": ["error_of"],
    "device_communicators.routing.registry": ["on_failure", "on_operation", "write_record"],
    "device_communicators.routing.started": ["TensorHandle"],
    "parallel_state.collectives.capture_stream": ["GraphCaptureContext"],
    "parallel_state.compile.fusion_pass": ["AllReduceFusionPass", "FusionReport", "fuse_all_reduce_rms_norm"],
    "parallel_state.functions.aliases": [
        "broadcast_tensor_dict", "cleanup_dist_env_and_memory", "get_all_ranks", "get_amax_reduction_group",
        "get_data_parallel_group", "get_data_parallel_group_gloo", "get_data_parallel_rank",
        "get_data_parallel_src_rank", "get_data_parallel_world_size", "get_expert_data_parallel_group",
        "get_expert_data_parallel_group_gloo", "get_expert_data_parallel_rank", "get_expert_data_parallel_world_size",
        "get_pipeline_model_parallel_first_rank", "get_pipeline_model_parallel_last_rank",
        "get_pipeline_model_parallel_next_rank", "get_pipeline_model_parallel_prev_rank", "get_rank",
        "get_tensor_and_data_parallel_group", "get_virtual_pipeline_model_parallel_rank",
        "get_virtual_pipeline_model_parallel_world_size", "get_world_size", "graph_capture", "is_initialized",
        "is_pipeline_first_stage", "is_pipeline_last_stage", "is_rank_in_embedding_group",
        "is_rank_in_position_embedding_group", "is_unitialized", "set_virtual_pipeline_model_parallel_rank",
        "tensor_model_parallel_all_gather", "tensor_model_parallel_all_reduce", "tensor_model_parallel_gather",
        "tensor_model_parallel_reduce_scatter",
    ],
    "parallel_state.functions.recovery": ["reinitialize"],
    "parallel_state.functions.tracing": ["trace"],
    "parallel_state.functions.utilities": [
        "all_to_all", "divide", "get_pp_indices", "local_master_first", "master_first", "read_file_dist",
        "set_random_seed", "split_tensor_along_last_dim", "unwrap_dist",
    ],
    "parallel_state.groups.coordinator": ["GroupCoordinator"],
    "parallel_state.groups.parallel_groups": [
        "ParallelGroups", "VirtualPipeline", "create_fsdp_groups", "create_parallel_groups", "current_groups",
        "try_get_current_groups",
    ],
    "parallel_state.groups.same_node": ["in_the_same_node_as"],
    "parallel_state.groups.simulated": ["simulate", "simulated_group"],
    "parallel_state.launch": ["LaunchConfig", "launch"],
    "parallel_state.layout.axes": ["AXES", "PRESETS", "Axis"],
    "parallel_state.layout.ranks": ["Grid", "Layout"],
    "parallel_state.layout.resolution": ["resolve_layout"],
    "parallel_state.messages.codec.types": ["is_registered", "register_type"],
    "parallel_state.messages.messenger": ["ReceiveHandle", "SendHandle"],
    "parallel_state.messages.tensor_dicts": ["TensorDictSpec"],
    "parallel_state.metrics": ["metrics"],
    "parallel_state.process_groups.options": ["GroupOptions"],
    "parallel_state.regions": [
        "all_gather_last_dim_from_tensor_parallel_region", "copy_to_tensor_model_parallel_region",
        "gather_from_sequence_parallel_region", "gather_from_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region", "reduce_scatter_last_dim_to_tensor_parallel_region",
        "reduce_scatter_to_sequence_parallel_region", "scatter_to_sequence_parallel_region",
        "scatter_to_tensor_model_parallel_region",
    ],
    "parallel_state.startup.binding": ["bind_to_cores"],
    "parallel_state.startup.environment": ["ProcessEnvironment", "is_rank_zero"],
    "parallel_state.state": [
        "destroy_distributed_environment", "destroy_model_parallel", "ensure_model_parallel_initialized",
        "get_device_mesh", "get_dp_group", "get_group", "get_group_rank", "get_group_ranks", "get_node_count",
        "get_nodes", "get_parallel_groups", "get_pp_group", "get_process_environment", "get_tp_group",
        "get_world_group", "init_distributed_environment", "init_model_parallel_group", "init_world_group",
        "initialize_model_parallel", "is_global_first_rank", "is_local_first_rank", "model_parallel_is_initialized",
        "patch_tensor_parallel_group", "set_custom_all_reduce", "try_get_dp_group", "try_get_group", "try_get_pp_group",
        "try_get_tp_group", "try_get_world_group",
    ],
}  # fmt: skip
"""Maps a module to its public names, except the getters of groups, which are generated."""

_names, _load = load_on_use(globals(), _NAMES)


def __getattr__(name: str) -> Any:
    if name in _names:
        return _load(name)
    if name.startswith("__") and name != "__all__":  # Python probes for such names
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from parallel_state.functions import getters

    if name == "__all__":
        globals()[name] = [*_names, *getters.__all__]
    elif name in getters.__all__:
        globals()[name] = getattr(getters, name)
    else:
        getters.raise_missing(name, __getattr__("__all__"))
    return globals()[name]


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), "__version__"]


def _is_command() -> bool:
    """Returns True if this process runs `python -m parallel_state` or `parallel-state`.

    While Python locates the module for `-m`, only `sys.orig_argv` has the module's name.
    """
    if sys.argv[:1] == ["-m"]:
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __name__
    return bool(sys.argv) and os.path.basename(sys.argv[0]) == "parallel-state"


name_classes(__name__, _NAMES)  # tracebacks then show errors under this package's name
if not _is_command():  # registers the ops and torch's backend "parallel_state", which programs access by name only
    import parallel_state.regions
    import parallel_state.state  # noqa: F401
