"""Gives torch the control plane's store in C++, which torch's threads call without the interpreter lock.

torch uses a store from its own threads: NCCL's monitor and heartbeat, gloo's lazily connected pairs. A store in Python
makes each of them wait for the interpreter lock, and isn't safe at exit.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import Any

from device_communicators.c10d import extension
from device_communicators.control.store import ControlStore

logger = logging.getLogger("parallel_state")


@cache
def try_load() -> Any:
    """Returns the compiled module, or None. Compiles it if needed."""
    module, problem = extension.try_load()
    if module is None:
        logger.info("torch's threads need the interpreter lock for the control plane's store, which %s", problem)
    return module


def for_torch(store: Any) -> Any:
    """Returns the store to give to torch: in C++ if `store` is a ControlStore and the module can be compiled.

    The caller keeps a ControlStore alive as long as torch uses it: without the module it is returned itself.
    """
    module = try_load() if isinstance(store, ControlStore) else None
    if module is None:
        return store
    return module.Store(
        library=str(store.library.path),
        client=store.client(),
        name=str(store),
        address=store.address,
        served_by=store.served_by,
        access=store.access,
        main_thread=threading.main_thread().ident,
        timeout=store.timeout,
    )
