"""Row 58 of docs/failures.md: another service answers at MASTER_PORT. Each program is its own interpreter,
because a thread in torch's client would abort it at exit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import attempt
from tests.failure.worlds import SLACK_S
from tests.helpers.services import greets, hangs_up, is_silent, reads_lines, refuses, service

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
START_S = 4.0
THROUGH_TORCH = """
import torch.distributed as dist, parallel_state
dist.init_process_group("parallel_state", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
print("a world of", dist.get_world_size())
"""
AT_ONCE_S = 2.0


def start_world() -> None:
    told = attempt(ps.init_distributed_environment)
    print("took", told.seconds, flush=True)
    sys.exit(f"{told.kind}: {told.text}" if told.kind != "ok" else 0)


PROGRAM = f"from {__name__} import {start_world.__name__} as start; start()"


def program(code: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", code], encoding="utf-8", env=variables, **pipes)  # type: ignore[call-overload, no-any-return]


def ended(process: subprocess.Popen[str]) -> tuple[int, str, float]:
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"it hangs:\n{output}")
    took = next((line for line in output.splitlines() if line.startswith("took ")), "took nan")
    return process.returncode, output, float(took.split()[1])


def variables(port: int, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "",
        "PARALLEL_STATE_START_TIMEOUT_S": str(START_S),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.side_by_side
@pytest.mark.parametrize(
    ("answer", "told", "within_s"),
    [
        (greets, "SSH listens there", AT_ONCE_S),
        (refuses, "HTTP listens there", AT_ONCE_S),
        (reads_lines, "HTTP listens there", AT_ONCE_S),
        (hangs_up, "closes each connection without an answer", START_S + 1.0),
        (is_silent, "doesn't answer", START_S + 1.0),
    ],
    ids=["ssh", "http", "lines", "hangs up", "silent"],
)
def test_row_58_another_service_at_the_port(
    answer: Callable[[socket.socket], None], told: str, within_s: float
) -> None:
    with service(answer) as (_, port):
        code, output, took_s = ended(program(PROGRAM, variables(port, 1)))
    assert code == 1, output
    assert "RendezvousError: rank 1 of 2" in output and told in output and str(port) in output
    assert took_s < within_s + SLACK_S


@pytest.mark.slow
def test_row_58_rank_0_names_what_has_its_port() -> None:
    with service(greets) as (_, port):
        code, output, took_s = ended(program(PROGRAM, variables(port, 0)))
    assert code == 1, output
    assert f"must listen on 127.0.0.1:{port}" in output and "(SSH listens there" in output
    assert took_s < AT_ONCE_S + SLACK_S


def _programs_of_a_rank() -> dict[str, tuple[int, str]]:
    group = ps.get_tp_group()
    found = {}
    if group.rank == 0:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        started = {
            "rank 0": program(PROGRAM, {}),
            "rank 1": program(PROGRAM, {"RANK": "1", "LOCAL_RANK": "1"}),
            "of its own": program(THROUGH_TORCH.format(port=port), {}),
        }
        for name, process in started.items():
            code, output, took_s = ended(process)
            found[name] = code, output
            assert not took_s > AT_ONCE_S + SLACK_S, (name, took_s, output)
    assert group.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    return found


@pytest.mark.slow
def test_programs_that_a_rank_of_launch_starts() -> None:
    started = time.monotonic()
    found, _ = ps.launch(_programs_of_a_rank, nproc=2, tensor_model_parallel_size=2, timeout=2 * DEADLINE_S)
    code, output = found["of its own"]
    assert (code, output.splitlines()[-1]) == (0, "a world of 1"), output
    for name in ("rank 0", "rank 1"):
        code, output = found[name]
        assert code == 1 and "RendezvousError" in output and "the store of another launch" in output, output
        assert "unset RANK" in output
    assert time.monotonic() - started < DEADLINE_S


LATE = """
import sys, time, torch.distributed as dist
from datetime import timedelta
from device_communicators.base.helper_threads import Call

class Slow:
    def __del__(self):
        time.sleep(2.5)  # the interpreter's modules are taken apart

sys.slow = Slow()
Call(lambda: dist.HashStore().wait(["key"], timedelta(seconds=1)))
print("exits", flush=True)
sys.exit(3)
"""


@pytest.mark.slow
def test_a_thread_that_returns_from_torch_while_the_interpreter_exits_ends_no_process() -> None:
    code, output, _ = ended(program(LATE, {}))
    assert "exits" in output
    assert code == 3, output
