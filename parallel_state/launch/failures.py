"""Raises the error of a launch: the earliest failure of its ranks, or their timeout."""

from __future__ import annotations

import signal

from device_communicators.base.errors import LaunchError
from parallel_state.launch.config import LaunchConfig
from parallel_state.launch.processes import Rank
from parallel_state.launch.worker import Report

_CRASH_S = 1.0  # a crash is detected at most this late
_CRASHES = tuple(-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))

_Failure = tuple[float, Rank, Report | None]


def raise_failure(ranks: list[Rank], running: list[Rank], stopped_at: float, config: LaunchConfig) -> None:
    failures: list[_Failure] = []
    for rank in ranks:
        report = rank.report()
        if report is not None and report.kind in ("error", "interrupted") and report.time < stopped_at:
            failures.append((report.time, rank, report))
        elif rank.ended is not None and rank.failed:
            # Other ranks may report errors that a crash caused before it is detected.
            early_s = _CRASH_S if rank.exit_code in _CRASHES else 0.0
            failures.append((rank.ended - early_s, rank, None))
    if not failures and not running:
        return
    if not failures:
        names = ", ".join(str(rank.rank) for rank in running)
        places = "".join(f"\nwhere rank {rank.rank} was:\n{rank.stacks()}" for rank in running[:8])
        raise LaunchError(
            f"launch timed out after {config.timeout} s: of {config.world_size} ranks {names} were still running "
            f"and have been stopped{places}",
            rank=running[0].rank,
        )
    failures.sort(key=lambda failure: failure[0])
    _move_blamed_first(failures)
    (_, first, report_of_first), *later = failures
    if report_of_first is not None and report_of_first.kind == "interrupted":
        raise KeyboardInterrupt
    text = f"{first.explain()} (world size {config.world_size})"
    if later:
        text += "\nlater failures: " + "; ".join(rank.explain()[:200] for _, rank, _ in later)
    where, exit_code = first.stacks(), first.exit_code
    if report_of_first is not None:
        where, exit_code = report_of_first.text, report_of_first.exit_code
    raise LaunchError(text + (f"\nwhere the rank was:\n{where}" if where else ""), rank=first.rank, exit_code=exit_code)


def _move_blamed_first(failures: list[_Failure]) -> None:
    blamed = failures[0][2].suspect_ranks if failures[0][2] is not None else ()
    for index, (_, rank, report) in enumerate(failures):
        if report is None and rank.rank in blamed:
            failures.insert(0, failures.pop(index))
            return
