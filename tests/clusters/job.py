"""The job that every launcher starts: TP 2 x PP 2 on two hosts. Each rank writes FOLDER/RANK.json: host,
groups, sums, and its error if a rank was killed. LAUNCHER … python -m tests.clusters.job FOLDER [--kill
RANK] [--rank R --size N --address HOST:PORT]"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch

import parallel_state as ps
from device_communicators.base import settings
from parallel_state.startup import environment

TIMEOUT_S = 30.0
TP = PP = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int, default=-1, help="the rank that is killed")
    parser.add_argument("--again", action="store_true", help="the others go on as a smaller world")
    parser.add_argument("--absent", type=int, default=-1, help="a rank that never joins, and ends as the others do")
    parser.add_argument("--hold", type=Path, help="rank 3 makes no call until this file is there")
    parser.add_argument("--until", type=int, default=0, help="goes on until the world has so many ranks")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--size", type=int, default=-1)
    parser.add_argument("--local-rank", type=int, default=-1)
    parser.add_argument("--address", help="host:port of rank 0")
    options = parser.parse_args()
    method = f"tcp://{options.address}" if options.address else "env://"
    if not options.until:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own = options.rank if options.rank >= 0 else environment.detect(rendezvous=False).rank
    if own == options.absent:
        time.sleep(2 * settings.START_TIMEOUT_S.get())
        return
    start = (options.size, options.rank, method, options.local_rank)
    run(options.folder, options.kill, options.again, start, options.until, options.hold)


def run(
    folder: Path, victim: int = -1, again: bool = False, start: tuple[Any, ...] = (), until: int = 0,
    hold: Path | None = None,
) -> None:  # fmt: skip
    explicit = bool(start) and start[1] >= 0
    facts: dict[str, Any] = {"source": "explicit" if explicit else environment.detect(rendezvous=False).source}
    facts["restarts"] = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    began = time.monotonic()
    ps.init_distributed_environment(*start, timeout=TIMEOUT_S)
    world = ps.get_world_group()
    ps.initialize_model_parallel(*((TP, PP) if world.world_size % (TP * PP) == 0 else (world.world_size, 1)))
    while hold is not None and world.rank == 3 and not hold.exists():
        time.sleep(0.05)
    facts.update(compute(), start_s=time.monotonic() - began)
    write(folder / f"{world.rank}.json", facts)
    if world.rank == 0:
        with open(folder / "sizes", "a", encoding="utf-8") as file:
            file.write(f"{world.world_size}\n")
    while world.world_size < until:
        world.barrier()
        time.sleep(0.05)
    if victim >= 0:
        facts["error"] = lose(victim)
        if again:
            survivors = [rank for rank in world.ranks if rank not in facts["error"]["suspect_ranks"]]
            ps.reinitialize(survivors, len(survivors), 1)
            facts["again"] = compute()
        write(folder / f"{world.rank}.json", facts)
    ps.destroy_distributed_environment()


def write(file: Path, facts: dict[str, Any]) -> None:
    """Atomic, because tests poll the file."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(facts))
    new.replace(file)


def compute() -> dict[str, Any]:
    world, tp, pp = ps.get_world_group(), ps.get_tp_group(), ps.get_pp_group()
    sums = [group.all_reduce(torch.full((1000,), float(world.rank)))[-1].item() for group in (world, tp, pp)]
    if pp.world_size > 1:
        got = tp.all_gather_object(pp.recv_object(0)) if pp.is_last_rank else pp.send_object(world.rank, 1)
    else:
        got = None
    return {
        "rank": world.rank,
        "size": world.world_size,
        "local_rank": ps.get_world_group().local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nodes": ps.get_nodes(),
        "tp": list(tp.ranks),
        "pp": list(pp.ranks),
        "sums": sums,
        "got": got,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def lose(victim: int) -> dict[str, Any]:
    world = ps.get_world_group()
    world.barrier()
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            world.all_reduce(torch.ones(1000))
    except ps.CommunicationError as error:
        return {
            "kind": type(error).__name__,
            "suspect_ranks": list(error.suspect_ranks),
            "text": str(error),
            "seconds": time.monotonic() - began,
        }


if __name__ == "__main__":
    main()
