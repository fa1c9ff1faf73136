"""The meaning of a failure: torch.distributed's words, for all of which it raises RuntimeError, and who has died."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    GroupFailedError,
    ParallelStateError,
    PeerDiedError,
)
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.base.member import LOST
from device_communicators.liveness.health import Watcher, describe_deaths, kind_of_deaths
from device_communicators.routing.communicator import GroupContext

ADVICE: dict[type[CommunicationError], str] = {
    CollectiveTimeoutError: "look at the ranks that are not in this call (their logs, `py-spy dump`), or raise the "
    "timeout",
    PeerDiedError: "look for the first rank that ended",
    CommunicationError: "look for the first rank that failed",
}


_RAISED: deque[CommunicationError] = deque(maxlen=16)
"""Copies of the last errors raised through torch's C++. Copies don't keep the originals' frames alive."""


def note_error(error: CommunicationError) -> None:
    """Keeps a copy for `error_of`."""
    if all(str(error) != str(kept) for kept in _RAISED):
        _RAISED.append(copy.deepcopy(error))


@host_call(OUTSIDE)
def error_of(exception: BaseException | None) -> ParallelStateError | None:
    """Returns this library's error behind `exception`, or None if there is none. Each rank for itself.

    It is the exception itself, or the nearest of its causes and contexts. Errors of the backend "parallel_state" are
    also found by their text: torch's autograd, and so the backward of DDP and FSDP, raises them as a plain
    DistBackendError. The last 16 of them in this process are kept, without tracebacks.
    """
    seen: set[int] = set()
    link = exception
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ParallelStateError):
            return link
        if isinstance(link, dist.DistError):
            text = str(link)
            for error in reversed(_RAISED):
                if str(error) in text:
                    return error
        link = link.__cause__ or link.__context__
    return None


def kind_of_failure(text: str) -> type[CommunicationError]:
    """Returns the error's type, by c10d's text."""
    lowered = text.lower()
    if "timed out" in lowered or "timeout" in lowered:
        return CollectiveTimeoutError
    if "closed by peer" in lowered or "reset by peer" in lowered or "broken pipe" in lowered:
        return PeerDiedError
    return CommunicationError


def is_communication_error(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, torch.OutOfMemoryError))


_TRANSPORTS = ("gloo", "nccl", "timed out", "timeout", "connection", "connect", "socket", "peer", "broken pipe", "rank")


def is_of_transport(error: Exception) -> bool:
    """Returns True if torch.distributed raised it, by its type or its words; else it is a mistake of this rank."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _TRANSPORTS)


def died(context: GroupContext, operation: str, started: float) -> CommunicationError:
    """Returns the error for an operation that was given up because ranks of the failure domain have ended."""
    deaths = context.deaths()
    return context.failure(
        kind_of_deaths(deaths, CollectiveTimeoutError),
        f"{operation} of {context} failed after {time.monotonic() - started:.3f} s: {describe_deaths(deaths)}. {LOST}; "
        "look at that rank's log",
        operation,
        started=started,
        suspect_ranks=[death.rank for death in deaths],
    )


@contextmanager
def counted_from_begin() -> Iterator[None]:
    """Makes communication errors of a method that starts ranks or groups count from its begin."""
    started = time.monotonic()
    try:
        yield
    except CommunicationError as error:
        if not isinstance(error, GroupFailedError):
            error.set_elapsed(time.monotonic() - started)
        raise


def failed_earlier(context: GroupContext, first: CommunicationError) -> GroupFailedError:
    """Returns the error for a call that begins after the group's first failure."""
    return context.failure(
        GroupFailedError,
        f"{context} failed earlier ({first}); destroy it and initialise again",
        first.operation,
        like=first,
    )


def all_died(context: GroupContext, operation: str, started: float, failure: CommunicationError) -> CommunicationError:
    """Returns `failure`, which names one dead rank; where others have died with it, the error that names them all."""
    watcher = context.watcher
    if watcher is None:
        return failure
    deaths = watcher.await_death_of(context.failure_ranks)
    if not deaths and watcher.watches(failure.suspect_ranks):  # else its death may only come to be known
        blame_the_dead(watcher, failure)
    known = len(deaths) <= len(failure.suspect_ranks) and all(death.certain for death in deaths)
    return failure if known else died(context, operation, started)


def blame_the_dead(watcher: Watcher, failure: CommunicationError) -> None:
    """Blames the dead: a rank that lives and left a group left it, most likely, because another rank has ended."""
    deaths = watcher.deaths()
    if deaths:
        failure.args = (f"{failure.args[0]}. Of the world, {describe_deaths(deaths)}",)
        failure.suspect_ranks = tuple(death.rank for death in deaths)


def attributed(
    context: GroupContext, operation: str, started: float, failure: CommunicationError
) -> CommunicationError:
    """Returns the error for a connection that broke: by whose death, where that comes to be known in a moment.

    Where all of the group's ranks are watched and none has ended, one of them closed the connection because it gave up.
    """
    watcher = context.watcher
    if watcher is None:
        return failure
    if watcher.await_word_of(failure.suspect_ranks, context.failure_ranks):
        return died(context, operation, started)
    if not isinstance(failure, PeerDiedError) or not watcher.watches(context.other_ranks):
        return failure
    found = gave_up(context, failure)
    blame_the_dead(watcher, found)
    return found


def gave_up(context: GroupContext, failure: CommunicationError) -> CommunicationError:
    """Returns `failure` by a connection that broke, where nobody has ended."""
    return context.failure(
        CommunicationError,
        f"{failure.args[0]}. No rank of the group has ended: one gave up first, at its deadline or by an error of its "
        "own",
        failure.operation,
        like=failure,
    )
