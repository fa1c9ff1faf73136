"""`python -m parallel_state topology`: shows the GPUs of this machine and their connections.

Without a driver it prints the reason; the exit code is 0 then, too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from device_communicators.machine.topology import Topology, read_topology
from device_communicators.machine.topology_text import topology_text
from device_communicators.machine.visible_devices import Visible, visible_devices
from parallel_state.tools.arguments import command_parser
from parallel_state.tools.output import add_json, as_json, write_chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    topology = read_topology()
    visible = visible_devices(topology.gpus, os.environ)
    if not write_chosen(parser, options, {"json": lambda: as_json(_as_json(topology, visible))}):
        print(topology_text(topology, visible))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "topology", "[options]",
        "Shows the GPUs of this machine: NVLink, PCIe, NUMA nodes, peer access.",
    )  # fmt: skip
    add_json(parser)
    return parser


def _as_json(topology: Topology, visible: Visible) -> dict[str, Any]:
    content = asdict(topology)
    content["paths"] = [
        {"from": one, "to": two, "label": path.label, **asdict(path)} for (one, two), path in topology.paths.items()
    ]
    content["visible"] = [gpu.uuid for gpu in visible.gpus]
    content["remarks"] = [*topology.remarks, *visible.remarks]
    return content
