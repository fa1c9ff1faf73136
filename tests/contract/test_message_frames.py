"""The number of Python frames of a new kind of message, within a host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from device_communicators.cpu import native
from tests.contract.test_objects import Pools, own_group, same

MOST_FRAMES = 30
DEADLINE_S = 60.0

VALUES: list[tuple[str, Any]] = [
    ("tensor_dict", {"hidden": torch.ones(4, 8), "residual": torch.zeros(4, 8, dtype=torch.bfloat16), "n": 1}),
    ("tensor_dict", {"deep": {"list": [torch.arange(3), None, 1.5], "text": "é" * 300}, "empty": torch.empty(0, 3)}),
    ("tensor_dict", {f"x{number}": torch.full((number, 2), number) for number in range(40)}),
    ("object", [1, "text", {"tokens": list(range(5000)), 7: b"bytes"}]),
]


def _frames_of(call: Callable[[], Any]) -> tuple[Any, int]:
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, len(names)


def _exchange() -> dict[str, int]:
    found: dict[str, int] = {}
    with own_group() as group:
        rank = group.rank_in_group
        for number, (kind, value) in enumerate(VALUES):
            send, receive, broadcast = (getattr(group, f"{verb}_{kind}") for verb in ("send", "recv", "broadcast"))
            if number == 0:  # opens the queues, once
                group.send_object("open", 1) if rank == 0 else group.recv_object(0)
                group.broadcast_object("open" if rank == 0 else None, 0)
            if rank == 0:
                found[f"send {number}"] = _frames_of(lambda: send(value, 1))[1]  # noqa: B023
                found[f"broadcast {number}"] = _frames_of(lambda: broadcast(value, 0))[1]  # noqa: B023
                group.barrier()
            else:
                received, found[f"receive {number}"] = _frames_of(lambda: receive(0))  # noqa: B023
                assert same(received, value)
                received, found[f"broadcast {number}"] = _frames_of(lambda: broadcast(None, 0))  # noqa: B023
                assert same(received, value)
                group.barrier()
    return found


def test_the_first_message_of_a_form_takes_few_frames(pools: Pools) -> None:
    if not native.load().has_ops:
        pytest.skip("the library without ops can't read tensors")
    for found in pools(2).run(_exchange, tp=1, timeout_s=DEADLINE_S):
        assert max(found.values()) <= MOST_FRAMES, found
