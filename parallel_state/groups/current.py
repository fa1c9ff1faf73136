"""Finds the groups that `ParallelGroups.use()` made current. A context variable stores them.

Three kinds of code find the groups in other ways:

- A thread that starts inside `use()` uses the groups of the starting thread. `threading.Thread.start` is wrapped while
  any groups are in use.
- A backward pass uses the groups of its forward pass. Autograd numbers a thread's nodes in order, and `_Forwards`
  records the groups of each range of numbers.
- Compiled code reads `_Current.groups`.
"""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from device_communicators.base.errors import GroupNotInitializedError, UsageError
from device_communicators.base.torch_internals import (
    is_in_nested_backward,
    leave_to_interpreter,
    node_in_backward,
    stash_for_autograd,
    stashed_for_autograd,
    upcoming_node,
)

_Groups = TypeVar("_Groups")
_MOST_MARKS = 4096
_UNKNOWN, _FORGOTTEN, POOLED = object(), object(), object()

_CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("parallel_state_groups", default=None)
"""The current groups; None outside of `use()`; `POOLED` in the workers of a thread pool."""


class _Forwards:
    """Records which groups were current when one thread's autograd nodes were created.

    Autograd doesn't record which asyncio task created a node. So a node created in an event loop has no record, and the
    node's backward uses the groups that are current during the backward.
    """

    any_exist: ClassVar[bool] = False
    """True once any thread has records."""

    def __init__(self, groups: Any) -> None:
        _Forwards.any_exist = True
        self._thread = threading.get_ident()
        self._numbers = [0]
        self._groups = [_weak(groups)]

    def note(self, groups: Any) -> None:
        number, groups = upcoming_node(), _UNKNOWN if _in_event_loop() else _weak(groups)
        if self._numbers[-1] == number:  # no node since
            self._groups[-1] = groups
            return
        self._numbers.append(number)
        self._groups.append(groups)
        if len(self._numbers) > _MOST_MARKS:
            del self._numbers[1 : _MOST_MARKS // 2], self._groups[1 : _MOST_MARKS // 2]
            self._groups[0] = _FORGOTTEN

    def at(self, node: int) -> Any:
        # A nested backward on an autograd thread has that thread's node numbers, which aren't recorded.
        foreign = threading.get_ident() != self._thread and is_in_nested_backward()
        groups = self._groups[-1 if foreign else bisect_right(self._numbers, node) - 1]
        if groups is _FORGOTTEN:
            raise UsageError(
                f"the groups of this backward pass are no longer known, because groups.use() was entered more than "
                f"{_MOST_MARKS // 2} times since its forward pass; put `with groups.use():` around the backward pass "
                "as well"
            )
        if not isinstance(groups, weakref.ref):
            return groups
        found = groups()
        if found is None:
            raise GroupNotInitializedError(
                "the groups that the forward pass used were deleted before its backward pass; keep a reference to "
                "them until the backward pass is done"
            )
        return found


def _weak(groups: Any) -> Any:
    return groups if groups is None or groups is POOLED else weakref.ref(groups)


def _in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def _find(_: _Current) -> Any:
    node = node_in_backward() if _Forwards.any_exist else None
    if node is not None and (forwards := stashed_for_autograd()) is not None:
        groups = forwards.at(node)
        if groups is not _UNKNOWN:
            if isinstance(forwards, _Forwards):
                # For everything this node calls; autograd restores the record after the node.
                stash_for_autograd(SimpleNamespace(at=lambda _: groups))
            return groups
    return _CONTEXT.get()


leave_to_interpreter(_find)


class _Current:
    """Has the current groups as its attribute `groups`. torch.compile sets a guard on the attribute's value.

    dynamo doesn't trace the getter, because dynamo takes its type, `instancemethod`, for C code.
    """

    _new = ctypes.pythonapi.PyInstanceMethod_New
    _new.restype, _new.argtypes = ctypes.py_object, [ctypes.py_object]
    groups = property(_new(_find))


CURRENT = _Current()
_OF_THREAD = threading.local()


@contextmanager
def using(groups: _Groups) -> Iterator[_Groups]:
    before = _CONTEXT.get()
    forwards: _Forwards | None = getattr(_OF_THREAD, "forwards", None)
    if forwards is None:
        forwards = _OF_THREAD.forwards = _Forwards(before)
        stash_for_autograd(forwards)  # for autograd's own threads
    with _THREAD_STARTS.wrapped():
        _CONTEXT.set(groups)
        forwards.note(groups)
        try:
            yield groups
        finally:
            _CONTEXT.set(before)
            forwards.note(before)


_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
"""Modules whose worker threads run functions that other threads submit."""


class _ThreadStarts:
    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._original: Any = None

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._original is None:
                self._original, threading.Thread.start = threading.Thread.start, _start  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and threading.Thread.start is _start:  # else other code has wrapped ours
                    threading.Thread.start, self._original = self._original, None  # type: ignore[method-assign]

    def start(self, thread: threading.Thread) -> None:
        groups, start = _CONTEXT.get(), self._original or threading.Thread.start
        if groups is not None:
            of_pool = getattr(getattr(thread, "_target", None), "__module__", "") in _POOLS
            context, run = contextvars.Context(), thread.run
            context.run(_CONTEXT.set, POOLED if of_pool else groups)
            thread.run = lambda: context.run(run)  # type: ignore[method-assign]
        start(thread)


_THREAD_STARTS = _ThreadStarts()


def _start(thread: threading.Thread) -> None:
    _THREAD_STARTS.start(thread)
