"""The tables of `init_scaling` on the terminal: medians, and ratios to ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

_HEAD = (
    f"  {'':22}{'init':>8}{'groups':>8}{'first':>8}{'total ms':>10}{'÷ ours':>8}{'cpu ms':>8}{'groups':>8}{'calls':>7}"
    f"{'store':>8}{'threads':>9}{'fds':>6}{'RSS MiB':>9}"
)


def steps_ms(row: Mapping[str, Any]) -> list[float]:
    """Median milliseconds of each step, and of all: by the slowest rank."""
    samples = [[init, groups - init, first - groups, first] for init, groups, first in row["ms"]]
    return [median(column) for column in zip(*samples, strict=True)]


def store_operations(row: Mapping[str, Any]) -> int:
    """By all ranks together, in all steps."""
    return sum(sum(kinds.values()) for kinds in row["store_all_ranks"].values())


def print_real(rows: Sequence[Mapping[str, Any]]) -> None:
    """`first`: collectives. Groups, calls, threads: a rank's; fds and RSS: their growth; store: all ranks together."""
    titles = dict.fromkeys((row["ranks"], row["layout"], row["lazy"]) for row in rows)
    for title in titles:
        group = [row for row in rows if (row["ranks"], row["layout"], row["lazy"]) == title]
        sizes = " · ".join(f"{name} {size}" for name, size in group[0]["sizes"].items())
        how = ", gloo connects lazily" if group[0]["lazy"] else ""
        print(f"\n{group[0]['ranks']} ranks, {sizes}{how}, median of {len(group[0]['ms'])}\n{_HEAD}")
        totals = {row["variant"]: steps_ms(row)[3] for row in group}
        for row in group:
            init, groups, first, total = steps_ms(row)
            ours = totals.get("ours, all kinds" if row["variant"].endswith("all kinds") else "ours", total)
            cpu = median(sample[-1] for sample in row["cpu_ms"])
            print(
                f"  {row['variant']:22}{init:8.0f}{groups:8.0f}{first:8.0f}{total:10.0f}{total / ours:8.2f}{cpu:8.1f}"
                f"{row['groups']:8}{row['calls']:7}{store_operations(row):8}{row['threads']:9}{row['descriptors']:6}"
                f"{row['rss_kib'] / 1024:9.1f}",
                flush=True,
            )


def print_counts(rows: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, Any]]) -> None:
    """Of the rank that makes most calls: the first, the middle and the last one were looked at."""
    print("\none rank of many, on torch's fake backend")
    print(f"  {'ranks':>6}  {'layout':40}{'':18}{'calls':>7}{'groups':>8}{'rank sets':>11}{'store':>7}{'ms':>10}")
    keys = ("world_size", "tp", "pp", "cp", "ep", "etp", "variant")
    samples = {tuple(row[key] for key in keys): row["ms"] for row in times}
    for key in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        costs = [row["cost"] for row in rows if tuple(row[key] for key in keys) == key]
        worst = max(costs, key=lambda cost: (cost["calls"], cost["groups"]))
        title = " · ".join(f"{name} {size}" for name, size in zip(keys[1:6], key[1:6], strict=True))
        ms = f"{median(samples[key]):10.1f}" if key in samples else ""
        print(
            f"  {key[0]:6}  {title:40}{key[6]:18}{worst['calls']:7}{worst['groups']:8}{worst['rank_sets']:11}"
            f"{sum(worst['store'].values()):7}{ms}"
        )
    for row in times:
        if row["variant"] == "ours, layout only":
            print(f"  {row['world_size']:6}  layout and this rank's lists alone: {median(row['ms']):.1f} ms")
