"""CPU tensors of a group over several hosts: shared memory within each, gloo between their leaders.

The ranks of a host first bring together what they have; the lowest of them, its leader, exchanges it with the other
hosts' leaders (`leaders.py`); then all take the result from it (`hosts.py`). So the network carries what a group of one
rank per host would send, and not what all ranks would.

A reduction goes over the ranks of a host in order, then over the hosts in order, so all ranks have the same bits. Sums
and products of 16-bit floats stay float32 until the end, between hosts too, and are rounded once: a flat all-reduce
sends half as many bytes a value, and rounds at every step.

How a leader fared is told to its host before the result: a transfer that fails there fails on every rank at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from device_communicators.cpu.native_group import reducible_in_memory
from device_communicators.errors import CommunicationError, UnsupportedError
from device_communicators.hierarchical.hosts import Hosts
from device_communicators.routing.communicator import DONE, GroupContext, PartialCommunicator, Request, Work
from device_communicators.routing.reductions import as_bytes, reduction_refusal
from device_communicators.routing.user_call import current

_CARRIED = frozenset(
    ["all_reduce", "all_reduce_", "reduce_scatter", "all_gather", "broadcast", "broadcast_", "barrier"]
)
_ROUNDED = ("sum", "avg", "product")

CHUNK_ELEMENTS = 1 << 20
"""A longer reduction goes in chunks of this length, of 4 MiB in float32: the network has work while the host has."""


class HierarchicalCommunicator(PartialCommunicator):
    """The ranks of several hosts, of which one at least has two.

    What goes from one rank to each other (all_to_all, gather, …) gains nothing here, and what is started and waited for
    later goes on by itself in torch.distributed.
    """

    name = "hierarchical"
    tells_sending = True

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        if context.host_memory is None or context.host_memory.problem is not None:
            raise UnsupportedError(f"{context} has no shared memory")
        self._hosts = Hosts(context, context.host_memory)
        self._lock = threading.Lock()  # a call is several exchanges, which must not mix with those of another thread

    def refusal(self, request: Request) -> str | None:
        if request.device_type != "cpu":
            return f"a tensor on {request.device_type}"
        if request.operation not in _CARRIED:
            return f"it has no {request.operation}"
        if request.reduce_op is not None and request.dtype is not None:
            return reduction_refusal(request.dtype, request.reduce_op)
        return None

    def __str__(self) -> str:
        return f"CPU tensors over shared memory within a host, gloo between the hosts' first ranks; {self._hosts}"

    @contextmanager
    def _call(self, operation: str, *facts: object) -> Iterator[Hosts]:
        with self._lock:
            call = current(operation)
            self._hosts.begin(call, operation, *facts)
            try:
                yield self._hosts
            except CommunicationError as failure:
                self._hosts.abandon(failure)
                raise

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
        parts, outs = x.view(-1).split(CHUNK_ELEMENTS), out.view(-1).split(CHUNK_ELEMENTS)
        # In step i the ranks of a host reduce chunk i. The slices of chunk i - 1 are on their way to the hosts that
        # reduce them, and the sums of chunk i - 2 on their way back; these then go from the leader to its ranks.
        delay = 0 if len(parts) == 1 else 2
        exchanges: list[Iterator[None]] = []
        with self._call("all_reduce", x.numel(), x.dtype, reduce_op) as hosts:
            for step in range(len(parts) + delay):
                if step < len(parts):
                    reduction = _Reduction(parts[step], reduce_op, self.context.size)
                    total = reduction.flat(outs[step])
                    partial = reduction.x if reduction.widens else total
                    hosts.all_reduce(partial, reduction.x, reduction.op)
                    exchanges.append(hosts.leaders.all_reduce(partial, total, reduction.op, reduction.finish))
                hosts.between(lambda: _advance(exchanges, to_the_end=delay == 0))
                if step >= delay:
                    hosts.broadcast(outs[step - delay])

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        if out.numel() == 0:
            self._meet("reduce_scatter", x.dtype, reduce_op)
            return
        with self._call("reduce_scatter", x.numel(), x.dtype, reduce_op) as hosts:
            reduction = _Reduction(hosts.by_host(x.view(self.context.size, -1)), reduce_op, self.context.size)
            partial = reduction.x if reduction.widens else torch.empty_like(reduction.x)
            hosts.all_reduce(partial, reduction.x, reduction.op)
            blocks = partial.view(self.context.size, -1)
            mine = blocks[hosts.mine]
            total = torch.empty_like(mine, dtype=x.dtype) if reduction.widens else mine

            def exchange() -> None:
                others = {host: blocks[hosts.blocks[host]] for host in hosts.leaders.others}
                _advance([hosts.leaders.combine(others, mine, reduction.op)], to_the_end=True)
                reduction.finish(total, mine)

            hosts.between(exchange)
            hosts.scatter(reduction.flat(out), total)

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

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        if x.numel() == 0:
            self._meet("broadcast", src)
            return DONE
        with self._call("broadcast", x.nbytes, src) as hosts:
            hosts.broadcast_from(as_bytes(x), src)
        return DONE

    def _meet(self, operation: str, *facts: object) -> None:
        """Compares calls on an empty tensor: a rank whose tensor isn't empty must find out."""
        with self._call(operation, 0, *facts) as hosts:
            hosts.barrier()

    def set_timeout(self, timeout_s: float) -> None:
        """Gives this rank's calls that follow this timeout instead of the group's."""
        self._hosts.set_timeout(timeout_s)

    def barrier(self) -> None:
        with self._call("barrier") as hosts:
            hosts.barrier()

    def close(self) -> None:
        self._hosts.leaders.close()


def over_hosts(context: GroupContext) -> HierarchicalCommunicator:
    """Returns the communicator of a group for who carries its calls without a route."""
    return HierarchicalCommunicator(context)


def _advance(exchanges: list[Iterator[None]], to_the_end: bool) -> None:
    """Advances each exchange by one stage, the newest first: all leaders start their transfers in one order."""
    for exchange in exchanges[::-1]:
        if next(exchange, _ENDED) is _ENDED or (to_the_end and all(stage is None for stage in exchange)):
            exchanges.remove(exchange)


_ENDED = object()


class _Reduction:
    """A reduction of contiguous `x`, as kernels and the transfers between hosts know it: flat, in a dtype of theirs.

    Where `widens`, `x` is a copy in that dtype, and what is reduced is rounded once in the end.
    """

    def __init__(self, x: Tensor, reduce_op: str, size: int) -> None:
        if x.dtype in (torch.float16, torch.bfloat16) and reduce_op in _ROUNDED:
            wide, op, self.widens = x.float(), reduce_op, True
        else:
            wide, op, narrow = reducible_in_memory(x, reduce_op)
            self.widens = narrow is not None
        self.x = wide.view(-1)
        self.op = "sum" if op == "avg" else op
        self._reduce_op = reduce_op
        self._divisor = size if op == "avg" else None

    def flat(self, out: Tensor) -> Tensor:
        """Returns a view of `out`, in the dtype of `x` unless that is wider."""
        return (out if self.widens else reducible_in_memory(out, self._reduce_op)[0]).view(-1)

    def finish(self, out: Tensor, total: Tensor) -> None:
        """Writes `total` of all ranks to `out`, which is the same memory where nothing widens."""
        if self._divisor is not None:
            total.div_(self._divisor)
        if self.widens:
            out.copy_(total)
