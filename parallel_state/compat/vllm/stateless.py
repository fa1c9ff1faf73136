"""vLLM's StatelessProcessGroup, over a store."""

from __future__ import annotations

import dataclasses
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_communicators.base.errors import CollectiveTimeoutError
from parallel_state.compat.stateless import ANSWER_S, StoreGroup
from parallel_state.groups import same_node

_REDUCE: dict[Any, Any] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


@dataclasses.dataclass
class StatelessProcessGroup(StoreGroup):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._barriers = 0

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Returns the tensor of rank `src`, which gets its argument back, not a copy. Every rank must call this."""
        return self.broadcast_obj(tensor, src)

    def send(self, tensor: Tensor, dst: int) -> None:
        self.send_obj(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        return tensor.copy_(self.recv_obj(src))

    def all_reduce(self, tensor: Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> Tensor:
        """Reduces the tensors of all ranks in rank order, and returns a new tensor."""
        first, *others = self.all_gather_obj(tensor)
        result = first.clone()
        for each in others:
            result = _REDUCE[op](result, each)
        return result

    def barrier(self, timeout: float = 30.0) -> None:
        """Waits until all ranks have called this. Rank 0, which can serve the store, returns last. `timeout` is in
        seconds.
        """
        self._barriers += 1
        for phase in ("came", "left"):
            keys = [f"barrier/{self._barriers}/{phase}/{rank}" for rank in range(self.world_size)]
            store = self.bounded
            store.set(keys[self.rank], b"1")
            if phase == "left" and self.rank != 0:
                return
            store = self._bounded.within(timeout + ANSWER_S)
            if not store.wait_for(keys, timeout):
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise CollectiveTimeoutError(
                    f"barrier of {self.world_size} ranks timed out after {timeout:g} s: ranks {missing} haven't "
                    f"{'entered' if phase == 'came' else 'left'} it. See the logs of these ranks for the cause",
                    operation="barrier", rank=self.rank, suspect_ranks=missing, timeout_s=timeout,
                )  # fmt: skip

    def same_node(self, source_rank: int) -> list[bool]:
        """Returns, for each rank, True if it is on the host of `source_rank`. Every rank must call this."""
        return same_node.find_sharers(
            self.rank == source_rank, lambda name: self.broadcast_obj(name, source_rank), self.all_gather_obj
        )

    @staticmethod
    def create(
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: int = 300,
        listen_socket: socket.socket | None = None,
    ) -> StatelessProcessGroup:
        """Creates a group over a store that rank 0 serves at `host`:`port`. Every rank must call this.

        Rank 0's store listens on `listen_socket` and closes it.
        """
        given: dict[str, Any] = {} if listen_socket is None else {"master_listen_fd": listen_socket.detach()}
        store = dist.TCPStore(
            host, port, world_size, rank == 0, timedelta(seconds=store_timeout), use_libuv=False, **given
        )
        return StatelessProcessGroup(rank, world_size, store, data_expiration_seconds)


def in_the_same_node_as(pg: Any, source_rank: int = 0) -> list[bool]:
    """Returns, for each rank, True if its host is that of group rank `source_rank`. Every rank must call this."""
    if isinstance(pg, StatelessProcessGroup):
        return pg.same_node(source_rank)
    return same_node.in_the_same_node_as(pg, source_rank)
