"""Heads of flat dicts that were sent, or read, before.

A model sends dicts of the same keys, shapes and dtypes in each step, so the same bytes as heads. A sender finds the
head of a flat dict by its form, a reader finds by a head's bytes what they mean: neither walks through the codec,
which takes longer than the transfer of a decode step. What is kept went through all checks when it was seen first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from device_communicators.calls.memory import is_dense
from parallel_state.messages.all_gather_group import AllGatherGroup
from parallel_state.messages.codec.types import TensorMetadata

_MOST_CACHED = 256  # heads, and templates
MOST_CACHED_BYTES = 4096
_CONSTANTS = frozenset({str, int, float, bool, type(None)})
"""Types of values that are part of a form. Equal ones of one type are the same, but for floats."""
_DOUBLE = struct.Struct("<d")


class KnownHead(NamedTuple):
    """The head of dicts of one form."""

    head: bytes
    cpu_bytes: int
    """Of the tensors as they are sent, which are on the CPU."""
    cut: Sequence[bool]
    """The tensors of which this rank's slice is sent; empty where there are none."""


_heads: dict[Any, KnownHead] = {}


def head_of_form(form: Any) -> KnownHead | None:
    """Returns the head of dicts of this form, if one was sent before."""
    return _heads.get(form)


def remember_head(form: Any, known: KnownHead) -> None:
    if len(known.head) > MOST_CACHED_BYTES:
        return
    if len(_heads) >= _MOST_CACHED:
        _heads.clear()
    _heads[form] = known


def form_of(values: dict[Any, Any]) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
    """Returns what the head of a flat dict with tensors depends on, and these; None for a dict that isn't so plain."""
    form: list[Any] = []
    tensors: list[Tensor] = []
    for key, value in values.items():
        cls = type(value)
        if cls is Tensor:
            if not value.is_cpu or value.layout is not torch.strided or value.is_nested or not is_dense(value):
                return None, []
            tensors.append(value)
            form += (key, value.dtype, value.shape)
        elif cls is float:
            form += (key, cls, _DOUBLE.pack(value))  # 0.0 is not -0.0, and nan not unlike itself
        elif cls in _CONSTANTS:
            form += (key, cls, value)
        else:
            return None, []
        if type(key) is not str:
            return None, []
    if not tensors or len(set(map(id, tensors))) != len(tensors):
        return None, []
    return tuple(form), tensors


def form_of_slices(
    form: tuple[Any, ...], group: AllGatherGroup, all_gather_tensors: Mapping[str, bool] | None
) -> tuple[Any, ...] | None:
    """Returns what the head of a dict depends on that is sent in slices; None where the group can't cut."""
    size = getattr(group, "world_size", None)
    if type(size) is not int or not hasattr(group, "rank_in_group"):
        return None
    excepted = () if all_gather_tensors is None else tuple(k for k, gather in all_gather_tensors.items() if not gather)
    return size, excepted, *form


class Template(NamedTuple):
    """A flat dict, as a head describes it."""

    head: bytes
    tensors: tuple[TensorMetadata, ...]
    values: dict[str, Any]
    """In the order of the keys, with None in place of the tensors."""
    places: tuple[tuple[str, int], ...]
    """The keys of the tensors, and which of them."""
    slices: int = 1
    cut: tuple[bool, ...] = ()
    """The tensors of which a slice comes; empty where there are none."""

    def allocate(self, empty: Callable[[Sequence[int], torch.dtype], Tensor]) -> list[Tensor]:
        """Returns tensors to be filled, by `empty`, whose errors are raised."""
        if self.cut:
            shapes = [
                (prod(each.shape) // self.slices,) if is_cut else each.shape
                for each, is_cut in zip(self.tensors, self.cut, strict=True)
            ]
            return [empty(shape, each.dtype) for shape, each in zip(shapes, self.tensors, strict=True)]
        return [empty(each.shape, each.dtype) for each in self.tensors]

    def can_be_gathered(self, group: AllGatherGroup | None) -> bool:
        """Returns True where the receiver's all-gather group has as many ranks as the tensors have slices."""
        return not self.cut or (group is not None and group.world_size == self.slices)

    def gather(self, tensors: list[Tensor], group: AllGatherGroup | None) -> list[Tensor]:
        """Returns the whole tensors, of the slices that came."""
        if not self.cut or group is None:
            return tensors
        return [
            group.all_gather(x, dim=0).view(each.shape) if is_cut else x
            for x, each, is_cut in zip(tensors, self.tensors, self.cut, strict=True)
        ]

    def within(self, out: Mapping[str, Tensor]) -> list[Tensor] | None:
        """Returns the buffers as the tensors, and new ones where those are not contiguous; None where they misfit."""
        if self.cut or not len(out) == len(self.places) == len(self.tensors):
            return None
        found: dict[int, Tensor] = {}
        for key, index in self.places:
            buffer, wanted = out.get(key), self.tensors[index]
            if type(buffer) is not Tensor or not buffer.is_cpu:
                return None
            if buffer.dtype != wanted.dtype or buffer.shape != wanted.shape:
                return None
            found[index] = (
                buffer if is_dense(buffer) else torch.empty_like(buffer, memory_format=torch.contiguous_format)
            )
        return [found[index] for index in range(len(found))]

    def fill(self, tensors: list[Tensor]) -> dict[str, Any]:
        made = self.values.copy()
        for key, index in self.places:
            made[key] = tensors[index]
        return made


_templates: dict[bytes, Template] = {}


def template_of(head: bytes) -> Template | None:
    return _templates.get(head)


def remember_template(
    head: bytes,
    metadata: list[TensorMetadata],
    tensors: list[Tensor],
    value: object,
    slices: int = 1,
    cut: Sequence[bool] = (),
) -> None:
    """Keeps what a head meant, if that is a flat dict of CPU tensors and constants; which tensors came in slices."""
    if type(value) is not dict or len(head) > MOST_CACHED_BYTES or any(x.device_type != "cpu" for x in metadata):
        return
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    values: dict[str, Any] = {}
    places = []
    for key, item in value.items():
        if type(key) is not str or not (type(item) in _CONSTANTS or id(item) in indices):
            return
        if id(item) in indices:
            places.append((key, indices[id(item)]))
            item = None
        values[key] = item
    if len(_templates) >= _MOST_CACHED:
        _templates.clear()
    marks = tuple(cut) if any(cut) else ()
    _templates[head] = Template(head, tuple(metadata), values, tuple(places), slices, marks)
