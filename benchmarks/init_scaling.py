"""Measures start-up as the world grows: times real ranks, and counts one rank's calls in worlds of up to 16,384 ranks.

    python benchmarks/init_scaling.py                                 2 to 64 ranks, some 15 minutes on 2 cores

A. Times real ranks over gloo: init, groups, and first all_reduces, with checked sums. Ours alternates with `new_group`
   of each rank list on every rank (Megatron, vLLM), and with torch's `init_device_mesh`. The slowest rank's time of
   each step counts. An untimed run counts store operations.
B. One process acts as one rank in a world of 1,024 to 16,384, on torch's `fake` backend. Reports calls that create
   process groups, store operations, and milliseconds; also of Megatron-core, if installed.

Only ours includes a rendezvous with a deadline, a first all_reduce, the detection of each host's ranks, an agreement of
all ranks on the groups, and a final barrier.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness.picture import Panel, draw
from init_scaling_ranks import (
    CITED,
    GROWING,
    CountingStore,
    Footprint,
    Result,
    TrialFailedError,
    calls_counted,
    check_constant,
    counts_of,
    enter_own_network,
    run_ranks,
    times_of,
)
from torch.distributed.device_mesh import init_device_mesh

import parallel_state as ps
from parallel_state import resolve_layout
from parallel_state.layout.axes import AXES
from parallel_state.layout.ranks import Layout
from parallel_state.layout.resolution import made_at_start
from parallel_state.startup import stores as start_stores
from parallel_state.tools.bench.report import circumstances

TRIAL_S = 120.0
RANKS = (2, 4, 8, 16, 32, 64)


def main() -> None:
    options = parse()
    start_afresh()
    deadline = time.monotonic() + options.deadline_s
    own_network = enter_own_network()
    if not own_network and max(options.ranks, default=0) > 24:
        print("no network of its own: from some 28 ranks on, look-ups of names may take seconds", file=sys.stderr)
    result: dict[str, Any] = {
        "benchmark": "init_scaling",
        **circumstances(),
        "threads_at_fork": Footprint.now().threads,
        "own_network": own_network,
        "repetitions": options.repetitions,
        "steps": STEPS,
        "preloaded": preload(deadline),
        "failures": [],
        "real": [],
        "counts": [],
        "times": [],
    }
    try:
        real(result, options, deadline)
        if not options.no_counts:
            counts(result, options, deadline)
    except TrialFailedError as error:
        result["failures"].append(str(error))
    if options.json:
        options.json.write_text(dumps(result))
    if options.plot:
        options.plot.write_text(picture(result))
    for failure in result["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    sys.exit(1 if result["failures"] else 0)


def real(result: dict[str, Any], options: argparse.Namespace, deadline: float) -> None:
    for world_size in options.ranks:
        rows = measure(world_size, options.repetitions, deadline, result["failures"])
        print_real(rows)
        result["real"] += rows


def counts(result: dict[str, Any], options: argparse.Namespace, deadline: float) -> None:
    for case in (*GROWING, *CITED):
        result["counts"] += counts_of(case, deadline)
    check_constant([row for row in result["counts"] if row["pp"] == GROWING[0].pp])
    for case in GROWING:
        result["times"] += times_of(case, options.repetitions, deadline)
    print_counts(result["counts"], result["times"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="world sizes of part A; none skips it")
    parser.add_argument("--repetitions", type=int, default=5, help="repetitions of each timed trial; the median counts")
    parser.add_argument("--no-counts", action="store_true", help="skip part B")
    parser.add_argument(
        "--deadline-s", type=float, default=1800, help="time limit of the whole run; default %(default)g"
    )
    parser.add_argument("--json", type=Path, help="write raw samples here")
    parser.add_argument("--plot", type=Path, help="write a picture here, as SVG")
    options = parser.parse_args()
    if any(ranks < 2 or ranks % 2 or (ranks > 4 and ranks % 8) for ranks in options.ranks):
        parser.error("--ranks must be 2, 4, or multiples of 8, as the layouts have axes of 2")
    return options


def start_afresh() -> None:
    """Re-executes this script with one thread and a quiet torch: torch reads both settings at import."""
    wanted = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def measure(world_size: int, repetitions: int, deadline: float, failures: list[str]) -> list[dict[str, Any]]:
    trials = [
        Trial(division, variant, lazy)
        for division in divisions(world_size)
        for lazy in (False, True)
        for variant in VARIANTS
        if division.name == "experts" or not variant.endswith("all kinds")
    ]
    samples: dict[int, list[list[Result]]] = {at: [] for at in range(len(trials))}
    for _ in range(repetitions):
        for at, results in each_result(trials, deadline, failures):
            samples[at].append(results)
    counted = dict(each_result(trials, deadline, failures, count=True))
    return [row(trial, samples[at], counted[at]) for at, trial in enumerate(trials) if samples[at] and at in counted]


def each_result(
    trials: Sequence[Trial], deadline: float, failures: list[str], *, count: bool = False
) -> Iterator[tuple[int, list[Result]]]:
    for at, trial in enumerate(trials):
        try:
            yield at, run_trial(trial, min(deadline, time.monotonic() + TRIAL_S), count=count)
        except TrialFailedError as error:
            failures.append(f"{trial.division}, {trial.variant}, lazy {trial.lazy}: {error}")
            if time.monotonic() > deadline:
                raise


def row(trial: Trial, samples: Sequence[Sequence[Result]], counted: Sequence[Result]) -> dict[str, Any]:
    reports = [result.value.steps for result in counted]
    last = [result for sample in samples for result in sample]
    return {
        "ranks": trial.division.world_size,
        "layout": trial.division.name,
        "sizes": trial.division.sizes,
        "variant": trial.variant,
        "lazy": trial.lazy,
        "ms": [[round(1000 * max(each.marks[step] for each in sample), 1) for step in STEPS] for sample in samples],
        "cpu_ms": [
            [round(1000 * sum(each.cpu[step] for each in sample) / len(sample), 2) for step in STEPS]
            for sample in samples
        ],
        "groups": max(report["collectives"]["groups"] for report in reports) - 1,
        "calls": max(report["collectives"]["calls"] for report in reports) - 1,
        "store_all_ranks": {step: operations(reports, step) for step in STEPS},
        "store_worst_rank": {
            step: max(sum(operations([report], step).values()) for report in reports) for step in STEPS
        },
        "threads": max(result.after.threads for result in last),
        "descriptors": max(result.after.descriptors - result.before.descriptors for result in last),
        "rss_kib": round(median(result.after.rss_kib - result.before.rss_kib for result in last)),
    }


def operations(reports: Sequence[dict[str, dict[str, int]]], step: str) -> dict[str, int]:
    before = STEPS[STEPS.index(step) - 1] if step != STEPS[0] else None
    total: Counter[str] = Counter()
    for report in reports:
        total.update(report[step])
        if before is not None:
            total.subtract(report[before])
    return {kind: count for kind, count in sorted(total.items()) if kind not in ("groups", "calls") and count}


def dumps(result: dict[str, Any]) -> str:
    parts = []
    for name, value in result.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if rows else json.dumps(value)
        parts.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


VARIANTS = ("ours", "new_group", "device_mesh", "ours, all kinds", "new_group, all kinds")
STEPS = ("init", "groups", "collectives")
MEGATRON_KINDS = (
    "dp_cp", "dp", "cp", "model", "tp", "pp", "embedding", "position_embedding", "tp_dp_cp", "tp_dp", "tp_cp", "ep",
    "etp", "tp_ep", "tp_ep_pp", "edp",
)  # fmt: skip
"""Megatron's groups in order of creation. It creates three of them again for gloo."""

Mark = Callable[[str], None]


class Division(NamedTuple):
    name: str
    world_size: int
    sizes: dict[str, int]

    @property
    def layout(self) -> Layout:
        return resolve_layout(self.world_size, self.sizes, ranks_per_node=self.world_size)

    @property
    def arguments(self) -> dict[str, int]:
        return {axis.size_parameter: self.sizes[axis.name] for axis in AXES if axis.name in self.sizes}


def divisions(world_size: int) -> list[Division]:
    pp = 2 if world_size >= 4 else 1
    found = [Division("dense", world_size, {"tp": 2, "pp": pp})]
    if world_size >= 8:
        ep = 2 if world_size == 8 else 4
        found.append(Division("experts", world_size, {"tp": 2, "pp": 2, "cp": 2, "ep": ep}))
    return found


class Trial(NamedTuple):
    division: Division
    variant: str
    lazy: bool
    """gloo connects two ranks at their first message (TORCH_GLOO_LAZY_INIT=1)."""


class Report(NamedTuple):
    steps: dict[str, dict[str, int]]
    """After each step: store operations by kind, if counted, `groups` of this rank, `calls` for them."""
    modules: list[str]


def preload(deadline: float) -> list[str]:
    division = Division("dense", 2, {"tp": 2})
    names: dict[str, None] = {}
    for variant in VARIANTS:
        report = run_trial(Trial(division, variant, False), deadline)[0].value
        names.update(dict.fromkeys(report.modules))
    for name in names:
        importlib.import_module(name)
    return list(names)


def run_trial(trial: Trial, deadline: float, *, count: bool = False) -> list[Result]:
    lists = _lists(trial.division, trial.variant)  # before the start: Megatron's rank arithmetic isn't compared
    function = partial(_rank, trial, lists, count)
    return run_ranks(trial.division.world_size, function, deadline)


def _lists(division: Division, variant: str) -> list[list[list[int]]]:
    layout = division.layout
    kinds = MEGATRON_KINDS if variant.endswith("all kinds") else made_at_start(layout, division.sizes)
    return [layout.groups(kind) for kind in kinds]


def _rank(
    trial: Trial, lists: Sequence[Sequence[Sequence[int]]], count: bool, rank: int, port: int, mark: Mark
) -> Report:
    loaded = set(sys.modules)
    size = str(trial.division.world_size)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCH_GLOO_LAZY_INIT=str(int(trial.lazy)),
    )
    stores = _count_store_operations() if count else []
    steps: dict[str, dict[str, int]] = {}

    with calls_counted() as calls:

        def ended(step: str) -> None:
            mark(step)
            operations: Counter[str] = sum((store.counts for store in stores), Counter())
            steps[step] = {**operations, "groups": calls["member of"], "calls": calls["make"]}

        if trial.variant.startswith("ours"):
            _ours(trial, ended)
        elif trial.variant == "device_mesh":
            _device_mesh(trial, ended)
        else:
            _plain(lists, ended)
    return Report(steps, sorted(set(sys.modules) - loaded))


def _ours(trial: Trial, ended: Mark) -> None:
    ps.init_distributed_environment(backend="gloo")
    ended("init")
    ps.initialize_model_parallel(**trial.division.arguments, eager=trial.variant.endswith("all kinds"))
    ended("groups")
    for group in (ps.get_world_group(), *ps.get_parallel_groups().groups.values()):
        total = group.all_reduce(torch.tensor([group.rank]))
        _check(total, group.ranks)
    ended("collectives")


def _plain(lists: Sequence[Sequence[Sequence[int]]], ended: Mark) -> None:
    dist.init_process_group("gloo")
    ended("init")
    rank = dist.get_rank()
    mine: list[tuple[Any, Sequence[int]]] = [(dist.group.WORLD, range(dist.get_world_size()))]
    for kind in lists:
        for ranks in kind:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                mine.append((group, ranks))
    ended("groups")
    _reduce_each(mine)
    ended("collectives")


def _device_mesh(trial: Trial, ended: Mark) -> None:
    dist.init_process_group("gloo")
    ended("init")
    layout = trial.division.layout
    mine: list[tuple[Any, Sequence[int]]] = [(dist.group.WORLD, range(dist.get_world_size()))]
    for kind in ("tp", "ep") if "ep" in trial.division.sizes else ("tp",):
        axes = [(name, size) for name, size in reversed(layout.grid_of(kind).axes) if size > 1]
        mesh = init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
        mine += [(mesh.get_group(name), dist.get_process_group_ranks(mesh.get_group(name))) for name, _ in axes]
    ended("groups")
    _reduce_each(mine)
    ended("collectives")


def _reduce_each(groups: Sequence[tuple[Any, Sequence[int]]]) -> None:
    for group, ranks in groups:
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=group)
        _check(total, ranks)


def _check(total: torch.Tensor, ranks: Sequence[int]) -> None:
    if total.tolist() != [sum(ranks)]:
        raise RuntimeError(f"the sum of the ranks {list(ranks)} must be {sum(ranks)}, but is {total.tolist()}")


def _count_store_operations() -> list[CountingStore]:
    """Makes new stores of this library and torch count their operations. Returns a list, to which each new store is
    added.
    """
    of_torch = sys.modules["torch.distributed.rendezvous"]  # a function has the module's name
    stores: list[CountingStore] = []
    for module, name in ((start_stores, "open_tcp_store"), (of_torch, "_create_c10d_store")):
        setattr(module, name, _counting(getattr(module, name), stores))
    return stores


def _counting(make: Callable[..., dist.Store], stores: list[CountingStore]) -> Callable[..., CountingStore]:
    def counting(*args: Any, **named: Any) -> CountingStore:
        stores.append(CountingStore(make(*args, **named)))
        return stores[-1]

    return counting


_HEAD = (
    f"  {'':22}{'init':>8}{'groups':>8}{'first':>8}{'total ms':>10}{'÷ ours':>8}{'cpu ms':>8}{'groups':>8}{'calls':>7}"
    f"{'store':>8}{'threads':>9}{'fds':>6}{'RSS MiB':>9}"
)


def steps_ms(row: Mapping[str, Any]) -> list[float]:
    samples = [[init, groups - init, first - groups, first] for init, groups, first in row["ms"]]
    return [median(column) for column in zip(*samples, strict=True)]


def store_operations(row: Mapping[str, Any]) -> int:
    return sum(sum(kinds.values()) for kinds in row["store_all_ranks"].values())


def print_real(rows: Sequence[Mapping[str, Any]]) -> None:
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


Series = dict[str, list[tuple[float, float]]]


def picture(result: Mapping[str, Any]) -> str:
    panels: list[Panel] = []
    if result["counts"]:
        panels.append(_panel("calls of torch that make groups, on each rank", "calls", _calls(result["counts"])))
    if result["times"]:
        panels.append(_panel("initialize_model_parallel, fake backend", "ms", _times(result["times"])))
    if result["real"]:
        panels.append(_panel("until the first all-reduces, gloo (experts)", "ms", _total(result["real"])))
        panels.append(_panel("operations of all ranks on the store (experts)", "operations", _store(result["real"])))
    ours = [name for panel in panels for name in panel.lines if name.startswith("ours")]
    return draw(panels, list(dict.fromkeys(ours)))


def _panel(title: str, unit: str, series: Series) -> Panel:
    return Panel(title, series, unit, lambda ranks: f"{ranks:,}", "ranks")


def _calls(rows: Sequence[Mapping[str, Any]]) -> Series:
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["cp"] > 1:
            points = found.setdefault(row["variant"], {})
            points[row["world_size"]] = max(points.get(row["world_size"], 0), row["cost"]["calls"])
    return {name: sorted(points.items()) for name, points in found.items()}


def _times(rows: Sequence[Mapping[str, Any]]) -> Series:
    found: Series = {}
    for row in rows:
        if not row["variant"].endswith("only"):
            found.setdefault(row["variant"], []).append((row["world_size"], median(row["ms"])))
    return found


def _total(rows: Sequence[Mapping[str, Any]]) -> Series:
    found: Series = {}
    for row in _shown(rows):
        found.setdefault(_name(row), []).append((row["ranks"], steps_ms(row)[3]))
    return found


def _store(rows: Sequence[Mapping[str, Any]]) -> Series:
    found: Series = {}
    for row in _shown(rows):
        found.setdefault(_name(row), []).append((row["ranks"], store_operations(row)))
    return found


def _shown(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["layout"] == "experts" and not row["variant"].endswith("all kinds")]


def _name(row: Mapping[str, Any]) -> str:
    return row["variant"] + (", lazy gloo" if row["lazy"] else "")


if __name__ == "__main__":
    main()
