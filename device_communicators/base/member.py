"""Describes one rank's membership in a group (names, ranks, timeout), and makes errors with these attributes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeVar

from device_communicators.base.errors import (
    CollectiveMismatchError,
    CommunicationError,
    GroupDestroyedError,
    InvalidArgumentError,
)
from device_communicators.base.host_calls import OUTSIDE, host_call


class Timeout:
    """A group's timeout, shared by all objects of the group. A change applies to calls that begin later.

    `all`: every instance. `extra_s`: added to all timeouts by `extended_deadline`.
    """

    all: ClassVar[weakref.WeakSet[Timeout]] = weakref.WeakSet()
    extra_s: ClassVar[float] = 0.0

    def __init__(self, seconds: float) -> None:
        self._own_s = seconds
        self._followers: list[Callable[[float], object]] = []
        with _EXTENDING:  # `_extend` iterates the set
            Timeout.all.add(self)

    @property
    def seconds(self) -> float:
        return self._own_s + Timeout.extra_s

    def set(self, seconds: float) -> None:
        self._own_s = seconds
        self.publish()

    def follow(self, apply: Callable[[float], object]) -> None:
        self._followers.append(apply)

    def publish(self) -> None:
        for apply in self._followers:
            apply(self.seconds)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        before = self._own_s
        self.set(seconds)
        try:
            yield
        finally:
            self.set(before)

    def end(self) -> None:
        self._followers.clear()


@host_call(OUTSIDE)
def extended_deadline(seconds: float) -> AbstractContextManager[None]:
    """Adds `seconds` to the timeout of each call of this process that begins in the `with` block: `with
    ps.extended_deadline(600): warm_up()`.

    Applies to all groups, also new ones and those of our backend for torch.distributed, except for calls over gloo.
    Sends nothing: every rank that waits for a slow rank must use this. Nested uses add up. An asynchronous call gets
    the extra time if its `wait()` begins in the block. Raises InvalidArgumentError if `seconds` isn't positive or
    exceeds ten years.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < MOST_TIMEOUT_S:
        raise InvalidArgumentError(f"extended_deadline takes a positive number of seconds, but got {seconds!r}")
    return _extended(seconds)


@contextmanager
def _extended(seconds: float) -> Iterator[None]:
    _extend(seconds)
    try:
        yield
    finally:
        _extend(-seconds)


def _extend(seconds: float) -> None:
    with _EXTENDING:
        Timeout.extra_s += seconds
        for each in list(Timeout.all):
            each.publish()


_EXTENDING = threading.Lock()
MOST_TIMEOUT_S = 10 * 365 * 86400
"""Largest timeout. With infinite seconds, the subtraction at the end of extended_deadline would give NaN."""
LOST = "The group can't be used further"
LEFT = "has left: it destroyed its group, or its program ended"
Failure = TypeVar("Failure", bound=CommunicationError)


class GroupMember:
    name: str
    ranks: tuple[int, ...]
    rank: int
    timeout: Timeout

    @property
    def timeout_s(self) -> float:
        return self.timeout.seconds

    def failure(
        self,
        kind: type[Failure],
        text: str,
        operation: str | None,
        *,
        started: float | None = None,
        like: CommunicationError | None = None,
        **facts: Any,
    ) -> Failure:
        """Returns an error of class `kind` whose attributes describe this group. `operation`: the failed method.
        `started`: the call's start by the monotonic clock. `like`: an error whose attributes are copied. `facts`: other
        attributes, which take precedence.
        """
        if like is not None:
            names = ("sequence", "suspect_ranks", "elapsed_s", "timeout_s")
            facts = {**{name: getattr(like, name) for name in names}, **facts}
        if started is not None:
            facts = {"elapsed_s": time.monotonic() - started, "timeout_s": self.timeout_s, **facts}
        return kind(text, group=self.name, operation=operation, rank=self.rank, **facts)

    def lost(
        self,
        kind: type[Failure],
        operation: str,
        why: str,
        advice: str,
        elapsed_s: float,
        suspects: Sequence[int] = (),
        **facts: Any,
    ) -> Failure:
        text = f"{operation} of {self} failed after {elapsed_s:.3f} s: {why}. {LOST}; {advice}"
        facts = {"suspect_ranks": suspects, "elapsed_s": elapsed_s, "timeout_s": self.timeout_s, **facts}
        return self.failure(kind, text, operation, **facts)

    def mismatch(self, operation: str, what: str, suspects: Sequence[int], **facts: Any) -> CollectiveMismatchError:
        advice = "make the same calls in the same order on every rank"
        text = f"{operation} of {self} mismatched: {what}. {LOST}; {advice}"
        return self.failure(CollectiveMismatchError, text, operation, suspect_ranks=suspects, **facts)

    def destroyed(self) -> GroupDestroyedError:
        return GroupDestroyedError(f"{self} was destroyed; get or create the group again")
