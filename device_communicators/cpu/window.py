"""Windows: memory of each rank that other ranks can write. Ranks of the same host can also read it
(csrc/one_sided.h).
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from operator import index
from typing import Any, NoReturn

import torch
from torch import Tensor

from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    InvalidArgumentError,
    UnsupportedError,
)
from device_communicators.base.host_calls import host_call
from device_communicators.base.member import GroupMember
from device_communicators.calls.memory import dense, is_dense
from device_communicators.calls.user_call import DTYPE_NUMBERS
from device_communicators.calls.work import TransferError
from device_communicators.cpu import native
from device_communicators.cpu.native_group import (
    LEFT,
    OUTSIDE,
    Members,
    NativeGroup,
    given_up,
    outsider_died,
    peer_died,
)
from device_communicators.cpu.transfers import Failed, failure_of

TIMED_OUT = 1
_CLOSED, _INTERRUPTED, _UNSUPPORTED, _UNMAPPED, _BROKEN, _WRONG_ARGUMENT = 4, 5, 6, 9, 10, 12
"""Values of `Status` in csrc/group.h."""
_PART_WORDS, _MOST_DIMS = 17, 9
"""Sizes of `WindowPart` in csrc/window_part.h."""
_DTYPES = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}
_LEFT_TO_PYTHON = -1
"""Result of `ps_direct_put` if Python must handle the tensor."""
_LONGEST_S = 1e9
_ADVICE = "call it outside the compiled function"


def window_failure(
    group: NativeGroup, status: int, method: str, rank: int, elapsed_s: float, timeout_s: float
) -> Exception:
    """Returns the error of this thread's last window call: `method` with the group's rank `rank`, whose result code was
    `status`. Instead raises the exception of a signal handler, if one raised.
    """
    members = group.members
    if status == _INTERRUPTED:
        group.library.raise_interruption()
    if status == _CLOSED:
        return members.destroyed()
    words, said = (c_int64 * (3 + len(Failed._fields)))(), ctypes.create_string_buffer(512)
    group.library.ps_window_refusal(words, said, len(said))
    if status in (_WRONG_ARGUMENT, _UNSUPPORTED):
        kind = InvalidArgumentError if status == _WRONG_ARGUMENT else UnsupportedError
        return kind(f"{said.value.decode()} (a window of {members})")
    if status == _UNMAPPED:
        return group.failure(status, method, elapsed_s)
    if status == TIMED_OUT:
        who = members.ranks[rank]
        text = (
            f"{method} of {members} timed out after {elapsed_s:.3f} s (the timeout is {timeout_s:g} s): global rank "
            f"{who} has not signalled. The window can be used further; look at that rank, or raise the timeout"
        )
        return members.failure(
            CollectiveTimeoutError, text, method, suspect_ranks=(who,), elapsed_s=elapsed_s, timeout_s=timeout_s
        )
    suspect, reporter, reason, *transfer = words
    if status == _BROKEN:
        return failure_of(members, Failed(*transfer), said.value.decode(errors="replace"), operation=method)
    if suspect == OUTSIDE:
        return outsider_died(members, method, elapsed_s)
    who = members.ranks[suspect] if suspect >= 0 else -1
    if reporter >= 0:
        return given_up(members, method, who, elapsed_s, reason, members.ranks[reporter])
    return peer_died(members, method, who, elapsed_s, LEFT if group.has_left(suspect) else "has ended")


def group_of_one(context: GroupMember) -> NativeGroup:
    """Returns a `NativeGroup` of this rank alone. Raises UnsupportedError if the compiled library is missing."""
    try:
        library = native.load()
    except native.NativeUnavailableError as error:
        raise UnsupportedError(
            f"window() of {context} needs this library's compiled part, which is unavailable: {error}"
        ) from error
    number = library.ps_group_new(None, 0, 0, 1, 0, 0, context.timeout_s)
    return NativeGroup(library, number, Members(context.name, context.ranks, context.rank, context.timeout))


@functools.cache
def _direct_put_of(library: Any) -> Any:
    return library.method("ps_direct_put") if library.has_ops else lambda *_: _LEFT_TO_PYTHON


class _Opened:
    """An open window. Tensors that view the window's memory keep this object alive."""

    def __init__(self, library: Any, address: int) -> None:
        self.library, self.address = library, address

    def __del__(self) -> None:
        self.library.ps_window_delete(self.address)


class Window:
    """A tensor on each rank that the group's other ranks can write. Created by `GroupCoordinator.window`.

    The arguments `dst`, `src` and `rank` are ranks in the group, and can be this rank. Only `deregister` must be called
    by all ranks.

    After `wait_signal(src)`, this rank sees what `src` wrote before the signal: its puts to this rank, and within a
    host all its writes. Within a host, a read after `put` has returned gives the new bytes. A read during a write can
    give old and new bytes mixed.

    Calls raise PeerDiedError if a rank died, InvalidArgumentError after `deregister`, and GroupDestroyedError after the
    group's destruction. Thread-safe.
    """

    def __init__(
        self,
        group: NativeGroup,
        size: Sequence[int],
        dtype: torch.dtype,
        exchange: Callable[[Tensor], Tensor],
        barrier: Callable[[], object],
        failure_of: Callable[[Exception, str, float], Exception],
    ) -> None:
        """`size`: the tensor's shape. `exchange` all-gathers a tensor. `failure_of` turns an error, the method's name
        and its start time into the group's error.
        """
        self._group, self._barrier, self._failure_of = group, barrier, failure_of
        count, library = math.prod(size), group.library
        number = DTYPE_NUMBERS.get(dtype, -1)
        if number < 0:
            raise InvalidArgumentError(
                f"a window of {self} can't have dtype {dtype}; create it with another dtype of the same width, and use "
                f"`tensor.view({dtype})`"
            )
        shape = tuple(size) if len(size) <= _MOST_DIMS else (count,)
        part = (c_int64 * _PART_WORDS)(-1, -1, count * dtype.itemsize, count, number, 0, 0, len(shape), *shape)
        address = library.ps_window_new(group.number, part, None)
        if address is None:
            raise group.members.destroyed()
        self._opened = _Opened(library, address)
        self._address: int = address
        self._parts = exchange(torch.tensor(part[:], dtype=torch.int64, device="cpu")).view(-1, _PART_WORDS)
        self._direct_put = _direct_put_of(library)
        status = library.ps_window_open(address, self._parts.data_ptr())
        if status:
            self._fail(status, "window", group.rank)
        self.tensor: Tensor = self.map_remote_tensor(group.rank).view(tuple(size))
        """This rank's memory, zeros at first."""

    @host_call(_ADVICE)
    def put(self, x: Tensor, dst: int, offset: int = 0, *, signal: bool = False) -> None:
        """Copies the CPU tensor `x` into rank `dst`'s window, from element `offset` on. The program may change `x`
        afterwards.

        On return, the bytes have arrived if `dst` is on this host; else they can still be on their way. `signal=True`
        also signals rank `dst`, in the same message. Raises InvalidArgumentError if `x` doesn't fit, and
        CollectiveTimeoutError if another host doesn't receive the bytes.
        """
        started = time.monotonic()
        status = self._direct_put(self._address, x, dst, offset, 1 if signal else 0)
        if status == _LEFT_TO_PYTHON:
            status = self._put(x, dst, offset, bool(signal))
        if status:
            self._fail(status, "put", dst, started)

    def _put(self, x: Tensor, dst: int, offset: int, signal: bool) -> int:
        if not isinstance(x, Tensor) or not x.is_cpu:
            raise InvalidArgumentError(
                f"put of a window of {self} takes a CPU tensor, but got another object: a {type(x).__name__}"
            )
        if not is_dense(x):
            x = dense(x)
        number = DTYPE_NUMBERS.get(x.dtype, -1)
        status: int = self._group.library.ps_window_putting(
            self._address, index(dst), index(offset), x.numel(), number, x.data_ptr(), int(signal)
        )
        return status

    @host_call(_ADVICE)
    def map_remote_tensor(self, rank: int) -> Tensor:
        """Returns the window of `rank` (in the group) as a tensor. The tensor keeps the memory mapped.

        After `deregister`, that rank can reuse the memory. Raises UnsupportedError if `rank` shares no memory with this
        rank.
        """
        found = c_void_p()
        status = self._group.library.ps_window_memory(self._address, index(rank), ctypes.byref(found))
        if status:
            self._fail(status, "map_remote_tensor", rank)
        _, _, size_bytes, _, number, _, _, dims, *sizes = self._parts[rank].tolist()
        dtype, shape = _DTYPES[number], sizes[:dims]
        if size_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        memory = (ctypes.c_char * size_bytes).from_address(found.value or 0)
        memory.owner = self._opened  # torch keeps `memory`
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)

    @host_call(_ADVICE)
    def signal(self, dst: int) -> None:
        """Sends a signal to the group's rank `dst`, which receives it by `wait_signal`. Returns at once."""
        started = time.monotonic()
        status = self._group.library.ps_window_signalling(self._address, index(dst))
        if status:
            self._fail(status, "signal", dst, started)

    @host_call(_ADVICE)
    def wait_signal(self, src: int, timeout_s: float | None = None) -> None:
        """Waits for one signal of the group's rank `src`. `timeout_s` is by default the group's timeout; 0 only polls.

        After a CollectiveTimeoutError the window stays usable, and a later call can receive the signal.
        """
        started = time.monotonic()
        limit_us = -1 if timeout_s is None else int(1e6 * min(max(timeout_s, 0.0), _LONGEST_S))
        status = self._group.library.ps_window_waiting(self._address, index(src), limit_us)
        if status:
            limit_s = self._group.members.timeout_s if timeout_s is None else max(timeout_s, 0.0)
            self._fail(status, "wait_signal", src, started, limit_s)

    @host_call(_ADVICE)
    def deregister(self) -> None:
        """Ends the window and frees its memory. Every rank must call this. Returns when all puts have arrived."""
        self._barrier()
        started, status = time.monotonic(), self._group.library.ps_window_end(self._address)
        if status:
            self._fail(status, "deregister", self._group.rank, started)

    def _fail(
        self, status: int, method: str, rank: int, started: float | None = None, limit_s: float = 0.0
    ) -> NoReturn:
        started = started or time.monotonic()
        error = window_failure(self._group, status, method, rank, time.monotonic() - started, limit_s)
        if status == TIMED_OUT or not isinstance(error, CommunicationError | TransferError):
            raise error
        failure = self._failure_of(error, method, started)
        raise failure from None if failure is error else error

    def __str__(self) -> str:
        return str(self._group.members)
