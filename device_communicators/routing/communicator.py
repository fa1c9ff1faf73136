"""The interface of a communicator: one way to move the bytes of one group.

A communicator implements the *flat* operations at the end of the class: contiguous tensors, the group along dim 0. It
inherits the *public* operations, which handle dims, strides and new outputs, or overrides those that it can do faster.
A `PartialCommunicator` supports some operations only.

Ranks are ranks in the group. Public operations return contiguous tensors that share no memory with their inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from device_communicators.base.errors import GroupNotInitializedError, UnsupportedError, format_ranks
from device_communicators.base.member import GroupMember, Timeout
from device_communicators.calls.reductions import (
    add_rms_norm,
    combine_,
    default_state,
    divide_,
    dynamic_per_token_fp8_quant,
    static_fp8_quant,
)
from device_communicators.calls.work import DONE, Work
from device_communicators.liveness.health import Death, FailureDomain, Watcher

if TYPE_CHECKING:  # loaded when a group is made
    from device_communicators.cpu.host_memory import HostMemory
    from device_communicators.cpu.native_group import NativeGroup

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Request(NamedTuple):
    """The facts of a call by which a route chooses a communicator. They are equal on every rank of the group."""

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
    """The facts of a group that its communicators need: ranks, device, timeout, process groups, …"""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """This process' position in `ranks`."""
    device: torch.device
    timeout: Timeout
    device_group: Any = None
    """torch ProcessGroup for tensors of `device`; None in a simulated group."""
    make_cpu_group: Callable[[], Any] | None = None
    """Returns the gloo group, always the same. If it is created at first use, every rank must make that first call."""
    host_memory: HostMemory | None = None
    """The shared memory of the group's ranks on this host; None if the gloo group is created later than the group."""
    watcher: Watcher | None = None
    """Detects deaths of ranks of the world; None if nothing watches them."""
    domain: FailureDomain | None = None
    """The ranks whose death fails the group; None: the group's own ranks."""
    channel: int = 0
    """Number of this group among those over the same process groups. It selects the tags of transfers."""
    given: str = ""
    """Label of the caller's process group, if the group was created over one; else empty."""
    simulated: bool = False
    """True if this rank is the only real one."""
    fake: bool = False
    """True if torch's `fake` backend simulates the other ranks."""
    custom_all_reduce: bool = True
    """True if communicators with the library's own kernels may be used."""
    high_priority_stream: bool = False
    """True if streams of communicators have a higher priority than the device's other streams."""
    nccl_config: Mapping[str, int] = field(default_factory=dict)
    """Fields of ncclConfig_t that the caller has set."""

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
        """Returns the gloo process group, for CPU tensors and messages; the device's own if the device is the CPU."""
        return None if self.make_cpu_group is None else self.make_cpu_group()

    @property
    def key(self) -> str:
        """Returns the text that names the group in ops' arguments. It has the size, on which compiled code depends.

        Caches of compiled code outlive processes and are shared by ranks. The arguments of ops are part of their keys,
        so the arguments must contain all that the code depends on.
        """
        return f"{self.name}/{self.size}"

    @property
    def ranked_key(self) -> str:
        """Returns the name of the group in arguments of ops whose compiled code also depends on the rank."""
        return f"{self.key}@{self.rank}"

    @property
    def label(self) -> str:
        """Returns a text that is equal on all ranks of the group, and differs between groups of the same ranks."""
        return f"{self.channel}/{self.given}" if self.given else str(self.channel)

    @property
    def failure_ranks(self) -> Collection[int]:
        """Returns the global ranks whose death makes the group fail. They may include ranks of other groups."""
        return self.ranks if self.domain is None else self.domain.ranks

    def deaths(self) -> list[Death]:
        return [] if self.watcher is None else self.watcher.deaths_of(self.failure_ranks)

    def gather(self, record: bytes, operation: str) -> list[bytes]:
        """Returns the record of each rank of the group. Every rank calls it. Raises as `Watcher.gather` does.

        Calls are matched per `operation`: a rank that misses one doesn't affect those of other operations.
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

    def check_cpu_group(self, what: str) -> None:
        """Raises GroupNotInitializedError if `what`, a transfer, needs the group's gloo group and it doesn't exist yet.

        The two ranks of a transfer can't create it: every rank of the group must take part.
        """
        if self.size > 2 and not getattr(self.make_cpu_group, "made", True):
            raise GroupNotInitializedError(
                f"{what} on {self} needs the group's gloo group, which all its ranks must create together; first "
                "call barrier() on every rank"
            )

    def tag(self, kind: int) -> int:
        """Returns the tag for a kind (0 … 3) of transfers. Groups that share process groups have different tags."""
        return 4 * self.channel + kind

    def __str__(self) -> str:
        return f"group {self.name!r}, rank {self.rank} of {self.size} (global ranks {format_ranks(self.ranks)})"


class Communicator(ABC):
    """The interface of communicators. The module's docstring lists what to implement."""

    name: str
    picks_by_size: ClassVar[bool] = False
    """True if `refusal` depends on a request's `numel`; else it is called once for each kind of request."""
    carries_the_device: ClassVar[bool] = False
    """True if it supports every tensor on the group's device, so that later communicators need no preparation."""

    tells_sending: ClassVar[bool] = False
    """True if it calls `begin_sending` before it sends. A failure before that call leaves the group usable."""

    def __init__(self, context: GroupContext) -> None:
        self.context = context

    def admit(self) -> str | None:
        """Creates what all ranks must create together. Returns why the group can't use this communicator, or None.

        Every rank calls it once, when the group's route is built, and gets the same result. If it returns a reason, it
        has kept no resources.
        """
        return None

    @abstractmethod
    def refusal(self, request: Request) -> str | None:
        """Returns the reason why `request` is unsupported, or None if it is supported.

        The result must be the same on all ranks: it depends only on `request` and on facts that the ranks agreed on.
        """

    def set_up(self, *, divisible: bool = False) -> None:
        """Creates in advance what the first call would create. Every rank of the group calls it.

        `divisible`: True if a call of `divide` follows.
        """

    def divide(self, part: Communicator | None, color: int) -> None:
        """Creates the resources of `part`, the communicator of a smaller group, by splitting those of this one.

        Every rank of this group calls it after `set_up(divisible=True)`. Ranks of a part pass their communicator of it,
        and its number as `color`; ranks in no part pass None. Does nothing if the communicator can't be split.
        """

    def connect(self, peer: int) -> None:
        """Creates in advance what the first transfer with `peer` would create. The peer calls it too."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Returns a context for the capture of a CUDA graph, which prepares the communicator for it."""
        yield

    @property
    def has_memory(self) -> bool:
        """Returns True if `allocate` may return memory. The same on every rank of the group."""
        return False

    def allocate(self, size_bytes: int) -> Tensor | None:
        """Returns uninitialised bytes on the group's device, in memory that this communicator has registered.

        Every rank of the group calls it. Returns None on all ranks if they must use ordinary memory.
        """
        raise UnsupportedError(f"{self.name} can't allocate tensors for {self.context}")

    def turn(self, method: str) -> AbstractContextManager[object]:
        """Returns a context for a blocking collective, which raises UsageError if another thread's conflicts."""
        return nullcontext()

    @property
    def op_server(self) -> NativeGroup | None:
        """Returns the C++ collectives that registered ops may call without the route, or None.

        Only that of a route's first communicator is used.
        """
        return None

    def abandon(self) -> None:
        """Cancels this rank's transfers once the group has failed, so that peers don't wait for it."""

    def close(self) -> None:
        """Frees the communicator's own resources. Process groups belong to `parallel_state.process_groups.pool`."""

    # Public operations. Every rank of the group calls them, except send and recv.

    def all_reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        """Returns `x` reduced over all ranks."""
        out = x.clone(memory_format=torch.contiguous_format)
        self.flat_all_reduce_(out, reduce_op)
        return out

    def all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        """Reduces `x`, of any strides, in place."""
        with _contiguous(x) as flat:
            self.flat_all_reduce_(flat, reduce_op)

    # `out`, if given, receives the result. It is contiguous and shares no memory with `x`. If all dims before `dim`
    # have length 1, each rank's block is contiguous and no copy is needed.

    def all_gather(self, x: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
        """Gathers `[…, d, …]` of each rank into `[…, size · d, …]`; 0-d tensors into `[size]`."""
        out = new_gathered(x, dim, self.context.size) if out is None else out
        if x.shape[:dim].numel() == 1:
            self.flat_all_gather(out.view(self.context.size, *x.shape), x.contiguous())
        else:
            blocks = x.new_empty((self.context.size, *x.shape))
            self.flat_all_gather(blocks, x.contiguous())
            out.unflatten(dim, (self.context.size, x.shape[dim])).copy_(blocks.movedim(0, dim))
        return out

    def all_gatherv(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Gathers as all_gather. `sizes[r]` is the length of rank r's `dim`."""
        rows = x.movedim(dim, 0).contiguous()
        out = x.new_empty((sum(sizes), *rows.shape[1:]))
        self.flat_all_gatherv(list(out.split(list(sizes))), rows)
        return out.movedim(0, dim).contiguous()

    def reduce_scatter(self, x: Tensor, dim: int, reduce_op: str, out: Tensor | None = None) -> Tensor:
        """Reduces `[…, size · d, …]` over all ranks. Returns this rank's slice `[…, d, …]`; `out` as in all_gather."""
        out = new_scattered(x, dim, self.context.size) if out is None else out
        if x.shape[:dim].numel() == 1:
            self.flat_reduce_scatter(out.flatten(0, dim), x.contiguous().flatten(0, dim), reduce_op)
        else:
            rows = out.new_empty((out.shape[dim], *out.shape[:dim], *out.shape[dim + 1 :]))
            self.flat_reduce_scatter(rows, x.movedim(dim, 0).contiguous(), reduce_op)
            out.copy_(rows.movedim(0, dim))
        return out

    def reduce_scatterv(self, x: Tensor, dim: int, sizes: Sequence[int], reduce_op: str) -> Tensor:
        """Reduces as reduce_scatter; `sizes[r]` is the length of rank r's slice. Sends as many bytes."""
        rows = x.movedim(dim, 0).contiguous()
        size, mine = self.context.size, sizes[self.context.rank]
        slices = x.new_empty((size * mine, *rows.shape[1:]))
        self.flat_all_to_all(slices, rows, [mine] * size, list(sizes))
        out = reduce_in_rank_order(slices.view(size, mine, *rows.shape[1:]), reduce_op)
        return out.movedim(0, dim).contiguous()

    def gather(self, x: Tensor, dim: int, dst: int) -> Tensor:
        """Gathers on `dst` as all_gather does. Returns an empty `[0]` tensor on other ranks."""
        is_dst = self.context.rank == dst
        out = x.new_empty((self.context.size, *x.shape)) if is_dst else None
        self.flat_gather(out, x.contiguous(), dst)
        return x.new_empty(0) if out is None else merge_blocks(out, dim, x.dim())

    def scatter(self, x: Tensor | None, out: Tensor, dim: int, src: int) -> None:
        """Writes slice r of `src`'s `[…, size · d, …]` to rank r's contiguous `out`."""
        blocks = None
        if x is not None:
            slices = (self.context.size, x.shape[dim] // self.context.size)
            blocks = x.unflatten(dim, slices).movedim(dim, 0).contiguous()
        self.flat_scatter(out, blocks, src)

    def all_to_all(
        self, x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """Sends `input_splits[r]` rows of dim 0 to rank r, and receives `output_splits[r]` from it, in rank order.

        `out`: contiguous, with `sum(output_splits)` rows.
        """
        out = x.new_empty((sum(output_splits), *x.shape[1:])) if out is None else out
        self.flat_all_to_all(out, x.contiguous(), list(output_splits), list(input_splits))
        return out

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Returns `src`'s tensor on every rank. `x` has the same shape and dtype on all ranks."""
        out = x.clone(memory_format=torch.contiguous_format)
        self.flat_broadcast_(out, src)
        return out

    def broadcast_(self, x: Tensor, src: int) -> None:
        """Copies `src`'s tensor into every rank's `x`, of any strides."""
        with _contiguous(x) as flat:
            self.flat_broadcast_(flat, src)

    def run_list(self, operation: str, tensors: Sequence[Tensor], peer: int) -> None:
        """Runs `operation` (send, recv or broadcast_) for each contiguous tensor, in order or in one launch.

        `refusal` has returned None for each of them.
        """
        for each in tensors:
            getattr(self, operation)(each, peer)

    def send(self, x: Tensor, dst: int) -> None:
        """Sends `x` to `dst`. Returns once `x` may be changed."""
        self.isend(x.contiguous(), dst, self.context.tag(0)).wait()

    def recv(self, out: Tensor, src: int) -> None:
        """Receives a tensor from `src` into contiguous `out`."""
        self.irecv_(out, src, self.context.tag(0)).wait()

    # Flat operations: every tensor is contiguous, and the group is along dim 0.

    @abstractmethod
    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        """Reduces contiguous `x` over all ranks, in place."""

    @abstractmethod
    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        """Gathers every rank's `x` into `out`, `[size, *x.shape]`."""

    @abstractmethod
    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        """Gathers every rank's `x`; writes that of rank r to contiguous `outs[r]`."""

    @abstractmethod
    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        """Reduces `x`, `[size · out.shape[0], *out.shape[1:]]`, and writes this rank's slice to `out`."""

    @abstractmethod
    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        """Gathers every rank's `x` on `dst` into `out`, `[size, *x.shape]`; on other ranks `out` is None."""

    @abstractmethod
    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        """Scatters `src`'s `x`, `[size, *out.shape]`, to the ranks' `out`; on other ranks `x` is None."""

    @abstractmethod
    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None: ...

    @abstractmethod
    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        """Starts to copy `src`'s `x` to the other ranks' `x`. The caller keeps `x` alive until the work is done."""

    def flat_broadcast_(self, x: Tensor, src: int) -> None:
        """Copies `src`'s contiguous `x` into that of other ranks."""
        self.ibroadcast_(x, src).wait()

    @abstractmethod
    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        """Starts a send. The caller keeps `x` alive and unchanged until the returned work is complete.

        A transfer doesn't match one with another tag, if the transport supports tags: gloo does, NCCL doesn't.
        """

    @abstractmethod
    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        """Starts a receive into `out`, which the caller keeps alive until the returned work is complete."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank of the group has called it."""


def new_gathered(x: Tensor, dim: int, size: int) -> Tensor:
    """Allocates the result of gathering `x` from `size` ranks along `dim`."""
    shape = list(x.shape) or [1]
    shape[dim] *= size
    return x.new_empty(shape)


def new_scattered(x: Tensor, dim: int, size: int) -> Tensor:
    """Allocates the result of scattering `x` along `dim` to `size` ranks: one rank's slice."""
    shape = list(x.shape)
    shape[dim] //= size
    return x.new_empty(shape)


def call_each_once(communicator: Communicator) -> None:
    """Runs each kind of call once on the device, before a CUDA graph is captured: the first call connects ranks."""
    size = communicator.context.size
    x = torch.zeros(size, device=communicator.context.device)
    out, parts = torch.empty_like(x), [1] * size
    communicator.flat_all_reduce_(x, "sum")
    communicator.flat_all_gather(out, x[:1])
    communicator.flat_reduce_scatter(out[:1], x, "sum")
    communicator.flat_broadcast_(x, 0)
    communicator.flat_all_to_all(out, x, parts, parts)


# Fallbacks for operations that few communicators implement. A communicator's method of the same name takes precedence.
# A fallback with an `i` is done when it returns. A communicator's method may return earlier; the caller then keeps the
# tensors alive until it is done.


def _add_rms_norm(
    communicator: Communicator, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns `(rms_norm(y) * weight, y)` with `y = sum(x) + residual`, as GroupCoordinator's method does."""
    total = communicator.all_reduce(x, "sum")
    with default_state(x):
        return add_rms_norm(total, residual, weight, eps)


def _add_rms_norm_static(
    communicator: Communicator, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    normed, y = method_of(communicator, "all_reduce_add_rms_norm")(x, residual, weight, eps)
    with default_state(x):
        return static_fp8_quant(normed, scale), y


def _add_rms_norm_dynamic(
    communicator: Communicator, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    normed, y = method_of(communicator, "all_reduce_add_rms_norm")(x, residual, weight, eps)
    with default_state(x):
        return (*dynamic_per_token_fp8_quant(normed), y)


def _at_once(method: str) -> Callable[..., Work]:
    def start(communicator: Communicator, *args: Any) -> Work:
        getattr(communicator, method)(*args)
        return DONE

    return start


COMPOSED: Mapping[str, Callable[..., Any]] = {
    "all_reduce_add_rms_norm": _add_rms_norm,
    "all_reduce_add_rms_norm_static_fp8_quant": _add_rms_norm_static,
    "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant": _add_rms_norm_dynamic,
    "iall_reduce_": _at_once("flat_all_reduce_"),
    "iall_gather": _at_once("flat_all_gather"),
    "ireduce_scatter": _at_once("flat_reduce_scatter"),
}


def method_of(communicator: Communicator, operation: str) -> Callable[..., Any]:
    """Returns the communicator's method named `operation`, or else this module's function for it."""
    own = getattr(communicator, operation, None)
    return partial(COMPOSED[operation], communicator) if own is None else own


def reduce_in_rank_order(blocks: Tensor, reduce_op: str) -> Tensor:
    """Reduces dim 0 of `[size, …]` with the same bits as the C++ kernels (cpu/csrc/reduce.h).

    16-bit and 8-bit floats are accumulated in float32 and rounded once.
    """
    dtype = blocks.dtype
    wide = blocks.float() if dtype.is_floating_point and dtype.itemsize < 4 else blocks
    with default_state(wide):
        out = wide[0].clone()
        for row in wide[1:]:  # torch's sum starts from +0, which loses -0, and adds in another order
            combine_(out, row, reduce_op)
        if reduce_op == "avg":
            out = out.contiguous()
            divide_(out, wide.shape[0])
        return out.to(dtype)


def merge_blocks(blocks: Tensor, dim: int, x_dim: int) -> Tensor:
    """Merges `[size, *shape]` into `shape` with `dim` size times as long."""
    if x_dim == 0:
        return blocks
    if dim == 0:
        return blocks.flatten(0, 1)
    # If the dims have length 1, flatten returns a view with other strides.
    return blocks.movedim(0, dim).flatten(dim, dim + 1).contiguous()


@contextmanager
def _contiguous(x: Tensor) -> Iterator[Tensor]:
    """Yields `x` if it is contiguous; else yields a contiguous copy, and writes it back to `x` afterwards."""
    if x.is_contiguous():
        yield x
        return
    flat = x.contiguous()
    yield flat
    x.copy_(flat)


def _lacking(operation: str) -> Any:
    def raise_lack(self: Communicator, *_: object) -> NoReturn:
        raise UnsupportedError(f"{self.name} doesn't support {operation} on {self.context}")

    return raise_lack


class PartialCommunicator(Communicator):
    """Base class of communicators that support some requests only. Another communicator of the route runs the rest."""

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
