from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from device_communicators.cuda.nccl_library import INTERNAL_ERROR, INVALID_USAGE, REMOTE_ERROR
from parallel_state.groups.parallel_groups import _Division
from parallel_state.process_groups.pool import ProcessGroupPool

__all__ = ["INTERNAL_ERROR", "INVALID_USAGE", "REMOTE_ERROR", "dividing"]


@contextmanager
def dividing(when_acquired: Callable[[], object] | None = None) -> Iterator[None]:
    """Asks for each process group as if the world were divided, as NCCL can; its members create it. With
    `when_acquired`, creates all groups at once, and calls the function before each process group."""
    divides, acquire, is_lazy = ProcessGroupPool.divides, ProcessGroupPool.acquire, _Division._is_lazy
    split = ProcessGroupPool._split_world

    def split_among_members(pool: Any, keys: Any) -> None:
        pool._groups.update((key, pool._new_group_of_members(key) if pool.rank in key[0] else None) for key in keys)

    def acquired(pool: Any, *args: Any, **options: Any) -> Any:
        if when_acquired is not None:
            when_acquired()
        return acquire(pool, *args, **options)

    ProcessGroupPool.divides = lambda self, options: True  # type: ignore[method-assign]
    ProcessGroupPool._split_world = split_among_members  # type: ignore[method-assign]
    if when_acquired is not None:
        ProcessGroupPool.acquire = acquired  # type: ignore[method-assign]
        _Division._is_lazy = lambda self, name: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        ProcessGroupPool.divides, ProcessGroupPool.acquire = divides, acquire  # type: ignore[method-assign]
        _Division._is_lazy, ProcessGroupPool._split_world = is_lazy, split  # type: ignore[method-assign]
