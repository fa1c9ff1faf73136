"""Checks one MPI collective between hosts, then times it. `hosts.py` starts each rank by mpiexec: hosts_mpi.py
OPERATION ELEMENTS ROUNDS CALLS CORES BFLOAT16.

CORES lists each host's cores in rank order, such as `0,1/2,3`. BFLOAT16 is the handle of the MPI's bf16 type; with 0
the elements are 16-bit integers. Rank 0 prints each round's slowest time in microseconds, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def calls_of(api: Any, communicator: Any, kind: Any, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    size, rank = communicator.size, communicator.rank

    def of(x: Tensor, ranks: int = 1) -> list[object]:
        return [api.buffer.fromaddress(x.data_ptr(), x.nbytes), x.numel() // ranks, kind]

    def into(elements: int, call: Callable[[Tensor], None]) -> Tensor:
        out = torch.empty(elements, dtype=dtype)
        call(out)
        return out

    def in_place(x: Tensor) -> Tensor:
        communicator.Allreduce(api.IN_PLACE, of(x))
        return x

    def broadcast(x: Tensor) -> Tensor:
        y = x.clone() if rank == 0 else torch.empty_like(x)
        communicator.Bcast(of(y), 0)
        return y

    def ping(x: Tensor) -> Tensor:
        y, last = torch.empty_like(x), size - 1
        if rank == 0:
            communicator.Send(of(x), last)
            communicator.Recv(of(y), last)
        elif rank == last:
            communicator.Recv(of(y), 0)
            communicator.Send(of(y), 0)
        return y if rank == 0 else x

    def barrier(x: Tensor) -> Tensor:
        communicator.Barrier()
        return x

    def gather(x: Tensor) -> Tensor:
        out = torch.empty(size * len(x) if rank == 0 else 0, dtype=x.dtype)
        communicator.Gather(of(x), of(out, size) if rank == 0 else None, 0)
        return out

    return {
        "all_reduce": lambda x: into(len(x), lambda out: communicator.Allreduce(of(x), of(out))),
        "all_reduce_": in_place,
        "all_gather": lambda x: into(size * len(x), lambda out: communicator.Allgather(of(x), of(out, size))),
        "reduce_scatter": lambda x: into(
            len(x) // size, lambda out: communicator.Reduce_scatter_block(of(x, size), of(out))
        ),
        "broadcast": broadcast,
        "all_to_all": lambda x: into(len(x), lambda out: communicator.Alltoall(of(x, size), of(out, size))),
        "gather": gather,
        "scatter": lambda x: into(
            len(x) // size, lambda out: communicator.Scatter(of(x, size) if rank == 0 else None, of(out), 0)
        ),
        "send": ping,
        "barrier": barrier,
    }  # fmt: skip


def expected(operation: str, elements: int, size: int, rank: int, dtype: torch.dtype) -> Tensor:
    inputs = [input_of(each, elements, dtype) for each in range(size)]
    total, mine = torch.stack(inputs).sum(0), slice(rank * (elements // size), (rank + 1) * (elements // size))
    return {
        "all_reduce": total,
        "all_reduce_": total,
        "all_gather": torch.cat(inputs),
        "reduce_scatter": total[mine],
        "broadcast": inputs[0],
        "all_to_all": torch.cat([x[mine] for x in inputs]),
        "gather": torch.cat(inputs) if rank == 0 else torch.empty(0),
        "scatter": inputs[0][mine],
    }.get(operation, inputs[rank]).to(dtype)


def input_of(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(elements) % 7 + rank).to(dtype)


def main() -> None:
    from mpi4py import MPI  # calls MPI_Init; hosts.py imports this module without it

    operation, *numbers, cores, bfloat16 = sys.argv[1:]
    elements, rounds, calls = map(int, numbers)
    communicator = MPI.COMM_WORLD
    size, rank = communicator.size, communicator.rank
    hosts = [[int(core) for core in each.split(",")] for each in cores.split("/")]
    os.sched_setaffinity(0, hosts[rank * len(hosts) // size])
    torch.set_num_threads(1)
    handle = int(bfloat16, 0)
    dtype, kind = (torch.bfloat16, MPI.Datatype.fromhandle(handle)) if handle else (torch.int16, MPI.INT16_T)
    call = calls_of(MPI, communicator, kind, dtype)[operation]
    found = call(input_of(rank, elements, dtype))
    if not torch.equal(found, expected(operation, elements, size, rank, dtype)):
        raise RuntimeError(f"{operation} of {elements} × {dtype} is wrong on rank {rank}")
    samples = []
    for _ in range(rounds + 1):
        communicator.Barrier()
        x = torch.ones(elements, dtype=dtype)
        started = time.perf_counter()
        for _ in range(calls):
            x.fill_(1)
            call(x)[::32].sum()
        mine = (time.perf_counter() - started) / calls
        samples.append(communicator.allreduce(mine, MPI.MAX) * 1e6)
    if rank == 0:
        print("SAMPLES", json.dumps(samples[1:]), flush=True)


if __name__ == "__main__":
    main()
