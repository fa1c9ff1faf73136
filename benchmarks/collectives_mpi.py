"""The candidates of `collectives` that are MPI, through mpi4py, on buffers of torch tensors.

No module of this library is imported here: these processes have another environment (see `peers`).
Open MPI has no type for bf16 and adds int16 instead: as many bytes, and a cheaper sum; its answer is then not the one
of the others, and only that it moved and added the right bytes is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peers
import torch
from measure.tensors import Exchange, TensorTeam
from mpi4py import MPI  # type: ignore[import-not-found]
from torch import Tensor

TYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T}


def make(name: str, settings: dict[str, Any]) -> MpiTeam:
    return MpiTeam(next(mpi for mpi in peers.MPIS if mpi.name == name))


class MpiTeam(TensorTeam):
    """Ranks of one MPI library."""

    def __init__(self, mpi: peers.Mpi) -> None:
        torch.set_num_threads(1)
        self.mpi = mpi
        self.communicator = MPI.COMM_WORLD
        self.rank, self.size = self.communicator.rank, self.communicator.size

    def close(self) -> None:
        MPI.Finalize()

    def about(self) -> str:
        return MPI.Get_library_version().splitlines()[0]

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        kind, name = TYPES.get(dtype), self.mpi.name
        if dtype == torch.bfloat16:
            adds = operation in ("all_reduce", "reduce_scatter")
            if self.mpi.bfloat16 is not None:
                kind = MPI.Datatype.fromhandle(self.mpi.bfloat16)
            else:
                kind, name = MPI.INT16_T, name + (" (int16)" if adds else "")
        if kind is None:
            return {}
        return {name: Exchange(self._of_mpi(operation, shape, kind))}

    def _pattern(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self._adds_int16(dtype):
            return super()._pattern(rank, shape, dtype)
        return super()._pattern(rank, shape, torch.int16).view(dtype)

    def _answer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self._adds_int16(dtype):
            return super()._answer(shape, dtype)
        return super()._answer(shape, torch.int16).view(dtype)

    def _adds_int16(self, dtype: torch.dtype) -> bool:
        adds = self._operation in ("all_reduce", "reduce_scatter")
        return dtype == torch.bfloat16 and self.mpi.bfloat16 is None and adds

    def _of_mpi(self, operation: str, shape: tuple[int, ...], kind: Any) -> Callable[[Tensor], Tensor]:
        communicator, size = self.communicator, self.size
        buffers: dict[int, list[Any]] = {}

        def of(x: Tensor) -> list[Any]:
            """What mpi4py takes for a tensor; remembered, as a program of its own would."""
            found = buffers.get(x.data_ptr())
            if found is None:
                found = [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), x.numel(), kind]
                buffers[x.data_ptr()] = found
            return found

        def all_reduce(x: Tensor) -> Tensor:
            communicator.Allreduce(MPI.IN_PLACE, of(x))
            return x

        def broadcast(x: Tensor) -> Tensor:
            communicator.Bcast(of(x), 0)
            return x

        def barrier(x: Tensor) -> Tensor:
            communicator.Barrier()
            return x

        gathered: dict[str, Tensor] = {}  # outputs are kept as well: no allocation in the loop

        def output(x: Tensor, shape: tuple[int, ...]) -> Tensor:
            if "out" not in gathered:
                gathered["out"] = x.new_empty(shape)
            return gathered["out"]

        def all_gather(x: Tensor) -> Tensor:
            out = output(x, (size, *shape))
            communicator.Allgather(of(x), [of(out)[0], x.numel(), kind])
            return out.movedim(0, -2).reshape(*shape[:-1], size * shape[-1])

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

        return locals()[operation]
