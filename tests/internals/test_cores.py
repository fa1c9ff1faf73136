from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from device_communicators.base import cores
from device_communicators.base.cores import Area, Core
from device_communicators.base.errors import InvalidArgumentError


def machine(nodes: int, caches: int, physical: int, threads: int) -> list[Core]:
    """Numbers cores as x86 servers do: the first threads of all nodes, then the second threads."""
    total = nodes * caches * physical
    return [
        Core(thread * total + core, core, core // physical * physical, core // (caches * physical))
        for thread in range(threads)
        for core in range(total)
    ]


def test_each_rank_has_whole_cores_side_by_side_in_one_node() -> None:
    found = cores.shares(machine(nodes=2, caches=1, physical=4, threads=2), 4)
    assert found == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


def test_a_rank_stays_in_its_node_where_ranks_dont_divide_the_cores() -> None:
    everywhere = machine(nodes=2, caches=1, physical=4, threads=1)
    assert cores.shares(everywhere, 3) == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert cores.shares(everywhere, 5) == [[0, 1], [2, 3], [4], [5], [6, 7]]


def test_nodes_have_ranks_by_their_cores() -> None:
    uneven = [Core(number, number, 0, 0 if number < 6 else 1) for number in range(8)]
    assert cores.shares(uneven, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cores.shares(uneven, 8) == [[number] for number in range(8)]


def test_fewer_ranks_than_nodes_have_several() -> None:
    assert cores.shares(machine(4, 1, 2, 1), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_siblings_come_last() -> None:
    assert cores.shares(machine(1, 1, 2, 2), 2) == [[0, 2], [1, 3]]
    assert cores.shares(machine(1, 1, 2, 2), 3) == [[0], [1], [2, 3]]
    assert cores.shares(machine(2, 1, 2, 2), 8) == [[0], [1], [4], [5], [2], [3], [6], [7]]


@pytest.mark.parametrize("count", range(1, 17))
def test_every_core_belongs_to_one_rank(count: int) -> None:
    everywhere = machine(2, 2, 2, 2)
    found = cores.shares(everywhere, count)
    assert len(found) == count
    assert all(found)
    assert sorted(core for share in found for core in share) == list(range(16))


def test_more_ranks_than_cores_is_an_error() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"each of 3 ranks must have a core of its own, but there are 2.*0-1"
    ):
        cores.shares(machine(1, 1, 2, 1), 3)


def _describe(folder: Path, everywhere: list[Core]) -> None:
    for core in everywhere:
        cpu = folder / f"cpu/cpu{core.number}"
        for name, key in (("topology/thread_siblings_list", "physical"), ("cache/index3/shared_cpu_list", "cache")):
            alike = [each.number for each in everywhere if getattr(each, key) == getattr(core, key)]
            (cpu / name).parent.mkdir(parents=True, exist_ok=True)
            (cpu / name).write_text(cores.spans(alike) + "\n")
        (cpu / "cache/index3/level").write_text("3\n")
        (cpu / "cache/index0").mkdir()
        (cpu / "cache/index0/level").write_text("1\n")
        (cpu / "cache/index0/shared_cpu_list").write_text(f"{core.number}\n")
    for node in {core.node for core in everywhere}:
        (folder / f"node/node{node}").mkdir(parents=True)
        inside = [core.number for core in everywhere if core.node == node]
        (folder / f"node/node{node}/cpulist").write_text(cores.spans(inside) + "\n")


def test_the_kernels_files(tmp_path: Path) -> None:
    everywhere = machine(2, 2, 2, 2)
    _describe(tmp_path, everywhere)
    (tmp_path / "node/node2").mkdir()
    (tmp_path / "node/node2/cpulist").write_text("\n")
    assert cores.read_cores([9, 0, 5], tmp_path) == [each for each in everywhere if each.number in (0, 5, 9)]
    assert cores.area_of(frozenset({0, 1, 8, 9}), tmp_path) == Area(0, 0)
    assert cores.area_of(frozenset({0, 2}), tmp_path) == Area(0, -1)
    assert cores.area_of(frozenset({6, 15}), tmp_path) == Area(1, 6)
    assert cores.area_of(frozenset({3, 4}), tmp_path) == Area(-1, -1)


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert cores.read_cores([3, 4], tmp_path) == [Core(3, 3, -1, 0), Core(4, 4, -1, 0)]
    assert cores.area_of(frozenset({3, 4}), tmp_path) == Area(0, -1)


def test_this_machine() -> None:
    usable = os.sched_getaffinity(0)
    found = cores.read_cores(usable)
    assert {core.number for core in found} == usable
    share = cores.shares(found, len(usable))
    assert sorted(share) == [[core] for core in sorted(usable)]


def test_ranks_per_area() -> None:
    def of(*areas: tuple[int, int], by: str = "caches") -> int:
        return cores.ranks_per_area([Area(*area) for area in areas], by)

    assert of((0, 0), (0, 0), (1, 4), (1, 4)) == 2, "two sockets"
    assert of((0, 0), (0, 2), (1, 4), (1, 6)) == 2, "nodes come before caches"
    assert of((0, 0), (0, 0), (0, 4), (0, 4)) == 2, "one node, two caches"
    assert of((0, 0), (0, 0), (0, 4), (0, 4), by="nodes") == 0, "which nobody asked for"
    assert of((0, 0), (0, 0), (1, 4), (1, 4), by="nodes") == 2
    assert of((0, 0), (0, 0), (1, 4), (1, 4), by="off") == 0
    assert of((0, 0), (0, 0), (0, 0), (0, 0)) == 0, "one cache"
    assert of((0, 0), (1, 4)) == 0, "one rank each"
    assert of((0, 0), (1, 4), (0, 0), (1, 4)) == 0, "ranks of a node don't lie side by side"
    assert of((0, 0), (0, 0), (1, 4)) == 0, "not as many in each"
    assert of((0, 0), (0, 0), (1, 4), (-1, -1)) == 0, "a rank that isn't bound"


@pytest.mark.parametrize("text", ["1-0", "a", "-3", "1,,x", "70000"])
def test_bad_lists(text: str) -> None:
    with pytest.raises(ValueError):
        cores.parse_list(text)


def test_binding_takes_all_threads_along() -> None:
    before = os.sched_getaffinity(0)
    one = {max(before)}
    asked, answer = threading.Event(), []
    ready = threading.Event()

    def thread() -> None:
        ready.set()
        asked.wait(10)
        answer.append(os.sched_getaffinity(0))

    worker = threading.Thread(target=thread)
    worker.start()
    ready.wait(10)
    try:
        cores.bind(one)
        asked.set()
        worker.join(10)
        assert os.sched_getaffinity(0) == one
        assert answer == [one]
    finally:
        asked.set()
        cores.bind(before)
    with pytest.raises(InvalidArgumentError, match=r"can't be bound to cores 60000"):
        cores.bind([60000])
