"""Makes torch.distributed know the backend, without loading any of it."""

from __future__ import annotations

from typing import Any

NAME = "parallel_state"


def register() -> None:
    """Lets `init_process_group("parallel_state")` and its like find the backend. Twice is fine.

    The default backend of a device stays as it is.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from device_communicators.c10d.creation import create

    return create(options, backend_options)
