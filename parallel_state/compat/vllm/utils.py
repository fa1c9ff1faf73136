"""vLLM's `distributed.utils`, and the names besides the queue that vLLM imports from `shm_broadcast`."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
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
from_bytes_big = functools.partial(int.from_bytes, byteorder="big")
split_tensor_along_last_dim = utilities.split_tensor_along_last_dim
sched_yield = getattr(os, "sched_yield", None)  # Linux has it
USE_SCHED_YIELD = True
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_fence = threading.Lock()


def parallel_config() -> Any:
    """Returns the parallel part of vLLM's current config; None outside of vLLM."""
    config = sys.modules.get("vllm.config")
    current = None if config is None else config.get_current_vllm_config_or_none()
    return None if current is None else current.parallel_config


def get_cpu_distributed_timeout_or_none() -> timedelta | None:
    """Returns the timeout of CPU groups in vLLM's config; None outside of vLLM."""
    config = parallel_config()
    return None if config is None else config.cpu_distributed_timeout


def get_distributed_timeout_or_none() -> timedelta | None:
    """Returns the timeout of groups in vLLM's config; None where it has none, and outside of vLLM."""
    config = parallel_config()
    seconds = None if config is None else config.distributed_timeout_seconds
    return None if seconds is None else timedelta(seconds=seconds)


def get_worker_rank_suffix(global_rank: int | None = None) -> str:
    """Returns this rank's positions for a file's name: dp0_pp0_tp1_dcp0_ep0_rank1; without groups rank1 alone."""
    parts = []
    if state.model_parallel_is_initialized():
        parts = [f"{axis}{state.get_group_rank(axis)}" for axis in ("dp", "pp", "tp", "dcp", "ep")]
    return "_".join(parts + ([] if global_rank is None else [f"rank{global_rank}"]))


def verify_group_size_divides_partition(
    input_size_per_partition: int, group_size: int, layer_name: str | None = None, extra_suggestion: str = ""
) -> None:
    """Raises ValueError unless a rank's part of a layer's inputs is a whole number of quantisation groups."""
    if input_size_per_partition % group_size:
        raise ValueError(
            f"the inputs of {layer_name or 'a layer'} on each rank, {input_size_per_partition}, must be a multiple of "
            f"the quantisation's group_size, {group_size}; lower tensor_parallel_size{extra_suggestion}"
        )


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Returns a stage's first layer and the one after its last. VLLM_PP_LAYER_PARTITION (as 5,2) overrides them."""
    layers = layers_in("VLLM_PP_LAYER_PARTITION", num_hidden_layers, pp_size)
    if layers is None:
        return utilities.get_pp_indices(num_hidden_layers, pp_rank, pp_size)
    return sum(layers[:pp_rank]), sum(layers[: pp_rank + 1])


def is_weak_contiguous(inp: Tensor) -> bool:
    """Returns True if the tensor's bytes, in any order, are all that its storage has from its offset on."""
    rest_bytes = inp.untyped_storage().nbytes() - inp.storage_offset() * inp.element_size()
    return inp.is_contiguous() or rest_bytes == inp.numel() * inp.element_size()


def memory_fence() -> None:
    """Orders this process' writes to shared memory before it before its reads after it."""
    _fence.acquire()  # an interpreter's lock is a full barrier
    _fence.release()


def check_shm_free_space(
    required_bytes: int, shm_path: str = SHM_PATH, *, allocation_name: str = "shared-memory allocation"
) -> None:
    """Raises RuntimeError where shared memory, if it is there, has less room than that."""
    with contextlib.suppress(FileNotFoundError):
        found = os.statvfs(shm_path)
        free_bytes = found.f_bavail * found.f_frsize
        if free_bytes < required_bytes:
            raise RuntimeError(
                f"{allocation_name} needs {required_bytes} bytes of {shm_path}, but {free_bytes} are free; make it "
                "larger (docker run --shm-size)"
            )


def cpu_all_reduce_(tensor: Tensor, group: dist.ProcessGroup, timeout: timedelta | None = None) -> Tensor:
    """Sums a CPU tensor over a process group, which torch.distributed needn't know, in place; returns it."""
    options = dist.AllreduceOptions()
    if timeout is not None:
        options.timeout = timeout
    if group.size() > 1:
        group.allreduce([tensor], options).wait()
    return tensor


# Stores and groups beside torch's.


def create_tcp_store(host: str, port: int, listen_socket: socket.socket | None = None, **kwargs: Any) -> dist.TCPStore:
    """Returns a TCPStore, which owns `listen_socket`, and serves on it, where that is given."""
    if listen_socket is not None:
        kwargs["master_listen_fd"] = listen_socket.detach()
    return dist.TCPStore(host, port, **kwargs)


@functools.lru_cache(maxsize=1)
def get_cached_tcp_store_client(host: str, port: int) -> dist.TCPStore:
    """Returns a client of the store at an address; the last one again if it is asked for again."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)


def init_gloo_process_group(
    prefix_store: Any, group_rank: int, group_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Returns a gloo group that isn't registered with torch.distributed. Every rank of the group must call this.

    Raises CollectiveTimeoutError a second after `timeout`.
    """
    # gloo's operations at the store have no deadline.
    call = Call(lambda: dist.ProcessGroupGloo(prefix_store, group_rank, group_size, timeout))
    limit_s = timeout.total_seconds()
    if not call.wait(time.monotonic() + limit_s + 1.0, lambda: False):
        raise CollectiveTimeoutError(
            f"rank {group_rank} of {group_size} could not make a gloo group within {limit_s:g} s: its store doesn't "
            "answer. Look at the process that serves it",
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
    """Returns a gloo group, whatever the backend, beside torch's own; with its store if `return_store`.

    Rank 0 serves the store, on `listen_socket` where that is given. All ranks call it.
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
    """Ends a group of stateless_init_torch_distributed_process_group, on this rank."""
    pg.shutdown()
    with contextlib.suppress(RuntimeError):  # it may have no name
        unregister_named(pg)
