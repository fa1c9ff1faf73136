"""Both ends of a group's messages in one process: what a receiver expects of the next one, and what comes instead."""

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
from device_communicators.calls.user_call import UserCall
from device_communicators.cpu import native
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.route import Route
from parallel_state.messages.buffers import Buffers
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.messenger import Messenger
from parallel_state.messages.tensor_dicts import TensorDictSpec
from tests.internals.queue_memory import channels

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no shared-memory library: {error}", allow_module_level=True)


@pytest.fixture(autouse=True)
def own_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, which a messenger gives the codec, is not for the tests that follow."""
    monkeypatch.setattr(codec_values, "_library", codec_values._Library())


@contextlib.contextmanager
def messengers(path: Path) -> Iterator[list[Messenger]]:
    with channels(path, 0, 2, meet=False) as first, channels(path, 1, 2, meet=False) as second:
        made = []
        for rank, ends in enumerate((first, second)):
            memory: Any = SimpleNamespace(channels=ends, collectives=None, debug=False, hosts=((0, 1),))
            context = GroupContext("pp:0", (0, 1), rank, torch.device("cpu"), 5.0, host_memory=memory)
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
    """Whether it is what was expected or not; received dicts share no memory."""
    with messengers(tmp_path / "queue") as (sender, receiver):
        received = []
        for value in VALUES[what]:
            sender.send(sender.encode(value), 1)
            received.append(receiver.recv(0))
        assert same(received, VALUES[what])
        assert receiver.route.traffic()["recv_message"].bytes == sender.route.traffic()["send_message"].bytes


def test_a_dict_of_the_form_of_those_before_is_read_without_its_head(tmp_path: Path) -> None:
    with messengers(tmp_path / "queue") as (sender, receiver):
        taken = []
        for number in range(5):
            sender.send(sender.encode(step(number, 3)), 1)
            incoming = receiver.transport.incoming(0)
            likely = incoming.likely
            if likely is None:
                taken.append(False)
                receiver._take(incoming, 0)
                continue
            tensors = likely.allocate(receiver.empty)
            incoming.expect(likely.head, tensors)
            with incoming as head:
                taken.append(head is None)
            assert same(likely.fill(tensors), step(number, 3))
        # The first is decoded, the second known by its head, and the third is of the form of both.
        assert taken == [False, False, False, True, True]


def test_a_head_like_the_expected_one_with_other_sizes(tmp_path: Path) -> None:
    """A peer's head is one thing, the bytes that follow it another: they are counted before any is written."""
    with messengers(tmp_path / "queue") as (sender, receiver):
        for number in range(3):
            sender.send(sender.encode(step(number)), 1)
            receiver.recv(0)
        outgoing = sender.encode(step(3))
        outgoing.tensors = [torch.ones(9)]
        outgoing.known_bytes = 36
        sender.send(outgoing, 1)
        with pytest.raises(MessageDecodeError, match="36 bytes of tensors follow its metadata, which tells of 32"):
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
    """An all-gather group of two ranks with equal halves of each tensor."""

    world_size, rank_in_group = 2, 1

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([x, x], dim)


def test_slices_of_a_form_that_was_seen_before(tmp_path: Path) -> None:
    """Each dict comes whole; the third is known by its head, and the rest is read without one."""
    group = Halves()
    with messengers(tmp_path / "queue") as (sender, receiver):
        heads = set()
        for number in range(6):
            value = {**step(number), "own": torch.arange(4) + number, "odd": torch.arange(3)}
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
        template, _ = receiver.transport.templates[0, ""]  # type: ignore[attr-defined]
        assert len(heads) == 1 and template.cut == (True, False, False, False)
        assert receiver.route.traffic()["recv_message"].bytes == sender.route.traffic()["send_message"].bytes


@pytest.mark.parametrize("group", [None, SimpleNamespace(world_size=3)], ids=["none", "of another size"])
def test_slices_that_were_seen_before_need_their_group(tmp_path: Path, group: Any) -> None:
    with messengers(tmp_path / "queue") as (sender, receiver):
        for number in range(4):
            sender.send(sender.encode(step(number), dict, Halves()), 1)
            if number < 3:
                receiver.recv(0, Halves())
        with pytest.raises(CollectiveMismatchError, match="cut its tensors into 2 slices"):
            receiver.recv(0, group)


def test_what_travels_of_a_dict_with_a_spec_is_found_by_one_look() -> None:
    """The checks that tell what is wrong are made where that isn't certain."""
    fit: dict[str, Any] = {"x": torch.ones(2, 3), "none": None, "n": 1, "empty": torch.ones(0), "y": torch.ones(3).t()}
    spec = TensorDictSpec.of(fit)
    pieces = spec.plain_pieces(dict(reversed(fit.items())))
    assert pieces is not None and [id(x) for x in pieces] == [id(fit["x"]), id(fit["y"])]
    others: list[dict[str, Any]] = [
        {**fit, "n": True}, {**fit, "n": 2}, {**fit, "x": torch.ones(3, 2)}, {**fit, "x": torch.ones(2, 3).int()},
        {**fit, "x": torch.ones(2, 3, requires_grad=True)}, {**fit, "x": torch.ones(2, 3, device="meta")},
        {**fit, "x": torch.nn.Parameter(torch.ones(2, 3))}, {**fit, "x": 1}, {**fit, "more": 1}, {"x": fit["x"]},
        {**{key: value for key, value in fit.items() if key != "none"}, "other": None},
    ]  # fmt: skip
    for values in others:
        assert spec.plain_pieces(values) is None, values


class Collectives:
    """Keeps what is called on it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def enter(self, operation: str) -> None:
        self.calls.append(("enter", operation))

    def exit(self) -> None:
        self.calls.append(("exit",))

    def announce(self, src: int, spin_ns: int, user_call: UserCall) -> None:
        self.calls.append(("announce", src, spin_ns, str(user_call)))


def test_a_reader_waits_for_a_broadcast_as_for_a_message(tmp_path: Path) -> None:
    """Its place among the calls is taken first, and there it waits for a sender that computes still."""
    with messengers(tmp_path / "queue") as made:
        for messenger in made:
            messenger.route.context.host_memory.collectives = found = Collectives()
            assert messenger.broadcast([1, "text"], 0) == [1, "text"]
            announced = ("announce", 0, messenger.transport.channels.spin_ns, "broadcast_object(rank 0)")
            assert found.calls == [("enter", "broadcast_object"), announced, ("exit",)]
            assert announced[2] == 20_000
