"""Times the peer-memory kernels alone, on one GPU: all ranks are regions and tensors of this process.

    python benchmarks/peer_kernels.py --json k.json --svg k.svg    --ranks, --sizes, --norm-sizes, --hidden, --dtype
    python benchmarks/peer_kernels.py --check                      checks answers only: for compute-sanitizer
    python benchmarks/peer_kernels.py --emulate                    without a GPU, to test this script (PYTHONPATH=.)

In rows such as `push, graph`, only rank 0's kernel runs, after all its peers' data has arrived. It never waits, so its
times are **lower bounds**: a real exchange adds links and late ranks. In `two_shot`, each rank sums one shard, then the
ranks exchange the sums; here only rank 0's shard is a sum.

Rows `of all ranks at once` are a real exchange: N kernels run on N streams, each on an N-th of the GPU.

`share` is a kernel's bandwidth divided by that of a copy of 1 GiB. It counts the bytes that the algorithm must read and
write once (`moved_bytes`; of all N ranks if all run), and may exceed 1 for cached data. `fused` is all_reduce, add and
RMS norm in one kernel, compared with an all_reduce kernel, torch's add and torch's rms_norm. `host` is the CPU's time
of a launch. NCCL and torch's symmetric memory, with one rank each, come last.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import command_line
import torch
from harness.picture import draw
from harness.rounds import Row, measure_all
from harness.timing import release
from peer_kernels_ranks import APART, FUSED, TOGETHER, EmulatedMachine, GpuMachine, KernelTeam, Machine, Others

from device_communicators.peer.group import DTYPES
from device_communicators.peer.kernels import KernelError
from device_communicators.peer.thresholds import ALGORITHMS
from parallel_state.tools.bench.devices import Clock, describe
from parallel_state.tools.bench.report import figure, p50, size_name, write_json

SIZES = (8 << 10, 32 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
NORM_SIZES = (8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10)
EMULATED = {"ranks": [2], "sizes": [1024, 8192], "norm_sizes": [3072], "hidden": 1536, "together_from": 8192}
CHECKED = {"ranks": [2, 4, 8], "sizes": [1024, 65536], "norm_sizes": [8192, 65536], "hidden": 4096}
COPY_BYTES = 1 << 30
SMALL_BYTES, SMALL_US = 8 << 10, 3.0
LARGE_BYTES, LARGE_SHARE = 1 << 20, 0.8
FUSED_RANGE, FUSED_RATIO = (8 << 10, 256 << 10), 1.5


@dataclass
class KernelRow(Row):
    refused: dict[str, str] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    share: dict[str, float] = field(default_factory=dict)
    """Candidate -> share of the copy's bandwidth."""

    def least_us(self, *names: str) -> float | None:
        found = [p50(self.us[name]) for name in names if self.us.get(name)]
        return min(found) if found else None


@dataclass(frozen=True)
class Target:
    what: str
    ranks: int
    bytes: int
    wanted: str
    found: float | None
    reached: bool | None


def moved_bytes(name: str, nbytes: int, size: int) -> int | None:
    """Returns the bytes that the kernel of the candidate `name` must read and write, for a tensor of `nbytes` on each
    of `size` ranks. None if the candidate isn't one kernel.
    """
    kernel = name.partition(",")[0].removesuffix(f" {TOGETHER}")
    if name.split(", ")[1:-1]:
        return None
    push = 2 + 4 * (size - 1)  # in, out; packets, half data, are written to and read from each peer
    found = {
        "push": push,
        FUSED: push + 2,  # the residual, in and out
        "pull": 3 + size,  # in, staged, read from all, out
        "two_shot": 6,  # in, staged, a shard from all, a shard to all, read from the own region, out
    }.get(kernel)
    return None if found is None else found * nbytes * (size if TOGETHER in name else 1)


def targets(rows: Sequence[KernelRow]) -> list[Target]:
    found = []
    for size in dict.fromkeys(row.case["ranks"] for row in rows):
        own = [row for row in rows if row.case["ranks"] == size]
        sums = [row for row in own if row.case["part"] == "all_reduce"]
        for row in sums:
            if row.case["bytes"] == SMALL_BYTES:
                us = row.least_us(*(f"{how}, graph" for how in ALGORITHMS))
                wanted = f"a graph's kernel takes at most {SMALL_US} us"
                found.append(_target("kernel", row, wanted, us, us is not None and us <= SMALL_US))
        for what, is_together in (("bandwidth", False), (f"bandwidth {TOGETHER}", True)):
            found += _bandwidth_target(what, sums, is_together)
        for row in own:
            if row.case["part"] == "norm" and FUSED_RANGE[0] <= row.case["bytes"] <= FUSED_RANGE[1]:
                found += [_fused_target(row, mode) for mode in ("graph", "eager")]
    return found


def _bandwidth_target(what: str, rows: Sequence[KernelRow], is_together: bool) -> list[Target]:
    shares = [
        (row.case["bytes"], max(found), row)
        for row in rows
        if (found := [share for name, share in row.share.items() if (TOGETHER in name) == is_together])
        and row.case["bytes"] >= LARGE_BYTES
    ]
    if not shares:
        return []
    _, share, row = max(shares, key=lambda each: each[0])
    wanted = f"at least {LARGE_SHARE} of the copy's bandwidth"
    return [_target(what, row, wanted, share, share >= LARGE_SHARE)]


def _fused_target(row: KernelRow, mode: str) -> Target:
    fused = row.least_us(f"{FUSED}, {mode}")
    apart = row.least_us(*(f"{how}, {APART}, {mode}" for how in ("push", "pull")))
    ratio = apart / fused if apart and fused else None
    wanted = f"three kernels take at least {FUSED_RATIO} times as long"
    return _target(f"{FUSED}, {mode}", row, wanted, ratio, ratio is not None and ratio >= FUSED_RATIO)


def _target(what: str, row: KernelRow, wanted: str, found: float | None, reached: bool) -> Target:
    return Target(what, row.case["ranks"], row.case["bytes"], wanted, found, None if found is None else reached)


def bandwidth(device: torch.device, nbytes: int, rounds: int) -> float:
    x = torch.ones(nbytes, dtype=torch.uint8, device=device)
    y, clock = torch.empty_like(x), Clock(device)
    y.copy_(x)
    clock.finish()
    found = 2 * nbytes / p50([clock.seconds(lambda: y.copy_(x)) for _ in range(rounds)]) / 1e9
    if not torch.equal(x, y):
        raise RuntimeError("a plain copy on this device is wrong")
    return found


def cases(options: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    common = {"ranks": size, "dtype": options.dtype}
    row_bytes = options.hidden * getattr(torch, options.dtype).itemsize
    sums = [{**common, "part": "all_reduce", "bytes": nbytes} for nbytes in options.sizes]
    norms = [
        {**common, "part": "norm", "bytes": nbytes, "hidden": options.hidden}
        for nbytes in options.norm_sizes
        if nbytes >= row_bytes and nbytes % row_bytes == 0
    ]
    return sums + norms


def measured(
    machine: Machine, options: argparse.Namespace, size: int, copied: float, keep: Callable[[KernelRow], None]
) -> bool:
    """Measures all cases of `size` ranks, and calls `keep` with each row. Returns False if the device is lost.
    `copied`: bandwidth of a copy in GB/s.
    """
    modes = ["eager"] if options.check else ["eager", "graph"]
    # Under a sanitizer, which may run one kernel at a time, concurrent kernels would wait forever.
    together_from = sys.maxsize if options.check else options.together_from
    team = KernelTeam(machine, size, modes, together_from, few=options.emulate or options.check)
    for case in cases(options, size):
        if options.check:
            names = team.prepare(case)
            wrong = {name: problem for name in names if (problem := team.check(name)) is not None}
            keep(KernelRow(case, wrong=wrong))
            print(f"{case}: {wrong or 'right'} ({'; '.join(names)})", flush=True)
            continue
        row, is_lost = _row(team, case, options)
        for name, us in row.us.items():
            moved = moved_bytes(name, case["bytes"], size)
            if moved is not None:
                row.share[name] = moved / p50(us) / 1e3 / copied
        keep(row)
        if is_lost:
            return False
    team.close()
    release(machine.clock)
    return True


def _row(team: KernelTeam, case: dict[str, Any], options: argparse.Namespace) -> tuple[KernelRow, bool]:
    teams = [team]
    row = KernelRow(**vars(measure_all(teams, [case], command_line.plan(options))[0]))  # type: ignore[arg-type]
    row.refused = dict(team.refused)
    for name in row.us if teams else ():
        if found := team.host_us(name):
            row.host_us[name] = p50(found)
    return row, not teams


def measure_others(
    machine: Machine, options: argparse.Namespace, rows: Sequence[KernelRow], write: Callable[[], None]
) -> None:
    others = Others(machine.device)
    sums = [row for row in rows if row.case["part"] == "all_reduce"]
    for nbytes in dict.fromkeys(row.case["bytes"] for row in sums):
        same = [row for row in sums if row.case["bytes"] == nbytes]
        team = KernelTeam(machine, same[0].case["ranks"], ["eager", "graph"], sys.maxsize, few=options.emulate)
        team.others = others
        found, is_lost = _row(team, same[0].case, options)
        for row in same:
            for of in ("us", "wrong", "calls", "refused", "host_us"):
                getattr(row, of).update(getattr(found, of))
        write()
        if is_lost:
            return
    others.close()


def report(rows: Sequence[KernelRow], found: Sequence[Target], copied: float) -> None:
    print(f"a plain copy moves {figure(copied)} · 10⁹ B/s, read and written")
    for size, part in dict.fromkeys((row.case["ranks"], row.case["part"]) for row in rows):
        chosen = [row for row in rows if (row.case["ranks"], row.case["part"]) == (size, part)]
        columns = [size_name(row.case["bytes"]) for row in chosen]
        title = f"{part}, {size} ranks in one process, {chosen[0].case['dtype']}"
        pairs = [
            (f"{how}, {APART}, {mode}", f"{FUSED}, {mode}") for how in ("push", "pull") for mode in ("graph", "eager")
        ]
        command_line.print_rows(
            title, chosen, lambda row: size_name(row.case["bytes"]), pairs if part == "norm" else ()
        )
        names = list(dict.fromkeys(name for row in chosen for name in row.us))
        for what, of in (("share of the copy's bandwidth", "share"), ("host, us", "host_us")):
            lines = [(name, [getattr(row, of).get(name) for row in chosen]) for name in names]
            command_line.print_table(f"{title}: {what}", columns, [line for line in lines if any(line[1])])
        for row in chosen:
            for name, why in row.refused.items():
                print(f"not measured: {name}, {size_name(row.case['bytes'])}: {why}")
    print("\ntargets; these times are lower bounds")
    for each in found:
        end = {True: "reached", False: "missed", None: "not measured"}[each.reached]
        name = f"{each.what}, {each.ranks} ranks, {size_name(each.bytes)}"
        print(f"{end:13}{name:36}{figure(each.found):>9}   {each.wanted}")


def picture(rows: Sequence[KernelRow]) -> str:
    panels = []
    for size, part in dict.fromkeys((row.case["ranks"], row.case["part"]) for row in rows):
        for mode in ("graph", "eager"):
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                if (row.case["ranks"], row.case["part"]) == (size, part):
                    for name, us in row.us.items():
                        if name.endswith(f", {mode}"):
                            lines.setdefault(name.removesuffix(f", {mode}"), []).append((row.case["bytes"], p50(us)))
            panels.append((f"{part}, {size} ranks in one process, {mode}", lines))
    return draw(panels, [*ALGORITHMS, FUSED])


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=range(2, 9), default=None)
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="bytes that a rank all-reduces")
    parser.add_argument("--norm-sizes", type=int, nargs="+", default=None, help="bytes of the rows that are normed")
    parser.add_argument("--hidden", type=int, default=None, help="elements of a row")
    parser.add_argument(
        "--together-from", type=int, default=None, help="smallest size in bytes at which all ranks also run at once"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES.values()), default="bfloat16")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--check", action="store_true", help="check the answers of eager calls, without times")
    parser.add_argument(
        "--emulate", action="store_true", help="run without a GPU, to test this script; its times mean nothing"
    )
    options = parser.parse_args(arguments)
    whole = {"ranks": [2, 4, 8], "sizes": SIZES, "norm_sizes": NORM_SIZES, "hidden": 4096, "together_from": 1 << 20}
    for name, value in {**whole, **(CHECKED if options.check else {}), **(EMULATED if options.emulate else {})}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if any(nbytes <= 0 or nbytes % 16 for nbytes in (*options.sizes, *options.norm_sizes)):
        parser.error("sizes are multiples of 16 bytes, so that every rank's tensor begins at one")
    return options


def machine_for(options: argparse.Namespace) -> Machine | str:
    if options.emulate:
        return EmulatedMachine()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: a queue for each stream
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # one rank needs none, and set-up may fail
    if not torch.cuda.is_available():
        what = "torch sees no CUDA device" if torch.version.cuda else "this torch was built without CUDA"
        return f"{what}; --emulate tries this script without one"
    try:
        return GpuMachine()
    except KernelError as problem:
        return str(problem)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    machine = machine_for(options)
    if isinstance(machine, str):
        print(f"the kernels can't run here: {machine}", file=sys.stderr)
        return 2
    with torch.inference_mode():
        copied = 1.0 if options.check else bandwidth(machine.device, 1 << 20 if options.emulate else COPY_BYTES, 10)
        rows: list[KernelRow] = []
        there = True

        def write() -> None:
            if not options.check:
                _write(machine, options, rows, copied)

        def keep(row: KernelRow) -> None:
            rows.append(row)
            write()

        for size in options.ranks:
            there = there and measured(machine, options, size, copied, keep)
        if there and not options.check:
            measure_others(machine, options, rows, write)
    if not options.check:
        _tell(options, rows, copied)
    return 1 if any(row.wrong for row in rows) else 0


def _found(options: argparse.Namespace, rows: Sequence[KernelRow]) -> list[Target]:
    found = targets(rows)
    if options.emulate:
        return [replace(each, found=None, reached=None) for each in found]
    return found


def _tell(options: argparse.Namespace, rows: Sequence[KernelRow], copied: float) -> None:
    report(rows, _found(options, rows), copied)
    if options.emulate:
        print("emulated on the CPU: no figure above means anything")


def _write(machine: Machine, options: argparse.Namespace, rows: Sequence[KernelRow], copied: float) -> None:
    found = _found(options, rows)
    if options.json:
        about = {
            **describe(machine.device),
            "copy_1e9_bytes_per_s": copied,
            "targets": [asdict(each) for each in found],
        }
        write_json(options.json, rows, {**command_line.recorded(options), **about})
    if options.svg:
        options.svg.write_text(picture(rows))


if __name__ == "__main__":
    sys.exit(main())
