"""Debug mode: compares each collective with those of peers before it begins, over the control plane.

It works over NCCL, too. The error contains both calls and the lines that made them.
"""

from __future__ import annotations

import json
from typing import Any

from device_communicators.calls.user_call import UserCall
from device_communicators.routing.communicator import GroupContext


def check_alike(context: GroupContext, sequence: int, user_call: UserCall, site: str) -> None:
    """Raises CollectiveMismatchError on every rank if the ranks are in different calls. Every rank calls it."""
    operation = user_call.method
    call = {"call": str(user_call), "sequence": sequence, "site": site}
    texts = context.gather(json.dumps(call).encode(), "comparison of calls")
    if len(set(texts)) == 1:  # the usual case
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
