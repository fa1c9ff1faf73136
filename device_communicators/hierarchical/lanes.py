"""All-reduces of large tensors in which every rank of a host has its share of what crosses: lane i is rank i of each.

A host's ranks reduce a slice each; the ranks of a lane exchange the slices that they have, each combines a part of
them, and gives the others what came of it; then each host's ranks gather the slices. What crosses is what leaders would
send for their hosts, but each rank has a core and a connection of its own for it. The bits are those that leaders make,
unless sums are rounded between hosts, where each host's own part isn't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from device_communicators.calls.user_call import REDUCE_OPS
from device_communicators.cpu.native_group import DTYPES, NativeGroup
from device_communicators.hierarchical.hosts import Hosts
from device_communicators.hierarchical.leaders import MOST_UNDER_WAY, PAYLOADS, RESULTS, slices_of
from device_communicators.hierarchical.reduction import Reduction

_STAGES = 3


def all_reduce(hosts: Hosts, local: NativeGroup, xs: Sequence[Tensor], outs: Sequence[Tensor], how: Reduction) -> None:
    """Reduces flat chunks to `outs`, each of which may be its chunk; all ranks of the group call it alike.

    In step i the host's ranks reduce chunk i and send their slices of it, while those of chunk i - 1 are on their way,
    and the results of chunk i - 2. A step ends when what the one before has sent has left: else this rank might wait
    for its host, and another one for what this rank has yet to send, in a ring.
    """
    leaders = hosts.leaders
    chunks = [
        _Chunk(hosts, local, how, number % MOST_UNDER_WAY, x, out)
        for number, (x, out) in enumerate(zip(xs, outs, strict=True))
    ]

    def begin_first() -> list[int]:
        """Compares the calls before anything is read of what others send."""
        sends = leaders.begin_exchange({}) if hosts.is_leader else []
        sends += chunks[0].send()
        hosts.between(lambda: leaders.wait_for(leaders.end_exchange({}, chunks[0].expect)))
        if not hosts.is_leader:
            chunks[0].expect()
        return sends

    earlier: list[int] = []
    for step in range(len(chunks) + _STAGES - 1):
        sends: list[int] = []
        if step < len(chunks):
            chunks[step].reduce()
            sends += begin_first() if step == 0 else chunks[step].send()
            for following in chunks[step + 1 : step + 2]:  # else it would wait in memory of its own
                following.expect()
        if 1 <= step <= len(chunks):
            sends += chunks[step - 1].combine()
        if step >= 2:
            chunks[step - 2].share(earlier)
        else:
            leaders.wait_for(earlier)
        earlier = sends
    leaders.wait_for(earlier)


class _Chunk:
    """A part of the tensor on its way through the stages."""

    def __init__(self, hosts: Hosts, local: NativeGroup, how: Reduction, turn: int, x: Tensor, out: Tensor) -> None:
        """`turn` tells its memory from that of other chunks under way."""
        self._hosts, self._local, self._how, self._turn = hosts, local, how, turn
        self._given, self._wanted = x, out
        lanes = local.size
        length = -(-x.numel() // lanes)
        self._is_padded = length * lanes != x.numel()
        take = hosts.leaders.scratch.take
        self._x, self._out = x, out
        if self._is_padded:
            self._x, self._out = (take(("padded", name, turn), length * lanes, how.narrow) for name in ("x", "out"))
        self._slice = self._out[local.rank * length :][:length]
        self._part = take(("part", turn), length, how.wide)
        self._in_one_round = how.in_one_round(length)
        whole = slice(0, length)
        count = len(hosts.ranks)
        self._cuts = [whole] * count if self._in_one_round else slices_of(length, count)
        self._peers = {host: hosts.ranks[host][local.rank] for host in range(count) if host != hosts.host}
        self._parts: dict[int, Tensor] = {}
        self._receives: list[int] = []
        self._results: list[int] = []

    def expect(self) -> None:
        """Starts to receive what other hosts send of this chunk."""
        hosts, own = self._hosts, self._cuts[self._hosts.host]
        dtypes = self._how.travelling_of_all(self._in_one_round)
        for host, rank in self._peers.items():
            key = "received", self._turn, host
            self._parts[host] = part = hosts.leaders.scratch.take(key, own.stop - own.start, dtypes[host])
            if part.numel():
                self._receives.append(hosts.leaders.recv_block(part, rank, PAYLOADS))
            result = self._slice[self._cuts[host]]
            if result.numel() and not self._in_one_round:
                self._results.append(hosts.leaders.recv_block(result, rank, RESULTS))

    def reduce(self) -> None:
        """Reduces this rank's slice within the host."""
        if self._is_padded:
            self._x[: self._given.numel()].copy_(self._given)
            self._x[self._given.numel() :].zero_()
        how = self._how
        name, rows = ("reduce_scatter_part", ()) if how.widens else ("reduce_scatter", (1,))
        what = self._part.numel(), DTYPES[how.narrow], REDUCE_OPS[how.op]
        self._local.call(name, self._part.data_ptr(), self._x.data_ptr(), *rows, *what)

    def send(self) -> list[int]:
        """Gives the other hosts the parts that they combine."""
        dtype = self._how.travelling(self._hosts.host, self._in_one_round)
        parts = {rank: self._part[self._cuts[host]].to(dtype) for host, rank in self._peers.items()}
        return self._sends(parts, PAYLOADS)

    def combine(self) -> list[int]:
        """Combines this rank's part of what the hosts have, and gives them what came of it."""
        hosts, own = self._hosts, self._cuts[self._hosts.host]
        hosts.leaders.wait_for(self._receives)
        self._parts[hosts.host] = self._part[own]
        result = self._slice[own]
        if result.numel():
            self._how.combine([self._parts[host] for host in range(len(self._cuts))], result)
        return [] if self._in_one_round else self._sends(dict.fromkeys(self._peers.values(), result), RESULTS)

    def share(self, sends: Sequence[int]) -> None:
        """Gathers the slices of the host's ranks, once these sends have left, too: two waits could make a ring."""
        self._hosts.leaders.wait_for([*self._results, *sends])
        self._local.call("all_gather", self._out.data_ptr(), self._slice.data_ptr(), 1, self._slice.nbytes)
        if self._is_padded:
            self._wanted.copy_(self._out[: self._wanted.numel()])

    def _sends(self, parts: Mapping[int, Tensor], kind: int) -> list[int]:
        send = self._hosts.leaders.send_block
        return [send(part, rank, kind) for rank, part in parts.items() if part.numel()]
