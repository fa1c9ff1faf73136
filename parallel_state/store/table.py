"""The keys and values of a job's store, and who waits for which: what each request does.

The same answers as torch's TCPStore gives. No sockets, no threads: one thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parallel_state.store.protocol import (
    ADD,
    APPEND,
    CHECK,
    COMPARE_SET,
    COUNT,
    DELETE,
    DONE,
    FAILED,
    GET,
    MAX_CONTENT_BYTES,
    MULTI_SET,
    SET,
    WAIT,
    Message,
)

Reply = Callable[[Message], None]

_OVERHEAD_BYTES = 1024


class Table:
    """A request is answered at once, or, where it waits for keys, when the last of them is set."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._asking: dict[Reply, tuple[Message, set[bytes]]] = {}
        self._waiting: dict[bytes, dict[Reply, None]] = {}
        self._acts = {
            SET: self._set,
            ADD: self._add,
            CHECK: self._check,
            COMPARE_SET: self._compare_set,
            DELETE: self._delete,
            COUNT: self._count,
            APPEND: self._append,
            MULTI_SET: self._set,
        }

    def ask(self, request: Message, reply: Reply) -> None:
        """Calls `reply`, once, now or later; each asker has one of its own, and one request at a time."""
        if request.code in (GET, WAIT):
            self._await(request, reply)
            return
        act = self._acts.get(request.code)
        try:
            if act is None:
                raise ValueError(f"there is no request of code {request.code}")
            answer = Message(DONE, act(request.parts))
        except ValueError as error:
            answer = Message(FAILED, [str(error).encode()])
        reply(answer)

    def forget(self, reply: Reply) -> None:
        """That asker has gone."""
        _, missing = self._asking.pop(reply, (None, set[bytes]()))
        for key in missing:
            self._stop_waiting(key, reply)

    def _await(self, request: Message, reply: Reply) -> None:
        missing = {key for key in request.parts if key not in self._values}
        if missing:
            self._asking[reply] = request, missing
            for key in missing:
                self._waiting.setdefault(key, {})[reply] = None
            return
        found = [self._values[key] for key in request.parts] if request.code == GET else []
        size = sum(map(len, found)) + 8 * len(found) + _OVERHEAD_BYTES
        if size > MAX_CONTENT_BYTES:
            reply(Message(FAILED, [f"{len(found)} values have {size} bytes; ask for fewer at once".encode()]))
        else:
            reply(Message(DONE, found))

    def _stop_waiting(self, key: bytes, reply: Reply) -> None:
        waiting = self._waiting.get(key, {})
        waiting.pop(reply, None)
        if not waiting:
            self._waiting.pop(key, None)

    def _store(self, key: bytes, value: bytes) -> None:
        if len(key) + len(value) > MAX_CONTENT_BYTES - _OVERHEAD_BYTES:
            raise ValueError(f"a value and its key must have less than {MAX_CONTENT_BYTES} bytes")
        self._values[key] = value
        for reply in self._waiting.pop(key, ()):
            request, missing = self._asking[reply]
            missing.discard(key)
            if not missing:
                del self._asking[reply]
                self._await(request, reply)  # again: another of its keys may have been deleted

    def _set(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        if not parts or len(parts) % 2:
            raise ValueError(f"keys and values must come in pairs, but are {len(parts)}")
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            self._store(key, value)
        return []

    def _add(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        key, amount = _exactly(2, parts)
        total = b"%d" % (_number(self._values.get(key, b"0")) + _number(amount))
        self._store(key, total)
        return [total]

    def _check(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        return [b"1" if all(key in self._values for key in parts) else b"0"]

    def _compare_set(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        key, expected, desired = _exactly(3, parts)
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self._store(key, desired)
            return [desired]
        return [expected if found is None else found]

    def _delete(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        (key,) = _exactly(1, parts)
        return [b"0" if self._values.pop(key, None) is None else b"1"]

    def _count(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        _exactly(0, parts)
        return [b"%d" % len(self._values)]

    def _append(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        key, more = _exactly(2, parts)
        self._store(key, self._values.get(key, b"") + more)
        return []


def _exactly(count: int, parts: Sequence[bytes]) -> Sequence[bytes]:
    if len(parts) != count:
        raise ValueError(f"the request takes {count} parts, but has {len(parts)}")
    return parts


def _number(text: bytes) -> int:
    if len(text) > 20:
        raise ValueError(f"add needs a number of at most 20 digits, but the value has {len(text)} bytes")
    return int(text)
