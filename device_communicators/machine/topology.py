"""What connects the GPUs of this machine, as the driver tells: NVLink, NVSwitch, PCIe, NUMA nodes, fabrics, P2P.

Facts of one machine are here; `topology_reading` reads them through `nvml`. Which of the GPUs a process sees is
`visible_devices`' business, whether peer access really works `peer_probe`'s, what the ranks of a group make of it
together `group_topology`'s, the drawing `topology_text`'s.

A fact that this machine's driver doesn't tell is None, and `unknown` holds the reason: nothing here raises because NVML
can't do something. Where there is no driver, a topology has no GPUs and says why in `problem`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PCIE_PATHS = {
    0: ("BRD", "both on one board"),
    10: ("PIX", "over one PCIe switch at most"),
    20: ("PXB", "over several PCIe switches, not through the CPU"),
    30: ("PHB", "through a PCIe host bridge, which is the CPU"),
    40: ("NODE", "between host bridges of one NUMA node"),
    50: ("SYS", "between NUMA nodes"),
}
"""NVML's levels: the words of `nvidia-smi topo -m`, and what they mean."""

P2P_STATUS = ("OK", "chipset not supported", "GPU not supported", "topology not supported", "disabled by registry key",
              "not supported", "unknown")  # fmt: skip
"""NVML's states of a capability between two GPUs."""

P2P_CAPABILITIES = ("read", "write", "nvlink", "atomics", "pcie")
"""By NVML's number."""

FABRIC_STATES = ("not supported", "not started", "in progress", "completed")


@dataclass(frozen=True)
class Slice:
    """A MIG device: a part of a GPU that CUDA sees as a device of its own."""

    uuid: str
    name: str
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True)
class Link:
    """An active NVLink of a GPU, by what is at its other end."""

    number: int
    kind: str
    """gpu, switch or other."""
    pci_id: str | None
    """Of the other end; None where it isn't told, as for switches that a virtual machine doesn't show."""


@dataclass(frozen=True)
class Fabric:
    """The NVLink domain that a GPU belongs to, which may span several hosts (MNNVL)."""

    cluster: str
    """32 hexadecimal digits; all 0 where NVLink ends at the host, as in an HGX H100."""
    clique: int
    """GPUs of one cluster reach each other within a clique."""
    state: str
    """One of FABRIC_STATES."""

    @property
    def problem(self) -> str | None:
        """Why this GPU can't reach those of other hosts over NVLink, or None."""
        if self.state != "completed":
            return f"registration with the fabric is {self.state}"
        return None if self.cluster.strip("0") else "it belongs to no NVLink domain beyond its host"


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine; `index` is NVML's, in the order of PCI ids."""

    index: int
    uuid: str
    pci_id: str | None = None
    """As `0000:1b:00.0`."""
    name: str | None = None
    memory_bytes: int | None = None
    numa_node: int | None = None
    """Of the CPU memory next to it: where a process that drives it should run."""
    cores: tuple[int, ...] | None = None
    """Of the CPU next to it."""
    links: tuple[Link, ...] | None = None
    """Active NVLinks; empty where there are none."""
    fabric: Fabric | None = None
    mig: bool | None = None
    """Whether it is divided into slices, so that CUDA shows those instead of it."""
    slices: tuple[Slice, ...] = ()
    unknown: dict[str, str] = field(default_factory=dict)
    """What isn't known, and why."""

    @property
    def switch_links(self) -> int:
        return sum(link.kind == "switch" for link in self.links or ())


@dataclass(frozen=True)
class Path:
    """How one GPU reaches another, as the driver tells; `peer_probe` finds out whether it is true."""

    nvlinks: int | None
    """Links between the two, or of each into the switches: the fewer of both. 0: none."""
    switched: bool = False
    pcie: str | None = None
    """PIX, PXB, PHB, NODE or SYS: see PCIE_PATHS."""
    p2p: dict[str, str] = field(default_factory=dict)
    """Capability to state, of P2P_CAPABILITIES and P2P_STATUS; what isn't told is missing."""
    unknown: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As in `nvidia-smi topo -m`: NV18, PIX, …; ? where nothing is known."""
        return f"NV{self.nvlinks}" if self.nvlinks else self.pcie or "?"

    @property
    def peer_problem(self) -> str | None:
        """Why one can't read and write the other's memory, as the driver tells, or None."""
        return self._problem("read") or self._problem("write")

    @property
    def nvlink_problem(self) -> str | None:
        """Why NVLink doesn't connect the two, or None. Links that are up can still be of no use, as without the
        switches' manager."""
        if self.nvlinks is None:
            return f"the number of NVLinks is unknown: {self.unknown.get('nvlinks', 'not told')}"
        if not self.nvlinks:
            return "there is no NVLink"
        return self._problem("nvlink") if "nvlink" in self.p2p else None

    def _problem(self, capability: str) -> str | None:
        state = self.p2p.get(capability)
        if state == "OK":
            return None
        return f"P2P {capability} is {state or 'unknown: ' + self.unknown.get(f'p2p {capability}', 'not told')}"


@dataclass(frozen=True)
class Topology:
    """The GPUs of this machine and the paths between them."""

    gpus: tuple[Gpu, ...] = ()
    paths: dict[tuple[int, int], Path] = field(default_factory=dict)
    """By the indices of two different GPUs, in both orders."""
    driver_version: str | None = None
    cuda_version: str | None = None
    problem: str | None = None
    """Why there is none."""
    remarks: tuple[str, ...] = ()

    def find(self, uuid: str) -> tuple[Gpu, Slice | None] | None:
        """The GPU, and the slice of it, with this UUID, with or without the prefix that torch leaves out."""
        for gpu in self.gpus:
            if _is(uuid, gpu.uuid):
                return gpu, None
            for part in gpu.slices:
                if _is(uuid, part.uuid):
                    return gpu, part
        return None

    def path(self, uuid: str, other: str) -> Path | None:
        """Between the GPUs of these UUIDs; None where one isn't of this machine, or both are the same."""
        one, two = self.find(uuid), self.find(other)
        return None if one is None or two is None else self.paths.get((one[0].index, two[0].index))


def _is(uuid: str, known: str) -> bool:
    return uuid in (known, known.partition("-")[2])


def spans(numbers: Sequence[int]) -> str:
    """`0-23,96-119` of ascending numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, span)) for span in found)
