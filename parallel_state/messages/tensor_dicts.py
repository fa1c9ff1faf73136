"""Sends tensor dicts that sender and receiver describe by equal specs. Only the spec's digest and non-empty tensors are
sent.

    first = group.recv_tensor_dict()             # eager, with metadata
    spec = TensorDictSpec.of(first)              # the sender passes the dict that it sent
    then = group.recv_tensor_dict(spec=spec)     # also under torch.compile(fullgraph=True)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.base.torch_internals import dispatch_modes, in_transform
from device_communicators.calls.memory import dtype_refusal
from device_communicators.calls.user_call import BROADCAST_BY_SPEC, DTYPE_NUMBERS, TRANSFERS, began_at, message_word
from device_communicators.cpu.types import Form, PastPython
from parallel_state.collectives import ops  # noqa: F401  (registers torch.ops.parallel_state)
from parallel_state.collectives.calls import is_single_rank
from parallel_state.messages.buffers import Buffers, misfit, note_writes, refused
from parallel_state.messages.codec.types import TensorMetadata
from parallel_state.messages.messenger import Messenger
from parallel_state.messages.slices import AllGatherGroup, can_be_cut
from parallel_state.messages.wire import (
    CPU,
    DONE,
    LEFT,
    LENT_BYTES,
    POOLED_BYTES,
    device_for,
    digest_of,
    head_of_sizes,
)

_SENT, _RECEIVED = map(TRANSFERS.index, ("send_tensor_dict with a spec", "recv_tensor_dict with a spec"))
_BROADCAST_LIST = torch.ops.parallel_state.broadcast_list.default
_BROADCAST_LIST_ = torch.ops.parallel_state.broadcast_list_.default
_SEND_LIST = torch.ops.parallel_state.send_list.default
_RECV_LIST_ = torch.ops.parallel_state.recv_list_.default


@dataclass(frozen=True)
class TensorEntry:
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    def described(self) -> str:
        return f"{self.key!r}: {self.dtype} {self.shape} {self.device_type}"


@dataclass(frozen=True)
class ConstantEntry:
    """A constant in the spec. Constants must be equal on both sides, and are not sent."""

    key: str
    value: Any

    def described(self) -> str:
        return f"{self.key!r}: {self.value!r}"


@dataclass(frozen=True)
class TensorDictSpec:
    """Keys, shapes, dtypes and constants of a flat tensor dict. Sender and receiver must pass equal specs.

    `carried`: the tensors that are sent. `digest`: equal for equal entries.
    """

    entries: tuple[TensorEntry | ConstantEntry, ...]
    digest: str = field(init=False, repr=False, compare=False, default="")
    carried: tuple[TensorEntry, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        carried = tuple([each for each in self.entries if isinstance(each, TensorEntry) and prod(each.shape) > 0])
        object.__setattr__(self, "carried", carried)
        object.__setattr__(self, "digest", digest_of("; ".join([entry.described() for entry in self.entries])))

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> TensorDictSpec:
        """Returns the spec of a dict of tensors and constants (None, bool, int, float, str, bytes, tuple)."""
        entries: list[TensorEntry | ConstantEntry] = []
        for key, value in tensors.items():
            if isinstance(key, str) and isinstance(value, Tensor) and dtype_refusal(value.dtype) is None:
                entries.append(TensorEntry(key, tuple(value.shape), value.dtype, value.device.type))
            elif isinstance(key, str) and _is_constant(value):
                entries.append(ConstantEntry(key, value))
            else:
                raise InvalidArgumentError(
                    f"a TensorDictSpec has str keys, and tensors and constants as values, but {key!r} is a "
                    f"{type(value).__name__}; send this value separately, or the dict without a spec"
                )
        return cls(tuple(entries))

    def check(self, tensors: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError if `tensors` doesn't fit this spec."""
        if len(tensors) != len(self.entries):
            raise InvalidArgumentError(
                f"a tensor dict must have the {len(self.entries)} keys of its spec, but has {len(tensors)}"
            )
        for entry in self.entries:
            if entry.key not in tensors:
                raise InvalidArgumentError(f"a tensor dict must have all keys of its spec, but lacks {entry.key!r}")
            value = tensors[entry.key]
            if isinstance(entry, ConstantEntry):
                if not _same_constant(value, entry.value):
                    raise InvalidArgumentError(
                        f"the tensor dict's {entry.key!r} must be {entry.value!r}, as in the spec, but has another "
                        "value; make a new spec"
                    )
            elif (
                not isinstance(value, Tensor)
                or value.shape != entry.shape
                or value.dtype != entry.dtype
                or (not value.is_cpu if entry.device_type == "cpu" else value.device.type != entry.device_type)
            ):
                raise InvalidArgumentError(
                    f"the tensor dict's {entry.key!r} must be a {entry.dtype} tensor of shape {list(entry.shape)} on "
                    f"{entry.device_type}, as in the spec, but isn't; make a new spec"
                )


class _KnownForm(NamedTuple):
    form: Form
    head: bytes
    constants: tuple[ConstantEntry, ...]
    values: dict[str, Any]
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]
    can_be_lent: bool

    def has_same_constants(self, tensors: dict[str, Any]) -> bool:
        for each in self.constants:
            if each.key not in tensors or not _same_constant(tensors[each.key], each.value):
                return False
        return True

    def allocate(self, messenger: Messenger) -> dict[str, Any]:
        made = self.values.copy()
        for key, shape, dtype, is_large in self.tensors:
            made[key] = messenger.empty(shape, dtype) if is_large else torch.empty(shape, dtype=dtype, device=CPU)
        return made

    def with_views(self, receive: Callable[..., list[Tensor]], src: int) -> dict[str, Any]:
        made = self.values.copy()
        forms = [TensorMetadata(dtype, shape, "cpu") for _, shape, dtype, _ in self.tensors]
        received = receive(self.head, self.form.address, forms, src)
        for (key, *_), tensor in zip(self.tensors, received, strict=True):
            made[key] = tensor
        return made


_MOST_FORMS = 256
_forms: dict[str, _KnownForm | None] = {}


def _known_form(spec: TensorDictSpec) -> _KnownForm | None:
    try:
        return _forms[spec.digest]
    except KeyError:
        from device_communicators.cpu.plain_tree import Form

        known = None
    tensors = [each for each in spec.entries if isinstance(each, TensorEntry)]
    if spec.carried and all(each.device_type == "cpu" and each.dtype in DTYPE_NUMBERS for each in tensors):
        dtypes, shapes = [DTYPE_NUMBERS[each.dtype] for each in tensors], [each.shape for each in tensors]
        sizes = tuple([prod(each.shape) * each.dtype.itemsize for each in spec.carried])
        known = _KnownForm(
            Form([each.key for each in tensors], dtypes, shapes, len(spec.entries)),
            head_of_sizes(spec.digest, sizes),
            tuple(each for each in spec.entries if isinstance(each, ConstantEntry)),
            {each.key: each.value if isinstance(each, ConstantEntry) else None for each in spec.entries},
            tuple((x.key, x.shape, x.dtype, prod(x.shape) * x.dtype.itemsize >= POOLED_BYTES) for x in tensors),
            sum(sizes) >= LENT_BYTES,
        )
    if len(_forms) >= _MOST_FORMS:
        _forms.clear()
    _forms[spec.digest] = known
    return known


def _past_python(messenger: Messenger, spec: TensorDictSpec) -> tuple[PastPython, _KnownForm] | None:
    carrier = messenger.past_python if _is_eager() else None
    known = None if carrier is None else _known_form(spec)
    return None if carrier is None or known is None else (carrier, known)


def broadcast(
    messenger: Messenger,
    token: Tensor,
    tensors: dict[str, Any] | None,
    src: int,
    spec: TensorDictSpec,
    out: Buffers | None,
    views: bool,
) -> dict[str, Any]:
    past = _past_python(messenger, spec)
    began = 0.0
    if messenger.route.context.rank == src:
        if past is not None and type(tensors) is dict:
            began = time.monotonic()
            carrier, known = past
            if known.has_same_constants(tensors):
                word, form = message_word(BROADCAST_BY_SPEC, src), known.form.address
                if carrier.broadcast_dict(messenger.route.key, word, tensors, form, known.head) == DONE:
                    return tensors
        given = _given(tensors, spec)
        if spec.carried and not is_single_rank(messenger.route):
            _run("broadcast_list", _BROADCAST_LIST, messenger, token, _tensors_of(given, spec), spec, src, began)
        return given
    if views and past is not None and past[1].can_be_lent:
        return past[1].with_views(messenger.broadcast_views, src)
    result = _to_fill(messenger, spec, out, past)
    if spec.carried:
        pieces = [result[entry.key] for entry in spec.carried]
        outcome = LEFT
        if past is not None:
            began = time.monotonic()
            carrier, known = past
            word = message_word(BROADCAST_BY_SPEC, src)
            outcome = carrier.receive_broadcast(messenger.route.key, word, known.head, pieces)
        if outcome != DONE:
            _run("broadcast_list", _BROADCAST_LIST_, messenger, token, pieces, spec, src, began)
    if out is not None and not torch.compiler.is_compiling():
        note_writes(out)
    return result


def send(
    messenger: Messenger,
    token: Tensor,
    tensors: dict[str, Any],
    dst: int,
    all_gather_group: AllGatherGroup | None,
    all_gather_tensors: Mapping[str, bool] | None,
    spec: TensorDictSpec,
) -> None:
    past = _past_python(messenger, spec) if all_gather_group is None and type(tensors) is dict else None
    began = 0.0
    if past is not None:
        began = time.monotonic()
        carrier, known = past
        if known.has_same_constants(tensors):
            form = known.form.address
            if carrier.send_dict(messenger.route.key, dst, _SENT, tensors, form, known.head) == DONE:
                return
    given = _given(tensors, spec)
    pieces = _tensors_of(given, spec)
    if all_gather_group is not None:
        for i, entry in enumerate(spec.carried):
            slices = _slices(entry, all_gather_group, all_gather_tensors)
            if slices > 1:
                pieces[i] = pieces[i].reshape(slices, -1)[all_gather_group.rank_in_group]
    if pieces:
        _run("send_list", _SEND_LIST, messenger, token, pieces, spec, dst, began)


def recv(
    messenger: Messenger,
    token: Tensor,
    src: int,
    all_gather_group: AllGatherGroup | None,
    all_gather_tensors: Mapping[str, bool] | None,
    spec: TensorDictSpec,
    out: Buffers | None,
    views: bool,
) -> dict[str, Any]:
    past = _past_python(messenger, spec) if all_gather_group is None else None
    if views and past is not None and past[1].can_be_lent:
        return past[1].with_views(messenger.recv_views, src)
    result = _to_fill(messenger, spec, out, past)
    sliced: list[TensorEntry] = []
    if all_gather_group is not None:
        for entry in spec.carried:
            slices = _slices(entry, all_gather_group, all_gather_tensors)
            if slices > 1:
                result[entry.key] = result[entry.key].new_empty(prod(entry.shape) // slices)
                sliced.append(entry)
    if spec.carried:
        pieces = [result[entry.key] for entry in spec.carried]
        outcome, began = LEFT, 0.0
        if past is not None:
            began = time.monotonic()
            outcome = past[0].receive(messenger.route.key, src, _RECEIVED, past[1].head, pieces)
        if outcome != DONE:
            _run("recv_list", _RECV_LIST_, messenger, token, pieces, spec, src, began)
    if all_gather_group is not None:
        for entry in sliced:
            whole = all_gather_group.all_gather(result[entry.key], 0).view(entry.shape)
            result[entry.key] = whole if out is None else out.tensors[entry.key].copy_(whole)
    if out is not None and not torch.compiler.is_compiling():
        note_writes(out)
    return result


def _tensors_of(given: dict[str, Any], spec: TensorDictSpec) -> list[Tensor]:
    return [x.detach() if x.requires_grad else x for x in [given[entry.key] for entry in spec.carried]]


def _run(
    method: str,
    op: Callable[..., None],
    messenger: Messenger,
    token: Tensor,
    pieces: list[Tensor],
    spec: TensorDictSpec,
    peer: int,
    began: float = 0.0,
) -> None:
    """Sends `pieces` to group rank `peer`, or receives into them, by the torch op `op`.

    Eager calls with plain CPU tensors call the messenger's `method` instead of `op`. `began`: start time of the call if
    C++ code began it, else 0.
    """
    if not _is_plain(pieces):
        op(pieces, token, spec.digest, peer, messenger.route.key)
        return
    with began_at(began) if began else nullcontext():
        getattr(messenger, method)(pieces, spec.digest, peer)


def _is_plain(tensors: list[Tensor]) -> bool:
    if not _is_eager():
        return False
    for x in tensors:  # noqa: SIM110  (half the time of a generator)
        if type(x) is not Tensor or not x.is_cpu:
            return False
    return True


def _is_eager() -> bool:
    return not (torch.compiler.is_compiling() or dispatch_modes() or in_transform())


def _given(tensors: dict[str, Any] | None, spec: TensorDictSpec) -> dict[str, Any]:
    if not isinstance(tensors, dict):
        raise InvalidArgumentError(
            f"the sending rank must pass the tensor dict as a dict, but passed a {type(tensors).__name__}"
        )
    spec.check(tensors)
    return tensors


def _slices(
    entry: TensorEntry, all_gather_group: AllGatherGroup | None, all_gather_tensors: Mapping[str, bool] | None
) -> int:
    if all_gather_group is None or (all_gather_tensors is not None and not all_gather_tensors.get(entry.key, True)):
        return 1
    size = all_gather_group.world_size
    return size if can_be_cut(prod(entry.shape), size) else 1


def _to_fill(
    messenger: Messenger, spec: TensorDictSpec, out: Buffers | None, past: tuple[PastPython, _KnownForm] | None
) -> dict[str, Any]:
    if out is not None:
        return _given_buffers(messenger, spec, out)
    if past is not None:
        return past[1].allocate(messenger)
    result: dict[str, Any] = {}
    allocates = _is_eager() and not is_single_rank(messenger.route)
    for entry in spec.entries:
        if isinstance(entry, ConstantEntry):
            result[entry.key] = entry.value
        elif allocates and entry.device_type == "cpu":
            result[entry.key] = messenger.empty(entry.shape, entry.dtype)
        else:
            result[entry.key] = torch.empty(
                entry.shape, dtype=entry.dtype, device=device_for(entry.device_type, messenger.route.context.device)
            )
    return result


def _given_buffers(messenger: Messenger, spec: TensorDictSpec, out: Buffers) -> dict[str, Any]:
    result: dict[str, Any] = {}
    problem = None
    for entry in spec.entries:
        if isinstance(entry, ConstantEntry):
            result[entry.key] = entry.value
        elif entry.key not in out.tensors:
            problem = problem or f"it lacks {entry.key!r}"
        else:
            buffer = result[entry.key] = out.tensors[entry.key]
            device = device_for(entry.device_type, messenger.route.context.device).type
            problem = problem or misfit(entry.key, buffer, entry.shape, entry.dtype, device)
    more = [key for key in out.tensors if not isinstance(result.get(key), Tensor)]
    if more:
        problem = problem or f"the spec has no tensor for {more}"
    if problem is not None:
        raise refused(messenger.route.context, out, problem, "Nothing was received; pass tensors that fit the spec")
    return result


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _same_constant(x: object, y: object) -> bool:
    """Returns True if types and values are equal: 1 is not True, but nan equals nan."""
    if type(x) is not type(y):
        return False
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(_same_constant(one, other) for one, other in zip(x, y, strict=True))
    return x == y or (x != x and y != y)
