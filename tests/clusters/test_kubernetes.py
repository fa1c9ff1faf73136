"""Jobs in pods whose names resolve only after the pods have started."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from tests.clusters.cluster import JOB, PYTHON, Cluster, Command
from tests.clusters.launchers import (
    LEADER,
    PORT,
    Pod,
    job_set,
    leader_worker_set,
    logs,
    names_with_leader,
    pod,
    py_torch_job,
)
from tests.clusters.test_launchers import check, told

pytestmark = pytest.mark.slow

DEADLINE_S = 180.0
LATE_S = 4.0


@pytest.mark.parametrize("kind", [leader_worker_set, job_set, py_torch_job], ids=lambda kind: kind.__name__)
def test_pods_under_torchrun(cluster: Cluster, kind: Pod) -> None:
    program = [*JOB, str(cluster.folder)]
    _late_names(cluster, [pod(cluster, kind, host, program) for host in range(2)], "torchrun", "cannot be retrieved")


def test_a_process_for_each_rank(cluster: Cluster) -> None:
    pods = []
    for rank in range(4):
        place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": PORT}
        texts = {name: str(value) for name, value in place.items()}
        pods.append(cluster.start(rank // 2, [PYTHON, *JOB, str(cluster.folder)], MASTER_ADDR=LEADER, **texts))
    _late_names(cluster, pods, "torchrun", "does not resolve yet")


def _late_names(cluster: Cluster, pods: Sequence[Command], source: str, after: str) -> None:
    """The leader's host resolves its own name at once, other hosts only after a pod has printed `after`."""
    names = names_with_leader(cluster)
    cluster.write_names(names, [0])
    time.sleep(LATE_S)
    until = time.monotonic() + DEADLINE_S
    while not any(after in pod.output() for pod in pods):
        assert time.monotonic() < until, logs(cluster)
        time.sleep(0.1)
    cluster.write_names(names, [1])
    codes = [pod.end(DEADLINE_S).code for pod in pods]
    assert not any(codes), logs(cluster)
    check(told(cluster), source)
