from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.clusters.cluster import DEMO, JOB, PYTHON, Cluster, Ended
from tests.clusters.launchers import LAUNCHERS, Launcher, logs
from tests.clusters.slurm import Slurm

pytestmark = pytest.mark.slow

DEADLINE_S = 180.0
SOON_S = 5.0
CHECK_S = 75
"""60 s of --timeout, and the time that a hanging rank gets to exit."""
START_S = 30
"""Ranks on a busy machine import torch at different speeds."""
LATE = r"rank 3 \((\S+, )?pid \d+\) is in no call of a group, at job\.py"
"""The two hosts share their PIDs, so either host's ranks may be those that answer for this one."""
CHECK = ("-m", "parallel_state", "check", "--quick", "--tp", "2", "--pp", "2", "--timeout", "60")
TEXT = "".join(f"Rank {rank} waits for the others, and then it dies. " for rank in range(40))


def run(
    launcher: Launcher, cluster: Cluster, program: Sequence[str], enough: Callable[[], bool] = lambda: False
) -> list[Ended]:
    with Slurm(cluster) if launcher.needs == "slurm" else contextlib.nullcontext():
        commands = launcher.start(cluster, program)
        until = time.monotonic() + DEADLINE_S
        while any(command.runs for command in commands) and not enough():
            assert time.monotonic() < until, f"not done within {DEADLINE_S:g} s\n{logs(cluster)}"
            time.sleep(0.05)
        return [command.end(1.0) for command in commands if not command.runs]


def told(cluster: Cluster, ranks: Sequence[int] = range(4)) -> dict[int, Any]:
    files = {rank: cluster.folder / f"{rank}.json" for rank in ranks}
    absent = [rank for rank, file in files.items() if not file.exists()]
    assert not absent, f"ranks {absent} reported nothing\n{logs(cluster)}"
    return {rank: json.loads(file.read_text()) for rank, file in files.items()}


def printed(cluster: Cluster) -> str:
    files = [*cluster.folder.glob("command.*"), *cluster.folder.glob("job.log")]
    return "".join(file.read_text(errors="replace") for file in files)


def check(facts: dict[int, Any], source: str) -> None:
    for rank, each in facts.items():
        host = rank // 2
        assert each["source"] == source
        assert (each["rank"], each["size"], each["local_rank"]) == (rank, 4, rank % 2)
        assert each["host"] == f"n{host + 1}"
        assert each["nodes"] == [[0, 1], [2, 3]]
        assert each["tp"] == [2 * host, 2 * host + 1] and each["pp"] == [rank % 2, rank % 2 + 2]
        assert each["sums"] == [6.0, 4.0 * host + 1, 2.0 * (rank % 2) + 2]
        assert each["got"] == ([0, 1] if host else None)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_a_job_over_two_hosts(cluster: Cluster, launcher: Launcher) -> None:
    if problem := launcher.problem():
        pytest.skip(problem)
    ended = run(launcher, cluster, [*JOB, str(cluster.folder)])
    check(told(cluster), launcher.source)
    assert not any(each.code for each in ended), logs(cluster)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_named_by_all_others(cluster: Cluster, launcher: Launcher, victim: int) -> None:
    if problem := launcher.problem():
        pytest.skip(problem)

    def have_survivors_failed() -> bool:
        """If True, `run` stops the launcher: torchrun's agents would wait minutes for each other."""
        files = [cluster.folder / f"{rank}.json" for rank in range(4) if rank != victim]
        return all(file.exists() and '"error"' in file.read_text() for file in files)

    run(launcher, cluster, [*JOB, str(cluster.folder), "--kill", str(victim)], have_survivors_failed)
    facts = told(cluster)
    check(facts, launcher.source)
    neighbours = [rank for rank in range(4) if rank // 2 == victim // 2]
    for rank, each in facts.items():
        error = each.get("error")
        if rank == victim or (error is None and rank in neighbours and not launcher.spares_neighbours):
            continue
        assert error is not None, f"rank {rank} did not report\n{logs(cluster)}"
        assert error["kind"] == "PeerDiedError" and error["seconds"] < SOON_S, error
        if launcher.spares_neighbours:
            assert error["suspect_ranks"] == [victim], error
        else:
            assert victim in error["suspect_ranks"] and set(error["suspect_ranks"]) <= set(neighbours), error


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_a_rank_that_never_comes_is_named_by_all_others(cluster: Cluster, launcher: Launcher) -> None:
    if problem := launcher.problem():
        pytest.skip(problem)
    cluster.common["PARALLEL_STATE_START_TIMEOUT_S"] = f"{START_S}"
    message = f"ranks [3] did not come within {START_S} s"

    def all_said_so() -> bool:
        return all(f"RendezvousError: rank {rank} of 4" in printed(cluster) for rank in range(3))

    run(launcher, cluster, [*JOB, str(cluster.folder), "--absent", "3"], all_said_so)
    output = printed(cluster)
    for rank in range(3):
        (line, *_) = [line for line in output.splitlines() if f"RendezvousError: rank {rank} of 4" in line] or [""]
        assert message in line, f"rank {rank}\n{output}"


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_check_in_place_of_the_program(cluster: Cluster, launcher: Launcher) -> None:
    if problem := launcher.problem():
        pytest.skip(problem)
    page = cluster.folder / "check.json"
    run(launcher, cluster, [*CHECK, "--json", str(page)])
    assert page.exists(), logs(cluster)
    found = json.loads(page.read_text())
    assert {each["code"] for each in found["findings"] if each["severity"] == "error"} == set(), found["findings"]
    assert found["world_size"] == 4, found.keys()
    assert found["seconds"] < CHECK_S, found["seconds"]


@pytest.mark.parametrize(
    ("name", "job"), [("torchrun, c10d", "echo job"), ("srun", "squeue --noheader --format %A")], ids=str
)
def test_a_running_job_is_asked_by_its_id_and_by_its_launcher(cluster: Cluster, name: str, job: str) -> None:
    """`debug --live` asks the ranks of its host. It reads from the store how far the other host's ranks are."""
    launcher = next(each for each in LAUNCHERS if each.name == name)
    if problem := launcher.problem():
        pytest.skip(problem)
    hold = cluster.folder / "goes on"
    answers: list[str] = []

    def ask(target: str) -> None:
        asking = cluster.run(0, [PYTHON, "-m", "parallel_state", "debug", "--live", target], DEADLINE_S)
        answers.append(asking.output)

    def ask_until_known() -> bool:
        if not hold.exists():
            ask(cluster.run(0, job.split(), SOON_S).output.strip())
            if re.search(LATE, answers[-1]):
                if name.startswith("torchrun"):
                    ask(str(cluster.commands[0].pid))
                hold.touch()
        return False

    ended = run(launcher, cluster, [*JOB, str(cluster.folder), "--hold", str(hold)], ask_until_known)
    assert hold.exists(), f"{answers}\n{logs(cluster)}"
    assert not any(each.code for each in ended), logs(cluster)
    for answer in answers[-2:] if name.startswith("torchrun") else answers[-1:]:
        assert "4 ranks, 2 of them answered on this host" in answer
        assert "ranks [0, 1, 2] wait in all_reduce" in answer and "for ranks [3]" in answer
        assert re.search(LATE, answer)


@pytest.mark.parametrize("launcher", [each for each in LAUNCHERS if each.name != "by hand"], ids=lambda each: each.name)
def test_the_demo(cluster: Cluster, launcher: Launcher) -> None:
    if problem := launcher.problem():
        pytest.skip(problem)
    text = cluster.folder / "text.md"
    text.write_text(TEXT)
    ended = run(launcher, cluster, [*DEMO, "--input", str(text)])
    assert not any(each.code for each in ended), logs(cluster)
    assert "largest difference" in "".join(each.output for each in ended)
