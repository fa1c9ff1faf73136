"""The interface of the argument `all_gather_group`: its ranks each receive a slice of a tensor, then gather it."""

from typing import Protocol

from torch import Tensor


class AllGatherGroup(Protocol):
    """A group whose ranks all hold the same tensors, so that each of them needs to send only one slice."""

    world_size: int
    rank_in_group: int

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor: ...
