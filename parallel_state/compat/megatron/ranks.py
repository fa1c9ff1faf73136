"""Computes Megatron's lists of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod

from device_communicators.base.errors import InvalidArgumentError
from parallel_state.compat.errors import RefusedError
from parallel_state.layout.ranks import Grid


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: list[int], mask: list[bool]
) -> list[list[int]]:
    """Returns lists of ranks that differ only in the axes where `mask` is True; the first axis varies fastest.

    `parallel_size`: sizes of the axes. If `world_size` is smaller than their product, returns the first lists only.
    """
    if world_size > prod(parallel_size):
        raise RefusedError(
            f"the product of the parallel sizes {parallel_size} must be at least the world size, {world_size}"
        )
    grid = Grid(tuple((str(at), size) for at, size in enumerate(parallel_size)))
    spanned = [str(at) for at, chosen in enumerate(mask) if chosen]
    return grid.groups(*spanned)[: world_size // grid.size(*spanned)]


class RankGenerator:
    """Computes lists of ranks. The fastest-varying axis is first.

    Megatron uses one generator for dense layers (`ep` is 1), and one for experts (`cp` is 1).
    """

    def __init__(self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0) -> None:
        if ep != 1 and cp != 1:
            raise RefusedError(f"ep or cp must be 1 in a RankGenerator, but they are {ep} and {cp}")
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset = rank_offset
        self.world_size = tp * dp * pp * cp * ep
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        names = order.lower().split("-")
        for name, size in self.name_to_size.items():
            if name not in names and size != 1:
                raise RefusedError(f"order must name axis {name}, because its size is {size}, but order is {order!r}")
        names += [name for name in self.name_to_size if name not in names]
        self.order = "-".join(names)
        self.ordered_size = [self.name_to_size[name] for name in names]

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Returns, for each axis of `order` (such as `tp-cp-dp`), whether `token` (such as `tp-dp`) contains the axis.

        Raises ValueError for unknown axes.
        """
        names, wanted = order.split("-"), token.split("-")
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise InvalidArgumentError(f"order {order!r} has no axis {unknown[0]!r}")
        return [name in wanted for name in names]

    def get_ranks(self, token: str) -> list[list[int]]:
        mask = self.get_mask(self.order, token)
        lists = generate_masked_orthogonal_rank_groups(self.world_size, self.ordered_size, mask)
        return [[rank + self.rank_offset for rank in ranks] for ranks in lists]


def hierarchical_ranks(ranks: Sequence[int], sizes: Sequence[int]) -> list[list[list[int]]]:
    if prod(sizes) != len(ranks):
        raise RefusedError(
            f"the product of the hierarchical sizes {list(sizes)} must be the number of ranks, {len(ranks)}"
        )
    grid = Grid(tuple((str(level), size) for level, size in enumerate(sizes)))
    return [[[ranks[at] for at in group] for group in grid.groups(str(level))] for level in range(len(sizes))]


def hybrid_ranks(ranks: Sequence[int]) -> list[list[int]]:
    """Splits `ranks` into lists of 2 consecutive ranks, then of 4, and so on up to half of all ranks."""
    sizes = [2**power for power in range(1, int(log2(len(ranks))))]
    return [list(ranks[at : at + size]) for size in sizes for at in range(0, len(ranks), size)]


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    return list(dict.fromkeys((pp_ranks[0], pp_ranks[-1])))


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    return [pp_ranks[0]]
