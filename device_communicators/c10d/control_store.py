"""Wraps the control plane's key-value store in a C++ class for torch.

A Python store would make torch's own threads wait for the interpreter lock, and isn't safe when the interpreter exits.
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
    module, problem = extension.try_load()
    if module is None:
        logger.info("torch's threads need the interpreter lock for the control plane's store, which %s", problem)
    return module


def for_torch(store: Any) -> Any:
    """Returns a C++ client for the server of `store`, or `store` itself if it isn't a ControlStore or the compiled
    module is missing. The caller must keep a returned ControlStore alive.
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
