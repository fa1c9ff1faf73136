"""Are all ranks of a group in the same call? Debug mode asks before each collective, over the group's gloo group.

Shared memory and gloo compare calls in any case; this works over NCCL, too, and names both calls with the lines that
made them. It costs some 0.5 ms a call.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from device_communicators.errors import CollectiveMismatchError
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.user_call import UserCall
from device_communicators.routing.waiting import Watched

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
    mine = torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8)
    out = torch.empty(context.size, _BYTES, dtype=torch.uint8)
    Watched(context.cpu_group._allgather_base(out.view(-1), mine), context, operation).wait()
    if torch.equal(out, mine.expand_as(out)):  # as a rule, and 30 us less than to read them all
        return
    calls = [json.loads(bytes(row.tolist())) for row in out]
    own = calls[context.rank]
    for rank, other in enumerate(calls):
        if (other["call"], other["sequence"]) != (own["call"], own["sequence"]):
            raise CollectiveMismatchError(
                f"{operation} of {context} met another call: this rank is in {_told(own)}, global rank "
                f"{context.ranks[rank]} in {_told(other)}. The group can't be used further; make the same calls in the "
                "same order on every rank",
                group=context.name,
                operation=operation,
                sequence=sequence,
                rank=context.rank,
                suspect_ranks=[context.ranks[rank]],
            )


def _told(call: dict[str, Any]) -> str:
    return f"{call['call']} (number {call['sequence']}, {call['site']})"
