"""Exchanges objects over a store: the base of vLLM's and SGLang's StatelessProcessGroup.

Objects are pickled, so clients of the store must be trusted to run code in this process.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import InvalidArgumentError
from parallel_state.compat import pickles

ANSWER_S = 1.0


@dataclasses.dataclass
class StoreGroup:
    """Exchanges objects over `store`, a torch Store.

    Sender and receiver, or all ranks in a collective, must make their calls in the same order. Each send deletes
    objects older than `data_expiration_seconds`. The counters and `entries` are internal.
    """

    rank: int
    world_size: int
    store: Any
    data_expiration_seconds: int = 3600
    send_dst_counter: dict[int, int] = dataclasses.field(default_factory=dict)
    recv_src_counter: dict[int, int] = dataclasses.field(default_factory=dict)
    broadcast_send_counter: int = 0
    broadcast_recv_src_counter: dict[int, int] = dataclasses.field(default_factory=dict)
    entries: deque[tuple[str, float]] = dataclasses.field(default_factory=deque)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidArgumentError(f"rank must be in 0 … {self.world_size - 1}, but is {self.rank}")
        for counter in (self.send_dst_counter, self.recv_src_counter, self.broadcast_recv_src_counter):
            counter.update(dict.fromkeys(range(self.world_size), 0))
        self._bounded = BoundedStore(self.store)

    @property
    def bounded(self) -> BoundedStore:
        return self._bounded.within(self.store.timeout.total_seconds() + ANSWER_S)

    def send_obj(self, obj: Any, dst: int) -> None:
        """Sends an object to rank `dst` of this group, without waiting for the receiver."""
        self._put(f"send_to/{dst}/{self.rank}/{self.send_dst_counter[dst]}", obj)
        self.send_dst_counter[dst] += 1

    def recv_obj(self, src: int) -> Any:
        """Receives an object from rank `src` of this group. Waits at most the store's timeout."""
        obj = self._get(f"send_to/{self.rank}/{src}/{self.recv_src_counter[src]}")
        self.recv_src_counter[src] += 1
        return obj

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Returns the object of rank `src` of this group. Every rank must call this; only `src`'s `obj` is used."""
        if self.rank == src:
            self._put(f"broadcast_from/{src}/{self.broadcast_send_counter}", obj)
            self.broadcast_send_counter += 1
            return obj
        found = self._get(f"broadcast_from/{src}/{self.broadcast_recv_src_counter[src]}")
        self.broadcast_recv_src_counter[src] += 1
        return found

    def all_gather_obj(self, obj: Any) -> list[Any]:
        self.broadcast_obj(obj, self.rank)
        return [obj if src == self.rank else self.broadcast_obj(None, src) for src in range(self.world_size)]

    def expire_data(self) -> None:
        while self.entries and time.perf_counter() - self.entries[0][1] > self.data_expiration_seconds:
            self.bounded.delete_key(self.entries.popleft()[0])

    def _put(self, key: str, obj: Any) -> None:
        self.expire_data()
        self.bounded.set(key, bytes(pickles.dumps(obj)))
        self.entries.append((key, time.perf_counter()))

    def _get(self, key: str) -> Any:
        return pickles.loads(self.bounded.get(key))
