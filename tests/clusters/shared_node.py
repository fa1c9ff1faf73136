"""Starts many jobs at once on one host, in rounds. A job's two ranks are forks of this process. Half the jobs
find the port by SLURM's variables, the others by an address. python -m tests.clusters.shared_node --jobs 64
--rounds 20"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

import parallel_state as ps
import tests.preload  # noqa: F401  # what the first use of the package imports, once for all forks
from tests.failure.leftovers import nothing_left_after

RANKS = 2
TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    for number in range(options.rounds):
        began = time.monotonic()
        with nothing_left_after(5.0):
            failures = at_once(options.jobs, number)
        print(json.dumps({"round": number, "failures": failures, "seconds": time.monotonic() - began}), flush=True)


def at_once(jobs: int, number: int) -> list[str]:
    go, gone = os.pipe()
    held = []
    children = {}
    ranks = [(job, rank) for job in range(jobs) for rank in range(RANKS)]
    random.Random(number).shuffle(ranks)
    ports = {}
    for job in range(1, jobs, 2):
        held.append(socket.socket())
        held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held[-1].bind(("127.0.0.1", 0))
        ports[job] = held[-1].getsockname()[1]
    for job, rank in ranks:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(gone)
                for each in held:
                    each.close()
                os.read(go, 1)
                one_rank(job, rank, 1000 * number + job, ports.get(job))
                code = 0
            except BaseException:
                print(f"job {job}, rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        children[pid] = (job, rank)
    os.close(go)
    os.close(gone)
    failures = []
    for pid, (job, rank) in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != 0:
            failures.append(f"job {job}, rank {rank}: exit code {code}")
    for each in held:
        each.close()
    return failures


def one_rank(job: int, rank: int, job_id: int, port: int | None) -> None:
    os.environ["PARALLEL_STATE_START_TIMEOUT_S"] = str(TIMEOUT_S)
    if port is None:
        os.environ.update(
            SLURM_JOB_ID=str(job_id), SLURM_STEP_ID="0", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank),
            SLURM_STEP_NUM_TASKS=str(RANKS), SLURM_STEP_NODELIST="localhost", SLURM_STEP_TASKS_PER_NODE=str(RANKS),
            SLURM_NODEID="0",
        )  # fmt: skip
        ps.init_distributed_environment(timeout=TIMEOUT_S)
    else:
        ps.init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, timeout=TIMEOUT_S)
    ps.initialize_model_parallel(RANKS)
    group = ps.get_tp_group()
    for _ in range(5):
        found = group.all_gather_object((job, rank))
        if found != [(job, each) for each in range(RANKS)]:
            raise RuntimeError(f"met {found}")
        total = group.all_reduce(torch.full((100,), float(job)))
        if total.tolist() != [RANKS * float(job)] * 100:
            raise RuntimeError(f"summed {total[0]}")
    ps.destroy_distributed_environment()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
