from __future__ import annotations

import time
from typing import Any

from device_communicators.cpu.channels import SHAPE
from device_communicators.routing.states import State, call_in_words
from parallel_state import GroupCoordinator
from parallel_state.messages.messenger import Messenger

__all__ = ["RING_BYTES", "SLOT_BYTES", "calls_in_words", "carried_calls", "count_waiting", "encode_slowly",
           "is_busy", "is_past_python", "only_sender", "state_in_words", "stop_writing"]  # fmt: skip
RING_BYTES, SLOT_BYTES = SHAPE.data_bytes, SHAPE.chunk_bytes


def carried_calls(group: GroupCoordinator, name: str) -> int:
    found: dict[str, Any] = group.context.host_memory.collectives.traffic(group._key)
    return int(found.get(name, (0, 0))[0])


def calls_in_words(group: GroupCoordinator) -> str:
    return " ".join(call_in_words(group.context, each) for each in group.route.operations_under_way())


def state_in_words(answer: dict[str, Any]) -> str:
    return State(**answer).in_words()


def is_busy(group: GroupCoordinator) -> bool:
    memory = group.context.host_memory
    if memory is not None and memory.collectives is not None:
        return bool(memory.collectives.is_busy)
    return group.route._turn.locked()


def is_past_python(group: GroupCoordinator) -> bool:
    ends = group.context.host_memory.channels._receivers.values()
    return any(end.is_held_here and not end.lock._is_owned() for end in ends)


def only_sender(group: GroupCoordinator) -> Any:
    (sender,) = group.context.host_memory.channels._senders.values()
    return sender


class _StoppedLibrary:
    def __init__(self, library: Any, seconds: float) -> None:
        self._library, self._seconds = library, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def ps_queue_resume(self, *_: object) -> int:
        time.sleep(self._seconds)
        return 1


def stop_writing(group: GroupCoordinator, seconds: float) -> None:
    sender = only_sender(group)
    sender._library = _StoppedLibrary(sender._library, seconds)


def encode_slowly(monkeypatch: Any, seconds: float) -> None:
    encode = Messenger.encode
    monkeypatch.setattr(Messenger, "encode", lambda *args: (time.sleep(seconds), encode(*args))[1])


def count_waiting(group: GroupCoordinator, rank: int) -> int:
    return int(group.context.host_memory.channels.transfers.waiting_sends(rank))
