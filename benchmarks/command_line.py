"""Gives the command line that all scripts in `benchmarks/` share."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallel_state.tools.bench.peers import DEFAULT, SETUP, Peers
from parallel_state.tools.bench.report import recorded
from parallel_state.tools.bench.rounds import Plan

__all__ = ["parser", "peers", "plan", "recorded"]


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=30, help="rounds of each case; slow cases get fewer")
    found.add_argument("--round-ms", type=float, default=5.0, help="what a round of one candidate should take")
    found.add_argument("--case-s", type=float, default=8.0, help="most seconds for a case, about")
    found.add_argument("--peers", type=Path, default=DEFAULT, help="folder where the peers were set up")
    found.add_argument("--no-peers", action="store_true", help="this library and torch.distributed only")
    found.add_argument("--no-pin", action="store_true", help="don't give each rank a core of its own")
    found.add_argument("--json", type=Path, help="raw samples, machine, commit and versions")
    return found


def plan(options: argparse.Namespace) -> Plan:
    return Plan(rounds=options.rounds, round_s=options.round_ms / 1e3, case_s=options.case_s)


def peers(options: argparse.Namespace) -> Peers:
    """Returns the peers that are there, and names the missing ones."""
    if options.no_peers:
        return Peers(Path("/nonexistent"), with_own_mpi=False)
    found = Peers(options.peers.resolve())
    if found.missing():
        print(f"without {', '.join(found.missing())}: {SETUP}")
    return found
