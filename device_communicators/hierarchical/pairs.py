"""Sends and receives between two ranks of a group over several hosts, by a connection of each two.

A message says what the sender's call is: where the receiver's differs, nothing is written, and both ranks raise. The
sender of up to ANSWERED_BYTES is done once the kernel has it; of more once the receiver has said what its call is. What
the receiver has no room for before its call (PARALLEL_STATE_EARLY_BYTES) is sent when it has said so, however small.

Any thread may wait, and several at once: each moves what it can. What was started and isn't waited for is moved by a
thread of its own after a moment. A signal's handler may interrupt a thread anywhere, in the middle of a message too, so
it can't send or receive in the group that it interrupts.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from device_communicators.errors import CollectiveMismatchError, CommunicationError
from device_communicators.hierarchical.streams import SLICE_S, Stream, StreamError, Streams, Transfer, memory_of
from device_communicators.liveness.health import NOTICE_S
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died
from device_communicators.routing.user_call import begin_sending, handler_error
from device_communicators.routing.waiting import TransferError, run_in_thread

ANSWERED_BYTES = 64 << 10
_TWO_WAIT_S = 0.001
_UNWAITED_S = 0.02
_FIRST_KIND = 16


class Pairs:
    """This rank's ends of a group's connections; they go with the group."""

    def __init__(self, context: GroupContext, streams: Streams) -> None:
        self.context = context
        self.streams = streams
        self.lock = threading.RLock()
        self._inside: dict[int, str] = {}
        """By thread: the operation that it is in."""
        self._waiters = 0
        self._is_moved = False
        """True while a thread moves what nobody waits for."""

    def isend(self, x: Tensor, dst: int, tag: int) -> PairTransfer:
        with self.entered("send"), self.lock:
            return _Send(self, x, dst, tag)

    def irecv(self, out: Tensor, src: int, tag: int) -> PairTransfer:
        with self.entered("recv"), self.lock:
            return _Recv(self, out, src, tag)

    @contextlib.contextmanager
    def entered(self, operation: str) -> Iterator[None]:
        """Refuses a handler of this thread's signals, and ends the connections where one raises: `with` it in a call.

        Else another receive would get the message of the one that was interrupted, or the rest of it.
        """
        thread = threading.get_ident()
        if thread in self._inside:
            raise handler_error(operation, str(self.context), self._inside[thread])
        try:
            self._inside[thread] = operation
            yield
        except CommunicationError:
            raise
        except BaseException:  # Ctrl-C, or of a signal's handler
            self.end_sending()
            raise
        finally:
            self._inside.pop(thread, None)

    def move(self, is_done: Callable[[], bool], limit: Callable[[], float], spin_s: float) -> None:
        """Moves what can be moved until `is_done`. `limit` as of Streams.wait. Raises StreamError."""
        now = time.monotonic()
        spin_until, look_at = now + spin_s, now + SLICE_S
        poll, masks = select.poll(), dict[int, tuple[int, Stream]]()
        with self.lock:
            self._waiters += 1
        try:
            while True:
                with self.lock:
                    if is_done():
                        return
                    self._register(poll, masks)
                    slice_s = SLICE_S if self._waiters == 1 else _TWO_WAIT_S
                ready = poll.poll(0 if now < spin_until else 1000 * slice_s)
                if ready:
                    with self.lock:
                        _handle(ready, masks)
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + min(SLICE_S, limit())
        finally:
            with self.lock:
                self._waiters -= 1

    def _register(self, poll: select.poll, masks: dict[int, tuple[int, Stream]]) -> None:
        if not self.streams.by_rank:  # closed
            masks.clear()
        for stream in self.streams.by_rank.values():
            mask = (select.POLLOUT if stream.is_sending else 0) | (
                select.POLLIN if stream.is_sending or stream.is_receiving else 0
            )
            descriptor = stream.socket.fileno()
            if stream.error or descriptor < 0:
                mask = 0
            before, _ = masks.get(descriptor, (0, stream))
            if mask != before:
                masks[descriptor] = mask, stream
                if mask:
                    poll.register(descriptor, mask)
                else:
                    poll.unregister(descriptor)

    def keep_moving(self) -> None:
        """Has a thread move what has been started, for as long as that isn't done."""
        with self.lock:
            begun, self._is_moved = self._is_moved, True
        if not begun:
            run_in_thread(self._move_on)

    def _move_on(self) -> None:
        try:
            self._move_what_is_left()
        except BaseException:
            self._is_moved = False
            raise

    def _move_what_is_left(self) -> None:
        time.sleep(_UNWAITED_S)  # most callers wait soon
        poll, masks = select.poll(), dict[int, tuple[int, Stream]]()
        while True:
            with self.lock:
                self._register(poll, masks)
                self._is_moved = any(mask for mask, _ in masks.values())
                if not self._is_moved:
                    return
                others_move = self._waiters > 0
            if others_move:
                time.sleep(_UNWAITED_S)
                continue
            ready = poll.poll(1000 * SLICE_S)
            with self.lock:
                _handle(ready, masks)

    def end_sending(self) -> None:
        with self.lock:
            self.streams.end_sending()

    def close(self) -> None:
        with self.lock:
            self.streams.close()


def _handle(ready: Sequence[tuple[int, int]], masks: Mapping[int, tuple[int, Stream]]) -> None:
    for descriptor, events in ready:
        if descriptor in masks:  # else it was closed
            masks[descriptor][1].handle(events)


class PairTransfer:
    """A work, as c10d's."""

    operation = ""
    _other = ""

    def __init__(self, pairs: Pairs, x: Tensor, peer: int, tag: int) -> None:
        begin_sending()
        self._pairs = pairs
        self._peer = peer
        self._kind = _FIRST_KIND + 2 * tag
        self._text = f"{str(x.dtype).removeprefix('torch.')} {x.numel()}".encode()
        self._stream = pairs.streams.by_rank[peer]
        self._transfers: list[Transfer] = []
        self._tensor = x

    def is_completed(self) -> bool:
        return all(each.done for each in self._transfers)

    def begin(self) -> PairTransfer:
        """Has it moved on while nobody waits."""
        if not self.is_completed():
            self._pairs.keep_moving()
        return self

    def run_in_this_thread(self) -> None:
        """Sees it to its end without a deadline, for who keeps its tensor; errors are the wait's."""

        def limit() -> float:
            if self._pairs.context.deaths():
                raise StreamError("a rank has ended", self._peer)
            return SLICE_S

        with contextlib.suppress(StreamError):
            self._pairs.move(self._is_over, limit, 0.0)

    def _is_over(self) -> bool:
        if self._stream.error and not self.is_completed():
            raise StreamError(self._stream.error, self._peer)
        return self.is_completed()

    def wait(self) -> None:
        with self._pairs.entered(self.operation):
            self._wait()

    def _wait(self) -> None:
        context, started = self._pairs.context, time.monotonic()
        deadline, noticed = started + context.timeout_s, list[float]()

        def limit() -> float:
            now = time.monotonic()
            if context.deaths():
                noticed.append(now)  # what the dead rank sent before may still be on its way
                if now - noticed[0] > NOTICE_S:
                    raise died(context, self.operation, started)
            if now > deadline:
                raise StreamError("timed out", self._peer)
            return deadline - now

        try:
            self._pairs.move(self._is_over, limit, self._pairs.streams.spin_s)
        except StreamError as error:
            if context.deaths():
                raise died(context, self.operation, started) from error
            self._pairs.end_sending()  # as the group can't be used further: others needn't wait for their deadline
            raise TransferError(str(error), self._peer) from error
        found = next((each.found for each in self._transfers if each.found not in (None, self._text)), None)
        if found is not None:
            raise self._mismatch(found)

    def _mismatch(self, found: bytes) -> CollectiveMismatchError:
        context = self._pairs.context
        peer = context.ranks[self._peer]
        return context.failure(
            CollectiveMismatchError,
            f"{self.operation} of {context} met another call: this rank is in {_in_words(self.operation, self._text)}, "
            f"and global rank {peer} in {_in_words(self._other, found)}. Nothing was written. The group can't be used "
            "further; give the receiving rank the shape and dtype that are sent, and receive in the order of the sends",
            self.operation,
            suspect_ranks=[peer],
            timeout_s=context.timeout_s,
        )


class _Send(PairTransfer):
    operation, _other = "send", "recv"

    def __init__(self, pairs: Pairs, x: Tensor, dst: int, tag: int) -> None:
        super().__init__(pairs, x, dst, tag)
        stream, nothing = self._stream, memoryview(bytearray())
        if not stream.has_room(x.nbytes):
            self._transfers.append(stream.receive(self._kind + 1, nothing, None, self._send_announced))
            self._transfers.append(stream.announce(self._kind, x.nbytes, self._text))
            return
        if x.nbytes > ANSWERED_BYTES:
            self._transfers.append(stream.receive(self._kind + 1, nothing, None))
        self._transfers.append(stream.send_body(self._kind, memory_of(x), self._text))

    def _send_announced(self, *_: object) -> None:
        if self._transfers[0].found == self._text:  # else it isn't what the receiver expects
            self._transfers.append(self._stream.send_announced(self._kind, memory_of(self._tensor)))


class _Recv(PairTransfer):
    operation, _other = "recv", "send"

    def __init__(self, pairs: Pairs, out: Tensor, src: int, tag: int) -> None:
        super().__init__(pairs, out, src, tag)
        self._transfers.append(self._stream.receive(self._kind, memory_of(out), self._text, self._answer))

    def _answer(self, size_bytes: int, is_announced: bool) -> None:
        if is_announced or size_bytes > ANSWERED_BYTES:
            self._stream.send_body(self._kind + 1, memoryview(bytearray()), self._text)


def _in_words(operation: str, text: bytes) -> str:
    dtype, _, numel = text.decode(errors="replace").partition(" ")
    return f"{operation} of {numel} × {dtype}"
