"""Memory of each rank's GPU that all ranks of a group have mapped: the *regions* in which peer-memory kernels meet.

A group has one region per rank, all of one size, made once when the group is made, zeroed once, and never grown: what
doesn't fit is another communicator's business. There are several ways to share memory; each is tried by all ranks
together, in one order, and one rank for which it fails has all ranks go on to the next. What lies in a region is the
kernels' business (`csrc`), who may use them `peer.thresholds`'s.

Either way keeps a region's memory until its owner *and* all who have mapped it have let go, so ranks may close in any
order: a peer that is behind reads memory that still is there. Over CUDA IPC that holds while the owner's process lives;
what a mapping of a dead process's memory is, CUDA doesn't say. What must be over is only this rank's own work with the
mappings, which is the caller's to see to.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Protocol

import torch

from device_communicators.base.errors import CommunicationError, SettingError
from device_communicators.cuda.streams import enter
from device_communicators.machine.group_topology import exchange_facts, uuid_of
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.waiting import ByThread, until

_RENDEZVOUS_S = 60.0
"""The limit of torch's rendezvous: where one rank has failed in it, the others notice in no other way."""


ALIGNMENT = 256
"""Of a region's address."""


class NotSharedError(Exception):
    """Memory that can't be shared among the ranks of a group; raised on all of them alike, and never to a user."""


class Sharing(Protocol):
    """This rank's memory of one way, on its way to be shared."""

    def offer(self) -> Any:
        """Returns what the other ranks must be told, as JSON has it. Raises any error where it can't be shared."""

    def map(self, offers: Sequence[Any]) -> Sequence[int]:
        """Maps every rank's offer; returns the addresses of all regions, as this process sees them."""

    def close(self) -> None:
        """Lets go of the mappings and of the memory. Twice is fine."""


class Way(Protocol):
    """A way to share memory. A call allocates zeroed memory on this rank's device, and may raise any exception."""

    @property
    def name(self) -> str: ...

    def __call__(self, context: GroupContext, size_bytes: int) -> Sharing: ...


class SymmetricSharing:
    """torch's symmetric memory: CUDA's virtual memory, exchanged as file descriptors or fabric handles.

    torch's rendezvous exchanges by itself, over the CPU group's store; what is offered is compared only.
    """

    name = "torch symmetric memory"

    def __init__(self, context: GroupContext, size_bytes: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        self._context = context
        # Not `empty` of the module: newer versions take that from a pool that keeps what is freed.
        self.tensor: Any = _SymmetricMemory.empty_strided_p2p((size_bytes,), (1,), torch.uint8, context.device)
        self.handle: Any = None
        _zero(self.tensor)

    def offer(self) -> Any:
        return [_index(self._context.device), uuid_of(self._context.device)]

    def map(self, offers: Sequence[Any]) -> Sequence[int]:
        for (one, (number, uuid)), (other, (number_there, uuid_there)) in combinations(enumerate(offers), 2):
            if number == number_there and uuid != uuid_there:
                raise NotSharedError(
                    f"the GPUs of ranks {one} and {other} are both cuda:{number} to their processes, which torch takes "
                    "for one GPU; let every rank see all GPUs, and choose by torch.cuda.set_device"
                )
        rendezvous = _Rendezvous(self._context, self.tensor)
        rendezvous.wait()
        self.handle = rendezvous.handle
        return [int(address) for address in self.handle.buffer_ptrs]

    def close(self) -> None:
        self.handle = self.tensor = None


class _Rendezvous(ByThread):
    """torch's rendezvous, in a thread, which is left behind at a deadline.

    torch waits for a rank that failed in it, or that has made another number of them before, as long as its store does.
    """

    def __init__(self, context: GroupContext, tensor: torch.Tensor) -> None:
        super().__init__(context, "the rendezvous of symmetric memory")
        self._tensor = tensor
        self.handle: Any = None

    def _run(self) -> None:
        from torch.distributed import _symmetric_memory

        enter(self._tensor.device)
        self.handle = _symmetric_memory.rendezvous(self._tensor, self._context.cpu_group)

    def wait(self) -> None:
        self.begin()
        deadline = time.monotonic() + min(_RENDEZVOUS_S, self._context.timeout_s / 2)
        until(lambda seconds: self._done.wait(seconds) or time.monotonic() > deadline, self._context, self._operation)
        if not self.is_completed():
            raise TimeoutError(f"{self._operation} was not done in time")
        super().wait()


class IpcSharing:
    """CUDA IPC: handles of ordinary device memory, by torch, which keeps the memory until its receivers let go."""

    name = "CUDA IPC"

    def __init__(self, context: GroupContext, size_bytes: int) -> None:
        self._context = context
        self._tensor: torch.Tensor | None = torch.empty(size_bytes, dtype=torch.uint8, device=context.device)
        self._mapped: list[Any] = []
        _zero(self._tensor)

    def offer(self) -> list[list[Any] | None]:
        """Returns a handle for each rank: torch counts one receiver for each, and frees when that has let go."""
        storage: Any = self._tensor.untyped_storage() if self._tensor is not None else None
        return [
            None if peer == self._context.rank else [_as_json(each) for each in storage._share_cuda_()]
            for peer in range(self._context.size)
        ]

    def map(self, offers: Sequence[Any]) -> Sequence[int]:
        if self._tensor is None:
            raise NotSharedError("it is closed")
        addresses = []
        # A rank need not see its peers' devices: what is mapped is reached from its own.
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
    """Zeroes memory, and waits for it, before anybody else has it."""
    tensor.zero_()
    torch.cuda.synchronize(tensor.device)


class PeerMemory:
    """The regions of a group: `addresses[r]` is where this process sees rank r's, of `size_bytes` each."""

    def __init__(self, sharing: Sharing, addresses: Sequence[int], size_bytes: int, how: str) -> None:
        self.addresses = tuple(addresses)
        self.size_bytes = size_bytes
        self.how = how
        self._sharing: Sharing | None = sharing
        hold(sharing)

    def __str__(self) -> str:
        return f"{self.size_bytes / (1 << 20):g} MiB a rank by {self.how}"

    def close(self) -> None:
        """Lets go of all regions; this rank's work with them must be over. Twice is fine."""
        sharing, self._sharing = self._sharing, None
        if sharing is not None:
            sharing.close()
            release(sharing)

    def leave(self) -> None:
        """Leaves the regions mapped until the process ends, as work with them may not be over."""
        self._sharing = None


def hold(what: object) -> None:
    """Keeps an object that the device uses until `release`, or until the process ends.

    Without it the interpreter frees it at its end, which waits for the device, or ends the process if CUDA has failed.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def release(what: object) -> None:
    """Ends a `hold`."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(what))


def share(context: GroupContext, size_bytes: int, ways: Sequence[Way]) -> PeerMemory:
    """Shares memory by the first way that works for all ranks, each of which calls it with the same ways and size.

    Raises NotSharedError on all ranks where none does, with every way's reason; PeerDiedError, CollectiveTimeoutError
    and CommunicationError where the ranks can't tell each other.
    """
    reasons = []
    for way in ways:
        try:
            return _share(context, size_bytes, way)
        except NotSharedError as error:
            reasons.append(f"{way.name}: {error}")
    raise NotSharedError("; ".join(reasons) or "there is no way to share memory")


def _share(context: GroupContext, size_bytes: int, way: Way) -> PeerMemory:
    made: list[Sharing] = []
    mapped: list[int] = []

    def offer() -> Any:
        made.append(way(context, size_bytes))
        return made[0].offer()

    def map_all() -> None:
        mapped.extend(made[0].map(offers))
        if len(mapped) != context.size or not all(mapped) or any(address % ALIGNMENT for address in mapped):
            raise NotSharedError(
                f"the addresses are {mapped}: one for each rank, a multiple of {ALIGNMENT}, was expected"
            )

    try:
        offers = together(context, "offer memory", offer)
        together(context, "map memory", map_all)
    except BaseException:
        for sharing in made:
            sharing.close()
        raise
    return PeerMemory(made[0], mapped, size_bytes, way.name)


def together(context: GroupContext, what: str, step: Callable[[], Any]) -> list[Any]:
    """Runs `step()` on each rank, all of which call it, and returns all results, as JSON has them.

    Raises NotSharedError on all ranks where it raised on one of them, so that none goes on alone; SettingError where
    a variable can't be read.
    """
    outcome: dict[str, Any] = {}
    try:
        outcome["value"] = step()
    except CommunicationError:
        raise  # a rank has ended: the others find out for themselves
    except Exception as error:
        outcome = {"problem": _one_line(error), "is_setting": isinstance(error, SettingError)}
    everyone = exchange_facts(context, outcome, what)
    for rank, each in enumerate(everyone):
        if "problem" in each:
            raise (SettingError if each["is_setting"] else NotSharedError)(f"rank {rank}: {each['problem']}")
    return [each["value"] for each in everyone]


def _one_line(error: Exception) -> str:
    """Returns the first line that says something, of bounded length."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    with contextlib.suppress(AttributeError):
        text = text or type(error).__qualname__
    known = isinstance(error, (NotSharedError, RuntimeError, SettingError))
    return (text if known else f"{type(error).__name__}: {text}")[:300]
