from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_state.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
PROGRAM = """
import parallel_state as ps
from parallel_state.startup import rendezvous
rendezvous._WARN_S = 0.5
ps.init_distributed_environment()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _rank(rank: int, port: int) -> subprocess.Popen[str]:
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "PARALLEL_STATE_START_TIMEOUT_S": DEADLINE_S, "PYTHONPATH": ROOT,
    }  # fmt: skip
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.PIPE, text=True)


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"the process ended without {text!r}")


@pytest.mark.slow
def test_the_log_and_live_debug_name_the_missing_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    ranks = {rank: _rank(rank, port) for rank in (0, 2)}
    try:
        line = _read_until(ranks[0], "for ranks [1, 3] of 4 at")
        assert re.search(
            rf"rank 0 of 4 has waited \d+ s for ranks \[1, 3\] of 4 at 127\.0\.0\.1:{port} .*, listening at \S+:\d+; "
            rf"it gives up after {DEADLINE_S} s",
            line,
        )
        for rank in (0, 2):
            for _ in range(20):
                assert main(["debug", "--live", str(ranks[rank].pid)]) == 0
                out = capsys.readouterr().out
                if "waiting for other ranks" not in out:
                    break
                time.sleep(0.2)
            assert out.startswith("4 ranks, 2 of them answered on this host\n")
            for each in (0, 2):
                assert f"rank {each} (pid {ranks[each].pid}) is at start, waiting for ranks [1, 3] of 4, at " in out
            assert "rank 1 has not arrived" in out and "rank 3 has not arrived" in out
        for process in ranks.values():
            process.send_signal(signal.SIGSTOP)
        assert main(["debug", "--live", str(ranks[2].pid)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"no rank of '{ranks[2].pid}' answered within ") and "stopped by a signal" in said
    finally:
        for process in ranks.values():
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_without_rank_0_the_next_rank_of_the_host_says_so() -> None:
    process = _rank(1, free_port())
    try:
        assert "rank 1 of 4 has waited" in _read_until(process, "s for rank 0 at")
    finally:
        process.kill()
        process.communicate()
