"""Runs the check in local ranks that it starts itself."""

from __future__ import annotations

import os
import re
import time

import msgspec

from device_communicators.base.errors import LayoutError, ParallelStateError
from parallel_state.launch.launcher import launch
from parallel_state.layout.resolution import resolve_layout
from parallel_state.tools.check import rules, system
from parallel_state.tools.check.evidence import Evidence
from parallel_state.tools.check.findings import ERROR, EXIT_CODES
from parallel_state.tools.check.session import Options, Outcome, Report, Session

MOST_RANKS = 64
_START_S = 15.0
"""Added to the launch timeout for local ranks to start and exit."""


def ranks_for(sizes: dict[str, int], order: str | None) -> int:
    """Returns the smallest number of ranks that the sizes fit; without sizes one per GPU, else 2 to 4 by the cores."""
    if not sizes:
        gpus = len(system.gpus().visible)
        return gpus if gpus > 1 else max(2, min(4, len(os.sched_getaffinity(0))))
    problem: LayoutError | None = None
    for ranks in range(1, MOST_RANKS + 1):
        try:
            resolve_layout(ranks, sizes, *filter(None, (order,)))
            return ranks
        except LayoutError as error:
            problem = problem or error
    raise problem or LayoutError("no number of ranks fits the sizes")


def run_local_rank(options: Options) -> tuple[int, bool, bytes]:
    """Runs one local rank. Returns exit code, whether the ranks met, and the report as JSON (empty without one)."""
    outcome = Session(options).run()
    return outcome.exit_code, outcome.met, b"" if outcome.report is None else msgspec.json.encode(outcome.report)


def run_locally(ranks: int, options: Options) -> Outcome:
    began = time.monotonic()
    try:
        ends = launch(
            run_local_rank, ranks, args=(options,), timeout=2 * options.timeout_s + _START_S, name="check"
        )  # fmt: skip
    except ParallelStateError as error:
        return Outcome(EXIT_CODES[ERROR], _not_launched(ranks, options, error, began))
    exit_code, met, content = next((end for end in ends if end[2]), ends[0])
    return Outcome(exit_code, msgspec.json.decode(content, type=Report) if content else None, met)


def _not_launched(ranks: int, options: Options, error: ParallelStateError, began: float) -> Report:
    facts = system.collect(time.monotonic() + 3.0)
    facts.place.world_size = ranks
    session = Session(options, began)
    session.facts = facts
    text = re.split(r"\nwhere (?:it|rank \d+) was:", str(error))[0].strip()
    facts.place.local_world_size = ranks
    evidence = Evidence([facts], ranks, options.sizes, options.order, met=False)
    found = [rules.finding("launch-failed", text, hosts=[facts.network.hostname]), *rules.judge(evidence)]
    return session.report(evidence, found)
