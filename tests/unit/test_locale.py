"""LC_ALL=C without Python's UTF-8 mode: files are read as UTF-8, and no output fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
WORLD = """
import locale, torch, parallel_state as ps
from device_communicators.cuda import nccl_library
from device_communicators.base.host import start_time
from parallel_state.compat import megatron
import ctypes, os
assert locale.getpreferredencoding(False) != "UTF-8"
ctypes.CDLL(None).prctl(15, b"rank\\xc3")  # a name that is cut amid a letter, as the kernel keeps it
assert start_time(os.getpid())
ps.init_distributed_environment(1, 0)
ps.initialize_model_parallel(1)
print(ascii(ps.get_tp_group().explain()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    ["-c", WORLD], ["-m", "parallel_state", "plan", "--world-size", "8", "--tp", "2", "--pp", "2"],
    ["-m", "parallel_state", "--help"], ["-m", "parallel_state", "plan", "--help"],
], ids=["world", "plan", "help", "plan help"])  # fmt: skip
def test_in_an_ascii_locale(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **ASCII}, capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0 and done.stdout, done.stderr.decode(errors="replace")
    assert b"Unicode" not in done.stderr
