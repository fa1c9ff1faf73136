"""Rows 25 to 27 of docs/failures.md: a launcher that is interrupted or killed, a worker that fails, and one
that ignores SIGTERM."""

from __future__ import annotations

import os
import re
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import elapsed_checked
from tests.failure.launchers import program
from tests.failure.leftovers import descendants
from tests.failure.trials import median_of

DEADLINE_S = 60.0
GONE_S = 2.0
GRACE_S = 0.5


def _reduce_for_ever() -> None:
    group = ps.get_tp_group()
    group.barrier()
    os.write(1, f"{os.getpid()}\n".encode())
    while True:
        group.all_reduce(torch.ones(1000))


def _launch_for_ever() -> None:
    ps.launch(_reduce_for_ever, 4, tensor_model_parallel_size=4, timeout=DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name)
def test_row_25_launcher_gets_a_signal(number: signal.Signals) -> None:
    with ExitStack() as stack:
        launcher = stack.enter_context(program(_launch_for_ever))
        gone = [os.pidfd_open(int(line)) for line in launcher.lines(4, DEADLINE_S)]
        for descriptor in gone:
            stack.callback(os.close, descriptor)
        begin = time.monotonic()
        os.kill(launcher.pid, number)
        for descriptor in gone:
            left_s = begin + GONE_S - time.monotonic()
            assert select.select([descriptor], [], [], max(0.0, left_s))[0], f"a rank is there {GONE_S} s later"
        assert launcher.wait(DEADLINE_S) == -number
        assert launcher.said.count("Traceback") == (number == signal.SIGINT), launcher.said


def _fail_amid(how: str, noted: Path) -> None:
    group = ps.get_tp_group()
    for step in range(1_000_000):
        if step == 100 and group.rank == 2:
            noted.write_text(str(time.monotonic()), encoding="utf-8")
            if how == "sys.exit":
                sys.exit(1)
            if how == "os._exit":
                os._exit(1)
            os.kill(os.getpid(), signal.SIGSEGV)
        with elapsed_checked():
            group.all_reduce(torch.ones(1000))


def _timed_launch(function: Callable[..., None], *args: Any) -> tuple[ps.LaunchError, float]:
    with pytest.raises(ps.LaunchError) as caught:
        ps.launch(function, 4, args=args, tensor_model_parallel_size=4, timeout=DEADLINE_S, grace=GRACE_S)
    return caught.value, time.monotonic() - float(args[-1].read_text())


def _check_errors_of_others(error: ps.LaunchError) -> None:
    assert "PeerDiedError" in str(error) and "AssertionError" not in str(error), error


def assert_median(run: Callable[[], float], first_s: float, within_s: float) -> None:
    took_s = median_of(run, first_s, within_s)
    assert statistics.median(took_s) < within_s, took_s


@pytest.mark.parametrize(
    ("how", "exit_code", "words"),
    [
        ("sys.exit", 1, "SystemExit(1)"),
        ("os._exit", 1, "exit code 1 before the function returned"),
        ("segfault", -signal.SIGSEGV, "signal 11 (SIGSEGV)"),
    ],
)
def test_row_26_a_worker_exits_or_segfaults(how: str, exit_code: int, words: str, tmp_path: Path) -> None:
    before = descendants()
    error, took_s = _timed_launch(_fail_amid, how, tmp_path / "at")
    assert_median(lambda: _timed_launch(_fail_amid, how, tmp_path / "at")[1], took_s, GONE_S)
    assert (error.rank, error.exit_code) == (2, exit_code), error
    assert str(error).startswith("rank 2 (")
    assert words in str(error)
    _check_errors_of_others(error)
    assert "global rank 2 has ended" in str(error)
    assert len(descendants() - before) <= 2, "beside the fork server and its tracker"


def _refuse_to_end(noted: Path) -> None:
    group = ps.get_tp_group()
    if group.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    group.barrier()
    if group.rank == 3:
        noted.write_text(str(time.monotonic()), encoding="utf-8")
        raise ValueError("the reason")
    while True:
        if group.rank == 1:
            time.sleep(DEADLINE_S)
        with elapsed_checked():
            group.all_reduce(torch.ones(1000))


def test_row_27_a_worker_ignores_sigterm(tmp_path: Path) -> None:
    error, took_s = _timed_launch(_refuse_to_end, tmp_path / "at")
    assert re.match(r"rank 3 .* raised ValueError: the reason", str(error))
    assert error.rank == 3
    _check_errors_of_others(error)
    assert took_s > GRACE_S
    assert_median(lambda: _timed_launch(_refuse_to_end, tmp_path / "at")[1], took_s, GRACE_S + GONE_S)
