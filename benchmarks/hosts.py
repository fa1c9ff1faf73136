"""Compares calls between hosts with gloo and MPI: collectives, sends, objects, tensor dicts.

    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --json results.json     # as root
    python benchmarks/hosts.py --ranks-per-host 1 --mpis MPICH "Intel MPI"     # fetched by `harness/peers.py setup`

The hosts are network namespaces of this machine (`tests/hosts.py`), each with its share of the cores. Their network is
as fast as these cores, unless `--rate` limits each host's sending rate. The slowest rank's time counts; `us` is the
median of rounds, `ratio` the median of gloo's time divided by ours. `sent` and `packets` are bytes and packets that
host 0 sends in one call.

`--mpis` adds a column per MPI: its median divided by ours. Each MPI runs as its own job (`hosts_mpi.py`), after the
others. Open MPI has no bfloat16 and sums int16, which is cheaper. Intel MPI needs libfabric (Debian: libfabric1).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hosts_mpi
import torch
import torch.distributed as dist
from harness import peers
from torch import Tensor

import parallel_state as ps
from parallel_state.tools.bench.collectives import ours_by_method, ping_pong, torch_by_call
from parallel_state.tools.bench.report import circumstances
from parallel_state.tools.bench.rounds import OPERATIONS as COLLECTIVES
from tests.clusters.cluster import Cluster
from tests.hosts import Host, HostRanks, Hosts, cores_of_each, problem

SIZES = (8 << 10, 1 << 20, 16 << 20)
WAYS = ("ours", "gloo")
_COUNTED_CALLS = 4


_SO_MAX_PACING_RATE = 47
_MEGABYTES_PER_S = {"mbit": 1 / 8, "gbit": 1000 / 8}


def _pace(rate: str) -> None:
    unit = next(unit for unit in _MEGABYTES_PER_S if rate.endswith(unit))
    limit = int(float(rate.removesuffix(unit)) * _MEGABYTES_PER_S[unit] * 1e6)
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6):
                found.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, limit)


def _route() -> str:
    return ps.get_tp_group().explain()


def _objects(x: Tensor) -> dict[str, Any]:
    return {f"request {number}": list(range(number, number + 20)) for number in range(16)} | {"rows": len(x)}


def _ours() -> dict[str, Callable[[Tensor], Any]]:
    group = ps.get_tp_group()
    first, last = group.is_first_rank, group.world_size - 1

    def ping_dict(x: Tensor) -> Tensor:
        if first:
            group.send_tensor_dict({"hidden": x, "residual": x}, last)
            return group.recv_tensor_dict(last)["hidden"]
        if group.is_last_rank:
            group.send_tensor_dict(group.recv_tensor_dict(0), 0)
        return x

    return {
        **{operation: ours_by_method(group, operation)[0] for operation in COLLECTIVES},
        "all_reduce_": group.all_reduce_,
        "gather": lambda x: group.gather(x, 0, 0),
        "scatter": lambda x: group.scatter(
            x if first else None, 0, 0, size=[len(x) // group.world_size], dtype=x.dtype
        ),
        "send": ping_pong(group.rank_in_group, group.send, lambda x, src: group.recv(x.shape, x.dtype, src), last),
        "broadcast_object": lambda x: group.broadcast_object(_objects(x) if first else None, 0),
        "broadcast_tensor_dict": lambda x: group.broadcast_tensor_dict({"hidden": x} if first else None, 0),
        "send_tensor_dict": ping_dict,
    }


def _gloos() -> dict[str, Callable[[Tensor], Any]]:
    if not _GLOO:
        _GLOO.append(dist.new_group(backend="gloo"))
    group, size, rank = _GLOO[0], dist.get_world_size(), dist.get_rank()
    whole = {operation: torch_by_call(operation, group, size) for operation in COLLECTIVES}

    def gather(x: Tensor) -> Tensor | None:
        out = x.new_empty(size, len(x)) if rank == 0 else None
        dist.gather(x, None if out is None else list(out), 0, group=group)
        return None if out is None else out.view(-1)

    def scatter(x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // size)
        dist.scatter(out, list(x.chunk(size)) if rank == 0 else None, 0, group=group)
        return out

    def receive(x: Tensor, src: int) -> Tensor:
        out = torch.empty_like(x)
        dist.recv(out, src, group=group)
        return out

    def broadcast_objects(obj: object) -> Any:
        objects = [obj]
        dist.broadcast_object_list(objects, 0, group=group)
        return objects[0]

    def broadcast_dict(x: Tensor) -> dict[str, Tensor]:
        shape, dtype = broadcast_objects((x.shape, x.dtype) if rank == 0 else None)
        out = x if rank == 0 else torch.empty(shape, dtype=dtype)
        dist.broadcast(out, 0, group=group)
        return {"hidden": out}

    def ping_dict(x: Tensor) -> Tensor:
        if rank not in (0, size - 1):
            return x
        tensors = {"hidden": x, "residual": x}
        for at in (0, size - 1):
            objects = [{name: (each.shape, each.dtype) for name, each in tensors.items()} if rank == at else None]
            if rank == at:
                dist.send_object_list(objects, size - 1 - rank, group=group)
            else:
                dist.recv_object_list(objects, size - 1 - rank, group=group)
                tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in objects[0].items()}
            for each in tensors.values():
                (dist.send if rank == at else dist.recv)(each, size - 1 - rank, group=group)
        return tensors["hidden"] if rank == 0 else x

    return {
        **whole,
        "all_reduce": lambda x: whole["all_reduce"](x.clone()),
        "all_reduce_": whole["all_reduce"],
        "broadcast": lambda x: whole["broadcast"](x.clone()),
        "gather": gather,
        "scatter": scatter,
        "send": ping_pong(rank, lambda x, dst: dist.send(x, dst, group=group), receive, size - 1),
        "broadcast_object": lambda x: broadcast_objects(_objects(x) if rank == 0 else None),
        "broadcast_tensor_dict": broadcast_dict,
        "send_tensor_dict": ping_dict,
    }


_GLOO: list[Any] = []
OPERATIONS = (
    "all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather", "scatter", "send",
    "barrier", "broadcast_object", "broadcast_tensor_dict", "send_tensor_dict",
)  # fmt: skip
_WITHOUT_SIZE = ("barrier", "broadcast_object")


def _call(operation: str, way: str) -> Callable[[Tensor], Any]:
    return (_ours if way == "ours" else _gloos)()[operation]


def _check(operation: str, count: int, dtype: torch.dtype) -> None:
    size, rank = ps.get_tp_group().world_size, ps.get_tp_group().rank_in_group
    first = hosts_mpi.input_of(0, count, dtype)
    expected: Any = {
        "gather": hosts_mpi.expected("gather", count, size, 0, dtype) if rank == 0 else None,
        "send": hosts_mpi.input_of(rank if 0 < rank < size - 1 else 0, count, dtype),
        "broadcast_object": _objects(first),
        "broadcast_tensor_dict": {"hidden": first},
    }.get(operation, hosts_mpi.expected(operation, count, size, rank, dtype))
    for way in WAYS:
        found = _call(operation, way)(hosts_mpi.input_of(rank, count, dtype))
        if isinstance(expected, dict) and "hidden" in expected:
            same = torch.equal(found["hidden"], expected["hidden"])
        else:
            same = torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
        if not same:
            raise RuntimeError(f"{way} {operation} of {count} × {dtype} is wrong on rank {rank}")


def _repeat(operation: str, way: str, count: int, dtype: torch.dtype, calls: int) -> float:
    call, x = _call(operation, way), torch.ones(count, dtype=dtype)
    started = time.perf_counter()
    for _ in range(calls):
        x.fill_(1.0)
        y = call(x)
        if isinstance(y, Tensor):
            y.view(-1)[:: max(1, 64 // y.itemsize)].sum()
    return (time.perf_counter() - started) / calls


def _measure(
    operation: str, count: int, dtype: torch.dtype, rounds: int, calls: int, rate: str | None
) -> dict[str, list[float]]:
    if rate is not None:
        for way in WAYS:
            _call(operation, way)(torch.ones(count, dtype=dtype))
        _pace(rate)
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    with torch.inference_mode():
        for round_ in range(rounds + 1):
            for way in WAYS:
                ps.get_tp_group().barrier()
                mine = _repeat(operation, way, count, dtype, calls)
                slowest = ps.get_tp_group().all_reduce(torch.tensor([mine], dtype=torch.float64), "max").item()
                if round_:
                    samples[way].append(slowest * 1e6)
    return samples


def _sent(
    hosts: Hosts, ranks: HostRanks, operation: str, way: str, count: int, dtype: torch.dtype
) -> tuple[float, float]:
    found = []
    for calls in (1, 1 + _COUNTED_CALLS):
        before = hosts.sent(0)
        ranks.run(_repeat, operation, way, count, dtype, calls, tp=ranks.world_size)
        found.append([after - start for after, start in zip(hosts.sent(0), before, strict=True)])
    few, many = found
    return (many[0] - few[0]) / _COUNTED_CALLS, (many[1] - few[1]) / _COUNTED_CALLS


_OF_MPI = (
    "all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather", "scatter", "send",
    "barrier",
)  # fmt: skip
_STARTERS = ("MPICH", "Intel MPI", "Open MPI")
_MPI_OVER_TCP = {"FI_PROVIDER": "tcp", "I_MPI_OFI_PROVIDER": "tcp", "I_MPI_FABRICS": "shm:ofi", "I_MPI_PIN": "0"}
_YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1", "I_MPI_THREAD_YIELD": "2"}
_OPEN_MPI_AS_ROOT = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
_MPI_DEADLINE_S = 240.0


def _mpi_command(name: str, programs: Path, cluster: Cluster, ranks_per_host: int) -> list[str]:
    ranks = str(len(cluster.hosts) * ranks_per_host)
    if name == "Open MPI":
        places = ",".join(f"{host}:{ranks_per_host}" for host in cluster.names)
        handed_on = [word for each in ("PYTHONPATH", *cluster.common) for word in ("-x", each)]
        return [
            str(programs / "mpirun"), "--prtemca", "plm_ssh_agent", str(cluster.agent), "--host", places, "-n", ranks,
            "--bind-to", "none", *handed_on, str(programs / "python"),
        ]  # fmt: skip
    launcher = "-launcher" if name == "MPICH" else "-bootstrap"
    return [
        str(programs / "mpiexec"), launcher, "ssh", f"{launcher}-exec", str(cluster.agent),
        "-hosts", ",".join(cluster.names), "-n", ranks, "-ppn", str(ranks_per_host), str(programs / "python"),
    ]  # fmt: skip


def _measure_mpi(
    name: str, cluster: Cluster, ranks_per_host: int, operation: str, count: int, rounds: int, calls: int
) -> list[float]:
    mpi = next(each for each in peers.MPIS if each.name == name)
    programs = peers.DEFAULT / mpi.folder / "bin"
    cores = "/".join(",".join(map(str, cpus)) for cpus in cores_of_each(len(cluster.hosts)))
    command = _mpi_command(name, programs, cluster, ranks_per_host)
    script = [str(Path(__file__).with_name("hosts_mpi.py")), operation, str(count), str(rounds), str(calls), cores]
    variables = {**_MPI_OVER_TCP, **_OPEN_MPI_AS_ROOT, **_YIELDING}
    ended = cluster.run(0, [*command, *script, hex(mpi.bfloat16 or 0)], _MPI_DEADLINE_S, **variables)
    samples = [line for line in ended.output.splitlines() if line.startswith("SAMPLES ")]
    if ended.code or not samples:
        raise RuntimeError(f"{name}'s {operation} ended with {ended.code}:\n{ended.output[-3000:]}")
    return json.loads(samples[0].removeprefix("SAMPLES "))


def _rows(options: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    dtype = getattr(torch, options.dtype)
    size = options.hosts * options.ranks_per_host
    found = []
    placement = [rank // options.ranks_per_host for rank in range(size)]
    machines = [Host(cpus=cpus) for cpus in cores_of_each(options.hosts)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), machines) as hosts,
        hosts.ranks(placement, PARALLEL_STATE_CONNECTIONS=str(options.connections)) as ranks,
    ):
        route = ranks.run(_route, tp=size)[0]
        for host in range(options.hosts):
            hosts.limit(host, options.rate)
        for operation in options.operations:
            for size_bytes in (0,) if operation in _WITHOUT_SIZE else options.sizes:
                count = max(size, size_bytes // dtype.itemsize // size * size)
                ranks.run(_check, operation, count, dtype, tp=size)
                counts = {way: _sent(hosts, ranks, operation, way, count, dtype) for way in WAYS}
                sent = {way: size for way, (size, _) in counts.items()}
                packets = {way: number for way, (_, number) in counts.items()}
                calls = max(1, min(20, (1 << 20) // max(1, size_bytes)))
                how = options.rounds, calls, options.rate_of_connections
                us = ranks.run(_measure, operation, count, dtype, *how, tp=size, timeout_s=300.0)[0]
                for mpi in options.mpis if operation in _OF_MPI else ():
                    job = (options.ranks_per_host, operation, count, options.rounds, calls)
                    us[mpi] = _measure_mpi(mpi, hosts, *job)
                found.append(
                    {
                        "operation": operation,
                        "bytes": count * dtype.itemsize,
                        "us": us,
                        "sent": sent,
                        "packets": packets,
                    }
                )
                _print(found[-1])
    return route, found


def _print(row: dict[str, Any]) -> None:
    ours, gloo = (statistics.median(row["us"][way]) for way in WAYS)
    ratio = statistics.median(theirs / own for own, theirs in zip(*(row["us"][way] for way in WAYS), strict=True))
    sent, packets = row["sent"], row["packets"]
    print(
        f"{row['operation']:22} {row['bytes']:>9} {ours:>9.0f} {gloo:>9.0f} {ratio:>6.2f}   {sent['ours']:>11.0f} "
        f"{sent['gloo']:>11.0f} {sent['ours'] / max(1.0, sent['gloo']):>5.2f}   {packets['ours']:>7.1f} "
        f"{packets['gloo']:>7.1f}"
        + "".join(f" {mpi} {statistics.median(row['us'][mpi]) / ours:.2f}" for mpi in row["us"] if mpi not in WAYS),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--rate", help="maximum sending rate of a host, such as 1gbit; default: unlimited")
    parser.add_argument("--connections", type=int, default=1, help="our connections per pair of ranks")
    parser.add_argument("--rate-of-connections", help="maximum rate of each connection except MPIs', such as 500mbit")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes of a rank's tensor")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mpis", nargs="+", choices=_STARTERS, default=(), help="MPIs to add; for bfloat16 only")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reason = problem()
    if reason is not None:
        sys.exit(f"no hosts can be made here: {reason}")
    if not (options.rate_of_connections or "1gbit").endswith(tuple(_MEGABYTES_PER_S)):
        parser.error("--rate-of-connections must end in mbit or gbit, such as 500mbit")
    if options.mpis and options.dtype != "bfloat16":
        parser.error("--mpis are measured with --dtype bfloat16, the default")
    print(
        f"{'operation':22} {'bytes':>9} {'us':>9} {'gloo us':>9} {'ratio':>6}   {'sent':>11} {'gloo sent':>11} "
        f"{'':5}   {'packets':>7} {'gloo':>7}"
    )
    route, found = _rows(options)
    print(route)
    if options.json:
        facts = {
            name: getattr(options, name)
            for name in ("hosts", "ranks_per_host", "rate", "connections", "rate_of_connections", "dtype")
        }
        options.json.write_text(json.dumps({**facts, **circumstances(), "samples": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
