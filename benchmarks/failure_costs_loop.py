"""The candidates of `failure_costs` in C++: what calls carry for failures, piece by piece, without Python or torch.

`failure_loop.cpp` has the loops. Pieces that concern one rank alone run on the first; the second waits meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from measure.worker import Timing

CANDIDATES = (
    "empty loop", "lock", "lock and check", "record", "tick", "tick, note", "tick, note, comparison",
    "group alone", "group, recorded", "exchange", "exchange, compared",
)  # fmt: skip
"""In the order of `What` in failure_loop.cpp."""
OF_ONE = CANDIDATES[:-2]
OF_TWO = CANDIDATES[-4:]


def make(name: str, settings: dict[str, Any]) -> LoopTeam:
    return LoopTeam(settings)


class LoopTeam:
    """Two ranks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._library = ctypes.CDLL(settings["library"])
        self._library.failure_loop_bytes.restype = ctypes.c_size_t
        self._library.failure_loop_new.restype = ctypes.c_void_p
        self._library.failure_loop_new.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_size_t)
        self._library.failure_loop_run.restype = ctypes.c_double
        self._library.failure_loop_run.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        self._library.failure_loop_check.restype = ctypes.c_char_p
        self._library.failure_loop_check.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._memory = settings["memory"]
        # Locks are cheaper in a process that has only ever had one thread; ranks of torch have several.
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def prepare(self, values: dict[str, Any]) -> list[str]:
        ranks = values["ranks"]
        self._idle = self.rank >= ranks
        if not self._idle:
            # Each case has fresh memory: what another has left in it would be no beginning.
            memory = os.open(self._memory[str(ranks)], os.O_RDWR)
            self._ranks = self._library.failure_loop_new(memory, self.rank, ranks, values["bytes"] // 4)
            os.close(memory)
        return list(OF_ONE if ranks == 1 else OF_TWO)

    def check(self, name: str) -> str | None:
        if self._idle:
            return None
        problem = self._library.failure_loop_check(self._ranks, CANDIDATES.index(name)).decode()
        return f"{name}: {problem}" if problem else None

    def run(self, name: str, calls: int) -> Timing:
        if self._idle:
            return Timing()
        what = CANDIDATES.index(name)
        self._library.failure_loop_run(self._ranks, what, max(1, calls // 10))
        elapsed_s = self._library.failure_loop_run(self._ranks, what, calls)
        if elapsed_s < 0:
            raise RuntimeError(f"{name} failed")
        return Timing(elapsed_s=elapsed_s)


def bytes_of(library: str, ranks: int) -> int:
    """Of the memory that `ranks` ranks share."""
    loaded = ctypes.CDLL(library)
    loaded.failure_loop_bytes.restype = ctypes.c_size_t
    return int(loaded.failure_loop_bytes(ranks))
