"""GroupCoordinator: one rank's view of a group. The methods call `collectives.calls` for tensors, `messages` for
objects and dicts, and `creation` for new groups.

Contract of all collectives:

- Every rank of the group must call them in the same order, with matching arguments. `src` and `dst` are ranks in the
  group.
- Inputs may have any strides, may be empty, and stay unchanged. Results are new contiguous tensors. A group of one rank
  returns the input itself.
- Wrong arguments raise InvalidArgumentError, and unsupported tensors UnsupportedError, before anything is sent. A
  failure during the call raises CommunicationError.
- `out` must have the result's shape, dtype and device; any strides are valid. The call writes the result to `out` and
  returns `out`. Gradients flow through `out` as after `out.copy_(result)`. If `out` is contiguous and requires no
  gradient, nothing is copied.
- Calls on tensors work under torch.compile(fullgraph=True) unless they return handles. In compiled code, a wrong size
  that was computed from a tensor's values raises torch's RuntimeError.

A method first calls the function of the same name in `DIRECT`, which bypasses torch's dispatcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from device_communicators.base.errors import (
    CommunicationError,
    GroupNotInitializedError,
    InvalidArgumentError,
    RenamedError,
    UnsupportedError,
    format_ranks,
    no_such_name,
)
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.base.torch_internals import is_fake
from device_communicators.calls.interruption import raise_interruption
from device_communicators.calls.memory import dense
from device_communicators.calls.user_call import transfer
from device_communicators.catalog import build_route
from device_communicators.cpu.types import NativeGroup, Window
from device_communicators.liveness.health import FailureDomain
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import counted_from_begin
from device_communicators.routing.registry import register_route, unique_name
from device_communicators.routing.route import Traffic
from device_communicators.routing.started import Handle, TensorHandle
from parallel_state.collectives import calls as tensors
from parallel_state.collectives import checks
from parallel_state.collectives.capture_stream import GraphCaptureContext, prepared
from parallel_state.collectives.direct import DIRECT
from parallel_state.collectives.ops import ordering_token
from parallel_state.groups import creation
from parallel_state.groups.creation import Traits
from parallel_state.messages import calls as messages
from parallel_state.messages import tensor_dicts as by_spec
from parallel_state.messages.buffers import Buffers, checked_buffers
from parallel_state.messages.messenger import Messenger, NoReceive, NoSend, ReceiveHandle, SendHandle
from parallel_state.messages.slices import AllGatherGroup
from parallel_state.messages.tensor_dicts import TensorDictSpec
from parallel_state.process_groups.agreement import Request, digest
from parallel_state.process_groups.options import GroupOptions, seconds
from parallel_state.process_groups.pool import Acquired, ProcessGroupPool

logger = logging.getLogger("parallel_state")
TensorOrList = TypeVar("TensorOrList", Tensor, list[Tensor])

_COLLECTIVE = "compiled code waits for its collectives; use the collective without _async there"
_TRANSFER = "compiled code waits for its transfers; use send and recv there, or call it outside the compiled function"
_SPEC = "pass spec=TensorDictSpec.of(…) of a first exchange on both sides, or call it outside the compiled function"
_OBJECTS = "objects travel by the host; call it outside the compiled function, or send tensors or a dict with spec="
_WAITING_DICT = "compiled code waits for its transfers; use send_tensor_dict and recv_tensor_dict with spec= there"


class _Renamed:
    """An attribute that is a global rank in vLLM. Reading or assigning the attribute raises RenamedError with the new
    names.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self.__doc__ = f"Replaced by `{name}_in_group` and `{self._global_name}`."

    @property
    def _global_name(self) -> str:
        return self._name.replace("_rank", "_global_rank")

    def __get__(self, group: GroupCoordinator | None, owner: type) -> _Renamed:  # type checkers reject it as a rank
        if group is None:
            return self
        raise self._error(group)

    def __set__(self, group: GroupCoordinator, value: object) -> None:
        raise self._error(group)

    def _error(self, group: GroupCoordinator) -> RenamedError:
        return RenamedError(
            f"{self._name} of {group.context} could mean a rank in the group or a global one: use "
            f"{self._name}_in_group, which send, recv, src and dst take, or {self._global_name}"
        )


class GroupCoordinator:
    """One rank's view of a group, with every call on that group.

    Attributes: `unique_name` (`tp:0`), `ranks` (global, in group order), `rank` (global), `rank_in_group`,
    `world_size`, `local_rank` (on this host), `device`, `is_first_rank`, `is_last_rank`. For the arguments `src` and
    `dst`: `first_rank_in_group`, `last_rank_in_group`, `next_rank_in_group` and `prev_rank_in_group`; next and prev
    wrap around. `first_global_rank` and so on are the global ranks. Programs don't call the constructor.

    Threads: any thread may call a group, but only one collective of a group may run at a time in a process, also if it
    sends objects or dicts. A collective that begins meanwhile, in another thread or in a signal handler, raises
    UsageError and sends nothing. Give each thread its own group, by `make_sub_group` or `create_parallel_groups`. On
    CPU groups, sends and receives, the `wait()` of handles and calls of a `Window` may run in several threads at once,
    also during a collective. Transfers from one rank to another are matched by the order of their calls, so both ranks'
    threads must keep the same order. `explain`, `traffic`, `memory_stats` and all properties but `cpu_group` and
    `device_group` may be read at any time. `make_sub_group`, `graph_capture`, `suspend`, `resume` and `destroy` must
    not run while another thread is in a call of the group.
    """

    def __init__(
        self,
        context: GroupContext,
        traits: Traits | None = None,
        *,
        pool: ProcessGroupPool | None = None,
        acquired: list[Acquired] | None = None,
        public_cpu_group: Any = None,
        owns_pool: bool = False,
    ) -> None:
        self.context = context
        self.traits = traits or Traits(context.device)
        self.unique_name = context.name
        self._key, self._ranked_key = context.key, context.ranked_key
        self._destroyed = False
        self.rank = context.global_rank
        self.rank_in_group = context.rank
        self.world_size = context.size
        self.local_rank = self.traits.local_rank
        self.device = context.device
        self.pool = pool
        self.backend = self.traits.options.backend or "simulated"
        self.route = build_route(context)
        self.acquired = acquired if acquired is not None else []
        self._public_cpu_group = public_cpu_group
        self._owns_pool = owns_pool
        self._messenger = Messenger(self.route, self.traits.allow_pickle)
        self._token = ordering_token(context.device)
        self._alone: NativeGroup | None = None
        """Creates windows if this group has one rank."""
        if context.collectives is not None:
            DIRECT.use(context.collectives.library)
        register_route(self.route)

    @classmethod
    @host_call(OUTSIDE)
    @counted_from_begin()
    def from_process_group(
        cls,
        process_group: Any,
        *,
        cpu_group: Any = None,
        device: torch.device | str | None = None,
        name: str = "group",
        timeout: timedelta | float | None = None,
        allow_pickle: bool = False,
        within: GroupCoordinator | None = None,
    ) -> GroupCoordinator:
        """Returns a coordinator over an existing torch ProcessGroup of any backend.

        Every rank of the group must call this, and no other rank. A rank of several process groups wraps them in the
        same order as the other ranks.

        - `process_group`: the caller still owns it and `cpu_group`, and destroys both after `destroy()`.
        - `cpu_group`: a gloo group of the same ranks. Default: `process_group` if that is gloo, else a new group.
        - `device`: default: CUDA if the process group has a backend for CUDA alone, else the CPU.
        - `name`: begins `unique_name`. `allow_pickle`: as in initialize_model_parallel.
        - `timeout`: of each call, in seconds or as a timedelta. Default: PARALLEL_STATE_TIMEOUT_S.
        - `within`: a coordinator that contains these ranks and outlives the new one. A rank's death that fails `within`
          also fails the new coordinator.

        If the program also calls `process_group` itself, all ranks must make these calls and the coordinator's in the
        same order. Raises GroupNotInitializedError before init_process_group, InvalidArgumentError for a wrong argument
        or on a rank outside the group, RendezvousError if a rank of the group doesn't call this in time.
        """
        outer_of = None if within is None else within._as_outer
        return creation.wrap(
            GroupCoordinator, process_group, cpu_group, device, name, seconds(timeout), allow_pickle, outer_of
        )

    def _as_outer(self, ranks: Sequence[int]) -> tuple[ProcessGroupPool, FailureDomain]:
        self.route.check_usable()
        if self.pool is None or not set(ranks) <= set(self.context.ranks):
            raise InvalidArgumentError(
                f"within= must be a GroupCoordinator that contains global ranks {format_ranks(ranks)}, but is "
                f"{self.context} of global ranks {format_ranks(self.context.ranks)}"
            )
        root = "" if self.context.domain is None else self.context.domain.root
        return self.pool, FailureDomain(self.context.failure_ranks, root)

    @property
    def ranks(self) -> list[int]:
        return list(self.context.ranks)

    @property
    def size(self) -> int:
        return self.world_size

    @property
    def first_rank_in_group(self) -> int:
        return 0

    @property
    def last_rank_in_group(self) -> int:
        return self.world_size - 1

    @property
    def next_rank_in_group(self) -> int:
        return (self.rank_in_group + 1) % self.world_size

    @property
    def prev_rank_in_group(self) -> int:
        return (self.rank_in_group - 1) % self.world_size

    @property
    def first_global_rank(self) -> int:
        return self.context.ranks[0]

    @property
    def last_global_rank(self) -> int:
        return self.context.ranks[-1]

    @property
    def next_global_rank(self) -> int:
        return self.context.ranks[self.next_rank_in_group]

    @property
    def prev_global_rank(self) -> int:
        return self.context.ranks[self.prev_rank_in_group]

    first_rank, last_rank, next_rank, prev_rank = _Renamed(), _Renamed(), _Renamed(), _Renamed()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not isinstance(getattr(type(self), name, None), _Renamed)]

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    @host_call(OUTSIDE)
    def device_group(self) -> Any:
        """Returns the torch ProcessGroup for tensors on `device`."""
        if self.device.type == "cpu" and self._public_cpu_group is not None:
            return self.cpu_group
        return self._process_group(lambda: self.context.device_group, self.traits.options)

    @property
    @host_call(OUTSIDE)
    def cpu_group(self) -> Any:
        """Returns the torch ProcessGroup for CPU tensors. With some device groups, the first use creates this group:
        every rank must then read this property.

        PARALLEL_STATE_CPU_BACKEND chooses the backend. Groups that the program made keep their own backend.
        """
        found = self._public_cpu_group
        return self._process_group(lambda: found or self.context.cpu_group, self.traits.options.for_callers)

    @property
    @host_call(OUTSIDE)
    def timeout(self) -> float:
        """The timeout of each call in seconds. Assign seconds, a timedelta, or None for PARALLEL_STATE_TIMEOUT_S.

        Applies to calls that begin later on this rank, and to waits for started calls. If ranks have different
        timeouts, the first deadline ends the call on all.
        """
        return self.context.timeout_s

    @timeout.setter
    def timeout(self, timeout: timedelta | float | None) -> None:
        self.context.timeout.set(seconds(timeout))

    @host_call(OUTSIDE)
    def within(self, timeout: timedelta | float) -> AbstractContextManager[None]:
        """Sets `timeout` (seconds or a timedelta) for the calls in the body."""
        return self.context.timeout.within(seconds(timeout))

    @property
    def supports_process_group(self) -> bool:
        return not self.context.simulated

    @host_call(OUTSIDE)
    def as_process_group(self) -> Any:
        return self.device_group

    def _process_group(self, find: Callable[[], Any], options: GroupOptions) -> Any:
        if self.route.closed:
            self.route.check_usable()  # raises
        if self.pool is None:
            raise GroupNotInitializedError(f"{self.context} is simulated and has no process group")
        # Never None: torch.distributed takes group=None for the whole world.
        return find() or self.pool.alone(options)

    @host_call(OUTSIDE)
    @counted_from_begin()
    def make_sub_group(self, ranks: Sequence[int], *, name: str = "sub") -> GroupCoordinator | None:
        """Creates a group of `ranks`, which are ranks *in this group*; returns None on the other ranks.

        Every rank of this group must pass the same distinct ranks, in ascending order. A sub-group of the world fails
        only if one of its own ranks dies. A sub-group of a parallel group fails if that group fails. `name` begins
        `unique_name`. Raises InvalidArgumentError, or ConfigMismatchError if arguments differ.
        """
        self.route.check_usable()

        def resolve() -> tuple[list[int], Request]:
            inside = creation.ranks_inside(self.context, ranks, must_ascend=self.pool is not None)
            if not isinstance(name, str):
                raise checks.wrong(self.context, "make_sub_group", "name", "be a str", f"is {name!r}")
            return inside, {"list of ranks": format_ranks(ranks), "digest": digest(list(ranks))}

        if self.pool is None:
            inside, _ = resolve()
            if self.rank not in inside:
                return None
            context = dataclasses.replace(
                self.context, name=unique_name(name), ranks=tuple(inside), rank=inside.index(self.rank)
            )
            return GroupCoordinator(context, self.traits)
        inside = self.pool.agreement.resolve_and_agree(
            "sub-group", self.ranks, resolve, self.context.timeout_s, self.context.failure_ranks
        )
        if self.rank not in inside:
            return None
        domain = self.context.domain
        if domain is not None and domain.is_root:
            domain = FailureDomain(inside, digest(("part", inside)), is_root=True)
        return creation.create_group(
            GroupCoordinator, self.pool, inside, name, self.traits, domain=domain, unshared=True
        )

    @host_call(OUTSIDE)
    def graph_capture(
        self, context: GraphCaptureContext | None = None, *, peers: Sequence[int] = ()
    ) -> AbstractContextManager[GraphCaptureContext]:
        """Prepares the group for CUDA graphs that the body captures. Every rank of the group must enter this context.

        In the body the current stream is that of `context` or, by default, a new stream that waits for the previous
        one. `peers`: ranks in the group with which this rank exchanges data for the first time in these graphs. Each
        peer must list this rank in its `peers`.
        """
        if not isinstance(peers, (list, tuple, range, set, frozenset)):
            raise checks.wrong(self.context, "graph_capture", "peers", "be ranks", f"is a {type(peers).__name__}")
        for peer in peers:
            checks.check_rank(self.context, "graph_capture", "peers", peer)
        return prepared(self.route, context, self.device, peers)

    @host_call(OUTSIDE)
    def suspend(self) -> int:
        """Frees memory of this rank until `resume`. Every rank must call this. Returns the number of freed bytes.

        On a CPU, this frees slots and message queues in shared memory, and memory of deleted tensors that was kept for
        reuse. On a GPU, this frees NCCL's buffers, which aren't counted. Until `resume`, calls raise UsageError.

        Raises UsageError on all ranks if a rank has a running call, a started call without a wait, or sent a message
        that wasn't received. Raises UnsupportedError with NCCL before 2.29.7.
        """
        before = sum(self.memory_stats().values())
        self.route.suspend()
        return max(0, before - sum(self.memory_stats().values()))

    @host_call(OUTSIDE)
    def resume(self) -> None:
        """Allocates the memory that `suspend` freed, and allows calls again. Every rank must call this.

        Raises UsageError on all ranks if a rank finds too little memory. The ranks can then call `resume` again.
        """
        self.route.resume()

    @host_call(OUTSIDE)
    def memory_stats(self) -> dict[str, int]:
        """Returns this rank's bytes in shared memory, or {} if the group has none. Sends nothing.

        `slots_bytes`: for collectives. `queues_bytes`: for messages. `tensors_bytes`: for tensors of `empty`.
        """
        return {} if (memory := self.context.host_memory) is None else memory.backed_bytes()

    @host_call(OUTSIDE)
    def explain(self) -> str:
        """Lists the group's communicators (transports) in order of preference, with the reason for each unused one."""
        text = self.route.explain()
        if self.pool is None:
            return text
        from parallel_state.startup.stores import store_in_words

        watcher = self.context.watcher
        ends = "" if watcher is None else watcher.explain(self.context.other_ranks)
        return "\n  ".join(filter(None, (text, ends, f"store: {store_in_words()}")))

    @host_call(OUTSIDE)
    def traffic(self) -> dict[str, Traffic]:
        """Returns, for each operation, the number of this rank's calls so far and the bytes of their tensors."""
        return self.route.traffic()

    @host_call(OUTSIDE)
    def destroy(self) -> None:
        """Destroys the group on this rank. Every rank of the group must call this. Idempotent."""
        if self._destroyed:
            return
        if self.route.is_parents:
            self.route.check_usable()  # raises
        self._destroyed = True
        if self._alone is not None:
            self._alone.close()
        memory = self.context.host_memory
        pool, self.pool = self.pool, None
        acquired = list(self.acquired)
        self._public_cpu_group = None
        self.acquired.clear()
        all_sent = False
        try:
            all_sent = self._messenger.close()
        finally:
            failed = self.route.has_failed or not all_sent
            with contextlib.ExitStack() as stack:
                if pool is not None:
                    if self._owns_pool:
                        stack.callback(pool.close)
                    for each in reversed(acquired):
                        stack.callback(pool.release, each, failed=failed)
                if memory is not None and pool is not None:
                    stack.callback(memory.close)
                stack.callback(self._close_route)

    def _close_route(self) -> None:
        try:
            self.route.close()
        finally:
            self.context = self.route.context
            self.context.timeout.end()

    @host_call(OUTSIDE)
    def close(self) -> None:
        self.destroy()

    # Tensors.

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
        the division rounds toward zero. `async_op` must be False: see all_reduce_async. Tensor-parallel layers need
        another gradient: see the module `regions`.

        `order` of a sum of CPU tensors: "rank" adds in rank order. "tree" sums each half of the ranks in the same way,
        then adds both sums; the number of ranks must be a power of two. See docs/collectives.md.
        """
        if async_op:
            checks.refuse_async(self.context, "all_reduce")
        if order == "rank" and not is_dynamo_compiling():
            reduced = DIRECT.all_reduce(x, self._token, op, self._key)
            if reduced is not NotImplemented:
                return reduced
        return tensors.all_reduce(self.route, self._token, x, op, order)

    def all_reduce_(self, x: Tensor, op: checks.ReduceOp = "sum", *, order: checks.Order = "rank") -> Tensor:
        """Reduces `x` over all ranks in place; returns `x`. `op`, `order`: as in all_reduce."""
        if order == "rank" and not is_dynamo_compiling() and DIRECT.all_reduce_(x, self._token, op, self._key) is x:
            return x
        return tensors.all_reduce_(self.route, self._token, x, op, order)

    def all_gather(
        self, x: Tensor, dim: int = -1, *, out: Tensor | None = None, async_op: checks.NotAsync = False
    ) -> Tensor:
        """Concatenates the ranks' `x` along `dim`, in rank order: `[…, d, …]` to `[…, world_size · d, …]`.

        A 0-d tensor becomes `[world_size]`. Shapes must be equal on all ranks. `async_op` must be False.
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
        return tensors.all_gather(self.route, self._token, x, dim, out)

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
        GroupCoordinator.all_gather(self, x, 0, out=out.view(-1, *x.shape[1:]) if stacked else out)
        return out

    def all_gather_to_list(self, x: Tensor) -> list[Tensor]:
        """Returns every rank's `x`, in rank order, as views of one new tensor."""
        checks.check_tensor(self.context, "all_gather_to_list", x)
        if torch.compiler.is_compiling():
            return list(self.all_gather(x, 0).reshape(self.world_size, *x.shape).unbind(0))
        with self.route.called_as("all_gather_to_list"):
            return list(self.all_gather(x, 0).reshape(self.world_size, *x.shape).unbind(0))

    def all_gatherv(self, x: TensorOrList, dim: int = 0, sizes: Sequence[int] | None = None) -> TensorOrList:
        """Gathers as all_gather does, but rank r's `x` has length `sizes[r]` (None: equal lengths) along `dim`.

        Every rank must pass the same `sizes`. `x` can be a list of tensors that all have these sizes; the result is
        then a list.
        """
        if isinstance(x, list):
            if not all(isinstance(each, Tensor) for each in x):
                checks.check_tensor(self.context, "all_gatherv", x)  # raises
            return [self.all_gatherv(each, dim, sizes) for each in x]
        if sizes is None:
            return self.all_gather(x, dim)
        return tensors.all_gatherv(self.route, self._token, x, dim, sizes)

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

        `op`, `order`: as in all_reduce. `async_op` must be False.
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
        return tensors.reduce_scatter(self.route, self._token, x, dim, op, out, order)

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, op: checks.ReduceOp = "sum") -> Tensor:
        """Works as reduce_scatter along dim 0, but writes this rank's slice to `out`, and returns `out`.

        `x` can also have the shape `[world_size, *out.shape]`.
        """
        if not is_dynamo_compiling() and DIRECT.reduce_scatter_into(x, self._token, out, 0, op, self._key) is out:
            return out
        checks.check_tensor(self.context, "reduce_scatter_tensor", x)
        checks.check_tensor(self.context, "out= of reduce_scatter_tensor", out)
        stacked = out.dim() > 0 and list(x.shape) == [self.world_size, *out.shape]
        return GroupCoordinator.reduce_scatter(self, x.flatten(0, 1) if stacked else x, 0, op, out=out)

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
        return tensors.reduce_scatterv(self.route, self._token, x, dim, sizes, op)

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Gathers as all_gather does, but returns the result on group rank `dst` only, and None on the other ranks. No
        gradient.
        """
        if not is_dynamo_compiling():
            found = DIRECT.gather(x, self._token, dim, dst, self._key)
            if found is not NotImplemented:
                return found
        return tensors.gather(self.route, self._token, x, dst, dim)

    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        dim: int = 0,
        *,
        size: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns on rank r the r-th slice, along `dim`, of the `x` of group rank `src`: `[…, world_size · d, …]` to
        `[…, d, …]`.

        Only `src` passes `x`. Either every rank passes the slice's `size` and `dtype`, or no rank does; without these
        arguments the call can't be compiled. The result is on the group's device. No gradient.
        """
        if size is not None and not is_dynamo_compiling():
            given = x if type(src) is int and self.rank_in_group == src else None
            mine = DIRECT.scatter(given, self._token, size, dtype, self.device, dim, src, self._key)
            if mine is not NotImplemented:
                return mine
        return tensors.scatter(self.route, self._token, self._messenger, x, src, dim, size, dtype)

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
        outputs, inputs = output_split_sizes, input_split_sizes
        return tensors.all_to_all(self.route, self._token, x, scatter_dim, gather_dim, outputs, inputs, out)

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Exchanges rows of `x` between all ranks, as torch's function of this name does.

        Writes the received rows to `out`, and returns `out`. The split sizes are numbers of rows, one per rank, as in
        all_to_all.
        """
        outputs = (
            None if isinstance(output_split_sizes, (list, tuple)) and not output_split_sizes else output_split_sizes
        )
        inputs = None if isinstance(input_split_sizes, (list, tuple)) and not input_split_sizes else input_split_sizes
        return GroupCoordinator.all_to_all(self, x, out=out, output_split_sizes=outputs, input_split_sizes=inputs)

    def broadcast(self, x: Tensor, src: int = 0, *, async_op: checks.NotAsync = False) -> Tensor:
        """Returns the `x` of group rank `src` as a new tensor. On other ranks `x` determines only shape and dtype.
        `async_op` must be False.
        """
        if async_op:
            checks.refuse_async(self.context, "broadcast")
        if not is_dynamo_compiling():
            received = DIRECT.broadcast(x, self._token, src, self._key)
            if received is not NotImplemented:
                return received
        return tensors.broadcast(self.route, self._token, x, src)

    def broadcast_(self, x: Tensor, src: int = 0) -> Tensor:
        """Overwrites every rank's `x` with the values of group rank `src`; returns `x`."""
        if not is_dynamo_compiling() and DIRECT.broadcast_(x, self._token, src, self._key) is x:
            return x
        return tensors.broadcast_(self.route, self._token, x, src)

    @host_call("a flag is a Python value; use broadcast_ and keep it a tensor")
    def broadcast_flag(self, flag: bool, src: int = 0) -> bool:
        """Returns the flag of group rank `src` on every rank."""
        value = tensors.flag_value(self.context, flag)
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
        """Returns once every rank of the group has called this."""
        if not is_dynamo_compiling() and DIRECT.barrier(self._token, self._key) is None:
            return
        tensors.barrier(self.route, self._token)

    def empty(
        self, size: Sequence[int], dtype: torch.dtype | None = None, *, device: torch.device | None = None
    ) -> Tensor:
        """Allocates an uninitialized tensor, if possible in memory that all ranks of the group have mapped.

        A collective on such a tensor doesn't copy its input: compute directly into it (`torch.mm(x, w, out=buffer)`).
        The memory is reused after the last tensor that views it is deleted. The result is an ordinary tensor if the
        group spans several hosts, if PARALLEL_STATE_SYMMETRIC_BYTES are used up, or in compiled code on GPUs.

        On a GPU with PARALLEL_STATE_NCCL=on, every rank of the group must call this with the same number of bytes. All
        ranks must pass the same slice of the tensor to a collective: see docs/gpus.md.
        """
        return tensors.empty(self.route, self._token, size, dtype, device)

    @host_call("make the window before, outside the compiled function")
    def window(self, size: Sequence[int], dtype: torch.dtype | None = None) -> Window:
        """Creates a `Window`: on every rank a CPU tensor of shape `size`, filled with zeros, that the other ranks can
        write.

        Every rank of the group must call this; sizes and dtypes may differ. Raises UnsupportedError if the compiled
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
        """Sends `x` to group rank `dst` (default: the next), which must call recv. `x` can be changed afterwards. No
        gradient.
        """
        if not is_dynamo_compiling() and DIRECT.send(x, self._token, dst, self._key) is None:
            return
        tensors.send(self.route, self._token, x, dst)

    def recv(
        self, size: Sequence[int], dtype: torch.dtype, src: int | None = None, *, device: torch.device | None = None
    ) -> Tensor:
        """Returns the tensor that group rank `src` (default: the previous) sends, of shape `size` and dtype `dtype`.

        `device` (default: the group's) must be of the same kind as the device of the sender's tensor.
        """
        if not is_dynamo_compiling():
            received = DIRECT.recv(self._token, size, dtype, device, src, self._key)
            if received is not NotImplemented:
                return received
            raise_interruption()
        return tensors.recv(self.route, self._token, size, dtype, src, device)

    @host_call(_TRANSFER)
    @transfer("isend")
    def isend(self, x: Tensor, dst: int | None = None) -> Handle:
        """Starts to send `x` to group rank `dst`, as `send` does. Change `x` only after `wait()`. Not for compiled
        code.
        """
        checks.check_no_transform(self.context, "isend")
        checks.check_tensor(self.context, "isend", x)
        dst = checks.destination(self.context, "isend", dst)
        return self.route.start("isend", dense(x.detach()), dst, self.context.tag(0))

    @host_call(_TRANSFER)
    @transfer("irecv")
    def irecv(self, size: Sequence[int], dtype: torch.dtype, src: int | None = None) -> TensorHandle:
        """Starts to receive from group rank `src`, as `recv` does; `wait()` returns the tensor. Not for compiled
        code.
        """
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

        An operation is torch's `P2POp`, or `("isend", x, dst)` or `("irecv", out, src)` with group ranks. Transfers
        from one rank to another are matched by their order. Change or read the tensors only after `wait()`. No
        gradient; not for compiled code.
        """
        return tensors.batch_isend_irecv(self.route, operations)

    @host_call(_COLLECTIVE)
    def all_reduce_async(self, x: Tensor, op: checks.ReduceOp = "sum", *, order: checks.Order = "rank") -> TensorHandle:
        """Starts `all_reduce(x, op, order=order)`. The handle's `wait()` returns the result, detached. Change `x` only
        after `wait()`.
        """
        return tensors.all_reduce_async(self.route, x, op, order)

    @host_call(_COLLECTIVE)
    def all_gather_async(self, x: Tensor, dim: int = -1) -> TensorHandle:
        """Starts `all_gather(x, dim)`. Change `x` only after `wait()`."""
        return tensors.all_gather_async(self.route, x, dim)

    @host_call(_COLLECTIVE)
    def reduce_scatter_async(
        self, x: Tensor, dim: int = -1, op: checks.ReduceOp = "sum", *, order: checks.Order = "rank"
    ) -> TensorHandle:
        """Starts `reduce_scatter(x, dim, op, order=order)`. Change `x` only after `wait()`."""
        return tensors.reduce_scatter_async(self.route, x, dim, op, order)

    @host_call(_COLLECTIVE)
    def broadcast_async(self, x: Tensor, src: int = 0) -> TensorHandle:
        """Starts `broadcast(x, src)`. Change `x` only after `wait()`."""
        return tensors.broadcast_async(self.route, x, src)

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        """Returns `(rms_norm(y) * weight, y)` for `y = all_reduce(x) + residual`. Differentiable.

        `x` and `residual` are `[…, hidden]` and `weight` is `[hidden]`, all of one dtype. The sum, `y` and the norm are
        each rounded to that dtype once. `residual` and `weight` must be equal on all ranks.
        """
        name = "all_reduce_add_rms_norm"
        return tensors.all_reduce_add_norm(self.route, self._token, name, x, residual, weight, eps)

    def all_reduce_add_rms_norm_static_fp8_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        """Returns `(norm / scale as float8_e4m3fn, y)`: all_reduce_add_rms_norm with a quantized norm.

        `scale`: one float32 element, positive and finite, on `x`'s device, equal on all ranks. The norm is multiplied
        by `1 / scale` in float32. Raises InvalidArgumentError if an input requires a gradient.
        """
        name = "all_reduce_add_rms_norm_static_fp8_quant"
        return tensors.all_reduce_add_norm(self.route, self._token, name, x, residual, weight, eps, scale)

    def all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Does all_reduce_add_rms_norm, whose result is `(norm, y)`, and quantizes each row of `norm` by its own scale.

        Returns `(norm / scales, scales, y)`. `scales`: float32 `[…, 1]`, for each row `max(|norm|) / 448`, but at least
        1 / (448 · 512). A row with a NaN becomes NaN. In a row with an infinity, the scale is infinite, the infinite
        elements become NaN and the others 0. Raises InvalidArgumentError if an input requires a gradient.
        """
        name = "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant"
        return tensors.all_reduce_add_norm(self.route, self._token, name, x, residual, weight, eps)

    # Objects and tensor dicts.

    @host_call(_OBJECTS)
    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Returns the object of group rank `src` on every rank. The object can contain tensors, at any depth."""
        checks.check_rank(self.context, "broadcast_object", "src", src)
        if tensors.is_single_rank(self.route):
            return messages.encodable(self._messenger, "broadcast_object", obj)
        return self._messenger.broadcast(obj, src, "broadcast_object")

    @host_call(_OBJECTS)
    def broadcast_object_list(self, obj_list: list[Any], src: int = 0) -> list[Any]:
        """Fills every rank's `obj_list` with the objects of group rank `src`, and returns the list.

        All lists must have the same length.
        """
        checks.check_rank(self.context, "broadcast_object_list", "src", src)
        return messages.broadcast_object_list(self._messenger, obj_list, src)

    @host_call(_OBJECTS)
    def all_sum(self, value: float) -> float:
        """Returns the sum of all ranks' numbers. Sums of ints are exact; floats are added in rank order."""
        messages.check_number(self.context, value)
        return value if tensors.is_single_rank(self.route) else sum(self._messenger.all_gather(value, "all_sum"))

    @host_call(_OBJECTS)
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Returns every rank's object, in rank order."""
        if tensors.is_single_rank(self.route):
            return [messages.encodable(self._messenger, "all_gather_object", obj)]
        return self._messenger.all_gather(obj, "all_gather_object")

    @host_call(_OBJECTS)
    @transfer("send_object")
    def send_object(self, obj: Any, dst: int | None = None) -> None:
        """Sends an object to group rank `dst` (default: the next), which must call recv_object."""
        dst = messages.destination(self.context, "send_object", dst)
        self._messenger.send(self._messenger.post(obj, dst, waits=True), dst)

    @host_call(_OBJECTS)
    @transfer("recv_object")
    def recv_object(self, src: int | None = None) -> Any:
        """Returns the object that group rank `src` (default: the previous) sends."""
        return self._messenger.recv(messages.source(self.context, "recv_object", src))

    @host_call(_OBJECTS)
    @transfer("isend_object")
    def isend_object(self, obj: Any, dst: int | None = None) -> SendHandle:
        """Starts send_object. The object's tensors must not change before the handle's `wait()` returns."""
        dst = messages.destination(self.context, "isend_object", dst)
        return self._messenger.isend(self._messenger.post(obj, dst), dst)

    @host_call(_OBJECTS)
    @transfer("irecv_object")
    def irecv_object(self, src: int | None = None) -> ReceiveHandle:
        """Starts recv_object; the handle's `wait()` returns the object. Handles receive objects in the order of their
        creation.
        """
        return self._messenger.irecv(messages.source(self.context, "irecv_object", src))

    def broadcast_tensor_dict(
        self,
        tensor_dict: dict[Any, Any] | None = None,
        src: int = 0,
        *,
        spec: TensorDictSpec | None = None,
        out: Mapping[str, Tensor] | None = None,
        views: bool = False,
    ) -> dict[Any, Any]:
        """Returns the dict of group rank `src` on every rank. Rank `src` gets its own dict back.

        `spec`, `out`, `views` and errors are as in recv_tensor_dict. Rank `src` must not pass `out`. With `views`,
        several receivers can share memory, so they must not write to the tensors.
        """
        checks.check_rank(self.context, "broadcast_tensor_dict", "src", src)
        messages.check_options(self.context, "broadcast_tensor_dict", spec=spec)
        if out is not None and self.rank_in_group == src:
            raise InvalidArgumentError(
                f"out= of broadcast_tensor_dict on {self.context} is for ranks that receive, but this is rank {src}, "
                "which sends; pass out=None on this rank"
            )
        buffers = checked_buffers(self.context, "broadcast_tensor_dict", out, views)
        if spec is not None:
            return by_spec.broadcast(self._messenger, self._token, tensor_dict, src, spec, buffers, views)
        if tensors.is_single_rank(self.route):
            return messages.encodable(self._messenger, "broadcast_tensor_dict", tensor_dict, dict)
        return self._broadcast_dict(tensor_dict, src, buffers, views)

    @host_call(_SPEC, "broadcast_tensor_dict")
    def _broadcast_dict(
        self, tensor_dict: dict[Any, Any] | None, src: int, out: Buffers | None, views: bool
    ) -> dict[Any, Any]:
        return self._messenger.broadcast(tensor_dict, src, "broadcast_tensor_dict", dict, out, views)

    def send_tensor_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        spec: TensorDictSpec | None = None,
    ) -> dict[Any, Any] | None:
        """Sends a dict of tensors and other values to group rank `dst` (default: the next). Gradients are not sent.

        Returns None; in a group of one rank, returns the dict itself, as vLLM does.

        - `all_gather_group`: a group whose ranks all hold the same tensors. Each of these ranks sends one slice of each
          tensor that divides evenly. The receivers gather the slices over their own `all_gather_group`.
        - `all_gather_tensors`: `{"residual": False}` sends the tensor `residual` whole. Needed for tensors that differ
          between ranks of `all_gather_group`.
        - `spec`: describes the dict in advance; the receiver passes an equal spec. The call can then be compiled.
        """
        messages.check_options(self.context, "send_tensor_dict", all_gather_group, all_gather_tensors, spec)
        if self.world_size == 1 and messages.is_only_rank(dst) and tensors.is_single_rank(self.route):
            return messages.encodable(self._messenger, "send_tensor_dict", tensor_dict, dict)
        if spec is not None:
            dst = checks.destination(self.context, "send_tensor_dict", dst)
            by_spec.send(self._messenger, self._token, tensor_dict, dst, all_gather_group, all_gather_tensors, spec)
        else:
            self._send_dict(tensor_dict, dst, all_gather_group, all_gather_tensors)
        return None

    @host_call(_SPEC, "send_tensor_dict")
    @transfer("send_tensor_dict")
    def _send_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: int | None,
        all_gather_group: AllGatherGroup | None,
        all_gather_tensors: Mapping[str, bool] | None,
    ) -> None:
        dst = messages.destination(self.context, "send_tensor_dict", dst)
        outgoing = self._messenger.post(tensor_dict, dst, dict, all_gather_group, all_gather_tensors, waits=True)
        self._messenger.send(outgoing, dst)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        spec: TensorDictSpec | None = None,
        out: Mapping[str, Tensor] | None = None,
        views: bool = False,
    ) -> dict[Any, Any] | Any:  # only a group of one rank has nothing to receive
        """Returns the dict that group rank `src` (default: the previous) sends.

        CPU tensors are received on the CPU, others on the group's device. In a group of one rank, returns None.

        - `all_gather_group`, `spec`: as in send_tensor_dict.
        - `all_gather_tensors`: as in send_tensor_dict, needed only with `spec`: other messages contain this
          information.
        - `out`: tensors to receive into, one for each sent tensor, with equal shape, dtype and device type. The
          returned dict contains them. After an error their content is undefined.
        - `views`: tensors can be views of this host's shared memory. The views stay valid after the group or the sender
          ends. Small tensors are copied. While this rank keeps more than 256 MiB of a sender's views, large tensors of
          that sender are copied, too.

        Raises CollectiveMismatchError if the sender of CPU tensors passed another spec. Raises InvalidArgumentError for
        `out` together with `views`, or if `out` doesn't fit the dict. In the latter case, a dict sent without `spec` is
        lost.
        """
        messages.check_options(self.context, "recv_tensor_dict", all_gather_group, all_gather_tensors, spec)
        buffers = checked_buffers(self.context, "recv_tensor_dict", out, views)
        if self.world_size == 1 and messages.is_only_rank(src) and tensors.is_single_rank(self.route):
            return None
        if spec is not None:
            src = checks.source(self.context, "recv_tensor_dict", src)
            return by_spec.recv(
                self._messenger, self._token, src, all_gather_group, all_gather_tensors, spec, buffers, views
            )
        return self._recv_dict(messages.source(self.context, "recv_tensor_dict", src), all_gather_group, buffers, views)

    @host_call(_SPEC, "recv_tensor_dict")
    @transfer("recv_tensor_dict")
    def _recv_dict(
        self, src: int, all_gather_group: AllGatherGroup | None, out: Buffers | None, views: bool
    ) -> dict[Any, Any]:
        return self._messenger.recv(src, all_gather_group, out, views)

    @host_call(_WAITING_DICT)
    @transfer("isend_tensor_dict")
    def isend_tensor_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> SendHandle:
        """Starts send_tensor_dict. Change the tensors only after the handle's `wait()`.

        In a group of one rank, iterating over the handle yields nothing.
        """
        messages.check_options(self.context, "isend_tensor_dict", all_gather_group, all_gather_tensors)
        if self.world_size == 1 and messages.is_only_rank(dst) and tensors.is_single_rank(self.route):
            messages.encodable(self._messenger, "isend_tensor_dict", tensor_dict, dict)
            return NoSend(self._messenger)
        dst = messages.destination(self.context, "isend_tensor_dict", dst)
        outgoing = self._messenger.post(tensor_dict, dst, dict, all_gather_group, all_gather_tensors)
        return self._messenger.isend(outgoing, dst)

    @host_call(_WAITING_DICT)
    @transfer("irecv_tensor_dict")
    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        out: Mapping[str, Tensor] | None = None,
        views: bool = False,
    ) -> ReceiveHandle:
        """Starts to receive a dict from group rank `src` (default: the previous); the handle's `wait()` returns the
        dict.

        Every rank of `all_gather_group` must call `wait()`. `all_gather_tensors` has no effect. `all_gather_group`,
        `out` and `views` are as in recv_tensor_dict. In a group of one rank `wait()` returns None, and the handle
        unpacks to None and two empty lists.
        """
        messages.check_options(self.context, "irecv_tensor_dict", all_gather_group, all_gather_tensors)
        buffers = checked_buffers(self.context, "irecv_tensor_dict", out, views)
        if self.world_size == 1 and messages.is_only_rank(src) and tensors.is_single_rank(self.route):
            return NoReceive()
        return self._messenger.irecv(
            messages.source(self.context, "irecv_tensor_dict", src), all_gather_group, buffers, views
        )

    def __repr__(self) -> str:
        return f"GroupCoordinator({self.context}, device {self.device})"


def _raise_unknown_name(self: GroupCoordinator, name: str) -> NoReturn:
    if isinstance(renamed := getattr(type(self), name, None), _Renamed):
        raise renamed._error(self)
    known = () if name.startswith("_") else [each for each in dir(self) if not each.startswith("_")]
    problem = f"{type(self).__name__!r} object has no attribute"
    raise AttributeError(no_such_name(problem, name, known), name=name)


# Assigned here: with `__getattr__` in the class, a type checker would accept any name.
GroupCoordinator.__getattr__ = _raise_unknown_name  # type: ignore[attr-defined]


def verify_group(group: GroupCoordinator) -> None:
    if group.world_size > 1 and not is_fake():
        total = int(group.all_reduce(torch.ones(1, device=group.device)).item())
        if total != group.world_size:
            raise CommunicationError(
                f"the test all_reduce of {group.context} returned {total} instead of {group.world_size}; set "
                "NCCL_DEBUG=INFO to log what NCCL does, and check the network between the hosts"
            )
        logger.debug("the first all-reduce of %s gave the right sum", group.context)
