from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_in_ranks

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
PROGRAM = """
import logging, os, time, torch, torch.distributed as dist, parallel_state
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
rank = int(os.environ["RANK"])
if rank in WITHOUT:
    os.environ.update(VARIABLES)
dist.init_process_group("parallel_state")
for group in (None, dist.new_group([0, 1]), dist.new_group([0, 1], backend="parallel_state")):
    x = torch.full((5,), rank + 1.0)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3.0] * 5, x
    found = [None, None]
    dist.all_gather_object(found, rank, group=group)
    assert found == [0, 1]
if rank == 0:
    dist.send(torch.ones(3), 1)
else:
    assert dist.recv(torch.empty(3), 0) == 0
dist.barrier()
dist.destroy_process_group()
print("done", flush=True)
"""
NEVER = {"PARALLEL_STATE_BUILD": "never", "XDG_CACHE_HOME": "/dev/null/none"}
READ_ONLY = {"HOME": "/dev/null/none"}


@pytest.mark.parametrize(("without", "variables", "told"), [
    ((0, 1), NEVER, "global rank 0 has no compiled part: it isn't compiled, and PARALLEL_STATE_BUILD is never"),
    ((1,), NEVER, "global rank 1 has no compiled part: it isn't compiled, and PARALLEL_STATE_BUILD is never"),
    ((0, 1), READ_ONLY, "set XDG_CACHE_HOME to a writable folder with free space"),
], ids=["no compiler", "none on rank 1", "read-only home"])  # fmt: skip
def test_ranks_without_the_compiled_part_go_over_gloo(
    without: tuple[int, ...], variables: dict[str, str], told: str
) -> None:
    code = PROGRAM.replace("WITHOUT", repr(without)).replace("VARIABLES", repr(variables))
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME" or len(without) < 2}
    ended = run_in_ranks(code, {**environment, "PARALLEL_STATE_TIMEOUT_S": "30"}, 2, DEADLINE_S)
    for code_, output in ended:
        assert code_ == 0 and "done" in output, output
    warned = [output.count('the backend "parallel_state" of torch.distributed uses gloo') for _, output in ended]
    assert warned == [1, 0], "only the host's first rank warns, also if another rank lacks the library"
    output = ended[0][1]
    assert told in output, output
    assert not ("XDG_CACHE_HOME" in told and "install a C++ compiler" in output.lower())


def test_a_world_of_one_goes_over_gloo_too() -> None:
    code = (
        "import logging, torch, torch.distributed as dist, parallel_state\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "dist.init_process_group('parallel_state', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(2); dist.all_reduce(x); print(x.tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=DEADLINE_S,
        env={**os.environ, **NEVER, "PYTHONPATH": str(ROOT), "PARALLEL_STATE_TIMEOUT": "5"},
    )  # fmt: skip
    assert done.returncode == 0 and "[1.0, 1.0]" in done.stdout, done.stderr
    assert done.stderr.count("uses gloo") == 1
    assert done.stderr.count("PARALLEL_STATE_TIMEOUT is not a setting of parallel_state and has no effect") == 1
