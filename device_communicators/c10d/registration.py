"""Makes torch.distributed know the backend, without loading any of it."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

NAME = "parallel_state"


def register() -> None:
    """Lets `init_process_group("parallel_state")` and its like find the backend. Twice is fine.

    The default backend of a device stays as it is.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        _open_monitored_barrier()


def _open_monitored_barrier() -> None:
    """Lets `dist.monitored_barrier`, which takes gloo's groups alone by their name, take those of this backend."""
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


def _create(options: Any, backend_options: Any) -> Any:
    from device_communicators.c10d.creation import create

    return create(options, backend_options)
