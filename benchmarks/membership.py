"""Times changes of a group's members: a rank exits, the others continue without it, a new process joins.

    python benchmarks/membership.py                        4 -> 3 -> 4 ranks, 20 rounds: a minute; needs torch >= 2.15

`SIGKILL` rounds, of this library only, kill a random rank during traffic. The survivors' errors must name it. `first
right collective` is the time from the SIGKILL until the last survivor has a right result in the new group.

In `abort` rounds, of gloo and this library, one rank exits and all ranks abort the group between two calls: after a
SIGKILL, gloo's survivors would wait until their timeouts. Times count from the abort, without gloo's exchange of
handles through files.

`reconfigure` creates the survivors' group, `join` adds a waiting process. The slowest rank's time counts. torch's
flight recorder is off, because a survivor would import torch's compiler to write files.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from device_communicators.c10d import creation
from parallel_state.tools.bench.report import circumstances
from tests.failure.changing import IS_THERE, kill_and_replace, latest_by_round, rounds_in
from tests.failure.ranks import Ranks

SET, SET_S = 5, 300.0
FIGURES = {
    "error of the call": "error_s",
    "first right collective": "right_s",
    "reconfigure": "reconfigure_s",
    "join": "join_s",
    "right collective after join": "joined_s",
}
MEDIAN_S, MOST_S = 0.2, 1.0
"""Goals for the first right collective after a SIGKILL."""


class Candidate(NamedTuple):
    name: str
    backend: str
    polite: bool


CANDIDATES = (
    Candidate("SIGKILL", "parallel_state", False),
    Candidate("abort", "parallel_state", True),
    Candidate("gloo, abort", "gloo", True),
)


def measure(candidate: Candidate, size: int, rounds: int) -> dict[str, list[float]]:
    pool, seed = Ranks(size + rounds), secrets.randbits(32)
    with tempfile.TemporaryDirectory(prefix="membership_") as folder:
        try:
            arguments = (folder, size, rounds, candidate.backend, seed, candidate.polite)
            pool.survivors(kill_and_replace, *arguments, timeout_s=SET_S)
        finally:
            pool.kill()
        found = rounds_in(Path(folder), rounds)
    for one in (one for each in found for one in each):
        if not candidate.polite and one.victim not in one.suspects:
            raise ValueError(f"rank {one.victim} was killed, but an error of {one.error} named {one.suspects}")
    return {title: latest_by_round(found, field) for title, field in FIGURES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not IS_THERE:
        raise SystemExit(f"this needs torch >= 2.15, but this is torch {torch.__version__}")
    creation.load()  # compiles before the ranks' deadlines start
    samples = {each.name: {title: list[float]() for title in FIGURES} for each in CANDIDATES}
    for begun in range(0, options.rounds, SET):
        for candidate in CANDIDATES:
            found = measure(candidate, options.ranks, min(SET, options.rounds - begun))
            for title, seconds in found.items():
                samples[candidate.name][title] += seconds
    medians = {
        name: {title: statistics.median(each) for title, each in found.items()} for name, found in samples.items()
    }
    change = f"{options.ranks} -> {options.ranks - 1} -> {options.ranks}"
    print(f"{change} ranks, {options.rounds} rounds; medians, most, in ms")
    for name, found in samples.items():
        shown = {title: each for title, each in found.items() if any(each)}
        print(
            f"{name}: " + "; ".join(f"{t} {1e3 * medians[name][t]:.1f}, {1e3 * max(e):.1f}" for t, e in shown.items())
        )
    ratios = {title: medians["abort"][title] / medians["gloo, abort"][title] for title in list(FIGURES)[1:]}
    print("ours / gloo after an abort: " + ", ".join(f"{title} {ratio:.2f}" for title, ratio in ratios.items()))
    first = samples["SIGKILL"]["first right collective"]
    met = statistics.median(first) <= MEDIAN_S and max(first) <= MOST_S
    print(f"the goal of {MEDIAN_S} s (median) and {MOST_S} s (most) after a SIGKILL is {'met' if met else 'NOT met'}")
    if options.json:
        content = {"ranks": options.ranks, "ratios": ratios, "samples_s": samples, "circumstances": circumstances()}
        options.json.write_text(json.dumps(content, indent=1, default=str))


if __name__ == "__main__":
    main()
