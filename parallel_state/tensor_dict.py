"""Tensor dicts whose form both sides know: no metadata on the wire, ops only, so that they compile and capture.

    first = group.recv_tensor_dict()          # eager, with metadata
    spec = TensorDictSpec.of(first)           # the sender makes its own from what it sent
    then = group.recv_tensor_dict(spec=spec)  # also under torch.compile(fullgraph=True)

What travels with metadata is in `messages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from device_communicators.errors import InvalidArgumentError
from parallel_state.wire import AllGatherGroup, can_be_cut

if TYPE_CHECKING:
    from parallel_state.collectives import TensorCollectives


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the dict."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class ConstantEntry:
    """One other value of the dict: the same in every exchange."""

    key: str
    value: Any


@dataclass(frozen=True)
class TensorDictSpec:
    """Keys, shapes, dtypes and constants of a flat tensor dict, equal on both sides of an exchange."""

    entries: tuple[TensorEntry | ConstantEntry, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> TensorDictSpec:
        """The spec of a dict with str keys, of tensors and constants (None, bool, int, float, str, bytes, tuples)."""
        entries: list[TensorEntry | ConstantEntry] = []
        for key, value in tensors.items():
            if isinstance(key, str) and isinstance(value, Tensor):
                entries.append(TensorEntry(key, tuple(value.shape), value.dtype, value.device.type))
            elif isinstance(key, str) and _is_constant(value):
                entries.append(ConstantEntry(key, value))
            else:
                raise InvalidArgumentError(
                    f"a TensorDictSpec holds tensors and constants under str keys, but {key!r} is a "
                    f"{type(value).__name__}; send it apart, or without a spec"
                )
        return cls(tuple(entries))

    def check(self, tensors: Mapping[str, Any]) -> None:
        """InvalidArgumentError where `tensors` is not of this form."""
        if len(tensors) != len(self.entries):
            raise InvalidArgumentError(
                f"a tensor dict must have the {len(self.entries)} keys of its spec, but has {len(tensors)}"
            )
        for entry in self.entries:
            if entry.key not in tensors:
                raise InvalidArgumentError(f"a tensor dict must have its spec's key {entry.key!r}")
            value = tensors[entry.key]
            if isinstance(entry, ConstantEntry):
                if not _same_constant(value, entry.value):
                    raise InvalidArgumentError(
                        f"{entry.key!r} must be {entry.value!r}, as in the spec, but is another; make a new spec"
                    )
            elif (
                not isinstance(value, Tensor)
                or tuple(value.shape) != entry.shape
                or value.dtype != entry.dtype
                or value.device.type != entry.device_type
            ):
                raise InvalidArgumentError(
                    f"{entry.key!r} must be a {entry.dtype} tensor of shape {list(entry.shape)} on "
                    f"{entry.device_type}, as in the spec, but is another; make a new spec"
                )


def broadcast(
    group: TensorCollectives, tensors: dict[str, Any] | None, src: int, spec: TensorDictSpec
) -> dict[str, Any]:
    if not torch.compiler.is_compiling():
        with group.route.called_as("broadcast_tensor_dict with a spec"):
            return _broadcast(group, tensors, src, spec)
    return _broadcast(group, tensors, src, spec)


def _broadcast(
    group: TensorCollectives, tensors: dict[str, Any] | None, src: int, spec: TensorDictSpec
) -> dict[str, Any]:
    if group.rank_in_group == src:
        given = _given(tensors, spec)
        for entry in spec.entries:
            if isinstance(entry, TensorEntry) and prod(entry.shape) > 0:
                group.broadcast(given[entry.key].detach(), src)
        return given
    result: dict[str, Any] = {}
    for entry in spec.entries:
        if isinstance(entry, ConstantEntry):
            result[entry.key] = entry.value
            continue
        x = torch.empty(entry.shape, dtype=entry.dtype, device=_device(group, entry))
        result[entry.key] = group.broadcast(x, src) if prod(entry.shape) > 0 else x
    return result


def send(
    group: TensorCollectives,
    tensors: dict[str, Any],
    dst: int,
    all_gather_group: AllGatherGroup | None,
    all_gather_tensors: Mapping[str, bool] | None,
    spec: TensorDictSpec,
) -> None:
    given = _given(tensors, spec)
    for entry in spec.entries:
        if isinstance(entry, ConstantEntry) or prod(entry.shape) == 0:
            continue
        x = given[entry.key].detach()
        slices = _slices(entry, all_gather_group, all_gather_tensors)
        if all_gather_group is not None and slices > 1:
            x = x.reshape(slices, -1)[all_gather_group.rank_in_group]
        group.send(x, dst)


def recv(
    group: TensorCollectives,
    src: int,
    all_gather_group: AllGatherGroup | None,
    all_gather_tensors: Mapping[str, bool] | None,
    spec: TensorDictSpec,
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for entry in spec.entries:
        if isinstance(entry, ConstantEntry):
            result[entry.key] = entry.value
            continue
        device = _device(group, entry)
        numel = prod(entry.shape)
        slices = _slices(entry, all_gather_group, all_gather_tensors)
        if numel == 0:
            x = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        elif all_gather_group is not None and slices > 1:
            part = group.recv([numel // slices], entry.dtype, src, device=device)
            x = all_gather_group.all_gather(part, 0).view(entry.shape)
        else:
            x = group.recv(entry.shape, entry.dtype, src, device=device)
        result[entry.key] = x
    return result


def _given(tensors: dict[str, Any] | None, spec: TensorDictSpec) -> dict[str, Any]:
    if not isinstance(tensors, dict):
        raise InvalidArgumentError(
            f"the sending rank must pass the tensor dict, a dict, but passed a {type(tensors).__name__}"
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


def _device(group: TensorCollectives, entry: TensorEntry) -> torch.device:
    return group.device if group.device.type == entry.device_type else torch.device(entry.device_type)


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _same_constant(x: object, y: object) -> bool:
    """Equal also in type (1 is not True), and nan to nan."""
    if type(x) is not type(y):
        return False
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(_same_constant(one, other) for one, other in zip(x, y, strict=True))
    return x == y or (x != x and y != y)
