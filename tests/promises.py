"""The inventory of promises: which faults, calls and layouts have tests, by transport and door.

    python -m tests.promises --write                    # collects the suite and rewrites tests/promises.txt

A promise is one line, made from a collected test's name or a key of `digests.json`:

    row 03 | gloo | coordinator | all_reduce_async      # fault row, transport, door, further parameters of the test
    bits | hierarchical 0-0-1 | isend | float32         # transport and each rank's host, call, dtype
    bits | shared_memory 0-0 | gather | float32 | compiled
    compiled | test_graph_breaks | inductor-names3      # file, parameters
    layout | megatron | sglang | the_groups             # preset, engine whose code makes the groups, further parameters
    doors | gloo-compiled-all_reduce                    # transport, door, operation

A row's transport and door are in the test's parameters or markers (`over`, `door`). The transport is "any" if the
test moves no tensors, or if any transport would do.

If no test makes a line any more, it must move to the file's last part, below `withdrawn:`. CHANGELOG.md must then quote
it in backquotes with the reason, literally or by a pattern such as `row * | gloo | *`. CI runs `python -m tests.lanes`,
which compares the file with the tests that ran, or were skipped because the machine or torch lacks something.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.extent import LONG

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_suffix(".txt")
COLLECTED = "TESTS_COLLECTED_FILE"
"""Environment variable that names a file. A run of pytest appends its tests, see `tests/conftest.py`."""
LACKING = (
    "needs ", "no hosts can be made here", "two hosts can't be made", "a host with a /dev/shm of its own can't be made",
    "only root can", "no file system can be mounted here", "its system call numbers are x86-64's",
    "megatron-core isn't installed", "could not import",
)  # fmt: skip
"""Beginnings of reasons for which CI may skip tests of promises."""
_WITHDRAWN = "withdrawn:"
_TRANSPORTS = {
    "shared memory": ("shared memory", "shared_memory"),
    "connections": ("connections",),
    "gloo": ("gloo", "process_group"),
    "hosts": ("two hosts", "hierarchical", "hosts", "test_links.py", "row_50"),
    "simulated": ("simulated",),
}
"""For each transport, the words that identify it in test ids and file names."""
_DOORS = {
    "launcher": ("launch", "torchrun"),
    "start": ("meeting", "setup", "at_start", "many_jobs"),
    "torch.distributed": ("c10d", "torch.distributed", "over torch"),
}
"""For each way to make groups, the words that identify it in test ids. The first match counts."""
_ENGINES = ("device_mesh", "fairseq2", "megatron", "sglang", "torchtitan", "vllm")
_LAYOUTS = ("tests/unit/test_engine_layouts.py", "tests/unit/test_incumbent_layouts.py")


class Item(NamedTuple):
    id: str
    over: tuple[str, ...] = ()
    door: str = ""
    skipped: str = ""


def promises_of(tests: Iterable[Item]) -> set[str]:
    rows = rows_of_the_table()
    found: set[str] = set()
    for test_id, over, door, skipped in tests:
        if skipped and not skipped.startswith(LACKING):
            continue
        path, _, name = test_id.partition("::")
        function, _, parameters = name.partition("[")
        parameters = parameters.removesuffix("]")
        named = re.match(r"row (\d+): ", parameters)
        held = rows_of(path, function, rows)
        for row in held if named is None else held & {int(named[1]), 46} | {int(named[1])}:
            case = _without_transport(parameters) or function.removeprefix("test_")
            door = door or _word(_DOORS, test_id, "coordinator")
            transports = over or (_word(_TRANSPORTS, test_id, "any"),)
            found |= {f"row {row:02} | {transport} | {door} | {case}" for transport in transports}
        if function in ("test_bits_are_the_stored_ones", "test_compiled_bits_are_the_stored_ones"):
            found |= set(_of_digests(parameters, "compiled" in function))
        elif path.startswith("tests/compile/"):
            found.add(f"compiled | {Path(path).stem} | {function.removeprefix('test_')} {parameters}".rstrip())
        elif function == "test_every_door_gives_the_same":
            found.add(f"doors | {parameters}")
        elif path in _LAYOUTS:
            found.add(_of_layouts(function.removeprefix("test_"), *parameters.split("-")))
    return found


def stored() -> tuple[set[str], set[str]]:
    return _parts(FILE.read_text(encoding="utf-8"))


def _parts(text: str) -> tuple[set[str], set[str]]:
    held, _, withdrawn = text.partition(_WITHDRAWN)
    return set(held.split("\n")) - {""}, set(withdrawn.split("\n")) - {""}


def stored_in_git() -> set[str]:
    """Returns lines of the last two commits, so that one removed by hand is missed, too. Without git, returns none."""
    found = set[str]()
    for commit in ("HEAD", "HEAD~1"):
        with suppress(OSError, subprocess.CalledProcessError):
            command = ["git", "show", f"{commit}:tests/{FILE.name}"]
            text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
            found |= _parts(text)[0]
    return found


def problems(found: set[str], before: Iterable[str] = ()) -> list[str]:
    held, withdrawn = stored()
    held |= set(before) - withdrawn
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return [
        *(f"vanished: {line}" for line in sorted(held - found)),
        *(f"new, so run `python -m tests.promises --write`: {line}" for line in sorted(found - held) if not LONG),
        *(
            f"withdrawn, but CHANGELOG.md doesn't quote it: {line}"
            for line in sorted(withdrawn)
            if not any(fnmatch.fnmatchcase(line, quoted) for quoted in re.findall(r"`([^`]+)`", changes))
        ),
    ]


def rows_of(path: str, function: str, rows: dict[int, list[str]]) -> set[int]:
    place = f"{path.removeprefix('tests/')}::{function}"
    found = {row for row, patterns in rows.items() if any(fnmatch.fnmatchcase(place, each) for each in patterns)}
    span = re.search(r"rows?_(\d+)(?:_(to|and)_(\d+))?", function) if path.startswith("tests/failure/") else None
    if span is not None:
        first, last = int(span[1]), int(span[3] or span[1])
        found |= set(range(first, last + 1)) if span[2] != "and" else {first, last}
    return found


def rows_of_the_table() -> dict[int, list[str]]:
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").partition("## The matrix")[2]
    lines = [line.split("|") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    return {int(cells[1]): re.findall(r"`((?:failure|contract|internals|unit)/[^`]+)`", cells[-2]) for cells in lines}


def _word(table: dict[str, tuple[str, ...]], place: str, otherwise: str) -> str:
    return next((name for name, words in table.items() if any(word in place for word in words)), otherwise)


def _without_transport(parameters: str) -> str:
    words = {word for words in _TRANSPORTS.values() for word in words}
    return "-".join(part for part in parameters.split("-") if part and part not in words)


def _of_digests(placement: str, compiled: bool) -> Iterator[str]:
    from tests import digests

    for case in digests.stored()[placement]:
        call, _, dtype = case.rpartition(" ")
        line = f"bits | {placement} | {call} | {dtype}"
        if not compiled:
            yield line
        elif digests.compiles(placement.split(" ")[0], case):
            yield f"{line} | compiled"


def _of_layouts(function: str, preset: str, *others: str) -> str:
    engine = next((name for name in _ENGINES if name in others or name in function), preset)
    test = f"{function} {'-'.join(each for each in others if each != engine)}".rstrip()
    return f"layout | {preset or 'any order'} | {engine} | {test}"


def collected(file: Path) -> list[Item]:
    """Returns the tests that runs of pytest have appended to the file."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    skipped = {line["id"]: line["skipped"] for line in lines if "skipped" in line}
    return [
        Item(line["id"], tuple(line["over"]), line["door"], skipped.get(line["id"], ""))
        for line in lines
        if "over" in line
    ]


def _collect() -> list[Item]:
    folders = [f"tests/{name}" for name in ("failure", "contract", "internals", "compile")]
    paths = [path for path in (*folders, *_LAYOUTS) if (ROOT / path).exists()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *paths]
    with tempfile.NamedTemporaryFile() as file:
        environment = {**os.environ, COLLECTED: file.name}
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, env=environment)
        return collected(Path(file.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="rewrite tests/promises.txt; vanished lines become withdrawn"
    )
    write = parser.parse_args().write
    found = promises_of(_collect())
    if write:
        held, withdrawn = stored() if FILE.exists() else (set(), set())
        withdrawn = (withdrawn | held | stored_in_git()) - found
        FILE.write_text("\n".join([*sorted(found), _WITHDRAWN, *sorted(withdrawn), ""]), encoding="utf-8")
    wrong = problems(found, stored_in_git())
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
