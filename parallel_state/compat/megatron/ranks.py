"""Megatron's rank arithmetic, on the grids of `layout`: its RankGenerator, and lists cut out of a group's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod

from device_communicators.base.errors import InvalidArgumentError
from parallel_state.compat.megatron.errors import RefusedError
from parallel_state.layout.ranks import Grid


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: list[int], mask: list[bool]
) -> list[list[int]]:
    """Returns the lists of ranks that differ in the masked sizes only; the first size varies fastest.

    With `world_size` below the product of the sizes, the first lists. Raises RefusedError for a larger one.
    """
    if world_size > prod(parallel_size):
        raise RefusedError(f"the product of {parallel_size} must be at least the world size, {world_size}, but isn't")
    grid = Grid(tuple((str(at), size) for at, size in enumerate(parallel_size)))
    spanned = [str(at) for at, chosen in enumerate(mask) if chosen]
    return grid.groups(*spanned)[: world_size // grid.size(*spanned)]


class RankGenerator:
    """Numbers the ranks of a world by axes, in an order from fastest to slowest, and lists those that share a group.

    One for the dense layers (`ep` 1) and one for those with experts (`cp` 1). `gtp_remat` cuts weights that are
    gathered at each use. Lists begin at `rank_offset`.
    """

    def __init__(
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        """Raises RefusedError where both ep and cp have several ranks, or the order lacks an axis that has."""
        if ep != 1 and cp != 1:
            raise RefusedError(f"ep and cp can't both have several ranks in one numbering, but are {ep} and {cp}")
        self.tp, self.ep, self.dp, self.pp, self.cp, self.gtp_remat = tp, ep, dp, pp, cp, gtp_remat
        self.rank_offset = rank_offset
        self.world_size = tp * dp * pp * cp * ep * gtp_remat
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp, "gtp_remat": gtp_remat}
        names = order.lower().split("-")
        for name, size in self.name_to_size.items():
            if name not in names and size != 1:
                raise RefusedError(f"the order must name {name}, whose size is {size}, but is {order!r}")
        names += [name for name in self.name_to_size if name not in names and name != "gtp_remat"]
        self.order = "-".join(names)
        self.ordered_size = [self.name_to_size[name] for name in names]

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Returns for each axis of `order` whether `token` (`tp-dp`) names it; ValueError for an axis that isn't."""
        names, wanted = order.split("-"), token.split("-")
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise InvalidArgumentError(f"the order {order!r} must name {unknown[0]!r}, but doesn't")
        return [name in wanted for name in names]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Returns all groups that span the axes of `token`, such as `tp-dp`."""
        mask = self.get_mask(self.order, token)
        lists = generate_masked_orthogonal_rank_groups(self.world_size, self.ordered_size, mask)
        return [[rank + self.rank_offset for rank in ranks] for ranks in lists]

    def get_gtp_ranks(self, gtp_remat_size: int) -> list[list[int]]:
        """Returns the groups that share a weight; of one rank each with size 1. Raises RefusedError for another."""
        if gtp_remat_size != self.gtp_remat:
            raise RefusedError(f"gtp_remat_size must be {self.gtp_remat}, as it was made, but is {gtp_remat_size}")
        if "gtp_remat" not in self.order.split("-"):
            return [[rank] for rank in range(self.rank_offset, self.rank_offset + self.world_size)]
        return self.get_ranks("gtp_remat")


def with_gtp_remat(order: str, after: str) -> str:
    """Returns the order with the axis `gtp_remat` behind `after`, behind `tp` where it lacks that, else in front."""
    names = order.lower().split("-")
    if "gtp_remat" not in names:
        names.insert(next((names.index(name) + 1 for name in (after, "tp") if name in names), 0), "gtp_remat")
    return "-".join(names)


def hierarchical_ranks(ranks: Sequence[int], sizes: Sequence[int]) -> list[list[list[int]]]:
    """Returns for each level the lists that `ranks` are cut into; the first level's are neighbours."""
    if prod(sizes) != len(ranks):
        raise RefusedError(f"the product of the hierarchical sizes {list(sizes)} must be {len(ranks)}, but isn't")
    grid = Grid(tuple((str(level), size) for level, size in enumerate(sizes)))
    return [[[ranks[at] for at in group] for group in grid.groups(str(level))] for level in range(len(sizes))]


def hybrid_ranks(ranks: Sequence[int]) -> list[list[int]]:
    """Returns neighbours among `ranks` in lists of 2, 4, …, each power of two below their number."""
    sizes = [2**power for power in range(1, int(log2(len(ranks))))]
    return [list(ranks[at : at + size]) for size in sizes for at in range(0, len(ranks), size)]


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Returns the first and last stage of a pipeline's ranks; one where they are the same."""
    return list(dict.fromkeys((pp_ranks[0], pp_ranks[-1])))


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Returns the first stage of a pipeline's ranks."""
    return [pp_ranks[0]]
