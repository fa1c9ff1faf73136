"""Allocates a *region* on each rank's GPU: zeroed memory that all ranks of the group map.

A region is freed when its owner and all ranks that mapped it have closed it. With CUDA IPC, a region exists only while
its owner lives. A rank must finish its work on mapped regions before it closes them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Protocol

import torch

from device_communicators.base import torch_internals
from device_communicators.base.errors import CommunicationError, SettingError
from device_communicators.base.helper_threads import Call
from device_communicators.cuda.streams import enter
from device_communicators.machine.group_topology import exchange_facts, uuid_of
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died

_RENDEZVOUS_S = 60.0
"""If one rank fails in torch's rendezvous, the others detect the failure only by this timeout."""
ALIGNMENT = 256
"""Alignment of regions' addresses, in bytes."""


class NotSharedError(Exception):
    """Raised on all ranks if the group can't share GPU memory."""


class Sharing(Protocol):
    def offer(self) -> Any:
        """Returns JSON data with which other ranks can map this memory."""

    def map(self, offers: Sequence[Any]) -> Sequence[int]: ...

    def close(self) -> None:
        """Releases this rank's memory and mappings. Idempotent."""


class SharingMethod(Protocol):
    """Allocates zeroed memory on this rank's device that other ranks can map."""

    @property
    def name(self) -> str: ...

    def __call__(self, context: GroupContext, size_bytes: int) -> Sharing: ...


class SymmetricSharing:
    """Allocates GPU memory by torch's symmetric memory, which uses CUDA's virtual memory API. Ranks exchange file
    descriptors or fabric handles over the CPU group's store.
    """

    name = "torch symmetric memory"

    def __init__(self, context: GroupContext, size_bytes: int) -> None:
        self._context = context
        self.tensor: Any = torch_internals.symmetric_bytes(size_bytes, context.device)
        self.handle: Any = None
        _zero(self.tensor)

    def offer(self) -> Any:
        return [_index(self._context.device), uuid_of(self._context.device)]

    def map(self, offers: Sequence[Any]) -> Sequence[int]:
        for (one, (number, uuid)), (other, (number_there, uuid_there)) in combinations(enumerate(offers), 2):
            if number == number_there and uuid != uuid_there:
                raise NotSharedError(
                    f"the GPUs of ranks {one} and {other} are both cuda:{number} in their processes, so torch "
                    "treats them as one GPU; make all GPUs visible to every rank, and choose by torch.cuda.set_device"
                )
        operation, started = "the rendezvous of symmetric memory", time.monotonic()
        call = Call(self._meet)
        limit_s = min(_RENDEZVOUS_S, self._context.timeout_s / 2)
        if not call.wait(started + limit_s, self._context.deaths):
            if self._context.deaths():
                raise died(self._context, operation, started)
            raise TimeoutError(
                f"{operation} of {self._context.name!r} had not ended after {limit_s:g} s: a rank of the group is late"
            )
        self.handle = call.result()
        return [int(address) for address in self.handle.buffer_ptrs]

    def _meet(self) -> Any:
        enter(self._context.device)
        return torch_internals.meet_over_symmetric_memory(self.tensor, self._context.cpu_group)

    def close(self) -> None:
        self.handle = self.tensor = None


class IpcSharing:
    name = "CUDA IPC"

    def __init__(self, context: GroupContext, size_bytes: int) -> None:
        self._context = context
        self._tensor: torch.Tensor | None = torch.empty(size_bytes, dtype=torch.uint8, device=context.device)
        self._mapped: list[Any] = []
        _zero(self._tensor)

    def offer(self) -> list[list[Any] | None]:
        """Returns a handle of this rank's memory for each peer, by rank, and None for this rank. torch's reference
        count allows one receiver per handle.
        """
        storage: Any = self._tensor.untyped_storage() if self._tensor is not None else None
        return [
            None if peer == self._context.rank else [_as_json(each) for each in torch_internals.ipc_handle(storage)]
            for peer in range(self._context.size)
        ]

    def map(self, offers: Sequence[Any]) -> Sequence[int]:
        if self._tensor is None:
            raise NotSharedError(
                "this rank has closed its shared GPU memory, so peers can't map it; create the group again"
            )
        addresses = []
        # Peers' devices needn't be visible to this process.
        own = _index(self._context.device)
        for peer, offer in enumerate(offers):
            if peer == self._context.rank:
                addresses.append(self._tensor.data_ptr())
                continue
            _, *handle = offer[self._context.rank]
            values = (bytes.fromhex(each["bytes"]) if isinstance(each, dict) else each for each in handle)
            self._mapped.append(torch_internals.open_ipc(own, *values))
            addresses.append(int(self._mapped[-1].data_ptr()))
        return addresses

    def close(self) -> None:
        self._mapped.clear()
        self._tensor = None


def _as_json(value: Any) -> Any:
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()
    torch.cuda.synchronize(tensor.device)


class PeerMemory:
    """Memory that all ranks share. `addresses[r]` is the address of rank r's region in this process."""

    def __init__(self, sharing: Sharing, addresses: Sequence[int], size_bytes: int, how: str) -> None:
        self.addresses = tuple(addresses)
        self.size_bytes = size_bytes
        self.how = how
        self._sharing: Sharing | None = sharing
        hold(sharing)

    def __str__(self) -> str:
        return f"{self.size_bytes / (1 << 20):g} MiB a rank by {self.how}"

    def close(self) -> None:
        """Closes the regions. This rank's work on them must be finished. Idempotent."""
        sharing, self._sharing = self._sharing, None
        if sharing is not None:
            sharing.close()
            release(sharing)

    def leak(self) -> None:
        self._sharing = None


def hold(what: object) -> None:
    """Keeps an object alive until `release`. At exit, freeing it would wait for the device, or abort if CUDA failed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def release(what: object) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(what))


def share(context: GroupContext, size_bytes: int, ways: Sequence[SharingMethod]) -> PeerMemory:
    """Shares `size_bytes` of each rank's GPU memory by the first of `ways` that works on all ranks. Every rank must
    pass the same arguments. If no way works, all ranks raise NotSharedError.
    """
    reasons = []
    for way in ways:
        try:
            return _share(context, size_bytes, way)
        except NotSharedError as error:
            reasons.append(f"{way.name}: {error}")
    raise NotSharedError("; ".join(reasons) or "there is no way to share GPU memory between these ranks")


def _share(context: GroupContext, size_bytes: int, way: SharingMethod) -> PeerMemory:
    made: list[Sharing] = []
    mapped: list[int] = []

    def offer() -> Any:
        made.append(way(context, size_bytes))
        return made[0].offer()

    def map_all() -> None:
        mapped.extend(made[0].map(offers))
        if len(mapped) != context.size or not all(mapped) or any(address % ALIGNMENT for address in mapped):
            raise NotSharedError(
                f"mapping the GPU memory of all ranks gave the addresses {mapped}; expected one for each rank, each "
                f"a multiple of {ALIGNMENT}. Report this as a bug, with the driver's version"
            )

    try:
        offers = run_on_all_ranks(context, "offer memory", offer)
        run_on_all_ranks(context, "map memory", map_all)
    except BaseException:
        for sharing in made:
            sharing.close()
        raise
    return PeerMemory(made[0], mapped, size_bytes, way.name)


def run_on_all_ranks(context: GroupContext, what: str, step: Callable[[], Any]) -> list[Any]:
    """Runs `step` on every rank, each of which calls this. Returns all ranks' results by rank, which must be JSON data.
    If `step` raises on one rank, all ranks raise. `what` names the step in errors.
    """
    outcome: dict[str, Any] = {}
    try:
        outcome["value"] = step()
    except CommunicationError:
        raise  # other ranks detect the exit themselves
    except Exception as error:
        outcome = {"problem": _one_line(error), "is_setting": isinstance(error, SettingError)}
    everyone = exchange_facts(context, outcome, what)
    for rank, each in enumerate(everyone):
        if "problem" in each:
            raise (SettingError if each["is_setting"] else NotSharedError)(f"rank {rank}: {each['problem']}")
    return [each["value"] for each in everyone]


def _one_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__qualname__)
    known = isinstance(error, (NotSharedError, RuntimeError, SettingError))
    return (text if known else f"{type(error).__name__}: {text}")[:300]
