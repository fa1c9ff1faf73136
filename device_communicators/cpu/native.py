"""Builds the C++ library once per machine and torch version, and declares its functions.

The *full* build contains torch ops, and works with one version of torch. The *plain* build needs neither torch nor
Python.

The ops use torch's unstable ABI: with the stable ABI, calls take 0.4 to 0.7 us longer and can't read requires_grad.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_ulong,
    c_void_p,
)  # fmt: skip
from pathlib import Path
from typing import IO, Any

from device_communicators.base import build_cache, logs, settings, wakeup
from device_communicators.base.build_cache import CacheError
from device_communicators.base.errors import SettingError
from device_communicators.calls.interruption import ON_FAILED_OP
from device_communicators.cpu import first_call, native_build
from device_communicators.cpu.native_build import BuildError, BuildStoppedError, Recipe

logger = logging.getLogger("parallel_state")

_VERSION = 25
_PACKAGED = Path(__file__).parent
_CALL = (c_uint64, c_uint64, c_uint64)
_QUEUE = (c_void_p, c_void_p, c_uint64, c_uint64, c_int, POINTER(c_int))
_QUEUE_WAITING = (c_void_p, c_int64, c_int, POINTER(c_int64))
_SLICE_S = 0.2
_HEEDED_S = 60.0
"""For this time after a failed compile, other processes report that failure instead of compiling again."""
_FAILURE_BYTES = 4096
_STALE_S = 3600.0
_UNUSED_S = 60 * 86400.0
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ps_version": (c_int, ()),
    "ps_instruction_set": (c_char_p, ()),
    "ps_use_instruction_set": (c_int, (c_char_p,)),
    "ps_set_interpreter": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_ulong)),
    "ps_signal_pipe": (c_void_p, ()),
    "ps_take_exception": (None, (POINTER(c_void_p),)),
    "ps_segment_bytes": (c_size_t, (c_int,)),
    "ps_slots_offset": (c_size_t, (c_int, c_int)),
    "ps_map": (c_void_p, (c_int, c_size_t, c_size_t)),
    "ps_unmap": (None, (c_void_p, c_size_t)),
    "ps_group_new": (c_uint64, (c_void_p, c_size_t, c_int, c_int, c_int64, c_int, c_double)),
    "ps_has_populate": (c_int, ()),
    "ps_back": (c_int, (c_void_p, c_size_t, c_int, c_size_t)),
    "ps_unback": (c_int, (c_void_p, c_size_t)),
    "ps_backed_bytes": (c_uint64, (c_void_p, c_size_t)),
    "ps_group_arena": (c_uint64, (c_uint64, c_int)),
    "ps_want_huge_pages": (c_int, ()),
    "ps_windows_new": (c_void_p, (c_void_p, c_size_t, c_size_t)),
    "ps_windows_at": (c_void_p, (c_void_p, c_size_t, c_size_t)),
    "ps_windows_delete": (None, (c_void_p,)),
    "ps_group_arenas": (None, (c_uint64, POINTER(c_void_p), c_size_t, c_int, c_size_t)),
    "ps_group_areas": (None, (c_uint64, c_int, c_int64)),
    "ps_group_crossed_bytes": (c_uint64, (c_uint64,)),
    "ps_group_allocate": (c_void_p, (c_uint64, c_size_t)),
    "ps_group_leave": (None, (c_uint64,)),
    "ps_group_fail": (None, (c_uint64, c_int, c_int)),
    "ps_group_listen": (c_int, (c_uint64, c_int64, POINTER(c_int), c_int, POINTER(c_int), c_int)),
    "ps_group_doom": (None, (c_uint64,)),
    "ps_group_span": (
        c_int,
        (c_uint64, c_int, c_int, POINTER(c_int), POINTER(c_int), POINTER(c_int), c_int, c_int, c_int),
    ),
    "ps_group_failure_text": (None, (c_uint64, c_char_p, c_int)),
    "ps_group_timeout": (None, (c_uint64, c_double)),
    "ps_group_has_left": (c_int, (c_uint64, c_int)),
    "ps_group_close": (None, (c_uint64,)),
    "ps_group_failure": (None, (c_uint64, POINTER(c_int64))),
    "ps_served_traffic": (None, (c_char_p, POINTER(c_uint64))),
    "ps_served_next": (c_uint64, (c_char_p,)),
    "ps_served_records": (c_int, ()),
    "ps_served_has_transfers": (c_int, (c_char_p,)),
    "ps_served_recorded": (None, (c_char_p, POINTER(c_int64))),
    "ps_serve": (None, (c_char_p, c_uint64)),
    "ps_served_go_on": (None, (c_char_p, c_uint64)),
    "ps_measure_calls": (None, (c_int,)),
    "ps_group_meter": (None, (c_uint64, POINTER(c_uint64))),
    "ps_stop_serving": (None, (c_char_p,)),
    "ps_call_as": (None, (c_int,)),
    "ps_repeated_since_s": (c_double, ()),
    "ps_group_is_busy": (c_int, (c_uint64,)),
    "ps_compare": (c_int, _CALL),
    "ps_barrier": (c_int, _CALL),
    "ps_all_reduce": (c_int, (*_CALL, c_void_p, c_void_p, c_size_t, c_int, c_int)),
    "ps_reduce_scatter": (c_int, (*_CALL, c_void_p, c_void_p, c_size_t, c_size_t, c_int, c_int)),
    "ps_all_gather": (c_int, (*_CALL, c_void_p, c_void_p, c_size_t, c_size_t)),
    "ps_gatherv": (c_int, (*_CALL, POINTER(c_void_p), POINTER(c_size_t), c_void_p, c_int)),
    "ps_broadcast": (c_int, (*_CALL, c_void_p, c_size_t, c_int)),
    "ps_scatter": (c_int, (*_CALL, c_void_p, c_void_p, c_size_t, c_int)),
    "ps_all_to_all": (c_int, (*_CALL, c_void_p, c_void_p, POINTER(c_size_t), POINTER(c_size_t))),
    "ps_all_reduce_add_rms_norm": (c_int, (*_CALL, *(c_void_p,) * 5, c_size_t, c_size_t, c_float, c_int)),
    "ps_window_new": (c_void_p, (c_uint64, POINTER(c_int64), c_void_p)),
    "ps_window_open": (c_int, (c_void_p, c_void_p)),
    "ps_window_memory": (c_int, (c_void_p, c_int, POINTER(c_void_p))),
    "ps_window_refusal": (None, (POINTER(c_int64), c_char_p, c_size_t)),
    "ps_window_end": (c_int, (c_void_p,)),
    "ps_window_delete": (None, (c_void_p,)),
    "ps_reduce": (c_int, (c_char_p, POINTER(c_void_p), c_int, POINTER(c_void_p), c_int, c_size_t, c_int, c_int)),
    "ps_queue_control_bytes": (c_size_t, (c_int,)),
    "ps_liveness_new": (c_void_p, (POINTER(c_int64), c_int)),
    "ps_liveness_of": (c_void_p, (c_uint64,)),
    "ps_liveness_delete": (None, (c_void_p,)),
    "ps_queue_writer_new": (c_void_p, (*_QUEUE, *_QUEUE_WAITING)),
    "ps_queue_reader_new": (c_void_p, (*_QUEUE, c_int, *_QUEUE_WAITING)),
    "ps_queue_writer_leave": (None, (c_void_p,)),
    "ps_queue_reader_leave": (None, (c_void_p,)),
    "ps_queue_writer_delete": (c_int, (c_void_p,)),
    "ps_queue_reader_delete": (c_int, (c_void_p,)),
    "ps_queue_writer_serve": (None, (c_void_p, c_uint64, c_int, c_void_p)),
    "ps_queue_reader_serve": (None, (c_void_p, c_uint64, c_int, c_int, c_void_p)),
    "ps_queue_reserve": (None, (POINTER(c_int64), c_int)),
    "ps_rings_new": (c_void_p, (c_void_p, c_int, c_int, POINTER(c_int64))),
    "ps_streams_new": (
        c_void_p,
        (c_void_p, c_int, c_int, POINTER(c_int), POINTER(c_int), POINTER(c_uint64), c_int, c_uint64, c_int64, c_uint64),
    ),
    "ps_streams_facts": (None, (c_void_p, c_int, POINTER(c_uint64))),
    "ps_group_losses": (c_void_p, (c_uint64,)),
    "ps_transfers_delete": (None, (c_void_p,)),
    "ps_transfers_serve": (None, (c_void_p, c_uint64, c_int)),
    "ps_transfers_failure": (c_int, (c_void_p, POINTER(c_int64))),
    "ps_transfers_failure_text": (None, (c_void_p, c_char_p, c_size_t)),
    "ps_transfers_abandon": (None, (c_void_p,)),
    "ps_transfers_is_inside": (c_int, (c_void_p, c_int, c_int)),
    "ps_transfers_waiting_sends": (c_int, (c_void_p, c_int)),
    "ps_transfers_reserve": (None, (c_void_p, c_int, c_int)),
    "ps_set_add_pending": (None, (c_void_p,)),
    "ps_transfers_close": (c_int, (c_void_p,)),
    "ps_queue_send": (c_int, (c_void_p, c_char_p, c_uint64, c_void_p, c_int, c_int, c_uint64, c_double)),
    "ps_set_calling": (None, (POINTER(c_void_p),)),
    "ps_queue_resume": (c_int, (c_void_p, c_double)),
    "ps_queue_take": (c_int, (c_void_p, c_void_p, c_uint64, c_double)),
    "ps_queue_read": (c_int, (c_void_p, c_void_p, c_int, c_double)),
    "ps_pack": (c_int, (c_void_p, c_void_p, c_int, c_uint64, c_uint64, c_uint64, c_void_p)),
    "ps_packed": (c_int, (c_void_p, c_int, c_void_p, c_void_p)),
    "ps_plain_keys": (c_int, (c_char_p, c_uint64, c_uint64, c_uint64, c_int)),
    "ps_control_open": (
        c_int64,
        (
            c_char_p, c_int, c_int, c_double, c_double, c_uint32,
            POINTER(c_uint64), POINTER(c_int), POINTER(c_int), c_char_p,
        ),
    ),
    "ps_control_meet": (c_int, (c_int64, c_char_p, c_uint64, c_int)),
    "ps_control_call": (
        c_int,
        (c_int64, c_char_p, c_uint32, POINTER(c_uint64), c_int, c_char_p, c_uint64, c_double, POINTER(c_uint64)),
    ),
    "ps_control_verdict": (c_int64, (c_int64, c_uint64, c_char_p, c_uint32, c_double, c_char_p, c_uint64)),
    "ps_control_forget": (None, (c_int64, c_uint64, c_char_p, c_uint32)),
    "ps_control_is_ending": (c_int, (c_int,)),
    "ps_control_report": (c_int, (c_int64, c_uint64, c_int, c_char_p, c_uint64)),
    "ps_control_reply": (c_int, (c_int64, c_uint64, c_char_p, c_uint64)),
    "ps_control_leave": (None, (c_int64, c_double)),
    "ps_control_next": (c_uint64, (c_int64, c_char_p, c_uint64)),
    "ps_control_eventfd": (c_int, (c_int64,)),
    "ps_control_record": (c_uint64, (c_int64, c_char_p, c_uint64)),
    "ps_control_describe": (c_uint64, (c_char_p, c_uint64, c_char_p, c_uint64)),
    "ps_control_close": (None, (c_int64,)),
    "ps_store_client": (c_int64, (c_char_p, c_int, c_char_p)),
    "ps_store_ask": (c_int64, (c_int64, c_char_p, c_uint64, c_double, c_double)),
    "ps_store_wait": (c_int, (c_int64, c_double)),
    "ps_store_take": (c_uint64, (c_int64, c_char_p, c_uint64)),
    "ps_store_end": (None, (c_int64,)),
    "ps_store_close": (None, (c_int64,)),
}  # fmt: skip
_FUNCTIONS_OF_TORCH: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ps_describe_tensor": (c_int, (c_void_p, c_void_p)),
    "ps_make_tensor": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "ps_view_tensor": (c_void_p, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "ps_set_direct": (None, (c_void_p,)),
}


_METH_FASTCALL = 0x80
_METHODS_OF_C = (
    "ps_entering", "ps_announcing", "ps_exiting", "ps_transfers_starting", "ps_transfers_running",
    "ps_transfers_waiting", "ps_transfers_done", "ps_transfers_sending", "ps_window_putting", "ps_window_signalling",
    "ps_window_waiting",
)  # fmt: skip
"""C functions that Python calls without ctypes, which is slower."""
_CALLED_BY_C = (  # the fields of `Calling` in csrc/calling.h
    "PyLong_AsVoidPtr", "PyLong_FromLongLong", "PyEval_SaveThread", "PyEval_RestoreThread", "PyBytes_FromStringAndSize",
    "PyErr_Restore", "PyBytes_AsString", "PyBytes_Size", "Py_IncRef", "Py_DecRef", "PyErr_NoMemory",
)  # fmt: skip


class _Method(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("function", c_void_p), ("flags", c_int), ("doc", c_char_p))


_new_function = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, ctypes.py_object, c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)
_METHODS: list[_Method] = []

QueueReport = c_int64 * 12
"""Results of a queue's calls; see csrc/queue.h."""

_restore_error = ctypes.PYFUNCTYPE(None, c_void_p, c_void_p, c_void_p)(("PyErr_Restore", ctypes.pythonapi))


class NativeUnavailableError(Exception):
    """The compiled library can't be used."""


class NativeLibrary:
    def __init__(self, path: Path, has_ops: bool, note: str = "") -> None:
        self.has_ops = has_ops
        """False if the torch ops run through Python."""
        self.note = note
        self.path = path
        self._library = ctypes.CDLL(str(path))
        functions = {**_FUNCTIONS, **_FUNCTIONS_OF_TORCH} if has_ops else _FUNCTIONS
        for name, (result, arguments) in functions.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        if self._library.ps_version() != _VERSION:
            raise BuildError(
                f"the compiled library {path} has version {self._library.ps_version()}, but this package needs "
                f"version {_VERSION}; remove the file, so that it is compiled again"
            )
        if has_ops:
            first_call.check(self._library)
        names = ("PyGILState_Ensure", "PyErr_CheckSignals", "PyErr_Fetch", "PyGILState_Release")
        interpreter = [ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p) for name in names]
        self._library.ps_set_interpreter(*interpreter, threading.main_thread().ident)
        self.signal_pipe = self._library.ps_signal_pipe()
        """Address of a `wakeup.SignalPipe`."""
        wakeup.tell(wakeup.SignalPipe.from_address(self.signal_pipe))
        called = [ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p) for name in _CALLED_BY_C]
        self._library.ps_set_calling((c_void_p * len(called))(*called))
        self._library.ps_set_add_pending(ctypes.cast(ctypes.pythonapi.Py_AddPendingCall, c_void_p))
        atexit.register(self._library.ps_set_add_pending, None)
        ON_FAILED_OP.append(self.raise_interruption)
        wanted = settings.INSTRUCTIONS.get()
        if wanted != "auto" and self._library.ps_use_instruction_set(wanted.encode()) != 0:
            raise SettingError(
                f"{settings.INSTRUCTIONS.name} must be an instruction set of this processor, such as "
                f"{self._library.ps_instruction_set().decode()}, but is {wanted}; unset it to use the best one"
            )
        for name in _METHODS_OF_C:
            setattr(self, name, self.method(name))

    def method(self, name: str, itself: object = None) -> Any:
        """Returns the library's C function `name` as a Python callable, whose first argument is always `itself`."""
        function = ctypes.cast(getattr(self._library, name), c_void_p)
        method = _Method(name.encode(), function, _METH_FASTCALL, None)
        _METHODS.append(method)
        return _new_function(ctypes.byref(method), itself, None)

    def raise_interruption(self) -> None:
        record = (c_void_p * 3)()
        self._library.ps_take_exception(record)
        if record[0]:
            _restore_error(*record)  # raises: an error is set

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the compiled library has no function {name!r}")


def load() -> NativeLibrary:
    """Returns the library. Compiles it if necessary. Raises NativeUnavailableError if this fails."""
    found = _load()
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    wakeup.begin()  # another thread may have loaded it
    return found


@functools.cache
def load_for_tools() -> NativeLibrary:
    """Returns the build without torch if it is already compiled. Else returns `load()`, which imports torch: this takes
    seconds.
    """
    with contextlib.suppress(OSError, BuildError, CacheError):
        path, _ = _find(native_build.plain_recipe())
        if path is not None:
            library = NativeLibrary(path, has_ops=False)
            wakeup.begin()
            return library
    return load()


@functools.cache
def _load() -> NativeLibrary | str:
    if sys.platform != "linux":
        return f"the compiled library needs Linux, and this is {sys.platform}"
    problem = f"{settings.BUILD.name} is plain"
    if settings.BUILD.get() != "plain":
        full = _try(native_build.full_recipe, has_ops=True)
        if isinstance(full, NativeLibrary):
            return full
        problem = full
    plain = _try(native_build.plain_recipe, has_ops=False, note=problem)
    # Warn once per host, and not about the user's own choice.
    chosen = settings.BUILD.get() != "auto" or not logs.is_first_of_host()
    level = logging.INFO if chosen else logging.WARNING
    if isinstance(plain, NativeLibrary):
        logger.log(level, "the registered ops run through Python, some microseconds slower per call: %s", problem)
    return plain


def _try(recipe: Callable[[], Recipe], has_ops: bool, note: str = "") -> NativeLibrary | str:
    try:
        made = recipe()
        [(path, problem)] = find_or_compile([made])
        if path is not None and is_packaged(path):
            try:
                return NativeLibrary(path, has_ops, note)
            except (OSError, AttributeError, BuildError) as error:
                [(path, problem)] = find_or_compile([made], f"the wheel's {path.name} can't be used: {error}")
        return problem if path is None else NativeLibrary(path, has_ops, note)
    except (OSError, AttributeError, BuildError, CacheError) as error:
        return f"the compiled library can't be made or loaded: {build_cache.about_cache(error)}"


def is_packaged(path: Path) -> bool:
    return path.parent == _PACKAGED


def _find(recipe: Recipe, unfit: str = "") -> tuple[Path | None, str]:
    """Returns the path of the compiled file and "", or None and why there is no usable file. `unfit`: why the wheel's
    file is unusable, or "".
    """
    if not unfit and native_build.flaw_of_packaged(_PACKAGED, recipe) is None:
        return _PACKAGED / recipe.packaged_name, ""
    target = _target_of(recipe)
    build_cache.check_owner(target.parent)
    flaw = build_cache.flaw_of(target) if target.exists() else "it isn't compiled"
    return (target, "") if flaw is None else (None, flaw)


def _target_of(recipe: Recipe) -> Path:
    return build_cache.cache_folder() / f"{recipe.digest()}{recipe.suffix}"


def wanted_recipe() -> Recipe:
    return native_build.plain_recipe() if settings.BUILD.get() == "plain" else native_build.full_recipe()


def find_or_compile(recipes: Sequence[Recipe], unfit: str = "") -> list[tuple[Path | None, str]]:
    """Returns for each recipe the path of the compiled file and "", or None and the reason of a failure. Compiles
    missing files in parallel. `unfit`: why the wheel's files are unusable, or "".
    """
    missing = [recipe for recipe in recipes if _find(recipe, unfit)[0] is None]
    with native_build.threads_that_compile(max(1, len(missing))) as workers:
        made = {recipe: workers.submit(_find_or_compile, recipe, unfit, missing) for recipe in missing}
        while wait(made.values(), _SLICE_S).not_done:  # a longer wait could miss Ctrl-C
            pass
        return [made[recipe].result() if recipe in made else _find(recipe, unfit) for recipe in recipes]


def _find_or_compile(recipe: Recipe, unfit: str, announced_with: Sequence[Recipe] | None) -> tuple[Path | None, str]:
    """Does `find_or_compile` for one recipe. `announced_with`: all recipes compiled at this time; a warning gives their
    expected duration. None: no warning.
    """
    found, flaw = _find(recipe, unfit)
    if found is not None:
        return found, ""
    target = _target_of(recipe)
    if settings.BUILD.get() == "never":
        return None, f"{flaw}, and {settings.BUILD.name} is never"
    compiler = native_build.find_compiler()
    if compiler is None:
        return None, "there is no C++ compiler (c++, g++, clang++ or $CXX) to build it with"
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    build_cache.check_owner(target.parent)
    asked_s = time.time()
    with build_cache.locked(target.with_suffix(".lock")) as lock:
        if not target.exists() or build_cache.flaw_of(target) is not None:
            unfit = unfit or native_build.flaw_of_packaged(_PACKAGED, recipe) or ""
            return _compile(recipe, target, compiler, lock, asked_s, announced_with, unfit)
    return target, ""


def _compile(
    recipe: Recipe,
    target: Path,
    compiler: tuple[str, ...],
    lock: IO[bytes],
    asked_s: float,
    announced_with: Sequence[Recipe] | None,
    unfit: str,
) -> tuple[Path | None, str]:
    """Compiles `recipe` to `target`. Returns `target` and "", or None and the reason of the failure.

    Writes the reason to the file of `lock`, which the caller must hold, and requested at the time `asked_s`. If that
    file has a reason from less than 60 s before, returns the reason and compiles nothing. `unfit`: why the wheel's file
    is unusable, or "". `announced_with`: as in `_find_or_compile`.
    """
    failure = _last_failure(lock)
    if failure is not None and failure["compiler"] == list(compiler) and failure["at_s"] > asked_s - _HEEDED_S:
        age = max(0.0, time.time() - failure["at_s"])
        return None, f"{failure['reason']} (tried {age:.0f} s ago; remove {lock.name} to have it tried at once)"
    _prune(target)
    _write(lock, b"")
    if announced_with is not None:
        logger.warning(
            "compiling %s, once for this machine%s%s; this takes about %.0f s on a quiet machine (%s=never forbids it)",
            recipe.what, f" and torch {recipe.for_torch.split()[0]}" if recipe.for_torch else "",
            f" ({unfit})" if unfit else "", _usual_s({recipe, *announced_with}), settings.BUILD.name,
        )  # fmt: skip
    try:
        _compile_and_link(recipe, target, compiler)
    except BuildStoppedError:  # not recorded: the next process compiles at once
        raise
    except (BuildError, OSError) as error:
        record = {"compiler": compiler, "at_s": time.time(), "reason": str(error)[: _FAILURE_BYTES // 4]}
        _write(lock, json.dumps(record).encode())
        return None, str(error)
    return target, ""


def _compile_and_link(recipe: Recipe, target: Path, compiler: tuple[str, ...]) -> None:
    base = recipe.base
    if base is None:
        native_build.compile_library(recipe, target, compiler, build_cache.seal)
        return
    used: list[Path] = []

    def compile_with_base(unfit: str = "") -> None:
        def path_of_base() -> Path:
            path, problem = found.result()
            if path is None:
                raise BuildError(problem)
            used.append(path)
            return path

        with ThreadPoolExecutor(1) as beside:
            found = beside.submit(_find_or_compile, base, unfit, None)
            native_build.compile_library(recipe, target, compiler, build_cache.seal, path_of_base)

    try:
        compile_with_base()
    except BuildError as error:
        if not used or not is_packaged(used[0]):
            raise
        compile_with_base(unfit=str(error))


def _usual_s(recipes: Collection[Recipe]) -> float:
    bases = {recipe.base for recipe in recipes if recipe.base is not None and _find(recipe.base)[0] is None}
    needed = [*recipes, *bases]
    cores = min(len(native_build.usable_cores()), sum(len(recipe.units) for recipe in needed))
    longest_s = max(recipe.usual_cpu_s / max(1, len(recipe.units)) for recipe in needed)
    return max(1.0, longest_s, sum(recipe.usual_cpu_s for recipe in needed) / max(1, cores))


def _write(lock: IO[bytes], content: bytes) -> None:
    lock.seek(0)
    lock.write(content[:_FAILURE_BYTES].ljust(_FAILURE_BYTES))
    lock.flush()


def _last_failure(lock: IO[bytes]) -> dict[str, Any] | None:
    lock.seek(0)
    try:
        found = json.loads(lock.read(_FAILURE_BYTES))
        return found if isinstance(found["at_s"], float) and isinstance(found["reason"], str) else None
    except (ValueError, KeyError, TypeError):  # none, or a partial one
        return None


def _prune(target: Path) -> None:
    now = time.time()
    for path in target.parent.iterdir():
        with contextlib.suppress(OSError):
            info = path.stat()
            unused_s = now - max(info.st_atime, info.st_mtime)
            name = path.name
            if path.is_dir():
                left = name.startswith(f"{target.stem}{native_build.BUILD_FOLDER}")
                if left or ((native_build.BUILD_FOLDER in name or name.startswith("tmp")) and unused_s > _STALE_S):
                    shutil.rmtree(path, ignore_errors=True)
            elif path.suffix in (".so", ".o", ".lock", ".cubin") and unused_s > _UNUSED_S and path.stem != target.stem:
                path.unlink()
