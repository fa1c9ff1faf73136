"""Reads the topology of this host's cores, divides cores among ranks, and binds processes to cores."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.base.host import read_text

DEVICES = Path("/sys/devices/system")
UNKNOWN = -1


class Core(NamedTuple):
    number: int
    physical: int
    """Identifies the physical core by the lowest number of its hardware threads."""
    cache: int
    """Identifies the last-level cache by the lowest number of its cores; -1 if unknown."""
    node: int


class Area(NamedTuple):
    """The NUMA node and the last-level cache that all cores of a process share; -1 for none."""

    node: int
    cache: int


def usable_cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def read_cores(numbers: Iterable[int], devices: Path = DEVICES) -> list[Core]:
    """Returns the topology of the CPU cores with these `numbers`. A core without an entry in the folder `devices`
    counts as a physical core of its own, on node 0.
    """
    nodes = _nodes(devices)
    found = []
    for number in sorted(numbers):
        threads = _list_in(devices / f"cpu/cpu{number}/topology/thread_siblings_list")
        node = next((node for node, cores in nodes.items() if number in cores), 0)
        found.append(Core(number, min(threads, default=number), _cache_of(number, devices), node))
    return found


@functools.cache
def area_of(numbers: frozenset[int], devices: Path = DEVICES) -> Area:
    nodes = _nodes(devices) or {0: set(numbers)}
    node = next((node for node, cores in nodes.items() if numbers <= cores), UNKNOWN)
    first = min(numbers, default=0)
    shared = _sharers(first, devices)
    return Area(node, min(shared) if shared and numbers <= shared else UNKNOWN)


def _nodes(devices: Path) -> dict[int, set[int]]:
    folders = sorted((int(path.name[4:]), path) for path in (devices / "node").glob("node[0-9]*"))
    cores = {number: _list_in(path / "cpulist") for number, path in folders}
    return {number: inside for number, inside in cores.items() if inside}


def _cache_of(number: int, devices: Path) -> int:
    return min(_sharers(number, devices), default=UNKNOWN)


def _sharers(number: int, devices: Path) -> set[int]:
    levels = [(read_text(path / "level"), path) for path in (devices / f"cpu/cpu{number}/cache").glob("index[0-9]*")]
    return _list_in(max(levels)[1] / "shared_cpu_list") if levels else set()


def _list_in(path: Path) -> set[int]:
    try:
        return set(parse_list(read_text(path)))
    except ValueError:
        return set()


def parse_list(text: str) -> list[int]:
    """Parses a list such as `0-3,8`. Raises ValueError if the text is invalid."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= first <= last < 1 << 16:
            raise ValueError(part)
        found.extend(range(first, last + 1))
    return found


def spans(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def shares(cores: Sequence[Core], count: int) -> list[list[int]]:
    """Divides CPU cores among `count` ranks; returns each rank's cores. Each rank gets whole physical cores of one NUMA
    node, in as few caches as possible.

    Each node gets consecutive ranks, in proportion to its cores. With more ranks than physical cores, each rank gets
    hardware threads: first the first thread of each core, then the second. Raises InvalidArgumentError if there are
    fewer cores than ranks.
    """
    if count > len(cores):
        raise InvalidArgumentError(
            f"each of {count} ranks must have a core of its own, but there are {len(cores)} cores that this process "
            f"may use ({spans(core.number for core in cores)}): start fewer ranks, or don't bind ranks to cores"
        )
    physical: dict[int, list[Core]] = {}
    for core in sorted(cores, key=lambda core: (core.node, core.cache, core.physical, core.number)):
        physical.setdefault(core.physical, []).append(core)
    units = list(physical.values())
    if count > len(units):
        threads = sorted(
            ((unit[0].node, place, index, core) for index, unit in enumerate(units) for place, core in enumerate(unit)),
            key=lambda each: each[:3],
        )
        units = [[core] for *_, core in threads]
    by_node: dict[int, list[list[Core]]] = {}
    for unit in units:
        by_node.setdefault(unit[0].node, []).append(unit)
    if count < len(by_node):
        return _split(units, count)
    found: list[list[int]] = []
    end = 0
    for inside in by_node.values():
        begin, end = end, end + len(inside)
        here = sum(begin * 2 * count <= (2 * rank + 1) * len(units) < end * 2 * count for rank in range(count))
        found += _split(inside, here)
    return found


def _split(units: Sequence[list[Core]], count: int) -> list[list[int]]:
    ends = [index * len(units) // count for index in range(count + 1)]
    return [sorted(core.number for unit in units[begin:end] for core in unit) for begin, end in pairwise(ends)]


def bind(cores: Iterable[int]) -> None:
    """Binds all threads of this process to `cores`. Raises InvalidArgumentError if none of the cores is usable."""
    wanted = set(cores)
    try:
        os.sched_setaffinity(0, wanted)
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), wanted)
    except (AttributeError, OSError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"this process can't be bound to cores {spans(wanted)}: {error}; choose among the cores that this process "
            f"may use, {spans(usable_cores())}"
        ) from error


def ranks_per_area(areas: Sequence[Area], by: str) -> int:
    """Returns how many ranks share each NUMA node or cache of a host: an equal number, at least two, of consecutive
    ranks. Returns 0 if that isn't so, an area is unknown, or there is only one.

    `areas`: one entry for each rank. `by`: "nodes", "caches" (nodes, or caches on a host with one node) or "off"
    (returns 0).
    """
    if by == "off":
        return 0
    for labels in ([area.node for area in areas], [area.cache for area in areas])[: 2 if by == "caches" else 1]:
        if UNKNOWN in labels:
            return 0
        different = sorted(set(labels), key=labels.index)
        if len(different) == 1:
            continue
        count = len(labels) // len(different)
        even = labels == [label for label in different for _ in range(count)]
        return count if even and count > 1 else 0
    return 0
