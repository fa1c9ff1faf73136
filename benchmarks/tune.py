"""Which kernel all-reduces what on this node: measures, chooses, and writes the table that the library then loads.

    python benchmarks/tune.py --ranks 2 4 8 --out node.json            ranks of its own, a GPU for each
    torchrun --nproc-per-node 8 benchmarks/tune.py --out node.json     the ranks that torchrun started
    PARALLEL_STATE_PEER_MEMORY=on PARALLEL_STATE_PEER_MEMORY_TABLE=node.json …

Each candidate is checked, then they take turns; of a round the slowest rank's time counts, so what is chosen is what
the whole group waits for. On GPUs calls are captured and the graph's replays are timed: that is how a decode step has
them. What is chosen, and why: `measure/choice.py`. The table holds what was measured, and the package's cited rows for
other GPUs and numbers of ranks. torch's symmetric memory takes part where PARALLEL_STATE_SYMMETRIC_MEMORY_BYTES
gives it some. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import options as shared
from measure.choice import boundaries
from measure.report import commit, p50, print_rows, size_name, write_json
from measure.rounds import Row, measure_all
from measure.teams import Team, started

from device_communicators.peer_thresholds import ALGORITHMS, PACKAGED, Thresholds, dump, load

SIZES = tuple(1 << power for power in range(10, 27))
OTHER = "other"
"""Who carries what isn't carried here: NCCL on GPUs."""
FUSED = "all_reduce_add_rms_norm"
ORDERS = {
    "all_reduce": (*ALGORITHMS, "symmetric", OTHER),
    "all_gather": ("push", "pull", OTHER),
    "reduce_scatter": ("push", "pull", OTHER),
    FUSED: ("fused", *ALGORITHMS, OTHER),
}
EMULATED = "tests: kernels on a CPU"


def cases(options: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    values = {"ranks": ranks, "dtype": "bfloat16", "loop": "produced"}
    return [{**values, "operation": name, "bytes": size} for name in ORDERS for size in options.sizes]


def choose(rows: Sequence[Row], arch: str, ranks: int, source: str) -> Thresholds:
    """The thresholds for a number of ranks, from the rows of all operations; each must have been measured."""
    for operation in ORDERS:
        if not any(row.us for row in rows if row.case["operation"] == operation):
            raise SystemExit(f"no table is written: nothing was measured of {operation} on {ranks} ranks")
    bounds = {
        operation: boundaries(_times([row for row in rows if row.case["operation"] == operation]), order)
        for operation, order in ORDERS.items()
    }
    sums, gather, scatter = (bounds[name] for name in ("all_reduce", "all_gather", "reduce_scatter"))
    return Thresholds(
        arch=arch,
        world_size=ranks,
        **{name: sums[name] for name in ALGORITHMS},
        all_gather=max(gather.values()),
        all_gather_push=gather["push"],
        # Measured by a rank's input, bounded by its output.
        reduce_scatter=max(scatter.values()) // ranks,
        reduce_scatter_push=scatter["push"] // ranks,
        fused=bounds[FUSED]["fused"],
        symmetric=sums["symmetric"],
        multimem=sums["symmetric"] > 0,  # what was measured, where the switches have it
        measured=True,
        source=source,
    )


def _times(rows: Sequence[Row]) -> Mapping[int, Mapping[str, float]]:
    """Medians of the slowest rank's times. Candidates that were wrong have none."""
    return {row.case["bytes"]: {name: p50(us) for name, us in row.us.items() if us} for row in rows}


def table(measured: Sequence[Thresholds]) -> list[Thresholds]:
    """What was measured, and the package's rows for everything else."""
    known = {(row.arch, row.world_size) for row in measured}
    return [*measured, *(row for row in load(PACKAGED).rows if (row.arch, row.world_size) not in known)]


def report(rows: Sequence[Row]) -> None:
    for key in dict.fromkeys((row.case["ranks"], row.case["operation"]) for row in rows):
        chosen = [row for row in rows if (row.case["ranks"], row.case["operation"]) == key]
        pairs = [(name, OTHER) for name in ORDERS[key[1]][:-1]]
        print_rows(f"{key[1]}, {key[0]} ranks, bfloat16", chosen, lambda row: size_name(row.case["bytes"]), pairs)


def measured(teams: list[Team], options: argparse.Namespace, ranks: int) -> tuple[list[Row], Thresholds]:
    about = teams[0].ask("about")[0]
    rows = measure_all(teams, cases(options, ranks), shared.plan(options))
    source = f"benchmarks/tune.py, {about['gpu']}, {datetime.date.today()}, commit {commit()}"
    return rows, choose(rows, about["arch"], ranks, source)


def main() -> None:
    parser = shared.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="of its own; torchrun's are as many")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes that a rank holds")
    parser.add_argument("--out", type=Path, required=True, help="the table")
    parser.add_argument("--emulate", action="store_true", help="without GPUs, to try this script: figures mean nothing")
    options = parser.parse_args()
    settings = {"pin": False, "emulate": options.emulate}
    rows: list[Row] = []
    found: list[Thresholds] = []
    is_first = True
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from tune_ranks import Joined

        with Joined(settings) as joined:
            is_first = joined.rank == 0
            rows, thresholds = measured([joined], options, joined.size)  # type: ignore[list-item]  # asked alike
            found = [thresholds]
    else:
        for ranks in options.ranks:
            with started([Team("tune", "tune_ranks", ranks, settings)]) as teams:
                if teams:
                    more, thresholds = measured(teams, options, ranks)
                    rows += more
                    found.append(thresholds)
    if is_first:
        report(rows)
        for thresholds in found:
            print(f"{thresholds.world_size} ranks, {thresholds.arch}: {thresholds}")
        dump(table(found), options.out, EMULATED if options.emulate else "measured, the rest cited")
        if options.json:
            write_json(options.json, rows, shared.recorded(options))


if __name__ == "__main__":
    main()
