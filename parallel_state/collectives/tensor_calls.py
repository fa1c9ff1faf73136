"""The tensor collectives of a group: each checks its call, ends here for one rank, and goes on as a registered op.

Common to all: every rank of the group calls it, in the same order, with tensors that fit; `src` and `dst` are ranks in
the group; inputs of any strides, also empty, are left unchanged and results are new contiguous tensors (for a group of
one rank: the input itself). Wrong arguments raise InvalidArgumentError before anything is sent; a tensor that no
communicator carries raises UnsupportedError; what happens on the way raises a CommunicationError.
All of it works under torch.compile(fullgraph=True). Gradients: see `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from device_communicators.errors import InvalidArgumentError, RemoteError
from device_communicators.host_calls import host_call
from device_communicators.routing.communicator import REDUCE_OPS, GroupContext
from device_communicators.routing.route import Route
from parallel_state.collectives import (
    checks,
    ops,  # noqa: F401  (registers torch.ops.parallel_state)
)

_OPS = torch.ops.parallel_state
_ALL_REDUCE = _OPS.all_reduce.default
"""The overload itself, which a look-up by `_OPS.all_reduce(…)` would find again in each call."""


class TensorCollectives:
    """The tensor half of `GroupCoordinator`."""

    context: GroupContext
    _key: str
    world_size: int
    rank_in_group: int
    device: torch.device
    _token: Tensor
    _destroyed: bool
    route: Route

    def _ends_here(self) -> bool:
        """Whether the call has nobody to go to: in a group of one rank."""
        if self.world_size > 1:
            return False
        if self._destroyed:
            self.route.check_usable()  # raises
        return True

    def all_reduce(self, x: Tensor, op: checks.ReduceOp = "sum") -> Tensor:
        """Reduces `x` over all ranks; every rank gets the same new tensor.

        `op`: sum, avg (floating point), max, min or product; on bool tensors sum and max mean or, min and product and.
        torch's `ReduceOp.SUM` and its like are taken, too.
        A model layer's gradient wants `regions.reduce_from_tensor_model_parallel_region`: see there.
        """
        checks.check_tensor(self.context, "all_reduce", x)
        if op.__class__ is not str or op not in REDUCE_OPS:  # looked at here: a call of a function is 0.1 us of three
            op = checks.check_reduce_op(self.context, "all_reduce", op)
        if self.world_size == 1 and self._ends_here():
            return x
        return _ALL_REDUCE(x, self._token, op, self._key)

    def all_reduce_(self, x: Tensor, op: checks.ReduceOp = "sum") -> Tensor:
        """As all_reduce, in place; returns `x`."""
        checks.check_tensor(self.context, "all_reduce_", x)
        checks.check_writable(self.context, "all_reduce_", x)
        op = checks.check_reduce_op(self.context, "all_reduce_", op)
        if not self._ends_here():
            _OPS.all_reduce_(x, self._token, op, self._key)
        return x

    def all_gather(self, x: Tensor, dim: int = -1, *, out: Tensor | None = None) -> Tensor:
        """Concatenates the ranks' `x` along `dim`, in rank order: `[…, d, …]` to `[…, world_size · d, …]`.

        A 0-d tensor becomes `[world_size]`. All ranks' shapes must be equal; see all_gatherv for others. With `out`, a
        tensor of the result's shape and dtype on the same device, of any strides, the result is copied there (with its
        gradient, as by `copy_`), and `out` is returned.
        """
        checks.check_tensor(self.context, "all_gather", x)
        dim = checks.normal_dim(self.context, "all_gather", x, dim)
        if out is not None:
            checks.check_out(self.context, "all_gather", out, x, dim)
        if self._ends_here():
            gathered = x if x.dim() else x.reshape(1)
        else:
            gathered = _OPS.all_gather(x, self._token, dim, self._key)
        return gathered if out is None else out.copy_(gathered)

    def all_gather_to_list(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, in rank order, as views of one new tensor."""
        checks.check_tensor(self.context, "all_gather_to_list", x)
        if torch.compiler.is_compiling():
            return list(self.all_gather(x, 0).reshape(self.world_size, *x.shape).unbind(0))
        with self.route.called_as("all_gather_to_list"):
            return list(self.all_gather(x, 0).reshape(self.world_size, *x.shape).unbind(0))

    def all_gatherv(self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """As all_gather with `sizes[r]` the length of rank r's `dim`; every rank passes the same `sizes`."""
        if sizes is None:
            return self.all_gather(x, dim)
        checks.check_tensor(self.context, "all_gatherv", x)
        dim = checks.normal_dim(self.context, "all_gatherv", x, dim)
        checks.check_sizes(self.context, "all_gatherv", "sizes", sizes)
        checks.check_total(self.context, "all_gatherv", "sizes[this rank]", sizes[self.rank_in_group], x, dim)
        if self._ends_here():
            return x
        return _OPS.all_gatherv(x, self._token, dim, list(sizes), self._key)

    def reduce_scatter(self, x: Tensor, dim: int = -1, op: checks.ReduceOp = "sum") -> Tensor:
        """Reduces `x` over all ranks and gives rank r the r-th slice: `[…, world_size · d, …]` to `[…, d, …]`."""
        checks.check_tensor(self.context, "reduce_scatter", x)
        op = checks.check_reduce_op(self.context, "reduce_scatter", op)
        dim = checks.normal_dim(self.context, "reduce_scatter", x, dim)
        checks.check_divisible(self.context, "reduce_scatter", x, dim)
        if self._ends_here():
            return x
        return _OPS.reduce_scatter(x, self._token, dim, op, self._key)

    def reduce_scatterv(
        self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None, op: checks.ReduceOp = "sum"
    ) -> Tensor:
        """As reduce_scatter with slices of `sizes`; every rank passes the same `sizes`."""
        if sizes is None:
            return self.reduce_scatter(x, dim, op)
        checks.check_tensor(self.context, "reduce_scatterv", x)
        op = checks.check_reduce_op(self.context, "reduce_scatterv", op)
        dim = checks.normal_dim(self.context, "reduce_scatterv", x, dim)
        checks.check_sizes(self.context, "reduce_scatterv", "sizes", sizes)
        checks.check_total(self.context, "reduce_scatterv", "sizes", sum(sizes), x, dim)
        if self._ends_here():
            return x
        return _OPS.reduce_scatterv(x, self._token, dim, list(sizes), op, self._key)

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """As all_gather on rank `dst`; None on the others. No gradient."""
        checks.check_tensor(self.context, "gather", x)
        checks.check_rank(self.context, "gather", "dst", dst)
        dim = checks.normal_dim(self.context, "gather", x, dim)
        if self._ends_here():
            return x if x.dim() else x.reshape(1)
        gathered = _OPS.gather(x, self._token, dim, dst, self._key)
        return gathered if self.rank_in_group == dst else None

    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        dim: int = 0,
        *,
        size: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Gives rank r the r-th slice of rank `src`'s `x` along `dim`: `[…, world_size · d, …]` to `[…, d, …]`.

        Only `src` passes `x`. Either every rank passes the slice's `size` and `dtype`, which needs no exchange
        and compiles, or none does and `src` tells the others first. The result is on the group's device. No gradient.
        """
        checks.check_rank(self.context, "scatter", "src", src)
        is_src = self.rank_in_group == src
        if (size is None) != (dtype is None):
            raise InvalidArgumentError(
                f"scatter on {self.context} takes both size and dtype, or neither, on every rank"
            )
        if size is None or dtype is None:
            size, dtype = self._tell_slice(x, src, dim)
        elif is_src:
            checks.check_tensor(self.context, "scatter", x)
        checks.check_lengths(self.context, "scatter", "size", size)
        checks.check_dtype(self.context, "scatter", dtype)
        dim = checks.normal_dim_of(self.context, "scatter", len(size), dim)
        if x is not None and is_src:
            checks.check_divisible(self.context, "scatter", x, checks.normal_dim(self.context, "scatter", x, dim))
            mine = [n // self.world_size if i == dim else n for i, n in enumerate(x.shape)]
            if list(size) != mine or dtype != x.dtype:
                raise InvalidArgumentError(
                    f"size and dtype of scatter on {self.context} must be those of a slice of x, {mine} and {x.dtype}, "
                    f"but are {list(size)} and {dtype}"
                )
            if self._ends_here():
                return x
        return _OPS.scatter(x if is_src else None, self._token, list(size), dtype, self.device, dim, src, self._key)

    @host_call("pass size= and dtype= of the slice on every rank, which needs no message of the host", "scatter")
    def _tell_slice(self, x: Tensor | None, src: int, dim: int) -> tuple[list[int], torch.dtype]:
        """Size and dtype of a slice, told by `src`; an `x` that can't be cut raises on every rank."""
        told: object = None
        wrong: InvalidArgumentError | None = None
        if self.rank_in_group == src:
            try:
                checks.check_tensor(self.context, "scatter", x)
                whole = cast(Tensor, x)
                dim = checks.normal_dim(self.context, "scatter", whole, dim)
                checks.check_divisible(self.context, "scatter", whole, dim)
                checks.check_no_gradient(self.context, "scatter", whole, "use broadcast and take a slice")
                told = [n // self.world_size if i == dim else n for i, n in enumerate(whole.shape)], whole.dtype
            except InvalidArgumentError as error:
                told = str(error)
                wrong = error
        if self.world_size > 1:
            told = self._broadcast_message(told, src, "scatter")
        if wrong is not None:
            raise wrong
        if isinstance(told, str):
            raise RemoteError(f"rank {src} of {self.context} could not scatter: {told}", rank=self.context.ranks[src])
        return told  # type: ignore[return-value]

    def _broadcast_message(self, obj: object, src: int, method: str) -> object:
        raise NotImplementedError  # GroupCoordinator has it

    def all_to_all(
        self,
        x: Tensor,
        scatter_dim: int = 0,
        gather_dim: int = 0,
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Cuts `x` along `scatter_dim`, sends slice r to rank r, concatenates what came along `gather_dim`.

        With split sizes (rows of dim 0 to and from each rank) both dims must be 0; `input_split_sizes` of rank a for
        rank b must equal `output_split_sizes` of b for a. Leaving one of the two out means equal slices there.
        """
        checks.check_tensor(self.context, "all_to_all", x)
        scatter_dim = checks.normal_dim(self.context, "all_to_all", x, scatter_dim)
        gather_dim = checks.normal_dim(self.context, "all_to_all", x, gather_dim)
        if output_split_sizes is not None or input_split_sizes is not None:
            return self._all_to_all_rows(x, scatter_dim, gather_dim, output_split_sizes, input_split_sizes)
        checks.check_divisible(self.context, "all_to_all", x, scatter_dim)
        size = self.world_size
        if self._ends_here():
            return x
        if scatter_dim == 0 and gather_dim == 0:
            splits = [x.shape[0] // size] * size
            return self._exchange_rows(x, splits, splits)
        shape = list(x.shape)
        blocks = x.reshape(*shape[:scatter_dim], size, shape[scatter_dim] // size, *shape[scatter_dim + 1 :])
        blocks = blocks.movedim(scatter_dim, 0).contiguous()
        received = self._exchange_rows(blocks, [1] * size, [1] * size)
        # Where the dims are 1 long, flatten gives a view of other strides.
        return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()

    def _exchange_rows(self, x: Tensor, outputs: list[int], inputs: list[int]) -> Tensor:
        return _OPS.all_to_all(x, self._token, outputs, inputs, self._key)

    def _all_to_all_rows(
        self, x: Tensor, scatter_dim: int, gather_dim: int, outputs: Sequence[int] | None, inputs: Sequence[int] | None
    ) -> Tensor:
        if scatter_dim != 0 or gather_dim != 0:
            raise InvalidArgumentError(
                f"all_to_all on {self.context} with split sizes works along dim 0, "
                f"but scatter_dim is {scatter_dim} and gather_dim {gather_dim}; move the dim to the front"
            )
        if inputs is None or outputs is None or x.dim() == 0:
            checks.check_divisible(self.context, "all_to_all", x, 0)
        equal = [x.shape[0] // self.world_size] * self.world_size
        inputs = equal if inputs is None else inputs
        outputs = equal if outputs is None else outputs
        checks.check_sizes(self.context, "all_to_all", "input_split_sizes", inputs)
        checks.check_sizes(self.context, "all_to_all", "output_split_sizes", outputs)
        checks.check_total(self.context, "all_to_all", "input_split_sizes", sum(inputs), x, 0)
        if self._ends_here():
            return x
        return self._exchange_rows(x, list(outputs), list(inputs))

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Rank `src`'s `x` as a new tensor on every rank; the others' `x` gives shape and dtype only."""
        checks.check_tensor(self.context, "broadcast", x)
        checks.check_rank(self.context, "broadcast", "src", src)
        if self._ends_here():
            return x
        return _OPS.broadcast(x, self._token, src, self._key)

    def broadcast_(self, x: Tensor, src: int = 0) -> Tensor:
        """As broadcast, in place; returns `x`."""
        checks.check_tensor(self.context, "broadcast_", x)
        checks.check_writable(self.context, "broadcast_", x)
        checks.check_rank(self.context, "broadcast_", "src", src)
        if not self._ends_here():
            _OPS.broadcast_(x, self._token, src, self._key)
        return x

    def send(self, x: Tensor, dst: int | None = None) -> None:
        """Sends `x` to rank `dst` (default: the next), which calls recv; then `x` may be reused. No gradient."""
        checks.check_tensor(self.context, "send", x)
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        checks.check_peer(self.context, "send", "dst", dst)
        _OPS.send(x, self._token, dst, self._key)

    def recv(
        self, size: Sequence[int], dtype: torch.dtype, src: int | None = None, *, device: torch.device | None = None
    ) -> Tensor:
        """A tensor of shape `size` from rank `src` (default: the previous), which calls send with that shape and dtype.

        It lies on the group's device, or on `device` where the sender's does.
        """
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        checks.check_peer(self.context, "recv", "src", src)
        checks.check_lengths(self.context, "recv", "size", size)
        checks.check_dtype(self.context, "recv", dtype)
        device = self.device if device is None else device
        return _OPS.recv(self._token, list(size), dtype, device, src, self._key)

    def barrier(self) -> None:
        """Returns once every rank of the group has called it."""
        if not self._ends_here():
            _OPS.barrier(self._token, self._key)

    def empty(
        self, size: Sequence[int], dtype: torch.dtype | None = None, *, device: torch.device | None = None
    ) -> Tensor:
        """An uninitialised tensor in memory that all ranks of the group have mapped, where there is such memory.

        A collective on it copies nothing in: compute straight into it (`torch.mm(x, w, out=buffer)`), then all_reduce.
        It is this rank's alone, allocated without the others, and its memory is used again once the last tensor that
        views it is gone. On a device, between hosts, or where PARALLEL_STATE_SYMMETRIC_BYTES is used up, it is an
        ordinary tensor; all collectives take either. Default dtype and device: torch's, and the group's.
        """
        checks.check_lengths(self.context, "empty", "size", size)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        checks.check_dtype(self.context, "empty", dtype)
        device = self.device if device is None else device
        if self._ends_here():
            return torch.empty(list(size), dtype=dtype, device=device)
        return _OPS.empty(self._token, list(size), dtype, device, self._key)
