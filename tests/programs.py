"""Programs in processes of their own that have torch imported already: an interpreter that imports it takes seconds.

For what isn't about start or end of an interpreter: these are forked from the run's fork server, and end by `os._exit`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.workers import fork_context


class Program:
    """Runs `code` as `python -c` would, with all of `environment`; what it prints is read when it has ended."""

    def __init__(self, code: str, environment: Mapping[str, str], umask: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="program-")
        arguments = (code, dict(environment), umask, self._folder.name)
        self._process = fork_context().Process(target=_run, args=arguments)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout_s: float) -> tuple[str, str]:
        """Returns what it printed and what it wrote to stderr, once it has ended; kills one that is late."""
        self._process.join(timeout_s)
        late = self._process.exitcode is None
        self.kill()
        out, err = ((Path(self._folder.name) / name).read_text() for name in ("out", "err"))
        self._folder.cleanup()
        if late:
            raise TimeoutError(f"the program runs after {timeout_s} s:\n{out}{err}")
        return out, err

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(code: str, environment: dict[str, str], umask: int | None, folder: str) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    if umask is not None:
        os.umask(umask)
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})
