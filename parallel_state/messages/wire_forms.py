"""Heads of flat tensor dicts that were sent, or read, before.

A model sends dicts of the same keys, shapes and dtypes in each step, so the same bytes as heads. The sender finds them
by the dict's form, a reader finds what they mean by the bytes: neither walks through the codec, which takes longer
than the transfer of a decode step. What is remembered went through all checks when it was seen first.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_state.messages.codec.types import TensorMetadata

_MOST = 256
MOST_HEAD_BYTES = 4096
_CONSTANTS = frozenset({str, int, float, bool, type(None)})
"""Types of values that are part of a form. Equal ones of one type are the same, but for floats."""
_DOUBLE = struct.Struct("<d")

_heads: dict[Any, bytes] = {}


def form_of(values: dict[Any, Any]) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
    """What the head of a flat dict with tensors depends on, and the tensors; None for a dict that isn't so plain."""
    form: list[Any] = []
    tensors: list[Tensor] = []
    for key, value in values.items():
        cls = type(value)
        if cls is Tensor:
            if not value.is_cpu or value.layout is not torch.strided or value.is_nested or not value.is_contiguous():
                return None, []
            if value.is_conj() or value.is_neg():
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


def head_of_form(form: tuple[Any, ...]) -> bytes | None:
    return _heads.get(form)


def remember_head(form: tuple[Any, ...], head: bytes) -> None:
    if len(head) <= MOST_HEAD_BYTES:
        if len(_heads) >= _MOST:
            _heads.clear()
        _heads[form] = head


class Template(NamedTuple):
    """What a head means: a flat dict."""

    tensors: tuple[TensorMetadata, ...]
    values: dict[str, Any]
    """In the order of the keys, with None in place of the tensors."""
    places: tuple[tuple[str, int], ...]
    """Under which keys the tensors are."""
    size_bytes: int

    def fill(self, tensors: list[Tensor]) -> dict[str, Any]:
        made = self.values.copy()
        for key, index in self.places:
            made[key] = tensors[index]
        return made


_templates: dict[bytes, Template] = {}


def template_of(head: bytes) -> Template | None:
    return _templates.get(head)


def remember_template(head: bytes, metadata: list[TensorMetadata], tensors: list[Tensor], value: object) -> None:
    """Of a message without slices that was read and built, if it is a flat dict of CPU tensors and constants."""
    if type(value) is not dict or len(head) > MOST_HEAD_BYTES or any(x.device_type != "cpu" for x in metadata):
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
    if len(_templates) >= _MOST:
        _templates.clear()
    _templates[head] = Template(tuple(metadata), values, tuple(places), sum(x.nbytes for x in metadata))
