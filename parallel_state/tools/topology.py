"""`python -m parallel_state topology`: shows this machine's GPUs and their connections."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from device_communicators.base.cores import spans
from device_communicators.machine.topology import P2P_STATUS, PCIE_PATHS, Gpu, Path, Topology, read_topology
from device_communicators.machine.visible_devices import Visible, visible_devices
from parallel_state.tools.arguments import STDOUT, add_json, as_json, columns, command_parser, write


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Shows the GPUs of this machine: NVLink, PCIe, cores, peer access."
    parser = command_parser("topology", "[options]", about)
    add_json(parser)
    options = parser.parse_args(arguments)
    topology = read_topology()
    visible = visible_devices(topology.gpus, os.environ)
    if options.json is not None:
        write(parser, options.json, as_json(_as_json(topology, visible)))
    if options.json != STDOUT:
        print(topology_text(topology, visible))
    return 0


def _as_json(topology: Topology, visible: Visible) -> dict[str, Any]:
    content = asdict(topology)
    content["paths"] = [
        {"from": one, "to": two, "label": path.label, **asdict(path)} for (one, two), path in topology.paths.items()
    ]
    content["visible"] = [gpu.uuid for gpu in visible.gpus]
    content["remarks"] = [*topology.remarks, *visible.remarks]
    return content


_STATUS = dict(zip(P2P_STATUS, ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U"), strict=True))


def topology_text(topology: Topology, visible: Visible) -> str:
    if topology.problem is not None:
        return "\n".join([f"GPUs: none. {topology.problem}", *_remarks(topology, visible)])
    parts = [_heading(topology), _gpu_lines(topology, visible), _matrix(topology), _peers(topology)]
    remarks = list(_remarks(topology, visible))
    return "\n\n".join("\n".join(part) for part in [*parts, remarks] if part)


def _heading(topology: Topology) -> list[str]:
    count = len(topology.gpus)
    models = list(dict.fromkeys(gpu.name or "unknown model" for gpu in topology.gpus))
    return [
        f"GPUs: {count} × {models[0]}" if len(models) == 1 else f"GPUs: {count}, {', '.join(models)}",
        f"driver {topology.driver_version or 'unknown'}, for CUDA {topology.cuda_version or 'unknown'}",
    ]


def _gpu_lines(topology: Topology, visible: Visible) -> list[str]:
    places = {gpu.uuid: place for place, gpu in enumerate(visible.gpus)}
    alike = len({gpu.name for gpu in topology.gpus}) == 1
    lines = []
    for gpu in topology.gpus:
        facts = [gpu.uuid, gpu.pci_id or "PCI id unknown", *([] if alike else [gpu.name or "unknown model"])]
        if gpu.memory_bytes is not None:
            facts.append(f"{gpu.memory_bytes / 2**30:.0f} GiB")
        facts += [*([f"cores {spans(gpu.cores)}"] if gpu.cores else []), _links(gpu)]
        lines.append(f"GPU{gpu.index}  {', '.join(facts)}; {_cuda(gpu, places)}")
    return lines


def _links(gpu: Gpu) -> str:
    if gpu.links is None:
        return "NVLinks unknown"
    if not gpu.links:
        return "no NVLink"
    return f"{len(gpu.links)} NVLinks" + (" to switches" if gpu.switch_links == len(gpu.links) else "")


def _cuda(gpu: Gpu, places: Mapping[str, int]) -> str:
    if gpu.uuid in places:
        return f"cuda:{places[gpu.uuid]}"
    return "MIG mode" if gpu.mig else "not visible to this process"


def _matrix(topology: Topology) -> list[str]:
    if len(topology.gpus) < 2:
        return []
    labels = [path.label for path in topology.paths.values()]
    lines = [*_table(topology, lambda path, _: path.label), ""]
    if any(label.startswith("NV") for label in labels):
        switched = any(path.switched for path in topology.paths.values())
        lines.append(f"  {'NV#':4}  # NVLinks" + (", through NVSwitch" if switched else ""))
    lines += [f"  {word:4}  PCIe, {meaning}" for word, meaning in PCIE_PATHS.values() if word in labels]
    if "?" in labels:
        lines.append("  ?     unknown")
    return lines


def _peers(topology: Topology) -> list[str]:
    if len(topology.gpus) < 2:
        return []
    states = {key: _peer_state(path) for key, path in topology.paths.items()}
    kinds = set(states.values())
    if len(kinds) == 1:
        return [f"peer access, as the driver reports it: {kinds.pop()} between all"]
    used = {word for state in kinds for word in state.split("/")}
    return [
        "peer access from row to column, as the driver reports it:",
        *_table(topology, lambda _, key: states[key]),
        "",
        *(f"  {word:5}  {text}" for text, word in _STATUS.items() if word in used and word != "OK"),
    ]


def _peer_state(path: Path) -> str:
    return "/".join(dict.fromkeys(_STATUS.get(path.p2p.get(each, "unknown"), "U") for each in ("read", "write")))


def _table(topology: Topology, cell: Callable[[Path, tuple[int, int]], str]) -> Iterator[str]:
    indices = [gpu.index for gpu in topology.gpus]
    rows = [["", *(f"GPU{index}" for index in indices)]]
    for row in indices:
        cells = ["X" if row == column else cell(topology.paths[row, column], (row, column)) for column in indices]
        rows.append([f"GPU{row}", *cells])
    return (f"  {line}" for line in columns(rows))


def _remarks(topology: Topology, visible: Visible) -> Iterator[str]:
    yield from topology.remarks
    yield from visible.remarks
    yield from _unknown([(f"GPU{gpu.index}", gpu.unknown) for gpu in topology.gpus], "GPUs")
    yield from _unknown([(f"GPU{a} to GPU{b}", path.unknown) for (a, b), path in topology.paths.items()], "pairs")


def _unknown(holders: Sequence[tuple[str, Mapping[str, str]]], of_what: str) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for name, unknown in holders:
        for fact, reason in unknown.items():
            if fact in _FACTS and not (fact == "mig" and reason in _ABSENT):
                found.setdefault(f"{_FACTS[fact]} unknown: {reason}", []).append(name)
    for text, names in found.items():
        yield f"{'all ' + of_what if len(names) == len(holders) > 1 else ', '.join(names)}: {text}"


_FACTS = {"pci_id": "PCI id", "name": "model", "memory_bytes": "memory", "cores": "cores",
          "links": "NVLinks", "link_ends": "what its NVLinks lead to is", "mig": "MIG mode",
          "pcie": "PCIe path", "p2p read": "P2P read", "p2p write": "P2P write"}  # fmt: skip
_ABSENT = ("Not Supported", "Function Not Found")
