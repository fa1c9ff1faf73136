"""Slices of tensors: each rank of an all-gather group sends or receives one slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class AllGatherGroup(Protocol):
    """A group whose ranks all hold, or all receive, the same tensors. Each rank sends or receives one slice of a
    tensor, and the receivers exchange the slices by `all_gather`.
    """

    world_size: int
    rank_in_group: int

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor: ...


class Cut(NamedTuple):
    """The part of each tensor that a rank sends: slice number `mine` of `slices`. If `slices` is 0, or the tensor's key
    is in `whole`, the rank sends the whole tensor. Corresponds to `Cut` in csrc/pack.h.
    """

    slices: int = 0
    mine: int = 0
    whole: dict[str, None] | None = None


WHOLE = Cut()


def cut_of(group: AllGatherGroup | None, all_gather_tensors: Mapping[str, bool] | None) -> Cut:
    if group is None:
        return WHOLE
    whole = {key: None for key, gather in (all_gather_tensors or {}).items() if not gather}
    return Cut(group.world_size, group.rank_in_group, whole or None)


def cut_tensors(tensors: Sequence[Tensor], cut: Sequence[object], slices: int, mine: int) -> list[Tensor]:
    return [x.detach().view(slices, -1)[mine] if is_cut else x for x, is_cut in zip(tensors, cut, strict=True)]


def can_be_cut(numel: int, slices: int) -> bool:
    return slices > 1 and numel > 0 and numel % slices == 0
