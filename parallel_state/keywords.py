"""Keyword arguments of functions that take `**options`.

Written by `make stubs` from the axis table, a signature and LaunchConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypedDict

from torch.distributed.device_mesh import DeviceMesh

from parallel_state.layout.axes import RankPicker
from parallel_state.process_groups.options import GroupOptions


class Sizes(TypedDict, total=False):
    """Sizes of the axes in `layout.axes.AXES`. `cp` is short for `context_parallel_size`, and so on."""

    tp: int | None
    context_parallel_size: int | None
    cp: int | None
    prefill_context_model_parallel_size: int | None
    pcp: int | None
    decode_context_model_parallel_size: int | None
    dcp: int | None
    expert_model_parallel_size: int | None
    ep: int | None
    expert_tensor_parallel_size: int | None
    etp: int | None
    dp: int | None
    data_parallel_shard_size: int | None
    dp_shard: int | None
    data_parallel_replicate_size: int | None
    dp_replicate: int | None
    external_data_parallel_size: int | None
    external_dp: int | None
    pp: int | None
    num_distributed_optimizer_instances: int | None
    inter_dist_opt: int | None


class ModelParallelOptions(Sizes, total=False):
    """Keywords of initialize_model_parallel."""

    order: str | None
    backend: str | None
    axis_options: Mapping[str, GroupOptions] | None
    allow_pickle: bool
    eager: bool
    warm_up: bool
    virtual_pipeline_model_parallel_size: int | None
    get_embedding_ranks: RankPicker | None
    get_position_embedding_ranks: RankPicker | None
    device_mesh: DeviceMesh | None
    failure_domain: str


class LaunchOptions(TypedDict, total=False):
    """Fields of LaunchConfig."""

    world_size: int | None
    rank_offset: int
    master_addr: str
    master_port: int
    preferred_port: int | None
    secret_file: str | None
    init_method: str | None
    tensor_model_parallel_size: int | None
    pipeline_model_parallel_size: int | None
    sizes: Mapping[str, int | None]
    order: str
    backend: str | None
    axis_backends: Mapping[str, str]
    start_method: Literal["forkserver", "spawn"]
    timeout: float | None
    bind: Literal["cores"] | None
    grace: float
    env: Mapping[str, str]
    setup: Callable[[], object] | None
    name: str
    log_level: str | None
