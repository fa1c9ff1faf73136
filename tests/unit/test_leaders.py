"""Who sends to whom between hosts: arithmetic, without a network."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from device_communicators.errors import CollectiveMismatchError
from device_communicators.hierarchical.leaders import Leaders, _framed, _read, slices_of
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.user_call import UserCall


def _leaders(hosts: int, host: int) -> Leaders:
    context = GroupContext("test", tuple(range(hosts)), host, torch.device("cpu"), 1.0)
    return Leaders(context, range(hosts), host)


@pytest.mark.parametrize("hosts", range(1, 18))
def test_the_tree_reaches_each_host_once(hosts: int) -> None:
    for root in range(hosts):
        trees = [_leaders(hosts, host).tree(root) for host in range(hosts)]
        assert trees[root][0] is None
        heard = {child: parent for parent, (_, children) in enumerate(trees) for child in children}
        assert heard == {host: trees[host][0] for host in range(hosts) if host != root}
        depth = {root: 0}
        while len(depth) < hosts:
            depth.update({child: depth[parent] + 1 for child, parent in heard.items() if parent in depth})
        assert max(depth.values()) <= max(0, (hosts - 1).bit_length())


@pytest.mark.parametrize("hosts", [2, 3, 7])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, 100_001])
def test_slices_cover_all_elements_in_order(hosts: int, count: int) -> None:
    slices = slices_of(count, hosts)
    assert len(slices) == hosts
    assert [index for part in slices for index in range(count)[part]] == list(range(count))


def _frames(calls: Sequence[Sequence[UserCall]]) -> dict[int, Tensor]:
    """What each host sends in its last call, after those before it."""
    frames = {}
    for host, made in enumerate(calls):
        leaders = _leaders(len(calls), host)
        for call in made:
            leaders.begin(call)
        frames[host] = _framed(leaders._digest, [None, [], str(made[-1])], torch.arange(3))
    return frames


def _differ(*calls: Sequence[UserCall]) -> tuple[str, list[int]]:
    frames, leaders = _frames(calls), _leaders(len(calls), 0)
    for call in calls[0]:
        leaders.begin(call)
    try:
        leaders._compare({host: _read(frame) for host, frame in frames.items() if host})
    except CollectiveMismatchError as error:
        return str(error), list(error.suspect_ranks)
    return "", []


REDUCE = UserCall("all_reduce", torch.float32, (8,), "sum")


@pytest.mark.parametrize(
    "other",
    [
        REDUCE._replace(method="all_gather"), REDUCE._replace(dtype=torch.int32), REDUCE._replace(reduce_op="max"),
        REDUCE._replace(dim=1), REDUCE._replace(root=2), REDUCE._replace(sizes=(4, 4)),
    ],
)  # fmt: skip
def test_calls_that_differ_are_told_apart(other: UserCall) -> None:
    text, suspects = _differ([REDUCE], [REDUCE], [other])
    assert f"in {REDUCE}, and" in text and f"in {other}. " in text and suspects == [2]
    assert _differ([REDUCE], [other])[1] == [1]
    assert _differ([REDUCE, REDUCE], [other, REDUCE])[1] == [1], "a host that came through another call is found later"


def test_variants_of_a_call_match() -> None:
    assert _differ([REDUCE], [REDUCE._replace(method="all_reduce_")]) == ("", [])


def test_a_long_text_leaves_the_payload_alone() -> None:
    sizes = UserCall("all_gatherv", torch.float32, sizes=tuple(range(10**6, 10**6 + 900)))
    frame = _frames([[sizes]])[0]
    assert _read(frame).call.startswith("all_gatherv(sizes [1000000, ")
    assert frame[2048:].view(torch.int64).tolist() == [0, 1, 2]
