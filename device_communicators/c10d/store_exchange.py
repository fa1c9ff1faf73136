"""Waits for keys of a store, and all-gathers over it: for ranks that have no connection to each other yet."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.001, 0.02


class StoreExchange:
    """All-gathers of a few hundred bytes over a store: as much of a process group as `HostMemory.attach` asks for.

    Every rank calls `close` afterwards.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._rounds = 0

    def _allgather_base(self, out: Tensor, x: Tensor) -> _Exchange:
        self._rounds += 1
        keys = self._keys(self._rounds)
        self._store.set(keys[self._rank], bytes(x.tolist()))
        return _Exchange(self._store, keys, out)

    def _keys(self, number: int) -> list[str]:
        return [f"host_memory/{number}/{rank}" for rank in range(self._size)]

    def close(self) -> None:
        """Takes the keys out of the store once all ranks have read them: the last one does."""
        readers = "host_memory/readers"
        if self._store.add(readers, 1) == self._size:
            for key in (readers, *(key for number in range(self._rounds) for key in self._keys(number + 1))):
                self._store.delete_key(key)


class _Exchange:
    """One all-gather: a work."""

    def __init__(self, store: Any, keys: list[str], out: Tensor) -> None:
        self._store = store
        self._keys = keys
        self._out: Tensor | None = out

    def is_completed(self) -> bool:
        return self._out is None

    def wait(self, timeout: timedelta) -> None:
        """Returns once all is there. Raises RuntimeError when the time is over; it can be waited for again."""
        out = self._out
        if out is None:
            return
        if not wait_for(self._store, self._keys, timeout):
            raise RuntimeError("some ranks have not come")
        found = b"".join(bytes(self._store.get(key)) for key in self._keys)
        out.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))
        self._out = None


def wait_for(store: Any, keys: list[str], timeout: timedelta) -> bool:
    """Returns True once all keys are set, False when the time is over: torch logs that of the store's own wait."""
    deadline = time.monotonic() + timeout.total_seconds()
    nap_s = _SHORTEST_NAP_S
    while keys and not store.check(keys):
        if time.monotonic() >= deadline:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    return True
