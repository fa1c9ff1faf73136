"""Groups whose members change: `init_process_group("parallel_state", enable_reconfigure=True)`.

Each process serves a key-value store, also while it is in no group. A group uses the store of the member with the
lowest `Handle`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import (
    AlreadyInitializedError,
    CommunicationError,
    ConfigMismatchError,
    GroupFailedError,
    GroupNotInitializedError,
    InvalidArgumentError,
    UnsupportedError,
    UsageError,
)
from device_communicators.base.host import process_domain
from device_communicators.base.torch_internals import backend_options, set_members
from device_communicators.c10d.extension import for_torch
from device_communicators.c10d.group import as_torch_error
from device_communicators.c10d.world import World, address_of
from device_communicators.control.plane import Endpoint
from device_communicators.control.store import ControlStore
from device_communicators.cpu import native
from device_communicators.cpu.host_memory import prepare
from device_communicators.cpu.watching import CallsDifferError, listen
from device_communicators.liveness.health import Watcher

_FORMAT = "parallel_state/1"


def create_reconfigurable(options: Any, module: Any, create_group: Callable[..., Any]) -> Any:
    """Returns a backend without members; its `reconfigure` sets the members. Raises UnsupportedError before torch 2.15.

    `module`: this folder's compiled module. `create_group`: `creation.create_group`.
    """
    if not hasattr(module, "make_reconfigurable"):
        raise UnsupportedError(f"enable_reconfigure needs torch >= 2.15, but this is torch {torch.__version__}")
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        raise UnsupportedError(
            "enable_reconfigure can't be used with TORCH_DISTRIBUTED_DEBUG=DETAIL, because torch then wraps the "
            "backend in one without reconfigure(). Set TORCH_DISTRIBUTED_DEBUG to INFO or OFF"
        )
    membership = Membership(options, create_group)
    return module.make_reconfigurable(
        rank=options.group_rank,
        size=options.group_size,
        name=options.group_id,
        timeout=options.timeout,
        python=membership,
    )


class Handle(NamedTuple):
    """Address and identity of a process that can be a member.

    `processes`: equal for processes that can watch each other by PID. `token`: secret for connecting to the process.
    """

    host: str
    """The first field, so that handles sort by host."""
    address: str
    port: int
    pid: int
    processes: str
    token: str

    def __str__(self) -> str:
        return json.dumps([_FORMAT, *self], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Handle:
        try:
            form, *fields = json.loads(text)
            if form != _FORMAT:
                raise ValueError(f"it has format {form!r}, not {_FORMAT!r}, so another version of this library made it")
            host, address, port, pid, processes, token = fields
            return cls(str(host), str(address), int(port), int(pid), str(processes), str(token))
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"reconfigure needs handles that get_reconfigure_handle() of this backend returned, but one of the "
                f"passed handles can't be read: {error}"
            ) from error

    def describe(self) -> str:
        return f"PID {self.pid} on host {self.host!r}"


class Membership:
    """Changes the members of one group. The compiled `ReconfigurableBackend` calls the methods.

    `end_group`: set by the backend; ends the group's calls and releases the group.
    """

    end_group: Callable[[], None]

    def __init__(self, options: Any, create_group: Callable[..., Any]) -> None:
        self._name, self._timeout = options.group_id, options.timeout
        self._address = address_of(options.store)
        self._create_group = create_group
        self._lock = threading.Lock()
        self._door: Watcher | None = None
        self._handle: Handle | None = None
        self._used: set[int] = set()
        self._world: World | None = None
        self._store: ControlStore | None = None
        """The group's store, which torch doesn't keep alive."""
        self._problem = ""
        """Why there is no group; empty before the first `reconfigure`."""
        self._pid = os.getpid()

    def handle(self) -> str:
        if self._handle is None:
            door = Watcher()
            text = listen(door, self._address)
            if not text:
                raise UnsupportedError(
                    f"reconfigure needs this library's control plane, which did not start: {door.problem}"
                )
            door.answer_guests()
            settings.warn_about_unknown_names()
            prepare()
            _, address, port, token, _ = Endpoint.parse(text)
            self._door = door
            self._handle = Handle(socket.gethostname(), address, port, os.getpid(), process_domain(), token)
        return str(self._handle)

    def reconfigure(
        self,
        uuid: int,
        handles: Collection[str],
        is_ordered: bool,
        timeout: timedelta | None,
        hints: Mapping[str, str],
    ) -> Any:
        """Creates a group of the processes with the given `handles`, and returns its backend. Each of these processes
        must call this with the same new `uuid`.

        `is_ordered`: True if ranks follow the order of `handles`; else the handles are sorted. `timeout`: None for the
        backend's own. `hints` must be empty. The previous group ends once the arguments are checked. If this raises
        CommunicationError, the process has no group; call this again with another uuid.
        """
        if not self._lock.acquire(blocking=False):
            raise UsageError("reconfigure is under way in another thread of this process; wait until that call returns")
        try:
            peers, rank = self._check(uuid, handles, is_ordered, hints)
            self._used.add(uuid)
            self._problem = f"reconfigure(uuid={uuid}) is under way"
            self._end()
            limit_s = (self._timeout if timeout is None else timeout).total_seconds()
            try:
                return self._make(uuid, peers, rank, min(limit_s, settings.START_TIMEOUT_S.get()))
            except BaseException as error:
                self._problem = f"reconfigure(uuid={uuid}) failed ({type(error).__name__}: {error})"
                raise
        finally:
            self._lock.release()

    def _check(
        self, uuid: int, handles: Collection[str], is_ordered: bool, hints: Mapping[str, str]
    ) -> tuple[list[Handle], int]:
        if hints:
            raise UnsupportedError(
                f'reconfigure got hints {sorted(hints)}, but the backend "parallel_state" supports none: pass no hints'
            )
        texts, own = list(handles) if is_ordered else sorted(handles), self.handle()
        if own not in texts:
            raise InvalidArgumentError(
                f"reconfigure(uuid={uuid}) needs the handle of each member, but none of the {len(texts)} handles is "
                "this process's own. Call reconfigure only on members, with the handles of all members"
            )
        if len(set(texts)) != len(texts):
            raise InvalidArgumentError(
                f"reconfigure(uuid={uuid}) got the handle of one process twice: pass each handle once"
            )
        peers = [Handle.parse(text) for text in texts]
        if uuid in self._used:
            raise AlreadyInitializedError(
                f"reconfigure(uuid={uuid}): this uuid was already used; pass a new one, the same on all members"
            )
        return peers, texts.index(own)

    def _make(self, uuid: int, peers: list[Handle], rank: int, limit_s: float) -> Any:
        first = min(peers, key=str)
        store = ControlStore(
            native.load(), (first.address, first.port), first.token, limit_s, f"the store of {first.describe()}"
        )
        store.served_by = peers.index(first)
        store.access = "a token in the handle of that process"
        shared = BoundedStore(dist.PrefixStore(f"reconfigure/{uuid}", for_torch(store)))
        options = backend_options(shared.raw, rank, len(peers), timedelta(seconds=limit_s), self._name)
        call = json.dumps([[each.describe(), each.address, each.port] for each in peers])
        own = peers[rank].address
        world = World(shared, range(len(peers)), "reconfigure", may_borrow=False, call=call, address=own)
        world.watcher.listen(native.load(), own)
        world.owns_store = world.leaves_in_background = True
        world.set_current()
        try:
            made = self._create_group(options, world)
        except CommunicationError as error:
            world.close()
            names = "; ".join(f"rank {each} is {peers[each].describe()}" for each in error.suspect_ranks)
            if names:
                error.args = (f"{error.args[0]} ({names})", *error.args[1:])
            raise as_torch_error(error) from error.__cause__
        except CallsDifferError as error:
            world.close()
            raise _different_handles(uuid, error) from None
        except BaseException:
            world.close()
            raise
        world.leaves_in_background = False
        self._world, self._store, self._problem = world, store, "the group was aborted on this rank"
        set_members(self._name, len(peers))
        return made

    def no_group(self, method: str) -> BaseException:
        how = "call reconfigure() with the handles of all members"
        if not self._problem:
            return GroupNotInitializedError(f"{method} of group {self._name!r}: the group has no members yet; {how}")
        text = f"{method} of group {self._name!r} failed: {self._problem}. To go on, {how} and a new uuid"
        return as_torch_error(GroupFailedError(text, group=self._name, operation=method))

    def revoke(self) -> None:
        world = self._world
        if world is not None:
            world.watcher.give_up("aborted the group")
            world.leaves_in_background = True

    def _end(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.leaves_in_background = True
        self.end_group()
        self._store = None

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._world = self._store = None
        door, self._door = self._door, None
        if door is not None:
            door.close()


def _different_handles(uuid: int, error: CallsDifferError) -> ConfigMismatchError:
    one, another = (", ".join(name for name, *_ in json.loads(each)) for each in (error.first, error.other))
    return ConfigMismatchError(
        f"reconfigure(uuid={uuid}) got different handles: one rank passed those of {one}; another one those of "
        f"{another}. Pass the same handles in the same order on all members, with a new uuid"
    )
