"""Reports of the ranks' calls, exchanged over the control plane once a wait has failed.

gloo says neither who is missing nor that ranks are in different calls. When its wait has timed out on one rank it
closes the connections, so all others that wait fail as well. Each rank that fails then sends to the others in which
operation it was. A rank that sends nothing isn't in a call of this group. It costs nothing before that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from device_communicators.base.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    PeerDiedError,
)
from device_communicators.base.member import LOST
from device_communicators.calls.recorder import Operation
from device_communicators.liveness import stacks
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died, gave_up
from device_communicators.routing.states import MOST_ASKED, State, call_in_words, describe_states, group_key

_MOST_REPORTS = 64
"""In larger groups a rank exchanges reports with the 32 ranks before and after it, so that connections stay few."""


@dataclass(frozen=True)
class Report:
    """The call of a rank in which the group failed there."""

    sequence: int
    call: str
    timed_out: bool = field(default=False, compare=False)
    """True if it failed at its deadline: then a missing rank may be slow, and need not have ended."""
    before: str = field(default="", compare=False)
    """The call before that one, which it got through; empty where that isn't known."""


def explained(
    context: GroupContext, operation: Operation, failure: CommunicationError, before: str = ""
) -> CommunicationError:
    """Returns `failure` of the group's `operation`, or the error that says who is missing or in another call.

    `before`: the group's call before that operation.
    """
    status = _status_of(context)
    if status is None:
        return failure
    own = Report(operation.sequence, operation.call, isinstance(failure, CollectiveTimeoutError), before)
    asked = _asked(context)
    found = status.exchange(group_key(context), asked, own)
    reports = {context.ranks.index(rank): report for rank, report in found.items()} | {context.rank: own}
    return _verdict(context, own, reports, failure, [rank for rank in asked if rank not in found])


def publish(context: GroupContext, operation: Operation) -> None:
    """Sends this rank's report of a mismatched `operation` to the group's ranks without waiting."""
    status = _status_of(context)
    if status is not None:
        status.publish(group_key(context), _asked(context), Report(operation.sequence, operation.call))


def _status_of(context: GroupContext) -> Any:
    return None if context.watcher is None else context.watcher.status


def _asked(context: GroupContext) -> list[int]:
    """Returns the global ranks with which this one exchanges reports: all others, or the next ones in a ring."""
    others = [*context.ranks[context.rank + 1 :], *context.ranks[: context.rank]]
    half = _MOST_REPORTS // 2
    return others if len(others) <= _MOST_REPORTS else [*others[:half], *others[-half:]]


def add_calls(context: GroupContext, operation: Operation | None, failure: CommunicationError) -> None:
    """Adds to a failure of `operation` the states of the group's ranks that answer, its suspects first.

    To a mismatch, which has both calls, it adds the lines that made them.
    """
    suspects = [rank for rank in failure.suspect_ranks if rank >= 0]
    ranks = [*suspects, *(rank for rank in context.ranks if rank not in suspects)]
    ranks = [rank for rank in ranks if rank != context.global_rank][:MOST_ASKED]
    status = _status_of(context)
    if context.watcher is None:
        return
    key, place, own = group_key(context), stacks.in_words(stacks.own_frames()), None
    states: dict[int, State] = {}
    if status is not None:
        if operation is not None:
            own = State(key, context.name, call_in_words(context, operation), place)
            status.keep(own, context.timeout_s)
        states = status.ask_states(ranks, key, own)
        if own is not None:
            states[context.global_rank] = own
    if isinstance(failure, CollectiveMismatchError) and " gave up, " not in str(failure.args[0]):
        if operation is not None and operation.site:  # debug mode: the error has them
            return
        lines = [f"global rank {rank} at {states[rank].place}" for rank in suspects if states.get(rank, State()).place]
        failure.args = (f"{failure.args[0]}. This rank called it at {'; '.join([place, *lines])}",)
    elif states:
        failure.args = (f"{failure.args[0]}. Last known states: {'; '.join(describe_states(states, context))}",)


def _watchers_verdict(context: GroupContext, failure: CommunicationError, missing: Sequence[int]) -> CommunicationError:
    """Returns `failure` of a connection, or the error with the ranks that the watcher comes to know as dead."""
    watcher = context.watcher
    if watcher is None or isinstance(failure, CollectiveTimeoutError):
        return failure
    started = time.monotonic() - (failure.elapsed_s or 0)
    if watcher.await_word_of(missing, context.failure_ranks):
        return died(context, failure.operation or "an operation", started)
    return failure


def _half_through(reports: dict[int, Report]) -> tuple[Report, list[int]] | None:
    """Returns the call that ended on some ranks before it broke on others, and those ranks, in the next one.

    None where they are in other calls than that, or where what the others got through isn't known to be that call.
    """
    first = min(reports.values(), key=lambda report: report.sequence)
    through = [rank for rank, report in sorted(reports.items()) if report != first]
    ahead = {reports[rank] for rank in through}
    if len(ahead) != 1 or next(iter(ahead)).sequence != first.sequence + 1:
        return None
    return (first, through) if {reports[rank].before for rank in through} == {first.call} else None


def _verdict(
    context: GroupContext,
    own: Report,
    reports: dict[int, Report],
    failure: CommunicationError,
    missing: Sequence[int],
) -> CommunicationError:
    """Returns the error that the reports show, with the ranks that are missing, ahead or in another call; or `failure`.

    `reports`: by rank in the group. `missing`: global ranks without a report.
    """
    if not missing:
        return _verdict_of_all(context, own, reports, failure)
    # The watcher's word goes before the reports: who hears of a death writes none.
    found = _watchers_verdict(context, failure, missing)
    if found is not failure:
        return found
    # Some may have got through an operation of which others still lack the end.
    if different := [rank for rank, each in sorted(reports.items()) if each != own and each.sequence == own.sequence]:
        return _mismatch(context, own, reports, different, failure)
    if context.watcher is not None and (left := context.watcher.left(missing)):
        who = ", ".join(f"global rank {rank}" for rank in left)
        text = (
            f"{failure.operation} of {context} failed after {failure.elapsed_s or 0:.3f} s: {who} has left: it "
            f"destroyed its group, or its program came to its end. {LOST}; all ranks must make the same calls before "
            "they leave"
        )
        return context.failure(
            PeerDiedError, text, failure.operation, like=failure, sequence=own.sequence, suspect_ranks=left
        )
    if isinstance(failure, PeerDiedError) and context.watcher is not None:
        # Who would be known to have ended has not: it gave up, or knows of what this rank will hear.
        missing = [rank for rank in missing if not context.watcher.watches([rank])]
        if not missing:
            return gave_up(context, failure)
    who = ", ".join(f"global rank {rank}" for rank in missing)
    has = "has" if len(missing) == 1 else "have"
    began = f"{failure.operation} of {context} failed after {failure.elapsed_s or 0:.3f} s"
    advice = f"{LOST}; look at that rank (its log, `py-spy dump`)"
    kind: type[CommunicationError] = CollectiveTimeoutError
    text = f"{who} {has} not come to {own.call} number {own.sequence}, or stopped in it. {advice}, or raise the timeout"
    if isinstance(failure, PeerDiedError) and not any(report.timed_out for report in reports.values()):
        kind = PeerDiedError
        text = f"a connection broke, and {who} {has} not been heard of since. {advice}"
    text = f"{began}: {text}"
    return context.failure(kind, text, failure.operation, like=failure, sequence=own.sequence, suspect_ranks=missing)


def _verdict_of_all(
    context: GroupContext, own: Report, reports: dict[int, Report], failure: CommunicationError
) -> CommunicationError:
    """Returns what `_verdict` does where every rank has reported: all live."""
    found = gave_up(context, failure) if isinstance(failure, PeerDiedError) else failure
    others = {report for rank, report in reports.items() if rank != context.rank}
    if len(others) == 1 and (ahead := others.pop()).sequence > own.sequence:
        # They may have got through this operation with this rank's help, and given it up in the next one.
        ours = f"{own.call} number {own.sequence}"
        theirs = f"All others are in {ahead.call} number {ahead.sequence} already"
        found.args = (f"{found.args[0]}. {theirs}: this rank, in {ours}, was late, or made fewer calls",)
    elif (half := _half_through(reports)) is not None:
        first, through = half
        who = ", ".join(f"global rank {context.ranks[rank]}" for rank in through)
        found.args = (f"{found.args[0]}. {first.call} number {first.sequence} had ended on {who}, not on the others",)
    else:
        reports = _at_first(reports)
        own = reports[context.rank]
        if different := [rank for rank, report in sorted(reports.items()) if report != own]:
            return _mismatch(context, own, reports, different, failure)
    return found


def _at_first(reports: dict[int, Report]) -> dict[int, Report]:
    """Returns the calls of the lowest sequence number of any rank, or `reports` where a rank's isn't known.

    A rank that doesn't wait for others in a call can be in the next one when the others fail.
    """
    first = min(report.sequence for report in reports.values())
    calls = {
        rank: report.call if report.sequence == first else report.before * (report.sequence == first + 1)
        for rank, report in reports.items()
    }
    return {rank: Report(first, call) for rank, call in calls.items()} if all(calls.values()) else reports


def _mismatch(
    context: GroupContext, own: Report, reports: dict[int, Report], different: list[int], failure: CommunicationError
) -> CommunicationError:
    suspects = [context.ranks[rank] for rank in different]
    other = reports[different[0]]
    return context.mismatch(
        failure.operation or own.call,
        f"this rank is in {own.call} number {own.sequence}, global rank {suspects[0]} in {other.call} number "
        f"{other.sequence}",
        suspects,
        sequence=own.sequence,
        elapsed_s=failure.elapsed_s,
        timeout_s=failure.timeout_s,
    )
