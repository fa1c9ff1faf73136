"""Defines the interface of communicators: each moves a group's data in one way, such as NCCL.

A subclass implements the `flat_*` operations: their tensors are contiguous, and the ranks' blocks lie along dim 0. The
other operations are inherited; they accept any strides and return new contiguous tensors. Rank arguments are ranks in
the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from device_communicators.base.errors import GroupNotInitializedError, UnsupportedError, UsageError, format_ranks
from device_communicators.base.member import GroupMember, Timeout
from device_communicators.calls.reductions import (
    add_rms_norm,
    combine_,
    default_state,
    divide_,
    quantize,
)
from device_communicators.calls.work import DONE, Work
from device_communicators.cpu.types import HostMemory, NativeGroup
from device_communicators.liveness.health import Death, FailureDomain, Watcher

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Request(NamedTuple):
    """Describes a call to the communicators. Equal on all ranks, so that all ranks choose the same communicator."""

    operation: str
    dtype: torch.dtype | None
    device_type: str
    numel: int
    reduce_op: str | None = None

    def __str__(self) -> str:
        op = f"({self.reduce_op})" if self.reduce_op else ""
        what = f" of {self.numel} × {self.dtype} on {self.device_type}" if self.dtype else ""
        return f"{self.operation}{op}{what}"


@dataclass(frozen=True)
class GroupContext(GroupMember):
    """Describes a group on one rank."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks."""
    rank: int
    device: torch.device
    timeout: Timeout
    device_group: Any = None
    """The torch ProcessGroup for `device`; None in a simulated group."""
    make_cpu_group: Callable[[], Any] | None = None
    """Creates the gloo group in the first call, which every rank must make; later calls return the same group."""
    host_memory: HostMemory | None = None
    watcher: Watcher | None = None
    domain: FailureDomain | None = None
    """The ranks whose death fails the group; None: its own ranks."""
    channel: int = 0
    """Number that distinguishes groups that use the same process groups."""
    given: str = ""
    """Label of the process group that the caller passed in; else empty."""
    simulated: bool = False
    fake: bool = False
    custom_all_reduce: bool = True
    """True if this library's own all-reduce kernels can be used."""
    high_priority_stream: bool = False
    nccl_config: Mapping[str, int] = field(default_factory=dict)
    """Fields of ncclConfig_t."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    @property
    def other_ranks(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self.global_rank]

    @property
    def collectives(self) -> NativeGroup | None:
        return None if self.host_memory is None else self.host_memory.collectives

    @property
    def cpu_group(self) -> Any:
        return None if self.make_cpu_group is None else self.make_cpu_group()

    @property
    def key(self) -> str:
        """Returns the group's name and size. Torch ops get this as an argument, because compiled code depends on the
        size.
        """
        return f"{self.name}/{self.size}"

    @property
    def ranked_key(self) -> str:
        """Returns `key` and this rank, for torch ops whose compiled code depends on the rank."""
        return f"{self.key}@{self.rank}"

    @property
    def label(self) -> str:
        """Returns a text that is equal on all ranks of the group, and differs from other groups with the same ranks."""
        return f"{self.channel}/{self.given}" if self.given else str(self.channel)

    @property
    def failure_ranks(self) -> Collection[int]:
        return self.ranks if self.domain is None else self.domain.ranks

    def deaths(self) -> list[Death]:
        return [] if self.watcher is None else self.watcher.deaths_of(self.failure_ranks)

    def gather(self, record: bytes, operation: str) -> list[bytes]:
        """All-gathers `record`. Returns the records by rank. Every rank must call this with the same `operation`, a
        name.
        """
        return (self.watcher or Watcher()).gather(
            f"{self.label}/{operation}",
            self.ranks,
            record,
            self.timeout_s,
            watched=self.failure_ranks,
            what=f"{operation} of {self}",
            group=self,
            operation=operation,
            gloo=self.cpu_group if self.watcher is None or not self.watcher.watches(self.ranks) else None,
        )

    def agree_on(self, method: str, problem: str) -> None:
        """Raises UsageError on all ranks if `problem` isn't empty on any rank. Every rank calls this. `method`: name in
        the error.
        """
        texts = self.gather(problem.encode(), method)
        found = [f"global rank {self.ranks[at]} has {text.decode()}" for at, text in enumerate(texts) if text]
        if found:
            raise UsageError(
                f"{method} of {self} failed: {'; '.join(found)}. Remove this cause, then call {method}() on all ranks"
            )

    def check_cpu_group(self, what: str) -> None:
        """Raises GroupNotInitializedError if a group of more than two ranks hasn't created its gloo group yet. `what`:
        the call that needs the gloo group, for the error.
        """
        if self.size > 2 and not getattr(self.make_cpu_group, "made", True):
            raise GroupNotInitializedError(
                f"{what} on {self} needs the group's gloo process group, which all ranks of the group must create "
                "together: call barrier() on every rank first"
            )

    def tag(self, kind: int) -> int:
        """Returns a number that marks transfers of one `kind`: 0 tensors, 1 messages, 3 NCCL's set-up. Groups that
        share a process group have different tags.
        """
        return 4 * self.channel + kind

    def __str__(self) -> str:
        return f"group {self.name!r}, rank {self.rank} of {self.size} (global ranks {format_ranks(self.ranks)})"


class Communicator(ABC):
    """Moves the data of a group in one way, for example over gloo, NCCL or shared memory. `src`, `dst` and `peer` are
    ranks in the group.

    Thread safety: the group's `Route` begins a collective only after the previous one has returned. Threads can call
    send, recv, isend and irecv_ at the same time, and beside a collective. `abandon` is called while other threads are
    in calls.
    """

    name: str
    picks_by_size: ClassVar[bool] = False
    """True if the result of `refusal` depends on the tensor's number of elements."""
    carries_the_device: ClassVar[bool] = False
    """True if every tensor on the group's device is supported. Communicators of lower preference are then not set up.
    """

    adds_in_tree_order: ClassVar[bool] = False
    """True if this communicator supports sums with `order="tree"`."""
    tells_sending: ClassVar[bool] = False
    """True if this communicator calls `begin_sending` before it sends. Earlier failures leave the group usable."""

    def __init__(self, context: GroupContext) -> None:
        self.context = context

    def admit(self) -> str | None:
        """Creates the resources that all ranks must create together; every rank calls this. Returns None. If a rank
        fails, every rank frees its resources and returns the reason.
        """
        return None

    @abstractmethod
    def refusal(self, request: Request) -> str | None:
        """Returns None if `request` is supported, else the reason. The result must be equal on all ranks."""

    def set_up(self, *, divisible: bool = False) -> None:
        """Creates the resources that the first call needs and, if `divisible`, those that `divide` needs. Every rank
        calls this.
        """

    def divide(self, part: Communicator | None, color: int) -> None:
        """Gives a part of this communicator's resources to `part`, this rank's communicator of a sub-group; None if
        this rank is in no sub-group. `color` is as in MPI_Comm_split. Every rank calls this after `set_up`.
        """

    def suspend(self) -> None:
        """Frees memory until `resume`. Every rank calls this while no call is running. Can raise UnsupportedError."""

    def resume(self) -> None:
        """Allocates the memory that `suspend` freed. Does nothing if `suspend` wasn't called."""

    def connect(self, peer: int) -> None:
        """Prepares transfers with the group's rank `peer`, which must call this, too."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Returns a context in which a CUDA graph can capture this communicator's calls."""
        yield

    @property
    def has_memory(self) -> bool:
        return False

    def allocate(self, size_bytes: int) -> Tensor | None:
        """Returns `size_bytes` uninitialised bytes in memory that peers can access, or None on all ranks if one rank
        can't. Every rank calls this.
        """
        raise UnsupportedError(f"the communicator {self.name!r} can't allocate tensors for {self.context}")

    def turn(self, method: str) -> AbstractContextManager[object]:
        """Returns a context for one collective, `method`. In the context, a conflicting collective of another thread
        raises UsageError.
        """
        return nullcontext()

    @property
    def op_server(self) -> NativeGroup | None:
        """Returns the group's C++ collectives, or None if there are none. If this communicator is the group's preferred
        one, compiled torch ops call these collectives directly.
        """
        return None

    def abandon(self) -> None:
        """Cancels this rank's transfers after the group has failed."""

    def close(self) -> None:
        """Frees the communicator's resources, but not the process groups."""

    # Every rank of the group calls public operations, except send and recv.

    def all_reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        self.flat_all_reduce_(out, reduce_op)
        return out

    def all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        """Reduces all ranks' `x`, which can have any strides, in place."""
        with _contiguous(x) as flat:
            self.flat_all_reduce_(flat, reduce_op)

    # `out` is contiguous and new. If all dims before `dim` have length 1, no copy is needed.

    def all_gather(self, x: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
        """Concatenates the ranks' `[…, d, …]` along `dim`: returns `[…, size · d, …]` or `[size]` for 0-d tensors.
        Writes to `out` if given.
        """
        out = new_gathered(x, dim, self.context.size) if out is None else out
        if x.shape[:dim].numel() == 1:
            self.flat_all_gather(out.view(self.context.size, *x.shape), x.contiguous())
        else:
            blocks = x.new_empty((self.context.size, *x.shape))
            self.flat_all_gather(blocks, x.contiguous())
            out.unflatten(dim, (self.context.size, x.shape[dim])).copy_(blocks.movedim(0, dim))
        return out

    def all_gatherv(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        rows = x.movedim(dim, 0).contiguous()
        out = x.new_empty((sum(sizes), *rows.shape[1:]))
        self.flat_all_gatherv(list(out.split(list(sizes))), rows)
        return out.movedim(0, dim).contiguous()

    def reduce_scatter(self, x: Tensor, dim: int, reduce_op: str, out: Tensor | None = None) -> Tensor:
        """Reduces the ranks' `[…, size · d, …]`. Returns this rank's slice `[…, d, …]` along `dim`, in `out` if
        given.
        """
        out = new_scattered(x, dim, self.context.size) if out is None else out
        if x.shape[:dim].numel() == 1:
            self.flat_reduce_scatter(out.flatten(0, dim), x.contiguous().flatten(0, dim), reduce_op)
        else:
            rows = out.new_empty((out.shape[dim], *out.shape[:dim], *out.shape[dim + 1 :]))
            self.flat_reduce_scatter(rows, x.movedim(dim, 0).contiguous(), reduce_op)
            out.copy_(rows.movedim(0, dim))
        return out

    def reduce_scatterv(self, x: Tensor, dim: int, sizes: Sequence[int], reduce_op: str) -> Tensor:
        """Reduces the ranks' `x`. Returns this rank's slice along `dim`. Rank r's slice has length `sizes[r]`."""
        rows = x.movedim(dim, 0).contiguous()
        size, mine = self.context.size, sizes[self.context.rank]
        slices = x.new_empty((size * mine, *rows.shape[1:]))
        self.flat_all_to_all(slices, rows, [mine] * size, list(sizes))
        out = reduce_in_rank_order(slices.view(size, mine, *rows.shape[1:]), reduce_op)
        return out.movedim(0, dim).contiguous()

    def gather(self, x: Tensor, dim: int, dst: int) -> Tensor:
        """Concatenates the ranks' `x` along `dim`. Returns the result on rank `dst`, and an empty tensor on other
        ranks.
        """
        is_dst = self.context.rank == dst
        out = x.new_empty((self.context.size, *x.shape)) if is_dst else None
        self.flat_gather(out, x.contiguous(), dst)
        return x.new_empty(0) if out is None else merge_blocks(out, dim, x.dim())

    def scatter(self, x: Tensor | None, out: Tensor, dim: int, src: int) -> None:
        """Splits rank `src`'s `x`, `[…, size · d, …]`, along `dim`. Writes slice r to rank r's contiguous `out`. Other
        ranks pass None as `x`.
        """
        blocks = None
        if x is not None:
            slices = (self.context.size, x.shape[dim] // self.context.size)
            blocks = x.unflatten(dim, slices).movedim(dim, 0).contiguous()
        self.flat_scatter(out, blocks, src)

    def all_to_all(
        self, x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """Sends `input_splits[r]` rows of `x` to each rank r. Returns the `output_splits[r]` rows received from each
        rank r, in `out` if given.
        """
        out = x.new_empty((sum(output_splits), *x.shape[1:])) if out is None else out
        self.flat_all_to_all(out, x.contiguous(), list(output_splits), list(input_splits))
        return out

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        self.flat_broadcast_(out, src)
        return out

    def broadcast_(self, x: Tensor, src: int) -> None:
        with _contiguous(x) as flat:
            self.flat_broadcast_(flat, src)

    def run_list(self, operation: str, tensors: Sequence[Tensor], peer: int) -> None:
        """Runs `operation` (send, recv or broadcast_) for each tensor. `peer`: the other rank, or the broadcast's
        source.
        """
        for each in tensors:
            getattr(self, operation)(each, peer)

    def send(self, x: Tensor, dst: int) -> None:
        """Sends `x` to rank `dst` of the group. Returns once the caller can change `x`."""
        self.isend(x.contiguous(), dst, self.context.tag(0)).wait()

    def recv(self, out: Tensor, src: int) -> None:
        self.irecv_(out, src, self.context.tag(0)).wait()

    @abstractmethod
    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None: ...

    @abstractmethod
    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        """Writes rank r's `x` to `out[r]` on all ranks; `out` has the shape `[size, *x.shape]`."""

    @abstractmethod
    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        """Writes rank r's `x` to `outs[r]`, which is contiguous, on all ranks."""

    @abstractmethod
    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        """Reduces the ranks' `x`, of shape `[size · out.shape[0], *out.shape[1:]]`. Writes this rank's slice to
        `out`.
        """

    @abstractmethod
    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        """Writes rank r's `x` to `out[r]` on rank `dst`. Other ranks pass None as `out`."""

    @abstractmethod
    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        """Writes row r of rank `src`'s `x` to rank r's `out`. Other ranks pass None as `x`."""

    @abstractmethod
    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None: ...

    @abstractmethod
    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        """Starts a broadcast of rank `src`'s `x` into other ranks' `x`. The caller keeps `x` alive until the returned
        work is done.
        """

    def flat_broadcast_(self, x: Tensor, src: int) -> None:
        self.ibroadcast_(x, src).wait()

    @abstractmethod
    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        """Starts to send `x` to rank `dst` of the group; `x` must not change until the returned work is done. gloo
        matches tags; NCCL ignores them.
        """

    @abstractmethod
    def irecv_(self, out: Tensor, src: int, tag: int) -> Work: ...

    @abstractmethod
    def barrier(self) -> None: ...


def new_gathered(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape) or [1]
    shape[dim] *= size
    return x.new_empty(shape)


def new_scattered(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= size
    return x.new_empty(shape)


def call_each_once(communicator: Communicator) -> None:
    size = communicator.context.size
    x = torch.zeros(size, device=communicator.context.device)
    out, parts = torch.empty_like(x), [1] * size
    communicator.flat_all_reduce_(x, "sum")
    communicator.flat_all_gather(out, x[:1])
    communicator.flat_reduce_scatter(out[:1], x, "sum")
    communicator.flat_broadcast_(x, 0)
    communicator.flat_all_to_all(out, x, parts, parts)


# Fallbacks; a communicator's method of the same name takes precedence. One with an `i` is done when it returns.


def _add_rms_norm(
    communicator: Communicator, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = communicator.all_reduce(x, "sum")
    with default_state(x):
        return add_rms_norm(total, residual, weight, eps)


def _quantized_norm(
    communicator: Communicator, x: Tensor, residual: Tensor, weight: Tensor, *scale_and_eps: Any
) -> tuple[Tensor, ...]:
    *scale, eps = scale_and_eps
    normed, y = method_of(communicator, "all_reduce_add_rms_norm")(x, residual, weight, eps)
    with default_state(x):
        return (*quantize(normed, *scale), y)


def _at_once(method: str) -> Callable[..., Work]:
    def start(communicator: Communicator, *args: Any) -> Work:
        getattr(communicator, method)(*args)
        return DONE

    return start


COMPOSED: Mapping[str, Callable[..., Any]] = {
    "all_reduce_add_rms_norm": _add_rms_norm,
    "all_reduce_add_rms_norm_static_fp8_quant": _quantized_norm,
    "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant": _quantized_norm,
    "iall_reduce_": _at_once("flat_all_reduce_"),
    "iall_gather": _at_once("flat_all_gather"),
    "ireduce_scatter": _at_once("flat_reduce_scatter"),
}


def method_of(communicator: Communicator, operation: str) -> Callable[..., Any]:
    own = getattr(communicator, operation, None)
    return partial(COMPOSED[operation], communicator) if own is None else own


def reduce_in_rank_order(blocks: Tensor, reduce_op: str) -> Tensor:
    """Reduces over dim 0 of `blocks`, the ranks' tensors, in rank order. The result is bitwise that of
    cpu/csrc/reduce.h: 16-bit and 8-bit floats are accumulated in float32.
    """
    dtype = blocks.dtype
    wide = blocks.float() if dtype.is_floating_point and dtype.itemsize < 4 else blocks
    with default_state(wide):
        out = wide[0].clone()
        for row in wide[1:]:  # torch's sum loses -0 and adds in another order
            combine_(out, row, reduce_op)
        if reduce_op == "avg":
            out = out.contiguous()
            divide_(out, wide.shape[0])
        return out.to(dtype)


def merge_blocks(blocks: Tensor, dim: int, x_dim: int) -> Tensor:
    """Concatenates `blocks[0]`, `blocks[1]`, … along `dim`. `x_dim`: the blocks' number of dims; for 0, returns
    `blocks`.
    """
    if x_dim == 0:
        return blocks
    if dim == 0:
        return blocks.flatten(0, 1)
    # If dims have length 1, flatten returns a view with other strides.
    return blocks.movedim(0, dim).flatten(dim, dim + 1).contiguous()


@contextmanager
def _contiguous(x: Tensor) -> Iterator[Tensor]:
    if x.is_contiguous():
        yield x
        return
    flat = x.contiguous()
    yield flat
    x.copy_(flat)


def _lacking(operation: str) -> Any:
    def raise_lack(self: Communicator, *_: object) -> NoReturn:
        raise UnsupportedError(f"the communicator {self.name!r} doesn't support {operation} on {self.context}")

    return raise_lack


class PartialCommunicator(Communicator):
    """Supports only some operations. Each operation that a subclass doesn't override raises UnsupportedError."""

    flat_all_gather = _lacking("all_gather")
    flat_all_gatherv = _lacking("all_gatherv")
    flat_reduce_scatter = _lacking("reduce_scatter")
    flat_gather = _lacking("gather")
    flat_scatter = _lacking("scatter")
    flat_all_to_all = _lacking("all_to_all")
    ibroadcast_ = _lacking("broadcast")
    isend = _lacking("send")
    irecv_ = _lacking("recv")
    barrier = _lacking("barrier")
