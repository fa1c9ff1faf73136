"""Writes the ranks' records in the format of torch's flight recorder, for its analyser `torchfrtrace`.

The records are JSON. torch's files are pickles, which this module writes but never reads. `torchfrtrace` compares
collectives by group and number, beginning with the first one that all records have. Transfers between two ranks are
left out.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from device_communicators.calls.recorder import PAIRS

VERSION = "2.10"
PREFIX = "rank_"
_TYPES = {
    "all_reduce_": "all_reduce", "iall_reduce_": "all_reduce", "all_reduce_add_rms_norm": "all_reduce",
    "all_gather": "_all_gather_base", "iall_gather": "_all_gather_base", "all_gatherv": "all_gather_v",
    "reduce_scatter": "_reduce_scatter_base", "ireduce_scatter": "_reduce_scatter_base",
    "reduce_scatterv": "reduce_scatter_v", "broadcast_": "broadcast", "ibroadcast_": "broadcast",
}  # fmt: skip
_KNOWN = ("all_reduce", "broadcast", "gather", "scatter", "all_to_all", "barrier", *_TYPES.values())
"""Types that `torchfrtrace` supports. Other collectives are written as a broadcast."""


def write(groups: dict[Any, list[Any]], folder: Path) -> list[Path]:
    """Writes a file for each rank that has records. `groups` is the result of `debug.read`."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[int, list[dict[str, Any]]] = {}
    config: dict[int, dict[str, dict[str, str]]] = {}
    for (stem, ranks, before), views in groups.items():
        name = f"{stem}-{before}-{'_'.join(map(str, ranks))}"
        first = max(min((each["sequence"] for each in _collectives(view.operations)), default=0) for view in views)
        for view in views:
            config.setdefault(view.rank, {})[name] = {"name": name, "desc": stem, "ranks": str(list(ranks))}
            kept = [each for each in _collectives(view.operations) if each["sequence"] >= first]
            entries.setdefault(view.rank, []).extend(_entry(each, name, stem, len(ranks)) for each in kept)
    written = []
    for rank, of_rank in entries.items():
        of_rank.sort(key=lambda entry: entry["time_created_ns"])
        numbered = [{**entry, "record_id": number} for number, entry in enumerate(of_rank)]
        dump = {"version": VERSION, "pg_config": config[rank], "pg_status": {}, "entries": numbered}
        path = folder / f"{PREFIX}{rank}"
        path.write_bytes(pickle.dumps(dump))
        written.append(path)
    return written


def _collectives(operations: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in operations if each["name"] not in PAIRS]


def _entry(operation: dict[str, Any], name: str, stem: str, size: int) -> dict[str, Any]:
    kind = _TYPES.get(operation["name"], operation["name"])
    kind = kind if kind in _KNOWN else "broadcast"
    shape = list(operation["shape"])
    out = [math.prod(shape) * size] if kind == "_all_gather_base" else shape
    out = [math.prod(shape) // size] if kind == "_reduce_scatter_base" else out
    file, _, line = operation["site"].partition(":")
    frames = [{"name": operation["call_text"] or operation["name"], "filename": file, "line": line}] if file else []
    ended_s = operation["ended_s"]
    return {
        "pg_id": 0,
        "process_group": (name, stem),
        "collective_seq_id": operation["sequence"],
        "p2p_seq_id": 0,
        "op_id": operation["sequence"],
        "profiling_name": f"gloo:{kind}",
        "time_created_ns": int(operation["started_s"] * 1e9),
        "input_sizes": [shape],
        "input_dtypes": [operation["dtype"]],
        "output_sizes": [out],
        "output_dtypes": [operation["dtype"]],
        "state": "scheduled" if ended_s is None else "completed",
        "time_discovered_started_ns": int(operation["started_s"] * 1e9),
        "time_discovered_completed_ns": None if ended_s is None else int(ended_s * 1e9),
        "retired": ended_s is not None,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": frames,
    }
