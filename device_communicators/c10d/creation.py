"""Creates the backend of torch.distributed for one group.

If the group spans hosts, its ranks connect when it is created. A group with too many ranks for direct connections uses
gloo.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from device_communicators.base import logs, settings
from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore, StoreSilentError
from device_communicators.base.errors import UnsupportedError
from device_communicators.base.helper_threads import Call
from device_communicators.base.member import Timeout
from device_communicators.c10d import extension
from device_communicators.c10d.group import Group, lost_store, make_gloo
from device_communicators.c10d.membership import create_reconfigurable
from device_communicators.c10d.world import World
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.cpu.native_group import Members
from device_communicators.routing import status
from device_communicators.routing.failures import counted_from_begin

logger = logging.getLogger("parallel_state")

_HOOKS_LIMIT = timedelta(seconds=32)
"""Longest wait at exit for torch's failure hooks: twice the default of TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC."""

_GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()


def create(options: Any, backend_options: Any = None) -> Any:
    """Returns the backend of a new group. torch calls this with its DistributedBackendOptions and the program's
    `pg_options`. With `options.enable_reconfigure`, the group has no members before `reconfigure`.
    """
    _check_backend_options(backend_options)
    if not getattr(options, "enable_reconfigure", False):
        return create_group(options)
    return create_reconfigurable(options, load(), create_group)


def _check_backend_options(options: Any) -> None:
    if options is None:
        return
    module, _ = extension.try_load()
    own = () if module is None else (module.Options, *module.Options.__bases__)
    name = type(options).__qualname__
    if type(options) not in own:
        raise UnsupportedError(
            f'a group of the backend "parallel_state" does not take pg_options of type {name}: pass None, or the '
            "options of another group of this backend"
        )
    if getattr(options, "use_pg_for_symm_mem_rendezvous", False):
        raise UnsupportedError(
            f'the backend "parallel_state" does not support {name}.use_pg_for_symm_mem_rendezvous: leave it False'
        )


@counted_from_begin()
def create_group(options: Any, world: World | None = None) -> Any:
    """Returns the backend of a new group. Every rank of the group calls this.

    `options`: torch's DistributedBackendOptions. `world`: the ranks whose deaths fail the group; default: `World.of`.
    If a rank of the world has no compiled module, all groups of the world use gloo, and each host logs one warning.
    Raises CommunicationError if ranks are missing.
    """
    extension.compile_ahead()
    started, size, rank = time.monotonic(), options.group_size, options.group_rank
    timeout = options.timeout
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    members = Members(options.group_id or "default", ranks, rank, Timeout(timeout.total_seconds()))
    is_default = not options.global_ranks_in_group
    # Megatron creates groups of disjoint ranks with one name at the same time.
    whose = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    owns_store = world is not None and world.owns_store
    # Reconfigured members meet under one prefix even if their lists of members differ: so they find the difference.
    store = BoundedStore(
        options.store if owns_store else dist.PrefixStore(f"ranks/{whose}", options.store), owns_timeout=owns_store
    )
    if world is None:
        world = World.of(store, ranks, is_default)
        if not world.begun:
            settings.warn_about_unknown_names()
    begins = not world.begun
    module, problem = extension.try_load()
    if begins and problem and size == 1:
        world.over_gloo = world.over_gloo or f"global rank {ranks[0]} {problem}"
    if world.over_gloo:
        return _over_gloo(world, store, members, timeout)
    memory = HostMemory(members, world.neighbours)
    try:
        if size > 1 and begins:
            world.over_gloo = world.meet(store, members, problem)
            if world.over_gloo:
                return _over_gloo(world, store, members, timeout)
        if size > 1:
            address = None if os.environ.get("GLOO_SOCKET_IFNAME") else world.address or None
            left_s = started + members.timeout_s - time.monotonic()
            memory.attach(world.watcher, sorted(world.domain.ranks), address=address, limit_s=left_s)
            if begins:
                world.begin(memory)
            memory.end_waits_at_deaths(world.watcher, world.domain)
    except BaseException:
        if begins:
            world.close()
        raise
    group = Group(world.lasting_store(store, ranks), members, memory, world, begins, create_group)
    collectives = group.collectives
    backend = module.make(
        rank=rank,
        size=size,
        name=options.group_id,
        global_ranks=list(options.global_ranks_in_group),
        library="" if collectives is None else str(collectives.library.path),
        group=0 if collectives is None else collectives.number,
        transfers=group.transfers,
        timeout=timeout,
        python=group,
    )
    status.watch(group)
    _GROUPS.add(group)
    return backend


def _over_gloo(world: World, store: BoundedStore, members: Members, timeout: Any) -> Any:
    world.end_watch()
    if not world.has_warned and logs.is_first_of_host():
        world.has_warned = True
        logger.warning(
            'the backend "parallel_state" of torch.distributed uses gloo, without shared memory, and detects exits '
            "of ranks at deadlines, or when a gloo connection breaks: %s",
            world.over_gloo,
        )
    rank, size = members.rank, len(members.ranks)
    started = time.monotonic()
    call = Call(lambda: make_gloo(store.prefixed("gloo"), rank, size, timeout, world.address))
    try:
        if not call.wait(started + timeout.total_seconds() + LAST_WORD_S):
            raise StoreSilentError(f"{store} did not answer, so the ranks could not connect over gloo")
        return call.result()
    except dist.DistError as error:
        raise lost_store(store, error, world, members, members.ranks, "the start", started) from error


@atexit.register
def _shut_down() -> None:
    """Closes all groups and their threads before the interpreter exits. After an uncaught exception, doesn't announce
    that this rank leaves, so that peers report a death.
    """
    for group in list(_GROUPS):
        group.has_crashed = getattr(sys, "last_value", None) is not None
    for group in list(_GROUPS):
        group.shut_down()
    for group in list(_GROUPS):
        group.leave()
    if extension.try_load.cache_info().currsize and (module := extension.try_load()[0]) is not None:
        module.wait_for_failure_hooks(_HOOKS_LIMIT)  # such as that of torch's flight recorder


def load() -> Any:
    extension.compile_ahead()
    module, problem = extension.try_load()
    if module is None:
        raise UnsupportedError(
            f'this process can\'t use the backend "parallel_state" of torch.distributed, because it {problem}'
        )
    return module
