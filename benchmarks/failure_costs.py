"""What it costs a call that failures can be told: its record, the checks, the comparison of calls between ranks.

    python benchmarks/failure_costs.py                           all parts
    python benchmarks/failure_costs.py --parts C++ --json found.json

*C++*: what the registered ops carry beside the group's own collective, piece by piece and as a whole, as the difference
of two loops that take turns; nanoseconds. In normal mode that should be less than 100. *mode*: an all-reduce of 8 KiB
over shared memory, by two ranks, in normal and in debug mode, which may take 0.5 ms more. *gloo*: where there is no
shared memory, calls are compared in an exchange of their own, in which small tensors travel; beside torch.distributed
on the same process group, by two and by four ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from failure_costs_loop import bytes_of
from measure import options as shared
from measure.report import p50, print_rows, print_table, size_name, write_json
from measure.rounds import Row, measure_all
from measure.teams import Team, started

from device_communicators.cpu import native_build

PARTS = ("C++", "mode", "gloo")
MOST_CALLS = 1_000_000
BYTES = 8 << 10
TARGET_NS = 100
DEBUG = ", debug mode"
EXCHANGE = "gloo's all_gather of 512 bytes"
"""By which ranks compare their calls in debug mode."""
PIECES = {
    "record": ("record", "empty loop"),
    "check for an earlier failure": ("lock and check", "lock"),
    "note of the call": ("tick, note", "tick"),
    "comparison, a peer": ("tick, note, comparison", "tick, note"),
}
"""What is added, and the two loops that differ by it."""
WHOLES = {"call": ("group, recorded", "group alone"), "exchange": ("exchange, compared", "exchange")}


@contextlib.contextmanager
def compiled() -> Iterator[str]:
    """The loops, together with the library's sources."""
    compiler = native_build.find_compiler()
    if compiler is None:
        raise SystemExit("a C++ compiler is needed; --parts mode gloo does without")
    plain = native_build.plain_recipe()
    loop = Path(__file__).with_name("failure_loop.cpp")
    flags = (*plain.flags, f"-I{plain.sources[0].parent}")
    with tempfile.TemporaryDirectory(prefix="failure_costs_") as folder:
        library = Path(folder) / "loop.so"
        recipe = native_build.Recipe("the loops", library.name, (*plain.sources, loop), flags)
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
        with started([Team("C++", "failure_costs_loop", 2, settings)]) as teams:
            return measure_all(teams, cases, shared.plan(options))


def of_modes(options: argparse.Namespace) -> list[Row]:
    teams = []
    for after, value in (("", "0"), (DEBUG, "1")):
        settings = {"pin": not options.no_pin, "after": after}
        environment = {"PARALLEL_STATE_DEBUG": value, "PARALLEL_STATE_SHARED_MEMORY": "on"}
        teams.append(Team(f"shared memory{after}", "failure_costs_torch", 2, settings, environment=environment))
    with started(teams) as there:
        return measure_all(there, [{"part": "mode", "ranks": 2, "bytes": BYTES}], shared.plan(options))


def over_gloo(options: argparse.Namespace) -> list[Row]:
    rows = []
    for ranks in options.ranks:
        settings = {"pin": not options.no_pin, "after": ""}
        environment = {"PARALLEL_STATE_DEBUG": "0", "PARALLEL_STATE_SHARED_MEMORY": "off"}
        cases = [{"part": "gloo", "ranks": ranks, "bytes": size} for size in options.sizes]
        with started([Team("gloo", "failure_costs_torch", ranks, settings, environment=environment)]) as teams:
            rows += measure_all(teams, cases, shared.plan(options))
    return rows


def report(rows: Sequence[Row]) -> None:
    parts = {part: [row for row in rows if row.case["part"] == part] for part in PARTS}
    print_rows("C++", parts["C++"], ranks_of, [])
    if parts["C++"]:
        print_costs(*parts["C++"])
    pairs = [(name + DEBUG, name) for name in ("op, in place", "all_reduce", "record in Python")]
    against_gloo = ("op, in place" + DEBUG, EXCHANGE + DEBUG)
    title = "all_reduce, 2 ranks, shared memory"
    print_rows(title, parts["mode"], lambda row: size_name(row.case["bytes"]), [*pairs, against_gloo])
    for row in parts["mode"]:
        added = {normal: differences(row, debug, normal) for debug, normal in pairs}
        print_added("what debug mode adds to a call, us", added, 1)
    for ranks in dict.fromkeys(row.case["ranks"] for row in parts["gloo"]):
        chosen = [row for row in parts["gloo"] if row.case["ranks"] == ranks]
        pairs = [(name, "torch.distributed") for name in ("all_reduce", "all_reduce_")]
        print_rows(f"all_reduce, {ranks} ranks, gloo", chosen, lambda row: size_name(row.case["bytes"]), pairs)


def print_costs(one: Row, two: Row) -> None:
    """Nanoseconds that failure handling adds to a call in normal mode; the sum is that of two ranks."""
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
    """Median and quartiles: what lies on both sides of zero isn't to be told from noise."""
    lines = []
    for name, us in added.items():
        if us:
            low, _, high = statistics.quantiles(us, n=4)
            lines.append((name, [p50(us) * scale, low * scale, high * scale]))
    print_table(title, ["p50", "p25", "p75"], lines)


def ranks_of(row: Row) -> str:
    return "1 rank" if row.case["ranks"] == 1 else f"{row.case['ranks']} ranks"


def differences(row: Row, more: str, less: str) -> list[float]:
    """Round by round: what disturbs a whole round disturbs both."""
    return [a - b for a, b in zip(row.us.get(more, ()), row.us.get(less, ()), strict=False)]


def main() -> None:
    parser = shared.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="over gloo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 1 << 10, 64 << 10, 1 << 20], help="over gloo")
    options = parser.parse_args()
    measures = {"C++": of_loops, "mode": of_modes, "gloo": over_gloo}
    rows = [row for part in options.parts for row in measures[part](options)]
    report(rows)
    if options.json:
        write_json(options.json, rows, shared.recorded(options))


if __name__ == "__main__":
    main()
