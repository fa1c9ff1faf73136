"""The same check as `KeyCheck` in cpu/csrc/plain_tree.cpp, for comparison."""

from __future__ import annotations

import re
import struct

from parallel_state.messages.codec.values import _NESTED, MAX_DEPTH, MOST_NUMBERS


def has_plain_keys(data: bytes) -> bool:
    """Returns True if the msgpack `data` has only keys of the kinds that `Encoder.mapping` writes, or is malformed.
    Other keys can be chosen to collide, and msgspec can't be interrupted."""
    try:
        _key_check(memoryview(data), 0, MAX_DEPTH + 1)
    except (IndexError, struct.error):
        return True
    except _KeyFoundError:
        return False
    return True


class _KeyFoundError(Exception):
    pass


_NUMBER, _TEXT, _OTHER = range(3)
_RUN = 64
_RUN_OF_NUMBERS = re.compile(
    rb"(?:[\x00-\x7f\xe0-\xff\xc0\xc2\xc3]|[\xcc\xd0].|[\xcd\xd1].{2}|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}){%d}"
    % _RUN,
    re.DOTALL,
)
"""Matches `_RUN` numbers at once, which keeps lists of token ids fast."""
_SIZES = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}


def _key_check(data: memoryview, at: int, extensions: int) -> tuple[int, int]:
    head = data[at]
    at += 1
    if head <= 0x7F or head >= 0xE0 or head in (0xC0, 0xC2, 0xC3):
        return at, _NUMBER
    if 0xCA <= head <= 0xD3:
        return _within(data, at + (4 if head == 0xCA else 8 if head == 0xCB else 1 << ((head - 0xCC) & 3))), _NUMBER
    if 0xA0 <= head <= 0xBF:
        return _within(data, at + (head & 0x1F)), _TEXT
    if 0xC4 <= head <= 0xC6 or 0xD9 <= head <= 0xDB:
        width = 1 << (head - (0xC4 if head <= 0xC6 else 0xD9))
        return _within(data, at + width + _SIZES[width].unpack_from(data, at)[0]), _TEXT
    if head <= 0x9F or 0xDC <= head <= 0xDF:
        is_map, count = head <= 0x8F or head >= 0xDE, head & 0x0F
        if head >= 0xDC:
            width = 4 if head & 1 else 2
            count = _SIZES[width].unpack_from(data, at)[0]
            at += width
        left = count
        while left > 0:
            if is_map:
                at, kind = _key_check(data, at, extensions)
                if kind == _OTHER or (kind == _NUMBER and count > MOST_NUMBERS):
                    raise _KeyFoundError
            elif left >= _RUN and (run := _RUN_OF_NUMBERS.match(data, at)):
                at, left = run.end(), left - _RUN
                continue
            at, _ = _key_check(data, at, extensions)
            left -= 1
        return at, _OTHER
    if 0xD4 <= head <= 0xD8:
        size = 1 << (head - 0xD4)
    elif 0xC7 <= head <= 0xC9:
        width = 1 << (head - 0xC7)
        size = _SIZES[width].unpack_from(data, at)[0]
        at += width
    else:
        raise IndexError
    end = _within(data, at + 1 + size)
    if data[at] in _NESTED:
        if extensions == 0:
            raise IndexError
        _key_check(data[at + 1 : end], 0, extensions - 1)
    return end, _OTHER


def _within(data: memoryview, end: int) -> int:
    if end > len(data):
        raise IndexError
    return end
