"""The records that ranks exchange: plain facts, without a judgement. What they mean is in `rules`.

Every record is a msgspec struct, so that it travels as JSON through any store and is `--json`'s content as well.
"""

from __future__ import annotations

import msgspec


class Interface(msgspec.Struct):
    """One network interface of a host."""

    name: str
    kind: str
    """loopback, physical, infiniband, bridge, container or virtual."""
    up: bool
    addresses: list[str] = []
    """With the length of the network's prefix: `10.0.0.7/16`."""
    mtu: int = 0
    speed_mbit: int = 0
    """0 where the driver doesn't tell."""


class Place(msgspec.Struct):
    """The launcher of this process, its rank, and the place where the ranks meet."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = None
    source: str = "single"
    problem: str = ""
    """The environment's error, where it can't be read: the numbers above are then what was found all the same."""
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False
    """True if the launcher says that it serves the store."""
    started_by: list[str] = []
    """Commands of the processes above this one, the nearest first."""
    variables: dict[str, str] = {}
    """Variables that launchers and libraries left in the environment, by an explicit list of names."""


class Network(msgspec.Struct):
    """The host's names, addresses and interfaces, and the choices that gloo and NCCL make among them."""

    hostname: str = "?"
    namespace: str = ""
    """Equal for processes that share their network."""
    name_resolves_to: list[str] = []
    gloo_interface: str = "?"
    gloo_address: str = ""
    nccl_interface: str = "?"
    master_resolves_to: list[str] = []
    interfaces: list[Interface] = []
    ephemeral_ports: tuple[int, int] = (32_768, 60_999)
    """The first and the last port that the kernel gives to outgoing connections."""
    infiniband: dict[str, str] = {}
    """Port → its state and rate, as `mlx5_0/1` → `ACTIVE, 400 Gb/sec (4X NDR)`."""


class Versions(msgspec.Struct):
    """Versions that must be equal on all ranks, or should be."""

    python: str = ""
    torch: str = ""
    package: str = ""
    compiled: str = ""
    """Digest of the compiled part; empty where there is none."""
    compiled_problem: str = ""
    nccl: str = ""
    cuda: str = ""
    driver: str = ""
    kernel: str = ""


class Limits(msgspec.Struct):
    """Limits of this process. -1: no limit, or unknown."""

    shm_bytes: int = -1
    shm_free_bytes: int = -1
    shm_problem: str = ""
    shm_device: int = 0
    tmp_folder: str = "/tmp"
    tmp_free_bytes: int = -1
    tmp_problem: str = ""
    files_hard: int = -1
    files_open: int = 0
    memlock_bytes: int = -1
    address_space_bytes: int = -1
    file_size_bytes: int = -1
    processes: int = -1
    processes_taken: int = 0
    cgroup_pids_left: int = -1
    cgroup_memory_left_bytes: int = -1
    memory_available_bytes: int = -1
    uid: int = 0


class Cpu(msgspec.Struct):
    """The cores that this rank may use."""

    model: str = ""
    online: int = 0
    affinity: list[int] = []
    siblings: dict[str, list[int]] = {}
    """Of each of those cores, where the CPU has several threads a core: all threads of its physical core."""
    numa_nodes: dict[str, list[int]] = {}
    quota_cores: float = -1.0
    """The cgroup's limit of CPU time, in cores; -1: none."""
    cgroup: str = ""
    threads: int = 0
    """Of torch, for one operation."""
    governor: str = ""


class GpuFact(msgspec.Struct):
    """One GPU of the host."""

    index: int
    uuid: str
    name: str = ""
    pci_id: str = ""
    numa_node: int = -1
    cores: list[int] = []


class GpuPath(msgspec.Struct):
    """The way between two GPUs of a host, by their indices."""

    one: int
    two: int
    nvlinks: int = -1
    pcie: str = ""
    peer_problem: str = ""

    def __str__(self) -> str:
        return f"GPU{self.one}–GPU{self.two}"


class Gpus(msgspec.Struct):
    """The host's GPUs, and this rank's."""

    devices: list[GpuFact] = []
    visible: list[str] = []
    """UUIDs, in CUDA's order."""
    own: str = ""
    """UUID of the one that this rank takes."""
    paths: list[GpuPath] = []
    problem: str = ""
    torch_cuda: bool = False
    """True if torch was built with CUDA."""
    remarks: list[str] = []
    iommu: bool = False
    acs_redirect: list[str] = []
    """PCI bridges that send traffic between their GPUs up to the CPU."""
    device_files: int = 0
    """GPUs by the driver's files in /dev, whatever NVML says."""


class Facts(msgspec.Struct):
    """Everything that one rank knows before it meets the others."""

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
    """Address, port and token of this rank's listener for measurements; empty where it has none."""
    late: dict[str, str] = {}
    """Facts that couldn't be collected, each with the reason."""

    @property
    def host_key(self) -> str:
        """Equal for ranks on one host, as a network sees it."""
        return f"{self.network.namespace or self.boot_id} {self.network.hostname}"


class CpuRun(msgspec.Struct):
    """A fixed piece of work on one core, repeated while all ranks do the same."""

    best_ms: float
    median_ms: float
    busy: float
    """Share of the time in which this rank had a core."""
    throttled: int = 0
    """Periods in which the cgroup's limit stopped it."""


class Link(msgspec.Struct):
    """The way from one host to another, as measured by TCP between two ranks."""

    source: int
    """Arrival that measured."""
    target: int
    problem: str = ""
    kind: str = ""
    """Of the problem: refused, silent, unreachable, stranger or broken."""
    rtt_us: float = 0.0
    rtt_mad_us: float = 0.0
    bytes_per_s: float = 0.0
    """The best of several runs, from the source to the target."""
    retransmitted: int = 0
    segments: int = 0
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0


class Measured(msgspec.Struct):
    """Measurements of one rank before any group was made."""

    cpu: list[CpuRun] = []
    links: list[Link] = []
    clock_offset_s: float | None = None
    """This rank's clock minus the leader's, as the plan came; it came up to half a second late."""


class GroupTraffic(msgspec.Struct):
    """Traffic of one rank in one group."""

    kind: str
    """Name of the axis, or `world`."""
    ranks: list[int]
    route: str
    """The communicators that carried it, by size."""
    latency_us: float = 0.0
    latency_mad_us: float = 0.0
    bytes_per_s: float = 0.0
    """Bus bandwidth of a large all_reduce, as nccl-tests count."""
    checks: int = 0
    wrong: list[str] = []


class Traffic(msgspec.Struct):
    """Outcomes of one rank with the layout's groups."""

    groups: list[GroupTraffic] = []
    start_s: float = 0.0
    problem: str = ""
    """The error with which the start, or a group's call, failed."""
    stage: str = ""
    cpu: list[CpuRun] = []
