from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from device_communicators.cpu import native_build
from tests.helpers.cuda_on_cpu import EMULATION

pytestmark = [pytest.mark.slow, pytest.mark.long]

DEADLINE_S = 600
FLAGS = ("-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-math-errno", "-ffp-contract=off", "-pthread")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
THREAD = ("-fsanitize=thread", "-Wno-tsan")  # GCC can't follow a fence for old kernels


def _run(command: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)


def _built(folder: Path, flags: Sequence[str], weakened: tuple[str, str] | None = None) -> dict[str, Path]:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder.mkdir()
    (folder / "empty.cpp").write_text("int main() {}\n")
    if _run([*compiler, *flags, str(folder / "empty.cpp"), "-o", folder / "empty"]).returncode != 0:
        pytest.skip(f"the compiler has no {flags[0]}")
    names = ("cpu_ranks", "hosts_ranks", "transfers_ranks", "matcher_explorer")
    sources = [*native_build.plain_recipe().sources, *(EMULATION / f"{name}.cpp" for name in names)]
    include = f"-I{sources[0].parent}"
    if weakened is not None:
        text = next(source for source in sources if source.name == "wait.cpp").read_text()
        assert text.count(weakened[0]) == 1
        (folder / "wait.cpp").write_text(text.replace(*weakened))
        sources = [folder / "wait.cpp" if source.name == "wait.cpp" else source for source in sources]

    def compiled(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        done = _run([*compiler, *FLAGS, *flags, include, "-c", source, "-o", made])
        assert done.returncode == 0, done.stderr
        return made

    with ThreadPoolExecutor(len(native_build.usable_cores())) as pool:
        objects = list(pool.map(compiled, sources))
    library = [made for made in objects if made.stem not in names]
    for name in names:
        done = _run([*compiler, *flags, "-pthread", *library, folder / f"{name}.o", "-o", folder / name])
        assert done.returncode == 0, done.stderr
    return {name: folder / name for name in names}


@pytest.mark.parametrize(("flags", "ranks"), [(ADDRESS, "processes"), (THREAD, "threads")], ids=["address", "thread"])
def test_sanitizers_find_nothing(tmp_path: Path, flags: Sequence[str], ranks: str) -> None:
    programs = _built(tmp_path / "build", flags)
    options = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "exitcode=66"}
    arguments = {"matcher_explorer": ["--receives", "2"], "transfers_ranks": []}
    for name, program in programs.items():
        done = _run([program, *arguments.get(name, [ranks])], **options)
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("this kernel's address layout is not one that ThreadSanitizer knows")
        assert done.returncode == 0, (done.stdout + done.stderr)[:5000]
        assert (", all holds" if name == "matcher_explorer" else " checks, 0 wrong") in done.stdout
        assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr[:5000]


def test_ranks_of_several_hosts(tmp_path: Path) -> None:
    """Runs more random programs, because no sanitizer slows them. `cpu_ranks calls` counts system calls."""
    programs = _built(tmp_path / "build", ("-O2",))
    commands = (["cpu_ranks", "calls"], ["hosts_ranks", "processes", "1", "100"], ["transfers_ranks", "1", "100"])
    for command in commands:
        done = _run([programs[command[0]], *command[1:]])
        assert done.returncode == 0, (done.stdout + done.stderr)[:5000]
        assert " checks, 0 wrong" in done.stdout


def test_a_weaker_order_is_noticed(tmp_path: Path) -> None:
    order = "value.store(next, std::memory_order_{})"
    programs = _built(tmp_path / "build", THREAD, weakened=(order.format("release"), order.format("relaxed")))
    done = _run([programs["cpu_ranks"], "threads"], TSAN_OPTIONS="exitcode=66")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is not one that ThreadSanitizer knows")
    assert done.returncode == 66
    assert "data race" in done.stderr
