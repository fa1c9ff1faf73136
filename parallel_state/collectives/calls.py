"""The tensor calls of a group. Contract of all collectives:

- Every rank of the group must call them in the same order, with matching arguments. `src` and `dst` are ranks in the
  group.
- Inputs may have any strides, may be empty, and stay unchanged. Results are new contiguous tensors; in a group of one
  rank, the input itself.
- Wrong arguments raise InvalidArgumentError, and unsupported tensors UnsupportedError, before anything is sent. A
  failure during the call raises CommunicationError.
- `out` must have the result's shape, dtype and device; any strides are valid. The call writes the result to `out` and
  returns `out`. Gradients flow through `out` as after `out.copy_(result)`. If `out` is contiguous and requires no
  gradient, nothing is copied.
- The calls work under torch.compile(fullgraph=True), except for those that return handles. If sizes come from a
  tensor's values, wrong sizes raise torch's RuntimeError.

The module `ops` describes the gradients.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from device_communicators.base.errors import InvalidArgumentError, RemoteError, UnsupportedError
from device_communicators.base.host_calls import host_call
from device_communicators.base.torch_internals import dispatch_modes, in_transform, mark_written
from device_communicators.calls.interruption import raise_interruption
from device_communicators.calls.memory import copy_values, dense, is_dense
from device_communicators.calls.reductions import add_rms_norm, dynamic_per_token_fp8_quant, static_fp8_quant
from device_communicators.calls.user_call import transfer
from device_communicators.routing.communicator import GroupContext, merge_blocks
from device_communicators.routing.route import Route
from device_communicators.routing.started import Handle, TensorHandle
from parallel_state.collectives import checks, ops
from parallel_state.collectives.direct import DIRECT

if TYPE_CHECKING:
    from device_communicators.cpu.window import Window

_OPS = torch.ops.parallel_state
_ALL_REDUCE, _ALL_REDUCE_IN_PLACE = _OPS.all_reduce.default, _OPS.all_reduce_.default
_BROADCAST, _BROADCAST_IN_PLACE = _OPS.broadcast.default, _OPS.broadcast_.default
_ALL_GATHER, _REDUCE_SCATTER = _OPS.all_gather.default, _OPS.reduce_scatter.default
_ALL_TO_ALL = _OPS.all_to_all.default
# `_OPS.all_reduce(…)` would look up the overload in each call, 0.3 of 3 to 4 µs.
TensorOrList = TypeVar("TensorOrList", Tensor, list[Tensor])
_COLLECTIVE = "compiled code waits for its collectives; use the collective without _async there"
_TRANSFER = "compiled code waits for its transfers; use send and recv there, or call it outside the compiled function"


class GroupFacts:
    context: GroupContext
    route: Route
    world_size: int
    rank_in_group: int
    device: torch.device
    _key: str
    _ranked_key: str
    """The group's name and this rank: the key for ops whose compiled code depends on the rank."""
    _token: Tensor
    _destroyed: bool
    _messenger: Any
    _alone: Any = None
    """The C++ group (`NativeGroup`) that makes windows if this group has one rank."""

    def _is_single_rank(self) -> bool:
        if self.world_size > 1:
            return False
        if self._destroyed:
            self.route.check_usable()  # raises
        return True

    def _is_single_rank_reducing(self, operation: str, x: Tensor, op: str = "sum") -> bool:
        """Returns True for a group of one rank. Raises UnsupportedError for a reduction that larger groups don't
        support.
        """
        if not self._is_single_rank():
            return False
        if not is_dynamo_compiling():
            checks.check_reducible(self.context, operation, x, op)
        return True


def _is_straight(x: Tensor) -> bool:
    """Returns True if `x` can bypass torch's dispatcher, which takes 3 to 10 µs."""
    return not is_dynamo_compiling() and DIRECT.straight(x) is x


class TensorCalls(GroupFacts):
    def all_reduce(
        self,
        x: Tensor,
        op: checks.ReduceOp = "sum",
        *,
        order: checks.Order = "rank",
        async_op: checks.NotAsync = False,
    ) -> Tensor:
        """Reduces `x` over all ranks; returns the same values on every rank, as a new tensor.

        `op`: sum, avg, max, min or product, or torch's `ReduceOp.SUM` and so on. On bool tensors, sum and max are OR;
        min and product are AND. The average of integers is computed as in NCCL: the sum wraps around in the dtype, and
        the division rounds toward zero. Tensor-parallel layers need another gradient: see the module `regions`.

        `order` of a sum of CPU tensors: "rank", or "tree", the sum of the sums of both halves of the ranks, each added
        in the same way. The number of ranks must then be a power of two. See "Equal bits for every TP size" in
        docs/collectives.md.
        """
        if async_op:
            checks.refuse_async(self.context, "all_reduce")
        if order == "rank" and not is_dynamo_compiling():
            reduced = DIRECT.all_reduce(x, self._token, op, self._key)
            if reduced is not NotImplemented:
                return reduced
        checks.check_tensor(self.context, "all_reduce", x)
        op = checks.check_reduce_op(self.context, "all_reduce", op, order)
        if self._is_single_rank_reducing("all_reduce", x, op):
            return x
        if order == "rank" and _is_straight(x):
            return self.route.run("all_reduce", x, x, op, reduce_op=op)
        return _ALL_REDUCE(x, self._token, op, self._key)

    def all_reduce_(self, x: Tensor, op: checks.ReduceOp = "sum", *, order: checks.Order = "rank") -> Tensor:
        """Reduces `x` over all ranks in place; returns `x`."""
        if order == "rank" and not is_dynamo_compiling() and DIRECT.all_reduce_(x, self._token, op, self._key) is x:
            return x
        checks.check_tensor(self.context, "all_reduce_", x)
        checks.check_writable(self.context, "all_reduce_", x)
        op = checks.check_reduce_op(self.context, "all_reduce_", op, order)
        if self._is_single_rank_reducing("all_reduce_", x, op):
            return x
        if order == "rank" and _is_straight(x):
            self.route.run("all_reduce_", x, x, op, reduce_op=op)
            mark_written(x)
        else:
            _ALL_REDUCE_IN_PLACE(x, self._token, op, self._key)
        return x

    def all_gather(
        self, x: Tensor, dim: int = -1, *, out: Tensor | None = None, async_op: checks.NotAsync = False
    ) -> Tensor:
        """Concatenates the ranks' `x` along `dim`, in rank order: `[…, d, …]` to `[…, world_size · d, …]`.

        A 0-d tensor becomes `[world_size]`. Shapes must be equal on all ranks.
        """
        if async_op:
            checks.refuse_async(self.context, "all_gather")
        if not is_dynamo_compiling():
            if out is None:
                gathered = DIRECT.all_gather(x, self._token, dim, self._key)
            else:
                gathered = DIRECT.all_gather_into(x, self._token, out, dim, self._key)
            if gathered is not NotImplemented:
                return gathered
        checks.check_tensor(self.context, "all_gather", x)
        dim = checks.normal_dim(self.context, "all_gather", x, dim)
        if out is not None:
            checks.check_out(self.context, "all_gather", out, x, self._gathered(x, dim))
            if self._goes_into(out, x):
                _OPS.all_gather_into(x, self._token, out, dim, self._key)
                return out
        if self._is_single_rank():
            gathered = x if x.dim() else x.reshape(1)
        elif _is_straight(x):
            gathered = self.route.run("all_gather", x, x, dim)
        else:
            gathered = _ALL_GATHER(x, self._token, dim, self._key)
        return gathered if out is None else out.copy_(gathered)

    def all_gather_into_tensor(self, out: Tensor, x: Tensor) -> Tensor:
        """Gathers every rank's `x` of shape `[n, …]` into `out`, and returns `out`.

        `out` has the shape `[world_size · n, …]` or `[world_size, n, …]`.
        """
        if not is_dynamo_compiling() and DIRECT.all_gather_into(x, self._token, out, 0, self._key) is out:
            return out
        name = "all_gather_into_tensor"
        checks.check_tensor(self.context, name, x)
        checks.check_tensor(self.context, f"out= of {name}", out)
        stacked = x.dim() > 0 and list(out.shape) == [self.world_size, *x.shape] and out.is_contiguous()
        # Not self.all_gather: subclasses take different arguments.
        TensorCalls.all_gather(self, x, 0, out=out.view(-1, *x.shape[1:]) if stacked else out)
        return out

    def _gathered(self, x: Tensor, dim: int) -> list[int]:
        return [n * self.world_size if at == dim else n for at, n in enumerate(x.shape)] or [self.world_size]

    def _scattered(self, x: Tensor, dim: int) -> list[int]:
        return [n // self.world_size if at == dim else n for at, n in enumerate(x.shape)]

    def _goes_into(self, out: Tensor, x: Tensor) -> bool:
        if self._is_single_rank() or not out.is_contiguous():
            return False
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            return False
        return torch.compiler.is_compiling() or not in_transform()

    def all_gather_to_list(self, x: Tensor) -> list[Tensor]:
        """Returns every rank's `x`, in rank order, as views of one new tensor."""
        checks.check_tensor(self.context, "all_gather_to_list", x)
        if torch.compiler.is_compiling():
            return list(self.all_gather(x, 0).reshape(self.world_size, *x.shape).unbind(0))
        with self.route.called_as("all_gather_to_list"):
            return list(self.all_gather(x, 0).reshape(self.world_size, *x.shape).unbind(0))

    def all_gatherv(self, x: TensorOrList, dim: int = 0, sizes: Sequence[int] | None = None) -> TensorOrList:
        """Gathers as all_gather does, but rank r's `x` has length `sizes[r]` along `dim`.

        Every rank must pass the same `sizes`. `x` can be a list of tensors that all have these sizes; the result is
        then a list.
        """
        if isinstance(x, list):
            if not all(isinstance(each, Tensor) for each in x):
                checks.check_tensor(self.context, "all_gatherv", x)  # raises
            return [self.all_gatherv(each, dim, sizes) for each in x]
        if sizes is None:
            return self.all_gather(x, dim)
        checks.check_tensor(self.context, "all_gatherv", x)
        dim = checks.normal_dim(self.context, "all_gatherv", x, dim)
        checks.check_sizes(self.context, "all_gatherv", "sizes", sizes)
        checks.check_total(self.context, "all_gatherv", "sizes[this rank]", sizes[self.rank_in_group], x, dim)
        if self._is_single_rank():
            return x
        return _OPS.all_gatherv(x, self._token, dim, list(sizes), self._key)

    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = -1,
        op: checks.ReduceOp = "sum",
        *,
        out: Tensor | None = None,
        order: checks.Order = "rank",
        async_op: checks.NotAsync = False,
    ) -> Tensor:
        """Reduces `x` over all ranks and gives rank r the r-th slice: `[…, world_size · d, …]` to `[…, d, …]`.

        `order` has the same meaning as in all_reduce.
        """
        if async_op:
            checks.refuse_async(self.context, "reduce_scatter")
        if order == "rank" and not is_dynamo_compiling():
            if out is None:
                scattered = DIRECT.reduce_scatter(x, self._token, dim, op, self._key)
            else:
                scattered = DIRECT.reduce_scatter_into(x, self._token, out, dim, op, self._key)
            if scattered is not NotImplemented:
                return scattered
        checks.check_tensor(self.context, "reduce_scatter", x)
        op = checks.check_reduce_op(self.context, "reduce_scatter", op, order)
        dim = checks.normal_dim(self.context, "reduce_scatter", x, dim)
        checks.check_divisible(self.context, "reduce_scatter", x, dim)
        if out is not None:
            checks.check_out(self.context, "reduce_scatter", out, x, self._scattered(x, dim))
            if self._goes_into(out, x):
                _OPS.reduce_scatter_into(x, self._token, out, dim, op, self._key)
                return out
        if self._is_single_rank_reducing("reduce_scatter", x, op):
            scattered = x
        elif order == "rank" and _is_straight(x):
            scattered = self.route.run("reduce_scatter", x, x, dim, op, reduce_op=op)
        else:
            scattered = _REDUCE_SCATTER(x, self._token, dim, op, self._key)
        return scattered if out is None else out.copy_(scattered)

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, op: checks.ReduceOp = "sum") -> Tensor:
        """Works as reduce_scatter along dim 0, but writes this rank's slice to `out`, and returns `out`.

        `x` can also have the shape `[world_size, *out.shape]`.
        """
        if not is_dynamo_compiling() and DIRECT.reduce_scatter_into(x, self._token, out, 0, op, self._key) is out:
            return out
        checks.check_tensor(self.context, "reduce_scatter_tensor", x)
        checks.check_tensor(self.context, "out= of reduce_scatter_tensor", out)
        stacked = out.dim() > 0 and list(x.shape) == [self.world_size, *out.shape]
        return TensorCalls.reduce_scatter(self, x.flatten(0, 1) if stacked else x, 0, op, out=out)

    def reduce_scatterv(
        self, x: TensorOrList, dim: int = -1, sizes: Sequence[int] | None = None, op: checks.ReduceOp = "sum"
    ) -> TensorOrList:
        """Reduces and scatters as reduce_scatter does, but rank r gets a slice of length `sizes[r]`.

        `sizes`, and lists of tensors, have the same meaning as in all_gatherv.
        """
        if isinstance(x, list):
            if not all(isinstance(each, Tensor) for each in x):
                checks.check_tensor(self.context, "reduce_scatterv", x)  # raises
            return [self.reduce_scatterv(each, dim, sizes, op) for each in x]
        if sizes is None:
            return self.reduce_scatter(x, dim, op)
        checks.check_tensor(self.context, "reduce_scatterv", x)
        op = checks.check_reduce_op(self.context, "reduce_scatterv", op)
        dim = checks.normal_dim(self.context, "reduce_scatterv", x, dim)
        checks.check_sizes(self.context, "reduce_scatterv", "sizes", sizes)
        checks.check_total(self.context, "reduce_scatterv", "sizes", sum(sizes), x, dim)
        if self._is_single_rank_reducing("reduce_scatterv", x, op):
            return x
        return _OPS.reduce_scatterv(x, self._token, dim, list(sizes), op, self._ranked_key)

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Gathers as all_gather does, on rank `dst`; returns None on the other ranks. No gradient."""
        if not is_dynamo_compiling():
            found = DIRECT.gather(x, self._token, dim, dst, self._key)
            if found is not NotImplemented:
                return found
        checks.check_tensor(self.context, "gather", x)
        checks.check_rank(self.context, "gather", "dst", dst)
        dim = checks.normal_dim(self.context, "gather", x, dim)
        if self._is_single_rank():
            return x if x.dim() else x.reshape(1)
        gathered = _OPS.gather(x, self._token, dim, dst, self._ranked_key)
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
        """Returns on rank r the r-th slice of rank `src`'s `x` along `dim`: `[…, world_size · d, …]` to `[…, d, …]`.

        Only `src` passes `x`. Either every rank passes the slice's `size` and `dtype`, or no rank does; without them
        the call can't be compiled. The result is on the group's device. No gradient.
        """
        if size is not None and not is_dynamo_compiling():
            given = x if type(src) is int and self.rank_in_group == src else None
            mine = DIRECT.scatter(given, self._token, size, dtype, self.device, dim, src, self._key)
            if mine is not NotImplemented:
                return mine
        checks.check_rank(self.context, "scatter", "src", src)
        is_src = self.rank_in_group == src
        if (size is None) != (dtype is None):
            raise InvalidArgumentError(
                f"scatter on {self.context} needs both size and dtype, or neither; pass the same on every rank"
            )
        if size is None or dtype is None:
            size, dtype = self._agree_on_slice(x, src, dim)
        elif is_src:
            checks.check_tensor(self.context, "scatter", x)
        checks.check_shape(self.context, "scatter", "size", size)
        checks.check_dtype(self.context, "scatter", dtype)
        dim = checks.normal_dim_of(self.context, "scatter", len(size), dim)
        if x is not None and is_src:
            checks.check_divisible(self.context, "scatter", x, checks.normal_dim(self.context, "scatter", x, dim))
            mine = self._scattered(x, dim)
            if not checks.same_sizes(size, mine) or dtype != x.dtype:
                raise InvalidArgumentError(
                    f"size and dtype of scatter on {self.context} must be those of a slice of x, {mine} and {x.dtype}, "
                    f"but are {list(size)} and {dtype}"
                )
            if self._is_single_rank():
                return x
        return _OPS.scatter(x if is_src else None, self._token, list(size), dtype, self.device, dim, src, self._key)

    @host_call("pass size= and dtype= of the slice on every rank, which needs no message of the host", "scatter")
    def _agree_on_slice(self, x: Tensor | None, src: int, dim: int) -> tuple[list[int], torch.dtype]:
        form: object = None
        wrong: InvalidArgumentError | None = None
        if self.rank_in_group == src:
            try:
                checks.check_tensor(self.context, "scatter", x)
                whole = cast(Tensor, x)
                dim = checks.normal_dim(self.context, "scatter", whole, dim)
                checks.check_divisible(self.context, "scatter", whole, dim)
                checks.check_no_gradient(self.context, "scatter", "use broadcast and take a slice", whole)
                form = self._scattered(whole, dim), whole.dtype
            except InvalidArgumentError as error:
                form, wrong = str(error), error
        if self.world_size > 1:
            form = self._messenger.broadcast(form, src, "scatter")
        if wrong is not None:
            raise wrong
        if isinstance(form, str):
            raise RemoteError(
                f"scatter on {self.context} failed, because its source, rank {src}, could not send: {form}",
                rank=self.context.ranks[src],
            )
        return form  # type: ignore[return-value]

    def all_to_all(
        self,
        x: Tensor,
        scatter_dim: int = 0,
        gather_dim: int = 0,
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Splits `x` along `scatter_dim`, sends slice r to rank r, and concatenates the received slices along
        `gather_dim`.

        Split sizes are the numbers of rows (dim 0) sent to and received from each rank. With split sizes, both dims
        must be 0. `input_split_sizes[b]` of rank a must equal `output_split_sizes[a]` of rank b. If only one of these
        arguments is passed, the slices in the other direction have equal sizes.
        """
        is_of_blocks = output_split_sizes is input_split_sizes is None and type(scatter_dim) is type(gather_dim) is int
        if is_of_blocks and scatter_dim == gather_dim == 0 and not is_dynamo_compiling():
            if out is None:
                exchanged = DIRECT.all_to_all(x, self._token, None, None, self._key)
            else:
                exchanged = DIRECT.all_to_all_into(x, self._token, out, None, None, self._key)
            if exchanged is not NotImplemented:
                return exchanged
        checks.check_tensor(self.context, "all_to_all", x)
        if type(scatter_dim) is not int or scatter_dim != 0:
            scatter_dim = checks.normal_dim(self.context, "all_to_all", x, scatter_dim)
        if type(gather_dim) is not int or gather_dim != 0:
            gather_dim = checks.normal_dim(self.context, "all_to_all", x, gather_dim)
        if output_split_sizes is not None or input_split_sizes is not None:
            return self._all_to_all_rows(x, scatter_dim, gather_dim, output_split_sizes, input_split_sizes, out)
        checks.check_divisible(self.context, "all_to_all", x, scatter_dim)
        size = self.world_size
        if scatter_dim == 0 and gather_dim == 0:
            return self._exchange_rows(x, None, None, out)
        if out is not None:
            shape = self._scattered(x, scatter_dim)
            shape[gather_dim] *= size
            checks.check_out(self.context, "all_to_all", out, x, shape)
            return out.copy_(self.all_to_all(x, scatter_dim, gather_dim))
        if self._is_single_rank():
            return x
        shape = list(x.shape)
        blocks = x.reshape(*shape[:scatter_dim], size, shape[scatter_dim] // size, *shape[scatter_dim + 1 :])
        blocks = blocks.movedim(scatter_dim, 0).contiguous()
        received = self._exchange_rows(blocks, None, None)
        # For dims of length 1, flatten returns a view with other strides.
        return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Exchanges rows of `x` between all ranks, as torch's function does.

        Writes the received rows to `out`, and returns `out`. Split sizes: see all_to_all.
        """
        outputs = (
            None if isinstance(output_split_sizes, (list, tuple)) and not output_split_sizes else output_split_sizes
        )
        inputs = None if isinstance(input_split_sizes, (list, tuple)) and not input_split_sizes else input_split_sizes
        return TensorCalls.all_to_all(self, x, out=out, output_split_sizes=outputs, input_split_sizes=inputs)

    def _exchange_rows(self, x: Tensor, outputs: ops.Splits, inputs: ops.Splits, out: Tensor | None = None) -> Tensor:
        if out is not None:
            rows = x.shape[0] if outputs is None else sum(outputs)
            checks.check_out(self.context, "all_to_all", out, x, [rows, *x.shape[1:]])
            if self._goes_into(out, x):
                _OPS.all_to_all_into(x, self._token, out, outputs, inputs, self._key)
                return out
        received = x if self._is_single_rank() else _ALL_TO_ALL(x, self._token, outputs, inputs, self._key)
        return received if out is None else out.copy_(received)

    def _all_to_all_rows(
        self,
        x: Tensor,
        scatter_dim: int,
        gather_dim: int,
        outputs: Sequence[int] | None,
        inputs: Sequence[int] | None,
        out: Tensor | None,
    ) -> Tensor:
        if scatter_dim != 0 or gather_dim != 0:
            raise InvalidArgumentError(
                f"all_to_all on {self.context} with split sizes works along dim 0, but scatter_dim is {scatter_dim} "
                f"and gather_dim {gather_dim}; make that dim the first one with x.movedim(), and leave both out"
            )
        if inputs is None or outputs is None or x.dim() == 0:
            checks.check_divisible(self.context, "all_to_all", x, 0)
        equal = [x.shape[0] // self.world_size] * self.world_size
        inputs = equal if inputs is None else inputs
        outputs = equal if outputs is None else outputs
        checks.check_sizes(self.context, "all_to_all", "input_split_sizes", inputs)
        checks.check_sizes(self.context, "all_to_all", "output_split_sizes", outputs)
        checks.check_total(self.context, "all_to_all", "input_split_sizes", sum(inputs), x, 0)
        return self._exchange_rows(x, list(outputs), list(inputs), out)

    def broadcast(self, x: Tensor, src: int = 0, *, async_op: checks.NotAsync = False) -> Tensor:
        """Returns rank `src`'s `x` as a new tensor. On other ranks `x` determines only shape and dtype."""
        if async_op:
            checks.refuse_async(self.context, "broadcast")
        if not is_dynamo_compiling():
            received = DIRECT.broadcast(x, self._token, src, self._key)
            if received is not NotImplemented:
                return received
        checks.check_tensor(self.context, "broadcast", x)
        checks.check_rank(self.context, "broadcast", "src", src)
        if self._is_single_rank():
            return x
        # The gradient on `src` differs from that on other ranks.
        return _BROADCAST(x, self._token, src, self._ranked_key if torch.is_grad_enabled() else self._key)

    def broadcast_(self, x: Tensor, src: int = 0) -> Tensor:
        """Overwrites every rank's `x` with the values of rank `src`; returns `x`."""
        if not is_dynamo_compiling() and DIRECT.broadcast_(x, self._token, src, self._key) is x:
            return x
        checks.check_tensor(self.context, "broadcast_", x)
        checks.check_writable(self.context, "broadcast_", x)
        checks.check_rank(self.context, "broadcast_", "src", src)
        if not self._is_single_rank():
            _BROADCAST_IN_PLACE(x, self._token, src, self._key)
        return x

    @host_call("a flag is a Python value; use broadcast_ and keep it a tensor")
    def broadcast_flag(self, flag: bool, src: int = 0) -> bool:
        """Returns rank `src`'s flag on every rank."""
        try:
            value = bool(flag) if isinstance(flag, (numbers.Number, Tensor)) or hasattr(flag, "dtype") else None
        except (RuntimeError, ValueError, NotImplementedError):  # not exactly one element, or no value
            value = None
        if value is None:
            raise InvalidArgumentError(
                f"flag of broadcast_flag on {self.context} must be a bool, but is a {type(flag).__name__}"
            )
        with self.route.called_as("broadcast_flag"):
            return bool(self.broadcast_(torch.tensor(value, dtype=torch.uint8, device="cpu"), src).item())

    def split(self, x: Tensor, dim: int = -1) -> Tensor:
        """Returns this rank's slice of a replicated `x`, as a view: `[…, world_size · d, …]` to `[…, d, …]`."""
        checks.check_tensor(self.context, "split", x, needs_values=False)
        dim = checks.normal_dim(self.context, "split", x, dim)
        checks.check_divisible(self.context, "split", x, dim)
        size = x.shape[dim] // self.world_size
        return x.narrow(dim, self.rank_in_group * size, size)

    def barrier(self) -> None:
        """Returns once every rank of the group has called it."""
        if not is_dynamo_compiling() and DIRECT.barrier(self._token, self._key) is None:
            return
        if not self._is_single_rank():
            _OPS.barrier(self._token, self._key)

    def empty(
        self, size: Sequence[int], dtype: torch.dtype | None = None, *, device: torch.device | None = None
    ) -> Tensor:
        """Allocates an uninitialized tensor, if possible in memory that all ranks of the group have mapped.

        A collective on such a tensor doesn't copy its input: compute directly into it (`torch.mm(x, w, out=buffer)`).
        The memory is reused after the last tensor that views it is deleted. The result is an ordinary tensor if the
        group spans several hosts, if PARALLEL_STATE_SYMMETRIC_BYTES are used up, or in compiled code on GPUs.

        On a GPU with PARALLEL_STATE_NCCL every rank of the group must call it with the same number of bytes, and pass
        the same part of the tensor to a collective: see docs/gpus.md.
        """
        checks.check_shape(self.context, "empty", "size", size)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        checks.check_dtype(self.context, "empty", dtype)
        device = self.device if device is None else device
        checks.check_device(self.context, "empty", device)
        if self._is_single_rank():
            return torch.empty(list(size), dtype=dtype, device=device)
        if not is_dynamo_compiling() and self.route.has_memory:
            made = self._try_registered(size, dtype, torch.device(device))
            if made is not None:
                return made
        return _OPS.empty(self._token, list(size), dtype, device, self._key)

    def _try_registered(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        is_groups = device.type == self.device.type and device.index in (None, self.device.index)
        return self.route.allocate(size, dtype) if is_groups and not dispatch_modes() else None  # tracers use the op

    @host_call("make the window before, outside the compiled function")
    def window(self, size: Sequence[int], dtype: torch.dtype | None = None) -> Window:
        """Creates a `Window`: on every rank a CPU tensor of shape `size`, filled with zeros, that the other ranks can
        write.

        Every rank of the group must call it; sizes and dtypes may differ. Raises UnsupportedError if the compiled
        library is missing, or on all ranks if one rank's PARALLEL_STATE_SYMMETRIC_BYTES are used up.
        """
        from device_communicators.cpu.window import Window, group_of_one

        checks.check_shape(self.context, "window", "size", size)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        checks.check_dtype(self.context, "window", dtype)
        self.route.check_usable("window")
        collectives = self.context.collectives or self._alone
        if collectives is None and self.world_size == 1:
            collectives = self._alone = group_of_one(self.context)
        if collectives is None:
            raise UnsupportedError(
                f"window() of {self.context} needs this library's CPU collectives, which this group doesn't have; the "
                "group's explain() gives the reason"
            )

        def exchange(part: Tensor) -> Tensor:
            with self.route.called_as("window"):
                return self.all_gather(part, 0)

        return Window(collectives, size, dtype, exchange, self.barrier, self.route.failure_of)

    def send(self, x: Tensor, dst: int | None = None) -> None:
        """Sends `x` to rank `dst` (default: the next), which must call recv. `x` can be changed afterwards. No
        gradient.
        """
        if not is_dynamo_compiling() and DIRECT.send(x, self._token, dst, self._key) is None:
            return
        checks.check_tensor(self.context, "send", x)
        _OPS.send(x, self._token, checks.destination(self.context, "send", dst), self._key)

    def recv(
        self, size: Sequence[int], dtype: torch.dtype, src: int | None = None, *, device: torch.device | None = None
    ) -> Tensor:
        """Returns the tensor that rank `src` (default: the previous) sends, of shape `size` and dtype `dtype`.

        `device` (default: the group's) must be of the same kind as the device of the sender's tensor.
        """
        if not is_dynamo_compiling():
            received = DIRECT.recv(self._token, size, dtype, device, src, self._key)
            if received is not NotImplemented:
                return received
            raise_interruption()  # from the wait in C++: otherwise the op would wait again
        src = checks.source(self.context, "recv", src)
        checks.check_shape(self.context, "recv", "size", size)
        checks.check_dtype(self.context, "recv", dtype)
        device = self.device if device is None else device
        checks.check_device(self.context, "recv", device)
        return _OPS.recv(self._token, list(size), dtype, device, src, self._key)

    @host_call(_TRANSFER)
    @transfer("isend")
    def isend(self, x: Tensor, dst: int | None = None) -> Handle:
        """Starts `send`. Change `x` only after `wait()`. Not for compiled code."""
        checks.check_no_transform(self.context, "isend")
        checks.check_tensor(self.context, "isend", x)
        dst = checks.destination(self.context, "isend", dst)
        return self.route.start("isend", dense(x.detach()), dst, self.context.tag(0))

    @host_call(_TRANSFER)
    @transfer("irecv")
    def irecv(self, size: Sequence[int], dtype: torch.dtype, src: int | None = None) -> TensorHandle:
        """Starts `recv`; `wait()` returns the tensor. Not for compiled code."""
        checks.check_no_transform(self.context, "irecv")
        checks.check_shape(self.context, "irecv", "size", size)
        checks.check_dtype(self.context, "irecv", dtype)
        src = checks.source(self.context, "irecv", src)
        out = torch.empty(size, dtype=dtype, device=self.device)
        return TensorHandle(self.route.start("irecv_", out, src, self.context.tag(0)), out)

    @host_call(_TRANSFER)
    @transfer("batch_isend_irecv")
    def batch_isend_irecv(self, operations: Sequence[checks.Transfer | dist.P2POp]) -> list[TensorHandle]:
        """Starts several transfers together; returns their handles in the order of `operations`.

        An operation is `("isend", x, dst)`, `("irecv", out, src)`, or torch's `P2POp`. Transfers from one rank to
        another are matched by their order. Change or read the tensors only after `wait()`. No gradient; not for
        compiled code.
        """
        checks.check_no_transform(self.context, "batch_isend_irecv")
        if not isinstance(operations, (list, tuple)):
            raise InvalidArgumentError(
                f"operations of batch_isend_irecv on {self.context} must be a list of transfers, but is a "
                f"{type(operations).__name__}"
            )
        found = [checks.check_transfer(self.context, each) for each in operations]
        handles: dict[int, TensorHandle] = {}
        for at in _starting_order(self.rank_in_group, found):
            name, x, peer = found[at]
            flat, tag = dense(x.detach()), self.context.tag(0)
            if name == "isend":
                handles[at] = TensorHandle(self.route.start("isend", flat, peer, tag), x, keep=flat)
            else:
                handle = self.route.start("irecv_", flat, peer, tag)
                handles[at] = TensorHandle(handle, x, None if is_dense(x) else functools.partial(copy_values, x, flat))
        return [handles[at] for at in range(len(found))]

    @host_call(_COLLECTIVE)
    def all_reduce_async(self, x: Tensor, op: checks.ReduceOp = "sum", *, order: checks.Order = "rank") -> TensorHandle:
        """Starts `all_reduce(x, op, order=order)`. The handle's `wait()` returns the result, detached. Change `x` only
        after `wait()`.
        """
        checks.check_started(self.context, "all_reduce_async", x)
        op = checks.check_reduce_op(self.context, "all_reduce_async", op, order)
        if self._is_single_rank_reducing("all_reduce_async", x, op):
            return TensorHandle(None, x.detach())
        out = x.detach().clone(memory_format=torch.contiguous_format)
        return TensorHandle(self.route.start("iall_reduce_", out, op, reduce_op=op), out)

    @host_call(_COLLECTIVE)
    def all_gather_async(self, x: Tensor, dim: int = -1) -> TensorHandle:
        """Starts `all_gather(x, dim)`. As with all_reduce_async, change `x` only after `wait()`."""
        checks.check_started(self.context, "all_gather_async", x)
        dim = checks.normal_dim(self.context, "all_gather_async", x, dim)
        x = x.detach()
        if self._is_single_rank():
            return TensorHandle(None, x if x.dim() else x.reshape(1))
        flat = dense(x)
        out = x.new_empty((self.world_size, *x.shape))
        handle = self.route.start("iall_gather", out, flat, dim=dim)
        return TensorHandle(handle, out, lambda: merge_blocks(out, dim, x.dim()), keep=flat)

    @host_call(_COLLECTIVE)
    def reduce_scatter_async(
        self, x: Tensor, dim: int = -1, op: checks.ReduceOp = "sum", *, order: checks.Order = "rank"
    ) -> TensorHandle:
        """Starts `reduce_scatter(x, dim, op, order=order)`. Change `x` only after `wait()`."""
        checks.check_started(self.context, "reduce_scatter_async", x)
        op = checks.check_reduce_op(self.context, "reduce_scatter_async", op, order)
        dim = checks.normal_dim(self.context, "reduce_scatter_async", x, dim)
        checks.check_divisible(self.context, "reduce_scatter_async", x, dim)
        if self._is_single_rank_reducing("reduce_scatter_async", x, op):
            return TensorHandle(None, x.detach())
        rows = dense(x.detach().movedim(dim, 0))
        out = x.new_empty((rows.shape[0] // self.world_size, *rows.shape[1:]))
        handle = self.route.start("ireduce_scatter", out, rows, op, reduce_op=op, dim=dim)
        return TensorHandle(handle, out, lambda: out.movedim(0, dim).contiguous(), keep=rows)

    @host_call(_COLLECTIVE)
    def broadcast_async(self, x: Tensor, src: int = 0) -> TensorHandle:
        """Starts `broadcast(x, src)`. As with all_reduce_async, change `x` only after `wait()`."""
        checks.check_started(self.context, "broadcast_async", x)
        checks.check_rank(self.context, "broadcast_async", "src", src)
        if self._is_single_rank():
            return TensorHandle(None, x.detach())
        out = x.detach().clone(memory_format=torch.contiguous_format)
        return TensorHandle(self.route.start("ibroadcast_", out, src), out)

    # The norm, including the weight, is computed in float32 (for float64 in float64) from the rounded `y`. Quantized
    # output is float8_e4m3fn of the norm *after its rounding to the dtype*. Values beyond ±448, and infinities, become
    # ±448; NaN stays NaN. vLLM rounds the norm once more before the weight.

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        """Returns `(rms_norm(y) * weight, y)` for `y = sum(x) + residual`. Differentiable.

        `x` and `residual` are `[…, hidden]` and `weight` is `[hidden]`, all of one dtype. The sum, `y` and the norm are
        each rounded to that dtype once. `residual` and `weight` must be equal on all ranks.
        """
        checks.check_norm(self.context, "all_reduce_add_rms_norm", x, residual, weight, eps)
        if self._is_single_rank_reducing("all_reduce_add_rms_norm", x):
            return add_rms_norm(x, residual, weight, eps)
        return _OPS.all_reduce_add_rms_norm(x, self._token, residual, weight, eps, self._key)

    def all_reduce_add_rms_norm_static_fp8_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        """Returns `(norm / scale as float8_e4m3fn, y)`: all_reduce_add_rms_norm with a quantized norm.

        `scale`: one float32 element, positive and finite, on `x`'s device, equal on all ranks. The norm is multiplied
        by `1 / scale` in float32. Raises InvalidArgumentError if an input requires a gradient.
        """
        operation = "all_reduce_add_rms_norm_static_fp8_quant"
        checks.check_norm(self.context, operation, x, residual, weight, eps)
        checks.check_scale(self.context, operation, scale)
        if self._is_single_rank_reducing(operation, x):
            checks.check_no_gradient(self.context, operation, ops.QUANTIZE_YOURSELF, x, residual, weight, scale)
            normed, y = add_rms_norm(x, residual, weight, eps)
            return static_fp8_quant(normed, scale), y
        return _OPS.all_reduce_add_rms_norm_static_fp8_quant(x, self._token, residual, weight, scale, eps, self._key)

    def all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Does all_reduce_add_rms_norm, whose result is `(norm, y)`, and quantizes each row of `norm` by its own scale.

        Returns `(norm / scales, scales, y)`. `scales`: float32 `[…, 1]`, for each row `max(|norm|) / 448`, but at least
        1 / (448 · 512). A row with a NaN becomes NaN. In a row with an infinity, the scale is infinite, that value
        becomes NaN and the others 0. Raises InvalidArgumentError if an input requires a gradient.
        """
        operation = "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant"
        checks.check_norm(self.context, operation, x, residual, weight, eps)
        if self._is_single_rank_reducing(operation, x):
            checks.check_no_gradient(self.context, operation, ops.QUANTIZE_YOURSELF, x, residual, weight)
            normed, y = add_rms_norm(x, residual, weight, eps)
            return (*dynamic_per_token_fp8_quant(normed), y)
        return _OPS.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(
            x, self._token, residual, weight, eps, self._key
        )


def _starting_order(own: int, operations: Sequence[checks.Transfer]) -> list[int]:
    """Returns the order in which a rank starts its transfers.

    On the CPU receives start first, because a send can wait for its receiver. A device runs transfers one by one: all
    ranks put the pairs of ranks into the same order, and the lower rank of a pair sends first.
    """

    def place(at: int) -> tuple[int, ...]:
        name, x, peer = operations[at]
        if x.is_cpu:
            return (0, name == "isend")
        return (1, min(own, peer), max(own, peer), (name == "irecv") == (own < peer))

    return sorted(range(len(operations)), key=place)
