"""peer/csrc compiles with NVRTC for every architecture, and its PTX orders memory accesses. Needs no GPU."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import kernel_resources
import pytest

from device_communicators.base import build_cache
from device_communicators.cpu import native_build
from device_communicators.peer import kernels as peer_kernels
from device_communicators.peer.kernels import KERNELS, KernelError
from tests.helpers import compiled
from tests.programs import Program
from tests.references import NVRTC_OF_CUDA_12, NVRTC_OF_TORCH, Reference

ARCHITECTURES = ("sm_80", "sm_90")
DEADLINE_S = 300


@functools.cache
def reason() -> str | None:
    try:
        peer_kernels.nvrtc_version()
    except KernelError as error:
        return str(error)
    return None


needs_nvrtc = pytest.mark.skipif(reason() is not None, reason=f"needs NVRTC: {reason()}")


def kept(name: str, make: Callable[[], str]) -> str:
    files = [*peer_kernels.source_files(), Path(peer_kernels.__file__), Path(__file__)]
    version = peer_kernels.nvrtc_version() if reason() is None else None
    return compiled.kept(name, [version], files, lambda path: path.write_text(make())).read_text()


def compiled_for(arch: str) -> dict[str, str]:
    return dict(json.loads(kept(f"{arch}.json", lambda: json.dumps(_compile(arch)))))


def _compile(arch: str) -> dict[str, str]:
    from cuda.bindings import nvrtc

    core, _ = peer_kernels._packages()
    programs, log = [], io.StringIO()

    def made(*given: Any, make: Callable[..., Any] = core.Program) -> Any:
        programs.append(make(*given))
        return programs[0]

    with mock.patch.object(core, "Program", made):
        assert peer_kernels.compile_kernels(arch, log=log)
    # Read the PTX by the binding: cuda.core asks the driver first.
    _, size = nvrtc.nvrtcGetPTXSize(programs[0].handle)
    content = b" " * size
    nvrtc.nvrtcGetPTX(programs[0].handle, content)
    return {"log": log.getvalue(), "ptx": content.decode()}


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_and_none_spills(arch: str) -> None:
    resources = kernel_resources.read(compiled_for(arch)["log"])
    assert set(resources) == set(KERNELS)
    for name, used in resources.items():
        assert used["registers"] <= 128, f"{name}: a block of 512 threads has no more"
        assert used["spilled_bytes"] == used["stack_bytes"] == 0, f"{name} keeps something in local memory"
        assert used["shared_bytes"] <= 48 << 10, f"{name}: more needs a launch attribute"


_OTHER_NVRTC = """
import ctypes, sys
from cuda import core
from device_communicators.peer import kernels

arch, path, builtins = sys.argv[1:]
ctypes.CDLL(builtins)  # else it looks in the system's folders
library = ctypes.CDLL(path)
options = kernels.program_options(core, arch).as_bytes("nvrtc")
program, size = ctypes.c_void_p(), ctypes.c_size_t()
source = (kernels.SOURCES / "kernels.cu").read_bytes()
assert library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
log = ctypes.create_string_buffer(size.value)
library.nvrtcGetProgramLog(program, log)
print(log.value.decode())
sys.exit(code)
"""


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("files", [NVRTC_OF_TORCH, NVRTC_OF_CUDA_12], ids=lambda files: files[0].version)
def test_other_compilers_take_the_kernels(files: tuple[Reference, ...]) -> None:
    """Older compilers refuse code that the newest NVRTC accepts."""
    paths = [str(each.path_in_cache()) for each in files]

    def made() -> str:
        command = [sys.executable, "-c", _OTHER_NVRTC, "sm_90", *paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    kept(f"nvrtc-{files[0].version}.log", made)


OWN = {
    "ld.global.v2.b32", "st.global.v2.b32", "ld.global.v4.b32", "st.global.v4.b32", "ld.global.u32", "st.global.u32",
}  # fmt: skip
OWN_OF_NORMS = {"ld.global.f32", "st.global.f32", "st.u8", "st.u16", "st.u32"}
PACKETS = {"st.relaxed.sys.global.v2.b64", "ld.relaxed.sys.global.v2.b64"}
STAGES = {"st.relaxed.sys.global.v4.b32", "ld.relaxed.sys.global.v4.b32"}
FLAGS = {"st.release.sys.global.u32", "ld.acquire.sys.global.u32"}
HOST = {"ld.relaxed.sys.global.b64"}
_ACCESS = re.compile(r"(?<!bar\.)\b((?:ld|st|atom|red|fence|membar)\.[\w.]+)")


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_other_ranks_see_is_accessed_with_system_scope_and_flags_in_order(arch: str) -> None:
    ptx = compiled_for(arch)["ptx"]
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)^}", ptx, re.DOTALL | re.MULTILINE))
    assert set(bodies) == set(KERNELS)
    for name, body in bodies.items():
        accesses = [each for each in _ACCESS.findall(body) if ".param" not in each and ".shared." not in each]
        norm = "norm" in name
        pushes = norm or "_push" in name
        own = OWN | OWN_OF_NORMS if norm else OWN
        assert set(accesses) - own == (PACKETS if pushes else STAGES | FLAGS) | HOST, name
        variants = accesses.count("st.global.u32")
        reads = 2 * variants if norm else variants
        assert accesses.count("ld.global.u32") == reads, f"{name}: one epoch read, one written, for each body"
        assert variants == (4 if name.startswith("all_reduce") else 1), "for 2, 4, 8 and any number of ranks"
        if not pushes:
            barriers = 2 if "two_shot" in name else 1
            assert accesses.count("st.release.sys.global.u32") >= variants * barriers
            assert accesses.count("ld.acquire.sys.global.u32") >= variants * barriers
        assert "trap;" in body
        assert "griddepcontrol" not in body, f"{name} may overlap with the next one, which shares its epoch"
    functions = "".join(re.findall(r"^\.func[^;]*?^{.*?^}", ptx, re.DOTALL | re.MULTILINE))
    accesses = {each for each in _ACCESS.findall(functions) if ".param" not in each}
    reports_and_clearing = {"st.relaxed.sys.global.b64", "st.relaxed.sys.global.u32", "fence.acq_rel.sys"}
    of_the_call = {"ld.u32", "ld.u64"}
    assert {each for each in accesses if not re.fullmatch(r"(ld|st)\.[bsu]8", each)} == (
        reports_and_clearing | of_the_call | HOST | {"st.relaxed.sys.global.v2.b64"}
    )


def test_a_cubin_is_compiled_once_and_then_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counting: Callable[[], int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = peer_kernels.cubin("sm_90")
    assert peer_kernels.cubin("sm_90") == first
    assert counting() == 1
    (kept,) = (tmp_path / "parallel_state").glob("cuda_sm_90_*.cubin")
    monkeypatch.setenv("PARALLEL_STATE_BUILD", "never")
    assert peer_kernels.cubin("sm_90") == first
    with pytest.raises(KernelError, match="PARALLEL_STATE_BUILD=never forbids"):
        peer_kernels.cubin("sm_80")
    assert counting() == 1
    assert build_cache.flaw_of(kept) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "writable"])
def test_a_cubin_that_is_not_whole_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counting: Callable[[], int], damage: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer_kernels.cubin("sm_90")
    (kept,) = (tmp_path / "parallel_state").glob("*.cubin")
    content = kept.read_bytes()
    if damage == "writable":
        kept.chmod(0o666)
    else:
        flipped = bytes([content[0] ^ 1]) + content[1:]
        kept.write_bytes({"cut": content[:-1], "flipped": flipped, "empty": b""}[damage])
    monkeypatch.setenv("PARALLEL_STATE_BUILD", "never")
    why = "or can write to it" if damage == "writable" else "is damaged: its checksum is wrong"
    with pytest.raises(KernelError, match=f"{why}, and PARALLEL_STATE_BUILD=never forbids compiling them"):
        peer_kernels.cubin("sm_90")
    monkeypatch.delenv("PARALLEL_STATE_BUILD")
    assert peer_kernels.cubin("sm_90") == b"sm_90 2"
    assert counting() == 2
    assert build_cache.flaw_of(kept) is None


def test_a_cache_of_others_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counting: Callable[[], int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer_kernels.cubin("sm_90")
    (tmp_path / "parallel_state").chmod(0o777)
    with pytest.raises(KernelError, match="but another user owns"):
        peer_kernels.cubin("sm_90")


def test_another_source_or_version_is_another_cubin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counting: Callable[[], int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    peer_kernels.cubin("sm_90")
    peer_kernels.cubin("sm_80")
    monkeypatch.setattr(peer_kernels, "nvrtc_version", lambda: (12, 9))
    peer_kernels.cubin("sm_90")
    sources = tmp_path / "cuda"
    shutil.copytree(peer_kernels.SOURCES, sources)
    with open(sources / "epochs.cuh", "a", encoding="utf-8") as file:
        file.write("// changed\n")
    monkeypatch.setattr(peer_kernels, "SOURCES", sources)
    peer_kernels.cubin("sm_90")
    assert counting() == 4


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls: list[str] = []

    def compile_kernels(arch: str) -> bytes:
        calls.append(arch)
        return f"{arch} {len(calls)}".encode()

    monkeypatch.setattr(peer_kernels, "compile_kernels", compile_kernels)
    monkeypatch.setattr(peer_kernels, "nvrtc_version", lambda: (13, 0))
    return lambda: len(calls)


@needs_nvrtc
def test_a_source_that_does_not_compile_is_reported_by_its_first_error(tmp_path: Path) -> None:
    (tmp_path / "kernels.cu").write_text("__global__ void broken() { nothing; }\n")
    with pytest.raises(KernelError, match=r"for sm_90: kernels\.cu\(1\): error: .*nothing"):
        peer_kernels.compile_kernels("sm_90", sources=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["cuda", "cuda.core", "cuda.bindings"])
def test_what_is_missing_is_named(missing: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "from device_communicators.peer import kernels as peer_kernels\n"
        "try:\n"
        "    peer_kernels.compile_kernels('sm_90')\n"
        "except peer_kernels.KernelError as error:\n"
        "    print(error)\n"
    )
    out, err = Program(code, os.environ).communicate(60)
    assert "pip install parallel-state[cuda]" in out, err
    assert missing.split(".")[-1] in out


def test_the_library_for_cpus_does_not_depend_on_these_sources() -> None:
    assert not [path for path in native_build.plain_recipe().sources if path.suffix in (".cu", ".cuh")]
    before = native_build.sources_digest()
    extra = peer_kernels.SOURCES / "not_there.h"
    extra.write_text("")
    try:
        assert native_build.sources_digest() == before
    finally:
        extra.unlink()


@pytest.mark.slow
def test_nvcc_takes_the_same_sources(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    # To PTX only: NVRTC has the same assembler.
    command = [nvcc, "-std=c++17", "-arch=compute_90", "-ptx", "-Werror", "all-warnings"]

    def made() -> str:
        ptx = tmp_path / "kernels.ptx"
        source = str(peer_kernels.SOURCES / "kernels.cu")
        done = subprocess.run([*command, "-o", str(ptx), source], capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        return ptx.read_text()

    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60).stdout
    name = f"nvcc-{hashlib.sha256(version.encode()).hexdigest()[:8]}.ptx"
    assert set(re.findall(r"\.entry (\w+)\(", kept(name, made))) == set(KERNELS)
