from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extent import LONG

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
JOBS = 64
ROUNDS = 100 if LONG else 20
ROUND_S = 240.0


def test_jobs_that_start_at_once() -> None:
    command = [sys.executable, "-m", "tests.clusters.shared_node", "--jobs", str(JOBS), "--rounds", str(ROUNDS)]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "MASTER_"))}
    done = subprocess.run(
        command, cwd=ROOT, env={**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=ROUNDS * ROUND_S,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["failures"] for each in told] == [[]] * ROUNDS, done.stderr[-8000:]
