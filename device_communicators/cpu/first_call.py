"""Checks at load time that the compiled ops and the running torch agree on the layout of tensors."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from device_communicators.cpu.native_build import BuildError

_SHAPE = (2, 3)
_BYTES = 24
_WRAP = ("_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE")
"""Mangled names of THPVariable_Wrap in different versions of torch."""


def check(library: Any) -> None:
    """Makes a small tensor in the compiled `library`, and reads it in Python and in C++. Raises BuildError if a result
    is wrong.
    """
    import torch

    from device_communicators.calls.user_call import DTYPE_NUMBERS

    wrap = find_wrap()
    if wrap is None:  # then no call makes or describes tensors in C++
        return
    make = ctypes.PYFUNCTYPE(ctypes.c_void_p, *(ctypes.c_void_p,) * 3)(("ps_make_tensor", library))
    no_group = (ctypes.c_uint64 * 2)()  # an empty std::shared_ptr
    sizes = (ctypes.c_int64 * 2)(*_SHAPE)
    dtype = DTYPE_NUMBERS[torch.float32]
    form = (ctypes.c_int64 * 5)(0, _BYTES, dtype, 2, ctypes.addressof(sizes))  # TensorForm of csrc/pack.h
    address = make(ctypes.addressof(no_group), ctypes.addressof(form), wrap)
    made: Any = None
    if address is not None:  # as a result, ctypes.py_object crashes on null
        made = ctypes.cast(address, ctypes.py_object).value
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(made))
    is_right = isinstance(made, torch.Tensor) and made.shape == _SHAPE and made.dtype == torch.float32
    if is_right:
        ctypes.memset(form, 0, ctypes.sizeof(form))
        is_plain = library.ps_describe_tensor(made._cdata, ctypes.addressof(form))
        is_right = is_plain == 1 and form[:4] == [made.data_ptr(), _BYTES, dtype, 2]
    if not is_right:
        raise BuildError("its first call gave a wrong result: it was compiled for another torch")


def find_wrap() -> int | None:
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"), os.RTLD_NOLOAD)
    except OSError:
        return None
    found = next((getattr(library, name) for name in _WRAP if hasattr(library, name)), None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value
