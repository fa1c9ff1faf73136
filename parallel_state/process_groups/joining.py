"""Prepares the use of a process group that the program created: examines the group, and compares ranks' settings."""

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
"""Message tags are made from channels. The first channel is high to avoid the program's own tags."""
_CHANNELS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class GivenGroup(NamedTuple):
    process_group: Any
    ranks: list[int]
    """Global ranks, in the order of the group."""
    device: torch.device
    backend: str
    cpu_group: Any

    @property
    def for_callers(self) -> Any:
        return self.process_group if self.device.type == "cpu" else self.cpu_group

    @property
    def key(self) -> str:
        """Identifies the group: equal on all its ranks, but different for another group of the same ranks."""
        return f"{zlib.crc32(self.process_group.group_name.encode()):x}"

    def next_channel(self) -> int:
        """Returns a number from which the message tags of a new user of the group are made. All ranks must make these
        calls in the same order.
        """
        number = _CHANNELS.get(self.process_group, _FIRST_CHANNEL)
        _CHANNELS[self.process_group] = number + 1
        return number


def examine(process_group: Any, cpu_group: Any = None, device: torch.device | str | None = None) -> GivenGroup:
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
            f"process_group must support tensors on {device.type}, but supports {', '.join(backends)}; pass another "
            "device, or another group"
        )
    if cpu_group is None and backends.get("cpu") in ("gloo", "fake"):
        cpu_group = process_group
    elif cpu_group is not None:
        found, carries = _ranks_of(cpu_group, "cpu_group"), _backends_of(cpu_group).get("cpu", "no CPU tensors")
        if found != ranks or carries != "gloo":
            raise InvalidArgumentError(
                f"cpu_group must be a gloo group of global ranks {format_ranks(ranks)}, as in process_group, "
                f"but has global ranks {format_ranks(found)} with {carries}; leave cpu_group out to have one created"
            )
    return GivenGroup(process_group, ranks, device, backends[device.type], cpu_group)


def _ranks_of(group: Any, name: str) -> list[int]:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError(
            f"rank {dist.get_rank()} is not in the group of {name} (new_group returns NON_GROUP_MEMBER on such ranks); "
            "call from_process_group on the group's ranks only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"{name} must be a torch ProcessGroup, such as torch.distributed.group.WORLD, but is {group!r}"
        )
    if not is_registered(group):
        raise InvalidArgumentError(
            f"{name} must be registered with torch.distributed (by init_process_group, new_group or a DeviceMesh), "
            "but it was destroyed or created directly"
        )
    return dist.get_process_group_ranks(group)


def _backends_of(group: Any) -> dict[str, str]:
    pairs = (each.partition(":") for each in dist.get_backend_config(group).split(","))
    return {device.strip(): backend.strip() for device, _, backend in pairs}


def _device_of(group: Any, backends: dict[str, str]) -> torch.device:
    if "cuda" in backends and torch.cuda.is_available() and backends["cuda"] != backends.get("cpu"):
        return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu" if "cpu" in backends else next(iter(backends)))


def prepare(world_size: int) -> None:
    """Compiles the native code before any deadline starts. Removes files in /dev/shm whose processes have exited. Does
    nothing for a `world_size` of 1.
    """
    from device_communicators.c10d import extension
    from device_communicators.cpu import native
    from device_communicators.cpu.segment import sweep

    if world_size == 1:
        return
    if swept := sweep():
        logger.info("removed %d shared segments of processes that exited", swept)
    extension.compile_ahead()
    if settings.SHARED_MEMORY.get():
        with contextlib.suppress(native.NativeUnavailableError):
            native.load()
    extension.try_load_store()
    if settings.CPU_BACKEND.get() == "parallel_state":
        from device_communicators.c10d import creation

        with contextlib.suppress(UnsupportedError):
            creation.load()


def agree_on_settings(
    agreement: Agreement, ranks: Sequence[int], backend: str, timeout_s: float, limit_s: float
) -> None:
    """Raises ConfigMismatchError if settings differ between `ranks`. Each of `ranks` must call this within `limit_s`.

    `backend` and `timeout_s`: the values in effect, after arguments have overridden settings.
    """

    def own() -> tuple[None, Request]:
        values = {setting.name: str(setting.get()) for setting in settings.ALL if setting.equal}
        values |= {settings.BACKEND.name: backend, settings.TIMEOUT_S.name: f"{timeout_s:g}"}
        return None, values

    agreement.resolve_and_agree("settings", ranks, own, limit_s)


def agree_on_token(device: torch.device, group: Any = None, caller: str = "init_distributed_environment") -> str:
    """Returns a random prefix for the names of a world's process groups. Every rank of `group` must call this; all get
    the same prefix.

    `group`: None for torch's default group. `caller`: function that errors name.
    """
    # torch's generator would change the random numbers of a seeded program.
    token = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8, device=device)
    size = dist.get_world_size(group)
    if dist.get_rank(group) > 0:
        token.zero_()
    if size > 1 and not is_fake(group):
        limit_s = settings.START_TIMEOUT_S.get()
        try:
            # A broadcast completes on some ranks before all have called it.
            work = dist.all_reduce(token, group=group, async_op=True)
            work.wait(timedelta(seconds=limit_s)) if device.type == "cpu" else work.wait()
        except RuntimeError as error:
            what = "the default group that exists" if group is None else f"the group of {size} that exists"
            raise RendezvousError(
                f"rank {dist.get_rank()} of {dist.get_world_size()} joins {what}, but not all other ranks joined "
                f"within {limit_s:g} s: {plain(error)}. Every rank must call {caller}()",
                operation=caller,
                rank=dist.get_rank(),
                timeout_s=limit_s,
            ) from error
    return "/" + bytes(token.tolist()).hex()
