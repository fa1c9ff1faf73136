"""`sglang.srt.distributed.utils`: helpers for division and pipeline stages, and StatelessProcessGroup."""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel_state.compat.stages import divide as divide
from parallel_state.compat.stages import ensure_divisibility as ensure_divisibility
from parallel_state.compat.stages import layers_in
from parallel_state.compat.stateless import StoreGroup
from parallel_state.functions import utilities

logger = logging.getLogger("parallel_state")

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Resources:
    """Holds the global TCPStore if SGLang isn't imported."""

    tcp_store: Any = None


def _resources() -> Any:
    theirs = sys.modules.get("sglang.srt.runtime_context")
    return _Resources if theirs is None else theirs.get_resources()


def set_global_tcp_store(store: dist.Store) -> None:
    _resources().tcp_store = store


def get_global_tcp_store() -> dist.Store | None:
    store = _resources().tcp_store
    if store is None:
        logger.warning("there is no global TCPStore; call set_global_tcp_store() first")
    return store


def get_group_rank_size(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)


def split_tensor_along_last_dim(tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False) -> Any:
    return tuple(utilities.split_tensor_along_last_dim(tensor, num_partitions, contiguous_split_chunks))


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Returns the first layer of stage `pp_rank` and the layer after its last. The last stages get the remainder."""
    layers = layers_in("SGLANG_PP_LAYER_PARTITION", num_hidden_layers, pp_size) if pp_size > 1 else None
    if layers is None:
        layers = [num_hidden_layers // pp_size] * pp_size
        for stage in range(pp_size - num_hidden_layers % pp_size, pp_size):
            layers[stage] += 1
    return sum(layers[:pp_rank]), sum(layers[: pp_rank + 1])


@dataclasses.dataclass
class StatelessProcessGroup(StoreGroup):
    def barrier(self) -> None:
        self.all_gather_obj(None)

    @staticmethod
    def create(
        host: str, port: int, rank: int, world_size: int, data_expiration_seconds: int = 3600
    ) -> StatelessProcessGroup:
        """Creates a group over a store that rank 0 serves at `host`:`port`. Every rank must call this."""
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0)
        return StatelessProcessGroup(rank, world_size, store, data_expiration_seconds)
