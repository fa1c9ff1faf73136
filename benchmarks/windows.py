"""Compares windows with send and recv, and with a plain copy, between two ranks of one host or of two hosts.

    python benchmarks/windows.py                         two minutes; --json FILE has all samples
    python benchmarks/windows.py --hosts                 between two hosts, which are namespaces here: needs root

`8 KiB there and back` is half the time of a ping-pong, by put with a signal and wait_signal, or by send and recv. In
`apart`, `put` and `signal` are two calls. `16 MiB` compares a put with memcpy into the same memory, by the thread's CPU
time; between hosts, it is a ping-pong, too. A row has the medians of rounds, and their ratio.
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
from tests.hosts import Hosts, problem

SMALL, LARGE = 8 << 10, 16 << 20
CALLS = 200
SIGNALLED, APART, SENT = "put with signal, wait", "put, signal, wait", "send, recv"
LARGE_SIGNALLED, LARGE_SENT = f"{SIGNALLED} of 16 MiB", f"{SENT} of 16 MiB"


def _timed_us(call: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    for _ in range(calls):
        call()
    return (clock() - started) / calls * 1e6


def measure(rounds: int, is_far: bool) -> dict[str, list[float]]:
    rank = ps.get_tp_group().rank_in_group
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    group, peer = ps.get_tp_group(), 1 - rank
    window = group.window([LARGE], torch.uint8)
    small, large = (torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (SMALL, LARGE))

    def one_sided(x: torch.Tensor = small, together: bool = True) -> None:
        for turn in (0, 1):
            if turn != rank:
                window.wait_signal(peer)
            elif together:
                window.put(x, peer, signal=True)
            else:
                window.put(x, peer)
                window.signal(peer)

    def two_sided(x: torch.Tensor = small) -> torch.Tensor:
        received = x
        for turn in (0, 1):
            if turn == rank:
                group.send(x, peer)
            else:
                received = group.recv(x.shape, torch.uint8, peer)
        return received

    for x in (small, large):
        one_sided(x)
        expected = two_sided(x)
        if not torch.equal(window.tensor[: len(x)], expected):
            raise ValueError("put and send differ")
        group.barrier()
    there = window.tensor if is_far else window.map_remote_tensor(peer)
    found: dict[str, list[float]] = {
        SIGNALLED: [],
        APART: [],
        SENT: [],
        LARGE_SIGNALLED: [],
        LARGE_SENT: [],
        "put": [],
        "memcpy": [],
    }
    for _ in range(rounds):
        for name, call in ((SIGNALLED, one_sided), (APART, lambda: one_sided(together=False)), (SENT, two_sided)):
            group.barrier()
            _timed_us(call, 20)
            found[name].append(_timed_us(call, CALLS) / 2)
        for name, once in ((LARGE_SIGNALLED, one_sided), (LARGE_SENT, two_sided)) if is_far else ():
            group.barrier()
            found[name].append(_timed_us(lambda once=once: once(large), 3) / 2)  # type: ignore[misc]
        group.barrier()
        if rank == 0 and not is_far:
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
    parser.add_argument("--hosts", action="store_true", help="between two hosts")
    options = parser.parse_args()
    if options.hosts:
        reason = problem()
        if reason is not None:
            sys.exit(f"no hosts can be made here: {reason}")
        with Hosts(2) as hosts, hosts.ranks((0, 1)) as ranks:
            found = ranks.run(measure, options.rounds, True, tp=2, timeout_s=3600.0)[0]
    else:
        found = ps.launch(measure, nproc=2, tensor_model_parallel_size=2, args=(options.rounds, False))[0]
    rows = {}
    second = (
        ("16 MiB there and back", LARGE_SIGNALLED, LARGE_SENT, 1.0)
        if options.hosts
        else ("16 MiB", "put", "memcpy", 1.05)
    )
    small = "8 KiB there and back"
    for title, ours, other, most in ((small, SIGNALLED, SENT, 1.0), (f"{small}, apart", APART, SENT, 1.0), second):
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
