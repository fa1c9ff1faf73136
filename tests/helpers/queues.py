from __future__ import annotations

import io
import json
import os
import time
from contextlib import redirect_stdout
from typing import Any

from device_communicators.cpu.channels import SHAPE
from parallel_state import GroupCoordinator
from parallel_state.__main__ import main
from parallel_state.messages.messenger import Messenger

RING_BYTES, SLOT_BYTES = SHAPE.data_bytes, SHAPE.chunk_bytes


def carried_calls(group: GroupCoordinator, name: str) -> int:
    found: dict[str, Any] = group.context.host_memory.collectives.traffic(group.context.key)
    return int(found.get(name, (0, 0))[0])


def live_states(pid: int | None = None) -> dict[str, dict[str, Any]]:
    """The answers of a job's ranks by rank, from `debug --live`. `pid`: any rank's, by default this process's."""
    with redirect_stdout(io.StringIO()) as text:
        assert main(["debug", "--live", str(pid or os.getpid()), "--json"]) == 0
    return json.loads(text.getvalue())["ranks"]  # type: ignore[no-any-return]


def is_busy(group: GroupCoordinator) -> bool:
    return any(each.ended_s is None for each in group.route.operations())


def is_past_python(group: GroupCoordinator) -> bool:
    ends = group.context.host_memory.channels._receivers.values()
    return any(end.is_held_here and not end.lock._is_owned() for end in ends)


def encode_slowly(monkeypatch: Any, seconds: float) -> None:
    encode = Messenger.encode
    monkeypatch.setattr(Messenger, "encode", lambda *args: (time.sleep(seconds), encode(*args))[1])


def count_waiting(group: GroupCoordinator, rank: int) -> int:
    return int(group.context.host_memory.channels.transfers.waiting_sends(rank))
