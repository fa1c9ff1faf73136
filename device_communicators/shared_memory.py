"""CPU tensors within one host, over a segment of shared memory: the collectives of `csrc/group.h`.

The segment is made at the first collective that it carries, by all ranks together: rank 0 creates it under a random
name, the others open it, which is the evidence that they share a host, and its name is taken away again. Where any
rank can't, all of them leave the group to torch.distributed, and `explain()` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_communicators import native, settings
from device_communicators.base import DONE, Communicator, GroupContext, Request, Work
from device_communicators.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    GroupDestroyedError,
    PeerDiedError,
    UnsupportedError,
)
from device_communicators.process_group import reducible, reduction_refusal

_DIRECTORY = "/dev/shm"
_NAME_BYTES = 32
_POINT_TO_POINT = ("send", "recv", "isend", "irecv_")
_REDUCING = ("all_reduce", "all_reduce_", "iall_reduce_", "reduce_scatter", "ireduce_scatter", "reduce_scatterv")
_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
}
_OPS = {"sum": 0, "max": 1, "min": 2, "product": 3, "avg": 4}
_KINDS = ("?", "barrier", "all_reduce", "reduce_scatter", "all_gather", "gatherv", "broadcast", "scatter", "all_to_all")
_TIMED_OUT, _PEER_DIED, _MISMATCH = 1, 2, 3


class SharedMemoryCommunicator(Communicator):
    """The ranks of one host around one segment."""

    name = "shared_memory"

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self._reason: str | None = None
        self._segment: _Segment | None = None
        self._library: Any = None
        self._group: Any = None
        self._lock = threading.Lock()  # the library takes one call at a time; a second thread waits
        self._timeout_s = context.timeout_s
        self._functions: dict[str, Callable[..., int]] = {}
        self._sizes = ctypes.c_size_t * context.size
        self._pointers = ctypes.c_void_p * context.size

    def refusal(self, request: Request) -> str | None:
        if request.device_type != "cpu":
            return f"a tensor on {request.device_type}"
        if request.operation in _POINT_TO_POINT:
            return "it has no send and recv"
        if request.operation in _REDUCING and request.dtype is not None:
            reason = reduction_refusal(request.dtype, request.reduce_op)
            if reason is not None:
                return reason
        with self._lock:
            if self._group is None and self._reason is None:
                self._reason = self._attach()
            return self._reason

    def __str__(self) -> str:
        if self._group is None:
            return f"not used, {self._reason}" if self._reason else "CPU tensors, from the first collective on"
        policy = "spin" if _wait_policy(self.context)[1] == 0 else "spin briefly, yield"
        return (
            f"CPU tensors over a shared segment, {self._library.ps_instruction_set().decode()}; waits: {policy}, sleep"
        )

    def _attach(self) -> str | None:
        """Makes or opens the segment with all ranks; the reason where one of them can't."""
        # What this rank's environment and machine say may differ from the others': all come, and all hear of it.
        context, problem = self.context, ""
        segment: _Segment | None = None
        try:
            if not settings.SHARED_MEMORY.get():
                raise native.NativeUnavailableError(f"{settings.SHARED_MEMORY.name} is off")
            self._library = native.load()
            self._functions = {name: getattr(self._library, f"ps_{name}") for name in _KINDS[1:]}
            size_bytes = self._library.ps_segment_bytes(context.size)
        except native.NativeUnavailableError as error:
            problem, size_bytes = str(error), 0
        name = secrets.token_hex(_NAME_BYTES // 2)
        if context.rank == 0 and not problem:
            segment, problem = _Segment.make(name, size_bytes)
        try:
            name = self._tell(name if segment is not None else "-" * _NAME_BYTES)
            if context.rank != 0 and not problem:
                segment, problem = _Segment.open(name, size_bytes)
            facts = self._gather([os.getpid(), _pid_namespace(), int(segment is not None)])
        finally:
            if context.rank == 0 and segment is not None:
                segment.unlink()
        if segment is None or not all(fact[2] for fact in facts):
            if segment is not None:
                segment.close()
            return problem or f"ranks {[rank for rank, fact in enumerate(facts) if not fact[2]]} can't use it"
        own_namespace = facts[context.rank][1]
        pids = [pid if namespace == own_namespace != 0 else -1 for pid, namespace, _ in facts]
        spin_ns, yields = _wait_policy(context)
        self._group = self._library.ps_group_new(
            segment.address, context.rank, context.size, (ctypes.c_int64 * context.size)(*pids), spin_ns, yields
        )
        self._segment = segment
        return None

    def _tell(self, name: str) -> str:
        data = torch.tensor(list(name.encode()), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.context.cpu_group.broadcast([data], options).wait()
        return bytes(data.tolist()).decode("ascii", "replace")

    def _gather(self, facts: list[int]) -> list[list[int]]:
        mine = torch.tensor(facts, dtype=torch.int64)
        out = torch.empty(self.context.size, len(facts), dtype=torch.int64)
        self.context.cpu_group._allgather_base(out.view(-1), mine).wait()
        return out.tolist()

    def _call(self, name: str, *args: Any) -> None:
        started = time.monotonic()
        with self._lock:
            if self._group is None:  # closed by another thread
                raise GroupDestroyedError(f"{self.context} was destroyed; take the group anew from its getter")
            status = self._functions[name](self._group, *args, self._timeout_s)
            if status != 0:
                raise self._failure(status, name, time.monotonic() - started)

    def _failure(self, status: int, operation: str, elapsed_s: float) -> CommunicationError:
        context = self.context
        told = (ctypes.c_int64 * 3)()
        self._library.ps_group_failure(self._group, told)
        suspect = context.ranks[told[0]] if told[0] >= 0 else -1
        facts: dict[str, Any] = {
            "group": context.name,
            "operation": operation,
            "rank": context.rank,
            "suspect_ranks": (suspect,),
            "elapsed_s": elapsed_s,
            "timeout_s": context.timeout_s,
        }
        if status == _TIMED_OUT:
            return CollectiveTimeoutError(
                f"{operation} of {context} timed out after {elapsed_s:.3f} s (timeout {context.timeout_s:g} s): "
                f"global rank {suspect} has not come. The group can't be used further; look at that rank "
                "(its log, `py-spy dump`), or raise the timeout",
                **facts,
            )
        if status == _PEER_DIED:
            return PeerDiedError(
                f"{operation} of {context} failed after {elapsed_s:.3f} s: global rank {suspect} has ended. The group "
                "can't be used further; look at that rank's log",
                **facts,
            )
        return CollectiveMismatchError(
            f"{operation} of {context} met another call: this rank is in {_words(told[1])}, global rank {suspect} in "
            f"{_words(told[2])}. The group can't be used further; make the same calls in the same order on every rank",
            **facts,
        )

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if x.dim() == 0:
            return super().all_gather(x, dim)
        x = x.contiguous()
        shape = list(x.shape)
        shape[dim] *= self.context.size
        out = x.new_empty(shape)
        if x.numel():
            outer = x.shape[:dim].numel()
            self._call("all_gather", out.data_ptr(), x.data_ptr(), outer, x.nbytes // outer)
        return out

    def reduce_scatter(self, x: Tensor, dim: int, reduce_op: str) -> Tensor:
        x = x.contiguous()
        shape = list(x.shape)
        shape[dim] //= self.context.size
        out = x.new_empty(shape)
        if out.numel():
            self._reduce_scatter(out, x, x.shape[:dim].numel(), reduce_op)
        return out

    def _reduce_scatter(self, out: Tensor, x: Tensor, outer: int, reduce_op: str) -> None:
        wide_out, op, narrow = _supported(out, reduce_op)
        wide_x, _, _ = _supported(x, reduce_op)
        inner = wide_out.numel() // outer
        self._call(
            "reduce_scatter", wide_out.data_ptr(), wide_x.data_ptr(), outer, inner, _DTYPES[wide_out.dtype], _OPS[op]
        )
        if narrow is not None:
            narrow.copy_(wide_out)

    def all_reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        if x.dtype not in _DTYPES or not x.is_contiguous():
            return super().all_reduce(x, reduce_op)
        out = torch.empty_like(x)
        if x.numel():
            self._call("all_reduce", out.data_ptr(), x.data_ptr(), x.numel(), _DTYPES[x.dtype], _OPS[reduce_op])
        return out

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        if x.numel() == 0:
            return
        wide, op, narrow = _supported(x, reduce_op)
        self._call("all_reduce", wide.data_ptr(), wide.data_ptr(), wide.numel(), _DTYPES[wide.dtype], _OPS[op])
        if narrow is not None:
            narrow.copy_(wide)

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        if out.numel():
            self._reduce_scatter(out, x, 1, reduce_op)

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        if x.numel():
            self._call("all_gather", out.data_ptr(), x.data_ptr(), 1, x.nbytes)

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        if any(out.numel() for out in outs):
            outs[self.context.rank].copy_(x)
            self._gatherv([out.data_ptr() or 1 for out in outs], [out.nbytes for out in outs], x)

    def _gatherv(self, outs: Sequence[int | None], sizes: Sequence[int], x: Tensor) -> None:
        self._call("gatherv", self._pointers(*outs), self._sizes(*sizes), x.data_ptr())

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        if x.numel() == 0:
            return
        pointers = [None] * self.context.size if out is None else [block.data_ptr() for block in out.unbind(0)]
        self._gatherv(pointers, [x.nbytes] * self.context.size, x)
        if out is not None:
            out[self.context.rank].copy_(x)

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        self._call("scatter", out.data_ptr(), None if x is None else x.data_ptr(), out.nbytes, src)

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        row_bytes = x.dtype.itemsize * (x[0:1].numel() if x.shape[0] else out[0:1].numel())
        self._call(
            "all_to_all",
            out.data_ptr(),
            x.data_ptr(),
            self._sizes(*(rows * row_bytes for rows in output_splits)),
            self._sizes(*(rows * row_bytes for rows in input_splits)),
        )

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        if x.numel():
            self._call("broadcast", x.data_ptr(), x.nbytes, src)
        return DONE

    def barrier(self) -> None:
        self._call("barrier")

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        raise UnsupportedError(f"{self.context}: shared memory has no send")

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        raise UnsupportedError(f"{self.context}: shared memory has no recv")

    def close(self) -> None:
        """Unmaps the segment; one that another thread is in the middle of stays until the process ends."""
        self._reason = self._reason or "the group was closed"
        if not self._lock.acquire(blocking=False):
            return
        try:
            group, self._group = self._group, None
            if group is not None:
                self._library.ps_group_delete(group)
            if self._segment is not None:
                self._segment.close()
                self._segment = None
        finally:
            self._lock.release()


class _Segment:
    """A mapped segment. Only this user can open it, and once `unlink` was called nobody can."""

    def __init__(self, path: str, memory: mmap.mmap) -> None:
        self._path = path
        self._memory: mmap.mmap | None = memory
        self._view = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.address = ctypes.addressof(self._view)

    @classmethod
    def make(cls, name: str, size_bytes: int) -> tuple[_Segment | None, str]:
        path = os.path.join(_DIRECTORY, f"parallel_state-{name}")
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return None, f"no segment can be made in {_DIRECTORY}: {error.strerror}"
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)  # a full file system says so here, and not by SIGBUS later
            return cls(path, mmap.mmap(descriptor, size_bytes)), ""
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None, f"{_DIRECTORY} has no room for {size_bytes >> 20} MiB: {error.strerror}"
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, name: str, size_bytes: int) -> tuple[_Segment | None, str]:
        if not name.isalnum():
            return None, "rank 0 of the group could make no segment"
        path = os.path.join(_DIRECTORY, f"parallel_state-{name}")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None, "the ranks are on several hosts, or in containers that share no memory"
        try:
            info = os.fstat(descriptor)
            private = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and stat.S_IMODE(info.st_mode) == 0o600
            if not private or info.st_size != size_bytes:
                return None, "the segment isn't this user's, or has another size"
            return cls(path, mmap.mmap(descriptor, size_bytes)), ""
        except OSError as error:
            return None, f"the segment can't be mapped: {error.strerror}"
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            del self._view
            memory.close()


def _pid_namespace() -> int:
    """Which processes can watch each other by pid; 0 where that can't be told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _wait_policy(context: GroupContext) -> tuple[int, int]:
    """Nanoseconds to spin, and how often to yield then, before a waiting rank sleeps.

    A rank that spins on the core that the awaited one needs holds up both; so with more ranks than cores briefly only.
    """
    given = settings.SPIN_US.get()
    on_host = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(context.size, int(on_host) if on_host.isdecimal() else 0)
    crowded = ranks > len(os.sched_getaffinity(0))
    spin_us = given if given is not None else (5 if crowded else 150)
    return int(spin_us * 1000), 100 if crowded else 0


def _supported(x: Tensor, reduce_op: str) -> tuple[Tensor, str, Tensor | None]:
    """`x` in a dtype that the kernels reduce, the op to use on it, and where to copy the result if it isn't a view."""
    return (x, reduce_op, None) if x.dtype in _DTYPES else reducible(x, reduce_op)


def _words(call: int) -> str:
    """A call as its rank told it: see `call_of` in csrc/group.cpp."""
    call &= (1 << 64) - 1
    kind, dtype, op, size = call >> 56, (call >> 52) & 15, (call >> 48) & 15, call & ((1 << 48) - 1)
    name = _KINDS[kind] if kind < len(_KINDS) else "?"
    if name in ("all_reduce", "reduce_scatter"):
        ops, dtypes = list(_OPS), list(_DTYPES)
        what = f"{ops[op] if op < len(ops) else '?'} of {size} × {dtypes[dtype] if dtype < len(dtypes) else '?'}"
        return f"{name} ({what})"
    if name in ("broadcast", "scatter"):
        return f"{name} ({size} bytes from rank {(call >> 48) & 255 ^ 0x80})"
    return name if name == "barrier" else f"{name} ({size} bytes)"
