"""The groups that `ParallelGroups.use()` made current: of a context, of the threads started in it, of its backward.

A context variable holds them, so two asyncio tasks of one thread don't see each other's. What Python and torch don't
carry along by themselves is here:

- threads: `threading.Thread.start` is wrapped while some groups are in use, and a thread that is started inside has
  them. A worker of a thread pool outlives the work it was started for; it has none, and a look-up in it raises.
- backward: a function that autograd runs, such as a checkpoint's recomputation, gets the groups of its forward, in
  whatever thread of autograd's it runs. Nodes are numbered in the order of their creation in a thread, so the numbers
  at which `use()` was entered and left tell which groups a node was made under. What a backward computes itself
  and goes backward through, as a reentrant checkpoint does, has its groups from the first look-up in it on.
- compiled code: dynamo can't trace a look-up of a context variable. See `_Current`.
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
"""The groups in use, None, or `POOLED`."""


class _Forwards:
    """The groups in use when the autograd nodes of one thread were created: changes, by the number of the next node.

    Holds no groups alive. Tasks of an event loop take turns without a word, so under one it is unknown whose a node is:
    their backward gets the groups that are current then.
    """

    exist: ClassVar[bool] = False
    """Of any thread: without, a look-up needn't ask whether it is in a backward."""

    def __init__(self, groups: Any) -> None:
        _Forwards.exist = True
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
        """Returns the groups of a node, None, or `_UNKNOWN`. Raises where they are gone."""
        # Below a backward in a thread of autograd's, nodes have that thread's numbers: no record tells of them.
        foreign = threading.get_ident() != self._thread and is_in_nested_backward()
        groups = self._groups[-1 if foreign else bisect_right(self._numbers, node) - 1]
        if groups is _FORGOTTEN:
            raise UsageError(
                f"the forward of this backward pass lies more than {_MOST_MARKS // 2} uses of groups back; "
                "put `with groups.use():` around its backward as well"
            )
        if not isinstance(groups, weakref.ref):
            return groups
        found = groups()
        if found is None:
            raise GroupNotInitializedError("the groups of this backward pass's forward are gone; keep them until then")
        return found


def _weak(groups: Any) -> Any:
    return groups if groups is None or groups is POOLED else weakref.ref(groups)


def _in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def _find(_: _Current) -> Any:
    """Returns the groups in use here, None, or `POOLED`."""
    node = node_in_backward() if _Forwards.exist else None
    forwards = None if node is None else stashed_for_autograd()
    if node is not None and forwards is not None:
        groups = forwards.at(node)
        if groups is not _UNKNOWN:
            if isinstance(forwards, _Forwards):
                # For what is called in this backward; autograd puts the other one back after this node.
                stash_for_autograd(SimpleNamespace(at=lambda _: groups))
            return groups
    return _CONTEXT.get()


leave_to_interpreter(_find)


class _Current:
    """One attribute, `groups`, which compiled code is guarded by: a graph of other groups isn't taken.

    dynamo takes a property whose getter is an `instancemethod` (pybind's form) for one written in C: it doesn't trace
    the getter, and its guards ask for the attribute anew in each call, as they do for an attribute of any object.
    """

    _new = ctypes.pythonapi.PyInstanceMethod_New
    _new.restype, _new.argtypes = ctypes.py_object, [ctypes.py_object]
    groups = property(_new(_find))


CURRENT = _Current()


@contextmanager
def using(groups: _Groups) -> Iterator[_Groups]:
    """Makes `groups` current in this context, as `ParallelGroups.use` says."""
    before = _CONTEXT.get()
    forwards = _forwards_of_thread(before)
    with _THREAD_STARTS.wrapped():
        _CONTEXT.set(groups)
        forwards.note(groups)
        try:
            yield groups
        finally:
            _CONTEXT.set(before)
            forwards.note(before)


_OF_THREAD = threading.local()


def _forwards_of_thread(groups: Any) -> _Forwards:
    """Returns this thread's record, made with its first use.

    Autograd shows it to the threads that work for this one.
    """
    forwards: _Forwards | None = getattr(_OF_THREAD, "forwards", None)
    if forwards is None:
        forwards = _OF_THREAD.forwards = _Forwards(groups)
        stash_for_autograd(forwards)
    return forwards


_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
"""The modules whose threads work for whoever comes next."""


class _ThreadStarts:
    """`threading.Thread.start` while some groups are in use: a thread gets the groups that its starter has."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._original: Any = None
        """As it was, while ours is in its place."""

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
                if not self._users and threading.Thread.start is _start:  # else somebody has wrapped it: it stays
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
