from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.programs import FORK_SERVERS, Program
from tests.sandbox import needs_filters

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
PROGRAM = """
from tests.sandbox import refuse
import parallel_state as ps
from tests.contract.test_launch_inheritance import zero
refuse({names!r}, {code})
try:
    print(ps.launch(zero, nproc=2, timeout=60))
except ps.LaunchError as error:
    print("LaunchError", error)
"""
WORKS = ("memfd_create", "close_range", "eventfd2", "pidfd_open", "membarrier", "fallocate", "prctl", "statx")
pytestmark = [needs_filters, pytest.mark.slow]


def launched(names: tuple[str, ...], code: int) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = Program(FORK_SERVERS + PROGRAM.format(names=names, code=code), environment)
    out, err = program.communicate(DEADLINE_S)
    assert program.returncode == 0, out + err
    return out


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_it_works_without_what_it_can_do_without(code: int) -> None:
    assert launched(WORKS, code) == "[0, 0]\n"


def test_without_clone3_it_works_or_says_so() -> None:
    """glibc falls back to clone if the kernel lacks clone3, but not if a sandbox forbids it."""
    assert launched(("clone3",), errno.ENOSYS) == "[0, 0]\n"
    out = launched(("clone3",), errno.EPERM)
    assert out == "[0, 0]\n" or ("LaunchError" in out and "forbids the system call clone3" in out)
