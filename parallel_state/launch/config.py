"""The options of `launch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from parallel_state.layout.axes import DEFAULT_ORDER


@dataclass(frozen=True)
class LaunchConfig:
    """Options of `launch`. Invalid values make `launch` raise InvalidArgumentError."""

    nproc: int | None = None  # ranks on this node; None: one per accelerator, else 1
    world_size: int | None = None  # None: nproc
    rank_offset: int = 0  # global rank of this node's first rank
    master_addr: str = "127.0.0.1"  # the node of rank_offset 0 listens here
    master_port: int = 0  # 0: any free port
    preferred_port: int | None = None  # used if it is free, else any free port
    secret_file: str | None = None  # authenticates several nodes; on one node launch generates a secret
    init_method: str | None = None  # None: env://, with a store that launch hosts
    tensor_model_parallel_size: int | None = None  # without any size, no groups are created
    pipeline_model_parallel_size: int | None = None
    sizes: Mapping[str, int | None] = field(default_factory=dict)  # of other axes: {"cp": 2}
    order: str = DEFAULT_ORDER  # of the axes, fastest first
    backend: str | None = None  # of all axes
    axis_backends: Mapping[str, str] = field(default_factory=dict)  # of single axes: {"cp": "gloo"}
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    timeout: float | None = None  # seconds for the whole launch; None: no limit
    bind: Literal["cores"] | None = None  # binds each rank to its share of this process' cores
    grace: float = 5.0  # seconds between SIGTERM and SIGKILL
    env: Mapping[str, str] = field(default_factory=dict)  # added to the launcher's environment
    setup: Callable[[], object] | None = None  # called in each worker before it creates groups
    name: str = "rank"  # process names are `name-RANK`
    log_level: str | None = None  # None: PARALLEL_STATE_LOG_LEVEL

    @property
    def makes_groups(self) -> bool:
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size)
        return sizes != (None, None) or bool(self.sizes)

    @property
    def hosts_store(self) -> bool:
        return self.init_method in (None, "env://")
