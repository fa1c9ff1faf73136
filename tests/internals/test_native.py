from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from device_communicators.base import build_cache, settings
from device_communicators.c10d import extension
from device_communicators.cpu import native, native_build
from tests.helpers.compiled import plain_library
from tests.programs import Program

pytestmark = pytest.mark.slow

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
from device_communicators.cpu import native
try:
    library = native.load()
    print("ops" if library.has_ops else f"no ops: {library.note}")
    print("version", library.ps_version(), library.ps_instruction_set().decode())
except native.NativeUnavailableError as error:
    print("unavailable:", error)
"""
COMPILE_S = 300
SOURCES = Path(native.__file__).parent / "csrc"
VERSION = f"version {native._VERSION} "
MADE = [".lock", ".lock", ".o", ".so"]


def _start(cache: Path, umask: int | None = None, **variables: str) -> Program:
    return Program(PROGRAM, {**os.environ, "XDG_CACHE_HOME": str(cache), **variables}, umask)


def _run(cache: Path, umask: int | None = None, **variables: str) -> str:
    return _start(cache, umask, **variables).communicate(COMPILE_S)[0]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PARALLEL_STATE_BUILD": "never"}, "PARALLEL_STATE_BUILD is never"),
        ({"PATH": "/nowhere", "CXX": ""}, "no C++ compiler"),
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


def test_a_cache_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "parallel_state"
    folder.mkdir()
    folder.chmod(0o777)
    output = _run(tmp_path, CXX="/nowhere")
    assert "but another user owns" in output


def test_a_module_that_can_not_be_loaded_leaves_its_part_to_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module.so").write_text("no library")
    monkeypatch.setattr(native, "find_or_compile", lambda recipes: [(tmp_path / "module.so", "")])
    monkeypatch.setattr(extension, "recipe", lambda: None)
    module, problem = extension.try_load.__wrapped__()
    assert module is None and f"has no compiled part: {tmp_path}/module.so can't be loaded: " in problem


def _compiler(folder: Path, script: str, name: str = "compiler") -> dict[str, str]:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return {"CXX": str(path), "PARALLEL_STATE_BUILD": "plain"}


@pytest.fixture(scope="module")
def linked() -> Path:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    return plain_library(compiler)


@pytest.fixture(scope="module")
def compiled(linked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("compiled")
    output = _run(cache, 0o002, **_quick(linked, cache))
    assert VERSION in output, output
    return cache


@pytest.fixture
def quick(linked: Path, tmp_path: Path) -> dict[str, str]:
    return _quick(linked, tmp_path)


def _quick(library: Path, folder: Path) -> dict[str, str]:
    script = f"""
shared=
for word; do
    [ "$word" = -shared ] && shared=1
    [ "$before" = -o ] && made=$word
    before=$word
done
if [ "$shared" ]; then cp {library} "$made"; else : > "$made"; fi"""
    return _compiler(folder, script, name="quick")


def test_compiled_once_by_several_processes(quick: dict[str, str], tmp_path: Path) -> None:
    counter = tmp_path / "calls"
    how = _compiler(tmp_path, f'echo call >> {counter}\nsleep 0.1\nexec {quick["CXX"]} "$@"')
    outputs = [p.communicate(COMPILE_S)[0] for p in [_start(tmp_path, **how) for _ in range(3)]]
    assert all(VERSION in output for output in outputs), outputs
    assert sum("compiling" in output for output in outputs) == 1
    units = len(native_build.objects_recipe().units)
    assert counter.read_text().count("call") == units + 2
    again = _run(tmp_path, CXX="/nowhere", PARALLEL_STATE_BUILD="never")
    assert VERSION in again
    assert "compiling" not in again
    assert sorted(path.suffix for path in (tmp_path / "parallel_state").iterdir()) == MADE


def test_a_compile_says_what_it_makes_and_for_how_long(quick: dict[str, str], tmp_path: Path) -> None:
    how = _compiler(tmp_path, f'sleep 0.5\nexec {quick["CXX"]} "$@"')
    code = "import time; from device_communicators.cpu import native; native.load(); print(time.time())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=COMPILE_S,
        env={**os.environ, **how, "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.search(r"compiling the shared-memory collectives, .* takes about [1-9]\d* s on a quiet machine", line), (
        line
    )


def _endless(folder: Path) -> tuple[dict[str, str], Path]:
    """Returns the variables for a compiler that never ends, and the file with the PIDs of its processes."""
    pids = folder / "pids"
    return _compiler(folder, f"sleep 1000 &\necho $$ $! >> {pids}\nwait", name="endless"), pids


def _still_run(pids: Path) -> list[str]:
    """Returns the PIDs that still run 5 s from now, or none as soon as all processes have ended."""
    until = time.monotonic() + 5
    while left := [pid for pid in pids.read_text(encoding="utf-8").split() if _runs(pid)]:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return left


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupted_compile_ends_at_once_and_is_tried_again(quick: dict[str, str], tmp_path: Path) -> None:
    how, pids = _endless(tmp_path)
    environment = {**os.environ, **how, "XDG_CACHE_HOME": str(tmp_path)}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, env=environment)
    at_once = min(len(native_build.usable_cores()), len(native_build.objects_recipe().units))
    while not pids.exists() or len(pids.read_text().splitlines()) < at_once:
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert _still_run(pids) == []
    shutil.copy(quick["CXX"], how["CXX"])  # a failure is recorded for a compiler's name
    assert VERSION in _run(tmp_path, **how)


def test_a_compiler_that_takes_too_long_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, pids = _endless(tmp_path)
    monkeypatch.setattr(native_build, "BUILD_TIMEOUT_S", 1)
    with pytest.raises(native_build.BuildError, match="took longer than 1 s"):
        native_build.compile_library(native_build.plain_recipe(), tmp_path / "made.so", [how["CXX"]])
    assert _still_run(pids) == []


def test_a_second_library_is_linked_with_the_objects_of_the_first(quick: dict[str, str], tmp_path: Path) -> None:
    assert VERSION in _run(tmp_path, **quick)
    words = tmp_path / "words"
    script = f'echo "$@" >> {words}\nexec {quick["CXX"]} "$@"'
    output = _run(tmp_path, CXX=_compiler(tmp_path, script)["CXX"])
    compiled = [Path(word).name for line in words.read_text().splitlines() if " -c " in line for word in line.split()]
    assert {name for name in compiled if name.endswith(".cpp")} == {"bindings.cpp", "direct.cpp", "ops.cpp"}, output
    (link,) = [line.split() for line in words.read_text().splitlines() if "-shared" in line]
    (objects,) = (tmp_path / "parallel_state").glob("*.o")
    assert str(objects) in link


def test_the_command_compiles_all_parts_at_once(linked: Path, tmp_path: Path) -> None:
    full, module = native.load(), extension.try_load()[0]
    assert full.has_ops, full.note
    script = f"""
for word; do
    [ "$word" = -shared ] && made=1 && copied=${{copied:-{linked}}}
    [ "$word" = -ltorch_cpu ] && copied=${{module:-{full.path}}}
    [ "$word" = -ltorch_python ] && module={module.__file__} && copied=$module
    case "$before $word" in "-c "*module.cpp | "-c "*bindings.cpp) waits=1; touch {tmp_path}/at-$(basename $word);; esac
    [ "$before" = -o ] && out=$word
    before=$word
done
if [ "$made" ]; then exec cp "$copied" "$out"; fi
: > "$out"
[ "$waits" ] || exit 0
for i in $(seq 300); do
    [ -e {tmp_path}/at-module.cpp ] && [ -e {tmp_path}/at-bindings.cpp ] && exit 0
    sleep 0.1
done
exit 1"""
    if len(native_build.usable_cores()) < 2:
        pytest.skip("one core compiles one part after the other")
    how = {"CXX": _compiler(tmp_path, script)["CXX"], "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "parallel_state", "build"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, env={**os.environ, **how})
    assert done.returncode == 0, done.stderr
    ops, backend, time_line = done.stdout.splitlines()
    assert ops.startswith("the shared-memory collectives and ops: ") and Path(ops.split(": ")[1]).exists()
    assert backend.startswith('the backend "parallel_state"') and Path(backend.split(": ")[1]).exists()
    assert re.fullmatch(r"\d+\.\d s", time_line)
    assert done.stderr.count("compiling") == 2 and len(set(re.findall(r"about (\d+) s", done.stderr))) == 1, done.stderr
    again = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_S, env={**os.environ, **how, "CXX": "/nowhere"}
    )
    assert again.returncode == 0 and again.stderr == "" and again.stdout.splitlines()[:2] == [ops, backend]


def test_the_command_says_what_can_not_be_compiled(tmp_path: Path) -> None:
    how = {"PATH": "/nowhere", "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "parallel_state", "build"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, env={**os.environ, **how})
    assert done.returncode == 1
    assert done.stderr.count("can't be compiled: there is no C++ compiler") == 2, done.stderr


def test_objects_that_are_damaged_are_compiled_again(quick: dict[str, str], tmp_path: Path) -> None:
    assert VERSION in _run(tmp_path, **quick)
    (objects,) = (tmp_path / "parallel_state").glob("*.o")
    (library,) = (tmp_path / "parallel_state").glob("*.so")
    library.unlink()
    objects.write_bytes(b"damaged")
    assert VERSION in _run(tmp_path, **quick)
    assert build_cache.flaw_of(objects) is None


def test_each_file_is_compiled_once_and_those_of_a_row_exist() -> None:
    sources = native_build.objects_recipe().sources
    assert len(set(sources)) == len(sources)
    of_torch = {path for path in SOURCES.glob("*.cpp") if path.name in native_build._OF_TORCH}
    assert {*sources, *of_torch} == {*SOURCES.glob("*.cpp"), *native_build.CONTROL.glob("*.cpp")}
    assert len(of_torch) == 3


def test_without_the_ops_where_they_can_not_be_compiled(quick: dict[str, str], tmp_path: Path) -> None:
    script = f'case "$*" in *bindings.cpp*) echo "error: too old" >&2; exit 1;; esac\nexec {quick["CXX"]} "$@"'
    output = _run(tmp_path, CXX=_compiler(tmp_path, script)["CXX"])
    assert "no ops: " in output and "too old" in output
    assert "the registered ops run through Python" in output, "a warning, and not a word in explain() only"
    assert VERSION in output
    assert "no ops: PARALLEL_STATE_BUILD is plain" in _run(tmp_path, PARALLEL_STATE_BUILD="plain", CXX="/nowhere")


def _copy(compiled: Path, target: Path) -> Path:
    shutil.copytree(compiled / "parallel_state", target / "parallel_state")
    (library,) = (target / "parallel_state").glob("*.so")
    return library


def test_a_umask_that_lets_the_group_write(compiled: Path) -> None:
    (library,) = (compiled / "parallel_state").glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o755
    again = _run(compiled, PARALLEL_STATE_BUILD="plain", CXX="/nowhere")
    assert VERSION in again and "compiling" not in again


@pytest.mark.parametrize("damage", ["cut", "flipped", "writable"])
def test_a_library_that_is_not_whole_is_made_again(
    compiled: Path, quick: dict[str, str], tmp_path: Path, damage: str
) -> None:
    library = _copy(compiled, tmp_path)
    content = library.read_bytes()
    if damage == "cut":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        library.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    else:
        library.chmod(0o775)
    never = _run(tmp_path, PARALLEL_STATE_BUILD="never")
    assert "unavailable" in never and "PARALLEL_STATE_BUILD is never" in never
    output = _run(tmp_path, **quick)
    assert "compiling" in output and VERSION in output
    assert build_cache.flaw_of(library) is None


def test_a_compile_that_fails_is_tried_once_and_all_hear_why(quick: dict[str, str], tmp_path: Path) -> None:
    counter = tmp_path / "calls"
    how = _compiler(tmp_path, f'echo call >> {counter}\nsleep 1\necho "error: No space left on device" >&2\nexit 1')
    outputs = [p.communicate(COMPILE_S)[0] for p in [_start(tmp_path, **how) for _ in range(4)]]
    assert all("No space left on device" in output for output in outputs), outputs
    assert sum("compiling" in output for output in outputs) == 1
    calls = counter.read_text().count("call")
    late = _run(tmp_path, **how)
    assert "No space left on device" in late and "s ago; remove " in late
    assert counter.read_text().count("call") == calls
    with_another = _run(tmp_path, **quick)
    assert VERSION in with_another, "another compiler is tried at once"


def test_a_compile_on_a_full_disk_fails_once(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    script = 'while [ "$1" ]; do [ "$1" = -o ] && made=$2; shift; done\nhead -c 99999 /dev/zero > "$made" || exit 1'
    no_room = _compiler(tmp_path, script)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        processes = [_start(full, **no_room) for _ in range(3)]
        outputs = [process.communicate(COMPILE_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0]
        assert sum("compiling" in output for output in outputs) == 1, outputs
        assert all("o space left on device" in output for output in outputs), outputs
    finally:
        subprocess.run(["umount", "-l", full], check=True)


def test_a_compile_that_is_killed_leaves_nothing(quick: dict[str, str], tmp_path: Path) -> None:
    how = _compiler(tmp_path, "exec sleep 60")
    process = _start(tmp_path, **how)
    folder = tmp_path / "parallel_state"
    deadline = time.monotonic() + 60
    while not list(folder.glob("*.build-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert list(folder.glob("*.build-*")), "nobody was there to remove it"
    (folder / "0123456789abcdef.so").write_bytes(b"old")
    old_s = time.time() - 100 * 86400
    os.utime(folder / "0123456789abcdef.so", (old_s, old_s))
    assert VERSION in _run(tmp_path, **quick)
    assert sorted(path.suffix for path in folder.iterdir()) == MADE


RANK = """
import torch, parallel_state as ps
ps.init_distributed_environment()
print(ps.get_world_group().all_reduce(torch.ones(2)).tolist(), ps.get_world_group().explain())
ps.destroy_distributed_environment()
"""


@pytest.mark.slow
def test_a_compile_is_over_before_the_start_has_a_deadline(quick: dict[str, str], tmp_path: Path) -> None:
    """Ranks wait for their host's compiler; other hosts give it minutes."""
    compile_s, start_s = 8, 5
    how = _compiler(tmp_path, f'[ "$1" = -shared ] && sleep {compile_s}\nexec {quick["CXX"]} "$@"')
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    variables = {
        **os.environ, **how, "XDG_CACHE_HOME": str(tmp_path), "PARALLEL_STATE_START_TIMEOUT_S": str(start_s),
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    began_s = time.monotonic()
    ranks = [Program(RANK, {**variables, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    outputs = ["".join(rank.communicate(COMPILE_S)) for rank in ranks]
    assert all("[2.0, 2.0]" in output and "shared_memory" in output for output in outputs), outputs
    assert time.monotonic() - began_s > compile_s
    assert settings.START_TIMEOUT_S.default >= 300, "another host's ranks, which have the library, wait for a compile"


def test_a_compiler_with_a_launcher_before_it(quick: dict[str, str], tmp_path: Path) -> None:
    counter = tmp_path / "calls"
    launcher = _compiler(tmp_path, f'echo call >> {counter}\nexec "$@"', name="launcher")["CXX"]
    assert VERSION in _run(tmp_path, **{**quick, "CXX": f"{launcher} {quick['CXX']}"})
    assert counter.read_text()


def test_environments_with_the_same_torch_share_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key contains no path. Another build of torch has other headers."""
    here = native_build.full_recipe()
    root = Path(torch.__file__).parent
    elsewhere = tmp_path / "site-packages" / "torch"
    text = "".join(source.read_text() for source in SOURCES.glob("*.cpp"))
    for name in set(re.findall(r"#include <(\S+)>", text)):
        if (root / "include" / name).exists():
            (elsewhere / "include" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / "include" / name, elsewhere / "include" / name)
    for name in ("torch/headeronly/macros/cmake_macros.h", "ATen/Config.h"):
        if (root / "include" / name).exists():
            (elsewhere / "include" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / "include" / name, elsewhere / "include" / name)
    monkeypatch.setattr(torch, "__file__", str(elsewhere / "__init__.py"))
    there = native_build.full_recipe()
    assert there.include_flags != here.include_flags
    assert there.digest() == here.digest()
    header = elsewhere / "include" / "torch" / "library.h"
    header.write_text(header.read_text() + "// patched\n")
    assert native_build.full_recipe().digest() != here.digest()
