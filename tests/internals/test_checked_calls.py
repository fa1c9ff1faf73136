"""Who is blamed where ranks are in different calls, by the frames that all of them have."""

from __future__ import annotations

import pytest
import torch

from device_communicators.base.errors import CollectiveMismatchError
from device_communicators.process_group.checked_calls import Call, checked, fill, frame_bytes, room_for
from device_communicators.routing.communicator import GroupContext

RANKS = (10, 11, 12, 13)
SUM, MAX = Call("all_reduce", "sum", "float32", 8), Call("all_reduce", "max", "float32", 8)


def _context(rank: int, ranks: tuple[int, ...] = RANKS) -> GroupContext:
    return GroupContext("tp:0", ranks, rank, torch.device("cpu"), 5.0)


def _frames(calls: list[Call]) -> torch.Tensor:
    frames = torch.zeros(len(calls), frame_bytes(len(calls)), dtype=torch.uint8)
    for frame, call in zip(frames, calls, strict=True):
        fill(frame, call, None)
    return frames


@pytest.mark.parametrize(
    ("calls", "blamed"),
    [
        ([SUM, SUM, MAX, SUM], [(12,)] * 4),
        ([MAX, SUM, SUM, SUM], [(10,)] * 4),
        # Half against half: nobody can tell, so each blames those that differ from itself.
        ([SUM, SUM, MAX, MAX], [(12, 13), (12, 13), (10, 11), (10, 11)]),
        ([MAX, SUM, MAX, SUM], [(11, 13), (10, 12), (11, 13), (10, 12)]),
        (
            [SUM, MAX, Call("barrier"), Call("broadcast", root=1)],
            [(11, 12, 13), (10, 12, 13), (10, 11, 13), (10, 11, 12)],
        ),
    ],
)
def test_who_is_blamed(calls: list[Call], blamed: list[tuple[int, ...]]) -> None:
    frames = _frames(calls)
    for rank, call in enumerate(calls):
        with pytest.raises(CollectiveMismatchError) as caught:
            checked(_context(rank), call, frames)
        assert caught.value.suspect_ranks == blamed[rank]


@pytest.mark.parametrize("size", [2, 16, 17])
def test_as_many_bytes_as_there_is_room_for_come_back(size: int) -> None:
    count = room_for(size)
    x = torch.arange(count, dtype=torch.int64).to(torch.uint8)
    call = Call("all_reduce", "sum", "uint8", count, splits=tuple(range(2 * size)))
    frame = torch.zeros(frame_bytes(size), dtype=torch.uint8)
    assert fill(frame, call, x) == len(frame), "the frame has no byte that nobody needs"
    found = checked(_context(0, tuple(range(size))), call, frame.expand(size, -1).contiguous())
    out = torch.empty_like(x)
    found.copy_to(out, size - 1)
    assert torch.equal(out, x)


def test_splits_that_two_ranks_see_otherwise() -> None:
    """Each rank's frame has what it sends to each, then what it expects of each."""
    calls = [Call("all_to_all", splits=splits) for splits in ((1, 2, 1, 3), (3, 4, 2, 4))]
    for rank, call in enumerate(calls):
        checked(_context(rank, (10, 11)), call, _frames(calls))
    wrong = [calls[0], Call("all_to_all", splits=(3, 4, 7, 4))]
    for rank, call in enumerate(wrong):
        with pytest.raises(CollectiveMismatchError, match="rank 10 sends 2 rows to global rank 11, which expects 7"):
            checked(_context(rank, (10, 11)), call, _frames(wrong))
