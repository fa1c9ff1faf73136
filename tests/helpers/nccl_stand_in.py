"""The real NcclCommunicator over stand-ins: stand_in_nccl.c for NCCL, which logs its arguments, numbers for streams."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from device_communicators import GroupContext, Work
from device_communicators.cuda.nccl_library import NcclLibrary
from device_communicators.nccl.communicator import NcclCommunicator
from tests.helpers import compiled

SOURCE = Path(__file__).parents[1] / "native" / "stand_in_nccl.c"
LIBRARY, FOLDER = "STAND_IN_NCCL", "STAND_IN_NCCL_DIR"
CURRENT = 7


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("clang")


def build(folder: Path, *flags: str) -> Path:
    command = [str(compiler()), "-O1", "-shared", "-fPIC", *flags]

    def make(target: Path) -> None:
        subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True, timeout=120)

    target = folder / f"libnccl-{uuid.uuid4().hex}.so"
    shutil.copyfile(compiled.kept("libnccl.so", command, [SOURCE], make), target)
    return target


class Streams:
    def __init__(self) -> None:
        self.sides = 0
        self.capturing = False
        self.recorded = 0
        self.ordered: list[tuple[int, int]] = []
        self.synchronized = 0
        self.on_release: Callable[[], object] = lambda: None
        self.number = CURRENT
        self.stuck = False

    def current(self) -> int:
        return self.number

    def is_capturing(self) -> bool:
        return self.capturing

    def side(self) -> Side:
        self.sides += 1
        return Side(99 + self.sides)

    def marker(self) -> Marker:
        return Marker(self)

    def wait_for(self, stream: int, earlier: int) -> None:
        self.ordered.append((stream, earlier))

    def release_cached_memory(self) -> None:
        self.on_release()

    def synchronize(self) -> None:
        self.synchronized += 1

    def guard(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def is_current_device(self) -> bool:
        return True

    def enter_relaxed(self) -> bool:
        return True


class Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Side:
    def __init__(self, number: int) -> None:
        self._number = number

    def begin(self, tensors: Sequence[Tensor]) -> Side:
        return self

    def finish(self, enqueue: Callable[[int], None]) -> Work:
        enqueue(self._number)
        return Done()

    def run(self, enqueue: Callable[[int], None], tensors: Sequence[Tensor]) -> Work:
        return self.begin(tensors).finish(enqueue)


class Marker:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def record(self, stream: int) -> None:
        self._streams.recorded += 1

    def is_reached(self) -> bool:
        return not self._streams.stuck


class Library(NcclLibrary):
    def log(self) -> list[str]:
        self._library.stand_in_log.restype = ctypes.c_char_p
        return self._library.stand_in_log().decode().splitlines()

    def clear(self) -> None:
        self._library.stand_in_clear()

    def tell(self, what: str, *values: int) -> int:
        """Calls `stand_in_<what>` of stand_in_nccl.c, which sets how the stand-in behaves, or returns a count."""
        return getattr(self._library, f"stand_in_{what}")(*map(ctypes.c_void_p, values))


class StandInNccl(NcclCommunicator):
    def __init__(self, context: GroupContext) -> None:
        self.streams: Any = Streams()
        super().__init__(context, Library(os.environ[LIBRARY]), self.streams)
