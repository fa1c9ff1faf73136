"""The library's exceptions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


class ParallelStateError(Exception):
    """Base class of the library's errors.

    Pickling and copying keep the attributes. They keep `__cause__` only if that is an error of the library or an
    OSError.
    """

    def __reduce__(self) -> tuple[object, ...]:
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
    new = OSError.__new__ if issubclass(kind, OSError) else kind.__new__  # object.__new__ can't make a TimeoutError
    error: ParallelStateError = new(kind)
    error.args = arguments
    error.__dict__.update(fields)
    if cause is not None:
        error.__cause__ = cause
    return error


class UsageError(ParallelStateError):
    """The call is wrong and has sent no data. Correct the call; the group is still usable."""


class InvalidArgumentError(UsageError, ValueError):
    """An argument is invalid, whatever the state of the group."""


class LayoutError(UsageError, ValueError):
    """The sizes or the order of a layout's axes are invalid for the world."""


class SettingError(UsageError, ValueError):
    """An environment variable is missing or has an invalid value."""


class MessageEncodeError(UsageError, TypeError):
    """An object contains a value of a type that can't be sent. The error's text names the path of keys to the value."""


class UnsupportedError(UsageError, NotImplementedError):
    """The group or the platform doesn't support the call, for example for this tensor's dtype or device."""


class GroupNotInitializedError(UsageError, RuntimeError):
    """A group was requested before it was created."""


class AlreadyInitializedError(UsageError, RuntimeError):
    """The distributed environment or its groups were initialised twice without a destroy in between."""


class GroupDestroyedError(UsageError, RuntimeError):
    """A group was used after it was destroyed."""


class RenamedError(UsageError, AttributeError):
    """An attribute has another name in this library. The error's text has the names that replace it."""


class ForkedError(UsageError, RuntimeError):
    """A group was used, or destroyed, in a process that was forked from its rank."""


class ConfigMismatchError(UsageError, ValueError):
    """A request contradicts an existing group or setting, or the request of another rank."""


class CommunicationError(ParallelStateError, RuntimeError):
    """Base class of errors that make a group unusable: its later calls raise GroupFailedError at once.

    Attributes, which are None or empty if they don't apply: `group` (name), `operation` (failed method), `sequence`
    (number of the operation within its group), `rank` (in the group), `suspect_ranks` (global, may be the cause),
    `elapsed_s` (includes the search for the cause), `timeout_s`. A GroupFailedError has the attributes of the group's
    first failure.
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
        """The group's last operations, as text. The failed operation is the last of them."""
        self.rank = rank
        self.suspect_ranks = tuple(suspect_ranks)
        self.elapsed_s = elapsed_s
        self.timeout_s = timeout_s

    def set_elapsed(self, elapsed_s: float) -> None:
        """Sets `elapsed_s`, which never decreases, and updates the time in the message."""
        self.elapsed_s = max(elapsed_s, self.elapsed_s or 0.0)
        if self.args:
            self.args = (_ELAPSED.sub(f" after {self.elapsed_s:.3f} s", str(self.args[0]), count=1), *self.args[1:])

    def __str__(self) -> str:
        text = super().__str__()
        known = ((f"number {self.sequence}", self.sequence), (f"timeout {self.timeout_s or 0:g} s", self.timeout_s))
        added = [words for words, fact in known if fact is not None and words not in text]
        return f"{text} ({', '.join(added)})" if added else text


_ELAPSED = re.compile(r" after \d+\.\d{3} s\b")
"""Matches a duration. The first match in an error's message is the duration of the call."""


class PeerDiedError(CommunicationError):
    """A rank exited, was killed or left while the group needed it."""


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """An operation did not complete before its deadline."""


class HostUnreachableError(PeerDiedError, CollectiveTimeoutError):
    """A host has sent nothing for longer than PARALLEL_STATE_HEARTBEAT_LIMIT_S: the host or its link failed."""


class CollectiveMismatchError(CommunicationError):
    """Ranks of a group made different calls, or the same call with arguments that don't match."""


class MessageDecodeError(CommunicationError, ValueError):
    """Bytes received from a peer are not a valid message of this library."""


class GroupFailedError(CommunicationError):
    """A call was made on a group that had failed earlier; `__cause__` is the first failure."""


class RendezvousError(CommunicationError):
    """The ranks could not find each other: no store listens, the port is in use, or a rank is missing."""


class ResourceLimitError(ParallelStateError, RuntimeError):
    """This process ran out of descriptors, threads, memory or disk space.

    The message names the limit. `__cause__` is the original error.
    """


class RemoteError(ParallelStateError, RuntimeError):
    """Another rank, `rank` (global), raised an exception. The text has its message and traceback."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class LaunchError(ParallelStateError, RuntimeError):
    """A process started by `launch` failed. The text has its traceback; `rank` is its global rank."""

    def __init__(self, message: str, *, rank: int, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


def format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= 16:
        return f"[{', '.join(map(str, ranks))}]"
    return f"[{', '.join(map(str, ranks[:3]))}, …, {ranks[-1]}]"


def int_advice(value: object) -> str:
    """Returns advice to pass an int if `value` is a NumPy or torch integer, or a string with a number; else ""."""
    if isinstance(value, int):
        return ""
    try:
        number = int(value) if isinstance(value, str) else value.__index__()  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return ""
    return f"; pass {number}, a Python int, as int(…) returns it"


def no_such_name(problem: str, name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    like = get_close_matches(name, known, 1)
    return f"{problem} {name!r}" + (f"; did you mean {like[0]!r}?" if like else "")


def plain(error: BaseException) -> str:
    """Returns the first line of torch's or gloo's error, without source locations and general advice."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    first = re.sub(r"\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\]\s*", "", first)
    first = first.partition("This is typically caused by")[0].partition("Check the logs of")[0]
    return first.encode("ascii", "ignore").decode().strip(" .")
