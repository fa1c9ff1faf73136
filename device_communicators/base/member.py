"""A rank's membership in a group: its facts, and the errors that name them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from device_communicators.base.errors import CollectiveMismatchError, CommunicationError, GroupDestroyedError

LOST = "The group can't be used further"
Failure = TypeVar("Failure", bound=CommunicationError)


class GroupMember:
    """Base class of objects with a group's name, ranks, own rank and timeout. Creates errors with these facts."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    timeout_s: float

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
        """Returns an error of the group.

        `started`: start of the operation on the monotonic clock; sets the error's elapsed time and timeout. `like`: an
        error whose facts are copied. `facts` override both.
        """
        if like is not None:
            names = ("sequence", "suspect_ranks", "elapsed_s", "timeout_s")
            facts = {**{name: getattr(like, name) for name in names}, **facts}
        if started is not None:
            facts = {"elapsed_s": time.monotonic() - started, "timeout_s": self.timeout_s, **facts}
        return kind(text, group=self.name, operation=operation, rank=self.rank, **facts)

    def mismatch(self, operation: str, what: str, suspects: Sequence[int], **facts: Any) -> CollectiveMismatchError:
        """Returns the error for ranks in different calls. `what` names the calls; `suspects` are global ranks."""
        advice = "make the same calls in the same order on every rank"
        text = f"{operation} of {self} mismatched: {what}. {LOST}; {advice}"
        return self.failure(CollectiveMismatchError, text, operation, suspect_ranks=suspects, **facts)

    def destroyed(self) -> GroupDestroyedError:
        """Returns the error for a call after the group was destroyed."""
        return GroupDestroyedError(f"{self} was destroyed; call the group's getter again")
