"""Runs programs of engines with a deadline, and kills all their descendants at the end."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pytest

from tests.failure.leftovers import descendants, reap

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "ACCELERATE_")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_PR_SET_CHILD_SUBREAPER = 36
_STEP_S = 0.05
_SHOWN = 20_000


def source(engine: str) -> Path:
    variable = f"PARALLEL_STATE_{engine.upper().replace('-', '_')}_SOURCE"
    path = os.environ.get(variable)
    if not path or not Path(path).is_dir():
        pytest.skip(f"{variable} names no folder with a source checkout of {engine}")
    return Path(path).resolve()


def environment(*paths: Path, **variables: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER) and not (name.startswith("PARALLEL_STATE_") and name.endswith("_SOURCE"))
    }
    found = filter(None, [str(ROOT), *map(str, paths), kept.get("PYTHONPATH")])
    return {**kept, "PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1", **OFFLINE, **variables}


def entry_points(folder: Path) -> Path:
    with suppress(importlib.metadata.PackageNotFoundError):
        return Path(str(importlib.metadata.distribution("parallel-state").locate_file("")))
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Started:
    def __init__(self, command: Sequence[str | Path], variables: dict[str, str], cwd: Path | None = None) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = descendants()
        self._log = tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log")  # noqa: SIM115
        self._command = list(map(str, command))
        self.process = subprocess.Popen(
            self._command, env=variables, cwd=cwd, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float) -> str:
        """Returns its output. Raises AssertionError with its last lines after failure or timeout."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        code = self.process.returncode
        problem = f"runs after {timeout_s} s" if code is None else f"ended with {code}"
        assert code == 0, f"{' '.join(self._command)} {problem}:\n{self.output[-_SHOWN:]}"
        return self.output

    def wait_for(self, words: str, timeout_s: float) -> str:
        """Returns its output once that contains `words`. Raises AssertionError if it exited or is late."""
        until = time.monotonic() + timeout_s
        while words not in self.output:
            late, ended = time.monotonic() > until, self.process.poll() is not None
            assert not late and not ended, f"{words!r} was expected in {timeout_s} s:\n{self.output[-_SHOWN:]}"
            time.sleep(_STEP_S)
        return self.output

    def end(self) -> None:
        while left := descendants() - self._before:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(_STEP_S)
        self.process.wait()
        reap(self._before)

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._log.close()


def run(command: Sequence[str | Path], variables: dict[str, str], timeout_s: float, cwd: Path | None = None) -> str:
    with Started(command, variables, cwd) as program:
        return program.wait(timeout_s)


def python(*arguments: str | Path) -> list[str]:
    return [sys.executable, *map(str, arguments)]


def torchrun(size: int, *arguments: str | Path) -> list[str]:
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *arguments)
