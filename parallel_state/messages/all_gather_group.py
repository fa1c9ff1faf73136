"""What a message asks of the group over which its readers gather slices."""

from typing import Protocol

from torch import Tensor


class AllGatherGroup(Protocol):
    """A group whose ranks all hold the tensors of a message, so that each needs to send a slice only."""

    world_size: int
    rank_in_group: int

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor: ...
