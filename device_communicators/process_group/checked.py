"""CPU tensors over the group's gloo: always there, last in every route, with calls compared before they are made.

gloo takes it for granted that ranks are in the same call: else it mixes up their bytes, or aborts the process where
more comes than fits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from device_communicators.base.helper_threads import end_idle_threads
from device_communicators.calls.reductions import reducible_by_torch
from device_communicators.calls.user_call import current, overlap_error
from device_communicators.calls.work import Work
from device_communicators.process_group.checked_calls import Call, Frames, Gather, call_of, exchange, room_for
from device_communicators.process_group.checked_pairs import CheckedPairs
from device_communicators.process_group.plain import PlainProcessGroup
from device_communicators.process_group.started_calls import StartedCalls, Steps, Transport
from device_communicators.routing.communicator import Communicator, GroupContext, Request, reduce_in_rank_order

_PLAIN = 0
"""The kind of tag of plain sends and receives; messages have headers of their own."""
_KINDS = 4
_TURNS: dict[str, threading.Lock] = {}
"""By process group: held by the thread whose collective is under way there."""


class ProcessGroupCommunicator(Communicator):
    """Every CPU tensor; small ones need no more than the exchange that compares."""

    name = "process_group"
    tells_sending = True

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self._gloo = _Gloo(context)
        self._name = context.device_group.name() if context.device.type == "cpu" else "gloo"
        self._room = room_for(context.size)
        self._started = StartedCalls(context)
        self._pairs = CheckedPairs(context)
        self._gather: Gather | None = None

    def beside(self, communicators: Sequence[Communicator]) -> None:
        for other in communicators:
            if other.name == "hierarchical":
                self._gather = other.flat_all_gather

    def refusal(self, request: Request) -> str | None:
        if request.device_type != "cpu":
            return f"a tensor on {request.device_type}"
        return self._gloo.refusal(request)

    def __str__(self) -> str:
        return f"torch.distributed over {self._name}, every CPU tensor"

    def _exchange(self, call: Call, payload: Tensor | None, size_bytes: int) -> Frames | None:
        """Exchanges frames; returns them if tensors, of `size_bytes` at most on any rank, fit into them."""
        fits_in = size_bytes <= self._room
        frames = exchange(self.context, call, payload if fits_in else None, self._gather)
        return frames if fits_in else None

    def _run(self, steps: Steps) -> None:
        steps.finish(self._gloo, self._exchange(steps.call, steps.payload, steps.size_bytes))

    @contextmanager
    def turn(self, method: str) -> Iterator[None]:
        """Groups of the same ranks may share a process group, where gloo takes all calls in one order."""
        turn = _TURNS.setdefault(self.context.cpu_group.group_name, threading.Lock())
        if not turn.acquire(blocking=False):
            raise overlap_error(method, str(self.context), "of another group over the same gloo process group")
        try:
            yield
        finally:
            turn.release()

    # What can be started and waited for later as well: frames first, then what remains, over gloo's own collectives or
    # by transfers of a started call.

    def _all_reduce(self, x: Tensor, reduce_op: str) -> Steps:
        wide, wide_op, narrow = reducible_by_torch(x, reduce_op)

        def finish(transport: Transport, frames: Frames | None) -> None:
            if frames is None:
                transport.flat_all_reduce_(wide, wide_op)
            else:
                wide.view(-1).copy_(reduce_in_rank_order(frames.blocks(wide), wide_op))
            if narrow is not None:
                narrow.copy_(wide)

        return Steps(call_of("all_reduce", x, reduce_op), wide, wide.nbytes, finish)

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        self._run(self._all_reduce(x, reduce_op))

    def iall_reduce_(self, x: Tensor, reduce_op: str) -> Work:
        return self._started.start(self._all_reduce(x, reduce_op))

    def _reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> Steps:
        wide, wide_op, _ = reducible_by_torch(x, reduce_op)
        wide_out, _, narrow = reducible_by_torch(out, reduce_op)

        def finish(transport: Transport, frames: Frames | None) -> None:
            if frames is None:
                transport.flat_reduce_scatter(wide_out, wide, wide_op)
            else:
                blocks = frames.blocks(wide).view(self.context.size, self.context.size, wide_out.numel())
                wide_out.view(-1).copy_(reduce_in_rank_order(blocks[:, self.context.rank], wide_op))
            if narrow is not None:
                narrow.copy_(wide_out)

        return Steps(call_of("reduce_scatter", x, reduce_op), wide, wide.nbytes, finish)

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        self._run(self._reduce_scatter(out, x, reduce_op))

    def ireduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> Work:
        return self._started.start(self._reduce_scatter(out, x, reduce_op))

    def _all_gather(self, out: Tensor, x: Tensor) -> Steps:
        def finish(transport: Transport, frames: Frames | None) -> None:
            if frames is None:
                transport.flat_all_gather(out, x)
            else:
                frames.copy_all_to(out)

        return Steps(call_of("all_gather", x), x, x.nbytes, finish)

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        self._run(self._all_gather(out, x))

    def iall_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._started.start(self._all_gather(out, x))

    def _broadcast(self, x: Tensor, src: int) -> Steps:
        is_src = self.context.rank == src

        def finish(transport: Transport, frames: Frames | None) -> None:
            if frames is None:
                transport.flat_broadcast_(x, src)
            elif not is_src:
                frames.copy_to(x, src)

        return Steps(call_of("broadcast", x, root=src), x if is_src else None, x.nbytes, finish)

    def flat_broadcast_(self, x: Tensor, src: int) -> None:
        self._run(self._broadcast(x, src))

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        return self._started.start(self._broadcast(x, src))

    # What is waited for at once.

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        splits = [out.shape[0] for out in outs]
        call = call_of("all_gatherv", x, splits=splits)._replace(numel=outs[0].shape[1:].numel())
        frames = self._exchange(call, x, max(out.nbytes for out in outs))
        if frames is None:
            self._gloo.flat_all_gatherv(outs, x)
            return
        for rank, out in enumerate(outs):
            frames.copy_to(out, rank)

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        frames = self._exchange(call_of("gather", x, root=dst), x, x.nbytes)
        if frames is None:
            self._gloo.flat_gather(out, x, dst)
        elif out is not None:
            frames.copy_all_to(out)

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        frames = self._exchange(call_of("scatter", out, root=src), x, self.context.size * out.nbytes)
        if frames is None:
            self._gloo.flat_scatter(out, x, src)
        else:
            frames.copy_to(out, src, self.context.rank * out.nbytes)

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        row = x.shape[1:].numel()
        call = call_of("all_to_all", x, splits=[*input_splits, *output_splits])._replace(numel=row)
        frames = exchange(self.context, call, x if x.nbytes <= self._room else None, self._gather)
        size, rank, row_bytes = self.context.size, self.context.rank, row * x.dtype.itemsize
        sent = frames.splits(2 * size)[:, :size]
        if int(sent.sum(1).max()) * row_bytes > self._room:
            self._gloo.flat_all_to_all(out, x, output_splits, input_splits)
            return
        begins = (sent[:, :rank].sum(1) * row_bytes).tolist()
        for src, (begin, part) in enumerate(zip(begins, out.split(output_splits), strict=True)):
            frames.copy_to(part, src, begin)

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        if tag % _KINDS != _PLAIN:
            return self._gloo.isend(x, dst, tag)
        self._gloo.check_pair_group(x, "send")
        return self._pairs.isend(x, dst, tag)

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        if tag % _KINDS != _PLAIN:
            return self._gloo.irecv_(out, src, tag)
        self._gloo.check_pair_group(out, "recv")
        return self._pairs.irecv(out, src, tag)

    def barrier(self) -> None:
        exchange(self.context, Call("barrier").of(current("barrier")), None, self._gather)

    def close(self) -> None:
        self._started.close()
        end_idle_threads()


class _Gloo(PlainProcessGroup):
    """gloo's own collectives, but for max and min of floats, of which gloo loses a NaN of some ranks."""

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        if not _is_extreme_of_floats(x, reduce_op):
            super().flat_all_reduce_(x, reduce_op)
            return
        flat = x.view(-1)
        slices = list(flat.tensor_split(self.context.size))
        self.flat_all_gatherv(slices, self._reduced_slice(flat, [len(each) for each in slices], reduce_op))

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        if _is_extreme_of_floats(x, reduce_op):
            out.view(-1).copy_(self._reduced_slice(x.view(-1), [out.numel()] * self.context.size, reduce_op))
        else:
            super().flat_reduce_scatter(out, x, reduce_op)

    def _reduced_slice(self, flat: Tensor, lengths: list[int], reduce_op: str) -> Tensor:
        """Reduces this rank's slice of `flat`, which has slices of `lengths`, in rank order."""
        size, mine = self.context.size, lengths[self.context.rank]
        blocks = flat.new_empty((size, mine))
        self.flat_all_to_all(blocks.view(-1), flat, [mine] * size, lengths)
        return reduce_in_rank_order(blocks, reduce_op)


def _is_extreme_of_floats(x: Tensor, reduce_op: str) -> bool:
    return reduce_op in ("max", "min") and x.is_floating_point()
