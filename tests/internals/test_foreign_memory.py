from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from device_communicators.cuda import foreign_memory
from device_communicators.cuda.foreign_memory import tensor_over

_CPU = torch.device("cpu")


class _Owner:
    pass


def test_a_tensor_is_a_view_of_the_memory() -> None:
    memory = (ctypes.c_uint8 * 64)(*range(64))
    x = tensor_over(ctypes.addressof(memory), 64, _CPU, memory)
    assert (x.dtype, x.shape, x.data_ptr()) == (torch.uint8, (64,), ctypes.addressof(memory))
    assert x.tolist() == list(range(64))
    x.fill_(7)
    assert bytes(memory) == b"\7" * 64
    assert x.untyped_storage().nbytes() == 64


def test_the_owner_lives_as_long_as_the_last_view() -> None:
    memory, owner = (ctypes.c_uint8 * 64)(), _Owner()
    gone = threading.Event()
    weakref.finalize(owner, gone.set)
    x = tensor_over(ctypes.addressof(memory), 64, _CPU, owner)
    y = torch.empty(0, dtype=torch.float32).set_(x.untyped_storage(), 0, (4,))
    view = y[1:]
    del owner, x, y
    assert not gone.is_set()
    thread = threading.Thread(target=view.__class__.add_, args=(view, 1))
    thread.start()
    thread.join()
    assert view.tolist() == [1.0] * 3 and not gone.is_set()
    del view, thread
    assert gone.is_set()
    assert not foreign_memory._ALIVE


@pytest.mark.slow
def test_tensors_may_outlive_the_interpreter() -> None:
    program = """
import ctypes, torch, builtins
from device_communicators.cuda.foreign_memory import tensor_over
class Owner:
    def __del__(self, memory=(ctypes.c_uint8 * 64)()): pass
memory = (ctypes.c_uint8 * 64)()
builtins.kept = tensor_over(ctypes.addressof(memory), 64, torch.device("cpu"), memory)
torch.kept = x = tensor_over(ctypes.addressof(memory), 64, torch.device("cpu"), Owner())
loop = [x]; loop.append(loop)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
