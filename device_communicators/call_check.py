"""Are all ranks of a group in the same call? Debug mode asks before each collective, over the group's gloo group.

Shared memory and gloo compare all but shapes in any case; this also compares shapes, works over NCCL, and names both
calls with the lines that made them. It costs some 0.5 ms a call.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from device_communicators.base import GroupContext
from device_communicators.errors import CollectiveMismatchError
from device_communicators.recorder import NOT_ALIKE_SHAPES
from device_communicators.user_call import UserCall
from device_communicators.waiting import Watched

_BYTES = 512


def check_alike(context: GroupContext, sequence: int, user_call: UserCall, tensor: Tensor | None, site: str) -> None:
    """Raises CollectiveMismatchError on every rank where one of them is in another call."""
    operation = user_call.method
    call = {"call": _in_words(user_call, tensor), "sequence": sequence, "site": site}
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


def _in_words(call: UserCall, tensor: Tensor | None) -> str:
    """The call, and the whole shape where that must be equal."""
    if tensor is None or call.method in NOT_ALIKE_SHAPES:
        return str(call)
    return f"{call} in the shape {list(tensor.shape)}"
