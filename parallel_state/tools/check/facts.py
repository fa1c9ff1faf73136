"""Defines the records that ranks exchange as JSON, and that `--json` writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from device_communicators.base.errors import format_ranks

INFO, WARNING, ERROR = "info", "warning", "error"
SEVERITIES = (INFO, WARNING, ERROR)
EXIT_CODES = {"": 0, INFO: 0, WARNING: 1, ERROR: 2}


class Interface(msgspec.Struct):
    name: str
    kind: str
    """`loopback`, `physical`, `infiniband`, `bridge`, `container` or `virtual`."""
    up: bool
    addresses: list[str] = []
    """Addresses with prefix length, such as `10.0.0.7/16`."""
    mtu: int = 0
    speed_mbit: int = 0
    """0 if the driver doesn't report the speed."""


class Place(msgspec.Struct):
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = None
    source: str = "single"
    problem: str = ""
    """Error in the launcher's environment variables."""
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False
    started_by: list[str] = []
    """Commands of this process's ancestors, the parent first."""
    variables: dict[str, str] = {}


class Network(msgspec.Struct):
    hostname: str = "?"
    namespace: str = ""
    name_resolves_to: list[str] = []
    gloo_interface: str = "?"
    gloo_address: str = ""
    nccl_interface: str = "?"
    master_resolves_to: list[str] = []
    interfaces: list[Interface] = []
    infiniband: dict[str, str] = {}
    """Port -> state and rate, such as `mlx5_0/1` -> `ACTIVE, 400 Gb/sec (4X NDR)`."""


class Versions(msgspec.Struct):
    python: str = ""
    torch: str = ""
    package: str = ""
    compiled: str = ""
    """Digest of the compiled library's sources; empty if the library is missing."""
    compiled_problem: str = ""
    nccl: str = ""
    driver: str = ""


class Limits(msgspec.Struct):
    """Limits of /dev/shm, open files and locked memory. The value -1 means no limit, or unknown.

    `shm_problem`: why /dev/shm can't be used, or "". `shm_device`: its device number, which differs between containers.
    """

    shm_bytes: int = -1
    shm_free_bytes: int = -1
    shm_problem: str = ""
    shm_device: int = 0
    files_hard: int = -1
    files_open: int = 0
    memlock_bytes: int = -1


class Cpu(msgspec.Struct):
    online: int = 0
    affinity: list[int] = []
    siblings: dict[str, list[int]] = {}
    """With SMT: core that this process can use -> all threads of the same physical core."""
    numa_nodes: dict[str, list[int]] = {}
    quota_cores: float = -1.0
    """-1 without a CPU quota."""
    cgroup: str = ""
    threads: int = 0


class GpuFact(msgspec.Struct):
    index: int
    uuid: str
    name: str = ""
    cores: list[int] = []


class GpuPath(msgspec.Struct):
    one: int
    two: int
    peer_problem: str = ""

    def __str__(self) -> str:
        return f"GPU{self.one}–GPU{self.two}"


class Gpus(msgspec.Struct):
    devices: list[GpuFact] = []
    visible: list[str] = []
    """UUIDs of CUDA's GPUs, in CUDA's order."""
    own: str = ""
    paths: list[GpuPath] = []
    problem: str = ""
    torch_cuda: bool = False
    remarks: list[str] = []
    device_files: int = 0
    """Number of the driver's GPU files in /dev, counted without NVML."""


class Facts(msgspec.Struct):
    place: Place = msgspec.field(default_factory=Place)
    network: Network = msgspec.field(default_factory=Network)
    versions: Versions = msgspec.field(default_factory=Versions)
    limits: Limits = msgspec.field(default_factory=Limits)
    cpu: Cpu = msgspec.field(default_factory=Cpu)
    gpus: Gpus = msgspec.field(default_factory=Gpus)
    boot_id: str = ""
    pid: int = 0
    settings_unknown: list[str] = []
    settings_wrong: list[str] = []
    probe: list[str] = []
    """Address, port and token of this rank's `links.Listener`; empty if there is no listener."""
    late: dict[str, str] = {}
    """Name of a value that couldn't be read -> reason."""

    @property
    def host_key(self) -> str:
        return f"{self.network.namespace or self.boot_id} {self.network.hostname}"


class Link(msgspec.Struct):
    source: int
    """Number of the measuring rank, in the order of arrival; `target` is the measured rank's."""
    target: int
    problem: str = ""
    kind: str = ""
    """Kind of the problem: `refused`, `silent`, `unreachable`, `stranger` or `broken`."""
    rtt_us: float = 0.0
    bytes_per_s: float = 0.0
    retransmitted: int = 0
    segments: int = 0
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0


class Measured(msgspec.Struct):
    cpu_ms: list[float] = []
    links: list[Link] = []


class GroupTraffic(msgspec.Struct):
    kind: str
    ranks: list[int]
    route: str
    """Names of the communicators that are used, from the smallest message to the largest."""
    latency_us: float = 0.0
    latency_mad_us: float = 0.0
    bytes_per_s: float = 0.0
    """Bus bandwidth of a large all_reduce, as nccl-tests define it."""
    checks: int = 0
    wrong: list[str] = []


class Traffic(msgspec.Struct):
    groups: list[GroupTraffic] = []
    start_s: float = 0.0
    problem: str = ""
    stage: str = ""
    cpu_ms: list[float] = []


class Finding(msgspec.Struct):
    severity: str
    code: str
    found: str
    why: str
    fix: str
    ranks: list[int] = []
    hosts: list[str] = []

    @property
    def where(self) -> str:
        ranks = named(self.ranks) if self.ranks else ""
        return ", ".join(filter(None, (ranks, " ".join(self.hosts))))


def worst(findings: Sequence[Finding]) -> str:
    return max((each.severity for each in findings), key=SEVERITIES.index, default="")


def named(ranks: Iterable[int]) -> str:
    each = sorted(set(ranks))
    return f"rank {each[0]}" if len(each) == 1 else f"ranks {format_ranks(each).strip('[]')}"


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"
