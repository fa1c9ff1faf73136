"""Counts system calls and context switches per call of 8 KiB, of this library and of torch.distributed over gloo.

    python benchmarks/system_calls.py --json results.json          # as root; needs perf (Debian: linux-perf)

`perf trace` counts system calls of rank 0 over many calls, separately for its other threads. On a busy machine the
counts of futex, poll and sched_yield are upper bounds, because longer waits make more such calls.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import hosts as over_hosts
from parallel_state.tools.bench.report import circumstances
from tests.hosts import Hosts, problem

PLACEMENTS = ((0, 0), (0, 0, 0, 0), (0, 1), (0, 0, 1, 1))
BYTES = 8 << 10
_ATTACH_S = 15.0
_TRIES = 4
_OF_THE_TOOL = ("clock_nanosleep", "wait4")


@contextlib.contextmanager
def _counted(own: dict[str, int], others: dict[str, int]) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        with ThreadPoolExecutor(1) as other:  # keeps its calls out of the main thread's
            perf = other.submit(_attached, report).result()
        try:
            yield
        finally:
            _end(perf)
        counts = own
        for line in report.read_text().splitlines():
            thread = re.match(r" .*\((\d+)\), \d+ events", line)
            row = re.match(r" +([a-z_0-9]+) +(\d+) +\d+ +[\d.]+ ", line)
            if thread is not None:
                counts = own if int(thread[1]) == os.getpid() else others
            elif row is not None and row[1] not in _OF_THE_TOOL:
                counts[row[1]] = counts.get(row[1], 0) + int(row[2])


def _attached(report: Path) -> subprocess.Popen[bytes]:
    command = ["perf", "trace", "-s", "-p", str(os.getpid()), "-o", str(report)]
    for _ in range(_TRIES):
        perf = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _ATTACH_S
        while perf.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if "poll" in Path(f"/proc/{perf.pid}/wchan").read_text(encoding="utf-8"):
                    time.sleep(0.2)
                    return perf
            time.sleep(0.05)
        perf.kill()
        perf.wait()
    raise RuntimeError("perf trace doesn't attach: it needs root and tracefs")


def _end(perf: subprocess.Popen[bytes]) -> None:
    """Interrupts perf, again and again until it has written its report: it can lose a signal while it reads its
    buffers.
    """
    for _ in range(10):
        perf.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            perf.wait(2.0)
            return
    perf.kill()
    raise RuntimeError("perf trace doesn't end")


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _count(operation: str, way: str, count: int, calls: int) -> dict[str, Any]:
    group = over_hosts.ps.get_tp_group()
    call, x = over_hosts._call(operation, way), torch.ones(count, dtype=torch.bfloat16)
    with torch.inference_mode():
        for _ in range(20):
            call(x)
        own: dict[str, int] = {}
        others: dict[str, int] = {}
        with _counted(own, others) if group.is_first_rank else contextlib.nullcontext():
            group.barrier()
            before = _switches()
            for _ in range(calls):
                call(x)
            switches = _switches() - before
        group.barrier()
    per_call = {name: round(number / calls, 2) for name, number in sorted(own.items()) if number >= calls / 50}
    return {
        "system_calls": per_call,
        "of_other_threads": round(sum(others.values()) / calls, 2),
        "context_switches": round(switches / calls, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300, help="number of counted calls (default 300)")
    parser.add_argument("--operations", nargs="+", default=list(over_hosts.OPERATIONS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reason = problem()
    if reason is not None:
        sys.exit(f"no hosts can be made here: {reason}")
    rows: list[dict[str, Any]] = []
    with Hosts(2) as hosts:
        for placement in PLACEMENTS:
            with hosts.ranks(placement) as ranks:
                size = len(placement)
                count = BYTES // torch.bfloat16.itemsize // size * size
                for operation in options.operations:
                    ranks.run(over_hosts._check, operation, count, torch.bfloat16, tp=size)
                    for way in over_hosts.WAYS:
                        found = ranks.run(_count, operation, way, count, options.calls, tp=size)[0]
                        rows.append({"hosts": placement, "operation": operation, "way": way, **found})
                        calls = ", ".join(f"{name} {number:g}" for name, number in found["system_calls"].items())
                        rest = f"{found['context_switches']:6} switches, {found['of_other_threads']:6} of other threads"
                        print(f"{placement} {operation:22} {way:5} {rest}  {calls}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"bytes": BYTES, **circumstances(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
