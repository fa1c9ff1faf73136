"""Reports of the ranks' calls over the store, exchanged once a wait is long or has failed.

gloo says neither who is missing nor that ranks are in different calls. When its wait has timed out on one rank it
closes the connections, so all others that wait fail as well. Each rank that fails then writes to the store in which
operation it was, and reads what the others wrote: who writes nothing isn't in a call of this group. It costs nothing
before that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import CollectiveTimeoutError, CommunicationError, PeerDiedError
from device_communicators.base.member import LOST
from device_communicators.calls.recorder import Operation
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died, gave_up
from device_communicators.routing.states import group_key

_REPORTS_WAIT_S = 0.6
"""The wait for the others' reports: they come within the 0.2 s in which a death might come to be known."""
_LIMIT_S = 1.0
"""A store beyond reach answers after minutes."""
_STEP_S = 0.02


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
    watcher = context.watcher
    if watcher is None or watcher.open_store is None:
        return failure
    own = Report(operation.sequence, operation.call, isinstance(failure, CollectiveTimeoutError), before)
    reports = watcher.ask_store(lambda store: _exchange(store, context, own), _LIMIT_S)
    if reports is not None:
        return _verdict(context, own, reports, failure)
    return _watchers_verdict(context, failure, context.other_ranks)


def publish(context: GroupContext, operation: Operation) -> None:
    """Tells ranks that ask later in which operation this rank found another call, without waiting for the store."""
    if context.watcher is not None:
        own = Report(operation.sequence, operation.call)
        context.watcher.ask_store(lambda store: _write(store, context, own), 0)


def _prefix(context: GroupContext) -> str:
    return f"report/{group_key(context)}"


def _write(store: BoundedStore, context: GroupContext, own: Report) -> None:
    store.set(f"{_prefix(context)}/{context.rank}", json.dumps([own.sequence, own.call, own.timed_out, own.before]))


def _watchers_verdict(context: GroupContext, failure: CommunicationError, missing: Sequence[int]) -> CommunicationError:
    """Returns `failure` of a connection, or the error with the ranks that the watcher comes to know as dead."""
    watcher = context.watcher
    if watcher is None or isinstance(failure, CollectiveTimeoutError):
        return failure
    started = time.monotonic() - (failure.elapsed_s or 0)
    if watcher.await_word_of(missing, context.failure_ranks):
        return died(context, failure.operation or "an operation", started)
    return failure


def _exchange(store: BoundedStore, context: GroupContext, own: Report) -> dict[int, Report]:
    """Writes this rank's report, and returns those that came within `_REPORTS_WAIT_S`, by rank."""
    reports: dict[int, Report] = {context.rank: own}
    until = time.monotonic() + _REPORTS_WAIT_S
    _write(store, context, own)
    while len(reports) < context.size and time.monotonic() < until:
        for rank in range(context.size):
            key = f"{_prefix(context)}/{rank}"
            if rank not in reports and store.check([key]):
                reports[rank] = Report(*json.loads(store.get(key)))
        time.sleep(_STEP_S)
    return reports


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
    context: GroupContext, own: Report, reports: dict[int, Report], failure: CommunicationError
) -> CommunicationError:
    """Returns `failure`, or the error that the reports tell of: with who is missing, ahead or in another call."""
    missing = [context.ranks[rank] for rank in range(context.size) if rank not in reports]
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
    elif different := [rank for rank, report in sorted(reports.items()) if report != own]:
        return _mismatch(context, own, reports, different, failure)
    return found


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
