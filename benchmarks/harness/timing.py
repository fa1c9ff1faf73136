from __future__ import annotations

import time
from collections.abc import Callable

import torch

from parallel_state.tools.bench.devices import Clock
from parallel_state.tools.bench.rounds import Timing


def timed(call: Callable[[], object], calls: int) -> Timing:
    for _ in range(max(1, calls // 10)):
        call()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return Timing(elapsed_s=time.perf_counter() - started)


def host_seconds(clock: Clock, call: Callable[[], object], calls: int) -> list[float]:
    found = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    clock.finish()
    return found


def release(clock: Clock) -> None:
    clock.finish()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
