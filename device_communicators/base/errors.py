"""Every exception that the library raises on purpose.

No message of a communication error lacks the group, the operation, the rank and what to do next.
What does not belong here: anything that decides *when* to raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


class ParallelStateError(Exception):
    """Base of every error of the library.

    Pickle and copy keep its fields, and a cause that is another error of the library or an OSError.
    """

    def __reduce__(self) -> tuple[object, ...]:
        """Returns how to rebuild the error without `__init__`, whose arguments differ by class."""
        cause = self.__cause__
        is_kept = isinstance(cause, ParallelStateError) or (
            isinstance(cause, OSError) and type(cause).__module__ == "builtins"
        )
        return restore, (type(self), self.args, self.__dict__, cause if is_kept else None)


def restore(
    kind: type[ParallelStateError],
    arguments: tuple[object, ...],
    fields: Mapping[str, object],
    cause: BaseException | None,
) -> ParallelStateError:
    """Rebuilds a pickled error."""
    new = OSError.__new__ if issubclass(kind, OSError) else kind.__new__  # object's can't make a TimeoutError
    error: ParallelStateError = new(kind)
    error.args = arguments
    error.__dict__.update(fields)
    if cause is not None:
        error.__cause__ = cause
    return error


class UsageError(ParallelStateError):
    """The call is wrong: mend it. No data was sent; the group can be used further."""


class InvalidArgumentError(UsageError, ValueError):
    """An argument can't be used, whatever the state of the group is."""


class LayoutError(UsageError, ValueError):
    """Sizes or an order that don't fit the world."""


class SettingError(UsageError, ValueError):
    """An environment variable is missing or holds a value that can't be used."""


class MessageEncodeError(UsageError, TypeError):
    """An object holds a value of a type that doesn't travel; the message names its key path."""


class UnsupportedError(UsageError, NotImplementedError):
    """No communicator of the group carries this operation on this tensor."""


class GroupNotInitializedError(UsageError, RuntimeError):
    """A group was asked for before it was made."""


class AlreadyInitializedError(UsageError, RuntimeError):
    """Initialised twice without a destroy between."""


class GroupDestroyedError(UsageError, RuntimeError):
    """A group was used after it was destroyed."""


class RenamedError(UsageError, AttributeError):
    """An attribute has another name here; the message has the names that replace it."""


class ForkedError(UsageError, RuntimeError):
    """A group was used, or destroyed, in a process that was forked from its rank."""


class ConfigMismatchError(UsageError, ValueError):
    """A request differs from what exists, or from what another rank asked for."""


class CommunicationError(ParallelStateError, RuntimeError):
    """An operation failed on the way. The group is poisoned: its later calls fail at once.

    Attributes (None or empty where they don't apply): `group`, `operation`, `sequence` (the group's
    how-many-th operation), `rank` (this one, in the group), `suspect_ranks` (global ranks), `elapsed_s` (from the call
    until the error, including the time that the ranks took to find its cause), `timeout_s`. A GroupFailedError has
    those of the first failure.
    """

    def __init__(
        self,
        message: str,
        *,
        group: str | None = None,
        operation: str | None = None,
        sequence: int | None = None,
        rank: int | None = None,
        suspect_ranks: Sequence[int] = (),
        elapsed_s: float | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.group = group
        self.operation = operation
        self.sequence = sequence
        self.recent: tuple[str, ...] = ()
        """The group's last operations, this one the last."""
        self.rank = rank
        self.suspect_ranks = tuple(suspect_ranks)
        self.elapsed_s = elapsed_s
        self.timeout_s = timeout_s

    def set_elapsed(self, elapsed_s: float) -> None:
        """Sets `elapsed_s`, also in the text, which was written before other ranks were asked for the cause."""
        self.elapsed_s = max(elapsed_s, self.elapsed_s or 0.0)
        if self.args:
            self.args = (_ELAPSED.sub(f" after {self.elapsed_s:.3f} s", str(self.args[0]), count=1), *self.args[1:])

    def __str__(self) -> str:
        """Returns the message, with those facts that weren't known where it was written."""
        text = super().__str__()
        known = ((f"number {self.sequence}", self.sequence), (f"timeout {self.timeout_s or 0:g} s", self.timeout_s))
        added = [words for words, fact in known if fact is not None and words not in text]
        return f"{text} ({', '.join(added)})" if added else text


_ELAPSED = re.compile(r" after \d+\.\d{3} s\b")
"""The call's own time is the first in each text."""


class PeerDiedError(CommunicationError):
    """A rank of the group went away."""


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """An operation did not end within its deadline."""


class HostUnreachableError(PeerDiedError, CollectiveTimeoutError):
    """A host has not been heard of for longer than the heartbeats' limit: it died, or its link did.

    Silence doesn't tell the two apart. So it is caught by whoever handles deaths, and by whoever handles timeouts.
    """


class CollectiveMismatchError(CommunicationError):
    """Ranks of a group are in different operations, or in the same one with arguments that don't match."""


class MessageDecodeError(CommunicationError, ValueError):
    """Bytes that came from a peer are not a message of this library."""


class GroupFailedError(CommunicationError):
    """The group failed earlier; `__cause__` is the first failure."""


class RendezvousError(CommunicationError):
    """The ranks could not find each other: nobody listens, the port is taken, or someone never came."""


class ResourceLimitError(ParallelStateError, RuntimeError):
    """Descriptors, threads, memory or space ran out here; the message names the limit, and `__cause__` is the error."""


class RemoteError(ParallelStateError, RuntimeError):
    """Another rank raised; its message and traceback are in the text, its rank in `rank`."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class LaunchError(ParallelStateError, RuntimeError):
    """A process started by `launch` failed; its traceback is in the text, its global rank in `rank`."""

    def __init__(self, message: str, *, rank: int, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns `[0, 1, 2]`, or `[0, 1, 2, …, 1023]` for many."""
    if len(ranks) <= 16:
        return f"[{', '.join(map(str, ranks))}]"
    return f"[{', '.join(map(str, ranks[:3]))}, …, {ranks[-1]}]"


def int_advice(value: object) -> str:
    """Returns the advice to pass a Python int if numpy, torch or a string holds the rank or size; else ""."""
    if isinstance(value, int):
        return ""
    try:
        number = int(value) if isinstance(value, str) else value.__index__()  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return ""
    return f"; pass {number}, a Python int, as int(…) returns it"


def no_such_name(problem: str, name: str, known: Iterable[str]) -> str:
    """Returns the text about a name that doesn't exist, with the known name that is most like it."""
    from difflib import get_close_matches

    like = get_close_matches(name, known, 1)
    return f"{problem} {name!r}" + (f"; did you mean {like[0]!r}?" if like else "")


def plain(error: BaseException) -> str:
    """Returns the first line of what torch or gloo says, without its decoration and the places in its source."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    first = re.sub(r"\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\]\s*", "", first)
    first = first.partition("This is typically caused by")[0].partition("Check the logs of")[0]
    return first.encode("ascii", "ignore").decode().strip(" .")
