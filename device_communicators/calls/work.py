"""Operations in progress, and steps that follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Work(Protocol):
    """An operation in progress, like c10d's `Work`."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class _Done:
    """A work that is complete, for example of an empty tensor: all ranks know the size, so none sends."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


DONE = _Done()


class TransferError(RuntimeError):
    """A transport failed in a transfer with `peer`, a rank in the group. The text is the transport's."""

    def __init__(self, text: str, peer: int) -> None:
        super().__init__(text)
        self.peer = peer


class ContinuedWork:
    """A work, and a function that runs once after it."""

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
