"""The table of communicators (transports), best first. A group uses the communicators that all its ranks can use (its
*route*). If ranks chose different communicators, calls would hang.

Only this module names concrete communicators.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from device_communicators.base import logs, settings
from device_communicators.routing.communicator import Communicator, GroupContext
from device_communicators.routing.route import Route

logger = logging.getLogger("parallel_state")


class Paths(NamedTuple):
    """Texts for `explain()`: the code paths of eager, compiled and captured calls."""

    eager: str
    compiled: str
    captured: str | None
    """Text for calls captured in a CUDA graph. None if the CPU runs the call, which then can't be captured."""


OP = Paths("registered op, Python", "the same op", None)


@dataclass(frozen=True)
class Row:
    """A communicator (transport), and the conditions under which a group can use it. `unfit`, `probe` and `agree`
    return the reason why the group can't use it, or None.
    """

    name: str
    module: str
    class_name: str
    paths: Paths = OP
    device: str = "any"
    """The group's device: `any`, `accelerator` (any but the CPU), or a type such as `cuda`."""
    partial: bool = False
    """True if the communicator can refuse valid calls. Later rows must then support these calls."""
    several_hosts: bool = False
    """True if the group can span hosts."""
    unfit: Callable[[GroupContext], str | None] = lambda context: None
    """Uses only facts that are equal on every rank."""
    probe: Callable[[GroupContext], str | None] | None = None
    """Checks this rank. A reason on one rank excludes the communicator on all ranks."""
    agree: Callable[[GroupContext], str | None] | None = None
    """Communicates, so every rank calls this and gets the same result."""
    simulated: bool = False
    """True for the communicator of simulated groups, which use no other."""
    fake: bool = False
    """True for the communicator of groups over torch's `fake` backend, which use no other."""
    custom_all_reduce: bool = False
    """True if `set_custom_all_reduce(False)` disables the communicator."""
    asked_for: Callable[[], bool] = lambda: False
    """Returns True if a setting requests the communicator. If it is unavailable, the log then says why."""

    def load(self) -> type[Communicator]:
        return getattr(import_module(self.module), self.class_name)

    def fits_device(self, device_type: str) -> bool:
        return self.device in ("any", device_type) or (self.device == "accelerator" and device_type != "cpu")

    def objection(self, context: GroupContext) -> str | None:
        """Returns the reason why the group can't use this communicator, or None. All ranks get the same result."""
        if self.custom_all_reduce and not context.custom_all_reduce:
            return "custom all-reduce is off for this group (set_custom_all_reduce)"
        if not self.fits_device(context.device.type):
            return f"its device is the {context.device.type.upper()}"
        return self.unfit(context)


_AT_FIRST_USE = "the gloo group is created at its first use"


def _no_shared_memory(context: GroupContext) -> str | None:
    memory = context.host_memory
    if memory is None:
        return _AT_FIRST_USE
    if memory.problem is not None:
        return memory.problem
    return None if memory.in_one_segment else memory.apart or f"its ranks are on {len(memory.hosts)} hosts"


def _no_hosts(context: GroupContext) -> str | None:
    memory = context.host_memory
    if memory is None or memory.problem is not None or memory.in_one_segment:
        return _no_shared_memory(context) or "its ranks are on one host"
    return None


def _switched_off(context: GroupContext, setting: settings.Setting[str]) -> str | None:
    from device_communicators.peer import thresholds as peer_thresholds

    if setting.get() == "auto":
        return peer_thresholds.local_refusal(context, setting.name)
    return f"{setting.name} is off" if setting.get() == "off" else None


def _no_nccl(context: GroupContext) -> str | None:
    from device_communicators.cuda import nccl_library

    reason = _switched_off(context, settings.NCCL)
    if reason is not None:
        return reason
    try:
        nccl_library.load()
    except nccl_library.NcclUnavailableError as error:
        return str(error)
    return None


def _unmeasured_nccl(context: GroupContext) -> str | None:
    if settings.NCCL.get() != "auto":
        return None
    from device_communicators.peer import thresholds as peer_thresholds

    row = peer_thresholds.agreed_row(context, settings.NCCL.name)
    if isinstance(row, str):
        return row
    return None if row.own_nccl else f"{settings.NCCL.name} is auto, and torch's NCCL was faster here ({row.source})"


def _no_peers(context: GroupContext) -> str | None:
    from device_communicators.peer.kernels import MAX_RANKS

    if context.size > MAX_RANKS:
        return f"it has {context.size} ranks, and kernels in peer memory support at most {MAX_RANKS}"
    memory = context.host_memory
    if memory is not None and (memory.problem is not None or memory.apart):
        return None  # `peer.thresholds` then asks the drivers
    return _no_shared_memory(context)


def _no_peer_memory(context: GroupContext) -> str | None:
    from device_communicators.peer import kernels as peer_kernels
    from device_communicators.peer import thresholds as peer_thresholds

    reason = _switched_off(context, settings.PEER_MEMORY)
    if reason is not None:
        if settings.PEER_MEMORY.get() == "auto" and context.rank == 0:
            peer_thresholds.warn_once(settings.PEER_MEMORY.name)
        return reason
    try:
        peer_kernels.nvrtc_version()
    except peer_kernels.KernelError as error:
        return str(error)
    return None


_KERNEL = Paths("C++ kernel of the op", "the same op", None)
_STREAM = Paths("registered op, on the current stream", "the same op", "recorded, once the group is prepared")
_PEERS = Paths("registered op, on the current stream", "the same op", "recorded")

_WARNED: set[str] = set()

CATALOG: tuple[Row, ...] = (
    Row(
        "simulated", "device_communicators.simulated", "SimulatedCommunicator",
        Paths("registered op, copies", "the same op", "recorded"), simulated=True,
    ),
    Row("fake", "device_communicators.process_group.device", "FakeGroupCommunicator", fake=True),
    Row(
        "shared_memory", "device_communicators.cpu_communicator", "CpuCommunicator",
        partial=True, unfit=_no_shared_memory,
    ),
    Row(
        "hierarchical", "device_communicators.cpu_communicator", "CpuCommunicator",
        partial=True, several_hosts=True, unfit=_no_hosts,
    ),
    Row(
        "peer_memory", "device_communicators.peer.communicator", "PeerMemoryCommunicator",
        _PEERS, "cuda", partial=True, unfit=_no_peers, probe=_no_peer_memory, custom_all_reduce=True,
        asked_for=lambda: settings.PEER_MEMORY.get() == "on",
    ),
    Row(
        "nccl", "device_communicators.nccl.communicator", "NcclCommunicator", _STREAM, "cuda", probe=_no_nccl,
        agree=_unmeasured_nccl, unfit=lambda context: _AT_FIRST_USE if context.host_memory is None else None,
    ),
    Row(
        "device_group", "device_communicators.process_group.device", "DeviceGroupCommunicator",
        Paths("registered op, on torch's streams", "the same op", "recorded, by torch"), "accelerator",
    ),
    Row("process_group", "device_communicators.process_group.gloo", "ProcessGroupCommunicator"),
)  # fmt: skip


def build_route(context: GroupContext, rows: Sequence[Row] = CATALOG) -> Route:
    """Creates the communicators that the group can use, and returns them as its route. Every rank of the group calls
    this. Ranks of several groups create the groups' routes in the same order.
    """
    if context.size == 1:
        return Route(context, (), {})
    rows = [row for row in rows if (row.simulated, row.fake) == (context.simulated, context.fake)]
    reasons = [row.objection(context) for row in rows]
    possible = [reason is None for reason in reasons]
    reasons = _vote(context, rows, reasons)
    communicators, paths = [], [("", *Paths._fields)]
    for i, row in enumerate(rows):
        if reasons[i] is None and row.agree is not None:
            reasons[i] = row.agree(context)
        if reasons[i] is None:
            made = row.load()(context)
            reasons[i] = made.admit()
            if reasons[i] is None:
                communicators.append(made)
                ways = _KERNEL if row.paths is OP and _has_native_ops(made) else row.paths
                paths.append((row.name, ways.eager, ways.compiled, ways.captured or "not recordable: the host does it"))
        if possible[i] and reasons[i] is not None and context.rank == 0 and row.asked_for():
            logger.warning("%s runs without %s, which was requested: %s", context, row.name, reasons[i])
    _warn_of_no_shared_memory(context)
    refusals = {row.name: reason for row, reason in zip(rows, reasons, strict=True) if reason is not None}
    return Route(context, communicators, refusals, _aligned(paths))


def _has_native_ops(made: Communicator) -> bool:
    server, memory = made.op_server, made.context.host_memory
    is_debug = memory is not None and memory.debug  # debug mode compares calls in Python
    return server is not None and server.library.has_ops and not is_debug


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _warn_of_no_shared_memory(context: GroupContext) -> None:
    memory = context.host_memory
    problem = None if memory is None else memory.problem or memory.apart or None
    chosen = not settings.SHARED_MEMORY.get() or settings.BUILD.get() == "never"
    # A problem that names a setting comes from another rank's setting.
    known = any(setting.name in (problem or "") for setting in (settings.SHARED_MEMORY, settings.BUILD))
    is_silent = chosen or known or problem in _WARNED or not logs.is_first_of_host()
    if problem is None or is_silent or sys.platform != "linux":
        return
    _WARNED.add(problem)
    instead = "gloo" if memory is not None and memory.problem else "connections"
    logger.warning(
        "%s runs without shared memory, which is several times faster than %s: %s", context, instead, problem
    )


def _vote(context: GroupContext, rows: Sequence[Row], reasons: list[str | None]) -> list[str | None]:
    found = {i: row.probe(context) for i, row in enumerate(rows) if row.probe is not None and reasons[i] is None}
    if found and context.make_cpu_group is not None:
        votes = context.gather(json.dumps([reason is None for reason in found.values()]).encode(), "vote")
        for (i, reason), fits in zip(found.items(), zip(*map(json.loads, votes), strict=True), strict=True):
            rank = context.ranks[fits.index(False)] if False in fits else None
            found[i] = reason or (None if rank is None else f"it is unavailable on global rank {rank} of the group")
    return [found.get(i, reason) for i, reason in enumerate(reasons)]
