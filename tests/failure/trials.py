"""Trials whose number determines their random choices. So a run can be resumed, and several runs can share
the trials."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WITHIN_S = 1.0
REPETITIONS = 5


def median_of(run: Callable[[], float], first_s: float, within_s: float = WITHIN_S) -> list[float]:
    return [first_s] if first_s < within_s else [first_s, *(run() for _ in range(REPETITIONS - 1))]


def late(found: Iterable[tuple[int, list[float]]], within_s: float = WITHIN_S) -> list[tuple[int, list[float]]]:
    return [(seed, latest_s) for seed, latest_s in found if statistics.median(latest_s) >= within_s]


def assert_in_time(
    trial: Callable[[Path], float],
    folder: Path,
    within_s: float = WITHIN_S,
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    numbers = itertools.count()

    def run() -> float:
        before()
        own = folder / str(next(numbers))
        own.mkdir()
        return trial(own)

    found = median_of(run, run(), within_s)
    assert not late([(0, found)], within_s)
    return found


def folder_of_results(otherwise: Path) -> Path:
    folder = Path(os.environ.get("FAILURE_TRIALS", otherwise))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def keep(folder: Path, name: str, run: Callable[[], dict[str, Any] | None]) -> None:
    """Calls `run` and saves its result in `folder`. Does nothing if the result exists or another process is at it."""
    result = folder / f"{name}.json"
    with _claim(result.with_suffix(".lock")) as is_mine:
        if not is_mine or result.exists():
            return
        found = run()
        if found is not None:
            result.with_suffix(".new").write_text(json.dumps(found))
            result.with_suffix(".new").rename(result)


@contextmanager
def _claim(path: Path) -> Iterator[bool]:
    with open(path, "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
        except BlockingIOError:
            yield False
            return
        yield True


def kept(folder: Path, stem: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{stem}-*.json"))]
