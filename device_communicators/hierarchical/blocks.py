"""Blocks from each rank to each other over several hosts: all_to_all, gather, scatter.

The leaders compare the calls; what goes to another host goes there from the rank that has it to the one that needs it,
at once, and waits in the kernel until the calls are known to agree. What stays on a host goes through its memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from device_communicators.hierarchical.hosts import Hosts


def all_to_all(hosts: Hosts, out: Tensor, x: Tensor, mine: Sequence[int], row_bytes: int) -> None:
    """Sends each rank its rows of the bytes `x`, and receives its rows of `out`.

    `mine`: how many rows go to each rank, then how many come from each.
    """
    size, own = hosts.context.size, hosts.ranks[hosts.host]
    hosts.leaders.splits = _splits_of_all(hosts, mine)
    sent = x.split([rows * row_bytes for rows in mine[:size]])
    received = out.split([rows * row_bytes for rows in mine[size:]])

    def at_home() -> None:
        given, taken = [sent[dst] for dst in own], [received[src] for src in own]
        if hosts.local is None:
            taken[0].copy_(given[0])
            return
        side_by_side, place = _side_by_side(x, sent, own), _side_by_side(out, received, own)
        flat = torch.cat(given) if side_by_side is None else side_by_side
        found = flat.new_empty(sum(map(len, taken))) if place is None else place
        sizes = ((ctypes.c_size_t * len(own))(*map(len, each)) for each in (taken, given))
        hosts.local.call("all_to_all", found.data_ptr(), flat.data_ptr(), *sizes)
        if place is None:
            for block, part in zip(taken, found.split([len(each) for each in taken]), strict=True):
                block.copy_(part)

    _exchange(hosts, dict(enumerate(sent)), dict(enumerate(received)), at_home)


def gather(hosts: Hosts, out: Tensor | None, x: Tensor, dst: int) -> None:
    """Gathers the bytes `x` of all ranks to the rows of `out` on `dst`."""
    own = hosts.ranks[hosts.host]
    hosts.meet()

    def at_home() -> None:
        if out is not None:
            out[dst].copy_(x)
        if hosts.local is not None and dst in own:
            addresses = [None if out is None or src == dst else out[src].data_ptr() or 1 for src in own]
            sizes = (ctypes.c_size_t * len(own))(*[x.nbytes] * len(own))
            hosts.local.call("gatherv", (ctypes.c_void_p * len(own))(*addresses), sizes, x.data_ptr(), own.index(dst))

    _exchange(hosts, {dst: x}, {} if out is None else dict(enumerate(out)), at_home)


def scatter(hosts: Hosts, out: Tensor, x: Tensor | None, src: int) -> None:
    """Scatters the rows of bytes `x` of `src` to the bytes `out` of all ranks."""
    own = hosts.ranks[hosts.host]
    hosts.meet()

    def at_home() -> None:
        if x is not None and hosts.local is None:
            out.copy_(x[src])
        elif hosts.local is not None and src in own:
            rows = None if x is None else x[own[0] : own[-1] + 1] if _are_consecutive(own) else x[list(own)]
            address = None if rows is None else rows.data_ptr()
            hosts.local.call("scatter", out.data_ptr(), address, out.nbytes, own.index(src))

    _exchange(hosts, {} if x is None else dict(enumerate(x)), {src: out}, at_home)


def _are_consecutive(ranks: Sequence[int]) -> bool:
    return ranks[-1] - ranks[0] == len(ranks) - 1


def _side_by_side(x: Tensor, blocks: Sequence[Tensor], ranks: Sequence[int]) -> Tensor | None:
    """Returns the blocks of `ranks` as one part of `x`, which consists of all blocks; None where they are scattered."""
    if not _are_consecutive(ranks):
        return None
    begin = sum(map(len, blocks[: ranks[0]]))
    return x[begin : begin + sum(len(blocks[rank]) for rank in ranks)]


def _exchange(
    hosts: Hosts, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], at_home: Callable[[], None]
) -> None:
    """Sends tensors to ranks, and receives from them; those of this host are the business of `at_home`."""
    leaders, own = hosts.leaders, hosts.ranks[hosts.host]
    transfers = leaders.begin_exchange({}) if hosts.is_leader else []
    transfers += [leaders.send_block(x, rank) for rank, x in sent.items() if rank not in own and x.numel()]

    def receive() -> None:
        transfers.extend(leaders.recv_block(x, rank) for rank, x in received.items() if rank not in own and x.numel())

    hosts.between(lambda: leaders.wait_for(leaders.end_exchange({}, receive)))
    if not hosts.is_leader:
        receive()
    at_home()
    leaders.wait_for(transfers)


def _splits_of_all(hosts: Hosts, mine: Sequence[int]) -> tuple[int, ...]:
    """Returns the splits of the ranks of this host, in their order."""
    words = torch.tensor(mine, dtype=torch.int64, device="cpu")
    everyone = words.new_empty(len(hosts.ranks[hosts.host]) * len(mine))
    hosts.all_gather(everyone, words)
    return tuple(everyone.tolist())
