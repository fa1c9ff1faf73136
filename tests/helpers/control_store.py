from __future__ import annotations

import hashlib
import os
from pathlib import Path

from device_communicators.control.store import ControlStore
from device_communicators.cpu import native

MAGIC = b"\0PSCTRL1"
HELLO_BYTES, HEAD_BYTES, NONCE_BYTES, PROOF_BYTES = 20, 24, 16, 32
GREETING_BYTES = HELLO_BYTES + HEAD_BYTES + NONCE_BYTES
IDENTITY_BYTES = HEAD_BYTES + PROOF_BYTES
ANSWER_BYTES = GREETING_BYTES + IDENTITY_BYTES
"""Sizes of what a client sends before its first call."""
HANDSHAKE_S = 5.0
_NONCE, _IDENTITY = 1, 2


def read_secret(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def store_of(port: int, secret: bytes, timeout_s: float) -> ControlStore:
    return ControlStore(native.load(), ("127.0.0.1", port), secret.hex(), timeout_s)


def _frame(greeting: bytes, kind: int, body: bytes) -> bytes:
    version = greeting[HELLO_BYTES + 4 : HELLO_BYTES + 6]
    return len(body).to_bytes(4, "little") + version + kind.to_bytes(2, "little") + bytes(16) + body


def opening(greeting: bytes, nonce: bytes | None = None) -> bytes:
    return greeting[:HELLO_BYTES] + _frame(greeting, _NONCE, nonce or os.urandom(NONCE_BYTES))


def identity(greeting: bytes, proof: bytes) -> bytes:
    return _frame(greeting, _IDENTITY, proof)
