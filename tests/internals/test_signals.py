"""Signals that interrupt waits of the main thread, and the cases that take the interpreter lock."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from device_communicators.base import wakeup
from device_communicators.cpu import native

COUNTED = """
import ctypes, os, signal, sys, threading, time, torch
library, counts = ctypes.CDLL(sys.argv[1]), {"take": 0, "check": 0}
def count(what):
    counts[what] += 1
    return 0
take = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: count("take"))
check = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: count("check"))
nothing = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda lock: None)
library.ps_set_interpreter(take, check, None, nothing, ctypes.c_ulong(threading.main_thread().ident))
library.ps_signal_pipe.restype = library.ps_map.restype = ctypes.c_void_p
library.ps_segment_bytes.restype = ctypes.c_size_t
library.ps_group_new.restype = ctypes.c_uint64
reader, writer = os.pipe2(os.O_NONBLOCK)
if "unknown" not in sys.argv:
    ctypes.c_int.from_address(library.ps_signal_pipe()).value = reader
    signal.set_wakeup_fd(writer)
signal.signal(signal.SIGUSR1, lambda *_: None)
size = library.ps_segment_bytes(2)
segment = os.memfd_create("segment")
os.ftruncate(segment, size)
memory = ctypes.c_void_p(library.ps_map(segment, ctypes.c_size_t(size), ctypes.c_size_t(0)))
group = ctypes.c_uint64(library.ps_group_new(
    memory, ctypes.c_size_t(size), 0, 2, ctypes.c_int64(1000), 0, ctypes.c_double(1.0)
))
if "signal" in sys.argv:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
if "in vain" in sys.argv:
    threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)).start()
started = time.monotonic()
status = library.ps_barrier(group, ctypes.c_uint64(64), ctypes.c_uint64(0))
assert status != 0 and 0.9 < time.monotonic() - started < 3.0, status
print(counts["take"])
"""


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [([], 0, 0), (["signal"], 1, 2), (["in vain"], 1, 2), (["unknown"], 20, 60)],
    ids=["idle", "a signal", "a signal of another thread", "the program's own descriptor"],
)
def test_a_wait_takes_the_interpreter_lock_for_signals_only(options: list[str], least: int, most: int) -> None:
    command = [sys.executable, "-c", COUNTED, str(native.load().path), *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert least <= int(found.stdout) <= most


@pytest.fixture
def reader() -> int:
    value = wakeup.SignalPipe.from_address(native.load().signal_pipe).reader
    assert value >= 0
    _drain(value)
    return value


def _drain(descriptor: int) -> bytes:
    return os.read(descriptor, 4096) if select.select([descriptor], [], [], 0)[0] else b""


def _is_told() -> bool:
    return wakeup.SignalPipe.from_address(native.load().signal_pipe).reader >= 0


def test_a_programs_own_descriptor_goes_first(reader: int) -> None:
    own_reader, own_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert signal.set_wakeup_fd(own_writer, warn_on_full_buffer=False) == -1
        assert not _is_told()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert _drain(own_reader) == bytes([signal.SIGUSR1]) and _drain(reader) == b""
        native.load()
        assert signal.set_wakeup_fd(-1) == own_writer
        assert _is_told()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert _drain(own_reader) == b"" and _drain(reader) == bytes([signal.SIGUSR1])
        with pytest.raises((ValueError, OSError)):
            signal.set_wakeup_fd(own_reader + 1000)
        assert _is_told()
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.close(own_reader)
        os.close(own_writer)


def test_handlers_of_asyncio_run(reader: int) -> None:
    async def handled() -> bool:
        came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, came.set)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        await asyncio.wait_for(came.wait(), 10)
        return asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    assert asyncio.run(handled())
    assert _is_told()


def test_a_forked_child_has_a_descriptor_of_its_own(reader: int) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0 if _drain(reader) == bytes([signal.SIGUSR1]) else 1)
        _, status = os.waitpid(child, 0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert status == 0
    assert _drain(reader) == b""


def test_a_library_that_another_thread_loaded_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    told = wakeup.SignalPipe(-1)
    thread = threading.Thread(target=wakeup.tell, args=(told,))
    thread.start()
    thread.join()
    wakeup.begin()
    assert told.reader >= 0 and told.inode == os.fstat(told.reader).st_ino
    wakeup._wakeup().pipes.remove(told)


CLOSED = """
import os, signal
from device_communicators.cpu import native
native.load()
os.closerange(3, 256)
kept = os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_RDONLY)
child = os.fork()
if child == 0:
    assert all(os.readlink(f"/proc/self/fd/{each}") == "/dev/null" for each in kept)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.raise_signal(signal.SIGUSR1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_of_a_program_that_closed_all_descriptors_takes_none_of_its_new_ones() -> None:
    found = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")


TAKEN_BEFORE = """
class Pipe(ctypes.Structure):
    _fields_ = [("reader", ctypes.c_int), ("inode", ctypes.c_uint64)]
pipe = Pipe.from_address(library.ps_signal_pipe())
pipe.inode, pipe.reader = os.fstat(reader).st_ino, reader
os.write(writer, b"the program's")
other, other_writer = os.pipe2(os.O_NONBLOCK)
os.write(other_writer, b"the program's")
os.dup2(other, reader)  # as after closing all descriptors and opening others
if False:"""
TAKEN_AFTER = """
assert os.read(reader, 100) == b"the program's"
assert counts["check"] > 10, "signals aren't looked for any more"
"""


def test_a_wait_reads_nothing_from_a_descriptor_that_the_program_uses_again() -> None:
    code = COUNTED.replace('if "unknown" not in sys.argv:', TAKEN_BEFORE) + TAKEN_AFTER
    found = subprocess.run(
        [sys.executable, "-c", code, str(native.load().path)], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr


REOPENED = """
import os, signal
from device_communicators.base import wakeup
from device_communicators.cpu import native
pipe = wakeup.SignalPipe.from_address(native.load().signal_pipe)
os.closerange(3, 256)
native.load()
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.raise_signal(signal.SIGUSR1)
assert os.fstat(pipe.reader).st_ino == pipe.inode
assert os.read(pipe.reader, 100) == bytes([signal.SIGUSR1])
"""


def test_a_pipe_that_the_program_closed_is_made_anew() -> None:
    found = subprocess.run([sys.executable, "-c", REOPENED], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")
