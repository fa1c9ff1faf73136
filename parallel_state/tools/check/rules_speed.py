"""Rules about what was measured on the cores and in the groups, by medians that a few outliers don't move."""

from __future__ import annotations

from collections.abc import Iterator

from device_communicators.base.errors import format_ranks
from parallel_state.tools.check.evidence import Evidence, grouped, outliers, ranks_of
from parallel_state.tools.check.facts import CpuRun, GroupTraffic
from parallel_state.tools.check.findings import Finding, named, rate

_SLOW_CPU = 2.0
_SLOW_GROUP = 5.0
_SLOW_GROUP_US = 2_000.0
"""Below that, a group's latency is a matter of the kernel's time slices."""
_THROTTLED = 2


def runs_of(evidence: Evidence, number: int) -> list[CpuRun]:
    """Returns what a rank measured of its core, before and after the traffic."""
    measured, traffic = evidence.measured.get(number), evidence.traffic.get(number)
    return [*(measured.cpu if measured else ()), *(traffic.cpu if traffic else ())]


def cpu_speed(evidence: Evidence) -> Iterator[Finding]:
    """The best of many repetitions: what else runs on the core for a while doesn't count, a slow core does."""
    runs = {number: runs_of(evidence, number) for number in range(1, len(evidence.arrivals) + 1)}
    best = {number: min(run.best_ms for run in each) for number, each in runs.items() if each}
    for number, took_ms, middle_ms in outliers(best, _SLOW_CPU):
        facts = evidence.of(number)
        text = f"rank {facts.place.rank} takes {took_ms:.2f} ms for work that takes the median rank {middle_ms:.2f} ms"
        yield evidence.about("rank-slow", text, [facts])
    throttled = {number: sum(run.throttled for run in each) for number, each in runs.items()}
    stopped = [number for number, count in throttled.items() if count >= _THROTTLED]
    for host, numbers in grouped(stopped, evidence.host_of).items():
        group = [evidence.of(number) for number in numbers]
        periods = max(throttled[number] for number in numbers)
        text = f"the kernel stopped {named(ranks_of(group))} on {host} in {periods} periods"
        yield evidence.about("cpu-throttled", text, group)


def traffic_failures(evidence: Evidence) -> Iterator[Finding]:
    failed = {number: each for number, each in evidence.traffic.items() if each.problem}
    for stage, numbers in grouped(failed, lambda number: failed[number].stage).items():
        # Each rank's error tells it from its side: the first rank's, and how many more there are.
        first = min(numbers, key=lambda number: evidence.of(number).place.rank)
        more = f" ({len(numbers) - 1} more ranks have errors)" if len(numbers) > 1 else ""
        text = f"{stage}, rank {evidence.of(first).place.rank}: {failed[first].problem}{more}"
        starting = stage in ("init_distributed_environment", "initialize_model_parallel")
        yield evidence.about("start-failed" if starting else "traffic-failed", text, map(evidence.of, numbers))


def wrong_answers(evidence: Evidence) -> Iterator[Finding]:
    for number, traffic in evidence.traffic.items():
        for group in traffic.groups:
            if group.wrong:
                facts = evidence.of(number)
                text = (
                    f"{group.kind} group of {named(group.ranks)}, over {group.route}, on rank "
                    f"{facts.place.rank}: {', '.join(group.wrong)}"
                )
                yield evidence.about("traffic-wrong", text, [facts])


def groups_of_kind(evidence: Evidence) -> dict[str, dict[tuple[int, ...], GroupTraffic]]:
    """Returns each kind's groups, by ranks, with the slowest figures of any of their ranks."""
    found: dict[str, dict[tuple[int, ...], GroupTraffic]] = {}
    for traffic in evidence.traffic.values():
        for group in traffic.groups:
            known = found.setdefault(group.kind, {})
            before = known.get(tuple(group.ranks))
            if before is None or group.latency_us > before.latency_us:
                known[tuple(group.ranks)] = group
    return found


def slow_groups(evidence: Evidence) -> Iterator[Finding]:
    facts = {each.place.rank: each for each in evidence.arrivals}
    for kind, groups in groups_of_kind(evidence).items():
        # Groups within a host aren't compared with those that span some.
        for some in grouped(groups, lambda ranks: len({evidence.host(facts[rank]) for rank in ranks}) > 1).values():
            if len(some) < 3:  # of two, nobody can say which is the odd one
                continue
            latency = {ranks: groups[ranks].latency_us for ranks in some}
            for ranks, took_us, middle_us in outliers(latency, _SLOW_GROUP):
                if took_us - middle_us > _SLOW_GROUP_US:
                    text = (
                        f"an all_reduce of 64 bytes in {kind} {format_ranks(ranks)} takes {took_us:.0f} µs, the median "
                        f"of its kind {middle_us:.0f} µs"
                    )
                    yield evidence.about("group-slow", text, map(facts.__getitem__, ranks))
            speeds = {ranks: groups[ranks].bytes_per_s for ranks in some if groups[ranks].bytes_per_s}
            for ranks, speed, middle in outliers(speeds, _SLOW_GROUP, high=False):
                text = f"{kind} {format_ranks(ranks)} moves {rate(speed)}, the median {rate(middle)}"
                yield evidence.about("group-slow", text, map(facts.__getitem__, ranks))


MEASURED = (cpu_speed,)
TRAFFIC = (traffic_failures, wrong_answers, slow_groups)
