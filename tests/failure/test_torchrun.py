"""A rank is killed, and torchrun restarts all ranks over its agent's store. Row 48 of docs/failures.md: on
two hosts, only the agent whose worker failed counts the restart."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import hosts
from tests.contract.attempts import ELAPSED_WITHIN_S, check_elapsed
from tests.programs import Program, module

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
WITHIN_S = 10.0
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GLOO_SOCKET_IFNAME")

SCRIPT = """
import json, os, pickle, signal, sys, time
from pathlib import Path
import torch
import parallel_state as ps

began_s = time.monotonic()
folder, serves_on = Path(sys.argv[1]), sys.argv[2] == "serves on"
first = not (folder / "killed").exists()  # the agents' counts differ
ps.init_distributed_environment(backend="gloo")
world = ps.get_world_group()
ps.initialize_model_parallel(2, world.world_size // 2)
world.barrier()
host = int(os.environ["GROUP_RANK"])
try:
    for number in range(20):
        found = []
        for call in (
            lambda: world.all_reduce(torch.ones(3)).tolist(),
            lambda: ps.get_tp_group().all_gather_object(world.rank),
        ):
            call_s = time.monotonic()
            found.append(call())
        if first and number == 5 and world.rank == world.world_size // 2:
            (folder / "killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
except ps.CommunicationError as error:
    (folder / f"{world.rank}.error").write_bytes(pickle.dumps((error, time.monotonic() - call_s)))
    if serves_on and world.rank in (0, 1):
        time.sleep(60)  # until the agent ends it
    raise
told = {"began_s": began_s, "ended_s": time.monotonic(), "found": found,
        "carrier": world.route.communicators[0].name, "count": os.environ["TORCHELASTIC_RESTART_COUNT"]}
(folder / f"{world.rank}.json").write_text(json.dumps(told))
ps.destroy_distributed_environment()
"""


def _environ() -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    return {**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _torchrun(folder: Path, *options: str, how: str = "fails", host: int | None = None) -> Program:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    code = module("torch.distributed.run", [*options, "--max-restarts", "1", str(script), str(folder), how])
    if host is None:
        return Program(code, _environ())
    enter = f"from tests.hosts import enter\nenter({host})\n"
    return Program(enter + code, {**_environ(), "GLOO_SOCKET_IFNAME": hosts.INTERFACE})


def _ended_well(agents: Sequence[Program], folder: Path, carrier: str, size: int = 4) -> list[str]:
    try:
        outputs = ["".join(agent.communicate(DEADLINE_S)) for agent in agents]
    except TimeoutError as error:
        raise AssertionError(f"the job did not start again: {error}") from error
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(outputs)
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    for rank, each in enumerate(told):
        assert each["found"] == [[float(size)] * 3, [rank // 2 * 2, rank // 2 * 2 + 1]]
        assert each["carrier"] == carrier
    assert max(each["ended_s"] for each in told) - max(each["began_s"] for each in told) < WITHIN_S
    return [each["count"] for each in told]


def test_torchrun_starts_all_again(tmp_path: Path) -> None:
    agent = _torchrun(tmp_path, "--standalone", "--nproc-per-node", "2")
    assert _ended_well([agent], tmp_path, "shared_memory", 2) == ["1"] * 2


@pytest.mark.parametrize(
    ("rendezvous", "how", "counts"),
    [
        ("static", "fails", ["1"] * 4),
        pytest.param("c10d", "fails", None, marks=pytest.mark.long),
        ("c10d", "serves on", ["0", "0", "1", "1"]),
    ],
)
def test_row_48_torchrun_over_two_hosts(tmp_path: Path, rendezvous: str, how: str, counts: list[str] | None) -> None:
    problem = hosts.problem()
    if problem is not None:
        pytest.skip(f"two hosts can't be made: {problem}")
    with hosts.Hosts(2) as made:
        agents = []
        for host in range(2):
            options = ["--nnodes", "2", "--nproc-per-node", "2"]
            if rendezvous == "static":
                options += ["--node-rank", str(host), "--master-addr", made.addresses[0], "--master-port", "20000"]
            else:
                options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{made.addresses[0]}:20000", "--rdzv-id", "j"]
                options += ["--local-addr", made.addresses[host]]
                options += ["--rdzv-conf", f"is_host={1 - host},last_call_timeout=1"]
            agents.append(_torchrun(tmp_path, *options, how=how, host=made.pid(host)))
        told = _ended_well(agents, tmp_path, "hierarchical")
    errors = [pickle.loads(path.read_bytes()) for path in tmp_path.glob("*.error")]
    assert errors
    for error, took_s in errors:
        check_elapsed(error, took_s - ELAPSED_WITHIN_S, took_s + ELAPSED_WITHIN_S)
    if counts is not None and rendezvous == "static":
        assert told == counts
    elif counts is not None:
        assert sorted(told) == counts
