"""Times windows between two ranks of a host, beside send and recv, and a plain copy.

    python benchmarks/windows.py                         a minute; --json FILE has all samples
    python benchmarks/windows.py --rounds 10

`8 KiB there and back` is put, signal and wait_signal against send and recv: half of a ping-pong. `16 MiB` is a put,
against the C library's memcpy from and to the same memory, which the other rank doesn't use meanwhile. The answers are
checked first. The candidates take turns; a row has the medians of the rounds, and their ratio. Copies count the CPU
time of the thread, which other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import parallel_state as ps
from parallel_state.tools.bench.report import circumstances

SMALL, LARGE = 8 << 10, 16 << 20
CALLS = 200


def _timed_us(call: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    for _ in range(calls):
        call()
    return (clock() - started) / calls * 1e6


def measure(rounds: int) -> dict[str, list[float]]:
    rank = ps.get_tp_group().rank_in_group
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    group, peer = ps.get_tp_group(), 1 - rank
    window = group.window([LARGE], torch.uint8)
    small, large = (torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (SMALL, LARGE))

    def one_sided() -> None:
        for turn in (0, 1):
            if turn == rank:
                window.put(small, peer)
                window.signal(peer)
            else:
                window.wait_signal(peer)

    def two_sided() -> torch.Tensor:
        received = small
        for turn in (0, 1):
            if turn == rank:
                group.send(small, peer)
            else:
                received = group.recv([SMALL], torch.uint8, peer)
        return received

    one_sided()
    expected = two_sided()
    if not torch.equal(window.tensor[:SMALL], expected):
        raise ValueError("put and send differ")
    group.barrier()
    there = window.map_remote_tensor(peer)
    if rank == 0:
        window.put(large, peer)
        if not torch.equal(there, large):
            raise ValueError("a large put is wrong")
    group.barrier()
    found: dict[str, list[float]] = {"put, signal, wait": [], "send, recv": [], "put": [], "memcpy": []}
    for _ in range(rounds):
        for name, call in (("put, signal, wait", one_sided), ("send, recv", two_sided)):
            group.barrier()
            _timed_us(call, 20)
            found[name].append(_timed_us(call, CALLS) / 2)
        group.barrier()
        if rank == 0:
            copy = lambda: ctypes.memmove(there.data_ptr(), large.data_ptr(), LARGE)  # noqa: E731
            for _ in range(3):
                found["put"].append(_timed_us(lambda: window.put(large, peer), 1, time.thread_time))
                found["memcpy"].append(_timed_us(copy, 1, time.thread_time))
        group.barrier()
    window.deregister()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = ps.launch(measure, nproc=2, tensor_model_parallel_size=2, args=(options.rounds,))[0]
    rows = {}
    for title, ours, other, most in (
        ("8 KiB there and back", "put, signal, wait", "send, recv", 1.0),
        ("16 MiB", "put", "memcpy", 1.05),
    ):
        us = {name: statistics.median(found[name]) for name in (ours, other)}
        ratio = us[ours] / us[other]
        rows[title] = {**us, "ratio": ratio}
        times = ", ".join(f"{name} {us[name]:.1f} µs" for name in (ours, other))
        print(f"{title}: {times}; ratio {ratio:.2f} (goal: at most {most})")
    if options.json:
        text = json.dumps({"rows": rows, "samples_us": found, "circumstances": circumstances()}, indent=1, default=str)
        options.json.write_text(text)


if __name__ == "__main__":
    main()
