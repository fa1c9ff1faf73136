"""Finds the cause of a failed call, from known deaths of ranks or from the text of torch's error."""

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
from device_communicators.base.member import LEFT
from device_communicators.liveness.health import Watcher, describe_deaths, kind_of_deaths
from device_communicators.routing.communicator import GroupContext

ADVICE: dict[type[CommunicationError], str] = {
    CollectiveTimeoutError: "look at the ranks that are not in this call (their logs, `py-spy dump`), or raise the "
    "timeout",
    PeerDiedError: "find the first rank that exited, and see its log",
    CommunicationError: "find the first rank that failed, and see its log",
}


_RAISED: deque[CommunicationError] = deque(maxlen=16)
"""The last errors raised through torch's C++. These are copies: the originals would keep tensors of their stack frames
alive.
"""


def note_error(error: CommunicationError) -> None:
    if all(str(error) != str(kept) for kept in list(_RAISED)):  # other threads append
        _RAISED.append(copy.deepcopy(error))


@host_call(OUTSIDE)
def error_of(exception: BaseException | None) -> ParallelStateError | None:
    """Returns the error of this library that caused `exception`, or None. Doesn't communicate.

    Also finds errors of the backend "parallel_state" that torch's autograd replaced by DistBackendErrors.
    """
    seen: set[int] = set()
    link = exception
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ParallelStateError):
            return link
        if isinstance(link, dist.DistError):
            text = str(link)
            for error in reversed(list(_RAISED)):
                if str(error) in text:
                    return error
        link = link.__cause__ or link.__context__
    return None


def kind_of_failure(text: str) -> type[CommunicationError]:
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
    """Returns True if torch's transport (gloo or NCCL) raised `error`. Otherwise this rank caused the failure, and
    peers needn't be asked.
    """
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _TRANSPORTS)


def died(context: GroupContext, operation: str, started: float) -> CommunicationError:
    deaths, advice = context.deaths(), "see that rank's log for the cause"
    kind, suspects = kind_of_deaths(deaths, CollectiveTimeoutError), [death.rank for death in deaths]
    return context.lost(kind, operation, describe_deaths(deaths), advice, time.monotonic() - started, suspects)


@contextmanager
def counted_from_begin() -> Iterator[None]:
    """In the with-block, sets `elapsed_s` of raised communication errors to the time since the block's start."""
    started = time.monotonic()
    try:
        yield
    except CommunicationError as error:
        if not isinstance(error, GroupFailedError):
            error.set_elapsed(time.monotonic() - started)
        raise


def failed_earlier(context: GroupContext, first: CommunicationError) -> GroupFailedError:
    return context.failure(
        GroupFailedError,
        f"{context} failed earlier ({first}); destroy this group and initialise again",
        first.operation,
        like=first,
    )


def all_died(context: GroupContext, operation: str, started: float, failure: CommunicationError) -> CommunicationError:
    """Returns an error that names all dead ranks. Returns `failure` if it already names them or no rank died.
    `started`: the call's monotonic start time.
    """
    watcher = context.watcher
    if watcher is None:
        return failure
    deaths = watcher.await_death_of(context.failure_ranks)
    if not deaths and watcher.watches(failure.suspect_ranks):  # else its death may be detected later
        blame_the_dead(watcher, failure)
    known = len(deaths) <= len(failure.suspect_ranks) and all(death.certain for death in deaths)
    return failure if known else died(context, operation, started)


def blame_the_dead(watcher: Watcher, failure: CommunicationError) -> None:
    deaths = watcher.deaths()
    if deaths:
        failure.args = (f"{failure.args[0]}. Of the world, {describe_deaths(deaths)}",)
        failure.suspect_ranks = tuple(death.rank for death in deaths)


def attributed(
    context: GroupContext, operation: str, started: float, failure: CommunicationError
) -> CommunicationError:
    """Waits briefly for the report of a death that explains `failure`, a broken connection. Returns the error of that
    death. If no rank died, returns `failure`, with a PeerDiedError replaced by a CommunicationError.
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
    why = "All ranks of the group are alive: one of them failed first, at its deadline or by another error"
    if context.watcher is not None and (left := context.watcher.left(failure.suspect_ranks)):
        why = f"Global rank {left[0]} {LEFT}, perhaps after an error"
    return context.failure(CommunicationError, f"{failure.args[0]}. {why}", failure.operation, like=failure)
