from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from device_communicators.base.errors import SettingError
from parallel_state import ProcessEnvironment
from parallel_state.startup.environment import LOOPBACK, detect
from tests.clusters.cluster import JOB, PYTHON, Cluster, Ended, shell
from tests.clusters.install import missing
from tests.clusters.launchers import logs
from tests.clusters.slurm import Slurm, sbatch
from tests.clusters.test_launchers import check, told
from tests.failure.leftovers import nothing_left_after

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def slurm(hosts_can_be: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if problem := missing("slurm"):
        pytest.skip(problem)
    with nothing_left_after(5.0), Cluster(tmp_path_factory.mktemp("slurm"), 3) as cluster, Slurm(cluster):
        yield cluster


class Tasks:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.program = folder / "tell.sh"
        # A unique name with the step, because several tasks can have one PROCID.
        self.program.write_text(f'#!/bin/sh\nenv -0 > {folder}/"$SLURM_STEP_ID.$SLURM_PROCID.$(hostname).$$"\n')
        self.program.chmod(0o755)

    def srun(self, *options: str) -> Ended:
        return self.cluster.run(0, ["srun", *options, str(self.program)], DEADLINE_S)

    def sbatch(self, options: Sequence[str], script: str) -> Ended:
        return sbatch(self.cluster, self.folder, options, script).end(DEADLINE_S)

    def environments(self) -> list[dict[str, str]]:
        found = []
        for file in sorted(self.folder.iterdir()):
            if file.name.count(".") == 3:
                pairs = (line.partition("=") for line in file.read_text().split("\0") if line)
                found.append({name: value for name, _, value in pairs})
        return found

    def places(self, **variables: str) -> list[ProcessEnvironment]:
        return sorted((detect({**each, **variables}) for each in self.environments()), key=lambda place: place.rank)


@pytest.fixture
def tasks(slurm: Cluster, tmp_path: Path) -> Tasks:
    return Tasks(slurm, tmp_path)


def _expected(counts: Sequence[int], master: str = "n1") -> list[ProcessEnvironment]:
    """Returns each rank's place, for `counts` ranks on each host. The port is 0: `_same` checks the ports."""
    size, places = sum(counts), []
    for count in counts:
        for local_rank in range(count):
            places.append(ProcessEnvironment(len(places), local_rank, size, count, master, 0, "slurm"))
    return places


def _same(found: Sequence[ProcessEnvironment], counts: Sequence[int], master: str = "n1") -> None:
    assert len({place.master_port for place in found}) == 1
    assert [replace(place, master_port=0) for place in found] == _expected(counts, master)


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (["-N", "2", "--ntasks-per-node", "2"], [2, 2]),
        (["-N", "2", "-n", "3"], [2, 1]),
        (["-N", "3", "-n", "7"], [5, 1, 1]),
        (["-N", "2", "-n", "4", "--mpi=pmi2"], [3, 1]),
        (["-N", "2", "-n", "4", "--mpi=pmix"], [3, 1]),
        (["-N", "2", "--ntasks-per-node", "2", "-c", "3"], [2, 2]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_step_of_its_own(tasks: Tasks, options: list[str], counts: list[int]) -> None:
    if "--mpi=pmix" in options and (problem := missing("pmix")):
        pytest.skip(problem)
    tasks.srun(*options).well()
    _same(tasks.places(), counts)


def test_ranks_dealt_out_in_turn(tasks: Tasks) -> None:
    tasks.srun("-N", "2", "--ntasks-per-node", "2", "--distribution=cyclic").well()
    places = tasks.places()
    assert [(place.rank, place.local_rank, place.local_world_size) for place in places] == [
        (0, 0, 2), (1, 0, 2), (2, 1, 2), (3, 1, 2),
    ]  # fmt: skip
    assert {place.master_addr for place in places} == {"n1"}


def test_an_arbitrary_order_of_nodes(tasks: Tasks, tmp_path: Path) -> None:
    """Rank 0 isn't on the first node of SLURM's sorted list, and no variable names its node."""
    (tmp_path / "order").write_text("n2\nn1\nn1\n")
    tasks.srun("-n", "3", "--distribution=arbitrary", "-w", str(tmp_path / "order")).well()
    hosts = {each["SLURM_PROCID"]: each["SLURMD_NODENAME"] for each in tasks.environments()}
    assert hosts == {"0": "n2", "1": "n1", "2": "n1"}
    for each in tasks.environments():
        with pytest.raises(SettingError, match=r"arbitrary.*set MASTER_ADDR"):
            detect(each)
    assert {place.master_addr for place in tasks.places(MASTER_ADDR="n2")} == {"n2"}


def test_one_task(tasks: Tasks) -> None:
    tasks.srun("-N", "1", "-n", "1").well()
    (place,) = tasks.places()
    assert (place.rank, place.world_size, place.master_addr, place.source) == (0, 1, LOOPBACK, "slurm")


def test_steps_of_a_batch_job(tasks: Tasks) -> None:
    tasks.sbatch(
        ["-N", "3", "--ntasks-per-node", "2"],
        f"srun {tasks.program}\nsrun -N 2 -n 3 {tasks.program}\n"
        f"srun --exact -N 1 -n 2 {tasks.program} &\nsrun --exact -N 1 -n 2 {tasks.program} &\nwait\n",
    ).well()
    steps: dict[str, list[ProcessEnvironment]] = {}
    for each in tasks.environments():
        steps.setdefault(each["SLURM_STEP_ID"], []).append(detect(each))
    for places in steps.values():
        places.sort(key=lambda place: place.rank)
    _same(steps["0"], [2, 2, 2])
    _same(steps["1"], [2, 1])
    for step in ("2", "3"):
        assert [place.rank for place in steps[step]] == [0, 1]
        assert {place.world_size for place in steps[step]} == {2}
    assert len({places[0].master_port for places in steps.values()}) == 4


def test_a_batch_script_itself_is_one_process(tasks: Tasks) -> None:
    tasks.sbatch(["-N", "2", "--ntasks-per-node", "2"], f"{tasks.program}\n").well()
    (place,) = tasks.places()
    assert place == ProcessEnvironment(0, 0, 1, 1, LOOPBACK, None, "single")


def test_a_shrunken_job(tasks: Tasks) -> None:
    script = (
        "scontrol update JobId=$SLURM_JOB_ID NumNodes=2\n. ./slurm_job_${SLURM_JOB_ID}_resize.sh\n"
        f"srun -N 2 -n 4 {tasks.program}\n"
    )
    tasks.sbatch(["-N", "3", "--ntasks-per-node", "2", "-D", str(tasks.folder)], script).well()
    _same(tasks.places(), [2, 2])


def test_a_heterogeneous_job(tasks: Tasks) -> None:
    tasks.srun("-N", "1", "-n", "2", str(tasks.program), ":", "-N", "1", "-n", "1").well()
    places = tasks.places()
    assert [(place.rank, place.world_size, place.local_rank) for place in places] == [(0, 3, 0), (1, 3, 1), (2, 3, 0)]
    (rank_0,) = [each["SLURMD_NODENAME"] for each in tasks.environments() if detect(each).rank == 0]
    assert {place.master_addr for place in places} == {rank_0}
    assert len({place.master_port for place in places}) == 1


def test_jobs_side_by_side_have_ports_of_their_own(tasks: Tasks) -> None:
    started = [tasks.cluster.start(0, ["srun", "-N", "2", "-n", "2", str(tasks.program)]) for _ in range(4)]
    for command in started:
        command.end(DEADLINE_S).well()
    ports: dict[str, set[int | None]] = {}
    for each in tasks.environments():
        ports.setdefault(each["SLURM_JOB_ID"], set()).add(detect(each).master_port)
    assert len(ports) == 4 and len(set.union(*ports.values())) == 4
    assert all(len(found) == 1 for found in ports.values())


def test_ranks_without_srun_are_told_so(tasks: Tasks) -> None:
    tasks.srun("-N", "1", "-n", "2").well()
    stale = next(each for each in tasks.environments() if each["SLURM_PROCID"] == "1")
    for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"):
        stale.pop(name, None)
    with pytest.raises(SettingError, match="srun"):
        detect(stale)


@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
def test_an_mpi_of_srun_and_uneven_nodes_in_a_real_job(tasks: Tasks, mpi: str) -> None:
    if mpi == "pmix" and (problem := missing("pmix")):
        pytest.skip(problem)
    command = ["srun", "-N", "2", "-n", "4", f"--mpi={mpi}", "--ntasks-per-node", "2", PYTHON, *JOB, str(tasks.folder)]
    ended = tasks.cluster.run(0, command, DEADLINE_S)
    tasks.cluster.folder, before = tasks.folder, tasks.cluster.folder
    try:
        assert ended.code == 0, f"{ended.output}\n{logs(tasks.cluster)}"
        check(told(tasks.cluster), "slurm")
    finally:
        tasks.cluster.folder = before


def test_mpirun_within_an_allocation(tasks: Tasks) -> None:
    """Ranks are those of MPICH's mpiexec, not of the srun by which it starts its proxies."""
    from tests.clusters.install import path_of

    if problem := missing("mpich"):
        pytest.skip(problem)
    words = shell([str(path_of("mpich")), "-n", "4", "-ppn", "2", str(tasks.program)])
    tasks.sbatch(["-N", "2", "--ntasks-per-node", "2"], f"{words}\n").well()
    places = tasks.places()
    assert [(place.rank, place.local_rank, place.world_size, place.source) for place in places] == [
        (rank, rank % 2, 4, "pmi") for rank in range(4)
    ]
    assert {place.master_addr for place in places} == {"n1"} and len({place.master_port for place in places}) == 1
