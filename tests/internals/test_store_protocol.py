"""The handshake and the frames of the store of a job, as bytes: what proves nothing, and what is no next frame."""

from __future__ import annotations

import os
import struct

import pytest

from device_communicators.base.errors import InvalidArgumentError, MessageDecodeError
from parallel_state.store import protocol
from parallel_state.store.protocol import (
    ANSWER_BYTES,
    CHECK,
    DONE,
    GREETING_BYTES,
    HEADER,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    SET,
    Direction,
    Message,
    keys_of,
    length_in,
    packed,
    proof,
    unpacked,
)
from parallel_state.store.server import Session

SECRET = bytes(range(32))


def _nonce(session: Session) -> bytes:
    assert bytes(session.output[: len(MAGIC)]) == MAGIC
    assert len(session.output) == GREETING_BYTES
    return bytes(session.output[len(MAGIC) :])


def _connected() -> tuple[Session, Direction, Direction]:
    """A server's end after the handshake, and what its client sends and receives by."""
    session, own = Session(SECRET), os.urandom(NONCE_BYTES)
    nonces = _nonce(session) + own
    session.output.clear()
    assert not session.authenticated
    assert session.feed(own + proof(SECRET, b"client", nonces)) is None
    assert session.authenticated
    assert bytes(session.output) == proof(SECRET, b"server", nonces)
    session.output.clear()
    keys = keys_of(SECRET, nonces)
    return session, Direction(keys.to_server), Direction(keys.to_client)


def _feed(session: Session, data: bytes) -> Message | None:
    """As the server does it: never more than what is due."""
    while data:
        count = session.may_read
        request = session.feed(data[:count])
        data = data[count:]
        if request is not None:
            assert not data
            return request
    return None


def test_requests_and_replies_after_a_handshake() -> None:
    session, to_server, from_server = _connected()
    for number in range(3):
        message = Message(SET, [b"key", b"%d" % number])
        assert _feed(session, to_server.seal(packed(message))) == message
        session.reply(Message(DONE, [b"%d" % number]))
        length, mac = length_in(session.output[: HEADER.size])
        assert from_server.open(mac, session.output[HEADER.size :]) == Message(DONE, [b"%d" % number])
        assert len(session.output) == HEADER.size + length
        session.output.clear()


def _answers(nonce: bytes) -> dict[str, bytes]:
    own = os.urandom(NONCE_BYTES)
    right = proof(SECRET, b"client", nonce + own)
    return {
        "another secret": own + proof(SECRET[:-1] + b"!", b"client", nonce + own),
        "no secret": own + proof(b"", b"client", nonce + own),
        "the server's role": own + proof(SECRET, b"server", nonce + own),
        "the server's nonce alone": own + proof(SECRET, b"client", nonce),
        "its own nonce alone": own + proof(SECRET, b"client", own),
        "of another connection": own + proof(SECRET, b"client", os.urandom(NONCE_BYTES) + own),
        "another nonce than it sends": os.urandom(NONCE_BYTES) + proof(SECRET, b"client", nonce + own),
        "its last bit": own + right[:-1] + bytes([right[-1] ^ 1]),
        "zeros": bytes(ANSWER_BYTES),
    }  # fmt: skip


@pytest.mark.parametrize("what", _answers(bytes(NONCE_BYTES)))
def test_an_answer_that_proves_nothing(what: str) -> None:
    session = Session(SECRET)
    nonce = _nonce(session)
    session.output.clear()
    with pytest.raises(MessageDecodeError, match="must prove that it knows the job's secret"):
        session.feed(_answers(nonce)[what])
    assert not session.authenticated
    assert bytes(session.output) == REFUSED
    with pytest.raises(MessageDecodeError):
        session.reply(Message(DONE, []))


def test_each_connection_has_a_nonce_and_keys_of_its_own() -> None:
    assert len({_nonce(Session(SECRET)) for _ in range(100)}) == 100
    nonces = os.urandom(2 * NONCE_BYTES)
    keys = {*keys_of(SECRET, nonces), *keys_of(SECRET, nonces[::-1]), *keys_of(bytes(32), nonces)}
    keys |= {proof(SECRET, role, nonces) for role in (b"client", b"server")}
    assert len(keys) == 8
    assert {len(key) for key in keys} == {PROOF_BYTES}


def test_frames_that_are_not_the_next_one() -> None:
    content = packed(Message(CHECK, [b"key"]))
    key, other = os.urandom(32), os.urandom(32)

    def frame(sender: Direction) -> tuple[bytes, bytes]:
        sealed = sender.seal(content)
        return length_in(sealed[: HEADER.size])[1], sealed[HEADER.size :]

    sender = Direction(key)
    first, second = frame(sender), frame(sender)
    assert first[0] != second[0]
    receiver = Direction(key)
    assert receiver.open(*first) == unpacked(content)
    assert receiver.open(*second) == unpacked(content)
    for earlier, (mac, body) in (
        ((), second),  # the first one left out
        ((first,), first),  # repeated
        ((), (first[0], first[1][:-1] + b"!")),
        ((), (bytes(PROOF_BYTES), first[1])),
        ((), (first[0], first[1] + b"\0")),
        ((), frame(Direction(other))),
    ):
        receiver = Direction(key)
        for each in earlier:
            receiver.open(*each)
        with pytest.raises(MessageDecodeError, match="MAC is wrong"):
            receiver.open(mac, body)


def test_what_a_server_said_is_no_request() -> None:
    """Each direction has a key of its own."""
    session, to_server, _ = _connected()
    _feed(session, to_server.seal(packed(Message(CHECK, [b"key"]))))
    session.reply(Message(DONE, [b"1"]))
    with pytest.raises(MessageDecodeError, match="MAC is wrong"):
        _feed(session, bytes(session.output))


def test_a_client_that_does_not_wait_for_the_reply() -> None:
    session, to_server, _ = _connected()
    _feed(session, to_server.seal(packed(Message(CHECK, [b"key"]))))
    with pytest.raises(MessageDecodeError, match="must wait for the reply"):
        session.feed(b"\0")


def test_lengths_are_checked_before_anything_is_taken_in() -> None:
    most = protocol.MAX_CONTENT_BYTES
    for length in (5, most):
        assert length_in(HEADER.pack(length, bytes(PROOF_BYTES)))[0] == length
    for length in (0, 4, most + 1, (1 << 32) - 1):
        with pytest.raises(MessageDecodeError, match="a frame's content must have"):
            length_in(HEADER.pack(length, bytes(PROOF_BYTES)))
    session = Session(SECRET)
    assert session.may_read == ANSWER_BYTES, "of a stranger"
    session, to_server, _ = _connected()
    assert session.may_read == HEADER.size
    assert _feed(session, to_server.seal(bytes(most))[: HEADER.size]) is None
    assert session.may_read == 256 << 10, "of a frame of 64 MiB"


@pytest.mark.parametrize(
    "content",
    [
        b"\1\0\0\0",
        struct.pack("<BI", 1, 1),
        struct.pack("<BI", 1, 1 << 31),
        struct.pack("<BII", 1, 1, 5) + b"four",
        struct.pack("<BII", 1, 1, 3) + b"four",
        struct.pack("<BIII", 1, 2, 0, 1 << 31),
        struct.pack("<BII", 1, 2, 3) + b"abc",
        struct.pack("<BI", 1, 0) + b"\0",
    ],
)
def test_contents_that_are_no_message(content: bytes) -> None:
    with pytest.raises(MessageDecodeError):
        unpacked(content)


def test_what_is_too_much_for_one_message_is_not_sent() -> None:
    with pytest.raises(InvalidArgumentError, match="must have at most"):
        packed(Message(SET, [bytes(protocol.MAX_CONTENT_BYTES)]))
    with pytest.raises(InvalidArgumentError, match="must have at most"):
        packed(Message(SET, [b""] * (protocol.MAX_PARTS + 1)))
    parts = [b"", b"\0" * 300, b"key"]
    assert unpacked(packed(Message(7, parts))) == Message(7, parts)
