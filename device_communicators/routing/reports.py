"""Compares all ranks' calls after a wait has failed, to name missing ranks, or ranks in different calls.

A timeout closes gloo's connections, so the waits of all ranks fail. Each rank then sends its peers a report of its call
over the control plane.
"""

from __future__ import annotations

import json
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
from device_communicators.base.member import LEFT
from device_communicators.calls.recorder import Operation
from device_communicators.calls.user_call import UserCall
from device_communicators.liveness import stacks
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died, gave_up
from device_communicators.routing.states import MOST_ASKED, State, describe_states
from device_communicators.routing.waits import group_key, state_at

_MOST_REPORTS = 64
"""If a group has more peers, a rank exchanges reports only with the next 32 and the previous 32 ranks."""


@dataclass(frozen=True)
class Call:
    """A call as ranks compare it: by `key`. `text` describes the call in errors."""

    text: str = field(compare=False)
    key: int | str

    def __str__(self) -> str:
        return self.text


def _call_of(operation: Operation) -> Call:
    return Call(operation.call, operation.key or operation.call)


@dataclass(frozen=True)
class Report:
    """The call in which a group failed on one rank, sent to peers to find the cause. `sequence`: the call's number."""

    sequence: int
    call: Call
    timed_out: bool = field(default=False, compare=False)
    """True if the call timed out. A rank without a report can then be slow instead of dead."""
    before: Call | None = field(default=None, compare=False)
    """The group's previous call; None if unknown."""

    @classmethod
    def of(cls, operation: Operation, timed_out: bool = False, before: Operation | None = None) -> Report:
        return cls(operation.sequence, _call_of(operation), timed_out, None if before is None else _call_of(before))


def explained(
    context: GroupContext, operation: Operation, failure: CommunicationError, before: Operation | None = None
) -> CommunicationError:
    """Exchanges reports with peers. Returns an error that names missing ranks or ranks in different calls, or `failure`
    if there are none. `operation`: the failed call. `before`: the group's previous call.
    """
    status = _status_of(context)
    if status is None:
        return failure
    own = Report.of(operation, isinstance(failure, CollectiveTimeoutError), before)
    asked = _peers_to_ask(context)
    found = status.exchange(group_key(context), asked, own)
    reports = {context.ranks.index(rank): report for rank, report in found.items()} | {context.rank: own}
    return _verdict(context, own, reports, failure, [rank for rank in asked if rank not in found])


def publish(context: GroupContext, operation: Operation) -> None:
    """Sends a report of this rank's call to its peers after a mismatch. Doesn't wait for theirs."""
    status = _status_of(context)
    if status is not None:
        status.publish(group_key(context), _peers_to_ask(context), Report.of(operation))


def _status_of(context: GroupContext) -> Any:
    return None if context.watcher is None else context.watcher.status


def _peers_to_ask(context: GroupContext) -> list[int]:
    others = [*context.ranks[context.rank + 1 :], *context.ranks[: context.rank]]
    half = _MOST_REPORTS // 2
    return others if len(others) <= _MOST_REPORTS else [*others[:half], *others[-half:]]


def add_calls(context: GroupContext, operation: Operation | None, failure: CommunicationError) -> None:
    """Adds to the text of `failure` what other ranks are doing. Asks at most MOST_ASKED ranks, beginning with
    `failure.suspect_ranks`. `operation`: the failed operation, or None if unknown.
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
            own = state_at(context, operation, place)
            status.keep(own, context.timeout_s)
        states = status.ask_states(ranks, key, own)
        if own is not None:
            states[context.global_rank] = own
    if isinstance(failure, CollectiveMismatchError) and " gave up, " not in str(failure.args[0]):
        if operation is not None and operation.site:  # the error has the lines already
            return
        lines = [f"global rank {rank} at {states[rank].place}" for rank in suspects if states.get(rank, State()).place]
        failure.args = (f"{failure.args[0]}. This rank called it at {'; '.join([place, *lines])}",)
    elif states:
        failure.args = (f"{failure.args[0]}. Last known states: {'; '.join(describe_states(states, context.name))}",)


def _watchers_verdict(context: GroupContext, failure: CommunicationError, missing: Sequence[int]) -> CommunicationError:
    watcher = context.watcher
    if watcher is None or isinstance(failure, CollectiveTimeoutError):
        return failure
    started = time.monotonic() - (failure.elapsed_s or 0)
    if watcher.await_word_of(missing, context.failure_ranks):
        return died(context, failure.operation or "an operation", started)
    return failure


def _completed_on_some(reports: dict[int, Report]) -> tuple[Report, list[int]] | None:
    """Finds a call that only some ranks have completed. Returns the report of ranks that are still in this call, and
    the other ranks. `reports`: by rank in the group.

    Returns None if no rank has completed the call, or if ranks made different calls.
    """
    first = min(reports.values(), key=lambda report: report.sequence)
    completed = [rank for rank, report in sorted(reports.items()) if report != first]
    ahead = {reports[rank] for rank in completed}
    if len(ahead) != 1 or next(iter(ahead)).sequence != first.sequence + 1:
        return None
    return (first, completed) if {reports[rank].before for rank in completed} == {first.call} else None


def _verdict(
    context: GroupContext,
    own: Report,
    reports: dict[int, Report],
    failure: CommunicationError,
    missing: Sequence[int],
) -> CommunicationError:
    """Returns an error that explains `failure` by the reports. `own`: this rank's. `reports`: by rank in the group.
    `missing`: global ranks that sent no report.
    """
    if not missing:
        return _verdict_of_all(context, own, reports, failure)

    def lost(kind: type[CommunicationError], why: str, advice: str, suspects: Sequence[int]) -> CommunicationError:
        elapsed_s, facts = failure.elapsed_s or 0.0, {"sequence": own.sequence, "timeout_s": failure.timeout_s}
        return context.lost(kind, str(failure.operation), why, advice, elapsed_s, suspects, **facts)

    # A rank that has detected a death sends no report.
    found = _watchers_verdict(context, failure, missing)
    if found is not failure:
        return found
    # Numbers differ if only some ranks have completed a call.
    if different := [rank for rank, each in sorted(reports.items()) if each != own and each.sequence == own.sequence]:
        return _mismatch(context, own, reports, different, failure)
    if context.watcher is not None and (left := context.watcher.left(missing)):
        who = ", ".join(f"global rank {rank}" for rank in left)
        return lost(PeerDiedError, f"{who} {LEFT}", "all ranks must make the same calls before they leave", left)
    if isinstance(failure, PeerDiedError) and context.watcher is not None:
        # A watched rank's death would be known.
        missing = [rank for rank in missing if not context.watcher.watches([rank])]
        if not missing:
            return gave_up(context, failure)
    who = ", ".join(f"global rank {rank}" for rank in missing)
    has = "has" if len(missing) == 1 else "have"
    advice = "look at that rank (its log, `py-spy dump`)"
    if isinstance(failure, PeerDiedError) and not any(report.timed_out for report in reports.values()):
        why = f"a connection broke, and {who} {has} not responded since"
        return lost(PeerDiedError, why, advice, missing)
    why = f"{who} {has} not reached {own.call} number {own.sequence}, or stopped in it"
    return lost(CollectiveTimeoutError, why, f"{advice}, or raise the timeout", missing)


def _verdict_of_all(
    context: GroupContext, own: Report, reports: dict[int, Report], failure: CommunicationError
) -> CommunicationError:
    found = gave_up(context, failure) if isinstance(failure, PeerDiedError) else failure
    others = {report for rank, report in reports.items() if rank != context.rank}
    if len(others) == 1 and (ahead := others.pop()).sequence > own.sequence:
        # Peers may have completed this operation, and failed in the next one.
        ours = f"{own.call} number {own.sequence}"
        theirs = f"All peers are already in {ahead.call} number {ahead.sequence}"
        found.args = (f"{found.args[0]}. {theirs}: this rank, in {ours}, was late, or made fewer calls",)
    elif (partial := _completed_on_some(reports)) is not None:
        first, completed = partial
        who = ", ".join(f"global rank {context.ranks[rank]}" for rank in completed)
        text = f"{first.call} number {first.sequence} had completed on {who}, but not on other ranks"
        found.args = (f"{found.args[0]}. {text}",)
    else:
        reports = _calls_of_lowest_number(reports)
        own = reports[context.rank]
        if different := [rank for rank, report in sorted(reports.items()) if report != own]:
            return _mismatch(context, own, reports, different, failure)
    return found


def _calls_of_lowest_number(reports: dict[int, Report]) -> dict[int, Report]:
    """Finds the lowest call number in `reports` (by rank). Returns each rank's report of its call with that number.

    A rank that is one call ahead reports its previous call. Returns `reports` unchanged if a rank's call is unknown.
    """
    first = min(report.sequence for report in reports.values())
    calls = {
        rank: report.call if report.sequence == first else report.before
        for rank, report in reports.items()
        if report.sequence <= first + 1
    }
    known = {rank: Report(first, call) for rank, call in calls.items() if call is not None}
    return known if known.keys() == reports.keys() else reports


def _mismatch(
    context: GroupContext, own: Report, reports: dict[int, Report], different: list[int], failure: CommunicationError
) -> CommunicationError:
    suspects = [context.ranks[rank] for rank in different]
    other = reports[different[0]]
    return context.mismatch(
        failure.operation or own.call.text,
        f"this rank is in {own.call} number {own.sequence}, global rank {suspects[0]} in {other.call} number "
        f"{other.sequence}",
        suspects,
        sequence=own.sequence,
        elapsed_s=failure.elapsed_s,
        timeout_s=failure.timeout_s,
    )


def check_alike(context: GroupContext, sequence: int, user_call: UserCall, site: str) -> None:
    """Raises CollectiveMismatchError on every rank if the ranks' calls differ. In debug mode every rank calls this
    before each collective. `sequence`: the call's number. `site`: the program's line, for the error.
    """
    operation = user_call.method
    call = {"call": str(user_call), "sequence": sequence, "site": site}
    texts = context.gather(json.dumps(call).encode(), "comparison of calls")
    if len(set(texts)) == 1:
        return
    calls = [json.loads(each) for each in texts]
    own = calls[context.rank]
    for rank, other in enumerate(calls):
        if (other["call"], other["sequence"]) != (own["call"], own["sequence"]):
            raise context.mismatch(
                operation,
                f"this rank is in {_call_in_words(own)}, global rank {context.ranks[rank]} in {_call_in_words(other)}",
                [context.ranks[rank]],
                sequence=sequence,
            )


def _call_in_words(call: dict[str, Any]) -> str:
    return f"{call['call']} (number {call['sequence']}, {call['site']})"
