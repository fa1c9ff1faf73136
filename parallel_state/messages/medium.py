"""The interface of the classes in `media`, which carry a group's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from device_communicators.calls.user_call import UserCall
from device_communicators.cpu.types import PastPython
from device_communicators.routing.started import Handle
from parallel_state.messages.reader import Reader
from parallel_state.messages.wire import Cut, Outgoing


class Medium(Protocol):
    """A way to carry messages: to one rank, or to all ranks if the call is a broadcast."""

    takes_many: bool
    """True if many small CPU tensors cost no more than one tensor of their total size."""
    past_python: PastPython | None = None

    def post(
        self, obj: object, dst: int, call: UserCall | None, cut: Cut, waits: bool = False
    ) -> Outgoing | Handle | bool:
        """Tries to send the object to rank `dst`, or to all ranks if `call` is a broadcast.

        Returns True if the send is complete, or the handle of a started send. If nothing was sent, returns the encoded
        message, or False if the caller must encode the object. `cut`: the part of each tensor to send. `waits`: waits
        for the send to complete.
        """
        return False

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]: ...

    def send(self, outgoing: Outgoing, dst: int) -> None:
        for part in self.isend(outgoing, dst):
            part.wait()

    def broadcast(self, outgoing: Outgoing, call: UserCall) -> None: ...

    def start_receive(self, reader: Reader) -> None: ...

    def end_receive(self, reader: Reader) -> None:
        return

    def receive(self, reader: Reader, call: UserCall | None = None) -> Sequence[Handle]: ...
