"""Debug mode compares each collective with the other ranks' before it begins, over the group's gloo group.

That works over NCCL, too, names both calls with the lines that made them, and costs some 0.5 ms a call.
"""

from __future__ import annotations

import json
from typing import Any

from device_communicators.calls.user_call import UserCall
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.waiting import all_gather_bytes

_BYTES = 512


def check_alike(context: GroupContext, sequence: int, user_call: UserCall, site: str) -> None:
    """Raises CollectiveMismatchError on every rank where one of them is in another call."""
    operation = user_call.method
    call = {"call": str(user_call), "sequence": sequence, "site": site}
    text = json.dumps(call).encode()
    if len(text) > _BYTES:
        call["site"] = ascii(site[-20:])  # what isn't ASCII takes six bytes a character
        call["call"] = ascii(call["call"])[:200]
        text = json.dumps(call).encode()
    texts = all_gather_bytes(context, text.ljust(_BYTES), operation)
    if len(set(texts)) == 1:  # as a rule
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
