"""A rank's membership in a group: the base of what communicators and shared memory know of it, and its errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from device_communicators.base.errors import CollectiveMismatchError, CommunicationError, GroupDestroyedError

LOST = "The group can't be used further"
Failure = TypeVar("Failure", bound=CommunicationError)


class GroupMember:
    """Base of what knows a group and this process' rank in it: makes the group's errors, with these facts."""

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
        """Returns an error of the group; `started`, when the operation began, gives it elapsed time and timeout.

        `like`: an error with the same facts.
        """
        if like is not None:
            names = ("sequence", "suspect_ranks", "elapsed_s", "timeout_s")
            facts = {**{name: getattr(like, name) for name in names}, **facts}
        if started is not None:
            facts = {"elapsed_s": time.monotonic() - started, "timeout_s": self.timeout_s, **facts}
        return kind(text, group=self.name, operation=operation, rank=self.rank, **facts)

    def mismatch(self, operation: str, what: str, suspects: Sequence[int], **facts: Any) -> CollectiveMismatchError:
        """Returns the error for ranks in different calls; `what` names the calls, `suspects` global ranks."""
        advice = "make the same calls in the same order on every rank"
        text = f"{operation} of {self} met another call: {what}. {LOST}; {advice}"
        return self.failure(CollectiveMismatchError, text, operation, suspect_ranks=suspects, **facts)

    def destroyed(self) -> GroupDestroyedError:
        """Returns the error for a call after the group's end."""
        return GroupDestroyedError(f"{self} was destroyed; take the group anew from its getter")
