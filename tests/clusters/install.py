"""Installs MPICH, Open MPI, Intel MPI and Ray from PyPI, each into its own environment in the user's cache;
SLURM, PMIx and nftables from Debian, as root. `python -m tests.clusters.install [show]`. Tests of missing
launchers are skipped."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from benchmarks.harness.peers import MPIS

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallel_state" / "launchers"
RAY = "ray==2.60.0"
WHEELS = {**{mpi.folder: mpi.requirement for mpi in MPIS}, "ray": RAY}
PROGRAMS = {"ray": "ray"}
DEBIAN = {
    "slurm": ("slurm-wlm", "slurmctld", "slurmd", "slurm-client", "munge"),
    "pmix": ("libpmix-dev",),
    "nftables": ("nftables",),
}
"""SLURM opens PMIx's library by the name that only its development package has."""
DEBIAN_PROGRAMS = {
    "slurm": ("slurmctld", "slurmd", "srun", "munged"),
    "pmix": ("/usr/lib/*/pmix2/lib/libpmix.so",),
    "nftables": ("nft",),
}
PIP_S = 900


def path_of(name: str, word: str | None = None) -> Path:
    return FOLDER / name / "bin" / (word or PROGRAMS.get(name, "mpiexec"))


@cache
def missing(name: str) -> str | None:
    if name in DEBIAN:
        absent = [word for word in DEBIAN_PROGRAMS[name] if _which(word) is None]
        return f"{', '.join(absent)} not found (make test-clusters installs them on a Debian)" if absent else None
    return None if path_of(name).exists() else f"{name} is not installed (make test-clusters does)"


def _which(word: str) -> str | None:
    if word.startswith("/"):
        return next(glob.iglob(word), None)
    return shutil.which(word, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def install() -> list[str]:
    problems = [problem for name, wheel in WHEELS.items() if missing(name) for problem in _wheel(name, wheel)]
    problems += [problem for name in DEBIAN if missing(name) for problem in _debian(name)]
    missing.cache_clear()
    if not missing("ray"):
        _share_packages()
    return problems


def _wheel(name: str, wheel: str) -> list[str]:
    folder = FOLDER / name
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=PIP_S)
    alone = [] if name == "ray" else ["--no-deps"]  # an MPI's launcher doesn't need its library's dependencies
    done = subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q", *alone, wheel],
        capture_output=True, text=True, timeout=PIP_S,
    )  # fmt: skip
    if done.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return [f"{name}: {reasons[0] if reasons else 'pip failed'}"]
    return []


def _share_packages() -> None:
    site = next((FOLDER / "ray" / "lib").glob("python*/site-packages"))
    folders = [path for path in sys.path if path.endswith("-packages")]
    (site / "torch_of_the_caller.pth").write_text("".join(f"{each}\n" for each in folders))


def _debian(name: str) -> list[str]:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return [f"{name}: needs a Debian, and root"]
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *DEBIAN[name]]
    done = subprocess.run(
        ["sh", "-c", f"apt-get update -q && {' '.join(command)}"],
        capture_output=True, text=True, timeout=PIP_S, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )  # fmt: skip
    return [] if done.returncode == 0 else [f"{name}: apt-get: {done.stderr.strip().splitlines()[-1:]}"]


if __name__ == "__main__":
    for found in [] if sys.argv[1:] == ["show"] else install():
        print(f"could not get {found}")
    for each in (*WHEELS, *DEBIAN):
        print(f"{each}: {missing(each) or 'there'}")
