"""Who sends to whom between hosts: arithmetic, without a network."""

from __future__ import annotations

import pytest
import torch

from device_communicators.base import GroupContext
from device_communicators.leaders import Leaders, slices_of


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


def test_calls_that_differ_have_different_tags() -> None:
    leaders = _leaders(2, 0)
    calls: list[tuple[object, ...]] = [
        *(
            ("all_reduce", count, dtype, op)
            for count in (8, 9)
            for dtype in (torch.int32, torch.float32)
            for op in "+*"
        ),
        *(("broadcast", 8, src) for src in range(4)),
    ]
    tags = set()
    for call in calls:
        leaders.begin(str(call[0]), *call[1:])
        tags.add(leaders.tag)
    assert len(tags) == len(calls)
    assert all(1 << 30 <= tag < 1 << 31 for tag in tags)
