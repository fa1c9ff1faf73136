"""`python -m parallel_state trace FOLDER`: merges the ranks' traces into one file and prints the longest waits."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from device_communicators.base.errors import format_ranks
from parallel_state.tools.arguments import command_parser
from parallel_state.tools.debug import read_files

_SHOWN = 10
MERGED = "trace.json"


class Wait(NamedTuple):
    """Rank `rank` waited in a call for `seconds`, until rank `last` entered the same call or `rank`'s call ended.

    `number`: the call's number in `group`, which has the global ranks `ranks`.
    """

    seconds: float
    rank: int
    last: int
    operation: str
    number: int
    group: str
    ranks: list[int]

    def __str__(self) -> str:
        return (
            f"{self.seconds * 1e3:10.3f} ms  rank {self.rank} waited for rank {self.last} in {self.operation} number "
            f"{self.number} of {self.group} {format_ranks(self.ranks)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("trace", "FOLDER [--json]", __doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="folder that the ranks gave to `with parallel_state.trace(folder)`")
    parser.add_argument("--json", action="store_true", help="print the longest waits as JSON")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    events: list[dict[str, Any]] = []
    read_files(folder, lambda content: events.extend(content["traceEvents"]))
    if not events:
        print(f"there are no traces in {folder}; run the ranks `with parallel_state.trace(folder)`", file=sys.stderr)
        return 2
    merged, waits = merge(events)
    (folder / MERGED).write_text(json.dumps({"traceEvents": merged, "displayTimeUnit": "ms"}))
    worst = sorted(waits, reverse=True)[:_SHOWN]
    if options.json:
        print(json.dumps([wait._asdict() for wait in worst], indent=1))
        return 0
    ranks = {event["pid"] for event in events}
    print(f"{folder / MERGED}: {len(events)} events of {len(ranks)} ranks; open it in ui.perfetto.dev")
    print(f"the {len(worst)} longest waits:" if worst else "no rank waited for another one in these traces")
    for wait in worst:
        print(wait)
    return 0


def merge(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Wait]]:
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    merged = [{**event, "ts": event["ts"] - first} if "ts" in event else event for event in events]
    waits: list[Wait] = []
    arrows: list[dict[str, Any]] = []
    for together in _collectives(merged):
        last = max(together, key=lambda event: event["ts"])
        for event in together:
            if event is last:
                continue
            arrow = {"cat": "parallel_state", "name": last["name"], "id": len(waits)}
            at = max(event["ts"], min(last["ts"], event["ts"] + event["dur"]))
            arrows.append({**arrow, "ph": "s", "pid": last["pid"], "tid": last["tid"], "ts": last["ts"]})
            arrows.append({**arrow, "ph": "f", "bp": "e", "pid": event["pid"], "tid": event["tid"], "ts": at})
            facts = event["args"]
            waits.append(Wait((at - event["ts"]) / 1e6, event["pid"], last["pid"], event["name"],
                              facts["number"], facts["group"], facts["ranks"]))  # fmt: skip
    return [*merged, *arrows], waits


def _collectives(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    names: dict[Any, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["ph"] == "X" and event["args"]["peer"] < 0:
            of_rank = names[_kind(event)][event["pid"]]
            if event["args"]["group"] not in of_rank:
                of_rank.append(event["args"]["group"])
    # Each process numbers its own groups: groups with the same name and ranks match by their order.
    for by_rank in names.values():
        for found in by_rank.values():
            found.sort(key=lambda name: (len(name), name))
    together: dict[Any, dict[int, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "X" and event["args"]["peer"] < 0:
            kind = _kind(event)
            which = names[kind][event["pid"]].index(event["args"]["group"])
            together[kind, which, event["args"]["number"]][event["pid"]] = event
    return (list(by_rank.values()) for by_rank in together.values() if len(by_rank) > 1)


def _kind(event: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    return event["args"]["group"].partition(":")[0], tuple(event["args"]["ranks"])
