"""A group's hosts as one rank sees them: who is where, what its own host does in shared memory, and how leaders tell.

No operation of the group is here: `hierarchical` puts them together.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from device_communicators.base import limits, settings
from device_communicators.base.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    ConfigMismatchError,
    HostUnreachableError,
    PeerDiedError,
    format_ranks,
)
from device_communicators.calls.user_call import REDUCE_OPS, UserCall
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.cpu.native_group import DTYPES
from device_communicators.hierarchical.leaders import DIRECT_BYTES, MOST_UNDER_WAY, Leaders
from device_communicators.hierarchical.reduction import Reduction
from device_communicators.hierarchical.streams import connect
from device_communicators.routing.communicator import GroupContext

logger = logging.getLogger("parallel_state")

PIECE_BYTES = 4 << 20
"""The piece that is passed on to a host's ranks while the next one is on its way."""

MOST_MESHED = 256
"""Groups of more ranks have no connections but those of the leaders: each is a descriptor and a buffer of 64 KiB."""
MESHED_UNASKED = 32
"""Groups of more ranks have them if each rank has descriptors left, as it tells the others."""

_KINDS: tuple[type[CommunicationError], ...] = (
    CommunicationError, CollectiveTimeoutError, PeerDiedError, HostUnreachableError, CollectiveMismatchError,
)  # fmt: skip
"""As leaders tell them, by number; 0 would be that all went well."""
_MISMATCH = _KINDS.index(CollectiveMismatchError) + 1
_WORDS_BYTES = 16384


class Hosts:
    """Ranks by host, in the order of the hosts' first ranks, which lead them; one's own host is `host`.

    Blocks of all ranks lie *by host*: those of a host side by side, `blocks[h]`, one's own at `mine`.
    """

    def __init__(self, context: GroupContext, memory: HostMemory, address: str | None = None) -> None:
        self.context = context
        self.ranks = memory.domains
        self.host = next(index for index, ranks in enumerate(self.ranks) if context.rank in ranks)
        self._rounded = _is_agreed(settings.ROUND_BETWEEN_HOSTS.name, context, memory.rounding)
        leaders, (spin_ns, _) = [ranks[0] for ranks in self.ranks], memory.waiting
        others = [rank for host, ranks in enumerate(self.ranks) if host != self.host for rank in ranks]
        self.is_meshed = context.size <= MOST_MESHED and (
            context.size <= MESHED_UNASKED or _all_have_descriptors(context, len(others) + context.size)
        )
        """True if each rank is connected to all on other hosts; else only the leaders are."""
        if not self.is_meshed:
            others = [rank for rank in others if rank in leaders] if context.rank in leaders else []
        streams = connect(context, others, spin_ns / 1e9, address)
        self.leaders = Leaders(context, leaders, self.host, streams, self.ranks)
        self.is_leader = self.leaders.is_leader
        order = [rank for ranks in self.ranks for rank in ranks]
        starts = [sum(map(len, self.ranks[:host])) for host in range(len(self.ranks) + 1)]
        self.blocks = [slice(start, stop) for start, stop in pairwise(starts)]
        self.mine = self.blocks[self.host]
        self.is_one_rank_each = len(self.ranks) == context.size
        self.has_lanes = self.is_meshed and len({len(each) for each in self.ranks}) == 1 and not self.is_one_rank_each
        """True if all hosts have the same number of ranks, more than one, which are connected."""
        self.in_order = order == list(range(context.size))
        self._order = torch.tensor(order, device="cpu")
        self.places = self._order.argsort()
        """The place of the block of rank r."""
        self.local = memory.collectives
        self._parts = 0
        self._reductions: dict[tuple[torch.dtype, str], Reduction] = {}
        self._operation = ""

    def __str__(self) -> str:
        return ", ".join(
            f"host {host}: ranks {format_ranks(ranks)}{' (this one)' if host == self.host else ''}"
            for host, ranks in enumerate(self.ranks)
        )

    def set_timeout(self, timeout_s: float) -> None:
        """Gives the calls that follow this timeout."""
        if timeout_s == self.context.timeout_s:
            return
        self.context = self.leaders.context = dataclasses.replace(self.context, timeout_s=timeout_s)
        if self.local is not None:
            self.local.set_timeout(timeout_s)

    def begin(self, call: UserCall, *facts: object) -> None:
        self._operation = call.method
        self.leaders.begin(call, *facts)

    def abandon(self, failure: CommunicationError) -> None:
        """Ends the waits of other hosts for this one's leader after a failure, before their deadline."""
        if isinstance(failure, CollectiveMismatchError) and self.is_leader:
            self.leaders.tell_disagreement(failure)
        elif isinstance(failure, CollectiveMismatchError):  # nor those who have gone on, and wait for this rank itself
            self.leaders.abandon(rank for rank in range(self.context.size) if rank != self.context.rank)
        else:
            self.leaders.abandon(None if self.is_leader else ())

    def agree(self) -> None:
        """Compares the hosts' calls; on every rank, once a call, before what is large travels."""
        self.between(self.leaders.agree)

    def by_host(self, blocks: Tensor) -> Tensor:
        """Reorders blocks of all ranks from rank order to by host."""
        return blocks if self.in_order else blocks[self._order]

    # Within the host. One that is alone there has what there is to have.

    def reduction(self, x: Tensor, reduce_op: str) -> Reduction:
        key = x.dtype, reduce_op
        if key not in self._reductions:
            self._reductions[key] = Reduction(x, reduce_op, [len(each) for each in self.ranks], rounded=self._rounded)
        return self._reductions[key]

    def reduce(self, x: Tensor, out: Tensor, reduction: Reduction) -> Tensor:
        """Returns, on the leader, what flat `x` of the host's ranks comes to: `x`, memory of our own, or `out`."""
        if self.local is None:
            return x
        self._parts = (self._parts + 1) % MOST_UNDER_WAY
        if len(self.ranks[self.host]) == 2 and reduction.op == "sum":
            return self._sum_of_two(x, out, reduction)
        part = out
        if reduction.widens:
            part = self.leaders.scratch.take(("part", self._parts), x.numel(), reduction.wide).copy_(x)
        source = part if reduction.widens else x
        self.local.call(
            "all_reduce", part.data_ptr(), source.data_ptr(), x.numel(), DTYPES[part.dtype], REDUCE_OPS[reduction.op]
        )
        return part

    def _sum_of_two(self, x: Tensor, out: Tensor, reduction: Reduction) -> Tensor:
        """Gives the leader the other rank's tensor, as it is: half the work of a sum that both ranks have."""
        if not self.is_leader:
            self.broadcast(x, self.context.rank)
            return x
        take = self.leaders.scratch.take
        other = take("other", x.numel(), x.dtype)
        self.broadcast(other, self.ranks[self.host][1])
        part = take(("part", self._parts), x.numel(), reduction.wide) if reduction.widens else out
        reduction.add_up([x, other], part)
        return part

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        if self.local is not None:
            self.local.call("all_gather", out.data_ptr(), x.data_ptr(), 1, x.nbytes)
        else:
            out.view(-1).copy_(x)

    def scatter(self, out: Tensor, blocks: Tensor) -> None:
        """Scatters the leader's blocks to the host's ranks."""
        if self.local is not None:
            self.local.call("scatter", out.data_ptr(), blocks.data_ptr() if self.is_leader else None, out.nbytes, 0)
        else:
            out.copy_(blocks.view(-1))

    def broadcast(self, x: Tensor, src: int | None = None) -> None:
        """Broadcasts the leader's `x`, or that of `src`, within the host."""
        if self.local is not None and x.numel():
            place = 0 if src is None else self.ranks[self.host].index(src)
            self.local.call("broadcast", x.data_ptr(), x.nbytes, place)

    # Between hosts.

    def between(self, transfer: Callable[[], int | None]) -> int:
        """Runs the leader's `transfer`; returns what that does, or raises what it raises, on every rank of its host."""
        if self.local is None:  # there is nobody to tell
            return transfer() or 0
        failure: Exception | None = None
        result = 0
        if self.is_leader:
            try:
                result = transfer() or 0
            except Exception as error:
                failure = error
        words = (ctypes.c_int64 * 3)(*_encode_failure(failure), result)
        self.local.call("broadcast", ctypes.addressof(words), ctypes.sizeof(words), 0)
        if words[0] == _MISMATCH:
            what = self._disagreement()
            if not self.is_leader:
                raise self.context.mismatch(self._operation, *what, timeout_s=self.context.timeout_s)
        elif words[0] and not self.is_leader:
            raise self._decode_failure(words[0], words[1])
        result = words[2]
        if failure is not None:
            raise failure
        return result

    def broadcast_from(self, x: Tensor, src: int, meanwhile: Callable[[], object]) -> None:
        """Broadcasts bytes `x` from `src` to its host and to other leaders, who pass them on.

        What a frame has room for comes from the host of `src`, the rest along a tree. `meanwhile` is what that host's
        ranks do while it is on its way.
        """
        root = next(host for host, ranks in enumerate(self.ranks) if src in ranks)
        leaders = self.leaders
        head, rest = x[:DIRECT_BYTES], x[DIRECT_BYTES:]
        parent, children = leaders.tree(root)
        pieces = _pieces(rest)
        if parent is None:
            self.broadcast(head, src)
            sends = leaders.begin_exchange(dict.fromkeys(leaders.others, head)) if self.is_leader else []
            for piece in pieces:
                self.broadcast(piece, src)
                if self.is_leader:
                    sends += self._sends([piece], children)
            meanwhile()
            self.between(lambda: leaders.wait_for(leaders.end_exchange({})))
            leaders.wait_for(sends)
        else:
            receives = [leaders.recv(piece, parent) for piece in pieces] if self.is_leader else []
            self.between(lambda: leaders.exchange_at_once({}, {root: head}))
            self.broadcast(head)
            leaders.wait_for(self._pass_on(pieces, receives, children))

    def broadcast_sized(self, x: Tensor | None, src: int, most_bytes: int) -> Tensor:
        """Broadcasts the bytes of `src`, whose number the others don't know."""
        root = next(host for host, ranks in enumerate(self.ranks) if src in ranks)
        leaders, out = self.leaders, torch.empty(0, dtype=torch.uint8, device="cpu") if x is None else x
        if root == self.host:
            out = self._with_host(out, src)
            self.between(lambda: leaders.exchange_at_once(dict.fromkeys(leaders.others, out), {}))
            return out

        def receive() -> int:
            nonlocal out
            out = leaders.receive_sized(root, most_bytes)
            return len(out)

        size = self.between(receive)
        if not self.is_leader:
            out = out.new_empty(size)
        self.broadcast(out)
        return out

    def _with_host(self, x: Tensor, src: int) -> Tensor:
        """Returns the bytes that `src`, of this host, has."""
        size = torch.tensor([len(x)], device="cpu")
        self.broadcast(size, src)
        x = x if self.context.rank == src else x.new_empty(int(size))
        self.broadcast(x, src)
        return x

    def share(self, blocks: Tensor) -> None:
        """Gives all ranks the blocks of bytes, by host, of which each host has its own."""
        leaders, sends = self.leaders, list[int]()
        whole = [_pieces(blocks[block].view(-1)) for block in self.blocks]
        pieces = [(host, piece) for host in leaders.others for piece in whole[host][1:]]
        receives = [leaders.recv(piece, host) for host, piece in pieces] if self.is_leader else []

        def exchange() -> None:
            first = {host: whole[host][0] for host in leaders.others}
            sends.extend(leaders.begin_exchange(dict.fromkeys(leaders.others, whole[self.host][0])))
            sends.extend(self._sends(whole[self.host][1:], leaders.others))
            leaders.wait_for(leaders.end_exchange(first))

        self.between(exchange)
        for host in leaders.others:
            self.broadcast(whole[host][0])
        self._pass_on([piece for _, piece in pieces], receives)
        leaders.wait_for(sends)

    def _sends(self, pieces: Sequence[Tensor], hosts: Sequence[int]) -> list[int]:
        return [self.leaders.send(piece, host) for piece in pieces for host in hosts]

    def _pass_on(self, pieces: Sequence[Tensor], receives: Sequence[int], children: Sequence[int] = ()) -> list[int]:
        """Broadcasts each piece to the host once it is there; returns the leader's transfers to `children`."""
        sends: list[int] = []
        for number, piece in enumerate(pieces):
            self.between(lambda number=number: self.leaders.wait_for([receives[number]]))  # type: ignore[misc]
            if self.is_leader:
                sends += self._sends([piece], children)
            self.broadcast(piece)
        return sends

    def meet(self) -> None:
        """Compares the calls of the host's ranks: before their leader tells others theirs, in which all must be."""
        if self.local is not None:
            self.local.call("barrier")

    def barrier(self) -> None:
        """Waits for the host's ranks, then for other leaders; the leader's return lets its host go."""
        self.meet()
        self.agree()

    def _disagreement(self) -> tuple[str, list[int]]:
        """Returns on every rank of a host what its leader found the hosts' calls to be."""
        words = torch.zeros(_WORDS_BYTES, dtype=torch.uint8, device="cpu")
        if self.is_leader:
            what, suspects = self.leaders.disagreement
            mine = json.dumps([what[: _WORDS_BYTES // 8], suspects]).encode()
            words[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self.broadcast(words)
        what, suspects = json.loads(words.numpy().tobytes().rstrip(b"\0"))
        return what, suspects

    def _decode_failure(self, kind: int, suspect: int) -> CommunicationError:
        context = self.context
        leader = context.ranks[self.ranks[self.host][0]]
        where = f", with global rank {suspect}" if suspect >= 0 else ""
        return context.failure(
            _KINDS[kind - 1 if 0 < kind <= len(_KINDS) else 0],
            f"{self._operation} of {context} failed between hosts{where}, as global rank {leader} tells, which "
            "speaks for this host and knows more. The group can't be used further",
            self._operation,
            suspect_ranks=(suspect,) if suspect >= 0 else (),
            timeout_s=context.timeout_s,
        )


def _is_agreed(setting: str, context: GroupContext, values: Sequence[bool]) -> bool:
    """Returns the ranks' value of a setting. Raises ConfigMismatchError on all of them where they have two."""
    if len(set(values)) > 1:
        sides = [[context.ranks[rank] for rank, value in enumerate(values) if value is side] for side in (True, False)]
        raise ConfigMismatchError(
            f"{setting} must be the same on all ranks of {context}, but is on for global ranks "
            f"{format_ranks(sides[0])} and off for {format_ranks(sides[1])}; set it on all of them, or on none"
        )
    return values[0]


def _all_have_descriptors(context: GroupContext, needed: int) -> bool:
    """Returns True on all ranks if each can open `needed` files. Every rank of the group calls it."""
    shortage = limits.descriptor_shortage(needed)
    if shortage:
        logger.info("%s has no connections between each two ranks: %s", context, shortage)
    return not any(map(int, context.gather(b"%d" % bool(shortage), "descriptors")))


def _pieces(x: Tensor) -> Sequence[Tensor]:
    if x.numel() <= PIECE_BYTES:
        return (x,) if x.numel() else ()
    return x.split(PIECE_BYTES)


def _encode_failure(failure: Exception | None) -> tuple[int, int]:
    """Encodes a failure in two numbers: its kind, and the global rank that it is about."""
    if failure is None:
        return 0, -1
    kind = next((number for number, kind in enumerate(_KINDS, 1) if type(failure) is kind), 1)
    suspects = getattr(failure, "suspect_ranks", ())
    return kind, suspects[0] if suspects else -1
