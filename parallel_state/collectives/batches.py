"""The transfers of `batch_isend_irecv`: their checks, and the order in which they start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.routing.communicator import GroupContext
from parallel_state.collectives import checks

Transfer: TypeAlias = tuple[str, Tensor, int]


def transfer_of(context: GroupContext, operation: Transfer | dist.P2POp) -> Transfer:
    """Returns the checked transfer, with the peer's rank in the group; raises InvalidArgumentError if it is invalid."""
    method = "batch_isend_irecv"
    if isinstance(operation, dist.P2POp):
        if operation.peer not in context.ranks:
            raise InvalidArgumentError(
                f"the peer of a P2POp of {method} on {context} must be a global rank of this group, but is "
                f"{operation.peer}"
            )
        operation = operation.op.__name__, operation.tensor, context.ranks.index(operation.peer)
    if not isinstance(operation, (tuple, list)) or len(operation) != 3:
        raise InvalidArgumentError(
            f"an operation of {method} on {context} must be ('isend', tensor, dst), ('irecv', tensor, src) or "
            f"a P2POp, but is {operation!r}"
        )
    name, x, peer = operation
    if name not in ("isend", "irecv"):
        raise InvalidArgumentError(f"an operation of {method} on {context} must be isend or irecv, but is {name!r}")
    checks.check_tensor(context, method, x)
    if name == "irecv":
        checks.check_writable(context, method, x)
        checks.check_no_gradient(context, method, "receive into a tensor without one", x)
        return name, x, checks.source(context, method, peer)
    return name, x, checks.destination(context, method, peer)


def starting_order(own: int, operations: Sequence[Transfer]) -> list[int]:
    """Returns the order in which rank `own` starts its transfers.

    On the CPU receives start first, because a send may wait for its receiver. A device runs transfers one by one. So
    all ranks order the pairs of ranks in the same way, and within a pair the lower rank sends first.
    """

    def place(at: int) -> tuple[int, ...]:
        name, x, peer = operations[at]
        if x.is_cpu:
            return (0, name == "isend")
        return (1, min(own, peer), max(own, peer), (name == "irecv") == (own < peer))

    return sorted(range(len(operations)), key=place)
