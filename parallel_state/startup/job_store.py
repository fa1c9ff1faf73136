"""Keeps a reference to the store that `launch` passed to this process, because torch's C++ code keeps none."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from device_communicators.base.torch_internals import default_store
from device_communicators.control.store import ControlStore


class JobStore:
    def __init__(self) -> None:
        self._store: ControlStore | None = None
        self._all: list[ControlStore] = []

    def put(self, store: ControlStore | None) -> None:
        """Stores `store` and closes the previous one, but keeps its object: an abandoned process group can use it."""
        before, self._store = self._store, store
        if before is not None:
            before.close()
        if store is not None:
            self._all.append(store)

    def try_get(self, host: str, port: int) -> ControlStore | None:
        store = self._store
        return store if store is not None and store.address == (host, port) else None


JOB_STORE = JobStore()


def store_in_words() -> str:
    if not dist.is_initialized():
        return "none: torch.distributed has no default group"
    store: Any = default_store().raw
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if access := getattr(store, "access", ""):
        return f"{store}, which requires {access}"
    if isinstance(store, dist.TCPStore):
        return f"TCPStore at {store.host}:{store.port}, which accepts every process that reaches it"
    return type(store).__name__
