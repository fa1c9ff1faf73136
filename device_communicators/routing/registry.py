"""Finds this process's groups by name, registers hooks of operations, and writes the last operations to a file."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from device_communicators.base import forks, settings
from device_communicators.base.errors import GroupDestroyedError, GroupNotInitializedError
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.calls import recorder
from device_communicators.calls.interruption import raise_interruption
from device_communicators.routing import observers, status
from device_communicators.routing.observers import METERS, measure, switch_native_meter
from device_communicators.routing.route import Route

logger = logging.getLogger("parallel_state")
_T = TypeVar("_T")

_ROUTES: weakref.WeakValueDictionary[str, Route] = weakref.WeakValueDictionary()
_KNOWN_NAMES: dict[str, str] = {}
"""Maps each group's key to its name. Includes destroyed groups."""
_NEXT_INDEX: dict[str, int] = {}


def routes() -> list[Route]:
    """Returns the `Route` of each group, except closed and simulated groups, and groups of one rank."""
    found = sorted({id(route): route for route in _ROUTES.values()}.values(), key=lambda route: route.context.name)
    return [route for route in found if route.context.size > 1 and not route.context.simulated and not route.closed]


@host_call(OUTSIDE)
def on_operation(hook: Callable[[observers.OperationEvent], object]) -> Callable[[], None]:
    """Calls `hook(event)` after each operation of this process's groups. Returns a function that removes the hook.

    While there is a hook, all operations run in Python instead of C++. A started operation is reported when the program
    waits for it. Exceptions of hooks are logged.
    """
    return _add(hook, observers.ON_OPERATION, _serve_ops)


@host_call(OUTSIDE)
def on_failure(hook: Callable[[observers.FailureEvent], object]) -> Callable[[], None]:
    """Calls `hook(event)` when a group fails on this rank. Returns a function that removes the hook.

    The hook runs in the thread that detects the failure, before the error is raised. Exceptions of hooks are logged.
    """
    return _add(hook, observers.ON_FAILURE)


def _add(hook: _T, hooks: list[_T], changed: Callable[[], None] = lambda: None) -> Callable[[], None]:
    hooks.append(hook)
    changed()

    def remove() -> None:
        if hook in hooks:
            hooks.remove(hook)
            changed()

    return remove


def _serve_ops() -> None:
    for route in routes():
        if route.first_failure is None:
            route.serve_ops(not observers.ON_OPERATION)


@host_call(OUTSIDE)
def write_record(folder: str | os.PathLike[str]) -> Path | None:
    """Writes this rank's last operations to a file in `folder`, for `python -m parallel_state debug`. Returns the
    file's path.

    Returns None if there is no group, or if writing fails, which is logged. Thread-safe.
    """
    found = routes()
    if not found:
        return None
    groups = [
        {
            "group": route.context.name,
            "ranks": list(route.context.ranks),
            "failure": None if route.first_failure is None else str(route.first_failure),
            "operations": [asdict(each) for each in route.operations()],
        }
        for route in found
    ]
    watchers = dict.fromkeys(route.context.watcher for route in found)
    control = [watcher.record() for watcher in watchers if watcher is not None]
    try:
        return recorder.write(Path(folder), found[0].context.global_rank, groups, filter(None, control))
    except OSError as error:
        logger.warning("writing the record of the last operations to %s failed: %s", folder, error)
        return None


def _record_failure(_: observers.FailureEvent) -> None:
    folder = settings.DEBUG_DIR.get()
    if folder:
        write_record(folder)


observers.ON_FAILURE.append(_record_failure)


def _leave_to_parent() -> bool:
    """In a forked child, marks inherited groups as unusable without freeing their resources. Returns True if there are
    any.
    """
    inherited = [route for route in _ROUTES.values() if not route.closed and not route.context.simulated]
    for route in inherited:
        route.closed = route.is_parents = True
    return bool(inherited)


def register_route(route: Route) -> None:
    """Makes `find_route` and torch ops find the route by the group's key. The caller must keep the route alive."""
    forks.watch(_leave_to_parent)
    if settings.METRICS.get() and not METERS.is_on:
        measure(True)
    if METERS.is_on:
        switch_native_meter(route.context)
    former = _ROUTES.get(route.context.key)
    if former is not None:
        former.serve_ops(False)
    route.serve_ops(True)
    status.watch(route)
    for each in (route.context.name, route.context.key, route.context.ranked_key):
        _ROUTES[each], _KNOWN_NAMES[each] = route, route.context.name


def unique_name(stem: str) -> str:
    """Returns a new name for a group: for the stem `tp` first `tp:0`, then `tp:1`. Names aren't reused."""
    index = _NEXT_INDEX.get(stem, 0)
    _NEXT_INDEX[stem] = index + 1
    return f"{stem}:{index}"


def find_route(key: str) -> Route:
    """Returns the route of the group `key` (name and size). Raises GroupDestroyedError if the group was destroyed, and
    GroupNotInitializedError if it never existed.
    """
    route = _ROUTES.get(key)
    if route is None or route.closed or route.first_failure is not None:
        raise_interruption()
    if route is not None:
        return route
    name = _KNOWN_NAMES.get(key)
    if name is not None:
        raise GroupDestroyedError(f"group {name!r} was destroyed; get or create the group again")
    known = sorted({route.context.name for route in _ROUTES.values()})
    raise GroupNotInitializedError(
        f"this process has no group named {key!r}; its groups are {known}. Call initialize_model_parallel first"
    )
