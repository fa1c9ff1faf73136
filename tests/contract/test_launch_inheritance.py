from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.programs import FORK_SERVERS, Program

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
pytestmark = pytest.mark.slow

PREAMBLE = """
import logging, multiprocessing, os, resource, signal, threading, time
import parallel_state as ps
from tests.contract.test_launch_inheritance import child, state, stubborn, zero
"""


def zero() -> int:
    return 0


def child() -> int:
    return subprocess.run(["false"], check=False).returncode


def stubborn() -> None:
    time.sleep(60)


def state() -> list[Any]:
    mask = os.umask(0)
    os.umask(mask)
    blocked = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    return [mask, sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_NOFILE)[0], blocked]


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = Program(FORK_SERVERS + PREAMBLE + code, environment)
    out, err = ran.communicate(DEADLINE_S)
    assert ran.returncode == 0, out + err
    return out + err


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("before", [
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})",
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
], ids=["blocked", "ignored"])  # fmt: skip
def test_sigchld_of_the_launcher(method: str, before: str) -> None:
    """Launch has no timeout here, so a lost SIGCHLD would hang."""
    out = run(f"{before}\nprint(ps.launch(child, nproc=2, start_method='{method}'))\n"
              "print('handler', signal.getsignal(signal.SIGCHLD).name, 'mask', "
              "sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))")  # fmt: skip
    assert "[1, 1]" in out
    blocked = "pthread" in before
    assert f"handler {'SIG_DFL' if blocked else 'SIG_IGN'} mask {[int(signal.SIGCHLD)] if blocked else []}" in out


def test_a_fork_server_of_the_program_that_has_sigchld_blocked() -> None:
    out = run(
        "logging.basicConfig()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})\n"
        "multiprocessing.set_forkserver_preload(['json'])\n"
        "multiprocessing.forkserver.ensure_running()\n"
        "print(ps.launch(zero, nproc=2))"
    )
    assert "[0, 0]" in out and out.count("has SIGCHLD blocked") == 1


def test_sigchld_ignored_in_a_thread_that_launches() -> None:
    out = run(
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "def start():\n"
        "    try: ps.launch(zero, nproc=2)\n"
        "    except ps.LaunchError as error: print('LaunchError', error)\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join()"
    )
    assert "LaunchError" in out and "this process ignores SIGCHLD" in out


@pytest.mark.parametrize("before", [
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})", "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
], ids=["blocked", "ignored"])  # fmt: skip
def test_ranks_are_stopped_by_sigterm_though_the_launcher_does_not_heed_it(before: str) -> None:
    out = run(
        f"{before}\n"
        "started = time.monotonic()\n"
        "try: ps.launch(stubborn, nproc=2, timeout=2, grace=40)\n"
        "except ps.LaunchError as error:\n"
        "    print('stopped' if 'still running' in str(error) and time.monotonic() - started < 30 else error)"
    )
    assert out.endswith("stopped\n"), out


def test_both_start_methods_hand_over_what_the_launcher_is_now() -> None:
    out = run(
        "first = ps.launch(state, nproc=2)\n"
        "os.umask(0o027); os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (777, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "forked, spawned = (ps.launch(state, nproc=2, start_method=each) for each in ('forkserver', 'spawn'))\n"
        "print('equal' if forked == spawned == [state(), state()] != first else (state(), forked, spawned))"
    )
    assert "equal" in out, out
