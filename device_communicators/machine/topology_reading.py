"""Reads this machine's topology: asks NVML, through a `Reader`, and says what the answers mean.

A question that a driver, a GPU or a virtual machine doesn't answer leaves a None and its reason, never an exception.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

from device_communicators.machine.nvml import NoAnswerError, Reader, open_nvml
from device_communicators.machine.topology import (
    FABRIC_STATES,
    P2P_CAPABILITIES,
    P2P_STATUS,
    PCIE_PATHS,
    Fabric,
    Gpu,
    Link,
    Path,
    Slice,
    Topology,
)

_GPU, _SWITCH = 0, 2  # NVML_NVLINK_DEVICE_TYPE_…
_NO_LINK = {"not supported", "invalid argument"}
"""What NVML says of a link that a GPU doesn't have, and of any link of a GPU without NVLink."""


def read_topology(reader: Reader | None = None) -> Topology:
    """What this machine's driver tells, or `reader`. Never raises for what the driver can't do."""
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
    by_pci_id = {gpu.pci_id: gpu.index for gpu in gpus if gpu.pci_id}
    paths = {(one.index, two.index): _read_path(reader, one, two, by_pci_id) for one, two in permutations(gpus, 2)}
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
    """Asks, and keeps the reason where there is no answer."""

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
    mig = facts.get("mig", index, question="mig_enabled")
    return Gpu(
        index,
        uuid,
        None if pci_id is None else short_pci_id(pci_id),
        facts.get("name", index),
        facts.get("memory_bytes", index),
        _numa_node(facts, index),
        None if cores is None else tuple(cores),
        _links(facts, index),
        _fabric(facts, index),
        mig,
        _slices(facts, index) if mig else (),
        facts.unknown,
    )


def _numa_node(facts: _Facts, gpu: int) -> int | None:
    nodes = facts.get("numa_node", gpu, question="numa_nodes")
    if nodes is not None and len(nodes) == 1:
        return int(nodes[0])
    if nodes:
        facts.unknown["numa_node"] = f"nodes {', '.join(map(str, nodes))} are equally near"
        return None
    why = facts.unknown.get("numa_node", "NVML names no node")
    node = facts.get("numa_node", gpu, question="sysfs_numa_node")
    if node is None or node < 0:
        facts.unknown["numa_node"] = why if node is None else f"{why}; the kernel knows none, as with one node only"
        return None
    facts.unknown.pop("numa_node", None)
    return int(node)


def _links(facts: _Facts, gpu: int) -> tuple[Link, ...] | None:
    """The active ones. Where one link is answered for, those that aren't are links that the GPU doesn't have."""
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
        # An active link to something that nobody names: a switch that a virtual machine doesn't show (NCCL issue 1182).
        kind = "switch"
    return Link(number, kind, pci_id)


def _fabric(facts: _Facts, gpu: int) -> Fabric | None:
    told = facts.get("fabric", gpu)
    if told is None:
        return None
    state = FABRIC_STATES[told["state"]] if told["state"] < len(FABRIC_STATES) else f"state {told['state']}"
    if told["status"] != 0 and state == "completed":
        state = f"completed with error {told['status']}"
    return Fabric(told["cluster"], told["clique"], state)


def _slices(facts: _Facts, gpu: int) -> tuple[Slice, ...]:
    found = []
    for number in range(facts.get("slices", gpu, question="max_slices") or 0):
        told = facts.get(f"slice {number}", gpu, number, question="slice")
        if told is None:
            del facts.unknown[f"slice {number}"]  # no slice of that number is there
        else:
            found.append(Slice(told["uuid"], told["name"], told["gpu_instance"], told["compute_instance"]))
    return tuple(found)


def _read_path(reader: Reader, one: Gpu, two: Gpu, by_pci_id: dict[str, int]) -> Path:
    facts = _Facts(reader)
    level = facts.get("pcie", one.index, two.index, question="common_ancestor")
    if level is not None and level not in PCIE_PATHS:
        facts.unknown["pcie"] = f"NVML's level {level} isn't known"
    p2p = {}
    for number, capability in enumerate(P2P_CAPABILITIES):
        state = facts.get(f"p2p {capability}", one.index, two.index, number, question="p2p_status")
        if state is not None:
            p2p[capability] = P2P_STATUS[state] if state < len(P2P_STATUS) else f"state {state}"
    links, switched = _count_links(one, two, by_pci_id)
    if links is None:
        facts.unknown["nvlinks"] = (one if one.links is None else two).unknown.get("links", "not told")
    return Path(links, switched, PCIE_PATHS.get(level, (None, ""))[0], p2p, facts.unknown)


def _count_links(one: Gpu, two: Gpu, by_pci_id: dict[str, int]) -> tuple[int | None, bool]:
    """NVLinks between two GPUs, and whether they go through switches."""
    if one.links is None or two.links is None:
        return None, False
    direct = [_links_to(one, two.index, by_pci_id), _links_to(two, one.index, by_pci_id)]
    if any(direct):
        return min(direct), False
    through_switches = min(one.switch_links, two.switch_links)
    return through_switches, through_switches > 0


def _links_to(gpu: Gpu, other: int, by_pci_id: dict[str, int]) -> int:
    return sum(
        link.kind == "gpu" and link.pci_id is not None and by_pci_id.get(link.pci_id) == other
        for link in gpu.links or ()
    )


def short_pci_id(pci_id: str) -> str:
    """NVML's `00000000:1B:00.0` as the kernel writes it, `0000:1b:00.0`."""
    domain, _, rest = pci_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if len(domain) > 4 and domain[:-4].strip("0") == "" else f"{domain}:{rest}"
