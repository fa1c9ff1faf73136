"""Shows a benchmark's progress: a bar on a terminal, elsewhere a line every 10 s."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

LINE_S = 10.0


class Progress:
    def __init__(self, total_s: float, stream: TextIO | None = None) -> None:
        self.total_s, self.done_s = total_s, 0.0
        self._stream = sys.stderr if stream is None else stream
        self._started = self._shown = time.monotonic()
        self._bar: Any = _bar(self._stream)
        if self._bar is not None:
            self._task = self._bar.add_task("starts", total=total_s, left=duration(total_s))
            self._bar.start()
            self._bar.refresh()

    @property
    def left_s(self) -> float:
        left = max(0.0, self.total_s - self.done_s)
        return left * (time.monotonic() - self._started) / self.done_s if self.done_s else left

    def step(self, expected_s: float, text: str) -> None:
        self.done_s += expected_s
        left = duration(self.left_s)
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=self.done_s, description=text, left=left, refresh=True)
        elif time.monotonic() - self._shown >= LINE_S:
            self._shown = time.monotonic()
            percent = min(100, round(100 * self.done_s / self.total_s))
            print(f"{percent} %, about {left} left: {text}", file=self._stream, flush=True)

    def hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    return f"{round(seconds)} s" if seconds < 90 else f"{round(seconds / 60)} min"


def _bar(stream: TextIO) -> Any:
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        return None
    columns = (BarColumn(), TextColumn("{task.percentage:3.0f} %, {task.fields[left]} left: {task.description}"))
    return Progress(
        *columns, console=Console(file=stream), auto_refresh=False, transient=True,
        redirect_stdout=False, redirect_stderr=False,  # rich would wrap the lines of tables
    )  # fmt: skip
