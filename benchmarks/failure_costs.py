"""Times what failure handling adds to a call: recording it, checking the group, and comparing calls between ranks.

    python benchmarks/failure_costs.py --parts C++ --json found.json

*C++*: nanoseconds that each check adds to a C++ collective, from loops with and without the check. *mode*: an
all_reduce of 8 KiB over shared memory by two ranks, in normal and in debug mode. *gloo*: all_reduce without shared
memory, compared with torch.distributed on the same process group.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import command_line
import torch
import torch.distributed as dist
from harness.collectives import ours_by_op, start_ours
from harness.rounds import Row, measure_all
from harness.teams import Team, started
from harness.timing import timed
from torch import Tensor

from device_communicators.cpu import native_build
from parallel_state.tools.bench.report import p50, size_name, write_json
from parallel_state.tools.bench.rounds import Timing

LOOPS = "C++"
"""Calls without Python or torch; the loops are in `failure_loop.cpp`."""
PARTS = (LOOPS, "mode", "gloo")
MOST_CALLS = 1_000_000
BYTES = 8 << 10
TARGET_NS = 100
DEBUG = ", debug mode"
EXCHANGE = "gloo's all_gather of 512 bytes"
PIECES = {
    "record": ("record", "empty loop"),
    "check for an earlier failure": ("lock and check", "lock"),
    "note of the call": ("tick, note", "tick"),
    "comparison, a peer": ("tick, note, comparison", "tick, note"),
}
"""Added piece -> (loop with it, loop without it)."""
WHOLES = {"call": ("group, recorded", "group alone"), "exchange": ("exchange, compared", "exchange")}


@contextlib.contextmanager
def compiled() -> Iterator[str]:
    compiler = native_build.find_compiler()
    if compiler is None:
        raise SystemExit("a C++ compiler is needed; --parts mode gloo does without")
    plain = native_build.plain_recipe()
    loop = Path(__file__).with_name("failure_loop.cpp")
    flags = ("-std=c++17", f"-I{native_build.SOURCES}")
    with tempfile.TemporaryDirectory(prefix="failure_costs_") as folder:
        library = Path(folder) / "loop.so"
        recipe = native_build.Recipe("the loops", library.name, (native_build.Unit((loop,)),), flags, base=plain.base)
        native_build.compile_library(recipe, library, compiler)
        yield str(library)


def of_loops(options: argparse.Namespace) -> list[Row]:
    with compiled() as library, contextlib.ExitStack() as files:
        memory = {}
        for ranks in (1, 2):
            file = os.memfd_create(f"failure_costs_{ranks}")
            files.callback(os.close, file)
            os.truncate(file, bytes_of(library, ranks))
            memory[str(ranks)] = f"/proc/{os.getpid()}/fd/{file}"
        settings = {"pin": not options.no_pin, "library": library, "memory": memory}
        cases = [{"part": "C++", "ranks": ranks, "bytes": BYTES, "most_calls": MOST_CALLS} for ranks in (1, 2)]
        with started([Team(LOOPS, __file__, 2, settings)]) as teams:
            return measure_all(teams, cases, command_line.plan(options))


def of_modes(options: argparse.Namespace) -> list[Row]:
    teams = []
    for after, value in (("", "0"), (DEBUG, "1")):
        settings = {"pin": not options.no_pin, "after": after}
        environment = {"PARALLEL_STATE_DEBUG": value, "PARALLEL_STATE_SHARED_MEMORY": "on"}
        teams.append(Team(f"shared memory{after}", __file__, 2, settings, environment=environment))
    with started(teams) as there:
        return measure_all(there, [{"part": "mode", "ranks": 2, "bytes": BYTES}], command_line.plan(options))


def over_gloo(options: argparse.Namespace) -> list[Row]:
    rows = []
    for ranks in options.ranks:
        settings = {"pin": not options.no_pin, "after": ""}
        environment = {"PARALLEL_STATE_DEBUG": "0", "PARALLEL_STATE_SHARED_MEMORY": "off"}
        cases = [{"part": "gloo", "ranks": ranks, "bytes": size} for size in options.sizes]
        with started([Team("gloo", __file__, ranks, settings, environment=environment)]) as teams:
            rows += measure_all(teams, cases, command_line.plan(options))
    return rows


def report(rows: Sequence[Row]) -> None:
    parts = {part: [row for row in rows if row.case["part"] == part] for part in PARTS}
    command_line.print_rows("C++", parts["C++"], ranks_of, [])
    if parts["C++"]:
        print_costs(*parts["C++"])
    pairs = [(name + DEBUG, name) for name in ("op, in place", "all_reduce", "record in Python")]
    against_gloo = ("op, in place" + DEBUG, EXCHANGE + DEBUG)
    title = "all_reduce, 2 ranks, shared memory"
    command_line.print_rows(title, parts["mode"], lambda row: size_name(row.case["bytes"]), [*pairs, against_gloo])
    for row in parts["mode"]:
        added = {normal: differences(row, debug, normal) for debug, normal in pairs}
        print_added("what debug mode adds to a call, us", added, 1)
    for ranks in dict.fromkeys(row.case["ranks"] for row in parts["gloo"]):
        chosen = [row for row in parts["gloo"] if row.case["ranks"] == ranks]
        pairs = [(name, "torch.distributed") for name in ("all_reduce", "all_reduce_")]
        command_line.print_rows(
            f"all_reduce, {ranks} ranks, gloo", chosen, lambda row: size_name(row.case["bytes"]), pairs
        )


def print_costs(one: Row, two: Row) -> None:
    pieces = {name: differences(one, *pair) for name, pair in PIECES.items()}
    pieces["sum"] = [sum(each) for each in zip(*pieces.values(), strict=True)]
    for row in (one, two):
        for name, pair in WHOLES.items():
            pieces[f"whole {name}, {ranks_of(row)}"] = differences(row, *pair)
    print_added("what failure handling adds to a call in normal mode, ns", pieces, 1000)
    if pieces["sum"]:
        found = p50(pieces["sum"]) * 1e3
        print(f"the sum is {found:.0f} ns, {'less' if found < TARGET_NS else 'NOT less'} than {TARGET_NS}")


def print_added(title: str, added: Mapping[str, Sequence[float]], scale: float) -> None:
    lines = []
    for name, us in added.items():
        if us:
            low, _, high = statistics.quantiles(us, n=4)
            lines.append((name, [p50(us) * scale, low * scale, high * scale]))
    command_line.print_table(title, ["p50", "p25", "p75"], lines)


def ranks_of(row: Row) -> str:
    return "1 rank" if row.case["ranks"] == 1 else f"{row.case['ranks']} ranks"


def differences(row: Row, more: str, less: str) -> list[float]:
    return [a - b for a, b in zip(row.us.get(more, ()), row.us.get(less, ()), strict=False)]


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks over gloo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 1 << 10, 64 << 10, 1 << 20], help="bytes over gloo")
    options = parser.parse_args()
    measures = {"C++": of_loops, "mode": of_modes, "gloo": over_gloo}
    rows = [row for part in options.parts for row in measures[part](options)]
    report(rows)
    if options.json:
        write_json(options.json, rows, command_line.recorded(options))


CANDIDATES = (
    "empty loop", "lock", "lock and check", "record", "tick", "tick, note", "tick, note, comparison",
    "group alone", "group, recorded", "exchange", "exchange, compared",
)  # fmt: skip
"""In the order of `What` in failure_loop.cpp."""
OF_ONE = CANDIDATES[:-2]
OF_TWO = CANDIDATES[-4:]


def make(name: str, settings: dict[str, Any]) -> LoopTeam | CallTeam:
    return LoopTeam(settings) if name == LOOPS else CallTeam(settings)


class LoopTeam:
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
        # Locks are cheaper in a process that never had a second thread; torch's ranks have several.
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def prepare(self, values: dict[str, Any]) -> list[str]:
        ranks = values["ranks"]
        self._idle = self.rank >= ranks
        if not self._idle:
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
    loaded = ctypes.CDLL(library)
    loaded.failure_loop_bytes.restype = ctypes.c_size_t
    return int(loaded.failure_loop_bytes(ranks))


CALL_BYTES = 512


class CallTeam:
    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.group = start_ours()
        self.rank, self.size = self.group.rank_in_group, self.group.world_size
        self._after = settings["after"]
        self._own = torch.full((CALL_BYTES,), self.rank, dtype=torch.uint8)
        self._told = torch.empty(self.size * CALL_BYTES, dtype=torch.uint8)

    def prepare(self, values: dict[str, Any]) -> list[str]:
        self._x = torch.zeros(values["bytes"] // 4)
        self._told.fill_(self.size)
        calls = self._over_gloo() if values["part"] == "gloo" else self._over_shared_memory()
        self._calls = {name + self._after: call for name, call in calls.items()}
        return list(self._calls)

    def _over_shared_memory(self) -> dict[str, Callable[[Tensor], Tensor]]:
        return {
            "op, in place": ours_by_op(self.group, "all_reduce_"),
            "all_reduce": self.group.all_reduce,
            "record in Python": self._record,
            EXCHANGE: self._exchange,
        }

    def _over_gloo(self) -> dict[str, Callable[[Tensor], Tensor]]:
        def of_torch(x: Tensor) -> Tensor:
            dist.all_reduce(x, group=self.group.cpu_group)
            return x

        return {
            "torch.distributed": of_torch,
            "all_reduce": self.group.all_reduce,
            "all_reduce_": self.group.all_reduce_,
        }

    def _record(self, x: Tensor) -> Tensor:
        self.group.route.note("all_reduce_", x).ended_s = time.monotonic()
        return x

    def _exchange(self, x: Tensor) -> Tensor:
        self.group.cpu_group._allgather_base(self._told, self._own).wait()
        return x

    def check(self, name: str) -> str | None:
        x = (torch.arange(self._x.numel()) % 7 + self.rank).float()
        expected = sum((torch.arange(self._x.numel()) % 7 + rank).float() for rank in range(self.size))
        with torch.inference_mode():
            try:
                y = self._calls[name](x)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        if name.startswith("record"):
            return self._unrecorded(name)
        if name.startswith(EXCHANGE):
            ranks = torch.arange(self.size, dtype=torch.uint8).repeat_interleave(CALL_BYTES)
            return None if torch.equal(self._told, ranks) else f"{name}: not every rank's bytes have come"
        return None if torch.equal(y, expected) else f"{name} of {list(x.shape)} is wrong on rank {self.rank}"

    def _unrecorded(self, name: str) -> str | None:
        last = self.group.route.operations()[-1]
        found = (last.name, last.shape, last.sequence, bool(last.ended_s), bool(last.site))
        wanted = ("all_reduce_", tuple(self._x.shape), self.group.route.sequence, True, self.group.route.in_debug_mode)
        return None if found == wanted else f"{name}: {found} is in the ring instead of {wanted}"

    def run(self, name: str, calls: int) -> Timing:
        call, x = self._calls[name], self._x
        with torch.inference_mode():
            return timed(lambda: call(x), calls)


if __name__ == "__main__":
    main()
