"""Registers the backend with torch.distributed. When the backend creates its first group, it patches functions of torch
that accept only gloo.
"""

from __future__ import annotations

import functools
import os
import sys
from datetime import timedelta
from typing import Any

from device_communicators.base import logs
from device_communicators.base.settings import SHOWN_BACKEND
from device_communicators.base.torch_internals import (
    backend_of,
    device_types_of,
    has_plugin,
    set_backend_timeout,
    wrap_backend_name,
    wrap_set_pg_timeout,
)

NAME = "parallel_state"
_TRUSTED = ("torch", "parallel_state", "device_communicators")
"""Code in these packages gets "parallel_state" from `dist.get_backend`, because it creates groups with the returned
name. Other code gets "gloo".
"""


def register() -> None:
    """Registers the backend for CPU tensors. torch's default backends stay the same. Idempotent."""
    import torch.distributed as dist

    if dist.is_available() and not has_plugin(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


@functools.cache
def _open_torch() -> None:
    _open_monitored_barrier()
    _open_set_pg_timeout()
    _open_backend_type()


def _open_monitored_barrier() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    of_gloo = dist.monitored_barrier

    @functools.wraps(of_gloo)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if dist.get_rank(group) < 0 or f"cpu:{NAME}" not in dist.get_backend_config(group):
            of_gloo(group, timeout, wait_all_ranks)
            return
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        made: Any = dist.group.WORLD if group is None else group
        made.monitored_barrier(*(() if timeout is None else (timeout,)), wait_all_ranks=wait_all_ranks)

    dist.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier


def _open_set_pg_timeout() -> None:
    import torch
    import torch.distributed as dist

    if hasattr(dist, "set_timeout"):
        return

    def wrap(of_others: Any) -> Any:
        @functools.wraps(of_others)
        def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
            made: Any = dist.group.WORLD if group is None else group
            if dist.get_rank(made) < 0 or not _is_of_this_backend(made):
                of_others(timeout, group)
                return
            if torch.device("cuda") in device_types_of(made):
                of_others(timeout, group)
            set_backend_timeout(backend_of(made, torch.device("cpu")), timeout)

        return _set_pg_timeout

    wrap_set_pg_timeout(wrap)


def _open_backend_type() -> None:
    """Makes torch report "gloo" as this backend's type. With torch's own value "custom", ShardedTensor would treat the
    group as one of GPUs.
    """

    def wrap(of_torch: Any) -> Any:
        @functools.wraps(of_torch)
        def _get_backend_name(group: Any) -> str:
            name = of_torch(group)
            return "gloo" if name == "custom" and _is_of_this_backend(group) else name

        return _get_backend_name

    wrap_backend_name(wrap)


def _is_of_this_backend(group: Any) -> bool:
    import torch

    backend = backend_of(group, torch.device("cpu"))
    return backend is not None and backend.name() == NAME


@functools.cache
def _show_as_gloo() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    of_torch = dist.get_backend

    @functools.wraps(of_torch)
    def get_backend(group: Any = None) -> Any:
        name = of_torch(group)
        if NAME not in name or SHOWN_BACKEND.get() == NAME:
            return name
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return name if caller in _TRUSTED else dist.Backend(name.replace(NAME, "gloo"))

    dist.get_backend = distributed_c10d.get_backend = get_backend


def _create(options: Any, backend_options: Any) -> Any:
    from device_communicators.c10d.creation import create

    logs.configure(int(rank) if (rank := os.environ.get("RANK", "")).isdecimal() else None)
    _open_torch()
    if SHOWN_BACKEND.get() != NAME:
        _show_as_gloo()
    return create(options, backend_options)
