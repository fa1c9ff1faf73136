from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import torch

from device_communicators.calls.user_call import UserCall
from parallel_state import GroupCoordinator, TensorDictSpec
from parallel_state.messages import tensor_dicts, wire
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.codec.values import to_msgpack
from parallel_state.messages.media import LibraryMedium
from parallel_state.messages.messenger import Messenger
from parallel_state.messages.wire import FRAME_BYTES, Outgoing


def encode(value: object) -> Outgoing:
    return wire.encode(value, allow_pickle=False)


def garbage() -> dict[str, bytes]:
    head = encode(["value", torch.ones(3)]).head
    changed = {"noise": random.Random(0).randbytes(FRAME_BYTES), "zeros": bytes(FRAME_BYTES)}
    for what, offset, value in (
        ("kind", 4, 9),
        ("tensors", 8, 2),
        ("body bytes", 23, 0x7F),
        ("tensor bytes", 24, 13),
        ("format version", 32, 0x80),
        ("table", 37, 0xC1),
    ):
        changed[what] = head[:offset] + bytes([value]) + head[offset + 1 :]
    return changed


def send_raw(group: GroupCoordinator, outgoing: Outgoing, way: str) -> None:
    medium = group._messenger.medium
    if way == "broadcast":
        medium.broadcast(outgoing, UserCall("broadcast_object", root=group.rank_in_group))
    for part in medium.isend(outgoing, 1) if way == "send" else []:
        part.wait()


def send_encoded_as(monkeypatch: Any, outgoing: Outgoing) -> None:
    monkeypatch.setattr(wire, "encode", lambda *_, **__: outgoing)


def lists_that_claim(size: int, depth: int) -> Outgoing:
    lists = b"".join(struct.pack(">BI", 0xDD, size - 5 * depth) for _ in range(depth))
    body = struct.pack("<BI", codec.FORMAT_VERSION, 0) + lists + bytes(size - len(lists))
    return Outgoing(wire.head_of(wire.Header(0, 0, 0, len(body), 0), body), [])


def false_reference() -> Outgoing:
    outgoing = encode(torch.ones(3))
    head = bytearray(outgoing.head)
    head[-5] = 7  # it ends with the tensor's index (four bytes) and its cut flag
    return Outgoing(bytes(head), outgoing.tensors)


def head_of_tensor(numel: int) -> Outgoing:
    table = to_msgpack([["float32", (numel,), "cpu"]])
    body = struct.pack("<BI", codec.FORMAT_VERSION, len(table)) + table + bytes.fromhex("d60900000000") + b"\0"
    return Outgoing(wire.head_of(wire.Header(0, 0, 1, len(body), 4 * numel), body), [])


def without_queue_calls(monkeypatch: Any) -> None:
    for name in ("isend", "broadcast", "_receive_recorded"):
        monkeypatch.setattr(LibraryMedium, name, None)


def without_list_calls(monkeypatch: Any) -> None:
    for name in ("send_list", "recv_list", "broadcast_list"):
        monkeypatch.setattr(Messenger, name, None)


def sends_past_python(group: GroupCoordinator, spec: TensorDictSpec) -> Callable[[dict[str, Any]], bool] | None:
    known, past_python = tensor_dicts._known_form(spec), group._messenger.past_python
    if known is None or past_python is None:
        return None
    return lambda values: (
        known.has_same_constants(values)
        and past_python.send_dict(group._key, 1, 0, values, known.form.address, known.head)
    )
