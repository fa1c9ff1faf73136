"""Rules about what was measured on the cores and in the groups, by medians that a few outliers don't move."""

from __future__ import annotations

from collections.abc import Iterator

from device_communicators.errors import format_ranks
from parallel_state.tools.check.evidence import Evidence, by_value, outliers
from parallel_state.tools.check.facts import CpuRun, GroupTraffic
from parallel_state.tools.check.findings import Finding, finding

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
        facts = evidence.arrivals[number - 1]
        text = f"rank {facts.place.rank} takes {took_ms:.2f} ms for work that takes the median rank {middle_ms:.2f} ms"
        yield finding("rank-slow", text, [facts.place.rank], [evidence.host(facts)])
    throttled = {number: sum(run.throttled for run in each) for number, each in runs.items()}
    stopped = {number: count for number, count in throttled.items() if count >= _THROTTLED}
    hosts: dict[str, list[int]] = {}
    for number in stopped:
        hosts.setdefault(evidence.host_of(number), []).append(number)
    for host, numbers in hosts.items():
        ranks = sorted(evidence.arrivals[number - 1].place.rank for number in numbers)
        periods = max(stopped[each] for each in numbers)
        text = f"the kernel stopped ranks {format_ranks(ranks)} on {host} in {periods} periods"
        yield finding("cpu-throttled", text, ranks, [host])


def traffic_failures(evidence: Evidence) -> Iterator[Finding]:
    problems = {
        number: f"{each.stage}|{each.problem}" for number, each in evidence.traffic.items() if each.problem
    }  # fmt: skip
    if not problems:
        return
    stages = by_value({number: text.partition("|")[0] for number, text in problems.items()})
    for stage, numbers in stages.items():
        started = stage not in ("init_distributed_environment", "initialize_model_parallel")
        # Each rank's error tells it from its side: the first rank's, and how many more there are.
        first = min(numbers, key=lambda number: evidence.arrivals[number - 1].place.rank)
        ranks = sorted(evidence.arrivals[number - 1].place.rank for number in numbers)
        more = f" ({len(numbers) - 1} more ranks have errors)" if len(numbers) > 1 else ""
        text = f"{stage}, rank {evidence.arrivals[first - 1].place.rank}: {evidence.traffic[first].problem}{more}"
        hosts = [evidence.host_of(number) for number in numbers]
        yield finding("traffic-failed" if started else "start-failed", text, ranks, hosts)


def wrong_answers(evidence: Evidence) -> Iterator[Finding]:
    for number, traffic in evidence.traffic.items():
        for group in traffic.groups:
            if group.wrong:
                facts = evidence.arrivals[number - 1]
                text = (
                    f"{group.kind} group of ranks {format_ranks(group.ranks)}, over {group.route}, on rank "
                    f"{facts.place.rank}: {', '.join(group.wrong)}"
                )
                yield finding("traffic-wrong", text, [facts.place.rank], [evidence.host(facts)])


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
    host = {facts.place.rank: evidence.host(facts) for facts in evidence.arrivals}
    for kind, groups in groups_of_kind(evidence).items():
        spread = {ranks: len({host.get(rank) for rank in ranks}) > 1 for ranks in groups}
        for across in (False, True):  # groups within a host aren't compared with those that span some
            some = {ranks: group for ranks, group in groups.items() if spread[ranks] is across}
            if len(some) < 3:  # of two, nobody can say which is the odd one
                continue
            latency = {ranks: group.latency_us for ranks, group in some.items()}
            for ranks, took_us, middle_us in outliers(latency, _SLOW_GROUP):
                if took_us - middle_us > _SLOW_GROUP_US:
                    text = (
                        f"an all_reduce of 64 bytes in {kind} {format_ranks(ranks)} takes {took_us:.0f} µs, the median "
                        f"of its kind {middle_us:.0f} µs"
                    )
                    yield finding("group-slow", text, ranks, (host.get(rank, "?") for rank in ranks))
            speed = {ranks: group.bytes_per_s for ranks, group in some.items() if group.bytes_per_s}
            for ranks, rate, middle in outliers(speed, _SLOW_GROUP, high=False):
                text = f"{kind} {format_ranks(ranks)} moves {rate / 1e9:.3f} GB/s, the median {middle / 1e9:.3f} GB/s"
                yield finding("group-slow", text, ranks, (host.get(rank, "?") for rank in ranks))


MEASURED = (cpu_speed,)
TRAFFIC = (traffic_failures, wrong_answers, slow_groups)
