"""Measures the cost of metrics per C++ call: 10⁶ barriers of a group of one rank, with and without metrics."""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time

from device_communicators.cpu import native

BLOCK = 10_000
MOST_NS = 100.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--calls", type=int, default=1_000_000, help="calls with metrics, and as many without")
    calls: int = parser.parse_args().calls
    library = native.load()
    size_bytes = library.ps_segment_bytes(1)
    descriptor = os.memfd_create("metrics")
    os.ftruncate(descriptor, size_bytes)
    memory = library.ps_map(descriptor, size_bytes, 0)
    group = library.ps_group_new(memory, size_bytes, 0, 1, 1000, 0, 10.0)
    barrier, off, on = library.ps_barrier, [], []
    for at in range(2 * calls // BLOCK):
        is_on = at % 2 == 1
        library.ps_measure_calls(int(is_on))
        started = time.thread_time_ns()
        for _ in range(BLOCK):
            barrier(group, 64, 0)
        (on if is_on else off).append((time.thread_time_ns() - started) / BLOCK)
    library.ps_measure_calls(0)
    counted = (ctypes.c_uint64 * (3 * 256 + 64))()
    library.ps_group_meter(group, counted)
    if counted[3 * 64] != calls // BLOCK * BLOCK:
        raise SystemExit(f"{counted[3 * 64]} calls were counted of {calls}")
    cost = statistics.median(with_it - without for with_it, without in zip(on, off, strict=True))
    print(f"{calls} calls: {statistics.median(off):.1f} ns a call without metrics, {statistics.median(on):.1f} with; "
          f"metrics cost {cost:.1f} ns a call (median of {len(on)} pairs of blocks)")  # fmt: skip
    return int(cost > MOST_NS)


if __name__ == "__main__":
    sys.exit(main())
