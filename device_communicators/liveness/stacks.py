"""Describes the stacks of this process's threads, and finds out if a thread is compiling."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
from importlib.util import find_spec
from types import FrameType

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_SPEC = find_spec("torch")  # `debug --live` starts without torch
_TORCH = os.path.dirname(os.path.abspath((_SPEC and _SPEC.origin) or "torch"))
_OWN = (f"{_ROOT}/device_communicators/", f"{_ROOT}/parallel_state/", f"{_TORCH}/")
_FRAMES = 4
MOST_FRAMES = 40
_STANDARD_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")
_INSTALLED = (os.path.join("", "site-packages", ""), os.path.join("", "dist-packages", ""))
_COMPILERS = (
    "torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py", "torch/_inductor/codecache.py",
    "torch/_inductor/async_compile.py", "torch/utils/cpp_extension.py", "triton/compiler/",
)  # fmt: skip
"""Files that are on a thread's stack while the thread compiles, but not while it runs compiled code."""

_WITHIN = (*_OWN, contextlib.__file__)

Frame = tuple[str, int, str]
"""File, line and function."""


def call_site() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN) and not path.startswith("<"):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def frames_of(thread: int | None) -> list[Frame]:
    return _frames(sys._current_frames().get(thread or 0))


def own_frames() -> list[Frame]:
    return _frames(sys._getframe(1))


def _frames(frame: FrameType | None) -> list[Frame]:
    if frame is None:
        return []
    return [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in traceback.walk_stack(frame)]


def is_compiling(frames: list[Frame]) -> bool:
    return any(compiler in path for path, _, _ in frames for compiler in _COMPILERS)


def in_words(frames: list[Frame]) -> str:
    """Describes a stack by up to four frames: the program's innermost frame, then its callers.

    Omits frames of this library, torch and contextlib, and frames of the standard library that aren't the innermost.
    """
    outside = [frame for frame in frames if not frame[0].startswith(_WITHIN)]
    own = [frame for frame in outside if not _is_standard(frame[0])]
    shown = (own if own[:1] == outside[:1] else [*outside[:1], *own])[:_FRAMES] or frames[:_FRAMES]
    places = [f"{os.path.basename(path)}:{line} in {function}" for path, line, function in shown]
    return ", called by ".join(places) or "its end"


def _is_standard(path: str) -> bool:
    is_installed = any(folder in path for folder in _INSTALLED)
    return path.startswith("<") or (path.startswith(_STANDARD_LIBRARY) and not is_installed)
