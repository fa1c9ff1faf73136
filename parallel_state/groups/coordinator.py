"""GroupCoordinator, and its creation over process groups."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from device_communicators.base import forks, limits, settings
from device_communicators.base.errors import (
    CommunicationError,
    GroupNotInitializedError,
    InvalidArgumentError,
    RenamedError,
    format_ranks,
    no_such_name,
)
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.base.member import Timeout
from device_communicators.base.torch_internals import default_store, is_fake, set_timeout
from device_communicators.catalog import build_route
from device_communicators.liveness.health import FailureDomain, Watcher
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import counted_from_begin
from device_communicators.routing.registry import register_route, unique_name
from device_communicators.routing.route import Traffic
from parallel_state.collectives import checks
from parallel_state.collectives.calls import TensorCalls
from parallel_state.collectives.capture_stream import GraphCaptureContext, prepared
from parallel_state.collectives.direct import DIRECT
from parallel_state.collectives.ops import ordering_token
from parallel_state.messages.calls import MessageCalls
from parallel_state.messages.messenger import Messenger
from parallel_state.process_groups.agreement import Request, digest
from parallel_state.process_groups.joining import GivenGroup, agree_on_settings, agree_on_token, examine, prepare
from parallel_state.process_groups.options import GroupOptions, seconds
from parallel_state.process_groups.pool import Acquired, LazyProcessGroup, ProcessGroupPool, RankLists
from parallel_state.startup import environment

logger = logging.getLogger("parallel_state")


class Traits(NamedTuple):
    device: torch.device
    local_rank: int = 0
    options: GroupOptions = GroupOptions()
    allow_pickle: bool = False
    custom_all_reduce: bool = True
    high_priority_stream: bool = False
    """Gives our own NCCL communicators a stream of high priority. Set the same field of `options` for the process
    group.
    """
    lazy_cpu_group: bool = False
    """If True, the gloo group beside a device group is created at its first use, by all ranks together."""


class _Renamed:
    """Replaces an attribute that is a global rank in vLLM. Reading it raises RenamedError with the new names."""

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


class GroupCoordinator(TensorCalls, MessageCalls):
    """One rank's view of a group, with every call on that group.

    Attributes: `unique_name` (`tp:0`), `ranks` (global, in group order), `rank` (global), `rank_in_group`,
    `world_size`, `local_rank` (on this host), `device`, `is_first_rank`, `is_last_rank`. For the arguments `src` and
    `dst`: `first_rank_in_group`, `last_rank_in_group`, `next_rank_in_group` and `prev_rank_in_group`; next and prev
    wrap around. `first_global_rank` and so on are the global ranks. fairseq2's names: `size`, `as_process_group()`,
    `close()`. Programs don't call the constructor.
    """

    def __init__(
        self,
        context: GroupContext,
        traits: Traits | None = None,
        *,
        pool: ProcessGroupPool | None = None,
        acquired: list[Acquired] | None = None,
        public_cpu_group: Any = None,
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
        self._owns_pool = False
        self._messenger = Messenger(self.route, self.traits.allow_pickle)
        self._token = ordering_token(context.device)
        if context.collectives is not None:
            DIRECT.use(context.collectives.library)
        register_route(self.route)

    if not TYPE_CHECKING:  # with it, a type checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            """Raises RenamedError for a renamed attribute, otherwise AttributeError with the most similar name."""
            if isinstance(renamed := getattr(type(self), name, None), _Renamed):
                raise renamed._error(self)
            known = () if name.startswith("_") else [each for each in dir(self) if not each.startswith("_")]
            problem = f"{type(self).__name__!r} object has no attribute"
            raise AttributeError(no_such_name(problem, name, known), name=name)

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

        Every rank of the group must call it, and no other rank. A rank of several process groups wraps them in the same
        order as the other ranks.

        - `process_group`: the caller still owns it and `cpu_group`, and destroys both after `destroy()`.
        - `cpu_group`: a gloo group of the same ranks. Default: `process_group` if that is gloo, else a new group.
        - `device`: default: CUDA if the process group has a backend for CUDA alone, else the CPU.
        - `timeout`: of each call, in seconds or as a timedelta. Default: PARALLEL_STATE_TIMEOUT_S.
        - `within`: a coordinator that contains these ranks and outlives the new one. If a death fails `within`, the new
          coordinator fails as well.

        Some calls run on `process_group`. If the program also calls `process_group` itself, all ranks must make both
        kinds of calls in the same order. Raises GroupNotInitializedError before init_process_group,
        InvalidArgumentError for a wrong argument or on a rank outside the group, RendezvousError if a rank of the group
        doesn't call it in time.
        """
        forks.check("from_process_group()")
        given = examine(process_group, cpu_group, device)
        outer = None if within is None else within._as_outer(given.ranks)
        limits.raise_descriptor_limit()
        prepare(len(given.ranks))
        timeout_s = seconds(timeout)
        if outer is None:
            token = agree_on_token(given.device, process_group, "from_process_group")
            pool, domain = ProcessGroupPool(timeout_s, token=token), FailureDomain(given.ranks, is_root=True)
        else:
            pool, domain = outer
        try:
            if outer is None:
                follow(pool, given.ranks, "from_process_group")
                limit_s = settings.START_TIMEOUT_S.get()
                agree_on_settings(pool.agreement, given.ranks, given.backend, timeout_s, limit_s)
            options = GroupOptions(given.backend).resolve(given.backend, timeout_s, known=given.backend)
            place = environment.explicit(pool.rank, pool.world_size, rendezvous=False)
            traits = Traits(given.device, place.local_rank, options, allow_pickle)
            group = create_group(pool, given.ranks, name, traits, domain=domain, given=given)
            group._owns_pool = outer is None
            if outer is None:
                record_neighbours(pool, group)
        except BaseException:
            if outer is None:
                pool.close()
            raise
        return group

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
        """Sets `timeout` for the calls in the body."""
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

        Every rank of this group calls it with the same distinct ranks in ascending order. The new group has its own
        process groups: one thread may use it while another thread uses this group. A sub-group of the world fails only
        by deaths among its own ranks. A sub-group of a parallel group fails with that group. Raises
        InvalidArgumentError, or ConfigMismatchError if arguments differ.
        """
        self.route.check_usable()

        def resolve() -> tuple[list[int], Request]:
            inside = self._ranks_inside(ranks)
            if not isinstance(name, str):
                raise InvalidArgumentError(f"name of make_sub_group on {self.context} must be a str, but is {name!r}")
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
        return create_group(self.pool, inside, name, self.traits, domain=domain, unshared=True)

    def _ranks_inside(self, ranks: Sequence[int]) -> list[int]:
        if not isinstance(ranks, (list, tuple, range)):
            raise InvalidArgumentError(
                f"ranks of a sub-group of {self.context} must be a list of ints, but is a {type(ranks).__name__}"
            )
        for rank in ranks:
            checks.check_rank(self.context, "make_sub_group", "ranks", rank)
        if not ranks or len(set(ranks)) != len(ranks):
            raise InvalidArgumentError(
                f"ranks of a sub-group of {self.context} must be distinct, but are {list(ranks)}"
            )
        inside = [self.context.ranks[rank] for rank in ranks]
        if self.pool is not None and inside != sorted(inside):
            # torch.distributed sorts a group's ranks.
            raise InvalidArgumentError(f"the ranks of a group must be in ascending order, but are {list(ranks)}")
        return inside

    @host_call(OUTSIDE)
    def graph_capture(
        self, context: GraphCaptureContext | None = None, *, peers: Sequence[int] = ()
    ) -> AbstractContextManager[GraphCaptureContext]:
        """Prepares the group for CUDA graphs that the body captures. Every rank of the group must enter it.

        In the body the current stream is the stream of `context`, or a new stream that waits for the previous one.
        `peers`: ranks in the group with which this rank exchanges data for the first time in these graphs. Each peer
        must list this rank in its `peers`.
        """
        if not isinstance(peers, (list, tuple, range, set, frozenset)):
            raise InvalidArgumentError(
                f"peers of graph_capture on {self.context} must be ranks, but is a {type(peers).__name__}"
            )
        for peer in peers:
            checks.check_rank(self.context, "graph_capture", "peers", peer)
        return prepared(self.route, context, self.device, peers)

    @host_call(OUTSIDE)
    def suspend(self) -> int:
        """Frees memory of this rank until `resume`. Every rank calls it. Returns the number of freed bytes.

        On a CPU it frees slots and message queues in shared memory, and memory of deleted tensors that was kept for
        reuse. On a GPU it frees NCCL's buffers, which aren't counted. Connections stay open. Until `resume`, calls
        raise UsageError.

        Raises UsageError on all ranks if a rank has a running call, a started call without a wait, or sent a message
        that wasn't received. Raises UnsupportedError with NCCL before 2.29.7.
        """
        before = sum(self.memory_stats().values())
        self.route.suspend()
        return max(0, before - sum(self.memory_stats().values()))

    @host_call(OUTSIDE)
    def resume(self) -> None:
        """Allocates the memory that `suspend` freed, and allows calls again. Every rank calls it.

        Raises UsageError on all ranks if a rank finds too little memory. The ranks can then call `resume` again.
        """
        self.route.resume()

    @host_call(OUTSIDE)
    def memory_stats(self) -> dict[str, int]:
        """Returns this rank's bytes in shared memory: `slots_bytes`, `queues_bytes`, `tensors_bytes`. Sends nothing."""
        return {} if (memory := self.context.host_memory) is None else memory.backed_bytes()

    @host_call(OUTSIDE)
    def explain(self) -> str:
        """Lists the group's communicators in order of preference, with the reason for each that isn't used."""
        text = self.route.explain()
        if self.pool is None:
            return text
        from parallel_state.startup.job_store import store_in_words

        watcher = self.context.watcher
        ends = "" if watcher is None else watcher.explain(self.context.other_ranks)
        return "\n  ".join(filter(None, (text, ends, f"store: {store_in_words()}")))

    @host_call(OUTSIDE)
    def traffic(self) -> dict[str, Traffic]:
        """Returns calls and bytes so far, by operation. Bytes count tensors that this rank passed or received."""
        return self.route.traffic()

    @host_call(OUTSIDE)
    def destroy(self) -> None:
        """Destroys the group on this rank. Every rank of the group calls it; repeated calls do nothing."""
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
            with contextlib.ExitStack() as stack:  # runs in reverse order, even if one raises
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

    def __repr__(self) -> str:
        return f"GroupCoordinator({self.context}, device {self.device})"


def create_group(
    pool: ProcessGroupPool,
    ranks: Sequence[int],
    name: str,
    traits: Traits,
    *,
    division: Callable[[], RankLists] | None = None,
    near: Sequence[Acquired] = (),
    domain: FailureDomain | None = None,
    unshared: bool = False,
    given: GivenGroup | None = None,
) -> GroupCoordinator:
    """Creates the group of the global ranks `ranks`, which must ascend and include this rank.

    ProcessGroupPool.acquire describes which ranks must call this, and the other arguments. `domain`: the ranks whose
    death fails the group, by default all ranks of the world.
    """
    # A compile must finish before peers start waiting.
    from device_communicators.cpu.host_memory import HostMemory
    from device_communicators.cpu.native_group import Members

    domain = domain or FailureDomain(range(pool.world_size))
    taken: list[Acquired] = []

    def acquire(options: GroupOptions) -> Acquired:
        taken.append(pool.acquire(ranks, options, division=division, near=near, root=domain.root, unshared=unshared))
        return taken[-1]

    try:
        device = acquire(traits.options) if given is None else Acquired(given.process_group, ())
        if given is not None and given.cpu_group is not None:
            cpu_group = LazyProcessGroup(lambda: given.cpu_group)
        elif traits.options.for_cpu == traits.options:
            cpu_group = LazyProcessGroup(lambda: device.process_group)
        else:
            cpu_group = LazyProcessGroup(lambda: acquire(traits.options.for_cpu).process_group)
        if traits.options.for_cpu == traits.options or not traits.lazy_cpu_group:
            cpu_group()
        timeout = Timeout(traits.options.timeout_s)
        members = Members(unique_name(name), tuple(ranks), list(ranks).index(pool.rank), timeout)
        fake = is_fake(device.process_group)
        real = cpu_group.made and len(ranks) > 1 and not fake
        memory = HostMemory(members, pool.neighbours) if real else None
        if memory is not None:
            purpose = f"shared memory {digest([acquired.keys for acquired in taken])}"
            purpose += "" if given is None else f" of {given.key}"
            memory.attach(pool.watcher, pool.watched_with(ranks), cpu_group(), purpose)
            memory.end_waits_at_deaths(pool.watcher, domain)
        context = GroupContext(
            name=members.name,
            ranks=members.ranks,
            rank=members.rank,
            device=traits.device,
            timeout=timeout,
            device_group=device.process_group,
            make_cpu_group=cpu_group,
            host_memory=memory,
            watcher=pool.watcher,
            domain=domain,
            channel=pool.next_channel(ranks) if given is None else given.next_channel(),
            given="" if given is None else given.key,
            fake=fake,
            custom_all_reduce=traits.custom_all_reduce,
            high_priority_stream=traits.high_priority_stream or traits.options.high_priority_stream,
            nccl_config=traits.options.nccl_config,
        )
        if given is None and len(ranks) > 1 and not fake:
            timeout.follow(partial(_set_timeouts, device, cpu_group, members.timeout_s))
        for_callers, found = traits.options.for_callers, None
        is_programs = traits.device.type == "cpu" and pool.is_programs(device, everyone=domain.is_root)
        if given is not None:
            found = given.for_callers
        elif for_callers == traits.options:
            found = device.process_group
        elif len(ranks) > 1 and not fake and not is_programs and for_callers != traits.options.for_cpu:
            found = acquire(for_callers).process_group
        return GroupCoordinator(context, traits, pool=pool, acquired=taken, public_cpu_group=found)
    except BaseException as error:
        # The group may have transfers that never complete.
        failed = isinstance(error, CommunicationError)
        with contextlib.ExitStack() as stack:
            for acquired in taken:
                stack.callback(pool.release, acquired, failed=failed)
        raise


def _set_timeouts(device: Acquired, cpu_group: LazyProcessGroup, at_creation_s: float, timeout_s: float) -> None:
    """Sets the timeouts to `timeout_s`. The gloo group's stays at least `at_creation_s`, because other groups use the
    same gloo group.
    """
    gloo = cpu_group() if cpu_group.made else None
    if gloo is not None:
        set_timeout(gloo, max(timeout_s, at_creation_s))
    if device.process_group is not gloo:
        set_timeout(device.process_group, timeout_s)


def follow(pool: ProcessGroupPool, ranks: Sequence[int], caller: str) -> None:
    """Starts failure detection. All `ranks` must call this after they created a process group."""
    from device_communicators.c10d.world import World, address_of
    from device_communicators.cpu.watching import meet

    store = default_store()
    pool.address = address_of(store.raw)
    if len(ranks) == 1 or is_fake():
        return
    if shared := Watcher.shared_by(ranks) or World.watcher_of(ranks):
        pool.watcher.join(shared, pool.prefix)
        pool.watcher.gather("met", ranks, b"", settings.START_TIMEOUT_S.get(), what=f"{caller}()", operation=caller)
    else:
        meet(store.prefixed(f"{pool.prefix}/start"), pool.rank, ranks, pool.watcher, pool.address, caller)


def record_neighbours(pool: ProcessGroupPool, group: GroupCoordinator) -> None:
    from device_communicators.cpu.watching import know_neighbours

    memory = group.context.host_memory
    if memory is None:
        return
    pool.neighbours = memory.cores
    know_neighbours(memory, pool.watcher)


def verify_group(group: GroupCoordinator) -> None:
    if group.world_size > 1 and not is_fake():
        total = int(group.all_reduce(torch.ones(1, device=group.device)).item())
        if total != group.world_size:
            raise CommunicationError(
                f"the test all_reduce of {group.context} returned {total} instead of {group.world_size}; set "
                "NCCL_DEBUG=INFO to log what NCCL does, and check the network between the hosts"
            )
        logger.debug("the first all-reduce of %s gave the right sum", group.context)
