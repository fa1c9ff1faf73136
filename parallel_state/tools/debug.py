"""`python -m parallel_state debug FOLDER`: compares the ranks' records. Shows each rank's last call and the ranks
missing in it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device_communicators.base.errors import format_ranks
from device_communicators.calls.recorder import PAIRS
from device_communicators.control import plane
from device_communicators.cpu import native
from parallel_state.tools import live
from parallel_state.tools.arguments import command_parser

_SHOWN = 3


@dataclass
class _View:
    rank: int
    ranks: list[int]
    failure: str | None
    operations: list[dict[str, Any]]
    written_s: float

    @property
    def last(self) -> dict[str, Any] | None:
        return self.operations[-1] if self.operations else None

    @property
    def number(self) -> int:
        return self.operations[-1]["sequence"] if self.operations else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "debug", "FOLDER | --live PID|JOB | --replay FILE [options]", __doc__.split("\n\n")[0]
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("folder", type=Path, nargs="?", help="the ranks' records: PARALLEL_STATE_DEBUG_DIR")
    which.add_argument(
        "--live", metavar="PID|JOB", help="ask the ranks of a running job, without stopping them: PID of a rank "
        "here or of its launcher, or the job's id (SLURM, torchrun, MPI)",
    )  # fmt: skip
    which.add_argument(
        "--replay", metavar="FILE", type=Path, help="run the control plane's core on the events in a "
        ".control file of the folder, and print the events and its actions",
    )  # fmt: skip
    parser.add_argument(
        "--stacks", action="store_true", help="with --live: print the stacks of all threads of this host's ranks"
    )
    parser.add_argument("--json", action="store_true", help="with --live: print the ranks' whole answers")
    options = parser.parse_args(arguments)
    if options.live is not None:
        return live.show(options.live, stacks=options.stacks, as_json=options.json)
    if options.replay is not None:
        return replay(options.replay)
    folder: Path = options.folder
    groups = read(folder)
    if not groups:
        print(f"there are no records in {folder}; set PARALLEL_STATE_DEBUG_DIR before the run, or call write_record()",
              file=sys.stderr)  # fmt: skip
        return 2
    for ranks, views in groups.items():
        print("\n".join(describe(ranks, views)), end="\n\n")
    return 0


def replay(path: Path) -> int:
    """Replays the events that a rank's control plane recorded in the file `path`, and prints them with the resulting
    actions.

    Returns exit code 1 if the replay ends in another state than the record, 2 if nothing can be replayed, else 0.
    """
    try:
        text = plane.describe(native.load_for_tools(), path.read_bytes())
    except (native.NativeUnavailableError, OSError) as error:
        print(f"{path} can't be replayed: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0 if text.endswith(plane.SAME) else 1


def read_files(folder: Path, use: Callable[[dict[str, Any]], object]) -> None:
    for path in sorted(folder.glob("rank-*.json"), key=lambda path: path.stat().st_mtime):
        try:
            use(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError, OSError) as error:
            print(f"{path.name} can't be read: {type(error).__name__}: {error}", file=sys.stderr)


def read(folder: Path) -> dict[Any, list[_View]]:
    """Reads the records in `folder`, and returns them by group. A key is (name, ranks, number of newer groups with this
    name and ranks).
    """
    newest: dict[int, dict[str, Any]] = {}  # of several processes of a rank, the newest
    read_files(folder, lambda content: newest.update({int(content["rank"]): content}))
    groups: dict[Any, list[_View]] = defaultdict(list)
    for rank, content in sorted(newest.items()):
        # Each process counts its own groups: match from the newest.
        before: Counter[Any] = Counter()
        for group in sorted(content["groups"], key=lambda group: _number_of(group["group"]), reverse=True):
            key = (group["group"].partition(":")[0], tuple(group["ranks"]))
            which = (*key, before[key])
            groups[which].append(_View(rank, group["ranks"], group["failure"], group["operations"], content["now_s"]))
            before[key] += 1
    return dict(groups)


def _number_of(name: str) -> int:
    number = name.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def describe(key: Any, views: list[_View]) -> list[str]:
    name, ranks, before = key
    lines = [f"group {name}{f' ({before} before the last)' if before else ''}, global ranks {format_ranks(ranks)}"]
    silent = sorted(set(ranks) - {view.rank for view in views})
    if silent:
        lines.append(
            f"  no record of ranks {format_ranks(silent)}: they exited before they could write one, or still run"
        )
    ahead = max(view.number for view in views)
    behind = [view for view in views if view.number < ahead]
    for view in sorted(views, key=lambda view: view.number):
        lines.append(f"  rank {view.rank}: {_state(view)}")
        if view.failure:
            lines.append(f"    failed: {view.failure}")
    if behind:
        lines.append(
            f"  behind: ranks {format_ranks([view.rank for view in behind])}; the others wait in number {ahead}"
        )
    return lines + _different_calls(views)


def _state(view: _View) -> str:
    last = view.last
    if last is None:
        return "no call yet"
    how_long = view.written_s - last["started_s"]
    state = (
        f"in it for {how_long:.1f} s"
        if last["ended_s"] is None
        else f"completed {view.written_s - last['ended_s']:.1f} s earlier"
    )
    return f"{_words(last)}, {state}"


def _words(operation: dict[str, Any]) -> str:
    what = f" of {operation['shape']} {operation['dtype']}" if operation["dtype"] else ""
    site = f" at {operation['site']}" if operation["site"] else ""
    return f"{operation['name']} number {operation['sequence']}{what}{site}"


def _different_calls(views: list[_View]) -> list[str]:
    calls: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for view in views:
        for operation in view.operations:
            if operation["name"] not in PAIRS:
                calls[operation["sequence"]][operation["name"]].append(view.rank)
    lines: list[str] = []
    for number, names in sorted(calls.items()):
        if len(names) > 1 and len(lines) < _SHOWN:
            calls_in_words = "; ".join(f"ranks {format_ranks(ranks)}: {name}" for name, ranks in names.items())
            lines.append(f"  different calls at number {number}: {calls_in_words}")
    return lines
