"""`python -m parallel_state bench`: measures latency and bandwidth of this library and of torch.distributed.

    python -m parallel_state bench                               two minutes on a host with two cores
    python -m parallel_state bench --quick --json found.json     few sizes, some seconds
    torchrun --nproc-per-node 8 -m parallel_state bench          in the ranks that torchrun started

Measures collectives, and round trips of a tensor and of an object; on GPUs if there are any. Each result is checked
before and after it is timed. The two libraries take turns, and the slowest rank's time counts. Bandwidths are defined
as in nccl-tests.

The exit code is 1 if a call failed or a result was wrong.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import parallel_state as ps
from device_communicators.base.errors import SettingError
from device_communicators.base.interrupts import signals_wait
from parallel_state.startup import environment
from parallel_state.tools.arguments import command_parser, positive, require_writable
from parallel_state.tools.bench.report import bandwidths, figure, nccl_bytes, p50, p99, recorded, size_name, write_json
from parallel_state.tools.bench.rounds import OBJECT, OPERATIONS, OWN, PING_PONG, Plan, Row

ALL = (*OPERATIONS, PING_PONG, OBJECT)
QUICK = ("all_reduce", "all_gather", PING_PONG, OBJECT)
SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 24, 26))
QUICK_SIZES = tuple(1 << power for power in (10, 13, 16, 20))
PLAN = Plan(rounds=30, round_s=0.005, case_s=2.0)
QUICK_PLAN = Plan(rounds=10, round_s=0.002, case_s=0.5)
RUN_S = 3600.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("bench", "[options]", __doc__)
    add_cases(parser, ALL)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples, machine, commit and versions")
    options = parser.parse_args(arguments)
    require_writable(parser, options.json)
    if (problem := complete(options)) is not None:
        parser.error(problem)
    try:
        options.started = environment.detect(rendezvous=False).world_size > 1
    except SettingError as error:
        parser.error(str(error))
    options.operations = options.operations or (QUICK if options.quick else ALL)
    if options.device == "cuda":  # objects are sent on the CPU
        options.operations = [each for each in options.operations if each != OBJECT]
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    return options


def add_cases(parser: argparse.ArgumentParser, operations: Sequence[str]) -> None:
    parser.add_argument("--quick", action="store_true", help="use fewer operations, sizes and rounds")
    parser.add_argument("--ranks", type=positive, metavar="N", help="default: 2 to 4, by the number of GPUs or cores")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if GPUs exist")
    parser.add_argument("--operations", nargs="+", choices=operations, metavar="NAME",
                        help=f"default: all of {', '.join(operations)}")  # fmt: skip
    # benchmarks/report.py shares these options, and counts as nccl-tests on GPUs.
    parser.add_argument("--sizes", nargs="+", type=positive, metavar="BYTES", help="bytes of each rank's input")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")


def complete(options: argparse.Namespace) -> str | None:
    """Fills in missing `options`. Returns an error text if options are wrong, else None."""
    if options.ranks is not None and not 2 <= options.ranks <= 64:
        return f"--ranks must be from 2 to 64, but is {options.ranks}"
    gpus = 0
    if options.device != "cpu":
        import torch  # imported after wrong arguments are reported: it takes seconds

        gpus = torch.cuda.device_count()
    if options.device == "cuda" and not gpus:
        return "--device cuda: torch finds no GPU"
    options.device = "cuda" if gpus else "cpu"
    if options.ranks is None:
        options.ranks = max(2, min(4, gpus or len(os.sched_getaffinity(0))))
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    with signals_wait():
        options = parse(arguments)
        from parallel_state.tools.bench import ranks  # needs torch

    plan, show = QUICK_PLAN if options.quick else PLAN, Shown(options)
    if options.started:
        failed = ranks.run_rank(options, plan, show)
    else:
        failed = ps.launch(ranks.run_rank, options.ranks, args=(options, plan, show), timeout=RUN_S)[0]
    return int(failed)


class Shown:
    """Prints measured rows and rewrites the JSON file after each operation: an interrupted run keeps its results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []

    def __call__(self, rows: list[Row], about: dict[str, Any]) -> None:
        if not self.rows:
            print(f"{about['device']} {about['sharing']}\n{about['route']}".strip())
        self.rows += rows
        print("\n".join(table(rows)), flush=True)
        if self.options.json is not None:
            write_json(self.options.json, self.rows, {**recorded(self.options), **about})


def table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for operation in dict.fromkeys(row.case["operation"] for row in rows):
        chosen = [row for row in rows if row.case["operation"] == operation]
        names = list(dict.fromkeys(name for row in chosen for name in row.us))
        there_and_back = ", there and back" if operation in (PING_PONG, OBJECT) else ""
        lines += ["", f"{operation}{there_and_back}, {chosen[0].case['ranks']} ranks, {chosen[0].case['dtype']}: us"]
        heads = ("p99", "ours ÷ torch's", "algbw", "busbw, GB/s")
        lines.append(f"{'size':>10}" + "".join(f"{name:>{_width(name)}}" for name in (*names, *heads)))
        for row in chosen:
            cells = [p50(row.us[name]) if name in row.us else None for name in names]
            text = zip((*names, *heads), (*cells, *_of_the_best(row)), strict=True)
            figures = "".join(f"{figure(cell):>{_width(head)}}" for head, cell in text)
            lines.append(f"{size_name(row.case['bytes']):>10}{figures}")
        lines += [f"no figures of {name}: {why}" for row in chosen for name, why in row.wrong.items()]
    return lines


def _width(head: str) -> int:
    return max(len(head) + 3, 10)


def _of_the_best(row: Row) -> tuple[float | None, ...]:
    ours = [us for name, us in row.us.items() if name.startswith(OWN)]
    torchs = [us for name, us in row.us.items() if not name.startswith(OWN)]
    if not ours:
        return (None,) * 4
    best, operation, size, count = min(ours, key=p50), *(row.case[name] for name in ("operation", "bytes", "ranks"))
    ratio = p50(best) / p50(torchs[0]) if torchs else None
    if operation in ("barrier", PING_PONG, OBJECT):
        return p99(best), ratio, None, None
    return p99(best), ratio, *bandwidths(operation, nccl_bytes(operation, size, count), p50(best), count)
