"""Limits of process, user and machine: a start names what ran out, and no rank hangs."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators.base import limits
from tests.contract.attempts import Outcome, attempt_all, attempt_in_turn, environment
from tests.contract.test_rendezvous import held_port
from tests.failure.launchers import program
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time

START_S = 4.0
DEADLINE_S = 120.0
ROOT = Path(__file__).resolve().parents[2]
EVERYONE = (0, 1, 2, 3)
CLONE_NEWNS = 0x20000


def _limit_with(which: int, spare: int) -> int:
    if which == resource.RLIMIT_NOFILE:
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = (descriptor for descriptor in range(1 << 16) if descriptor not in used)
        return [next(free) for _ in range(spare + 1)][-1]
    if which == resource.RLIMIT_AS:
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[0]) * resource.getpagesize() + (spare << 20)
    return spare


def _calls() -> tuple[Any, ...]:
    group = ps.get_tp_group()
    return group.all_reduce(torch.ones(1)).item(), group.broadcast_object("x" if group.is_first_rank else None)


def _limited(which: int, spare: int, ranks: tuple[int, ...], port: int) -> Outcome:
    soft, hard = resource.getrlimit(which)
    limits.raise_descriptor_limit = lambda: None  # as with a hard limit as low, which few users may raise
    with environment(PARALLEL_STATE_START_TIMEOUT_S=str(START_S), PARALLEL_STATE_BARRIER_TIMEOUT_S=str(START_S)):
        if int(os.environ["RANK"]) in ranks:
            resource.setrlimit(which, (_limit_with(which, spare), hard))
        try:
            told = attempt_in_turn(
                lambda: ps.init_distributed_environment(4, int(os.environ["RANK"]), f"tcp://127.0.0.1:{port}"),
                lambda: ps.initialize_model_parallel(2, 2),
            )
            return attempt_all(_calls) if told.kind == "ok" else told
        finally:
            resource.setrlimit(which, (soft, hard))
            ps.destroy_distributed_environment()


@pytest.mark.side_by_side
@pytest.mark.parametrize("who", [EVERYONE, (0,), (3,)], ids=["all", "the first", "the last"])
def test_descriptors_run_out_while_ranks_start(ranks: Ranks, tmp_path: Path, who: tuple[int, ...]) -> None:
    for spare in (6, 25, 33):

        def trial(_: Path, spare: int = spare) -> float:
            with held_port() as port:
                told = ranks.run(_limited, resource.RLIMIT_NOFILE, spare, who, port, timeout_s=DEADLINE_S)
            if all(each.kind == "ok" for each in told):
                assert spare > 6
                return 0.0
            for each in told:
                error = getattr(ps, each.kind, None)
                assert error is not None and issubclass(error, ps.ParallelStateError), (spare, told)
            named = [rank for rank, each in enumerate(told) if "ulimit -n" in each.text]
            assert named and set(named) & set(who), (spare, told)
            return max(each.seconds for each in told)

        folder = tmp_path / str(spare)
        folder.mkdir()
        assert_in_time(trial, folder, 2 * START_S + 1.0)


@pytest.mark.side_by_side
def test_files_may_not_grow(ranks: Ranks) -> None:
    with held_port() as port:
        told = ranks.run(_limited, resource.RLIMIT_FSIZE, 256, (3,), port, timeout_s=DEADLINE_S)
    assert {each.kind for each in told} == {"ok"}, told


def _body() -> tuple[float, str, object]:
    group = ps.get_tp_group()
    value = group.all_reduce(torch.ones(1)).item()
    return value, group.route.communicators[0].name, group.broadcast_object(1 if group.is_first_rank else None)


def _launch_two(*limited: tuple[int, int]) -> None:
    launch = ps.launch  # imported before the limit
    for which, value in limited or [(resource.RLIMIT_CORE, 0)]:
        soft, hard = resource.getrlimit(which)
        resource.setrlimit(which, (value, hard))
        try:
            told = f"found {launch(_body, nproc=2, tensor_model_parallel_size=2)}"
        except ps.LaunchError as error:
            told = f"told {error}".replace("\n", " | ")
        resource.setrlimit(which, (soft, hard))
        print(told, flush=True)


def _launch_two_in_own_mounts(script: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["sh", "-c", f"mount --make-rprivate / && {script}"], check=True)
    tempfile.tempdir = None
    _launch_two()


def _told_by(function: Callable[..., None], *args: Any, **env: str) -> tuple[str, str]:
    with program(function, *args, env={"PARALLEL_STATE_START_TIMEOUT_S": "30", **env}) as launcher:
        assert launcher.wait(DEADLINE_S) == 0, launcher.said
        assert "Traceback" not in launcher.said, launcher.said
        return launcher.printed, launcher.said


needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="no file system can be mounted here",
)


def test_launch_at_limits_that_let_it_start_nothing() -> None:
    numbers = (4, 8, 10, 12, 14, 16, 18)
    printed, _ = _told_by(
        _launch_two, *((resource.RLIMIT_NOFILE, number) for number in numbers), (resource.RLIMIT_FSIZE, 0)
    )
    lines = printed.splitlines()
    assert len(lines) == len(numbers) + 1, printed
    for number, line in zip(numbers, lines, strict=False):
        assert line.startswith("told ") and f"this process may have {number} descriptors" in line, line
        assert "raise the limit (`ulimit -n" in line
    # If the kernel also counts files in memory, no rank can report.
    assert "may write files of 0 bytes" in lines[-1] or lines[-1].startswith("found [(2.0, 'hierarchical', 1)"), lines


IMPORTS = """
import os, resource, sys
import torch
import parallel_state as ps

if os.fork() == 0:  # torch is imported once
    from parallel_state.groups import world

    print("modules", *sys.modules, flush=True)
    os._exit(0)
os.wait()
starts = {
    "init": lambda: ps.init_distributed_environment(2, 0, "tcp://127.0.0.1:1"),
    "name": lambda: ps.launch,
    "launch": lambda: ps.launch(print, nproc=2),
    "launch in this process": lambda: ps.launch(print, nproc=1),
}
for name, start in starts.items():
    if name == "launch":
        ps.launch  # its module is imported at the name's first use
    if os.fork() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        try:
            start()
        except ps.ParallelStateError as error:
            print(f"{name}: {type(error).__name__} {error}", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def imports() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 5, done
    return done.stdout.splitlines()


def test_no_descriptor_for_the_imports_of_a_start(imports: list[str]) -> None:
    """If a start can't open a module for lack of descriptors, its error says so."""
    lines = imports[1:]
    assert all("this process may have 3 descriptors" in line for line in lines), lines
    kinds = [line.partition(" may have")[0].partition(": ")[2].split()[0] for line in lines]
    assert kinds == ["ResourceLimitError", "ResourceLimitError", "LaunchError", "LaunchError"], lines


def test_a_start_imports_what_groups_need(imports: list[str]) -> None:
    modules = imports[0].split()
    for name in ("host_memory", "native_group"):
        assert f"device_communicators.cpu.{name}" in modules
    for name in ("messages.media", "startup.stores"):
        assert f"parallel_state.{name}" in modules


OF_ANOTHER_USER = """
import resource
from tests.failure.test_limits import _launch_two

if __name__ == "__main__":
    _launch_two((resource.RLIMIT_NPROC, 1), (resource.RLIMIT_NPROC, 2))
"""


def test_launch_where_the_user_may_have_no_more_processes(tmp_path: Path) -> None:
    """Root has no such limit, so another user runs this. Two capabilities let that user read Python's files."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv (util-linux)")
    capabilities = "+dac_override,+dac_read_search"
    user = ("--reuid=65534", "--regid=65534", "--clear-groups")
    setpriv = ("setpriv", *user, f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}")
    script = tmp_path / "program.py"
    script.write_text(OF_ANOTHER_USER)
    done = subprocess.run(
        [*setpriv, sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done
    for number, line in zip((1, 2), lines, strict=True):
        assert line.startswith("told ") and f"this user may have {number} in all" in line and "ulimit -u" in line, line
    assert "Traceback" not in done.stderr, done.stderr


@needs_mounts
def test_launch_with_a_full_dev_shm_and_no_tmp(tmp_path: Path) -> None:
    fill = "mount -t tmpfs -o size=64k tmpfs /dev/shm; head -c 65536 /dev/zero > /dev/shm/full 2>/dev/null"
    tmp = "mkdir full; mount -t tmpfs -o size=16k tmpfs full; head -c 65536 /dev/zero > full/full 2>/dev/null; true"
    printed, said = _told_by(_launch_two_in_own_mounts, f"cd {tmp_path}; {fill}; {tmp}", TMPDIR=str(tmp_path / "full"))
    assert printed.startswith("found [(2.0, 'hierarchical', 1), (2.0, 'hierarchical', 1)]"), printed + said
    assert "space ran out: /dev/shm has 0 of 64 KiB free" in said and "--shm-size" in said, said


@needs_mounts
@pytest.mark.parametrize("cache", ["full", "read-only", "missing"])
def test_launch_without_a_cache(tmp_path: Path, cache: str) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=16k{',ro' if cache == 'read-only' else ''} tmpfs {folder}"
    script = {
        "full": f"{mount}; head -c 65536 /dev/zero > {folder}/full 2>/dev/null; true",
        "read-only": mount,
        "missing": "true",
    }[cache]
    where = {"XDG_CACHE_HOME": "", "HOME": "/proc/nowhere"} if cache == "missing" else {"XDG_CACHE_HOME": str(folder)}
    # Not a fork: one that failed to load the library closes descriptors of others.
    code = f"from tests.failure import test_limits\ntest_limits._launch_two_in_own_mounts({script!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PARALLEL_STATE_START_TIMEOUT_S": "30", **where},
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT,
    )  # fmt: skip
    printed, said = done.stdout, done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    assert printed.startswith("found [(2.0, 'process_group', 1), (2.0, 'process_group', 1)]"), printed + said
    assert "runs without shared memory" in said and "set XDG_CACHE_HOME to a writable folder" in said, said
    if cache == "full":
        assert f"space ran out: {folder} has 0 of 16 KiB free" in said, said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(24, "Too many open files"), "ulimit -n"),
        (OSError(23, "Too many open files in system"), "fs.file-max"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("[enforce fail at listener.cc:63] false. accept: Too many open files"), "ulimit -n"),
        (OSError(12, "Cannot allocate memory"), "ulimit -v"),
        (MemoryError(), "ulimit -v"),
        (OSError(28, "No space left on device", "/dev/shm/x"), "--shm-size"),
        (OSError(27, "File too large"), "ulimit -f"),
        (OSError(2, "No such file or directory"), None),
        (ValueError("Too many open files"), None),
        (RuntimeError("something else"), None),
    ],
    ids=str,
)
def test_the_limit_that_an_error_ran_into(error: Exception, said: str | None) -> None:
    found = limits.shortage(error)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)
    named = limits.name_shortage(error, "this")
    assert isinstance(named, ps.ResourceLimitError) == (said is not None)
    outer = ps.RendezvousError("the ranks did not meet")
    outer.__cause__ = error
    assert limits.name_shortage(limits.name_shortage(outer, "this"), "that") is outer
    # The available memory changes between the two.
    told, expected = (re.sub(r"\d+ MiB", "MiB", text) for text in (str(outer), f". {found}" if found else ""))
    assert told == f"the ranks did not meet{expected}"
