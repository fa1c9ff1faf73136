"""Compares collectives within one host: this library, torch.distributed, vLLM and MPI.

    python benchmarks/collectives.py                              2 ranks, all operations, 1 KiB to 64 MiB
    python benchmarks/collectives.py --ranks 2 4 8 --operations all_reduce --sizes 8192 --json a.json --svg a.svg
    python benchmarks/collectives.py --device cuda --json a.json --svg a.svg     starts ranks on GPUs

vLLM and MPI are optional (`python benchmarks/harness/peers.py setup`). A size is the bytes of one rank's tensor. The
slowest rank's time counts. `op` is a torch.ops call, `coordinator` the method of a `GroupCoordinator`. Calls named "in
place", and all of vLLM's, overwrite their input.

*tight* loops repeat the call on one buffer. *produced* loops write the input before and read the output after each
call. The tables subtract the time of these two copies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import command_line
from harness import ranks as in_each_rank
from harness.collectives import COPIES, OURS, TREE, VLLM
from harness.peers import MPIS, SIZES_OF_VLLM
from harness.picture import draw
from harness.rounds import Row, measure_all
from harness.teams import Team, started

from parallel_state.startup import environment
from parallel_state.tools.bench.report import bandwidths, nccl_bytes, p50, size_name, write_json
from parallel_state.tools.bench.rounds import GLOO, OPERATIONS, OWN, PING_PONG

TORCH, MPI = "harness.collectives", "harness.mpi"
SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 24, 26))
PAIRS = (
    *(("op, in place", peer) for peer in ("vLLM op, in place", "gloo", "Intel MPI", "MPICH")),
    ("op, in place", "Open MPI (int16)"),
    *(("symmetric op, in place", peer) for peer in ("vLLM op, in place", "Intel MPI")),
    *(("op", peer) for peer in ("gloo", "Intel MPI")),
    ("coordinator", "vLLM coordinator, in place"),
    ("coordinator", "coordinator, in place"),
    (TREE, "coordinator, in place"),
    *(("coordinator", peer) for peer in ("vLLM", "gloo", "Intel MPI", "MPICH", "Open MPI", "Open MPI (int16)")),
)


def make_teams(options: argparse.Namespace, ranks: int) -> list[Team]:
    peers = command_line.peers(options)
    settings = {"pin": not options.no_pin, "vllm": str(peers.root)}
    names = [OWN, GLOO] + [VLLM] * (peers.vllm is not None and ranks in SIZES_OF_VLLM)
    teams = [Team(name, TORCH, ranks, settings) for name in names]
    for mpi in (mpi for mpi in peers.mpis if mpi.name in options.mpis):
        launcher, variables = mpi.command(peers.root, ranks, []), mpi.environment()
        teams.append(Team(mpi.name, MPI, ranks, settings, launcher=launcher, environment=variables))
    return teams


def cases(options: argparse.Namespace, ranks: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for operation in options.operations:
        barrier = operation == "barrier"
        for loop in ("tight",) if barrier else options.loops:
            for size in (0,) if barrier else options.sizes:
                values = {"operation": operation, "bytes": size, "dtype": options.dtype, "loop": loop}
                found.append({"ranks": ranks, **values})
                found += [{"ranks": ranks, **values, "offset": each} for each in options.offsets if not barrier]
    return found


def size_of(row: Row) -> str:
    return size_name(row.case["bytes"]) + (f" + {row.case['offset']}" if "offset" in row.case else "")


def net(row: Row) -> Row:
    """Returns the row of a *produced* loop with the copies' median time subtracted from each sample. At least 10 ns per
    call remain.
    """
    copies = row.us.get(COPIES)
    if copies is None:
        return row
    rest = {name: [max(0.01, us - p50(copies)) for us in samples] for name, samples in row.us.items() if name != COPIES}
    return replace(row, us=rest)


def report(rows: Sequence[Row]) -> None:
    for key in dict.fromkeys((row.case["ranks"], row.case["operation"], row.case["loop"]) for row in rows):
        ranks, operation, loop = key
        chosen = [net(row) for row in rows if (row.case["ranks"], row.case["operation"], row.case["loop"]) == key]
        title = f"{operation}, {ranks} ranks, {chosen[0].case['dtype']}, {loop}"
        command_line.print_rows(title, chosen, size_of, PAIRS)
        if operation != "barrier":
            print_bandwidths(title, chosen)


def print_bandwidths(title: str, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if any(row.us.get(name) for name in OURS)]
    speeds = []
    for row in rows:
        best = min(p50(row.us[name]) for name in OURS if row.us.get(name))
        operation, ranks = row.case["operation"], row.case["ranks"]
        speeds.append(bandwidths(operation, nccl_bytes(operation, row.case["bytes"], ranks), best, ranks))
    lines = [(name, [speed[at] for speed in speeds]) for at, name in enumerate(("algbw", "busbw"))]
    if rows:
        command_line.print_table(f"{title}: the best of ours, 10⁹ B/s", [size_of(row) for row in rows], lines)


def picture(rows: Sequence[Row]) -> str:
    panels = []
    for key in dict.fromkeys((row.case["ranks"], row.case["operation"], row.case["loop"]) for row in rows):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            is_shown = row.case["bytes"] and "offset" not in row.case
            if (row.case["ranks"], row.case["operation"], row.case["loop"]) == key and is_shown:
                for name, samples in net(row).us.items():
                    lines.setdefault(name, []).append((row.case["bytes"], p50(samples)))
        if lines:
            panels.append((f"{key[1]}, {key[0]} ranks, {key[2]}", lines))
    return draw(panels, OURS)


def in_ranks(options: argparse.Namespace) -> bool:
    return options.device == "cuda" or environment.detect(rendezvous=False).world_size > 1


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 2; on GPUs one for each")
    parser.add_argument(
        "--operations", nargs="+", choices=(*OPERATIONS, PING_PONG), help="default: all but ping_pong, of two messages"
    )
    parser.add_argument("--sizes", nargs="+", type=int, help="bytes that a rank holds; on GPUs as nccl-tests count")
    parser.add_argument(
        "--offsets", nargs="*", type=int, default=[], help="also measure inputs at these byte offsets within a page"
    )
    parser.add_argument("--modes", nargs="+", choices=in_each_rank.MODES, default=in_each_rank.MODES)
    parser.add_argument("--loops", nargs="+", choices=("tight", "produced"), default=("tight", "produced"))
    parser.add_argument("--dtype", default="bfloat16")
    names = [mpi.name for mpi in MPIS]
    parser.add_argument("--mpis", nargs="*", choices=names, default=names, help="MPIs to measure; fewer start faster")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--svg", type=Path, help="write a picture here")
    options = parser.parse_args()
    if in_ranks(options):
        options.operations = options.operations or in_each_rank.OPERATIONS
        options.sizes = options.sizes or in_each_rank.SIZES
        code, rows_of_ranks, left_out = in_each_rank.main(options)
        command_line.print_ranks(rows_of_ranks, left_out)
        return code
    options.operations, options.sizes = options.operations or OPERATIONS, options.sizes or SIZES
    options.ranks = options.ranks or [2]
    rows = []
    for ranks in options.ranks:
        with started(make_teams(options, ranks)) as teams:
            for team in teams:
                print(f"{team.name}: {team.ask('about')[0]}")
            rows += measure_all(teams, cases(options, ranks), command_line.plan(options))
    report(rows)
    if options.json:
        write_json(options.json, rows, command_line.recorded(options))
    if options.svg:
        options.svg.write_text(picture(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
