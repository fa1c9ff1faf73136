"""`python -m parallel_state topology`: shows the GPUs of this machine and their connections.

Without a driver it prints the reason; the exit code is 0 then, too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from device_communicators.machine.nvml import NoAnswerError, Reader, Recorder, RecordError, Recording, open_nvml
from device_communicators.machine.topology import Topology, read_topology
from device_communicators.machine.topology_text import topology_text
from device_communicators.machine.visible_devices import Visible, visible_devices
from parallel_state.tools.arguments import command_parser
from parallel_state.tools.output import add_json, as_json, write, write_chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        topology = _read(options.replay, options.record)
        visible = visible_devices(topology.gpus, {} if options.replay else os.environ)
    except OSError as error:
        parser.error(f"cannot use {error.filename}: {error.strerror}")
    except RecordError as error:
        parser.error(f"{options.replay} isn't a file that --record wrote: {error}")
    if not write_chosen(parser, options, {"json": lambda: as_json(_as_json(topology, visible))}):
        print(topology_text(topology, visible))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "topology", "[options]",
        "Shows the GPUs of this machine: NVLink, PCIe, NUMA nodes, peer access.",
    )  # fmt: skip
    add_json(parser)
    parser.add_argument("--record", metavar="FILE", help="write all answers of the driver, for a bug report")
    parser.add_argument("--replay", metavar="FILE", help="show the machine of a file written by --record")
    return parser


def _read(replay: str | None, record: str | None) -> Topology:
    if replay is not None:
        text = Path(replay).read_text(encoding="utf-8", errors="replace")
        return _recorded(Recording.parse(text), record)
    if record is None:
        return read_topology()
    try:
        with open_nvml() as nvml:
            return _recorded(nvml, record)
    except NoAnswerError as error:
        return Topology(problem=str(error))


def _recorded(reader: Reader, record: str | None) -> Topology:
    recorder = Recorder(reader)
    topology = read_topology(recorder)
    if record is not None:
        write(record, recorder.text())
    return topology


def _as_json(topology: Topology, visible: Visible) -> dict[str, Any]:
    content = asdict(topology)
    content["paths"] = [
        {"from": one, "to": two, "label": path.label, **asdict(path)} for (one, two), path in topology.paths.items()
    ]
    content["visible"] = [device.uuid for device in visible.devices]
    content["remarks"] = [*topology.remarks, *visible.remarks]
    return content
