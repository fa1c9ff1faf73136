from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.clusters.cluster import JOB, Cluster, Command
from tests.clusters.launchers import PORT, logs, torchrun
from tests.clusters.test_launchers import told

pytestmark = pytest.mark.slow

DEADLINE_S = 180.0


def _agent(cluster: Cluster, host: int, program: list[str]) -> Command:
    options = ["--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-id", "elastic", "--rdzv-endpoint", f"n1:{PORT}", "--rdzv-conf", "last_call_timeout=1"]
    # Agents that share their store with ranks announce its address in the first round only, so later hosts would wait
    # forever (torch 2.13). With this setting rank 0 serves each round's store.
    return torchrun(cluster, host, options, program, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def _wait_for(cluster: Cluster, size: int) -> None:
    until = time.monotonic() + DEADLINE_S
    while f"{size}\n" not in _sizes(cluster):
        assert time.monotonic() < until, f"no world of {size}\n{logs(cluster)}"
        time.sleep(0.1)


def _sizes(cluster: Cluster) -> list[str]:
    file = cluster.folder / "sizes"
    return file.read_text().splitlines(keepends=True) if file.exists() else []


def test_hosts_that_join_one_by_one(hosts_can_be: None, tmp_path: Path) -> None:
    """`--nnodes 1:3`: each new host makes all ranks meet again in a larger world."""
    with Cluster(tmp_path, 3) as cluster:
        program = [*JOB, str(tmp_path), "--until", "3"]
        agents = []
        for host in range(3):
            agents.append(_agent(cluster, host, program))
            _wait_for(cluster, host + 1)
        codes = [agent.end(DEADLINE_S).code for agent in agents]
        assert codes == [0] * 3, logs(cluster)
        assert [each["sums"][0] for each in told(cluster, range(3)).values()] == [3.0] * 3
    assert [int(size) for size in _sizes(cluster)] == sorted(int(size) for size in _sizes(cluster))
