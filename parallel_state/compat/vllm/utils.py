"""vLLM's `distributed.utils`, and names that vLLM imports from `shm_broadcast`."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from device_communicators.base.errors import CollectiveTimeoutError
from device_communicators.base.helper_threads import Call
from device_communicators.base.torch_internals import group_over_gloo, register_named, unregister_named
from device_communicators.cpu.segment import DIRECTORY
from parallel_state import state
from parallel_state.compat.stages import divide as divide
from parallel_state.compat.stages import ensure_divisibility as ensure_divisibility
from parallel_state.compat.stages import layers_in
from parallel_state.compat.vllm.stateless import StatelessProcessGroup as StatelessProcessGroup
from parallel_state.functions import utilities

SHM_PATH = DIRECTORY
split_tensor_along_last_dim = utilities.split_tensor_along_last_dim
_DEFAULT_TIMEOUT = timedelta(minutes=30)


def parallel_config() -> Any:
    config = sys.modules.get("vllm.config")
    current = None if config is None else config.get_current_vllm_config_or_none()
    return None if current is None else current.parallel_config


def get_worker_rank_suffix(global_rank: int | None = None) -> str:
    """Returns a suffix for file names: this rank's position in each group (after init) and `global_rank` (if passed),
    such as dp0_pp0_tp1_dcp0_ep0_rank1.
    """
    parts = []
    if state.model_parallel_is_initialized():
        parts = [f"{axis}{state.get_group_rank(axis)}" for axis in ("dp", "pp", "tp", "dcp", "ep")]
    return "_".join(parts + ([] if global_rank is None else [f"rank{global_rank}"]))


def verify_group_size_divides_partition(
    input_size_per_partition: int, group_size: int, layer_name: str | None = None, extra_suggestion: str = ""
) -> None:
    if input_size_per_partition % group_size:
        raise ValueError(
            f"the input size of {layer_name or 'a layer'} on each rank, {input_size_per_partition}, must be a multiple "
            f"of the quantization group_size, {group_size}; lower tensor_parallel_size{extra_suggestion}"
        )


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Returns the first layer of stage `pp_rank` and the layer after its last.

    The variable VLLM_PP_LAYER_PARTITION, such as 5,2, sets the number of layers of each stage.
    """
    layers = layers_in("VLLM_PP_LAYER_PARTITION", num_hidden_layers, pp_size)
    if layers is None:
        return utilities.get_pp_indices(num_hidden_layers, pp_rank, pp_size)
    return sum(layers[:pp_rank]), sum(layers[: pp_rank + 1])


def is_weak_contiguous(inp: Tensor) -> bool:
    rest_bytes = inp.untyped_storage().nbytes() - inp.storage_offset() * inp.element_size()
    return inp.is_contiguous() or rest_bytes == inp.numel() * inp.element_size()


def check_shm_free_space(
    required_bytes: int, shm_path: str = SHM_PATH, *, allocation_name: str = "shared-memory allocation"
) -> None:
    with contextlib.suppress(FileNotFoundError):
        found = os.statvfs(shm_path)
        free_bytes = found.f_bavail * found.f_frsize
        if free_bytes < required_bytes:
            raise RuntimeError(
                f"{allocation_name} needs {required_bytes} bytes of {shm_path}, but {free_bytes} are free; enlarge "
                f"{shm_path} (docker run --shm-size)"
            )


def cpu_all_reduce_(tensor: Tensor, group: dist.ProcessGroup, timeout: timedelta | None = None) -> Tensor:
    """Sums the tensor over the group in place. `group` needn't be registered with torch."""
    options = dist.AllreduceOptions()
    if timeout is not None:
        options.timeout = timeout
    if group.size() > 1:
        group.allreduce([tensor], options).wait()
    return tensor


def create_tcp_store(host: str, port: int, listen_socket: socket.socket | None = None, **kwargs: Any) -> dist.TCPStore:
    if listen_socket is not None:
        kwargs["master_listen_fd"] = listen_socket.detach()
    return dist.TCPStore(host, port, **kwargs)


@functools.lru_cache(maxsize=1)
def get_cached_tcp_store_client(host: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)


def init_gloo_process_group(
    prefix_store: Any, group_rank: int, group_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Creates a gloo group that isn't registered with torch. Raises CollectiveTimeoutError if this takes longer than
    `timeout` + 1 s.
    """
    # In a thread: gloo's store operations have no deadline.
    call = Call(lambda: dist.ProcessGroupGloo(prefix_store, group_rank, group_size, timeout))
    limit_s = timeout.total_seconds()
    if not call.wait(time.monotonic() + limit_s + 1.0):
        raise CollectiveTimeoutError(
            f"rank {group_rank} of {group_size} could not make a gloo group within {limit_s:g} s: its store doesn't "
            "answer. See the log of the process that serves the store",
            operation="init_gloo_process_group",
            rank=group_rank,
            timeout_s=limit_s,
        )
    return group_over_gloo(prefix_store, group_rank, group_size, call.result())


def stateless_init_torch_distributed_process_group(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    backend: str,
    group_name: str | None = None,
    return_store: bool = False,
    listen_socket: socket.socket | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Creates a gloo group that is independent of torch's default group. `backend` has no effect.

    Rank 0 serves the group's store. Every rank must call this. With `group_name`, the group is registered with torch.
    With `return_store`, returns (group, store).
    """
    limit = timeout or _DEFAULT_TIMEOUT
    store = create_tcp_store(
        host, port, listen_socket, world_size=world_size, is_master=rank == 0, timeout=limit, multi_tenant=True
    )
    group = init_gloo_process_group(dist.PrefixStore(f"stateless/{host}:{port}", store), rank, world_size, limit)
    if group_name is not None:
        register_named(group, group_name)
    return (group, store) if return_store else group


def stateless_destroy_torch_distributed_process_group(pg: dist.ProcessGroup) -> None:
    pg.shutdown()
    with contextlib.suppress(RuntimeError):  # raised for a group without a name
        unregister_named(pg)
