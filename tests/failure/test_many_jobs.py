"""Row 45 of docs/failures.md: jobs that start at once on one host. 10 worlds of two forked ranks; with
FAILURE_TESTS=long also 64 jobs of `launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.failure.ranks import Ranks
from tests.failure.worlds import world_over

ROOT = Path(__file__).parents[2]
WORLDS, JOBS = 10, 64
DEADLINE_S = 120.0
JOBS_DEADLINE_S = 1500.0


def _meet(job: int) -> tuple[list[int], list[float], str]:
    with world_over("shared memory", timeout_s=DEADLINE_S) as group:
        for _ in range(20):
            jobs, total = group.all_gather_object(job), group.all_reduce(torch.full((3,), float(job)))
        return jobs, total.tolist(), group.route.communicators[0].name


@pytest.mark.over("shared memory")
def test_row_45_worlds_that_start_at_once(nothing_left: None) -> None:
    with ExitStack() as stack:
        worlds = [Ranks(2) for _ in range(WORLDS)]
        for job, ranks in enumerate(worlds):
            stack.callback(ranks.kill)
            ranks.begin(_meet, job)
        for job, ranks in enumerate(worlds):
            assert list(ranks.finish(DEADLINE_S).values()) == [([job] * 2, [2.0 * job] * 3, "shared_memory")] * 2


PROGRAM = """
import json, os, sys
import torch
import parallel_state as ps
from parallel_state import launch

def meet(job):
    group = ps.get_tp_group()
    for _ in range(20):
        found = [group.all_gather_object(job), group.all_reduce(torch.full((3,), float(job))).tolist()]
    return [*found, group.route.communicators[0].name]

if __name__ == "__main__":
    children = []
    for job in range(int(sys.argv[1])):  # forks: torch is imported once, and then all start
        children.append(os.fork())
        if children[-1] == 0:
            with open(f"{sys.argv[2]}/{job}.json", "w") as file:
                json.dump(launch(meet, 2, args=(job,), tensor_model_parallel_size=2), file)
            sys.exit()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]))
"""


@pytest.mark.long
@pytest.mark.over("shared memory")
def test_row_45_jobs_that_are_launched_at_once(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "PARALLEL_STATE_START_TIMEOUT_S": str(JOBS_DEADLINE_S)}
    command = [sys.executable, str(script), str(JOBS), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=JOBS_DEADLINE_S)
    assert done.returncode == 0 and json.loads(done.stdout) == [0] * JOBS, done.stdout + done.stderr
    for job in range(JOBS):
        found = json.loads((tmp_path / f"{job}.json").read_text())
        assert found == [[[job] * 2, [2.0 * job] * 3, "shared_memory"]] * 2, job
