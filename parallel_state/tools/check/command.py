"""`python -m parallel_state check`: tests whether a job will work here, and how fast.

    python -m parallel_state check                                    alone: starts local ranks itself
    srun … python -m parallel_state check --tp 8 --pp 2               under a launcher, in place of the program
    python -m parallel_state check --rank 0 --size 4 --local-rank 0 --address n1:20000     by hand, once for each rank

Checks launcher, names, interfaces, ports, clocks, versions, limits, cores and GPUs of all ranks. Measures the links
between hosts, then starts the layout and sends traffic through all of its groups. Under a launcher one rank prints the
report.

The exit code is the same on every rank: 0 without warnings or errors, 1 with warnings, 2 with errors (also for invalid
options).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from device_communicators.base.errors import LayoutError, SettingError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.base.interrupts import signals_wait
from parallel_state.layout.axes import AXES
from parallel_state.startup import environment
from parallel_state.tools.arguments import PROGRAM, add_json, command_parser, positive, require_writable
from parallel_state.tools.plan.command import add_sizes

_LEAST_S = 5.0
_GRACE_S = 15.0
"""Seconds after --timeout at which a hanging rank exits."""


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.timeout < _LEAST_S:
        parser.error(f"--timeout must be at least {_LEAST_S:g} seconds, but is {chosen.timeout:g}")
    given = {axis.name: getattr(chosen, axis.name) for axis in AXES if axis.size_parameter}
    sizes = {name: size for name, size in given.items() if size is not None}
    _export_place(parser, chosen)
    place = _detect()
    if place is not None and place.world_size == (place.local_world_size or place.world_size):
        require_writable(parser, chosen.json)  # on several hosts the path may exist only on rank 0's
    with signals_wait():
        from parallel_state.tools.check import session  # needs torch
        from parallel_state.tools.check.report import show

    options = session.Options(sizes, chosen.order, chosen.quick, chosen.timeout)
    if place is None or place.source != "single":
        if chosen.ranks is not None:
            parser.error("--ranks can't be used under a launcher, which sets the number of ranks")
        _exit_after(chosen.timeout + _GRACE_S)
        outcome = session.Session(options, began).run()
        show(parser, chosen, outcome)
        sys.stdout.flush()
        sys.stderr.flush()
        if not outcome.met or outcome.exit_code:
            os._exit(outcome.exit_code)  # a thread may still be blocked and would delay the exit
        return outcome.exit_code
    try:
        ranks = chosen.ranks or session.ranks_for(sizes, chosen.order)
    except LayoutError as error:
        parser.error(str(error))
    if ranks > session.MOST_RANKS:
        parser.error(f"--ranks must be from 1 to {session.MOST_RANKS}, but is {ranks}")
    outcome = session.run_locally(ranks, options)
    show(parser, chosen, outcome)
    return outcome.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("check", "[options]", __doc__)
    parser.add_argument("--quick", action="store_true", help="use fewer sizes and repetitions")
    parser.add_argument("--ranks", type=positive, metavar="N", help="local ranks to start; default: as "
                        "many as the sizes need, else one per GPU, else 2 to 4 by the number of cores")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="time limit; default: 30")
    parser.add_argument("--order", help="order of the axes, as for `plan` and initialize_model_parallel")
    add_sizes(parser)
    place = parser.add_argument_group("by hand", "for a rank that no launcher starts; replaces the variables")
    place.add_argument("--rank", type=int, metavar="R")
    place.add_argument("--size", type=int, metavar="N", help="number of ranks")
    place.add_argument("--local-rank", type=int, metavar="L", help="index of the rank on this host, from 0")
    place.add_argument("--address", metavar="HOST:PORT", help="address of rank 0")
    add_json(parser.add_argument_group("output"))
    return parser


def _export_place(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    given = (chosen.rank, chosen.size, chosen.local_rank, chosen.address)
    if given == (None,) * 4:
        return
    host, _, port = (chosen.address or "").rpartition(":")
    if None in given or not host:
        parser.error("--rank, --size, --local-rank and --address HOST:PORT must be given together")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(zip(names, map(str, (*given[:3], host.strip("[]"), port)), strict=True))


def _detect() -> environment.ProcessEnvironment | None:
    try:
        return environment.detect(rendezvous=False)
    except SettingError:
        return None


def _exit_after(limit_s: float) -> None:
    from parallel_state.tools.check.facts import ERROR, EXIT_CODES

    def end() -> None:
        time.sleep(limit_s)
        print(f"{PROGRAM} check: this rank didn't finish within {limit_s:g} s and exits", file=sys.stderr, flush=True)
        os._exit(EXIT_CODES[ERROR])

    HelperThread("check-limit", end).start()
