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
from device_communicators.calls.memory import as_bytes
from device_communicators.calls.reductions import reducible_by_torch
from device_communicators.calls.user_call import current, overlap_error
from device_communicators.calls.work import Work
from device_communicators.process_group.checked_calls import Call, Frames, Gather, call_of, exchange, room_for
from device_communicators.process_group.checked_pairs import CheckedPairs
from device_communicators.process_group.plain import PlainProcessGroup
from device_communicators.process_group.started_calls import Exchange, StartedCalls, fits
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
        self._plain = PlainProcessGroup(context)
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
        return self._plain.refusal(request)

    def __str__(self) -> str:
        return f"torch.distributed over {self._name}, every CPU tensor"

    def _exchange(self, call: Call, payload: Tensor | None, size_bytes: int) -> Frames | None:
        """Exchanges frames; returns them if tensors, of `size_bytes` at most on any rank, fit into them."""
        fits_in = size_bytes <= self._room
        frames = exchange(self.context, call, payload if fits_in else None, self._gather)
        return frames if fits_in else None

    def _only_of(self, src: int, x: Tensor) -> Tensor | None:
        return x if self.context.rank == src else None

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

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        wide, wide_op, narrow = reducible_by_torch(x, reduce_op)
        frames = self._exchange(call_of("all_reduce", x, reduce_op), wide, wide.nbytes)
        if frames is None and not _is_extreme_of_floats(wide, wide_op):
            self._plain.flat_all_reduce_(x, reduce_op)
            return
        flat = wide.view(-1)
        if frames is None:
            slices = list(flat.tensor_split(self.context.size))
            self._plain.flat_all_gatherv(slices, self._reduced_slice(flat, [len(each) for each in slices], wide_op))
        else:
            flat.copy_(reduce_in_rank_order(frames.blocks(wide), wide_op))
        if narrow is not None:
            narrow.copy_(wide)

    def _reduced_slice(self, flat: Tensor, lengths: list[int], reduce_op: str) -> Tensor:
        """Reduces this rank's slice of `flat`, which has slices of `lengths`, in rank order."""
        size, mine = self.context.size, lengths[self.context.rank]
        blocks = flat.new_empty((size, mine))
        self._plain.flat_all_to_all(blocks.view(-1), flat, [mine] * size, lengths)
        return reduce_in_rank_order(blocks, reduce_op)

    def iall_reduce_(self, x: Tensor, reduce_op: str) -> Work:
        wide, wide_op, narrow = reducible_by_torch(x, reduce_op)
        flat = wide.view(-1)

        def finish(exchange: Exchange, frames: Frames) -> None:
            if fits(flat, self.context.size):
                flat.copy_(reduce_in_rank_order(frames.blocks(flat), wide_op))
            else:
                exchange.all_reduce_(flat, wide_op)
            if narrow is not None:
                narrow.copy_(wide)

        return self._started.start(call_of("all_reduce", x, reduce_op), flat, finish)

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        wide, wide_op, _ = reducible_by_torch(x, reduce_op)
        frames = self._exchange(call_of("reduce_scatter", x, reduce_op), wide, wide.nbytes)
        if frames is None and _is_extreme_of_floats(wide, wide_op):
            total = self._reduced_slice(wide.view(-1), [out.numel()] * self.context.size, wide_op)
            _narrowed(out, total, reduce_op)
            return
        if frames is None:
            self._plain.flat_reduce_scatter(out, x, reduce_op)
            return
        mine = frames.blocks(wide).unflatten(1, (self.context.size, -1))[:, self.context.rank]
        _narrowed(out, reduce_in_rank_order(mine, wide_op), reduce_op)

    def ireduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> Work:
        size, rank = self.context.size, self.context.rank
        wide, wide_op, _ = reducible_by_torch(x, reduce_op)
        blocks = wide.view(size, -1) if wide.numel() else wide.new_empty((size, 0))

        def finish(exchange: Exchange, frames: Frames) -> None:
            if fits(wide, size):
                total = reduce_in_rank_order(frames.blocks(wide).unflatten(1, (size, -1))[:, rank], wide_op)
            else:
                total = blocks.new_empty(blocks.shape[1])
                exchange.reduce_scatter(total, blocks, wide_op)
            _narrowed(out, total, reduce_op)

        return self._started.start(call_of("reduce_scatter", x, reduce_op), wide, finish)

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        frames = self._exchange(call_of("all_gather", x), x, x.nbytes)
        if frames is None:
            self._plain.flat_all_gather(out, x)
            return
        as_bytes(out).copy_(frames.blocks(as_bytes(x)).view(-1))

    def iall_gather(self, out: Tensor, x: Tensor) -> Work:

        def finish(exchange: Exchange, frames: Frames) -> None:
            if fits(x, self.context.size):
                as_bytes(out).copy_(frames.blocks(as_bytes(x)).view(-1))
            else:
                exchange.all_gather(out, x)

        return self._started.start(call_of("all_gather", x), x, finish)

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        splits = [out.shape[0] for out in outs]
        call = call_of("all_gatherv", x, splits=splits)._replace(numel=outs[0].shape[1:].numel())
        frames = self._exchange(call, x, max(out.nbytes for out in outs))
        if frames is None:
            self._plain.flat_all_gatherv(outs, x)
            return
        for rank, out in enumerate(outs):
            as_bytes(out).copy_(frames.payload(rank, as_bytes(out)))

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        frames = self._exchange(call_of("gather", x, root=dst), x, x.nbytes)
        if frames is None:
            self._plain.flat_gather(out, x, dst)
            return
        if out is not None:
            as_bytes(out).copy_(frames.blocks(as_bytes(x)).view(-1))

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        frames = self._exchange(call_of("scatter", out, root=src), x, self.context.size * out.nbytes)
        if frames is None:
            self._plain.flat_scatter(out, x, src)
            return
        begin = self.context.rank * out.nbytes
        everything = out.new_empty((self.context.size, *out.shape)) if x is None else x
        as_bytes(out).copy_(frames.payload(src, as_bytes(everything))[begin : begin + out.nbytes])

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        row = x.shape[1:].numel()
        call = call_of("all_to_all", x, splits=[*input_splits, *output_splits])._replace(numel=row)
        frames = exchange(self.context, call, x if x.nbytes <= self._room else None, self._gather)
        size, rank, row_bytes = self.context.size, self.context.rank, row * x.dtype.itemsize
        sent = frames.splits(2 * size)[:, :size]
        if int(sent.sum(1).max()) * row_bytes > self._room:
            self._plain.flat_all_to_all(out, x, output_splits, input_splits)
            return
        begins = (sent[:, :rank].sum(1) * row_bytes).tolist()
        for src, (begin, part) in enumerate(zip(begins, out.split(output_splits), strict=True)):
            as_bytes(part).copy_(frames.bytes(src, begin, part.nbytes))

    def flat_broadcast_(self, x: Tensor, src: int) -> None:
        frames = self._exchange(call_of("broadcast", x, root=src), self._only_of(src, x), x.nbytes)
        if frames is None:
            self._plain.flat_broadcast_(x, src)
            return
        if self.context.rank != src:
            as_bytes(x).copy_(frames.payload(src, as_bytes(x)))

    def ibroadcast_(self, x: Tensor, src: int) -> Work:

        def finish(exchange: Exchange, frames: Frames) -> None:
            if self.context.rank != src and fits(x, self.context.size):
                as_bytes(x).copy_(frames.payload(src, as_bytes(x)))
            elif not fits(x, self.context.size):
                exchange.broadcast_(x, src)

        return self._started.start(call_of("broadcast", x, root=src), self._only_of(src, x), finish)

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        if tag % _KINDS != _PLAIN:
            return self._plain.isend(x, dst, tag)
        self._plain.check_pair_group(x, "send")
        return self._pairs.isend(x, dst, tag)

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        if tag % _KINDS != _PLAIN:
            return self._plain.irecv_(out, src, tag)
        self._plain.check_pair_group(out, "recv")
        return self._pairs.irecv(out, src, tag)

    def barrier(self) -> None:
        exchange(self.context, Call("barrier").of(current("barrier")), None, self._gather)

    def close(self) -> None:
        self._started.close()
        end_idle_threads()


def _is_extreme_of_floats(wide: Tensor, reduce_op: str) -> bool:
    """Returns True for reductions that gloo computes differently: its max and min lose a NaN of some ranks."""
    return reduce_op in ("max", "min") and wide.is_floating_point()


def _narrowed(out: Tensor, total: Tensor, reduce_op: str) -> None:
    """Writes `total`, of the dtype that `out` is reduced in, to `out`."""
    wide, _, narrow = reducible_by_torch(out, reduce_op)
    wide.view(-1).copy_(total.view(-1))
    if narrow is not None:
        narrow.copy_(wide)
