"""Tensor collectives without waiting: each returns a handle whose `wait()` gives what the collective would have given.

For overlap in eager code; not for compiled code, and without gradients: the result is detached. Every rank of the group
calls them in the same order as all its other collectives. Change an input after `wait()` only. A communicator that
can't go on by itself has done the work when the call returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from device_communicators.host_calls import host_call
from device_communicators.routing.communicator import merge_blocks
from device_communicators.routing.started import TensorHandle
from parallel_state.collectives import checks
from parallel_state.collectives.tensor_calls import TensorCollectives

_WAITING = "compiled code waits for its collectives; use the one without _async there"


class AsyncTensorCollectives(TensorCollectives):
    """The part of `GroupCoordinator` that starts tensor collectives."""

    @host_call(_WAITING)
    def all_reduce_async(self, x: Tensor, op: checks.ReduceOp = "sum") -> TensorHandle:
        """Starts `all_reduce(x, op)`."""
        checks.check_no_transform(self.context, "all_reduce_async")
        checks.check_tensor(self.context, "all_reduce_async", x)
        op = checks.check_reduce_op(self.context, "all_reduce_async", op)
        if self._ends_here():
            return TensorHandle(None, x.detach())
        out = x.detach().clone(memory_format=torch.contiguous_format)
        return TensorHandle(self.route.start("iall_reduce_", out, op, reduce_op=op), out)

    @host_call(_WAITING)
    def all_gather_async(self, x: Tensor, dim: int = -1) -> TensorHandle:
        """Starts `all_gather(x, dim)`."""
        checks.check_no_transform(self.context, "all_gather_async")
        checks.check_tensor(self.context, "all_gather_async", x)
        dim = checks.normal_dim(self.context, "all_gather_async", x, dim)
        x = x.detach()
        if self._ends_here():
            return TensorHandle(None, x if x.dim() else x.reshape(1))
        flat = x.contiguous()
        out = x.new_empty((self.world_size, *x.shape))
        handle = self.route.start("iall_gather", out, flat, dim=dim)
        return TensorHandle(handle, out, lambda: merge_blocks(out, dim, x.dim()), keep=flat)

    @host_call(_WAITING)
    def reduce_scatter_async(self, x: Tensor, dim: int = -1, op: checks.ReduceOp = "sum") -> TensorHandle:
        """Starts `reduce_scatter(x, dim, op)`."""
        checks.check_no_transform(self.context, "reduce_scatter_async")
        checks.check_tensor(self.context, "reduce_scatter_async", x)
        op = checks.check_reduce_op(self.context, "reduce_scatter_async", op)
        dim = checks.normal_dim(self.context, "reduce_scatter_async", x, dim)
        checks.check_divisible(self.context, "reduce_scatter_async", x, dim)
        if self._ends_here():
            return TensorHandle(None, x.detach())
        rows = x.detach().movedim(dim, 0).contiguous()
        out = x.new_empty((rows.shape[0] // self.world_size, *rows.shape[1:]))
        handle = self.route.start("ireduce_scatter", out, rows, op, reduce_op=op, dim=dim)
        return TensorHandle(handle, out, lambda: out.movedim(0, dim).contiguous(), keep=rows)

    @host_call(_WAITING)
    def broadcast_async(self, x: Tensor, src: int = 0) -> TensorHandle:
        """Starts `broadcast(x, src)`."""
        checks.check_no_transform(self.context, "broadcast_async")
        checks.check_tensor(self.context, "broadcast_async", x)
        checks.check_rank(self.context, "broadcast_async", "src", src)
        if self._ends_here():
            return TensorHandle(None, x.detach())
        out = x.detach().clone(memory_format=torch.contiguous_format)
        return TensorHandle(self.route.start("ibroadcast_", out, src), out)

    def split(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's slice of `x`, which every rank holds: `[…, world_size · d, …]` to a view `[…, d, …]`.

        Nothing is sent; the gradient is that of a slice.
        """
        checks.check_tensor(self.context, "split", x, needs_values=False)
        dim = checks.normal_dim(self.context, "split", x, dim)
        checks.check_divisible(self.context, "split", x, dim)
        return x.chunk(self.world_size, dim)[self.rank_in_group] if x.shape[dim] else x
