"""The compiled part: made once, under a lock, or the reason why not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from device_communicators import native

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
from device_communicators import native
try:
    library = native.load()
    print("ops" if library.has_ops else f"no ops: {library.note}")
    print("version", library.ps_version(), library.ps_instruction_set().decode())
except native.NativeUnavailableError as error:
    print("unavailable:", error)
"""
COMPILE_S = 300
SOURCES = Path(native.__file__).parent / "csrc"


def _start(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **variables}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)


def _run(cache: Path, **variables: str) -> str:
    return _start(cache, **variables).communicate(timeout=COMPILE_S)[0]


def test_compiled_once_by_several_processes(tmp_path: Path) -> None:
    """Those that come while one compiles wait for it; later ones find it."""
    counter = tmp_path / "calls"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho call >> {counter}\nexec c++ -O0 "$@" -O0\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    # The build without torch's headers, which takes a fraction of the time.
    how = {"CXX": str(compiler), "PARALLEL_STATE_BUILD": "plain"}
    outputs = [p.communicate(timeout=COMPILE_S)[0] for p in [_start(tmp_path, **how) for _ in range(3)]]
    assert all("version 2 " in output for output in outputs), outputs
    assert sum("compiling" in output for output in outputs) == 1
    assert counter.read_text().count("call") == len(list(SOURCES.glob("*.cpp")))  # not bindings.cpp, but the link
    again = _run(tmp_path, CXX="/nowhere", PARALLEL_STATE_BUILD="never")
    assert "version 2 " in again
    assert "compiling" not in again
    assert sorted(path.suffix for path in (tmp_path / "parallel_state").iterdir()) == [".lock", ".so"]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PARALLEL_STATE_BUILD": "never"}, "PARALLEL_STATE_BUILD is never"),
        ({"PATH": "/nowhere"}, "no C++ compiler"),
        ({"CXX": "/nowhere/c++"}, "/nowhere/c++ can't be run"),
        ({"CXX": "false"}, "false failed"),
    ],
)
def test_the_reason_where_it_can_not_be_had(tmp_path: Path, variables: dict[str, str], reason: str) -> None:
    output = _run(tmp_path, **variables)
    assert output.startswith("unavailable:") or "\nunavailable:" in output
    assert reason in output


def test_a_cache_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "parallel_state").write_text("a file")
    assert "can't be made or loaded" in _run(tmp_path)


def test_without_the_ops_where_they_can_not_be_compiled(tmp_path: Path) -> None:
    """A compiler too old for torch's headers, or no headers: the collectives are there, the ops go through Python."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *bindings.cpp*) echo "error: too old" >&2; exit 1;; esac\nexec c++ "$@" -O0\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    output = _run(tmp_path, CXX=str(compiler))
    assert "no ops: " in output and "too old" in output
    assert "version 2 " in output
    assert "no ops: PARALLEL_STATE_BUILD is plain" in _run(tmp_path, PARALLEL_STATE_BUILD="plain", CXX="/nowhere")


def test_a_cache_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "parallel_state"
    folder.mkdir()
    folder.chmod(0o777)
    output = _run(tmp_path, CXX="/nowhere")
    assert "writable by nobody else" in output
