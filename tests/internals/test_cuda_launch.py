"""Kernels are loaded and launched through a fake libcuda that records its arguments."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from device_communicators.peer import kernels as peer_kernels
from device_communicators.peer.kernels import (
    KERNELS,
    MAX_THREADS,
    OPERATIONS,
    Call,
    KernelError,
    LaunchConfig,
    Launcher,
    PeerKernels,
    _Driver,
)
from tests.internals.machines import stand_in


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in("stand_in_launch.cpp", tmp_path_factory.mktemp("cuda"), "libcuda.so.1")


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    stub = ctypes.CDLL(str(library))
    stub.stand_in_last.restype = ctypes.POINTER(ctypes.c_int64)
    stub.stand_in_name.restype = ctypes.c_char_p
    stub.stand_in_is(13000, 90)
    monkeypatch.setattr(peer_kernels, "cubin", lambda arch: b"\x7fELF" + arch.encode())
    monkeypatch.setattr(peer_kernels, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(peer_kernels, "_load_driver", lambda: _Driver(str(library)))
    PeerKernels.load.cache_clear()
    yield stub
    PeerKernels.load.cache_clear()


def test_a_launch_says_what_it_was_told(driver: Any) -> None:
    kernels: Launcher = PeerKernels.load(0)
    before = driver.stand_in_last()[0]
    for name in (KERNELS[0], KERNELS[-1]):
        call = Call(size=4)
        call.regions[0] = 4711
        kernels.launch(name, 3, 256, call, 77)
        launches, kernel, blocks, threads, stream, first, early, _, pushed = driver.stand_in_last()[:9]
        assert driver.stand_in_name(kernel) == name.encode()
        assert (blocks, threads, stream, first, early, pushed) == (3, 256, 77, 4711, 0, 0)
        assert call.operation == OPERATIONS[name]
    assert launches == before + 2


def test_all_is_loaded_at_set_up_and_what_fits_is_known(driver: Any) -> None:
    before = driver.stand_in_last()[7]
    kernels = PeerKernels.load(0)
    assert driver.stand_in_last()[7] == before + len(KERNELS)
    assert kernels.arch == "sm_90"
    assert kernels.resident_blocks(KERNELS[0], MAX_THREADS) == 132 // 2, "other kernels that wait have no room"
    assert kernels.resident_blocks(KERNELS[0], 256) == 132 // 2
    assert PeerKernels.load(0) is kernels


def test_threads_do_not_share_what_a_launch_fills_in(driver: Any) -> None:
    kernels = PeerKernels.load(0)
    mine = kernels._prepared.config
    others: list[Any] = []
    thread = threading.Thread(target=lambda: others.append(kernels._prepared.config))
    thread.start()
    thread.join()
    assert others[0] is not mine


def test_a_thread_without_a_context_gets_one_and_one_that_has_keeps_it(driver: Any) -> None:
    """Threads of autograd report device 0 as current although it isn't ready."""
    kernels, found = PeerKernels.load(0), []

    def launch(own: ctypes.c_void_p | None) -> None:
        if own is not None:
            driver.stand_in_enters(own)
        kernels.launch(KERNELS[0], 1, 32, Call(), 0)
        kernels.launch(KERNELS[0], 1, 32, Call(), 0)
        found.append(driver.stand_in_context())

    driver.stand_in_context.restype = ctypes.c_void_p
    for own in (None, ctypes.c_void_p(4711)):
        before = driver.stand_in_last()[0]
        thread = threading.Thread(target=launch, args=(own,))
        thread.start()
        thread.join()
        assert driver.stand_in_last()[0] == before + 2
    assert found == [kernels._context.value, 4711]


def test_what_fails_says_why(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="CUDA_ERROR_INVALID_VALUE"):
        PeerKernels.load(0).launch(KERNELS[0], 0, 256, Call(), 0)
    with pytest.raises(KernelError, match="cuDeviceGet failed: error 101"):
        PeerKernels.load(1)
    PeerKernels.load.cache_clear()
    driver.stand_in_is(12080, 90)
    text = r"for CUDA 12\.8, so it can't load kernels that NVRTC 13\.0 compiles; .*'cuda-bindings<13' nvidia-cuda-nvrtc"
    with pytest.raises(KernelError, match=text):
        PeerKernels.load(0)
    driver.stand_in_is(13000, 90)
    monkeypatch.setattr(peer_kernels, "cubin", lambda arch: b"nothing")
    with pytest.raises(KernelError, match="cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE"):
        PeerKernels.load(0)
    assert driver.stand_in_last()[8] == 0, "the context was taken back"


def test_without_a_driver_there_is_a_reason() -> None:
    with pytest.raises(KernelError, match=r"the CUDA driver is missing or too old: .*nowhere"):
        peer_kernels._load_driver("/nowhere/libcuda.so.1")


def test_structures_and_numbers_are_those_of_cuda() -> None:
    offsets = [
        getattr(LaunchConfig, name).offset for name in ("shared_bytes", "stream", "attributes", "attribute_count")
    ]
    assert offsets == [24, 32, 40, 48]
    assert (ctypes.sizeof(LaunchConfig), peer_kernels._REGISTERS) == (56, 4)
    attributes = peer_kernels._MULTIPROCESSORS, peer_kernels._CAPABILITY_MAJOR, peer_kernels._CAPABILITY_MINOR
    assert attributes == (16, 75, 76)


def test_structures_and_numbers_are_those_of_cuda_h(tmp_path: Path) -> None:
    compiler, include = shutil.which("g++"), Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include"
    if compiler is None or not (include / "cuda.h").exists():
        pytest.skip("needs g++ and cuda.h of a CUDA toolkit")
    config = {"shared_bytes": "sharedMemBytes", "stream": "hStream"}
    config |= {"attributes": "attrs", "attribute_count": "numAttrs"}
    facts = [
        (f"offsetof(CUlaunchConfig, {theirs})", getattr(LaunchConfig, ours).offset) for ours, theirs in config.items()
    ]
    facts += [
        ("sizeof(CUlaunchConfig)", ctypes.sizeof(LaunchConfig)),
        ("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", peer_kernels._MULTIPROCESSORS),
        ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", peer_kernels._CAPABILITY_MAJOR),
        ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", peer_kernels._CAPABILITY_MINOR),
        ("CU_FUNC_ATTRIBUTE_NUM_REGS", peer_kernels._REGISTERS),
    ]
    lines = ["#include <cstddef>", "#include <cuda.h>"]
    lines += [f'static_assert({theirs} == {ours}, "");' for theirs, ours in facts]
    source = tmp_path / "facts.cpp"
    source.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [compiler, "-fsyntax-only", f"-I{include}", str(source)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
