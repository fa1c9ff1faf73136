"""Joins a process group that somebody else made: what it is, and a name for what is made beside it.

Nothing here changes it or destroys it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.errors import (
    GroupNotInitializedError,
    InvalidArgumentError,
    RendezvousError,
    UnsupportedError,
    format_ranks,
    plain,
)
from device_communicators.base.torch_internals import is_fake, is_registered
from parallel_state.process_groups.agreement import Agreement, Request

logger = logging.getLogger("parallel_state")

_FIRST_CHANNEL = 1 << 20
"""Tags of transfers follow from a channel: these are apart from small ones, which the program may use itself."""
_CHANNELS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class GivenGroup(NamedTuple):
    """A process group of the caller's, and what it can carry."""

    process_group: Any
    ranks: list[int]
    """Global, in the order of the group."""
    device: torch.device
    backend: str
    """The one for tensors of `device`."""
    cpu_group: Any
    """gloo's of the same ranks, which the caller has as well, or which is this one; None if there is none."""

    @property
    def for_callers(self) -> Any:
        """Returns the caller's own group for CPU tensors, if there is one."""
        return self.process_group if self.device.type == "cpu" else self.cpu_group

    @property
    def key(self) -> str:
        """Tells it apart from other groups of the same ranks, on all of them alike."""
        return f"{zlib.crc32(self.process_group.group_name.encode()):x}"

    def next_channel(self) -> int:
        """Returns a number that no other coordinator over this group has; every rank calls it in the same order."""
        number = _CHANNELS.get(self.process_group, _FIRST_CHANNEL)
        _CHANNELS[self.process_group] = number + 1
        return number


def examine(process_group: Any, cpu_group: Any = None, device: torch.device | str | None = None) -> GivenGroup:
    """Returns what a process group is. Raises GroupNotInitializedError, or InvalidArgumentError for what can't be."""
    if not dist.is_initialized():
        raise GroupNotInitializedError(
            "from_process_group needs torch.distributed: call torch.distributed.init_process_group() first"
        )
    ranks = _ranks_of(process_group, "process_group")
    backends = _backends_of(process_group)
    if device is None:
        device = _device_of(process_group, backends)
    device = torch.device(device)
    if device.type not in backends:
        raise InvalidArgumentError(
            f"process_group must carry tensors of the device, {device.type}, but carries those of "
            f"{', '.join(backends)}; pass another device, or another group"
        )
    if cpu_group is None and backends.get("cpu") in ("gloo", "fake"):
        cpu_group = process_group
    elif cpu_group is not None:
        found, carries = _ranks_of(cpu_group, "cpu_group"), _backends_of(cpu_group).get("cpu", "no CPU tensors")
        if found != ranks or carries != "gloo":
            raise InvalidArgumentError(
                f"cpu_group must be a gloo group of global ranks {format_ranks(ranks)}, as process_group, but has "
                f"{format_ranks(found)} and carries {carries}; leave it out for one that is made here"
            )
    return GivenGroup(process_group, ranks, device, backends[device.type], cpu_group)


def _ranks_of(group: Any, name: str) -> list[int]:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError(
            f"rank {dist.get_rank()} is not in the group that {name} stands for (new_group gives NON_GROUP_MEMBER to "
            "those that aren't); call from_process_group on the group's ranks only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"{name} must be a torch ProcessGroup, such as torch.distributed.group.WORLD, but is {group!r}"
        )
    if not is_registered(group):
        raise InvalidArgumentError(
            f"{name} must be one that torch.distributed has, made by init_process_group, new_group or a DeviceMesh, "
            "but it was destroyed, or made by hand"
        )
    return dist.get_process_group_ranks(group)


def _backends_of(group: Any) -> dict[str, str]:
    """Returns the backends by device type; one that is for all devices is for those that this torch has."""
    pairs = (each.partition(":") for each in dist.get_backend_config(group).split(","))
    return {device.strip(): backend.strip() for device, _, backend in pairs}


def _device_of(group: Any, backends: dict[str, str]) -> torch.device:
    if "cuda" in backends and torch.cuda.is_available() and backends["cuda"] != backends.get("cpu"):
        return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu" if "cpu" in backends else next(iter(backends)))


def prepare(world_size: int) -> None:
    """Builds what is compiled, if need be, before deadlines start: a compile takes a minute on a busy machine.

    Also for a world of GPUs, whose messages go through the host's memory. If it can't be had, `explain()` says why.
    Removes what a start that was killed left in shared memory.
    """
    from device_communicators.c10d import control_store
    from device_communicators.cpu import native
    from device_communicators.cpu.segment import sweep

    if world_size > 1 and (swept := sweep()):
        logger.info("removed %d shared segments whose makers have ended", swept)
    if world_size > 1 and settings.SHARED_MEMORY.get():
        with contextlib.suppress(native.NativeUnavailableError):
            native.load()
    if world_size > 1:
        control_store.try_load()
    if world_size > 1 and settings.CPU_BACKEND.get() == "parallel_state":
        from device_communicators.c10d import creation

        with contextlib.suppress(UnsupportedError):  # raised where the first group is made
            creation.load()


def agree_on_settings(
    agreement: Agreement, ranks: Sequence[int], backend: str, timeout_s: float, limit_s: float
) -> None:
    """Compares the settings that must be equal on `ranks` (global). Each of them must call this within `limit_s`.

    `backend` and `timeout_s` are the values in effect: an argument replaces its setting. Raises ConfigMismatchError on
    all ranks if two differ, and the errors of `Agreement.agree`.
    """

    def own() -> tuple[None, Request]:
        values = {setting.name: str(setting.get()) for setting in settings.ALL if setting.equal}
        values |= {settings.BACKEND.name: backend, settings.TIMEOUT_S.name: f"{timeout_s:g}"}
        return None, values

    agreement.resolve_and_agree("settings", ranks, own, limit_s)


def agree_on_token(device: torch.device, group: Any = None, caller: str = "init_distributed_environment") -> str:
    """Returns a name for what is made beside a process group, by default the default one, where others may have been.

    Every rank of the group calls it; its first rank says the name.
    """
    # Not of torch's generator: a program's seed gives the same weights with us and without.
    token = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8, device=device)
    size = dist.get_world_size(group)
    if dist.get_rank(group) > 0:
        token.zero_()
    if size > 1 and not is_fake(group):
        limit_s = settings.START_TIMEOUT_S.get()
        try:
            # A broadcast is over on some ranks before all have come.
            work = dist.all_reduce(token, group=group, async_op=True)
            work.wait(timedelta(seconds=limit_s)) if device.type == "cpu" else work.wait()
        except RuntimeError as error:
            what = "the default group that exists" if group is None else f"the group of {size} that exists"
            raise RendezvousError(
                f"rank {dist.get_rank()} of {dist.get_world_size()} joins {what}, but not all of its ranks did within "
                f"{limit_s:g} s: {plain(error)}. Each of them must call {caller}()",
                operation=caller,
                rank=dist.get_rank(),
                timeout_s=limit_s,
            ) from error
    return "/" + bytes(token.tolist()).hex()
