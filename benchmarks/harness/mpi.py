"""Runs MPI collectives through mpi4py, on buffers of torch tensors. Open MPI has no bf16 type, so it adds int16: a
cheaper sum with a different result. The check then only proves that the right bytes were added.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness import peers
from parallel_state.tools.bench.collectives import Exchange, TensorTeam, beside, ping_pong
from parallel_state.tools.bench.rounds import PING_PONG

TYPES = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int32: "INT32_T", torch.int64: "INT64_T"}


def make(name: str, settings: dict[str, Any]) -> MpiTeam:
    return MpiTeam(next(mpi for mpi in (*peers.MPIS, *peers.OWN_MPIS) if mpi.name == name))


class MpiTeam(TensorTeam):
    def __init__(self, mpi: peers.Mpi) -> None:
        torch.set_num_threads(1)
        self.mpi, self.api = mpi, importlib.import_module("mpi4py.MPI")  # the import calls MPI_Init
        self.communicator = self.api.COMM_WORLD
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self.communicator.Barrier()

    def close(self) -> None:
        self.api.Finalize()

    def about(self) -> str:
        return self.api.Get_library_version().splitlines()[0]

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        kind, name = getattr(self.api, TYPES.get(dtype, ""), None), self.mpi.name
        if dtype == torch.bfloat16:
            adds = operation in ("all_reduce", "reduce_scatter")
            if self.mpi.bfloat16 is not None:
                kind = self.api.Datatype.fromhandle(self.mpi.bfloat16)
            else:
                kind, name = self.api.INT16_T, name + (" (int16)" if adds else "")
        if kind is None:
            return {}
        return {name: Exchange(self._of_mpi(operation, shape, kind))}

    def added_as(self, dtype: torch.dtype) -> torch.dtype:
        adds = self._operation in ("all_reduce", "reduce_scatter")
        return torch.int16 if dtype == torch.bfloat16 and self.mpi.bfloat16 is None and adds else dtype

    def _of_mpi(self, operation: str, shape: tuple[int, ...], kind: Any) -> Callable[[Tensor], Tensor]:
        api, communicator, size = self.api, self.communicator, self.size
        buffers: dict[int, list[Any]] = {}

        def of(x: Tensor) -> list[Any]:
            found = buffers.get(x.data_ptr())
            if found is None:
                found = [api.buffer.fromaddress(x.data_ptr(), x.nbytes), x.numel(), kind]
                buffers[x.data_ptr()] = found
            return found

        def all_reduce(x: Tensor) -> Tensor:
            communicator.Allreduce(api.IN_PLACE, of(x))
            return x

        def broadcast(x: Tensor) -> Tensor:
            communicator.Bcast(of(x), 0)
            return x

        def barrier(x: Tensor) -> Tensor:
            communicator.Barrier()
            return x

        gathered: dict[str, Tensor] = {}

        def output(x: Tensor, shape: tuple[int, ...]) -> Tensor:
            if "out" not in gathered:
                gathered["out"] = x.new_empty(shape)
            return gathered["out"]

        def all_gather(x: Tensor) -> Tensor:
            out = output(x, (size, *shape))
            communicator.Allgather(of(x), [of(out)[0], x.numel(), kind])
            return beside(out, size, shape)

        def reduce_scatter(x: Tensor) -> Tensor:
            out = output(x, (x.numel() // size,))
            whole = of(x)
            communicator.Reduce_scatter_block([whole[0], out.numel(), kind], of(out))
            return out

        def all_to_all(x: Tensor) -> Tensor:
            out = output(x, tuple(x.shape))
            whole, there = of(x), of(out)
            communicator.Alltoall([whole[0], x.numel() // size, kind], [there[0], x.numel() // size, kind])
            return out

        def receive(x: Tensor, src: int) -> Tensor:
            out = output(x, tuple(x.shape))
            communicator.Recv(of(out), src)
            return out

        if operation == PING_PONG:
            return ping_pong(communicator.rank, lambda x, dst: communicator.Send(of(x), dst), receive)
        call: Callable[[Tensor], Tensor] = locals()[operation]
        return call
