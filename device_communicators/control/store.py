"""A torch `Store` whose server is a `control.plane.World` in another process (csrc/store.h).

Client and server prove to each other that they have the same secret token. Requests and replies have MACs, but aren't
encrypted.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from device_communicators.base.errors import ConfigMismatchError
from device_communicators.base.helper_threads import Call
from device_communicators.base.host import is_numeric, resolve
from device_communicators.control.client import (
    CHECK,
    CONNECT_S,
    ForeignServiceError,
    Request,
    error_of,
    names,
    packed,
    parts_of,
)

_SET, _GET, _ADD, _WAIT, _, _COMPARE_SET, _DELETE, _COUNT, _APPEND, _HOLD = range(1, 11)
"""Values of StoreCall in csrc/store.h."""
_PAUSE_S = 0.02


class ControlStore(dist.Store):
    """Client of a store that a control plane (`World`) serves. Thread-safe; threads don't wait for each other.

    Raises DistStoreError for invalid requests and for keys that aren't set in time, and DistNetworkError if the server
    can't be used. The `__cause__` of a DistNetworkError is a PermissionError for a wrong token, a ForeignServiceError
    for another kind of service, or a ConfigMismatchError for another protocol version.
    """

    served_by: int | None = None
    """Global rank of the process that serves the store; None if a launcher serves it."""
    access = "the job's secret"

    def __init__(
        self, library: Any, address: tuple[str, int], token: str, timeout_s: float, name: str = "the store"
    ) -> None:
        """Connects at the first request. `address` and `token`: the server's address and secret. `timeout_s`: of each
        request. `name`: the store's name in errors.
        """
        super().__init__()
        self.address = address
        self._name = name
        self.library, self._token = library, token
        self._client = 0
        """This client's number in C++; 0 until the host's name is resolved."""
        self._is_numeric = is_numeric(address[0])
        self._held: list[Request] = []
        self.set_timeout(timedelta(seconds=timeout_s))

    def __str__(self) -> str:
        return f"{self._name} at {self.address[0]}:{self.address[1]}"

    def reach(self, deadline: float) -> None:
        while True:
            try:
                self._ask(CHECK, [], timeout_s=max(0.0, deadline - time.monotonic()))
                return
            except dist.DistNetworkError as error:
                wrong = (PermissionError, ForeignServiceError, ConfigMismatchError)
                if isinstance(error.__cause__, wrong) or time.monotonic() + _PAUSE_S > deadline:
                    raise
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Closes the connections. This also ends `hold`: the server renames the held keys. The next request connects
        again.
        """
        for request in self._held:
            request.close()
        self._held.clear()
        self.library.ps_store_close(self._client)

    def clone(self) -> ControlStore:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_SET, [key, value])

    def hold(self, key: str, value: str | bytes) -> None:
        """Sets `key` until this process exits or closes the store. The server then renames `key` to `"gone/" + key`.

        `delete_key` removes both keys. Key and value together have at most 64 KiB.
        """
        self._ask(_HOLD, [key, value], holds=True)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(_SET, [part for pair in zip(keys, values, strict=True) for part in pair])

    def get(self, key: str) -> bytes:
        return self._ask(_GET, [key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(_GET, keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(_WAIT, keys, timeout_s=None if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(CHECK, keys) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(_ADD, [key, str(amount)])[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(_COMPARE_SET, [key, expected_value, desired_value])[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(_APPEND, [key, value])

    def delete_key(self, key: str) -> bool:
        return self._ask(_DELETE, [key]) == [b"1"]

    def num_keys(self) -> int:
        return int(self._ask(_COUNT, [])[0])

    def has_extended_api(self) -> bool:
        return True

    # torch's C++ code uses these names.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def _ask(
        self, call: int, parts: Sequence[str | bytes], *, timeout_s: float | None = None, holds: bool = False
    ) -> list[bytes]:
        content = packed(call, parts)
        own: timedelta = self.timeout  # type: ignore[attr-defined]  # set by torch, also through a PrefixStore
        limit_s = own.total_seconds() if timeout_s is None else timeout_s
        # A short wait for keys may take longer to connect.
        connect_s = min(CONNECT_S, own.total_seconds()) if call == _WAIT else 0.0
        try:
            request = Request(self.library, self.client(limit_s), content, limit_s, connect_s)
            try:
                code, text = request.wait()
                if holds and code == 0 and text[0] == 0:
                    self._held.append(request)
            finally:
                if request not in self._held:
                    request.close()
            if code == errno.ETIME:
                raise dist.DistStoreError(f"wait timeout after {limit_s * 1000:.0f} ms, keys: {names(parts)} ({self})")
            if code != 0:
                raise error_of(code, text)
        except TimeoutError as error:
            raise dist.DistNetworkError(f"{self} did not answer within {limit_s:g} s") from error
        except PermissionError as error:
            raise dist.DistNetworkError(f"{self} and this process don't share a secret: {error}") from error
        except ConnectionResetError as error:
            raise dist.DistNetworkError(f"{self} has ended, or closed the connection: {error}") from error
        except ConnectionAbortedError as error:
            raise dist.DistNetworkError(
                f"{self} closes each connection without an answer; another service may listen at this port"
            ) from error
        except (OSError, ForeignServiceError, ConfigMismatchError) as error:
            if not self._is_numeric:  # it may resolve to another address now
                self._client = 0
            raise dist.DistNetworkError(f"{self} can't be reached: {error}") from error
        if text[0] != 0:
            raise dist.DistStoreError(f"{self} rejected the call: {parts_of(text)[0].decode(errors='replace')}")
        return parts_of(text)

    def client(self, limit_s: float = CONNECT_S) -> int:
        """Returns the number that identifies this client in C++ calls. Resolves the host's name first; raises OSError
        if that takes longer than `limit_s`, but at least 2 s.
        """
        if self._client == 0:
            numeric = self.address[0] if self._is_numeric else ",".join(self._look_up(max(limit_s, CONNECT_S)))
            self._client = self.library.ps_store_client(numeric.encode(), self.address[1], self._token.encode())
        return self._client

    def _look_up(self, limit_s: float) -> list[str]:
        look_up = Call(lambda: resolve(*self.address))
        if not look_up.wait(time.monotonic() + limit_s):
            raise TimeoutError(f"the host name {self.address[0]!r} was not resolved within {limit_s:g} s")
        return [str(where[0]) for *_, where in look_up.result()]
