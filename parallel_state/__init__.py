"""Groups of ranks, and the ways of a tensor from one rank to another.

    init_distributed_environment()               # torchrun, SLURM, MPI, explicit arguments, or alone
    initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    y = get_tp_group().all_reduce(x)             # in a layer: eager and under torch.compile
    get_pp_group().send_tensor_dict({"hidden": y})
    destroy_model_parallel()
    destroy_distributed_environment()

`GroupCoordinator` has all that one can do with a group; `launch` starts local processes; `simulate` stands in for any
rank of any layout in one process. Importing starts nothing and changes no environment variable.
"""

from typing import TYPE_CHECKING

from device_communicators.base.errors import (
    AlreadyInitializedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    ConfigMismatchError,
    ForkedError,
    GroupDestroyedError,
    GroupFailedError,
    GroupNotInitializedError,
    HostUnreachableError,
    InvalidArgumentError,
    LaunchError,
    LayoutError,
    MessageDecodeError,
    MessageEncodeError,
    ParallelStateError,
    PeerDiedError,
    RemoteError,
    RenamedError,
    RendezvousError,
    ResourceLimitError,
    SettingError,
    UnsupportedError,
    UsageError,
)
from device_communicators.base.public_names import name_classes as _name_classes
from device_communicators.routing.failures import error_of
from device_communicators.routing.registry import on_failure, on_operation, write_record
from device_communicators.routing.started import TensorHandle
from parallel_state import metrics
from parallel_state.compile.fusion_pass import AllReduceFusionPass, FusionReport, fuse_all_reduce_rms_norm
from parallel_state.functions.aliases import (
    broadcast_tensor_dict,
    cleanup_dist_env_and_memory,
    get_all_ranks,
    get_amax_reduction_group,
    get_data_parallel_group,
    get_data_parallel_group_gloo,
    get_data_parallel_rank,
    get_data_parallel_src_rank,
    get_data_parallel_world_size,
    get_expert_data_parallel_group,
    get_expert_data_parallel_group_gloo,
    get_expert_data_parallel_rank,
    get_expert_data_parallel_world_size,
    get_pipeline_model_parallel_first_rank,
    get_pipeline_model_parallel_last_rank,
    get_pipeline_model_parallel_next_rank,
    get_pipeline_model_parallel_prev_rank,
    get_rank,
    get_tensor_and_data_parallel_group,
    get_virtual_pipeline_model_parallel_rank,
    get_virtual_pipeline_model_parallel_world_size,
    get_world_size,
    is_initialized,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    is_rank_in_embedding_group,
    is_rank_in_position_embedding_group,
    is_unitialized,
    set_virtual_pipeline_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_gather,
    tensor_model_parallel_reduce_scatter,
)
from parallel_state.functions.capture import GraphCaptureContext, graph_capture
from parallel_state.functions.getters import *  # noqa: F403 - made from the axis table
from parallel_state.functions.getters import __all__ as _getters
from parallel_state.functions.recovery import reinitialize
from parallel_state.functions.tracing import trace
from parallel_state.functions.utilities import (
    all_to_all,
    divide,
    get_pp_indices,
    local_master_first,
    master_first,
    read_file_dist,
    set_random_seed,
    split_tensor_along_last_dim,
    unwrap_dist,
)
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.groups.parallel_groups import (
    ParallelGroups,
    VirtualPipeline,
    create_fsdp_groups,
    create_parallel_groups,
    current_groups,
    try_get_current_groups,
)
from parallel_state.groups.same_node import in_the_same_node_as
from parallel_state.groups.simulated import simulate, simulated_group
from parallel_state.launch import LaunchConfig
from parallel_state.layout.axes import AXES, PRESETS, Axis
from parallel_state.layout.ranks import Grid, Layout
from parallel_state.layout.resolution import resolve_layout
from parallel_state.messages.codec.types import is_registered, register_type
from parallel_state.messages.handles import ReceiveHandle, SendHandle
from parallel_state.messages.tensor_dicts import TensorDictSpec
from parallel_state.process_groups.options import GroupOptions
from parallel_state.regions import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from parallel_state.startup.binding import bind_to_cores
from parallel_state.startup.environment import ProcessEnvironment, is_rank_zero
from parallel_state.state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_device_mesh,
    get_dp_group,
    get_group,
    get_group_rank,
    get_group_ranks,
    get_node_count,
    get_nodes,
    get_parallel_groups,
    get_pp_group,
    get_process_environment,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    init_model_parallel_group,
    init_world_group,
    initialize_model_parallel,
    is_global_first_rank,
    is_local_first_rank,
    model_parallel_is_initialized,
    patch_tensor_parallel_group,
    set_custom_all_reduce,
    try_get_dp_group,
    try_get_group,
    try_get_pp_group,
    try_get_tp_group,
    try_get_world_group,
)

if TYPE_CHECKING:  # at run time `launch` is the package of that name, which can be called
    from parallel_state.launch import launch
else:  # a type checker shall know no names but these
    from parallel_state.functions.getters import raise_missing as __getattr__  # noqa: F401

__all__ = [
    "metrics", "on_failure", "on_operation", "reinitialize", "write_record", "AXES", "AllReduceFusionPass",
    "AlreadyInitializedError", "Axis", "trace",
    "CollectiveMismatchError", "CollectiveTimeoutError", "CommunicationError", "ConfigMismatchError",
    "ForkedError", "FusionReport", "GraphCaptureContext", "Grid", "GroupCoordinator", "GroupDestroyedError",
    "GroupFailedError",
    "GroupNotInitializedError", "GroupOptions", "HostUnreachableError", "InvalidArgumentError", "LaunchConfig",
    "LaunchError", "Layout", "LayoutError", "MessageDecodeError", "MessageEncodeError", "PRESETS", "ParallelGroups",
    "ParallelStateError", "ProcessEnvironment", "PeerDiedError", "ReceiveHandle", "RemoteError", "RenamedError",
    "RendezvousError", "ResourceLimitError", "SendHandle", "SettingError", "TensorDictSpec", "TensorHandle",
    "UnsupportedError", "UsageError", "VirtualPipeline", "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all", "bind_to_cores", "broadcast_tensor_dict", "cleanup_dist_env_and_memory",
    "copy_to_tensor_model_parallel_region",
    "create_fsdp_groups", "create_parallel_groups", "current_groups", "destroy_distributed_environment",
    "destroy_model_parallel", "divide", "ensure_model_parallel_initialized", "error_of",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region", "fuse_all_reduce_rms_norm", "get_all_ranks",
    "get_amax_reduction_group", "get_data_parallel_group", "get_data_parallel_group_gloo", "get_data_parallel_rank",
    "get_data_parallel_src_rank", "get_data_parallel_world_size", "get_device_mesh", "get_dp_group",
    "get_expert_data_parallel_group", "get_expert_data_parallel_group_gloo", "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size", "get_group", "get_group_rank", "get_group_ranks", "get_node_count",
    "get_nodes", "get_parallel_groups", "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_last_rank", "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank", "get_pp_group", "get_pp_indices", "get_process_environment",
    "get_rank", "get_tensor_and_data_parallel_group", "get_tp_group", "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size", "get_world_group", "get_world_size", "graph_capture",
    "in_the_same_node_as", "init_distributed_environment", "init_model_parallel_group", "init_world_group",
    "initialize_model_parallel", "is_global_first_rank", "is_initialized", "is_local_first_rank",
    "is_pipeline_first_stage", "is_pipeline_last_stage", "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group", "is_rank_zero", "is_registered", "is_unitialized", "launch",
    "local_master_first", "master_first", "model_parallel_is_initialized", "patch_tensor_parallel_group",
    "read_file_dist", "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region", "reduce_scatter_to_sequence_parallel_region",
    "register_type", "resolve_layout", "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region", "set_custom_all_reduce", "set_random_seed",
    "set_virtual_pipeline_model_parallel_rank", "simulate", "simulated_group", "split_tensor_along_last_dim",
    "tensor_model_parallel_all_gather", "tensor_model_parallel_all_reduce", "tensor_model_parallel_gather",
    "tensor_model_parallel_reduce_scatter", "try_get_current_groups", "try_get_dp_group", "try_get_group",
    "try_get_pp_group", "try_get_tp_group", "try_get_world_group", "unwrap_dist", *_getters,
]  # fmt: skip

_name_classes(globals())
