"""Collects the facts and measurements of all ranks, which the rules of `check` then judge."""

from __future__ import annotations

import ipaddress
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from device_communicators.base.errors import LayoutError, SettingError
from parallel_state.layout.ranks import Layout
from parallel_state.layout.resolution import resolve_layout
from parallel_state.startup.environment import expand_counts, expand_hostlist
from parallel_state.tools.check.facts import Facts, GroupTraffic, Interface, Link, Measured, Traffic, named

K = TypeVar("K")
T = TypeVar("T")

_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Evidence:
    """The facts and measurements of all ranks. `sizes`, `order`: of the layout's axes.

    The keys of `measured`, `traffic` and `lost` are positions in `arrivals`, from 1: two processes can claim one rank.
    """

    arrivals: Sequence[Facts]
    """The facts of each rank about its machine, in the order of registration."""
    world_size: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    order: str | None = None
    measured: Mapping[int, Measured] = field(default_factory=dict)
    traffic: Mapping[int, Traffic] = field(default_factory=dict)
    lost: Mapping[int, str] = field(default_factory=dict)
    """Ranks that stopped answering -> stage that they reported last."""
    met: bool = True
    """False if this rank reached no other rank."""

    @cached_property
    def ranks(self) -> list[int]:
        return [each.place.rank for each in self.arrivals]

    @cached_property
    def hosts(self) -> dict[str, list[Facts]]:
        """Returns host name -> facts of its ranks. Repeated names get ` (2)`, ` (3)` and so on."""
        taken: dict[str, int] = {}
        found = {}
        for each in grouped(self.arrivals, lambda facts: facts.host_key).values():
            name = each[0].network.hostname
            taken[name] = taken.get(name, 0) + 1
            found[name if taken[name] == 1 else f"{name} ({taken[name]})"] = each
        return found

    @cached_property
    def _names(self) -> dict[str, str]:
        return {each[0].host_key: name for name, each in self.hosts.items()}

    def host(self, facts: Facts) -> str:
        return self._names.get(facts.host_key, facts.network.hostname)

    def facts_of(self, number: int) -> Facts:
        return self.arrivals[number - 1]

    def host_of(self, number: int) -> str:
        return self.host(self.facts_of(number))

    def facts_on(self, hosts: Iterable[str]) -> list[Facts]:
        return [facts for name in hosts for facts in self.hosts[name]]

    @cached_property
    def missing(self) -> list[int]:
        return sorted(set(range(self.world_size)) - set(self.ranks))

    @property
    def several_hosts(self) -> bool:
        return len(self.hosts) > 1

    @property
    def spans_hosts(self) -> bool:
        place = self.arrivals[0].place
        return self.several_hosts or (not self.met and 0 < (place.local_world_size or 0) < place.world_size)

    @cached_property
    def layout(self) -> Layout | LayoutError:
        try:
            return resolve_layout(self.world_size, self.sizes, *filter(None, (self.order,)))
        except LayoutError as error:
            return error

    @cached_property
    def meeting_places(self) -> dict[str, list[int]]:
        places = {each.place.rank: each.place for each in self.arrivals if each.place.world_size > 1}
        found = by_value({rank: f"{each.master_addr}:{each.master_port}" for rank, each in places.items()})
        return {where: ranks for where, ranks in found.items() if not where.startswith(":")}

    @cached_property
    def links(self) -> list[Link]:
        return [link for each in self.measured.values() for link in each.links]

    def expected_host(self, rank: int) -> str:
        for facts in self.arrivals:
            by_slurm = _slurm_host(facts.place.variables, rank)
            if by_slurm:
                return f"host {by_slurm} (according to SLURM's node list)"
        for facts in self.arrivals:
            place = facts.place
            first, size = place.rank - place.local_rank, place.local_world_size
            if size and first <= rank < first + size:
                return f"host {self.host(facts)}, which has {named(range(first, first + size))}"
        sizes = {each.place.local_world_size for each in self.arrivals}
        size = sizes.pop() if len(sizes) == 1 else None
        if size and all((each.place.rank - each.place.local_rank) % size == 0 for each in self.arrivals):
            ranks = [each for each in range(rank // size * size, rank // size * size + size) if each < self.world_size]
            return f"node {rank // size} of {-(-self.world_size // size)} ({named(ranks)}), " + (
                "of which no rank arrived" if not set(ranks) & set(self.ranks) else "of which other ranks arrived"
            )
        return "an unknown host (the launcher's variables don't name it)"


def _slurm_host(variables: Mapping[str, str], rank: int) -> str:
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    counts = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE")
    if not hosts or not counts or "TORCHELASTIC_RUN_ID" in variables:
        return ""
    names = hostlist(hosts)
    tasks = list(expand_counts(counts))
    if len(tasks) != len(names) or rank >= sum(tasks):
        return ""
    if variables.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        dealt = [name for turn in range(max(tasks)) for name, count in zip(names, tasks, strict=True) if turn < count]
    else:
        dealt = [name for name, count in zip(names, tasks, strict=True) for _ in range(count)]
    return dealt[rank]


def hostlist(text: str) -> list[str]:
    try:
        return list(expand_hostlist(text))
    except SettingError:
        return []


def ranks_of(group: Iterable[Facts]) -> list[int]:
    return sorted({each.place.rank for each in group})


def interface_of(facts: Facts, name: str) -> Interface | None:
    return next((each for each in facts.network.interfaces if each.name == name), None)


def networks_of(interface: Interface) -> set[str]:
    found = set()
    for address in interface.addresses:
        try:
            found.add(str(ipaddress.ip_interface(address).network))
        except ValueError:
            continue
    return found


def outliers(values: Mapping[K, float], ratio: float, *, high: bool = True) -> Iterator[tuple[K, float, float]]:
    """Yields key, value and median for each value that is too high, or too low if `high` is False.

    Such a value differs from the median by a factor of more than `ratio` (2 `ratio` for fewer than four values) and by
    more than three standard deviations, which are estimated robustly.
    """
    if len(values) < 2 or min(values.values()) <= 0:
        return
    logs = {key: math.log(value) if high else -math.log(value) for key, value in values.items()}
    middle = statistics.median_low(list(logs.values()))
    spread = statistics.median_low([abs(each - middle) for each in logs.values()]) * _MAD_TO_SIGMA
    bound = max(math.log(ratio if len(values) >= 4 else 2 * ratio), 3 * spread)
    for key, each in logs.items():
        if each - middle > bound:
            yield key, values[key], math.exp(middle if high else -middle)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def by_value(items: Mapping[K, str]) -> dict[str, list[K]]:
    return dict(sorted(grouped(items, items.__getitem__).items(), key=lambda item: -len(item[1])))


def core_times(evidence: Evidence, number: int) -> list[float]:
    measured, traffic = evidence.measured.get(number), evidence.traffic.get(number)
    return [*(measured.cpu_ms if measured else ()), *(traffic.cpu_ms if traffic else ())]


def groups_of_kind(evidence: Evidence) -> dict[str, dict[tuple[int, ...], GroupTraffic]]:
    """Returns kind of group, such as "tp" -> ranks of a group -> measurements of the rank with the highest latency."""
    found: dict[str, dict[tuple[int, ...], GroupTraffic]] = {}
    for traffic in evidence.traffic.values():
        for group in traffic.groups:
            known = found.setdefault(group.kind, {})
            before = known.get(tuple(group.ranks))
            if before is None or group.latency_us > before.latency_us:
                known[tuple(group.ranks)] = group
    return found
