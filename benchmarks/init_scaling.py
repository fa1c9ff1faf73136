"""What start-up costs as the world grows: real ranks timed and counted, and one of up to 16,384 counted.

    python benchmarks/init_scaling.py                                 2 to 64 ranks, some 15 minutes on 2 cores
    python benchmarks/init_scaling.py --ranks 2 8 --repetitions 2     a minute
    python benchmarks/init_scaling.py --json FILE --plot FILE.svg

A. Real ranks, forks of this process, over gloo: init, groups, first all-reduces, whose sums are checked. In the same
   run, interleaved: `new_group` of every list on every rank (Megatron, vLLM), and torch's `init_device_mesh`. A step
   has ended when the slowest rank ended it. What a rank does on the store is counted in a run that isn't timed.
B. One process as one of 1,024 to 16,384 ranks, on torch's `fake` backend: calls that make process groups, operations
   on the store, milliseconds; beside Megatron-core's own code, where it is installed.

Peers do less than we do: init here includes a rendezvous with a deadline, a first all-reduce and the search for the
ranks of each node, and the groups' step an agreement of all ranks on what they make and a closing barrier.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from forked_ranks import Footprint, Result, TrialFailedError, enter_own_network
from init_scaling_counts import CITED, GROWING, check_constant, counts_of, times_of
from init_scaling_picture import draw
from init_scaling_report import print_counts, print_real
from init_scaling_trials import STEPS, VARIANTS, Trial, divisions, preload, run_trial

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
        "commit": options.commit or commit(),
        "machine": machine(),
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
    except TrialFailedError as error:  # what was measured until then is written all the same
        result["failures"].append(str(error))
    if options.json:
        options.json.write_text(dumps(result))
    if options.plot:
        options.plot.write_text(draw(result))
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
    parser.add_argument("--repetitions", type=int, default=5, help="of each timed trial; the median counts")
    parser.add_argument("--no-counts", action="store_true", help="leave part B out")
    parser.add_argument("--deadline-s", type=float, default=1800, help="of the whole run; default %(default)g")
    parser.add_argument("--json", type=Path, help="write raw samples here")
    parser.add_argument("--plot", type=Path, help="write a picture here, as SVG")
    parser.add_argument("--commit", help="what git says, if it can't be asked")
    options = parser.parse_args()
    if any(ranks < 2 or ranks % 2 or (ranks > 4 and ranks % 8) for ranks in options.ranks):
        parser.error("--ranks must be 2, 4, or multiples of 8, as the layouts have axes of 2")
    return options


def start_afresh() -> None:
    """Once more, with one thread and a quiet torch, unless it is so: both are settled while torch is imported."""
    wanted = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def measure(world_size: int, repetitions: int, deadline: float, failures: list[str]) -> list[dict[str, Any]]:
    """A row for each layout, way of connecting and variant; all kinds of group where the layout has experts."""
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
    """`ms`: when the slowest rank had ended each step, for each sample; `cpu_ms`: how long the mean rank had worked."""
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
        "groups": max(report["collectives"]["groups"] for report in reports) - 1,  # the default group is everybody's
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
    """Operations on the store by kind, of all these ranks together, within this step."""
    before = STEPS[STEPS.index(step) - 1] if step != STEPS[0] else None
    total: Counter[str] = Counter()
    for report in reports:
        total.update(report[step])
        if before is not None:
            total.subtract(report[before])
    return {kind: count for kind, count in sorted(total.items()) if kind not in ("groups", "calls") and count}


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_at_fork": Footprint.now().threads,
    }


def commit() -> str:
    root = Path(__file__).resolve().parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


def dumps(result: dict[str, Any]) -> str:
    """JSON with one row a line."""
    parts = []
    for name, value in result.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if rows else json.dumps(value)
        parts.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
