"""The job's store as a stranger meets it: a client, the sizes of its frames, and its deadline."""

from __future__ import annotations

from parallel_state.launch.store import read_secret
from parallel_state.store.client import ControlStore
from parallel_state.store.protocol import ANSWER_BYTES, GREETING_BYTES, MAGIC, REFUSED
from parallel_state.store.server import HANDSHAKE_S

__all__ = ["ANSWER_BYTES", "GREETING_BYTES", "HANDSHAKE_S", "MAGIC", "REFUSED", "ControlStore", "read_secret"]
