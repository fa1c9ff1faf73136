"""Runs calls on CPU tensors over gloo, if no better communicator supports them.

gloo doesn't check that all ranks make the same call. Only in debug mode do ranks compare their calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from device_communicators.base.helper_threads import end_idle_threads
from device_communicators.calls.reductions import reducible_by_torch
from device_communicators.calls.user_call import begin_sending, overlap_error
from device_communicators.calls.work import DONE, Work
from device_communicators.process_group.plain import PlainProcessGroup
from device_communicators.routing.communicator import GroupContext, Request, reduce_in_rank_order

_GATHERED_BYTES = 4096
_GATHERED_IN_LARGE_GROUPS_BYTES = 256
_LARGE_GROUP = 16
"""In groups up to this size, all ranks exchange tensors of up to 4096 bytes in one round, and each rank reduces them
all. In larger groups the limit is 256 bytes.
"""
_TURNS: dict[str, threading.Lock] = {}
"""Maps the name of a process group to the lock that a collective holds."""


class ProcessGroupCommunicator(PlainProcessGroup):
    """Runs calls over gloo. A started collective is complete when the method that starts it returns."""

    name = "process_group"
    tells_sending = True

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self._name = context.device_group.name() if context.device.type == "cpu" else "gloo"
        self._gathered_bytes = _GATHERED_BYTES if context.size <= _LARGE_GROUP else _GATHERED_IN_LARGE_GROUPS_BYTES

    def refusal(self, request: Request) -> str | None:
        if request.device_type != "cpu":
            return f"a tensor on {request.device_type}"
        return super().refusal(request)

    def __str__(self) -> str:
        return f"torch.distributed over {self._name}, for all CPU tensors"

    @contextmanager
    def turn(self, method: str) -> Iterator[None]:
        """Locks the gloo process group for a collective; raises UsageError if another collective holds the lock. Groups
        of the same ranks can share a process group, and gloo matches calls by their order. `method`: name in the error.
        """
        turn = _TURNS.setdefault(self.context.cpu_group.group_name, threading.Lock())
        if not turn.acquire(blocking=False):
            raise overlap_error(method, str(self.context), "of another group over the same gloo process group")
        try:
            yield
        finally:
            turn.release()

    def _group(self, x: Tensor) -> Any:
        begin_sending()
        return super()._group(x)

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        self._all_reduce(x, reduce_op, in_rank_order=False)

    def _all_reduce(self, x: Tensor, reduce_op: str, in_rank_order: bool) -> None:
        wide, wide_op, narrow = reducible_by_torch(x, reduce_op)
        flat = wide.view(-1)
        if wide.nbytes <= self._gathered_bytes:
            flat.copy_(reduce_in_rank_order(self._gathered(flat), wide_op))
        elif in_rank_order or _is_extreme_of_floats(wide, wide_op):  # gloo's max and min lose the NaN of some ranks
            slices = list(flat.tensor_split(self.context.size))
            self.flat_all_gatherv(slices, self._reduced_slice(flat, [len(each) for each in slices], wide_op))
        else:
            super().flat_all_reduce_(wide, wide_op)
        if narrow is not None:
            narrow.copy_(wide)

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        self._reduce_scatter(out, x, reduce_op, in_rank_order=False)

    def _reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str, in_rank_order: bool) -> None:
        wide, wide_op, _ = reducible_by_torch(x, reduce_op)
        wide_out, _, narrow = reducible_by_torch(out, reduce_op)
        if wide.nbytes <= self._gathered_bytes:
            blocks = self._gathered(wide.view(-1)).view(self.context.size, self.context.size, wide_out.numel())
            wide_out.view(-1).copy_(reduce_in_rank_order(blocks[:, self.context.rank], wide_op))
        elif in_rank_order or _is_extreme_of_floats(wide, wide_op):
            lengths = [wide_out.numel()] * self.context.size
            wide_out.view(-1).copy_(self._reduced_slice(wide.view(-1), lengths, wide_op))
        else:
            super().flat_reduce_scatter(wide_out, wide, wide_op)
        if narrow is not None:
            narrow.copy_(wide_out)

    def _gathered(self, flat: Tensor) -> Tensor:
        blocks = flat.new_empty((self.context.size, flat.numel()))
        self.flat_all_gather(blocks, flat)
        return blocks

    def _reduced_slice(self, flat: Tensor, lengths: list[int], reduce_op: str) -> Tensor:
        """Reduces all ranks' `flat` in rank order. Returns this rank's slice of the result. `lengths[r]`: length of
        rank r's slice.
        """
        size, mine = self.context.size, lengths[self.context.rank]
        blocks = flat.new_empty((size, mine))
        self.flat_all_to_all(blocks.view(-1), flat, [mine] * size, lengths)
        return reduce_in_rank_order(blocks, reduce_op)

    def iall_reduce_(self, x: Tensor, reduce_op: str, is_async: bool = True) -> Work:
        if is_async:
            self._all_reduce(x, reduce_op, in_rank_order=True)
            return DONE
        return super().iall_reduce_(x, reduce_op, is_async=False)

    def ireduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str, is_async: bool = True) -> Work:
        if is_async:
            self._reduce_scatter(out, x, reduce_op, in_rank_order=True)
            return DONE
        return super().ireduce_scatter(out, x, reduce_op, is_async=False)

    def barrier(self) -> None:
        begin_sending()
        super().barrier()

    def close(self) -> None:
        end_idle_threads()


def _is_extreme_of_floats(x: Tensor, reduce_op: str) -> bool:
    return reduce_op in ("max", "min") and x.is_floating_point()
