"""Recovery by torchrun: a rank is killed, torchrun ends the others and starts all again, on the store of its agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
WITHIN_S = 30.0
"""From the kill to the end, of which four processes spend the most on importing torch."""
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import parallel_state as ps

folder, attempt = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
ps.init_distributed_environment(backend="gloo")
ps.initialize_model_parallel(2, 2)
world = ps.get_world_group()
for number in range(20):
    found = [world.all_reduce(torch.ones(3)).tolist(), ps.get_tp_group().all_gather_object(world.rank)]
    if attempt == "0" and number == 5 and world.rank == 2:
        (folder / "killed").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
told = {"attempt": attempt, "found": found, "carrier": world.route.communicators[0].name}
(folder / f"{world.rank}.json").write_text(json.dumps(told))
ps.destroy_distributed_environment()
"""


def test_torchrun_starts_all_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
            "--max-restarts", "1", str(script), str(tmp_path),
        ],
        env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    ended_s = time.monotonic()
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told == {
            "attempt": "1",
            "found": [[4.0] * 3, [rank // 2 * 2, rank // 2 * 2 + 1]],
            "carrier": "shared_memory",
        }
    assert ended_s - float((tmp_path / "killed").read_text()) < WITHIN_S
