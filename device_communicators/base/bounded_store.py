"""Adds deadlines to operations on a torch store.

torch's TCPStore client has no deadline, and holds a lock while it waits: on a dead link it waits 16 minutes. Therefore
a helper thread runs each operation, and the caller abandons that thread at the deadline.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from device_communicators.base.helper_threads import Call

OPERATION_S = 5.0
LAST_WORD_S = 0.5
"""Time that a call has after its deadline to publish its failure through the store."""
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.001, 0.02
_LONGEST_TIMEOUT_S = 86_400.0


class StoreSilentError(dist.DistError):
    pass


def _never() -> bool:
    return False


class _Connection:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pending: Call | None = None

    def abandoned(self) -> Call | None:
        with self.lock:
            if self.pending is not None and self.pending.is_done():
                self.pending = None
            return self.pending

    def abandon(self, call: Call) -> None:
        with self.lock:
            if self.pending is None or self.pending.is_done():
                self.pending = call


class BoundedStore:
    """A torch store whose operations raise StoreSilentError at a deadline, and torch's DistError for other failures.
    Thread-safe.

    `get` and `multi_get` wait for a missing key until the deadline.
    """

    def __init__(
        self,
        store: Any,
        *,
        limit_s: float = OPERATION_S,
        deadline: float = float("inf"),
        ended: Callable[[], object] = _never,
        connection: _Connection | None = None,
        owns_timeout: bool = False,
    ) -> None:
        """`limit_s`: timeout of each operation. `deadline`: monotonic time at which all operations fail. An operation
        also fails when `ended()` returns True. `connection`: shared by all wrappers of one torch store. `owns_timeout`:
        True if nothing else uses the timeout of `store`; operations then set this timeout and need no helper thread.
        """
        self.raw = store
        """The wrapped torch store. Its operations have no deadline."""
        self._limit_s = limit_s
        self._deadline = deadline
        self._ended = ended
        self._connection = connection or _Connection()
        self._owns_timeout = owns_timeout
        self._is_direct = isinstance(_server_of(store), dist.HashStore)

    @classmethod
    def of(cls, store: Any) -> BoundedStore:
        return store if isinstance(store, BoundedStore) else cls(store)

    def until(self, deadline: float, ended: Callable[[], object] = _never) -> BoundedStore:
        """Returns a store on the same connection that fails at `deadline`, or earlier if `ended()` returns True."""
        return BoundedStore(
            self.raw,
            limit_s=float("inf"),
            deadline=deadline,
            ended=ended,
            connection=self._connection,
            owns_timeout=self._owns_timeout,
        )

    def within(self, limit_s: float) -> BoundedStore:
        return self.until(time.monotonic() + limit_s)

    def prefixed(self, prefix: str) -> BoundedStore:
        return BoundedStore(
            dist.PrefixStore(prefix, self.raw),
            limit_s=self._limit_s,
            deadline=self._deadline,
            ended=self._ended,
            connection=self._connection,
            owns_timeout=self._owns_timeout,
        )

    @property
    def served_by(self) -> int | None:
        server = _server_of(self.raw)
        if not isinstance(server, dist.TCPStore):
            return getattr(server, "served_by", None)
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return None if by_agent and str(server.port) == os.environ.get("MASTER_PORT", "").strip() else 0

    def __str__(self) -> str:
        server = _server_of(self.raw)
        host, port = getattr(server, "host", ""), getattr(server, "port", 0)
        if not host:
            host, port = getattr(server, "address", ("", 0))
        if not host:
            return f"the store ({type(server).__name__})"
        server = "the launcher" if self.served_by is None else f"rank {self.served_by}"
        return f"the store at {host}:{port}, which {server} serves,"

    def start(self, job: Callable[[BoundedStore], object]) -> None:
        """Runs `job(store)` in a helper thread, without waiting for it. The operations of that `store` have no
        deadline. A failure of the store, or an operation that this kind of store lacks, silently ends `job`.
        """
        direct = BoundedStore(self.raw)
        direct._is_direct = True

        def run() -> None:
            with contextlib.suppress(dist.DistError, NotImplementedError):
                job(direct)

        Call(run)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask("multi_get", list(keys)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def append(self, key: str, value: str) -> None:
        self._ask("append", key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._ask("compare_set", key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    @property
    def can_hold(self) -> bool:
        return hasattr(self.raw, "hold")

    @property
    def waits_in_server(self) -> bool:
        """True for stores whose server can wait for a key, as this library's can. `wait_for` polls all other stores."""
        return hasattr(_server_of(self.raw), "access")

    def hold(self, key: str, value: str) -> None:
        """Sets the key until this process exits or closes the store. A store whose `can_hold` is False never deletes
        the key.
        """
        self._ask("hold" if self.can_hold else "set", key, value)

    def close(self) -> None:
        if self.can_hold:
            self.raw.close()

    def wait_for(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Waits until all keys are set; returns False at the timeout. Polls torch's own stores, because they log each
        timeout.
        """
        if self.waits_in_server:
            if self._owns_timeout:
                self._set_timeout(self._deadline - time.monotonic())  # limits connecting
            try:
                self.raw.wait(list(keys), timedelta(seconds=timeout_s))
            except dist.DistStoreError:
                return False
            return True
        deadline, nap_s = time.monotonic() + timeout_s, _SHORTEST_NAP_S
        while keys and not self.check(keys):
            if time.monotonic() >= deadline:
                return False
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.raw.set_timeout(timeout)

    def _ask(self, operation: str, *args: Any) -> Any:
        if self._is_direct:
            return getattr(self.raw, operation)(*args)
        started = time.monotonic()
        deadline = min(self._deadline, started + self._limit_s)
        if self._owns_timeout and self._ended is _never:
            return self._ask_here(operation, args, started, deadline)
        before = self._connection.abandoned()
        if before is not None and not before.wait(deadline, self._ended):
            raise self._silent(operation, before.started_s)
        call = Call(lambda: getattr(self.raw, operation)(*args))
        try:
            if not call.wait(max(deadline, started + _SHORTEST_NAP_S), self._ended):
                raise self._silent(operation, started)
        except BaseException:
            self._connection.abandon(call)
            raise
        return call.result()

    def _ask_here(self, operation: str, args: Sequence[Any], started: float, deadline: float) -> Any:
        left_s = self._set_timeout(deadline - started)
        try:
            return getattr(self.raw, operation)(*args)
        except dist.DistError as error:
            if time.monotonic() < started + left_s:
                raise
            raise self._silent(operation, started) from error

    def _set_timeout(self, left_s: float) -> float:
        left_s = min(max(left_s, _SHORTEST_NAP_S), _LONGEST_TIMEOUT_S)
        left_s = math.ceil(left_s * 1000) / 1000  # torch drops the fractions of milliseconds
        self.raw.set_timeout(timedelta(seconds=left_s))
        return left_s

    def _silent(self, operation: str, since: float) -> StoreSilentError:
        return StoreSilentError(f"{self} has not answered ({operation}) for {time.monotonic() - since:.1f} s")


def _server_of(store: Any) -> Any:
    while (underlying := getattr(store, "underlying_store", None)) is not None:
        store = underlying
    return store
