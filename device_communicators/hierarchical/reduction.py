"""The arithmetic of a reduction over hosts: its dtype, those in which the hosts' parts travel, its rounds.

Nothing here talks to another rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from device_communicators.calls.floating_point import default_floating_point
from device_communicators.calls.reductions import combine_, divide_
from device_communicators.calls.user_call import REDUCE_OPS
from device_communicators.cpu import native
from device_communicators.cpu.native_group import DTYPES, reducible_in_memory

ONE_ROUND_BYTES = 64 << 10
"""The most that each host sends to all others in one round; above, each reduces a slice, in two rounds.

Of two and three hosts on one machine with two cores, one round took 0.3 to 0.7 of the time of two up to here, and from
256 KiB on the same. Of two hosts whose sums travel in the tensor's dtype, one round sends no more than two do.
"""

_MOST_SOURCES = 64
"""Of `PartFunction` in csrc/reduce.h."""
_ROUNDED = ("sum", "avg", "product")


class Reduction:
    """A reduction of tensors like `x`: a host of several ranks has their result in dtype `wide`, which is rounded once.

    That of a host of one rank is its tensor as it is.
    """

    def __init__(self, x: Tensor, reduce_op: str, ranks_of_hosts: Sequence[int], *, rounded: bool = False) -> None:
        """`rounded`: whether sums of bfloat16 are rounded before they travel."""
        self.narrow = x.dtype
        self._reduce_op = reduce_op
        if x.dtype in (torch.float16, torch.bfloat16) and reduce_op in _ROUNDED:
            self.wide, op, self.widens = torch.float32, reduce_op, True
        else:
            wide, op, narrow = reducible_in_memory(x.view(-1)[:0], reduce_op)
            self.wide, self.widens = wide.dtype, narrow is not None
            self.narrow = x.dtype if self.widens else wide.dtype
        self.op = "sum" if op == "avg" else op
        self._ranks = sum(ranks_of_hosts)
        self._divisor = self._ranks if op == "avg" else None
        self.is_native = x.dtype in (torch.float16, torch.bfloat16) or not self.widens
        """True if csrc/reduce.h knows this reduction in parts; all but those of rare dtypes."""
        self._library = native.load()
        self._alone = [count == 1 for count in ranks_of_hosts]
        self._rounded = rounded and self.widens and x.dtype == torch.bfloat16
        self._travelling = {
            each: tuple(self.travelling(host, each) for host in range(len(ranks_of_hosts))) for each in (False, True)
        }

    def flat(self, x: Tensor) -> Tensor:
        """Returns a view of contiguous `x`, in the dtype `narrow`."""
        x = x if self.widens else reducible_in_memory(x, self._reduce_op)[0]
        return x if x.dim() == 1 else x.view(-1)

    def in_one_round(self, count: int) -> bool:
        """Returns True if each host sends all of `count` elements to all others, as nothing is rounded then."""
        travelling = self.wide if not all(self._alone) else self.narrow
        hosts = len(self._alone)
        if count * travelling.itemsize * (hosts - 1) <= ONE_ROUND_BYTES:
            return True
        return hosts == 2 and not self._rounded and travelling.itemsize <= self.narrow.itemsize

    def travelling(self, host: int, in_one_round: bool = False) -> torch.dtype:
        """Returns the dtype in which the part of `host` travels."""
        return self.narrow if self._alone[host] or (self._rounded and not in_one_round) else self.wide

    def travelling_of_all(self, in_one_round: bool) -> tuple[torch.dtype, ...]:
        """Returns `travelling` of each host."""
        return self._travelling[in_one_round]

    def combine(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Writes what the hosts' parts, in their order, come to, to `out`, which may be one of them: rounded once."""
        if self.is_native and len(parts) <= _MOST_SOURCES:
            self._reduce_part(parts, out, REDUCE_OPS[self.op if self._divisor is None else "avg"], self._ranks)
        else:
            total = torch.empty(out.shape, dtype=self.wide, device="cpu")
            self._fold(parts, total)
            if self._divisor is not None:
                divide_(total, self._divisor)
            with default_floating_point():
                out.copy_(total)

    def add_up(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Writes what parts of dtype `narrow` come to, to `out`, of dtype `wide`."""
        if self.is_native:
            self._reduce_part(parts, out, REDUCE_OPS[self.op], 0)
        else:
            self._fold(parts, out)

    def _fold(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduces parts to `out`, of dtype `wide`, by torch's operators."""
        with default_floating_point():
            out.copy_(parts[0])
            for part in parts[1:]:
                combine_(out, part.to(self.wide), self.op)

    def _reduce_part(self, parts: Sequence[Tensor], out: Tensor, op: int, total: int) -> None:
        sources = (ctypes.c_void_p * len(parts))(*[part.data_ptr() for part in parts])
        wide = sum(1 << place for place, part in enumerate(parts) if self.widens and part.dtype == self.wide)
        what = len(parts), out.numel(), DTYPES[self.narrow], op, total
        self._library.ps_reduce_part(out.data_ptr(), sources, wide, *what)
