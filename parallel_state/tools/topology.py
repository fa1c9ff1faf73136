"""`python -m parallel_state topology`: the GPUs of this machine, and what connects them.

Without a driver it says so, and ends with exit code 0 all the same: that is an answer, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from device_communicators.machine.nvml import NoAnswerError, Reader, Recorder, RecordError, Recording, open_nvml
from device_communicators.machine.peer_probe import Pair, Probe, probe_peers
from device_communicators.machine.topology import Topology, read_topology
from device_communicators.machine.topology_text import topology_text
from device_communicators.machine.visible_devices import Visible, visible_devices
from parallel_state.tools.topology_picture import topology_picture

STDOUT = "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `topology` with these arguments (default: the process's); returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.probe and options.replay is not None:
        parser.error("--probe tries this machine's GPUs, and --replay shows another's; leave one of them out")
    try:
        topology = _read(options.replay, options.record)
        visible = visible_devices(topology.gpus, {} if options.replay else os.environ)
        probes = _probe(topology) if options.probe else None
        if options.json is not None:
            _write(options.json, json.dumps(_as_json(topology, visible, probes), indent=1, ensure_ascii=False) + "\n")
        if options.svg is not None:
            _write(options.svg, topology_picture(topology, probes))
    except OSError as error:
        parser.error(f"cannot use {error.filename}: {error.strerror}")
    except RecordError as error:
        parser.error(f"{options.replay} is no record that --record wrote: {error}")
    if STDOUT not in (options.json, options.svg):
        print(topology_text(topology, visible, probes))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m parallel_state topology",
        description="The GPUs of this machine: NVLink, PCIe, NUMA nodes, peer access. Says so where there are none.",
        allow_abbrev=False,
    )
    parser.add_argument("--probe", action="store_true",
                        help="try peer access between all GPUs instead of believing the driver; takes some memory "
                        "and seconds on each, the results are kept until the next boot")  # fmt: skip
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE",
                        help="everything for programs; without FILE to stdout, instead of text")  # fmt: skip
    parser.add_argument("--svg", metavar="FILE", help="a picture of the GPUs and what connects them")
    parser.add_argument("--record", metavar="FILE", help="write down all that the driver said, for a bug report")
    parser.add_argument("--replay", metavar="FILE", help="show the machine of such a file instead of this one")
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
        _write(record, recorder.text())
    return topology


def _probe(topology: Topology) -> dict[Pair, Probe]:
    """Of all pairs of whole GPUs for which the driver reports peer access."""
    whole = {gpu.index: gpu.uuid for gpu in topology.gpus if not gpu.mig}
    pairs = [
        (whole[one], whole[two])
        for (one, two), path in topology.paths.items()
        if one in whole and two in whole and path.peer_problem is None
    ]
    return probe_peers(pairs, topology.driver_version) if pairs else {}


def _as_json(topology: Topology, visible: Visible, probes: dict[Pair, Probe] | None) -> dict[str, Any]:
    told = asdict(topology)
    told["paths"] = [
        {"from": one, "to": two, "label": path.label, **asdict(path)} for (one, two), path in topology.paths.items()
    ]
    told["visible"] = [device.uuid for device in visible.devices]
    told["remarks"] = [*topology.remarks, *visible.remarks]
    if probes is not None:
        told["probes"] = [{"from": one, "to": two, **asdict(probe)} for (one, two), probe in probes.items()]
    return told


def _write(path: str, text: str) -> None:
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
