from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch

from device_communicators.cpu import native
from parallel_state import TensorDictSpec
from tests.contract.test_objects import Pools, own_group, same
from tests.hosts import HostRanks

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

    gc.disable()  # finalizers of earlier objects have frames, too
    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
        gc.enable()
    if len(names) > MOST_FRAMES:
        print(names, file=sys.stderr)
    return result, len(names)


def _exchange() -> dict[str, int]:
    found: dict[str, int] = {}
    with own_group() as group:
        rank = group.rank_in_group
        for number, (kind, value) in enumerate(VALUES):
            send, receive, broadcast = (getattr(group, f"{verb}_{kind}") for verb in ("send", "recv", "broadcast"))
            if number == 0:
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


BETWEEN_HOSTS = [*VALUES, ("tensor_dict", {"large": torch.ones(1 << 18), "flag": True})]
CALLS: list[tuple[str, str]] = [
    ("send_tensor_dict", "recv_tensor_dict"),
    ("send_object", "recv_object"),
    ("isend_tensor_dict", "irecv_tensor_dict"),
    ("isend_object", "irecv_object"),
    ("broadcast_tensor_dict", "broadcast_tensor_dict"),
    ("broadcast_object", "broadcast_object"),
]
SPECIFIED: dict[str, Any] = {"hidden": torch.ones(4, 8), "ids": torch.arange(5), "n": 1}


def _exchange_between_hosts() -> dict[str, int]:
    found: dict[str, int] = {}
    spec = TensorDictSpec.of(SPECIFIED)
    with own_group() as group:
        sends = group.is_first_rank
        for send, receive in CALLS:
            for number, (kind, value) in enumerate(BETWEEN_HOSTS):
                if not send.endswith(kind):
                    continue
                call = getattr(group, send if sends else receive)
                arguments = (value, 1) if sends else (0,)
                if send.startswith("broadcast"):
                    arguments = (value if sends else None, 0)
                received, found[f"{call.__name__} {number}"] = _frames_of(lambda: call(*arguments))  # noqa: B023
                if send.startswith("isend"):
                    received, found[f"wait {call.__name__} {number}"] = _frames_of(received.wait)
                assert sends or same(received, value)
                group.barrier()
        for number in range(2):
            if sends:
                _, frames = _frames_of(lambda: group.send_tensor_dict(SPECIFIED, 1, spec=spec))
            else:
                received, frames = _frames_of(lambda: group.recv_tensor_dict(0, spec=spec))
                assert same(received, SPECIFIED)
            given = SPECIFIED if sends else None
            received, to_all = _frames_of(lambda: group.broadcast_tensor_dict(given, 0, spec=spec))  # noqa: B023
            assert same(received, SPECIFIED)
            if number > 0:
                found["a dict with a spec"], found["a dict with a spec to all"] = frames, to_all
            group.barrier()
    return found


def test_between_hosts_a_message_takes_as_few_frames(on_hosts: Callable[[Sequence[int]], HostRanks]) -> None:
    if not native.load().has_ops:
        pytest.skip("the plain build doesn't look into tensors")
    for found in on_hosts((0, 1)).run(_exchange_between_hosts, tp=2, timeout_s=DEADLINE_S):
        assert len(found) == 22 and max(found.values()) <= MOST_FRAMES, found
