"""Prints the report as text for the terminal, or writes it as JSON."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

import msgspec

from device_communicators.base.cores import spans
from device_communicators.base.errors import format_ranks
from parallel_state.tools.arguments import STDOUT, columns, write
from parallel_state.tools.check.evidence import core_times, groups_of_kind
from parallel_state.tools.check.facts import ERROR, INFO, WARNING, Facts, rate
from parallel_state.tools.check.session import Outcome, Report

_MOST_ROWS = 16
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def heading(report: Report) -> str:
    counts = [
        f"{count} {severity}{'' if count == 1 or severity == INFO else 's'}"
        for severity in (ERROR, WARNING, INFO)
        if (count := sum(each.severity == severity for each in report.findings))
    ]
    came = len({each.place.rank for each in report.ranks})
    every = f"{report.world_size} rank{'' if report.world_size == 1 else 's'}"
    ranks = every if came == report.world_size else f"{came} of {every}"
    hosts = f"{len(report.hosts)} host{'' if len(report.hosts) == 1 else 's'}"
    sizes = " ".join(f"{name} {size}" for name, size in report.sizes.items())
    what = ", ".join(counts) or "no problems found"
    return f"{ranks} on {hosts}{f', {sizes}' if sizes else ''}: {what} ({report.seconds:.1f} s)"


def started_by(report: Report) -> str:
    facts = report.ranks[0]
    place = facts.place
    above = ", under ".join(place.started_by[:4])
    names = {"torchrun": "torchrun's variables (RANK, WORLD_SIZE, …)", "open_mpi": "Open MPI", "pmi": "PMI",
             "slurm": "SLURM", "launch": "this command", "single": "no launcher",
             "unknown": "contradictory variables"}  # fmt: skip
    where = f", store at {place.master_addr}:{place.master_port}" if place.master_addr and place.world_size > 1 else ""
    return f"started by {names.get(place.source, place.source)} ({above}){where}"


def versions(report: Report) -> str:
    found = report.ranks[0].versions
    words = [f"torch {found.torch}", f"parallel_state {found.package}", f"Python {found.python}"]
    words += [f"{name} {value}" for name, value in (("NCCL", found.nccl), ("driver", found.driver)) if value]
    words.append(f"compiled library {found.compiled}" if found.compiled else "no compiled library")
    return ", ".join(words)


def tables(report: Report) -> Iterator[Table]:
    head = ("host", "ranks", "gloo's interface", "NCCL's", "cores", "/dev/shm", "GPUs", "core time")
    yield "Hosts", head, list(_hosts(report))
    links, host_of = [link for link in report.evidence.links if not link.problem], report.evidence.host_of
    if links:
        rows = [
            (host_of(link.source), host_of(link.target), f"{link.rtt_us:.0f} µs", rate(link.bytes_per_s))
            for link in sorted(links, key=lambda link: link.bytes_per_s)
        ]
        title = "Links between hosts" + (f", the slowest {_MOST_ROWS} of {len(rows)}" if len(rows) > _MOST_ROWS else "")
        yield title, ("from", "to", "round trip", "one TCP stream"), rows[:_MOST_ROWS]
    groups = list(_groups(report))
    if groups:
        figures = ("group", "ranks", "over", "all_reduce of 64 bytes", "bus bandwidth", "answers checked")
        yield "Groups, the slowest of each kind", figures, groups


def _hosts(report: Report) -> Iterator[tuple[str, ...]]:
    evidence = report.evidence
    numbers = {id(facts): number for number, facts in enumerate(report.ranks, 1)}
    for name, ranks in evidence.hosts.items():
        facts = ranks[0]
        cores = sorted({core for each in ranks for core in each.cpu.affinity})
        runs = [took_ms for each in ranks for took_ms in core_times(evidence, numbers[id(each)])]
        models = {device.name for device in facts.gpus.devices}
        yield (
            name,
            format_ranks(sorted(each.place.rank for each in ranks)),
            f"{facts.network.gloo_interface} {facts.network.gloo_address or '–'}",
            facts.network.nccl_interface or "–",
            f"{len(cores)} ({spans(cores)})",
            _space(facts),
            f"{len(facts.gpus.visible)} × {models.pop()}" if len(models) == 1 else str(len(facts.gpus.visible) or "–"),
            f"{max(runs):.2f} ms" if runs else "–",
        )


def _space(facts: Facts) -> str:
    limits = facts.limits
    if limits.shm_bytes < 0:
        return limits.shm_problem or "–"
    return f"{limits.shm_free_bytes / 2**30:.1f} of {limits.shm_bytes / 2**30:.1f} GiB free"


def _groups(report: Report) -> Iterator[tuple[str, ...]]:
    checks: dict[str, list[int]] = {}
    for traffic in report.traffic.values():
        for group in traffic.groups:
            right, all_of_them = checks.setdefault(group.kind, [0, 0])
            checks[group.kind] = [right + group.checks - len(group.wrong), all_of_them + group.checks]
    for kind, groups in groups_of_kind(report.evidence).items():
        slowest = max(groups.values(), key=lambda group: group.latency_us)
        lowest = min(group.bytes_per_s for group in groups.values())
        right, all_of_them = checks[kind]
        yield (
            f"{kind} ({len(groups)} × {len(slowest.ranks)})",
            format_ranks(slowest.ranks),
            slowest.route,
            f"{slowest.latency_us:.0f} ± {slowest.latency_mad_us:.0f} µs",
            rate(lowest),
            f"{right} of {all_of_them} right",
        )


def _short(text: str) -> str:
    return text if len(text) <= 1200 else f"{text[:1000]} … {text[-150:]}"


def text(report: Report, width: int | None = None) -> str:
    width = width or shutil.get_terminal_size((120, 40)).columns
    lines = [heading(report), started_by(report), versions(report), ""]
    for each in report.findings:
        lines += _wrapped(f"{each.severity.upper()} {each.code}{f' ({each.where})' if each.where else ''}: ",
                          _short(each.found), width)  # fmt: skip
        lines += [*_wrapped("    why: ", each.why, width), *_wrapped("    do:  ", each.fix, width), ""]
    for title, head, rows in tables(report):
        lines += [title, *(f"  {line}" for line in columns([head, *rows]))]
        lines.append("")
    return "\n".join(lines)


def _wrapped(label: str, words: str, width: int) -> list[str]:
    return textwrap.wrap(label + words, width, subsequent_indent="         ", break_on_hyphens=False)


def show(parser: argparse.ArgumentParser, chosen: argparse.Namespace, outcome: Outcome) -> None:
    """Prints or writes the report of `outcome`. If ranks didn't reach each other, one rank of each host prints.

    `chosen`: the command's options.
    """
    report = outcome.report
    if report is None:
        return
    place = report.ranks[0].place
    if not outcome.met and place.rank != 0:
        if place.local_rank == 0:
            print(text(report, width=120), file=sys.stderr)
        return
    try:
        if chosen.json is not None:
            content = msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
            write(parser, chosen.json, content + "\n")
    finally:  # even if writing fails
        if chosen.json != STDOUT:
            print(text(report), end="")
