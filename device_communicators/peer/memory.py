"""*Regions*: memory on each rank's GPU that all ranks of the group have mapped, for peer-memory kernels.

A group has one region per rank, of equal size, zeroed when the group is made. All ranks try the ways to share memory in
the same order; if one fails on any rank, all try the next. The kernels (`csrc`) define the contents.

A region is freed when its owner and all ranks that mapped it have closed it (over CUDA IPC only while the owner's
process is alive). A rank must finish its own work with the mappings before it closes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Protocol

import torch

from device_communicators.base.errors import CommunicationError, SettingError
from device_communicators.base.helper_threads import Call
from device_communicators.cuda.streams import enter
from device_communicators.machine.group_topology import exchange_facts, uuid_of
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died

_RENDEZVOUS_S = 60.0
"""Timeout of torch's rendezvous. If one rank fails in it, the others have no other way to detect that."""
ALIGNMENT = 256
"""Alignment of a region's address, in bytes."""


class NotSharedError(Exception):
    """Raised on all ranks of a group if its GPUs' memory can't be shared. Only used inside this package."""


class Sharing(Protocol):
    """This rank's memory and its mappings of the other ranks' memory, for one way to share."""

    def offer(self) -> Any:
        """Returns JSON data with which other ranks can map this memory. Raises any error if it can't be shared."""

    def map(self, offers: Sequence[Any]) -> Sequence[int]:
        """Maps the memory of every rank's offer. Returns the addresses of all regions in this process."""

    def close(self) -> None:
        """Releases the mappings and the memory. May be called twice."""


class SharingMethod(Protocol):
    """A way to share memory. Calling it allocates zeroed memory on this rank's device; it may raise any exception."""

    @property
    def name(self) -> str: ...

    def __call__(self, context: GroupContext, size_bytes: int) -> Sharing: ...


class SymmetricSharing:
    """torch's symmetric memory: CUDA's virtual memory, shared by file descriptors or fabric handles.

    torch's rendezvous exchanges the descriptors over the CPU group's store. `offer` returns only what `map` checks.
    """

    name = "torch symmetric memory"

    def __init__(self, context: GroupContext, size_bytes: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        self._context = context
        # Not the module's `empty`: in newer versions it uses a pool that never frees memory.
        self.tensor: Any = _SymmetricMemory.empty_strided_p2p((size_bytes,), (1,), torch.uint8, context.device)
        self.handle: Any = None
        _zero(self.tensor)

    def offer(self) -> Any:
        return [_index(self._context.device), uuid_of(self._context.device)]

    def map(self, offers: Sequence[Any]) -> Sequence[int]:
        for (one, (number, uuid)), (other, (number_there, uuid_there)) in combinations(enumerate(offers), 2):
            if number == number_there and uuid != uuid_there:
                raise NotSharedError(
                    f"the GPUs of ranks {one} and {other} are both cuda:{number} in their processes, so torch takes "
                    "them for one GPU; make all GPUs visible to every rank and use torch.cuda.set_device"
                )
        operation, started = "the rendezvous of symmetric memory", time.monotonic()
        call = Call(self._meet)
        if not call.wait(started + min(_RENDEZVOUS_S, self._context.timeout_s / 2), self._context.deaths):
            if self._context.deaths():
                raise died(self._context, operation, started)
            raise TimeoutError(f"{operation} was not done within the group's timeout")
        self.handle = call.result()
        return [int(address) for address in self.handle.buffer_ptrs]

    def _meet(self) -> Any:
        """Runs torch's rendezvous. It waits for the store's timeout if a rank failed, or ran fewer of them before."""
        from torch.distributed import _symmetric_memory

        enter(self._context.device)
        return _symmetric_memory.rendezvous(self.tensor, self._context.cpu_group)

    def close(self) -> None:
        self.handle = self.tensor = None


class IpcSharing:
    """CUDA IPC handles of ordinary device memory, by torch, which keeps the memory until all receivers release it."""

    name = "CUDA IPC"

    def __init__(self, context: GroupContext, size_bytes: int) -> None:
        self._context = context
        self._tensor: torch.Tensor | None = torch.empty(size_bytes, dtype=torch.uint8, device=context.device)
        self._mapped: list[Any] = []
        _zero(self._tensor)

    def offer(self) -> list[list[Any] | None]:
        """Returns a handle for each peer. torch counts one receiver per handle; all must release before it frees."""
        storage: Any = self._tensor.untyped_storage() if self._tensor is not None else None
        return [
            None if peer == self._context.rank else [_as_json(each) for each in storage._share_cuda_()]
            for peer in range(self._context.size)
        ]

    def map(self, offers: Sequence[Any]) -> Sequence[int]:
        if self._tensor is None:
            raise NotSharedError("it is closed")
        addresses = []
        # Map for this rank's device: peers' devices needn't be visible to this process.
        own = _index(self._context.device)
        new_shared: Any = torch.UntypedStorage._new_shared_cuda
        for peer, offer in enumerate(offers):
            if peer == self._context.rank:
                addresses.append(self._tensor.data_ptr())
                continue
            _, *handle = offer[self._context.rank]
            values = (bytes.fromhex(each["bytes"]) if isinstance(each, dict) else each for each in handle)
            self._mapped.append(new_shared(own, *values))
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
    """One region of memory per rank. `addresses[r]` is the address of rank r's region in this process."""

    def __init__(self, sharing: Sharing, addresses: Sequence[int], size_bytes: int, how: str) -> None:
        self.addresses = tuple(addresses)
        self.size_bytes = size_bytes
        self.how = how
        self._sharing: Sharing | None = sharing
        hold(sharing)

    def __str__(self) -> str:
        return f"{self.size_bytes / (1 << 20):g} MiB a rank by {self.how}"

    def close(self) -> None:
        """Releases all regions. This rank's work with them must be finished. May be called twice."""
        sharing, self._sharing = self._sharing, None
        if sharing is not None:
            sharing.close()
            release(sharing)

    def leak(self) -> None:
        """Leaves the regions mapped until the process exits, because work with them may be unfinished."""
        self._sharing = None


def hold(what: object) -> None:
    """Keeps an object that the device uses alive until `release` or the process's exit.

    Otherwise the interpreter frees it at exit. That waits for the device, or aborts the process if CUDA has failed.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def release(what: object) -> None:
    """Lets an object given to `hold` be freed."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(what))


def share(context: GroupContext, size_bytes: int, ways: Sequence[SharingMethod]) -> PeerMemory:
    """Shares memory by the first way that works on all ranks. Every rank passes the same ways and size.

    If none works, all ranks raise NotSharedError with the reason of each way. Raises PeerDiedError,
    CollectiveTimeoutError or CommunicationError if the ranks can't exchange data.
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
                f"a multiple of {ALIGNMENT}"
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
    """Runs `step()` and returns the results of all ranks, which must be JSON data. Every rank calls it.

    If `step()` raises on any rank, all ranks raise NotSharedError, or SettingError if that was the error.
    """
    outcome: dict[str, Any] = {}
    try:
        outcome["value"] = step()
    except CommunicationError:
        raise  # a rank has exited: the other ranks detect that themselves
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
