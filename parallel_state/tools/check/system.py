"""Collects the data about one process that `check` needs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from device_communicators.base import host, settings
from device_communicators.base.cores import parse_list
from device_communicators.base.errors import ParallelStateError, SettingError
from device_communicators.base.helper_threads import Call
from device_communicators.base.host import read_text
from device_communicators.cpu import native, native_build
from parallel_state.startup import binding, environment, interfaces
from parallel_state.startup.stores import JOB_STORE
from parallel_state.tools.check.facts import (
    Cpu,
    Facts,
    GpuFact,
    GpuPath,
    Gpus,
    Interface,
    Limits,
    Network,
    Place,
    Versions,
)

_SIOCGIFFLAGS, _SIOCGIFMTU, _SIOCGIFHWADDR = 0x8913, 0x8921, 0x8927
_IFF_UP = 1
_INFINIBAND = "32"  # ARPHRD_INFINIBAND
_CONTAINER_NAMES = ("docker", "br-", "virbr", "cni", "flannel", "cali", "podman", "lxcbr", "kube-")
VARIABLES = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS|USE_AGENT_STORE)"
    r"|SLURM_(JOB_ID|JOB_NODELIST|JOB_NUM_NODES|NNODES|NODEID|NODENAME|NTASKS|NPROCS|PROCID|LOCALID|STEPID|STEP_ID"
    r"|STEP_NODELIST|STEP_NUM_TASKS|STEP_TASKS_PER_NODE|TASKS_PER_NODE|DISTRIBUTION|CPU_BIND|LAUNCH_NODE_IPADDR)|SLURMD_NODENAME"
    r"|OMPI_COMM_WORLD_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|NODE_RANK)|OMPI_VERSION|PMI_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE)"
    r"|PMIX_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|NAMESPACE)|MPI_LOCAL(RANKID|NRANKS)|MV2_COMM_WORLD_\w+"
    r"|NCCL_(?!.*(SECRET|TOKEN|PASSWORD))\w+|GLOO_\w+|TORCH_NCCL_\w+|UCX_NET_DEVICES|CUDA_VISIBLE_DEVICES"
    r"|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|NVIDIA_VISIBLE_DEVICES|OMP_NUM_THREADS|MKL_NUM_THREADS|KMP_AFFINITY"
    r"|PARALLEL_STATE_\w+)"
)


def collect(deadline: float) -> Facts:
    """Describes this process and its host. A value that isn't known by `deadline` (monotonic) is listed in `late`."""
    found = Facts(place(), boot_id=host.boot_id(), pid=os.getpid())
    parts: dict[str, Callable[[], Any]] = {
        "network": network, "versions": versions, "limits": limits, "cpu": cpu, "gpus": gpus,
        "compiled": compiled_part, "address": interfaces.whereabouts, "name": _own_name,
    }  # fmt: skip
    running = {name: Call(read) for name, read in parts.items()}
    for name, call in running.items():
        value, problem = _result(call, max(0.05, deadline - time.monotonic()))
        if problem:
            found.late[name] = problem
        elif name == "compiled":
            found.versions.compiled, found.versions.compiled_problem = value
        elif name == "address":
            found.network.gloo_interface, found.network.gloo_address = value.interface, value.address
        elif name == "name":
            found.network.name_resolves_to = value
        else:
            setattr(found, name, value)
    with_own_gpu(found)
    if found.place.master_addr:
        names = Call(lambda: _resolve(found.place.master_addr))
        resolved, problem = _result(names, max(0.5, min(3.0, deadline - time.monotonic())))
        found.network.master_resolves_to = resolved or []
        if problem:
            found.late["master"] = problem
    found.settings_unknown = settings.unknown_names()
    for setting in settings.ALL:
        try:
            setting.get()
        except SettingError as error:
            found.settings_wrong.append(str(error))
    with_set_cores(found)
    return found


def with_set_cores(found: Facts) -> None:
    try:
        own = binding.cores_as_set(found.place.local_rank, found.place.local_world_size)
        found.cpu.affinity = found.cpu.affinity if own is None else own
    except ParallelStateError as error:
        if str(error) not in found.settings_wrong:
            found.settings_wrong.append(str(error))


def _result(call: Call, limit_s: float) -> tuple[Any, str]:
    if not call.wait(time.monotonic() + limit_s):
        return None, f"no answer within {limit_s:.1f} s"
    try:
        return call.result(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _number(text: str, default: int = 0) -> int:
    try:
        return int(text)
    except ValueError:
        return default


def place(environ: Mapping[str, str] | None = None) -> Place:
    env = os.environ if environ is None else environ
    found = Place(
        variables={name: env[name] for name in sorted(env) if VARIABLES.fullmatch(name)},
        started_by=_ancestors(),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    try:
        detected = environment.detect(env, rendezvous=False)
        found.source = detected.source
        found.rank, found.local_rank, found.world_size = detected.rank, detected.local_rank, detected.world_size
        found.local_world_size = detected.local_world_size
        if found.world_size > 1:
            detected = environment.detect(env)
    except ParallelStateError as error:
        found.problem = str(error)
        for field, names in _FALLBACK.items():
            value = next((env[name] for name in names if env.get(name, "").strip().isdecimal()), None)
            if value is not None:
                setattr(found, field, int(value))
        found.source = found.source if found.source != "single" else "unknown"
    found.master_addr = detected.master_addr or "" if not found.problem else env.get("MASTER_ADDR", "")
    found.master_port = detected.master_port or 0 if not found.problem else _number(env.get("MASTER_PORT", ""))
    if JOB_STORE.try_get(found.master_addr, found.master_port) is not None:
        found.source, found.agent_store = "launch", True
    return found


_FALLBACK = {
    "rank": ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK"),
    "world_size": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PMI_SIZE"),
    "local_rank": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID"),
}


def _ancestors() -> list[str]:
    found: list[str] = []
    pid = os.getppid()
    while pid > 0 and len(found) < 16:
        words = [word for word in read_text(f"/proc/{pid}/cmdline").split("\0") if word]
        found.append(_program(words) or read_text(f"/proc/{pid}/comm") or "?")
        pid = host.parent_of(pid)
    return found


def _program(words: list[str]) -> str:
    if not words:
        return ""
    name = os.path.basename(words[0])
    if not name.startswith("python"):
        return name
    for word, following in zip(words[1:], [*words[2:], ""], strict=True):
        if word == "-c":
            return f"{name} -c"
        if word == "-m":
            return f"{name} -m {following}"
        if not word.startswith("-"):
            return f"{name} {os.path.basename(word)}"
    return name


def network() -> Network:
    found = Network(hostname=socket.gethostname() or "?", namespace=host.namespace_id("net"))
    found.interfaces = read_interfaces()
    found.infiniband = _infiniband()
    found.nccl_interface = nccl_interface(found.interfaces, os.environ)
    return found


def _own_name() -> list[str]:
    with contextlib.suppress(OSError):  # a host name may not resolve
        return _resolve(socket.gethostname())
    return []


def read_interfaces() -> list[Interface]:
    found = []
    for _, name in socket.if_nameindex():
        folder = _folder_of(name)
        kind = _kind_of_interface(name, folder)
        flags, mtu = host.interface_ioctl(name, _SIOCGIFFLAGS), host.interface_ioctl(name, _SIOCGIFMTU)
        speed = _number(read_text(f"{folder}/speed")) if folder and kind in ("physical", "infiniband") else 0
        found.append(
            Interface(
                name=name,
                kind=kind,
                up=bool(flags and int.from_bytes(flags[:2], "little") & _IFF_UP),
                addresses=list(host.networks_of(name)),
                mtu=int.from_bytes(mtu[:4], "little") if mtu else 0,
                speed_mbit=max(0, speed),
            )
        )
    return found


def _folder_of(name: str) -> str:
    folder, address = f"/sys/class/net/{name}", host.interface_ioctl(name, _SIOCGIFHWADDR)
    seen = read_text(f"{folder}/address").replace(":", "")[:12]
    return folder if address and seen == address[2:8].hex()[: len(seen)] and seen else ""


def _kind_of_interface(name: str, folder: str) -> str:
    if name == "lo":
        return "loopback"
    if name.startswith(_CONTAINER_NAMES):
        return "container"
    if folder and os.path.isdir(f"{folder}/bridge"):
        return "bridge"
    if (folder and read_text(f"{folder}/type") == _INFINIBAND) or name.startswith("ib"):
        return "infiniband"
    return "physical" if folder and os.path.exists(f"{folder}/device") else "virtual"


def nccl_interface(found: list[Interface], environ: Mapping[str, str]) -> str:
    """Returns the name of the interface that NCCL would choose from `found`, or "". Follows NCCL's
    `ncclFindInterfaces`.
    """
    usable = [each for each in found if each.up and each.addresses] + [
        each for each in found if each.kind == "loopback" and each.addresses and not each.up
    ]
    given = environ.get("NCCL_SOCKET_IFNAME", "").strip()
    if given:
        exclude, exact = given.startswith("^"), given.lstrip("^").startswith("=")
        names = [name.strip() for name in given.lstrip("^=").split(",") if name.strip()]
        matches = [
            each.name
            for each in usable
            if any(each.name == name if exact else each.name.startswith(name) for name in names) != exclude
        ]
        return matches[0] if matches else ""
    for fits in (
        lambda each: each.name.startswith("ib"),
        lambda each: not each.name.startswith(("docker", "lo", "virbr")),
        lambda each: each.name.startswith("docker"),
        lambda each: each.name.startswith("lo"),
    ):
        name = next((each.name for each in usable if fits(each)), None)
        if name is not None:
            return name
    return ""


def _resolve(name: str) -> list[str]:
    return sorted({str(entry[4][0]) for entry in host.resolve(name)})


def _infiniband() -> dict[str, str]:
    found = {}
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        state = read_text(port / "state").partition(":")[2].strip() or "?"
        found[f"{port.parts[-3]}/{port.name}"] = f"{state}, {read_text(port / 'rate')}"
    return found


def versions() -> Versions:
    found = Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        driver=read_text("/sys/module/nvidia/version"),
    )
    with contextlib.suppress(metadata.PackageNotFoundError):
        found.package = metadata.version("parallel-state")
    with contextlib.suppress(Exception):  # a build without NCCL has no such function, or raises
        found.nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else ""
    return found


def compiled_part() -> tuple[str, str]:
    """Loads the compiled library, or compiles it as a job would. Returns the digest of its sources, and a problem; each
    can be "".
    """
    try:
        library = native.load()
    except native.NativeUnavailableError as error:
        return "", str(error)
    return f"{native_build.sources_digest()}{'' if library.has_ops else ' (without ops)'}", library.note


def limits() -> Limits:
    found = Limits()
    _read_shared_memory(found)
    found.files_hard = _bound(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    with contextlib.suppress(OSError):
        found.files_open = len(os.listdir("/proc/self/fd"))
    found.memlock_bytes = _bound(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    return found


def _bound(value: int) -> int:
    return -1 if value == resource.RLIM_INFINITY else value


def _read_shared_memory(found: Limits) -> None:
    folder = "/dev/shm"
    try:
        state = os.statvfs(folder)
        found.shm_bytes, found.shm_free_bytes = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
        found.shm_device = os.stat(folder).st_dev
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        found.shm_problem = error.strerror or str(error)
    mounted = [line.split() for line in read_text("/proc/self/mounts").splitlines()]
    kinds = [words[2] for words in mounted if len(words) > 2 and words[1] == folder]
    if not found.shm_problem and kinds and kinds[-1] not in ("tmpfs", "ramfs"):
        found.shm_problem = f"it is a {kinds[-1]}, not a tmpfs"


def _cgroup_folders(controller: str) -> list[Path]:
    for line in read_text("/proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if controller in names.split(","):
            root = Path("/sys/fs/cgroup") / controller
        elif number == "0" and os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
            root = Path("/sys/fs/cgroup")
        else:
            continue
        here = root / path.lstrip("/")
        found = [here, *here.parents]
        return found[: found.index(root) + 1] if root in found else [root]
    return []


def cpu_quota() -> tuple[float, str]:
    """Returns the lowest CPU quota that applies to this process, in cores (-1: none), and the folder of the cgroup that
    sets the quota.
    """
    tightest, where = -1.0, ""
    for folder in _cgroup_folders("cpu"):
        words = read_text(folder / "cpu.max").split()
        if not words:
            words = [read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")]
        quota, period = (_number(word, -1) for word in (*words, "", "")[:2])
        if quota > 0 and period > 0 and (tightest < 0 or quota / period < tightest):
            tightest, where = quota / period, str(folder)
    return tightest, where


def cpu() -> Cpu:
    affinity = sorted(os.sched_getaffinity(0))
    found = Cpu(online=os.cpu_count() or 0, affinity=affinity, threads=torch.get_num_threads())
    for core in affinity:
        siblings = parse_list(read_text(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
        if len(siblings) > 1:
            found.siblings[str(core)] = siblings
    for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        found.numa_nodes[node.name.removeprefix("node")] = parse_list(read_text(node / "cpulist"))
    found.quota_cores, found.cgroup = cpu_quota()
    return found


def run_cpu(repeats: int = 25) -> float:
    """Times a fixed loop `repeats` times, and returns the shortest time in ms."""
    wall_ms = []
    for _ in range(repeats):
        started, value = time.perf_counter(), 1
        for _ in range(15_000):
            value = (value * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
        wall_ms.append((time.perf_counter() - started) * 1e3)
    return min(wall_ms)


def gpus() -> Gpus:
    """Describes this host's GPUs without creating a CUDA context. `with_own_gpu` later sets the one that this rank
    uses.
    """
    from device_communicators.machine.topology import read_topology
    from device_communicators.machine.visible_devices import visible_devices

    topology = read_topology()
    visible = visible_devices(topology.gpus, os.environ)
    return Gpus(
        devices=[
            GpuFact(each.index, each.uuid, each.name or "", list(each.cores or ()))
            for each in topology.gpus
        ],
        visible=[gpu.uuid for gpu in visible.gpus],
        paths=[
            GpuPath(one, two, path.peer_problem or "")
            for (one, two), path in topology.paths.items()
            if one < two
        ],
        problem=topology.problem or "",
        torch_cuda=torch.version.cuda is not None,
        remarks=[*topology.remarks, *visible.remarks],
        device_files=len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]),
    )  # fmt: skip


def with_own_gpu(found: Facts) -> None:
    visible = found.gpus.visible
    index = 0 if len(visible) == 1 else found.place.local_rank
    found.gpus.own = visible[index] if index < len(visible) else ""
