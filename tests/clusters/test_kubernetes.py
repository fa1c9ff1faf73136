"""Pods of JobSet and LeaderWorkerSet: their variables, and names that the name server has only once a pod is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from tests.clusters.cluster import JOB, PYTHON, Cluster, Command, shell
from tests.clusters.launchers import PORT, logs
from tests.clusters.test_launchers import check, told

pytestmark = pytest.mark.slow

DEADLINE_S = 180.0
LATE_S = 4.0
LEADER = "job-0.service.default.svc.cluster.local"

TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", PORT]


def leader_worker_set(pod: int) -> tuple[dict[str, str], str]:
    """`leaderworkerset.sigs.k8s.io`: the variables that it sets, and a container's command."""
    variables = {"LWS_LEADER_ADDRESS": LEADER, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(pod)}
    options = '--nnodes "$LWS_GROUP_SIZE" --node-rank "$LWS_WORKER_INDEX" --master-addr "$LWS_LEADER_ADDRESS"'
    return variables, f"{shell(TORCHRUN)} {options}"


def job_set(pod: int) -> tuple[dict[str, str], str]:
    """`jobset.x-k8s.io`: an indexed Job, of which the command has the number of pods, and the leader's name by rule."""
    variables = {"JOB_COMPLETION_INDEX": str(pod), "JOBSET_NAME": "job", "REPLICATED_JOB_NAME": "workers"}
    return variables, f'{shell(TORCHRUN)} --nnodes 2 --node-rank "$JOB_COMPLETION_INDEX" --master-addr {LEADER}'


def py_torch_job(pod: int) -> tuple[dict[str, str], str]:
    """Kubeflow: torchrun's options as variables."""
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": str(pod), "PET_MASTER_ADDR": LEADER, "PET_MASTER_PORT": PORT}
    return {**variables, "PET_NPROC_PER_NODE": "2"}, shell(TORCHRUN[:3])


@pytest.mark.parametrize("kind", [leader_worker_set, job_set, py_torch_job], ids=lambda kind: kind.__name__)
def test_pods_under_torchrun(cluster: Cluster, kind: Callable[[int], tuple[dict[str, str], str]]) -> None:
    def pod(host: int) -> Command:
        variables, command = kind(host)
        words = shell([*JOB, str(cluster.folder)])
        return cluster.start(host, ["sh", "-c", f"exec {command} {words}"], **variables)

    _late_names(cluster, [pod(0), pod(1)], "torchrun")


def test_a_process_for_each_rank(cluster: Cluster) -> None:
    """Without torchrun, with the variables that its ranks would have; here the name is this library's to wait for."""
    pods = []
    for rank in range(4):
        place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": PORT}
        texts = {name: str(value) for name, value in place.items()}
        pods.append(cluster.start(rank // 2, [PYTHON, *JOB, str(cluster.folder)], MASTER_ADDR=LEADER, **texts))
    _late_names(cluster, pods, "torchrun", "does not resolve yet")


def _late_names(cluster: Cluster, pods: Sequence[Command], source: str, after: str = "") -> None:
    """The leader's name comes once a pod has said `after`; on its own host, as in a pod, it is there from the start."""
    names = f"127.0.0.1 localhost\n{cluster.addresses[0]} n1 {LEADER}\n{cluster.addresses[1]} n2\n"
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
