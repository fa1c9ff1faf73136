"""Reads from the driver how this machine's GPUs are connected.

If the driver gives no answer for a fact, the field is None and `unknown` holds the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from device_communicators.machine.nvml import NoAnswerError, Reader, open_nvml

PCIE_PATHS = {
    0: ("BRD", "both on one board"),
    10: ("PIX", "over one PCIe switch at most"),
    20: ("PXB", "over several PCIe switches, not through the CPU"),
    30: ("PHB", "through a PCIe host bridge (the CPU)"),
    40: ("NODE", "between host bridges of one NUMA node"),
    50: ("SYS", "between NUMA nodes"),
}
"""Maps NVML's level to the label of `nvidia-smi topo -m` and its meaning."""

P2P_STATUS = ("OK", "chipset not supported", "GPU not supported", "topology not supported", "disabled by registry key",
              "not supported", "unknown")  # fmt: skip
"""Texts for NVML's P2P status, by number."""

P2P_CAPABILITIES = ("read", "write", "nvlink", "atomics", "pcie")


@dataclass(frozen=True)
class Link:
    number: int
    kind: str
    """Kind of device at the link's other end: "gpu", "switch" or "other"."""
    pci_id: str | None
    """PCI id of the device at the link's other end; None if unknown."""


@dataclass(frozen=True)
class Gpu:
    """A GPU. `index`: NVML's number, in the order of PCI ids. `cores`: CPU cores near the GPU. `mig`: True in MIG mode:
    CUDA then shows slices of the GPU, which have no links and no peers. `unknown`: for each field that is None, why.
    """

    index: int
    uuid: str
    pci_id: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    cores: tuple[int, ...] | None = None
    links: tuple[Link, ...] | None = None
    mig: bool | None = None
    unknown: dict[str, str] = field(default_factory=dict)

    @property
    def switch_links(self) -> int:
        return sum(link.kind == "switch" for link in self.links or ())


@dataclass(frozen=True)
class Path:
    nvlinks: int | None
    """Number of NVLinks between two GPUs. Through switches, the smaller of the two GPUs' numbers."""
    switched: bool = False
    pcie: str | None = None
    p2p: dict[str, str] = field(default_factory=dict)
    """Maps each known capability of P2P_CAPABILITIES to a text of P2P_STATUS."""
    unknown: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"NV{self.nvlinks}" if self.nvlinks else self.pcie or "?"

    @property
    def peer_problem(self) -> str | None:
        return self._problem("read") or self._problem("write")

    @property
    def nvlink_problem(self) -> str | None:
        if self.nvlinks is None:
            return f"the number of NVLinks is unknown: {self.unknown.get('nvlinks', 'not reported')}"
        if not self.nvlinks:
            return "there is no NVLink"
        return self._problem("nvlink") if "nvlink" in self.p2p else None

    def _problem(self, capability: str) -> str | None:
        state = self.p2p.get(capability)
        if state == "OK":
            return None
        return f"P2P {capability} is {state or 'unknown: ' + self.unknown.get(f'p2p {capability}', 'not reported')}"


@dataclass(frozen=True)
class Topology:
    gpus: tuple[Gpu, ...] = ()
    paths: dict[tuple[int, int], Path] = field(default_factory=dict)
    """Paths between two GPUs, by the GPUs' indices. Contains both (a, b) and (b, a)."""
    driver_version: str | None = None
    cuda_version: str | None = None
    problem: str | None = None
    """Why there are no GPUs, or None."""
    remarks: tuple[str, ...] = ()

    def find(self, uuid: str) -> Gpu | None:
        """Returns the GPU with this UUID, or None. The prefix `GPU-` of `uuid` is optional, because torch omits it."""
        return next((gpu for gpu in self.gpus if uuid in (gpu.uuid, gpu.uuid.partition("-")[2])), None)

    def path(self, uuid: str, other: str) -> Path | None:
        one, two = self.find(uuid), self.find(other)
        return None if one is None or two is None else self.paths.get((one.index, two.index))


_GPU, _SWITCH = 0, 2
_NO_LINK = {"not supported", "invalid argument"}


def read_topology(reader: Reader | None = None) -> Topology:
    """Reads this machine's GPU topology. Doesn't raise if the driver lacks features. `reader`: by default NVML."""
    try:
        if reader is not None:
            return _read(reader)
        with open_nvml() as nvml:
            return _read(nvml)
    except NoAnswerError as error:
        return Topology(problem=str(error))


def _read(reader: Reader) -> Topology:
    count = reader.ask("gpu_count")
    gpus, remarks = [], []
    for index in range(count):
        try:
            gpus.append(_read_gpu(reader, index))
        except NoAnswerError as error:
            remarks.append(f"GPU {index} doesn't answer: {error}")
    paths = {(one.index, two.index): _read_path(reader, one, two) for one, two in permutations(gpus, 2)}
    facts = _Facts(reader)
    cuda = facts.get("cuda_version")
    return Topology(
        tuple(gpus),
        paths,
        facts.get("driver_version"),
        None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        None if gpus else "the driver shows no GPU",
        tuple(remarks),
    )


class _Facts:
    def __init__(self, reader: Reader) -> None:
        self.unknown: dict[str, str] = {}
        self._reader = reader

    def get(self, fact: str, *where: int, question: str | None = None) -> Any:
        try:
            return self._reader.ask(question or fact, *where)
        except NoAnswerError as error:
            self.unknown[fact] = str(error)
            return None


def _read_gpu(reader: Reader, index: int) -> Gpu:
    uuid = reader.ask("uuid", index)
    facts = _Facts(reader)
    pci_id, cores = facts.get("pci_id", index), facts.get("cores", index)
    return Gpu(
        index,
        uuid,
        None if pci_id is None else short_pci_id(pci_id),
        facts.get("name", index),
        facts.get("memory_bytes", index),
        None if cores is None else tuple(cores),
        _links(facts, index),
        facts.get("mig", index, question="mig_enabled"),
        facts.unknown,
    )


def _links(facts: _Facts, gpu: int) -> tuple[Link, ...] | None:
    links: list[Link] = []
    reasons: set[str] = set()
    answered = False
    for number in range(facts.get("links", question="max_links") or 0):
        active = facts.get("links", gpu, number, question="link_is_active")
        if active is None:
            reasons.add(facts.unknown.pop("links").lower())
        else:
            answered = True
            if active:
                links.append(_link(facts, gpu, number))
    if answered or (reasons and reasons <= _NO_LINK):
        return tuple(links)
    if reasons:
        facts.unknown["links"] = ", ".join(sorted(reasons))
    return None


def _link(facts: _Facts, gpu: int, number: int) -> Link:
    remote = facts.get("link_ends", gpu, number, question="link_remote_type")
    pci_id = facts.get("link_ends", gpu, number, question="link_remote_pci_id")
    if pci_id is not None:
        pci_id = None if pci_id.lower().startswith("ffffffff") else short_pci_id(pci_id)
    if remote in (_GPU, _SWITCH):
        facts.unknown.pop("link_ends", None)
    kind = {_GPU: "gpu", _SWITCH: "switch"}.get(remote, "other")
    if remote is None and pci_id is None:
        # A switch that the virtual machine hides (NCCL issue 1182).
        kind = "switch"
    return Link(number, kind, pci_id)


def _read_path(reader: Reader, one: Gpu, two: Gpu) -> Path:
    facts = _Facts(reader)
    level = facts.get("pcie", one.index, two.index, question="common_ancestor")
    if level is not None and level not in PCIE_PATHS:
        facts.unknown["pcie"] = f"NVML's level {level} is unknown"
    p2p = {}
    for number, capability in enumerate(P2P_CAPABILITIES):
        state = facts.get(f"p2p {capability}", one.index, two.index, number, question="p2p_status")
        if state is not None:
            p2p[capability] = P2P_STATUS[state] if state < len(P2P_STATUS) else f"state {state}"
    links, switched = _count_links(one, two)
    if links is None:
        facts.unknown["nvlinks"] = (one if one.links is None else two).unknown.get("links", "not reported")
    return Path(links, switched, PCIE_PATHS.get(level, (None, ""))[0], p2p, facts.unknown)


def _count_links(one: Gpu, two: Gpu) -> tuple[int | None, bool]:
    """Returns the number of NVLinks between two GPUs (None if unknown), and True if the links lead through switches."""
    if one.links is None or two.links is None:
        return None, False
    direct = [_links_to(one, two), _links_to(two, one)]
    if any(direct):
        return min(direct), False
    through_switches = min(one.switch_links, two.switch_links)
    return through_switches, through_switches > 0


def _links_to(gpu: Gpu, other: Gpu) -> int:
    ends = [link.pci_id for link in gpu.links or () if link.kind == "gpu"]
    return 0 if other.pci_id is None else ends.count(other.pci_id)


def short_pci_id(pci_id: str) -> str:
    domain, _, rest = pci_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if len(domain) > 4 and domain[:-4].strip("0") == "" else f"{domain}:{rest}"
