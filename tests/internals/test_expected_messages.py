from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from device_communicators.base.errors import CollectiveMismatchError, InvalidArgumentError, MessageDecodeError
from device_communicators.base.member import Timeout
from device_communicators.calls.user_call import UserCall
from device_communicators.cpu import native
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.route import Route
from parallel_state.messages.buffers import Buffers
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.messenger import Messenger
from tests.internals.queue_memory import channels

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no shared-memory library: {error}", allow_module_level=True)


@pytest.fixture(autouse=True)
def own_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the codec, a global object, to which messengers give the native library."""
    monkeypatch.setattr(codec_values, "_objects", [])


@contextlib.contextmanager
def messengers(path: Path) -> Iterator[list[Messenger]]:
    with channels(path, 0, 2, meet=False) as first, channels(path, 1, 2, meet=False) as second:
        made = []
        for rank, ends in enumerate((first, second)):
            memory: Any = SimpleNamespace(channels=ends, collectives=None, debug=False, domains=((0, 1),))
            context = GroupContext("pp:0", (0, 1), rank, torch.device("cpu"), Timeout(5.0), host_memory=memory)
            made.append(Messenger(Route(context, [], {})))
        yield made


def step(number: int, rows: int = 2) -> dict[str, Any]:
    return {"hidden": torch.full((rows, 4), float(number)), "n": 1, "empty": torch.empty(0, 3)}


def other(number: int) -> dict[str, Any]:
    return {"ids": torch.arange(5) + number, "flag": True}


VALUES = {
    "alike": [step(number) for number in range(5)],
    "two forms": [*map(step, range(3)), *map(other, range(4)), *map(step, range(3))],
    "two sizes": [step(number, 1 + number // 4) for number in range(8)],
    "in turns": list(itertools.chain.from_iterable((step(number), other(number)) for number in range(4))),
    "objects between": [step(0), step(1), {"n": 1}, step(2), [1, "text"], step(3), {"t": [torch.ones(2)]}, step(4)],
    "large": [{"x": torch.arange(40_000) + number} for number in range(4)],
}


def same(one: Any, two: Any) -> bool:
    if isinstance(two, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in two)
    if isinstance(two, list):
        return len(one) == len(two) and all(map(same, one, two))
    return torch.equal(one, two) and one.dtype == two.dtype if isinstance(two, torch.Tensor) else one == two


@pytest.mark.parametrize("what", VALUES)
def test_whatever_comes_arrives(tmp_path: Path, what: str) -> None:
    with messengers(tmp_path / "queue") as (sender, receiver):
        received = []
        for value in VALUES[what]:
            sender.send(sender.encode(value), 1)
            received.append(receiver.recv(0))
        assert same(received, VALUES[what])
        assert receiver.route.traffic()["recv_message"].bytes == sender.route.traffic()["send_message"].bytes


@pytest.mark.parametrize("value", [step(0), [1, {"t": (torch.ones(3), 2)}]], ids=["library", "codec"])
def test_bytes_that_a_head_does_not_tell_of(tmp_path: Path, value: Any) -> None:
    with messengers(tmp_path / "queue") as (sender, receiver):
        outgoing = sender.encode(value)
        told = outgoing.cpu_bytes
        outgoing.tensors = [torch.ones(9)]
        sender.send(outgoing, 1)
        with pytest.raises(
            MessageDecodeError, match=f"36 bytes of tensors follow its metadata, which announces {told}"
        ):
            receiver.recv(0)


def test_buffers_are_filled_in_place(tmp_path: Path) -> None:
    with messengers(tmp_path / "queue") as (sender, receiver):
        for number in range(6):
            out = {"hidden": torch.zeros(2, 4), "empty": torch.zeros(0, 3)}
            if number % 2:
                out["hidden"] = torch.zeros(4, 2).t()
            sender.send(sender.encode(step(number)), 1)
            received = receiver.recv(0, None, Buffers("recv_tensor_dict", out))
            assert received["hidden"] is out["hidden"] and same(received, step(number))
        for misfit in ({}, {"hidden": torch.zeros(2, 4)}, {"hidden": torch.zeros(4, 2), "empty": torch.zeros(0, 3)}):
            sender.send(sender.encode(step(7)), 1)
            with pytest.raises(InvalidArgumentError, match="must have a buffer for each tensor"):
                receiver.recv(0, None, Buffers("recv_tensor_dict", misfit))
        sender.send(sender.encode(step(8)), 1)
        assert same(receiver.recv(0), step(8))


class Halves:
    world_size, rank_in_group = 2, 1

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([x, x], dim)


@pytest.mark.parametrize("more", [{}, {"pair": (1, 2)}], ids=["library", "codec"])
def test_slices_are_gathered(tmp_path: Path, more: dict[str, Any]) -> None:
    group = Halves()
    with messengers(tmp_path / "queue") as (sender, receiver):
        heads = set()
        for number in range(6):
            value = {**step(number), "own": torch.arange(4) + number, "odd": torch.arange(3), **more}
            outgoing = sender.encode(value, dict, group, {"own": False})
            heads.add(outgoing.head)
            assert [x.numel() for x in outgoing.tensors] == [4, 0, 4, 3]
            sender.send(outgoing, 1)
            if number == 4:
                with_buffers = {key: torch.zeros_like(x) for key, x in value.items() if isinstance(x, torch.Tensor)}
                received = receiver.recv(0, group, Buffers("recv_tensor_dict", with_buffers))
                assert received["hidden"] is with_buffers["hidden"]
            else:
                received = receiver.recv(0, group)
            assert same(received, value)
        assert len(heads) == 1 and bytes(heads.pop()[-4:]) == b"\1\0\0\0"
        assert receiver.route.traffic()["recv_message"].bytes == sender.route.traffic()["send_message"].bytes


@pytest.mark.parametrize("group", [None, SimpleNamespace(world_size=3)], ids=["none", "of another size"])
def test_slices_need_their_group(tmp_path: Path, group: Any) -> None:
    with messengers(tmp_path / "queue") as (sender, receiver):
        for number in range(4):
            sender.send(sender.encode(step(number), dict, Halves()), 1)
            if number < 3:
                receiver.recv(0, Halves())
        with pytest.raises(CollectiveMismatchError, match="divided its tensors among 2 ranks"):
            receiver.recv(0, group)


class Collectives:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def enter(self, operation: str) -> None:
        self.calls.append(("enter", operation))

    def exit(self) -> None:
        self.calls.append(("exit",))

    def announce(self, src: int, spin_ns: int, user_call: UserCall) -> None:
        self.calls.append(("announce", src, spin_ns, str(user_call)))


def test_a_reader_waits_for_a_broadcast_as_for_a_message(tmp_path: Path) -> None:
    with messengers(tmp_path / "queue") as made:
        for messenger in made:
            messenger.route.context.host_memory.collectives = found = Collectives()
            assert messenger.broadcast([1, "text"], 0) == [1, "text"]
            announced = ("announce", 0, messenger.medium.channels.spin_ns, "broadcast_object(rank 0)")
            assert found.calls == [("enter", "broadcast_object"), announced, ("exit",)]
            assert announced[2] == 20_000
