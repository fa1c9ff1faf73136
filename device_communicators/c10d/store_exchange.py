"""All-gathers over a store: for ranks that have no connection to each other yet."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore


class StoreExchange:
    """All-gathers of a few hundred bytes over a store: as much of a process group as `HostMemory.attach` asks for.

    Every rank calls `close` afterwards.
    """

    def __init__(self, store: BoundedStore, rank: int, size: int) -> None:
        """`store` has the deadline of the exchange."""
        self._store = store
        self._rank = rank
        self._size = size
        self._rounds = 0
        self._last: _Exchange | None = None

    def missing(self) -> list[int]:
        """Returns the ranks whose part of the last all-gather is missing; none if the store doesn't answer."""
        with contextlib.suppress(RuntimeError):
            return [] if self._last is None else self._last.missing()
        return []

    def _allgather_base(self, out: Tensor, x: Tensor) -> _Exchange:
        self._rounds += 1
        keys = self._keys(self._rounds)
        self._store.set(keys[self._rank], bytes(x.tolist()))
        self._last = _Exchange(self._store, keys, out)
        return self._last

    def _keys(self, number: int) -> list[str]:
        return [f"host_memory/{number}/{rank}" for rank in range(self._size)]

    def close(self, others: Sequence[str] = ()) -> None:
        """Deletes the keys, and `others` that all ranks have set and read. The last rank to call this deletes them."""
        readers = "host_memory/readers"
        own = [key for number in range(self._rounds) for key in self._keys(number + 1)]
        with contextlib.suppress(RuntimeError):  # its server may have left right after its own start
            if self._store.add(readers, 1) == self._size:
                for key in (readers, *others, *own):
                    self._store.delete_key(key)


class _Exchange:
    """One all-gather: a work."""

    def __init__(self, store: BoundedStore, keys: list[str], out: Tensor) -> None:
        self._store = store
        self._keys = keys
        self._out: Tensor | None = out
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self._out is None or self._error is not None

    def wait(self, timeout: timedelta) -> None:
        """Returns once all parts have arrived. Raises RuntimeError at the timeout, and may be called again.

        An error of the store completes it: each wait raises that error.
        """
        if self._error is not None:
            raise self._error
        out = self._out
        if out is None:
            return
        try:
            came = self._store.wait_for(self._keys, timeout.total_seconds())
            found = b"".join(self._store.multi_get(self._keys)) if came else b""
        except RuntimeError as error:
            self._error = error
            raise
        if not came:
            raise RuntimeError("some ranks have not come")
        out.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))
        self._out = None

    def missing(self) -> list[int]:
        """Returns the ranks whose part is missing."""
        store = self._store.within(LAST_WORD_S)  # the exchange's own deadline has passed
        return [rank for rank, key in enumerate(self._keys) if not store.check([key])]
