"""Collectives of a group over several hosts: shared memory within them and gloo between, beside gloo between all ranks.

    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --json results.json     # as root

The hosts are namespaces of this machine (`tests/hosts.py`), each with its share of the cores: their network is as fast
as these cores, unless `--rate` limits what each of them sends. Every answer is checked before anything is timed; the
two are interleaved, a round's time is that of the slowest rank, and the medians are over rounds. `sent` is what host 0
sends in one call, by the counters of its interface. Quote ratios: the cores do the network's work, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import parallel_state as ps
from tests.hosts import Host, HostRanks, Hosts, cores_of_each, problem

OPERATIONS = ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "broadcast", "barrier")
SIZES = (8 << 10, 1 << 20, 16 << 20)
WAYS = ("hierarchical", "flat")
_COUNTED_CALLS = 4


def _route() -> str:
    return ps.get_tp_group().explain()


def _group(way: str) -> ps.GroupCoordinator:
    """The tensor-parallel group, or one like it without shared memory, which is made once."""
    if way == "hierarchical":
        return ps.get_tp_group()
    if not _FLAT:
        os.environ["PARALLEL_STATE_SHARED_MEMORY"] = "off"
        _FLAT.append(ps.create_parallel_groups(ps.get_world_group(), {"tp": ps.get_tp_group().world_size}).tp)
        del os.environ["PARALLEL_STATE_SHARED_MEMORY"]
    return _FLAT[0]


_FLAT: list[ps.GroupCoordinator] = []


def _call(operation: str, way: str) -> Callable[[Tensor], Tensor]:
    group = _group(way)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "broadcast": lambda x: group.broadcast(x, 0),
        "barrier": lambda x: group.barrier() or x,
    }
    return calls.get(operation) or getattr(group, operation)


def _check(operation: str, count: int, dtype: torch.dtype) -> None:
    size, rank = ps.get_tp_group().world_size, ps.get_tp_group().rank_in_group
    inputs = [(torch.arange(count) % 7 + each).to(dtype) for each in range(size)]
    total = torch.stack(inputs).sum(0).to(dtype)
    rows = count // size
    expected = {
        "all_reduce": total,
        "all_reduce_": total,
        "all_gather": torch.cat(inputs),
        "reduce_scatter": total[rank * rows : (rank + 1) * rows],
        "broadcast": inputs[0],
        "barrier": inputs[rank],
    }[operation]
    for way in WAYS:
        if not torch.equal(_call(operation, way)(inputs[rank].clone()), expected):
            raise RuntimeError(f"{way} {operation} of {count} × {dtype} is wrong on rank {rank}")


def _repeat(operation: str, way: str, count: int, dtype: torch.dtype, calls: int) -> float:
    """Seconds a call, with the input written before and the output read after each."""
    call, x = _call(operation, way), torch.ones(count, dtype=dtype)
    started = time.perf_counter()
    for _ in range(calls):
        x.fill_(1.0)
        y = call(x)
        y.view(-1)[:: max(1, 64 // y.itemsize)].sum()
    return (time.perf_counter() - started) / calls


def _measure(operation: str, count: int, dtype: torch.dtype, rounds: int, calls: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    with torch.inference_mode():
        for round_ in range(rounds + 1):
            for way in WAYS:
                ps.get_tp_group().barrier()
                mine = _repeat(operation, way, count, dtype, calls)
                slowest = ps.get_tp_group().all_reduce(torch.tensor([mine], dtype=torch.float64), "max").item()
                if round_:  # the first warms up
                    samples[way].append(slowest * 1e6)
    return samples


def _sent(hosts: Hosts, ranks: HostRanks, operation: str, way: str, count: int, dtype: torch.dtype) -> float:
    before = hosts.sent_bytes(0)
    ranks.run(_repeat, operation, way, count, dtype, _COUNTED_CALLS, tp=ranks.world_size)
    return (hosts.sent_bytes(0) - before) / _COUNTED_CALLS


def _rows(options: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    dtype = getattr(torch, options.dtype)
    size = options.hosts * options.ranks_per_host
    found = []
    placement = [rank // options.ranks_per_host for rank in range(size)]
    with Hosts([Host(cpus=cpus) for cpus in cores_of_each(options.hosts)]) as hosts, hosts.ranks(placement) as ranks:
        route = ranks.run(_route, tp=size)[0]
        for host in range(options.hosts):
            hosts.limit(host, options.rate)
        for operation in options.operations:
            for size_bytes in options.sizes if operation != "barrier" else (0,):
                count = max(size, size_bytes // dtype.itemsize // size * size)
                ranks.run(_check, operation, count, dtype, tp=size)
                sent = {way: _sent(hosts, ranks, operation, way, count, dtype) for way in WAYS}
                calls = max(1, min(20, (1 << 20) // max(1, size_bytes)))
                us = ranks.run(_measure, operation, count, dtype, options.rounds, calls, tp=size, timeout_s=300.0)[0]
                found.append({"operation": operation, "bytes": count * dtype.itemsize, "us": us, "sent": sent})
                _print(found[-1])
    return route, found


def _print(row: dict[str, Any]) -> None:
    ours, flat = (statistics.median(row["us"][way]) for way in WAYS)
    print(
        f"{row['operation']:15} {row['bytes']:>10} {ours:>10.0f} {flat:>10.0f} {flat / ours:>6.2f}   "
        f"{row['sent']['hierarchical']:>12.0f} {row['sent']['flat']:>12.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--rate", help="what a host may send, such as 1gbit; default: what the machine can")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes that a rank holds")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reason = problem()
    if reason is not None:
        sys.exit(f"no hosts can be made here: {reason}")
    print(f"{'operation':15} {'bytes':>10} {'us':>10} {'flat us':>10} {'ratio':>6}   {'sent':>12} {'flat sent':>12}")
    route, found = _rows(options)
    print(route)
    if options.json:
        facts = {name: getattr(options, name) for name in ("hosts", "ranks_per_host", "rate", "dtype")}
        machine = {"cores": len(os.sched_getaffinity(0)), "processor": platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**facts, "machine": machine, "samples": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
