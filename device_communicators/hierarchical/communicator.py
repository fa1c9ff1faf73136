"""CPU tensors of a group over several hosts: shared memory within each, TCP between their leaders.

The ranks of a host first bring together what they have; the lowest of them, its leader, exchanges it with the other
hosts' leaders (`leaders.py`); then all take the result from it (`hosts.py`). So the network carries what a group of one
rank per host would send, and not what all ranks would.

A large all-reduce over hosts of equally many ranks goes from every rank to those of its place there (`lanes.py`).

A reduction goes over the ranks of a host in order, then over the hosts in order, so all ranks have the same bits. Sums
and products of 16-bit floats stay float32 until the end, between hosts too, and are rounded once: a flat all-reduce
sends half as many bytes a value, and rounds at every step. With PARALLEL_STATE_ROUND_BETWEEN_HOSTS those of bfloat16
are rounded before they travel. What a rank has that is alone on its host travels as it is.

Where all ranks are alone on their hosts, each is a leader, and nothing is left to do within a host. What goes from one
rank to another (`blocks.py`, `pairs.py`) goes there directly.

How a leader fared is told to its host before the result: a transfer that fails there fails on every rank at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from device_communicators.base.errors import CommunicationError, UnsupportedError
from device_communicators.calls.memory import as_bytes
from device_communicators.calls.reductions import REDUCING, reduction_refusal
from device_communicators.calls.user_call import current, overlap_error
from device_communicators.calls.work import DONE, Work
from device_communicators.hierarchical import blocks, lanes
from device_communicators.hierarchical.hosts import Hosts
from device_communicators.hierarchical.leaders import DIRECT_BYTES
from device_communicators.hierarchical.pairs import Pairs
from device_communicators.hierarchical.streams import connect
from device_communicators.routing.communicator import GroupContext, PartialCommunicator, Request

_CARRIED = frozenset(
    ["all_reduce", "all_reduce_", "reduce_scatter", "all_gather", "broadcast", "broadcast_", "broadcast_sized"]
    + ["barrier", "iall_reduce_", "ireduce_scatter", "iall_gather", "ibroadcast_", "all_gatherv", *REDUCING]
)
_PAIRS = frozenset(["send", "recv", "isend", "irecv_"])
_BLOCKS = frozenset(["all_to_all", "gather", "scatter"])

LEAST_CHUNK_ELEMENTS, MOST_CHUNK_ELEMENTS = 1 << 18, 1 << 20
_CHUNKS = 16
"""A longer reduction goes in chunks, about so many of these lengths: the network has work while the host has."""
SIZED_BYTES = 1 << 20
"""Of a message's tensors, what goes with its head to one other host; to several, no more than in a broadcast."""


class _Call:
    """One call of a group: `with` it around all of it. A class, as generators take 2 µs more."""

    __slots__ = ("_communicator", "_facts", "_operation")

    def __init__(self, communicator: HierarchicalCommunicator, operation: str, facts: tuple[object, ...]) -> None:
        self._communicator = communicator
        self._operation = operation
        self._facts = facts

    def __enter__(self) -> Hosts:
        communicator, call = self._communicator, current(self._operation)
        is_nested = communicator.is_in_call and communicator.lock._is_owned()
        try:  # a signal's handler may raise between any two lines
            timeout_s = min(communicator.context.timeout_s, threading.TIMEOUT_MAX)
            if not communicator.lock.acquire(timeout=timeout_s):
                raise overlap_error(call.method, str(communicator.context))
            if communicator.is_in_call:
                is_nested = True
                communicator.lock.release()
                raise overlap_error(call.method, str(communicator.context))
            communicator.is_in_call = True
            communicator.hosts.begin(call, self._operation, *self._facts)
            return communicator.hosts
        except BaseException as failure:
            if not is_nested and communicator.lock._is_owned():
                self.__exit__(None, failure, None)
            raise

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> None:
        try:
            communicator = self._communicator
            if failure is not None:  # Ctrl-C, too: what has begun can't be gone on with
                communicator.abandon(failure)
        finally:
            communicator.is_in_call = False
            communicator.lock.release()


class HierarchicalCommunicator(PartialCommunicator):
    """The ranks of several hosts.

    A collective that is started, and waited for later, is done when its start returns.
    """

    name = "hierarchical"
    tells_sending = True

    def __init__(self, context: GroupContext, *, has_pairs: bool = True, address: str | None = None) -> None:
        """`address`: at which other hosts reach this rank; None for that which gloo tells them."""
        super().__init__(context)
        if context.host_memory is None or context.host_memory.problem is not None:
            raise UnsupportedError(f"{context} has no shared memory")
        self.hosts = Hosts(context, context.host_memory, address)
        self.sized_bytes = SIZED_BYTES if len(self.hosts.ranks) == 2 else DIRECT_BYTES
        self._carried = _CARRIED
        if self.hosts.is_one_rank_each or self.hosts.is_meshed:
            self._carried |= _BLOCKS
        else:
            self._carried -= {"reduce_scatterv"}
        self._pairs: Pairs | None = None
        if self.hosts.is_meshed and has_pairs:
            others = [rank for rank in range(context.size) if rank != context.rank]
            try:
                streams = connect(context, others, context.host_memory.waiting[0] / 1e9, address)
            except BaseException:
                self.hosts.leaders.close()
                raise
            self._pairs = Pairs(context, streams)
            self._carried |= _PAIRS
        # A call is several exchanges, which must not mix with those of another thread, or of a signal's handler.
        self.lock: Any = threading.RLock()  # whose `_is_owned` threading's own Condition calls, too
        self.is_in_call = False

    def refusal(self, request: Request) -> str | None:
        if request.device_type != "cpu":
            return f"a tensor on {request.device_type}"
        if request.operation not in self._carried:
            return f"it has no {request.operation}"
        if request.reduce_op is not None and request.dtype is not None:
            return reduction_refusal(request.dtype, request.reduce_op)
        return None

    def abandon(self, failure: BaseException) -> None:
        """Ends the connections after a failure in a call."""
        if isinstance(failure, CommunicationError):
            self.hosts.abandon(failure)
        else:
            self.hosts.leaders.abandon()
        if self._pairs is not None:
            self._pairs.end_sending()

    def __str__(self) -> str:
        between = "ranks of different hosts" if self.hosts.is_meshed else "the hosts' first ranks"
        return f"CPU tensors over shared memory within a host, TCP between {between}; {self.hosts}"

    def _call(self, operation: str, *facts: object) -> _Call:
        return _Call(self, operation, facts)

    def all_reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._all_reduce(out, x.contiguous(), reduce_op)
        return out

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        self._all_reduce(x, x, reduce_op)

    def _all_reduce(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        if x.numel() == 0:
            self._meet("all_reduce", x.dtype, reduce_op)
            return
        with self._call("all_reduce", x.numel(), x.dtype, reduce_op) as hosts:
            reduction = hosts.reduction(x, reduce_op)
            flat, target = reduction.flat(x), reduction.flat(out)
            length = _chunk(flat.numel())
            if flat.numel() <= length and reduction.in_one_round(flat.numel()):
                if hosts.local is None:
                    hosts.leaders.combine_at_once(flat, target, reduction)
                    return
                part = hosts.reduce(flat, target, reduction)
                hosts.between(lambda: hosts.leaders.combine_at_once(part, target, reduction))
                hosts.broadcast(target)
                return
            parts, outs = flat.split(length), target.split(length)
            if hosts.has_lanes and hosts.local is not None and reduction.is_native:
                lanes.all_reduce(hosts, hosts.local, parts, outs, reduction)
                return
            reduced: list[Tensor] = []
            exchanges = [
                hosts.leaders.all_reduce(functools.partial(reduced.__getitem__, step), chunk, reduction)
                for step, chunk in enumerate(outs)
            ]
            _pipeline(
                hosts,
                1 if reduction.in_one_round(length) else 2,
                exchanges,
                lambda step: reduced.append(hosts.reduce(parts[step], outs[step], reduction)),
                lambda step: hosts.broadcast(outs[step]),
            )

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        if out.numel() == 0:
            self._meet("reduce_scatter", x.dtype, reduce_op)
            return
        with self._call("reduce_scatter", x.numel(), x.dtype, reduce_op) as hosts:
            reduction = hosts.reduction(x, reduce_op)
            blocks, target = hosts.by_host(reduction.flat(x).view(self.context.size, -1)), reduction.flat(out)
            length = max(1, _chunk(blocks.numel()) // self.context.size)
            own = len(hosts.ranks[hosts.host])
            if target.numel() <= length:
                flat, slices = blocks.view(-1), _slices(hosts, target.numel())
                total = target if own == 1 else target.new_empty(own * target.numel())
                part = hosts.reduce(flat, flat if own == 1 else torch.empty_like(flat), reduction)
                hosts.between(lambda: hosts.leaders.combine_at_once(part, total, reduction, slices))
                hosts.scatter(target, total)
                return
            outs, columns = target.split(length), blocks.split(length, dim=1)
            totals = outs if own == 1 else [each.new_empty(own * each.numel()) for each in outs]
            reduced: list[Tensor] = []

            def reduce(step: int) -> None:
                flat = columns[step].contiguous().view(-1)
                reduced.append(hosts.reduce(flat, torch.empty_like(flat), reduction))

            exchanges = [
                hosts.leaders.combine(
                    functools.partial(reduced.__getitem__, step), _slices(hosts, each.numel()), totals[step], reduction
                )
                for step, each in enumerate(outs)
            ]
            _pipeline(hosts, 1, exchanges, reduce, lambda step: hosts.scatter(outs[step], totals[step]))

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        if x.numel() == 0:
            self._meet("all_gather")
            return
        with self._call("all_gather", x.nbytes) as hosts:
            ordered = as_bytes(out).view(self.context.size, -1)
            blocks = ordered if hosts.in_order else torch.empty_like(ordered)
            hosts.all_gather(blocks[hosts.mine], as_bytes(x))
            hosts.share(blocks)
            if not hosts.in_order:
                torch.index_select(blocks, 0, hosts.places, out=ordered)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._broadcast(x.contiguous() if self.context.rank == src else out, src, out)
        return out

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        self._broadcast(x, src, x)
        return DONE

    def _broadcast(self, x: Tensor, src: int, out: Tensor) -> None:
        """Broadcasts `x` of `src` to `x` of the others, and to its own `out`, which may be `x`."""
        if x.numel() == 0:
            self._meet("broadcast", src)
            return
        with self._call("broadcast", x.nbytes, src) as hosts:
            hosts.broadcast_from(as_bytes(x), src, lambda: None if x is out else hosts.leaders.copy_meanwhile(out, x))

    def broadcast_sized(self, x: Tensor | None, src: int, most_bytes: int) -> Tensor:
        with self._call("broadcast_sized", src) as hosts:
            return hosts.broadcast_sized(x, src, most_bytes)

    # From one rank to another. Where each is alone on its host, host r is rank r.

    def _exchange(self, hosts: Hosts, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends tensors to ranks, and receives from them; this rank's own is copied while others' are on their way."""
        mine, leaders = self.context.rank, hosts.leaders
        sends = leaders.begin_exchange(sent)
        if mine in received and received[mine].shape == sent[mine].shape:  # else the frames, which are compared, say so
            leaders.copy_meanwhile(received[mine], sent[mine])
        leaders.wait_for([*leaders.end_exchange(received), *sends])

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        if not self.hosts.is_one_rank_each:
            self._all_gatherv(outs, x)
            return
        with self._call("all_gatherv", x.dtype, *(out.nbytes for out in outs)) as hosts:
            self._exchange(hosts, dict.fromkeys(range(self.context.size), x), dict(enumerate(outs)))

    def _all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        """Gathers tensors that are padded to the longest."""
        sizes = [out.nbytes for out in outs]
        mine = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        mine[: x.nbytes].copy_(as_bytes(x))
        whole = mine.new_empty((len(outs), len(mine)))
        self.flat_all_gather(whole, mine)
        for out, row, size in zip(outs, whole, sizes, strict=True):
            as_bytes(out).copy_(row[:size])

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        with self._call("gather", x.nbytes, dst) as hosts:
            if hosts.is_one_rank_each:
                self._exchange(hosts, {dst: x}, {} if out is None else dict(enumerate(out)))
            else:
                rows = None if out is None else as_bytes(out).view(self.context.size, x.nbytes)
                blocks.gather(hosts, rows, as_bytes(x), dst)

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        with self._call("scatter", out.nbytes, src) as hosts:
            if hosts.is_one_rank_each:
                self._exchange(hosts, {} if x is None else dict(enumerate(x)), {src: out})
            else:
                rows = None if x is None else as_bytes(x).view(self.context.size, out.nbytes)
                blocks.scatter(hosts, as_bytes(out), rows, src)

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        row, mine = x.shape[1:].numel(), [*input_splits, *output_splits]
        with self._call("all_to_all", x.dtype, row) as hosts:
            if hosts.is_one_rank_each:
                hosts.leaders.splits = tuple(mine)
                sent, received = x.split(input_splits), out.split(output_splits)
                self._exchange(hosts, dict(enumerate(sent)), dict(enumerate(received)))
            else:
                blocks.all_to_all(hosts, as_bytes(out), as_bytes(x), mine, row * x.itemsize)

    # Between two ranks.

    def _pair(self) -> Pairs:
        if self._pairs is None:
            raise UnsupportedError(f"{self.context} has no connections between each two ranks")
        return self._pairs

    def send(self, x: Tensor, dst: int) -> None:
        self._pair().send(x.contiguous(), dst, self.context.tag(0))

    def recv(self, out: Tensor, src: int) -> None:
        self._pair().recv(out, src, self.context.tag(0))

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        return self._pair().isend(x, dst, tag).begin()

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        return self._pair().irecv(out, src, tag).begin()

    def _meet(self, operation: str, *facts: object) -> None:
        """Compares calls on an empty tensor: a rank whose tensor isn't empty must find out."""
        with self._call(operation, 0, *facts) as hosts:
            hosts.barrier()

    def set_timeout(self, timeout_s: float) -> None:
        """Gives this rank's calls that follow this timeout instead of the group's."""
        self.hosts.set_timeout(timeout_s)

    def barrier(self) -> None:
        with self._call("barrier") as hosts:
            hosts.barrier()

    def close(self) -> None:
        self.hosts.leaders.close()
        if self._pairs is not None:
            self._pairs.close()


def over_hosts(context: GroupContext, address: str | None) -> HierarchicalCommunicator:
    """Returns the communicator of a group for who carries its calls without a route; `address` as the class has it."""
    return HierarchicalCommunicator(context, has_pairs=False, address=address)


def _chunk(count: int) -> int:
    """Returns how many of `count` elements are reduced at once."""
    return min(MOST_CHUNK_ELEMENTS, max(LEAST_CHUNK_ELEMENTS, count // _CHUNKS))


def _slices(hosts: Hosts, length: int) -> dict[int, slice]:
    """Returns by host where its ranks' rows are among rows of this length, by host."""
    return {host: slice(rows.start * length, rows.stop * length) for host, rows in enumerate(hosts.blocks)}


def _pipeline(
    hosts: Hosts,
    rounds: int,
    exchanges: Sequence[Iterator[None]],
    reduce: Callable[[int], None],
    finish: Callable[[int], None],
) -> None:
    """Runs the exchanges of a reduction's chunks, of so many rounds at most.

    In step i the ranks of a host `reduce` chunk i, and its leader sends it, ready to receive chunk i + 1. The rounds
    of chunk i are on their way during the next steps; then the leader gives its ranks what came of it, by `finish`.
    """
    delay = 0 if len(exchanges) == 1 else rounds
    under_way: list[Iterator[None]] = []

    def advance(step: int) -> None:
        for exchange in exchanges[step + 1 if step else 0 : step + 2]:
            next(exchange)
        under_way.extend(exchanges[step : step + 1])
        for exchange in under_way[::-1]:  # the newest first: all leaders start their transfers in one order
            if next(exchange, _ENDED) is _ENDED or (delay == 0 and all(stage is None for stage in exchange)):
                under_way.remove(exchange)

    for step in range(len(exchanges) + delay):
        if step < len(exchanges):
            reduce(step)
        hosts.between(functools.partial(advance, step))
        if step >= delay:
            finish(step - delay)


_ENDED = object()
