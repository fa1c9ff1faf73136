"""Starts ranks as actors, like engines' Ray executors, in Ray's Python on the first host. Each bundle of a
placement group has an actor with one visible GPU. The driver numbers actors host by host, its own host
first. python -m tests.clusters.ray_driver FOLDER [--kill RANK | --absent RANK | --program WORD…]"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

SIZE = 4
DEADLINE_S = 120


@ray.remote(num_cpus=1, num_gpus=1, max_restarts=0)
class Worker:
    def place(self) -> tuple[str, list[str]]:
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def free_port(self, address: str) -> int:
        with socket.create_server((address, 0)) as probe:
            return int(probe.getsockname()[1])

    def run(self, folder: str, victim: int, start: tuple[Any, ...]) -> int:
        from tests.clusters import job

        job.run(Path(folder), victim, start=start)
        return os.getpid()

    def run_program(self, program: list[str], start: tuple[Any, ...]) -> int:
        size, rank, method, local_rank = start
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        os.environ.update(zip(names, map(str, (rank, size, local_rank, host, port)), strict=True))
        return subprocess.run([sys.executable, *program], timeout=DEADLINE_S).returncode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--absent", type=int, default=-1, help="the actor that is told nothing")
    parser.add_argument("--program", nargs=argparse.REMAINDER, help="what each actor starts instead of the job")
    options = parser.parse_args()
    ray.init(address=os.environ["RAY_AT"], log_to_driver=True)
    group = placement_group([{"CPU": 1, "GPU": 1}] * SIZE, strategy="PACK")
    ray.get(group.ready(), timeout=DEADLINE_S)
    workers = [
        Worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for index in range(SIZE)
    ]
    places = ray.get([worker.place.remote() for worker in workers], timeout=DEADLINE_S)
    own = ray.util.get_node_ip_address()
    order = sorted(range(SIZE), key=lambda index: (places[index][0] != own, places[index]))
    workers, places = [workers[index] for index in order], [places[index] for index in order]
    address = places[0][0]
    port = ray.get(workers[0].free_port.remote(address), timeout=DEADLINE_S)
    seen: Counter[str] = Counter()
    calls = []
    for rank, (worker, (host, _)) in enumerate(zip(workers, places, strict=True)):
        start = (SIZE, rank, f"tcp://{address}:{port}", seen[host])
        seen[host] += 1
        if options.program:
            calls.append(worker.run_program.remote(options.program, start))
        elif rank != options.absent:
            calls.append(worker.run.remote(options.folder, options.kill, start))
    ends = []
    for call in calls:
        try:
            ended = ray.get(call, timeout=DEADLINE_S)
            ends.append(f"exit code {ended}" if options.program else "ok")
        except ray.exceptions.RayActorError:
            ends.append("died")
        except ray.exceptions.RayTaskError as error:
            ends.append(str(error))
    Path(options.folder, "driver.json").write_text(
        json.dumps({"ends": ends, "gpus": [gpus for _, gpus in places]}), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
