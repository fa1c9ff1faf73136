"""Collectives of CPU tensors on one host: the routes of this library beside gloo by itself, interleaved in one run.

    python benchmarks/collectives.py --ranks 2 --json results.json

Every answer is checked before anything is timed. All ranks run the same number of calls; a round's time is that of the
slowest rank. Input is written and output read in every call, as in a model: a loop over cache-warm tensors that nobody
touches would flatter all of them. Reported are medians and p99 over rounds, algorithm and bus bandwidth in 10⁹ B/s, and
the ratio to gloo; quote ratios, the machine is never alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from parallel_state import launch

OPERATIONS = ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
SIZES = (1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)
BUS_FACTORS: dict[str, Callable[[int], float]] = {  # of the bytes that a rank holds, as nccl-tests count
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_reduce_": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}


def _of_group(group: ps.GroupCoordinator, operation: str) -> Callable[[Tensor], Tensor]:
    calls: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": group.all_reduce,
        "all_reduce_": group.all_reduce_,
        "all_gather": group.all_gather,
        "reduce_scatter": group.reduce_scatter,
        "broadcast": lambda x: group.broadcast(x, 0),
        "all_to_all": group.all_to_all,
        "barrier": lambda x: group.barrier() or x,
    }
    return calls[operation]


def _of_torch(operation: str, size: int) -> Callable[[Tensor], Tensor]:
    """torch.distributed itself over gloo, as somebody without this library would call it."""

    def all_reduce(x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    def all_reduce_(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(x: Tensor) -> Tensor:
        out = x.new_empty(size * x.numel())
        dist.distributed_c10d._get_default_group()._allgather_base(out, x).wait()
        return out

    def reduce_scatter(x: Tensor) -> Tensor:
        out = x.new_empty(x.numel() // size)
        dist.reduce_scatter_tensor(out, x)
        return out

    def broadcast(x: Tensor) -> Tensor:
        out = x.clone()
        dist.broadcast(out, 0)
        return out

    def all_to_all(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    def barrier(x: Tensor) -> Tensor:
        dist.barrier()
        return x

    return locals()[operation]


def _check(operation: str, call: Callable[[Tensor], Tensor], count: int, dtype: torch.dtype, group: Any) -> None:
    size, rank = group.world_size, group.rank_in_group
    inputs = [(torch.arange(count) % 7 + each).to(dtype) for each in range(size)]
    total = torch.stack(inputs).sum(0).to(dtype)
    rows = count // size
    expected = {
        "all_reduce": total,
        "all_reduce_": total,
        "all_gather": torch.cat(inputs),
        "reduce_scatter": total[rank * rows : (rank + 1) * rows],
        "broadcast": inputs[0],
        "all_to_all": torch.cat([x[rank * rows : (rank + 1) * rows] for x in inputs]),
        "barrier": inputs[rank],
    }[operation]
    found = call(inputs[rank].clone())
    if not torch.equal(found, expected):
        raise RuntimeError(f"{operation} of {count} × {dtype} is wrong on rank {rank}")


def _rounds(call: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> float:
    """Seconds a call, with the input written before and the output read after each."""
    started = time.perf_counter()
    for _ in range(calls):
        x.fill_(1.0)
        y = call(x)
        y.view(-1)[:: max(1, 64 // y.itemsize)].sum()
    return (time.perf_counter() - started) / calls


def _measure(operations: tuple[str, ...], sizes: tuple[int, ...], dtype: torch.dtype, rounds: int) -> list[Any]:
    torch.set_num_threads(1)
    ps.init_distributed_environment(backend="gloo")
    size = dist.get_world_size()
    ps.initialize_model_parallel(size)
    ours = ps.get_tp_group()
    os.environ["PARALLEL_STATE_SHARED_MEMORY"] = "off"
    over_gloo = ps.create_parallel_groups(ps.get_world_group(), {"tp": size}).tp
    found = []
    with torch.inference_mode():
        for operation in operations:
            for size_bytes in sizes if operation != "barrier" else (0,):
                count = max(size, size_bytes // dtype.itemsize // size * size)
                candidates = {
                    "parallel_state": _of_group(ours, operation),
                    "parallel_state over gloo": _of_group(over_gloo, operation),
                    "torch.distributed gloo": _of_torch(operation, size),
                }
                for call in candidates.values():
                    _check(operation, call, count, dtype, ours)
                x = torch.ones(count, dtype=dtype)
                samples: dict[str, list[float]] = {name: [] for name in candidates}
                calls = max(2, min(100, (4 << 20) // max(1, size_bytes)))
                for round_ in range(rounds + 1):
                    for name, call in candidates.items():
                        ours.barrier()
                        few = calls if name == "parallel_state" else max(2, calls // 10)
                        mine = _rounds(call, x, few)
                        slowest = ours.all_reduce(torch.tensor([mine], dtype=torch.float64), "max").item()
                        if round_:  # the first warms up
                            samples[name].append(slowest * 1e6)
                found.append({"operation": operation, "bytes": count * dtype.itemsize, "us": samples})
    return [found, ours.explain()]


def _machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "commit": commit.strip() or "unknown",
        "load": os.getloadavg()[0],
    }


def _print(found: list[Any], ranks: int) -> None:
    columns = f"{'operation':15} {'bytes':>10} {'p50 us':>10} {'p99 us':>10} {'algbw':>7} {'busbw':>7}"
    print(columns + "   gloo / ours   torch / ours")
    for row in found:
        medians = {name: statistics.median(samples) for name, samples in row["us"].items()}
        samples = sorted(row["us"]["parallel_state"])
        ours = medians["parallel_state"]
        algbw = row["bytes"] / ours / 1e3
        bus = algbw * BUS_FACTORS.get(row["operation"], lambda n: 0.0)(ranks)
        print(
            f"{row['operation']:15} {row['bytes']:>10} {ours:>10.1f} {samples[int(len(samples) * 0.99)]:>10.1f} "
            f"{algbw:>7.2f} {bus:>7.2f}   {medians['parallel_state over gloo'] / ours:>11.1f}   "
            f"{medians['torch.distributed gloo'] / ours:>12.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes that a rank holds")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    arguments = (tuple(options.operations), tuple(options.sizes), getattr(torch, options.dtype), options.rounds)
    (found, route), *_ = launch(_measure, options.ranks, args=arguments)
    print(route)
    _print(found, options.ranks)
    if options.json:
        content = {"machine": _machine(), "ranks": options.ranks, "dtype": options.dtype, "samples": found}
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
