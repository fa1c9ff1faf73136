"""GroupCoordinator: this rank's view of one group, and every call one can make on it.

It knows who is in the group, pairs the device's process group with a gloo group, and checks calls. The tensor
collectives are in `collectives`; objects and tensor dicts are here, carried by a `Messenger`. How bytes move is
decided below, in the route.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from device_communicators.base import GroupContext
from device_communicators.catalog import build_route
from device_communicators.errors import GroupNotInitializedError, InvalidArgumentError, format_ranks
from device_communicators.routing import Handle, Traffic, register_route, unique_name
from parallel_state import checks
from parallel_state import tensor_dict as by_spec
from parallel_state.agreement import digest
from parallel_state.async_collectives import AsyncTensorCollectives
from parallel_state.groups import Acquired, ProcessGroupPool, RankLists
from parallel_state.messages import Messenger, ReceiveHandle, SendHandle, TensorHandle
from parallel_state.ops import ordering_token
from parallel_state.options import GroupOptions
from parallel_state.tensor_dict import TensorDictSpec
from parallel_state.wire import AllGatherGroup


class Traits(NamedTuple):
    """What a group is told beside its ranks; sub-groups inherit it."""

    device: torch.device
    local_rank: int = 0
    options: GroupOptions = GroupOptions()
    allow_pickle: bool = False
    custom_all_reduce: bool = True
    lazy_cpu_group: bool = False
    """Whether the gloo group beside a device group is made at its first use, by all ranks together."""


class GroupCoordinator(AsyncTensorCollectives):
    """This rank's view of one group.

    Attributes: `unique_name` (`tp:0`), `ranks` (global, in group order), `rank` (global), `rank_in_group`,
    `world_size`, `local_rank` (on this host), `device`. Made by `state` and `groups`, not by hand.
    """

    def __init__(
        self,
        context: GroupContext,
        traits: Traits | None = None,
        *,
        pool: ProcessGroupPool | None = None,
        acquired: list[Acquired] | None = None,
    ) -> None:
        self.context = context
        self.traits = traits or Traits(context.device)
        self.unique_name = context.name
        self._key = context.key
        self._destroyed = False
        self.ranks = list(context.ranks)
        self.rank = context.ranks[context.rank]
        self.rank_in_group = context.rank
        self.world_size = context.size
        self.local_rank = self.traits.local_rank
        self.device = context.device
        self.pool = pool
        self.backend = self.traits.options.backend or "simulated"
        self.route = build_route(context)
        self.acquired = acquired if acquired is not None else []
        self._messenger = Messenger(self.route, self.traits.allow_pickle)
        self._token = ordering_token(context.device)
        register_route(self.route)

    # Who is in the group.

    @property
    def size(self) -> int:
        return self.world_size

    @property
    def first_rank(self) -> int:
        """Global rank of the group's first."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """Global rank of the group's last."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def next_rank(self) -> int:
        """Global rank of the next, round the end."""
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        """Global rank of the previous, round the end."""
        return self.ranks[(self.rank_in_group - 1) % self.world_size]

    @property
    def device_group(self) -> Any:
        """The torch ProcessGroup for tensors of `device`, for code that calls torch.distributed itself."""
        return self._process_group(lambda: self.context.device_group, self.traits.options)

    @property
    def cpu_group(self) -> Any:
        """The gloo ProcessGroup for CPU tensors; the device group itself where the device is the CPU.

        Beside a device group that is seldom used for messages it is made at the first use, which is then a call that
        every rank of the group makes (a barrier, a broadcast of an object).
        """
        return self._process_group(lambda: self.context.cpu_group, self.traits.options.for_cpu)

    def as_process_group(self) -> Any:
        return self.device_group

    def _process_group(self, find: Callable[[], Any], options: GroupOptions) -> Any:
        if self._destroyed:
            self.route.check_usable()  # raises
        if self.pool is None:
            raise GroupNotInitializedError(f"{self.context} is simulated and has no process group")
        # Never None for one rank: torch.distributed takes group=None for the whole world.
        return find() if self.world_size > 1 else self.pool.alone(options)

    # Tensors, without waiting.

    def isend(self, x: Tensor, dst: int | None = None) -> Handle:
        """As send without waiting. `x` is kept alive; change it after `wait()` only. Not for compiled code."""
        checks.check_tensor(self.context, "isend", x)
        dst = self._destination("isend", dst)
        return self.route.start("isend", x.detach().contiguous(), dst, self.context.tag(0))

    def irecv(self, size: Sequence[int], dtype: torch.dtype, src: int | None = None) -> TensorHandle:
        """As recv without waiting: `wait()` gives the tensor. Not for compiled code."""
        checks.check_lengths(self.context, "irecv", "size", size)
        checks.check_dtype(self.context, "irecv", dtype)
        src = self._source("irecv", src)
        out = torch.empty(size, dtype=dtype, device=self.device)
        return TensorHandle(self.route.start("irecv_", out, src, self.context.tag(0)), out)

    # Objects.

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Rank `src`'s object on every rank. Tensors may be in it, at any depth.

        Raises MessageEncodeError on `src`, and RemoteError on the others, where a value can't travel.
        """
        checks.check_rank(self.context, "broadcast_object", "src", src)
        return obj if self._ends_here() else self._messenger.broadcast(obj, src)

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0) -> list[Any]:
        """Fills every rank's `obj_list`, of the same length everywhere, with rank `src`'s objects; returns it."""
        checks.check_rank(self.context, "broadcast_object_list", "src", src)
        if not self._ends_here():
            received = self._messenger.broadcast(obj_list, src, must_be=list)
            if not isinstance(obj_list, list) or len(received) != len(obj_list):
                found = f"has {len(obj_list)}" if isinstance(obj_list, list) else f"is a {type(obj_list).__name__}"
                raise InvalidArgumentError(
                    f"obj_list of broadcast_object_list on {self.context} must be a list as long as rank {src}'s, "
                    f"{len(received)}, but {found}"
                )
            obj_list[:] = received
        return obj_list

    def broadcast_flag(self, flag: bool, src: int = 0) -> bool:
        """Rank `src`'s flag on every rank."""
        return bool(self.broadcast_(torch.tensor(flag, dtype=torch.uint8), src).item())

    def all_sum(self, value: float) -> float:
        """The sum of the ranks' numbers, exact for ints and in rank order for floats."""
        return sum(self.all_gather_object(value))

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order, on every rank."""
        return [obj] if self._ends_here() else self._messenger.all_gather(obj)

    def send_object(self, obj: Any, dst: int | None = None) -> None:
        """Sends an object to rank `dst` (default: the next), which calls recv_object."""
        self.isend_object(obj, dst).wait()

    def recv_object(self, src: int | None = None) -> Any:
        """The object that rank `src` (default: the previous) sends with send_object."""
        return self._messenger.recv(self._source("recv_object", src))

    def isend_object(self, obj: Any, dst: int | None = None) -> SendHandle:
        """As send_object without waiting: the object is encoded now, its tensors must stay unchanged until `wait()`."""
        return self._messenger.isend(obj, self._destination("isend_object", dst))

    def irecv_object(self, src: int | None = None) -> ReceiveHandle:
        """Starts to receive; `wait()` gives the object. Several are served in the order they were started."""
        return self._messenger.irecv(self._source("irecv_object", src))

    # Tensor dicts.

    def broadcast_tensor_dict(
        self, tensor_dict: dict[Any, Any] | None = None, src: int = 0, *, spec: TensorDictSpec | None = None
    ) -> dict[Any, Any]:
        """Rank `src`'s dict of tensors and other values on every rank; on `src` the very same dict.

        CPU tensors arrive on the CPU, others on the group's device; tensors of one size travel at the same time.
        With `spec` (see TensorDictSpec) nothing but tensor data is sent, and the call compiles.
        """
        checks.check_rank(self.context, "broadcast_tensor_dict", "src", src)
        if spec is not None:
            return by_spec.broadcast(self, tensor_dict, src, spec)
        if self._ends_here():
            return _own(tensor_dict)
        return self._messenger.broadcast(tensor_dict, src, must_be=dict)

    def send_tensor_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        spec: TensorDictSpec | None = None,
    ) -> None:
        """Sends a dict of tensors and other values to rank `dst` (default: the next); tensors travel detached.

        With `all_gather_group`, whose ranks all hold the same tensors, each of them sends its slice of every tensor
        that divides evenly, and the receivers gather the slices from their own all-gather group. A tensor that
        differs between those ranks must be excepted: `all_gather_tensors={"residual": False}`.
        With `spec` no metadata is sent, and the call compiles.
        """
        if spec is not None:
            dst = self._destination("send_tensor_dict", dst)
            return by_spec.send(self, tensor_dict, dst, all_gather_group, all_gather_tensors, spec)
        return self.isend_tensor_dict(tensor_dict, dst, all_gather_group, all_gather_tensors).wait()

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        spec: TensorDictSpec | None = None,
    ) -> dict[Any, Any]:
        """The dict that rank `src` (default: the previous) sends. Without `spec`, what is cut into slices is told
        by the sender, and `all_gather_tensors` is not needed."""
        src = self._source("recv_tensor_dict", src)
        if spec is not None:
            return by_spec.recv(self, src, all_gather_group, all_gather_tensors, spec)
        return self._messenger.recv(src, all_gather_group)

    def isend_tensor_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> SendHandle:
        """As send_tensor_dict without waiting. The tensors are kept alive; change them after `wait()` only."""
        dst = self._destination("isend_tensor_dict", dst)
        return self._messenger.isend(tensor_dict, dst, all_gather_group, all_gather_tensors, must_be=dict)

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> ReceiveHandle:
        """Starts to receive; `wait()` gives the dict. With an all-gather group every rank of that must call `wait()`.

        What is cut into slices is told by the sender; `all_gather_tensors` is taken for vLLM's callers only.
        """
        return self._messenger.irecv(self._source("irecv_tensor_dict", src), all_gather_group)

    def _destination(self, operation: str, dst: int | None) -> int:
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        checks.check_peer(self.context, operation, "dst", dst)
        return dst

    def _source(self, operation: str, src: int | None) -> int:
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        checks.check_peer(self.context, operation, "src", src)
        return src

    # About the group.

    def make_sub_group(self, ranks: Sequence[int], *, name: str = "sub") -> GroupCoordinator | None:
        """A new group of these ranks *of this group*; None on ranks that aren't in it.

        Every rank of this group calls it with the same distinct ranks in ascending order; other groups may do the
        same at the same time. Raises InvalidArgumentError, or ConfigMismatchError on every rank where ranks differ.
        """
        self.route.check_usable()
        if not ranks or len(set(ranks)) != len(ranks):
            raise InvalidArgumentError(
                f"ranks of a sub-group of {self.context} must be distinct, but are {list(ranks)}"
            )
        for rank in ranks:
            checks.check_rank(self.context, "make_sub_group", "ranks", rank)
        inside = [self.ranks[rank] for rank in ranks]
        if self.pool is None:
            context = dataclasses.replace(
                self.context, name=unique_name(name), ranks=tuple(inside), rank=list(ranks).index(self.rank_in_group)
            ) if self.rank_in_group in ranks else None  # fmt: skip
            return GroupCoordinator(context, self.traits) if context is not None else None
        if inside != sorted(inside):
            # torch.distributed numbers a group's ranks in ascending order, whatever it is given.
            raise InvalidArgumentError(f"the ranks of a group must be in ascending order, but are {list(ranks)}")
        self.pool.agreement.require(
            "sub-group", self.ranks, {"ranks": format_ranks(ranks), "digest": digest(ranks)}, self.context.timeout_s
        )
        return create_group(self.pool, inside, name, self.traits) if self.rank in inside else None

    def explain(self) -> str:
        """Which communicators carry this group's operations, in order, and why others don't."""
        return self.route.explain()

    def traffic(self) -> dict[str, Traffic]:
        """Calls and bytes so far, by operation; bytes are those of the tensor that this rank passed or received."""
        return dict(self.route.traffic)

    def destroy(self) -> None:
        """Ends the group on this rank; every rank of the group calls it. Twice is fine."""
        if self._destroyed:
            return
        self._destroyed = True
        self._messenger.close()
        self.route.close()
        if self.pool is not None:
            for acquired in self.acquired:
                self.pool.release(acquired)

    def close(self) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"GroupCoordinator({self.context}, device {self.device})"


def _own(tensor_dict: dict[Any, Any] | None) -> dict[Any, Any]:
    if not isinstance(tensor_dict, dict):
        raise InvalidArgumentError(f"a tensor dict must be a dict, but is a {type(tensor_dict).__name__}")
    return tensor_dict


def create_group(
    pool: ProcessGroupPool,
    ranks: Sequence[int],
    name: str,
    traits: Traits,
    *,
    division: Callable[[], RankLists] | None = None,
    near: Sequence[Acquired] = (),
) -> GroupCoordinator:
    """The coordinator of the group of `ranks` (global, ascending), of which this rank is one.

    Who calls it, and `division` and `near`, as for ProcessGroupPool.acquire. Pairs a group for tensors of the
    traits' device with a gloo group; where its backend is gloo the two are one.
    """
    taken: list[Acquired] = []

    def acquire(options: GroupOptions) -> Acquired:
        taken.append(pool.acquire(ranks, options, division=division, near=near))
        return taken[-1]

    @functools.cache
    def cpu_group() -> Any:
        return (device if traits.options.for_cpu == traits.options else acquire(traits.options.for_cpu)).process_group

    try:
        device = acquire(traits.options)
        if not traits.lazy_cpu_group:
            cpu_group()
        context = GroupContext(
            name=unique_name(name),
            ranks=tuple(ranks),
            rank=list(ranks).index(pool.rank),
            device=traits.device,
            timeout_s=traits.options.timeout_s,
            device_group=device.process_group,
            make_cpu_group=cpu_group,
            channel=max(acquired.channel for acquired in taken),
            custom_all_reduce=traits.custom_all_reduce,
        )
        return GroupCoordinator(context, traits, pool=pool, acquired=taken)
    except BaseException:
        for acquired in taken:
            pool.release(acquired)
        raise
