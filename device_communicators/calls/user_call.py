"""Describes a collective as the program called it, so that ranks can compare their calls."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from device_communicators.base.errors import UsageError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_CLASSES: tuple[tuple[str, ...], ...] = (
    (),
    ("all_reduce", "all_reduce_", "all_reduce_async"),
    ("all_gather", "all_gather_to_list", "all_gather_async", "window"),
    ("reduce_scatter", "reduce_scatter_async"),
    ("broadcast", "broadcast_", "broadcast_async", "broadcast_flag"),
    ("all_gatherv",),
    ("reduce_scatterv",),
    ("all_to_all",),
    ("barrier",),
    ("all_reduce_add_rms_norm",),
    ("all_reduce_add_rms_norm_static_fp8_quant",),
    ("all_reduce_add_rms_norm_dynamic_per_token_fp8_quant",),
    ("gather",),
    ("scatter",),
    ("broadcast_object",),
    ("broadcast_object_list",),
    ("broadcast_tensor_dict",),
    ("all_gather_object", "all_sum"),
    ("broadcast_tensor_dict with a spec",),
    ("reduce",),
)
"""Classes of methods, in the order of `Method` in csrc/call.h. Methods of one class match each other."""
_VARIANTS = 8
METHODS = {
    name: _VARIANTS * number + variant for number, names in enumerate(_CLASSES) for variant, name in enumerate(names)
}
_NAMES = {number: name for name, number in METHODS.items()}
_UNKNOWN = 254


def method_of(number: int) -> str:
    return _NAMES.get(number, "message")


DTYPE_NUMBERS = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex32: 8, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
    torch.float8_e5m2: 23, torch.float8_e4m3fn: 24, torch.float8_e5m2fnuz: 25, torch.float8_e4m3fnuz: 26,
    torch.uint16: 27, torch.uint32: 28, torch.uint64: 29,
}  # fmt: skip
"""Numbers of c10::ScalarType."""
_DTYPE_NAMES = {number: str(dtype).removeprefix("torch.") for dtype, number in DTYPE_NUMBERS.items()}
_SHAPE_BITS = 60
_NO_SHAPE = 15
REDUCE_OPS = {"sum": 0, "max": 1, "min": 2, "product": 3, "avg": 4, "tree_sum": 5}
"""Numbers of `ReduceOp` in csrc/reduce.h."""
_OF_ROWS = ("all_to_all", "all_gatherv")

_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "all_gather": ("dim",),
    "all_gatherv": ("dim", "sizes"),
    "reduce_scatter": ("dim",),
    "reduce_scatterv": ("dim", "sizes"),
    "gather": ("dim", "root"),
    "scatter": ("", "dim", "root"),
    "broadcast": ("root",),
    "broadcast_": ("root",),
    "ibroadcast_": ("root",),
}
"""Names of each operation's arguments after the first tensor."""
_STARTED = {
    "iall_reduce_": "all_reduce_async",
    "iall_gather": "all_gather_async",
    "ireduce_scatter": "reduce_scatter_async",
    "ibroadcast_": "broadcast_async",
}


class UserCall(NamedTuple):
    """A call that a program made. The fields must be equal on all ranks, except that similar methods (`_CLASSES`)
    match. Fields that don't apply have their defaults. `root`: the argument `src` or `dst`, a rank in the group.
    `sizes`: of each rank's part.
    """

    method: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    """The tensor's shape, or one row's shape if ranks may pass different numbers of rows."""
    reduce_op: str | None = None
    dim: int = -1
    root: int = -1
    sizes: tuple[int, ...] = ()

    @property
    def words(self) -> tuple[int, int]:
        return _words(self)

    @property
    def digest(self) -> int:
        """Returns a hash of `shape` and `sizes`. C++ computes the same hash (`digest_of_shape` in csrc/call.h)."""
        digest = 0
        for size in (*self.shape, *self.sizes):
            digest = ((digest ^ (size + 1)) * 0x9E3779B1) & 0xFFFFFFFF
        return digest >> 8

    @property
    def packed_shape(self) -> int:
        """Returns the shape in one integer. C++ computes the same integer (`packed_shape` in csrc/call.h)."""
        dims = len(self.shape)
        bits = _SHAPE_BITS // max(dims, 1)
        if dims >= _NO_SHAPE or any(size >> bits for size in self.shape):
            return _NO_SHAPE << _SHAPE_BITS | math.prod(self.shape) & ((1 << _SHAPE_BITS) - 1)
        packed = 0
        for size in self.shape:
            packed = packed << bits | size
        return dims << _SHAPE_BITS | packed

    @property
    def word(self) -> int:
        dtype = 0 if self.dtype is None else DTYPE_NUMBERS.get(self.dtype, _UNKNOWN)
        reduction = -1 if self.reduce_op is None else REDUCE_OPS[self.reduce_op]
        return (
            METHODS.get(self.method, 0)
            | dtype << 8
            | (reduction + 1) << 16
            | (self.dim + 1 & 255) << 24
            | (self.root + 1 & 255) << 32
            | self.digest << 40
        )

    @property
    def key(self) -> int:
        return key_of(self.words[0])

    def __str__(self) -> str:
        return _text(self)


@functools.lru_cache(maxsize=1024)
def _text(call: UserCall) -> str:
    sizes = f"sizes {list(call.sizes)}" if call.sizes else ""
    dtype = "" if call.dtype is None else str(call.dtype).removeprefix("torch.")
    return _in_words(call.method, call.reduce_op or "", call.dim, call.root, sizes, dtype, call.shape)


@functools.lru_cache(maxsize=1024)
def _words(call: UserCall) -> tuple[int, int]:
    return call.word, call.packed_shape


def key_of(word: int) -> int:
    """Returns a number that is equal for matching calls, from a call's `UserCall.word`; 0 for a method without a
    number.
    """
    return word & ((1 << 64) - _VARIANTS) if word & 255 else 0


BROADCAST_BY_SPEC = "broadcast_tensor_dict with a spec"


TRANSFERS = (
    "send_tensor_dict with a spec", "recv_tensor_dict with a spec", "send_object", "isend_object", "send_tensor_dict",
    "isend_tensor_dict", "recv_object", "recv_tensor_dict",
)  # fmt: skip
"""Methods of messages between two ranks, numbered as `ToOne::method` in csrc/messages.h."""
_TRANSFER_NUMBERS = {method: number for number, method in enumerate(TRANSFERS)}


def transfer_number(default: str) -> int:
    return _TRANSFER_NUMBERS.get(_THREAD.transfer) or _TRANSFER_NUMBERS[default]


@functools.lru_cache(maxsize=256)
def message_word(method: str, src: int) -> int:
    return message_call(method, src).word


@functools.lru_cache(maxsize=256)
def message_call(method: str, src: int) -> UserCall:
    return UserCall(method, root=src)


def in_words(word: int, packed_shape: int, parts: Sequence[int] = ()) -> str:
    """Describes a call as text for errors. `word`, `packed_shape`: fields of the call's `UserCall`. `parts`: size of
    each rank's part in bytes, or empty.
    """
    method = _NAMES.get(word & 255, "?")
    reduction, dim, root = (word >> 16 & 255) - 1, (word >> 24 & 255) - 1, (word >> 32 & 255) - 1
    ops = list(REDUCE_OPS)
    op = ops[reduction] if 0 <= reduction < len(ops) else ""
    dtype = "" if method in ("barrier", *_MESSAGES) else _DTYPE_NAMES.get(word >> 8 & 255, "?")
    sizes = f"parts of {list(parts)} bytes" if parts else ""
    return _in_words(method, op, dim, root, sizes, dtype, _unpacked(packed_shape))


def _unpacked(packed: int) -> tuple[int, ...] | int:
    dims, packed = packed >> _SHAPE_BITS & 15, packed & ((1 << _SHAPE_BITS) - 1)
    if dims == _NO_SHAPE:
        return packed
    bits = _SHAPE_BITS // max(dims, 1)
    return tuple(packed >> bits * (dims - 1 - dim) & ((1 << bits) - 1) for dim in range(dims))


_MESSAGES = (
    "broadcast_object", "broadcast_object_list", "broadcast_tensor_dict", "broadcast_tensor_dict with a spec",
    "all_gather_object", "all_sum",
)  # fmt: skip


def _in_words(method: str, op: str, dim: int, root: int, sizes: str, dtype: str, shape: tuple[int, ...] | int) -> str:
    if method in _MESSAGES:
        return f"{method}(rank {root})" if root >= 0 else method
    of_rows = method in _OF_ROWS
    rows = f"rows of {shape if isinstance(shape, int) else list(shape)}" if of_rows and shape else ""
    facts = [op, f"dim {dim}" if dim >= 0 else "", f"rank {root}" if root >= 0 else "", rows, sizes]
    arguments = ", ".join(fact for fact in facts if fact)
    count = shape if isinstance(shape, int) else shape[0] if len(shape) == 1 else list(shape)
    what = f" of {'' if of_rows else f'{count} × '}{dtype}" if dtype else ""
    return f"{method}{f'({arguments})' if arguments else ''}{what}"


def call_of_arguments(
    operation: str, tensor: torch.Tensor | None, args: Sequence[object], reduce_op: str | None, method: str, dim: int
) -> UserCall:
    """Returns the `UserCall` of a communicator's method `operation`, which is called with `args`. `tensor`: the
    method's input. `method`: the name that the user called, or "" to derive it from `operation`. `dim`: used if `args`
    contain no dim.
    """
    facts: dict[str, object] = {}
    if operation in ("iall_gather", "ireduce_scatter"):
        tensor = args[0] if isinstance(args[0], torch.Tensor) else tensor
    elif operation in _ARGUMENTS:
        given = args if operation == "ibroadcast_" else args[1:]
        facts = {name: value for name, value in zip(_ARGUMENTS[operation], given, strict=False) if name}
    root, sizes = facts.get("root", -1), facts.get("sizes", ())
    dim = facts.get("dim", dim)  # type: ignore[assignment]
    name = method or _called_as(_STARTED.get(operation, operation))
    if tensor is None or name in _MESSAGES or (name == "scatter" != operation):  # a step of a message
        return UserCall(name, dim=dim, root=root, sizes=tuple(sizes))  # type: ignore[arg-type]
    shape = _shape_compared(operation, tuple(tensor.shape), dim)
    return UserCall(name, tensor.dtype, shape, reduce_op, dim, root, tuple(sizes))  # type: ignore[arg-type]


def _shape_compared(operation: str, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    if operation == "all_to_all":
        return shape[1:]
    if operation == "all_gatherv":
        return (*shape[:dim], *shape[dim + 1 :])
    if operation == "ireduce_scatter":  # its tensor has `dim` moved to the front
        return (*shape[1 : dim + 1], shape[0], *shape[dim + 1 :])
    return shape


def overlap_error(operation: str, group: str, where: str = "of the group") -> UsageError:
    return UsageError(
        f"{operation} of {group} must not begin while another collective {where} is running in this process: ranks "
        "can't agree on an order of the calls of threads or signal handlers. Nothing was sent; give each thread a "
        "group of its own (make_sub_group, whose process groups are not shared, or create_parallel_groups and use()), "
        "or make the calls one after the other"
    )


def handler_error(operation: str, group: str, interrupted: str) -> UsageError:
    return UsageError(
        f"{operation} of {group} must not begin in a signal handler that interrupts a transfer of the group, here "
        f"{interrupted}. Nothing was sent; call {operation} after the transfer, or on another group (make_sub_group)"
    )


class _CallState(threading.local):
    call: UserCall | None = None
    called_as = ""
    transfer = ""
    has_sent = True
    began_s = 0.0


_THREAD = _CallState()


def current(operation: str) -> UserCall:
    return _THREAD.call or UserCall(operation)


def set_current_call(call: UserCall | None) -> UserCall | None:
    before, _THREAD.call = _THREAD.call, call
    return before


def _called_as(method: str) -> str:
    named = _THREAD.called_as
    return named if named and METHODS.get(named, 0) // _VARIANTS == METHODS.get(method, 0) // _VARIANTS else method


@contextmanager
def called_as(method: str) -> Iterator[None]:
    before, _THREAD.called_as = _THREAD.called_as, method
    try:
        yield
    finally:
        _THREAD.called_as = before


def timed(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a method so that `elapsed_s`, an attribute of its errors, counts from the method's start."""

    @functools.wraps(call)
    def under_time(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if _THREAD.began_s:
            return call(*args, **kwargs)
        _THREAD.began_s = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            _THREAD.began_s = 0.0

    return under_time


@contextmanager
def began_at(began_s: float) -> Iterator[None]:
    """Makes the errors in the block compute `elapsed_s` from `began_s`, a monotonic time."""
    before, _THREAD.began_s = _THREAD.began_s, _THREAD.began_s or began_s
    try:
        yield
    finally:
        _THREAD.began_s = before


def began_s() -> float:
    return _THREAD.began_s


def transfer(method: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorates a function: its errors name `method` as the failed call, and count `elapsed_s` from its start."""

    def named(call: Callable[_P, _T]) -> Callable[_P, _T]:
        call = timed(call)

        @functools.wraps(call)
        def under_name(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            before, _THREAD.transfer = _THREAD.transfer, method
            try:
                return call(*args, **kwargs)
            finally:
                _THREAD.transfer = before

        return under_name

    return named


def transfer_method() -> str:
    return _THREAD.transfer


def begin_sending() -> None:
    """Records that this thread's call has begun to send. From now on, its failure makes the group unusable."""
    _THREAD.has_sent = True


def has_sent() -> bool:
    return _THREAD.has_sent


def begin_locally() -> None:
    """Records that this thread's call has sent nothing. Until `begin_sending`, a failure leaves the group usable."""
    _THREAD.has_sent = False
