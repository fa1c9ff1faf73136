from __future__ import annotations

import os

import pytest

from tests.programs import run_in_ranks

DEADLINE_S = 60.0
PROGRAM = """
import logging, os, time, torch, parallel_state as ps
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
if int(os.environ["RANK"]) in WITHOUT:
    os.environ.update(PARALLEL_STATE_BUILD="never", XDG_CACHE_HOME="/dev/null/none")
began = time.monotonic()
try:
    ps.init_distributed_environment(backend="gloo", timeout=20)
    ps.initialize_model_parallel(2)
    print("sum", ps.get_tp_group().all_reduce(torch.ones(1)).item(), flush=True)
    ps.destroy_distributed_environment()
except ps.RendezvousError as error:
    print("seconds", time.monotonic() - began, error.suspect_ranks, error, flush=True)
"""


@pytest.mark.parametrize("without", [(0, 1), (0,)])
def test_a_world_over_gloo_without_the_compiled_part(without: tuple[int, ...]) -> None:
    ended = run_in_ranks(PROGRAM.replace("WITHOUT", repr(without)), dict(os.environ), 2, DEADLINE_S)
    for code, output in ended:
        assert code == 0 and "sum 2.0" in output, output
    text = "exits of ranks are detected at deadlines, or when a gloo connection breaks"
    assert [output.count(text) for _, output in ended] == [1, 0], ended


def test_rank_0_has_the_compiled_part_and_another_has_not() -> None:
    for code, output in run_in_ranks(PROGRAM.replace("WITHOUT", "(1,)"), dict(os.environ), 2, DEADLINE_S):
        assert code == 0, output
        (line,) = (line for line in output.splitlines() if line.startswith("seconds "))
        assert float(line.split()[1]) < 5.0, line
        assert "rank 1 on host" in line and "compiled library, which rank 0 has" in line and " (1,) " in line, line
        assert "PARALLEL_STATE_BUILD is never" in line, line
