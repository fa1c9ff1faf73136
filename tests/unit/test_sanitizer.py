from __future__ import annotations

import peer_kernels
import pytest

from tests.gpu.test_sanitizer import FOUND, command, problem

pytestmark = pytest.mark.slow

RIGHT = (
    "{'part': 'all_reduce'}: right (push, eager)\n{'part': 'norm'}: right (fused, eager; push, add, rms_norm, eager)\n"
)
CLEAN = RIGHT + "========= ERROR SUMMARY: 0 errors\n"


def test_what_it_runs_is_checked_alone() -> None:
    given = command("tool", "racecheck", 8)
    script = given.index("benchmarks/peer_kernels.py")
    options = peer_kernels.parsed(given[script + 1 :])
    assert options.check and not options.emulate
    assert [case["part"] for case in peer_kernels.cases(options, 8)] == ["all_reduce", "all_reduce", "norm", "norm"]


def test_a_clean_run() -> None:
    assert problem(0, CLEAN, 2) is None
    assert problem(0, RIGHT + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 2) is None


@pytest.mark.parametrize(
    ("code", "said", "found"),
    [
        (FOUND, CLEAN, "found errors"),
        (1, CLEAN, "exit code 1"),
        (0, RIGHT, "looked at nothing"),
        (0, CLEAN.replace("SUMMARY: 0", "SUMMARY: 12"), "found something"),
        (0, CLEAN.replace("right (push", "{'push': 'no'} (push"), "1 of 2"),
        (0, CLEAN.replace("(fused, eager; ", "("), "fused"),
    ],
)
def test_other_runs(code: int, said: str, found: str) -> None:
    assert found in str(problem(code, said, 2))
