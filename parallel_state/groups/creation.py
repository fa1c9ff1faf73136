"""Creates groups over process groups, and starts failure detection among their ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from device_communicators.base import forks, limits, settings
from device_communicators.base.errors import CommunicationError, InvalidArgumentError
from device_communicators.base.member import Timeout
from device_communicators.base.torch_internals import default_store, is_fake, set_timeout
from device_communicators.cpu.types import HostMemory
from device_communicators.liveness.health import FailureDomain, Watcher
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.registry import unique_name
from parallel_state.collectives import checks
from parallel_state.process_groups.agreement import digest
from parallel_state.process_groups.joining import GivenGroup, agree_on_settings, agree_on_token, examine, prepare
from parallel_state.process_groups.options import GroupOptions
from parallel_state.process_groups.pool import Acquired, LazyProcessGroup, ProcessGroupPool, RankLists
from parallel_state.startup import environment

Group = TypeVar("Group")


class Traits(NamedTuple):
    device: torch.device
    local_rank: int = 0
    options: GroupOptions = GroupOptions()
    allow_pickle: bool = False
    custom_all_reduce: bool = True
    high_priority_stream: bool = False
    """Gives this library's own NCCL communicators a stream of high priority. `options` has the same for torch's."""
    lazy_cpu_group: bool = False
    """If True, all ranks of the group together create its gloo group at the first use."""


def create_group(
    make: Callable[..., Group],
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
    owns_pool: bool = False,
) -> Group:
    """Creates the group of the global ranks `ranks`, which must ascend and include this rank.

    Every rank of the group must call this, or with `division` every rank of the world. `make`: the class to
    instantiate. `name`: begins `unique_name`. `division`, `near`, `unshared`: as in ProcessGroupPool.acquire. `domain`:
    the ranks whose death fails the group, by default all ranks of the world. `given`: process groups of the program,
    used instead of the pool's. `owns_pool`: the group closes `pool`.
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
        is_programs = traits.device.type == "cpu" and pool.is_programs(device, with_default=domain.is_root)
        if given is not None:
            found = given.for_callers
        elif for_callers == traits.options:
            found = device.process_group
        elif len(ranks) > 1 and not fake and not is_programs and for_callers != traits.options.for_cpu:
            found = acquire(for_callers).process_group
        if owns_pool:
            record_neighbours(pool, memory)
        return make(context, traits, pool=pool, acquired=taken, public_cpu_group=found, owns_pool=owns_pool)
    except BaseException as error:
        # The group may have transfers that never complete.
        failed = isinstance(error, CommunicationError)
        with contextlib.ExitStack() as stack:
            for acquired in taken:
                stack.callback(pool.release, acquired, failed=failed)
        raise


def _set_timeouts(device: Acquired, cpu_group: LazyProcessGroup, at_creation_s: float, timeout_s: float) -> None:
    """Sets the process groups' timeouts to `timeout_s`.

    The gloo group `cpu_group` keeps at least its first timeout, `at_creation_s`, because other groups can share it.
    """
    gloo = cpu_group() if cpu_group.made else None
    if gloo is not None:
        set_timeout(gloo, max(timeout_s, at_creation_s))
    if device.process_group is not gloo:
        set_timeout(device.process_group, timeout_s)


def follow(pool: ProcessGroupPool, ranks: Sequence[int], caller: str) -> None:
    """Starts failure detection among `ranks`, which all must call this. `caller`: function name for errors."""
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


def record_neighbours(pool: ProcessGroupPool, memory: HostMemory | None) -> None:
    from device_communicators.cpu.watching import know_neighbours

    if memory is None:
        return
    pool.neighbours = memory.cores
    know_neighbours(memory, pool.watcher)


def wrap(
    make: Callable[..., Group],
    process_group: Any,
    cpu_group: Any,
    device: torch.device | str | None,
    name: str,
    timeout_s: float,
    allow_pickle: bool,
    outer_of: Callable[[Sequence[int]], tuple[ProcessGroupPool, FailureDomain]] | None,
) -> Group:
    """Implements `GroupCoordinator.from_process_group`. `make`: the class to instantiate.

    `outer_of`: a function that returns the pool and failure domain of the argument `within`, and raises if `within`
    lacks a passed rank; None without `within`.
    """
    forks.check("from_process_group()")
    given = examine(process_group, cpu_group, device)
    outer = None if outer_of is None else outer_of(given.ranks)
    limits.raise_descriptor_limit()
    prepare(len(given.ranks))
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
        return create_group(make, pool, given.ranks, name, traits, domain=domain, given=given, owns_pool=outer is None)
    except BaseException:
        if outer is None:
            pool.close()
        raise


def ranks_inside(context: GroupContext, ranks: Sequence[int], *, must_ascend: bool) -> list[int]:
    """Converts `ranks` from ranks in the group to global ranks. Raises InvalidArgumentError for wrong ranks and, with
    `must_ascend`, unsorted ones.
    """
    if not isinstance(ranks, (list, tuple, range)):
        raise InvalidArgumentError(
            f"ranks of a sub-group of {context} must be a list of ints, but is a {type(ranks).__name__}"
        )
    for rank in ranks:
        checks.check_rank(context, "make_sub_group", "ranks", rank)
    if not ranks or len(set(ranks)) != len(ranks):
        raise InvalidArgumentError(f"ranks of a sub-group of {context} must be distinct, but are {list(ranks)}")
    inside = [context.ranks[rank] for rank in ranks]
    if must_ascend and inside != sorted(inside):
        raise InvalidArgumentError(f"the ranks of a group must be in ascending order, but are {list(ranks)}")
    return inside
