"""A transfer in progress, and what is done with its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Work(Protocol):
    """A transfer in progress, as c10d's `Work`."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class _Done:
    """The work of a transfer of nothing: all ranks know the size, so nobody sends."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


DONE = _Done()


class TransferError(RuntimeError):
    """A failure of a transport in a transfer with `peer`, a rank in the group; the text is the transport's."""

    def __init__(self, text: str, peer: int) -> None:
        super().__init__(text)
        self.peer = peer


class ContinuedWork:
    """A work, and what this rank does once with its result."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        self._work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        return self._work.is_completed()
