"""What `pip install` puts on a user's machine: built from this checkout, installed elsewhere, imported from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
SOURCES = (
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "parallel_state",
    "device_communicators",
    "tests",
    "benchmarks",
)


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without network from a copy, as a build writes into its source tree."""
    for package, oldest in (("pip", 21), ("setuptools", 77)):  # what pyproject.toml asks of a build
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            found = "0"
        if int(found.split(".")[0]) < oldest:
            pytest.skip(f"a wheel can't be built offline: it needs {package} >= {oldest}, but found is {found}")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(path, source / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    run("-m", "pip", "wheel", *options, "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        str(path.relative_to(ROOT))
        for package in ("parallel_state", "device_communicators")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".pyi", ".cpp", ".h", ".inc", ".cu", ".cuh", ".json") or path.name == "py.typed"
    }
    assert {"parallel_state/py.typed", "device_communicators/py.typed", "parallel_state/state.py"} <= expected
    information = [name for name in names if ".dist-info/" in name]
    compiled = {name for name in names if Path(name).name.startswith("_native")}
    assert set(names) - set(information) - compiled == expected
    suffix = f"_torch{torch.__version__.replace('+', '_')}"
    assert {Path(name).name for name in compiled} == {
        f"_native{which}.{kind}" for which in ("", suffix) for kind in ("so", "digest")
    }
    assert "-py3-none-linux_" in wheel.name
    assert any(name.endswith("LICENSE") for name in information)
    assert wheel.name.startswith("parallel_state-")


def test_the_wheel_s_library_is_used_and_nothing_compiled(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "target")
    code = (
        "from device_communicators.cpu import native\n"
        "library = native.load()\n"
        "print(native.__file__, library.has_ops, library.ps_instruction_set().decode())\n"
    )
    variables = {"PYTHONPATH": str(tmp_path / "target"), "XDG_CACHE_HOME": str(tmp_path), "CXX": "/nowhere"}
    where, has_ops, _ = run("-c", code, cwd=tmp_path, **variables).split()
    assert where.startswith(str(tmp_path))
    assert has_ops == "True"
    assert not (tmp_path / "parallel_state").exists(), "no cache was needed"
    variables["PARALLEL_STATE_BUILD"] = "plain"
    assert run("-c", code, cwd=tmp_path, **variables).split()[1] == "False"


def test_a_wheel_is_made_without_a_compiler(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(path, source / name)
    run("setup.py", "-q", "bdist_wheel", "--dist-dir", tmp_path, cwd=source, PATH="/nowhere", CXX="")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "_native" in name and name.endswith(".so")]


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(name).decode()
    needed = {
        line.split(":")[1].strip() for line in text.splitlines() if line.startswith("Requires-Dist") and ";" not in line
    }
    assert {requirement.split(">")[0] for requirement in needed} == {"torch", "nvidia-ml-py", "msgspec"}
    assert "Requires-Python: >=3.10" in text
    assert "# parallel_state" in text, "the README is the long description"


def test_the_installed_package_works_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
    run("-m", "pip", "install", *options, "--target", target, wheel, cwd=elsewhere)
    code = (
        "import json, torch, parallel_state as ps, device_communicators\n"
        "ps.init_distributed_environment(1, 0)\n"
        "ps.initialize_model_parallel()\n"
        "total = ps.get_tp_group().all_reduce(torch.ones(3)).tolist()\n"
        "ps.destroy_distributed_environment()\n"
        "missing = sorted(set(ps.__all__) - set(dir(ps)))\n"
        "print(json.dumps([ps.__file__, device_communicators.__file__, total, missing]))\n"
    )
    upper, lower, total, missing = json.loads(run("-c", code, cwd=elsewhere, PYTHONPATH=str(target)).splitlines()[-1])
    assert Path(upper) == target / "parallel_state" / "__init__.py"
    assert Path(lower) == target / "device_communicators" / "__init__.py"
    assert total == [1.0, 1.0, 1.0]
    assert missing == []
