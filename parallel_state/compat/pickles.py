"""Pickles objects; the data of tensors is in the pickle or in separate buffers. Unpickling can run code."""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from device_communicators.calls.memory import as_bytes, dense, dtype_refusal

loads = pickle.loads


def dumps(obj: Any, buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None) -> memoryview:
    """Pickles `obj`. Of a CPU tensor, pickles only its own elements, not the whole storage.

    `buffer_callback` works as in `pickle.dumps`.
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffer_callback)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduce}
    pickler.dump(obj)
    return stream.getbuffer()


def _reduce(tensor: Tensor) -> Any:
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and dtype_refusal(tensor.dtype) is None
    if not is_plain or tensor.requires_grad:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    view = as_bytes(dense(tensor))
    data: Any = b""
    if view.numel():
        data = (ctypes.c_char * view.numel()).from_address(view.data_ptr())
        data.tensor = view  # keeps the memory alive
    return _rebuild, (pickle.PickleBuffer(data), tuple(tensor.shape), tensor.dtype)


def _rebuild(data: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
    return flat.view(dtype).view(shape)  # frombuffer doesn't support every dtype
