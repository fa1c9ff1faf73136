"""Python interface to the control plane."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import logging
import os
import select
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import util
from typing import Any, NamedTuple
from weakref import WeakSet

from device_communicators.base import forks, settings
from device_communicators.base.errors import (
    CommunicationError,
    ConfigMismatchError,
    InvalidArgumentError,
    UnsupportedError,
    UsageError,
    format_ranks,
)
from device_communicators.base.helper_threads import HelperThread, prepare_exit
from device_communicators.base.host import resolve
from device_communicators.base.limits import name_shortage, naming_shortages
from device_communicators.control.client import ask

logger = logging.getLogger("parallel_state")

MOST_VALUE_BYTES = 4096
LINGER_S = 1.0
_GRACE_S = 5.0
"""A call that hasn't returned 5 s after its deadline raises ControlError."""
_SLICE_S = 0.05
_LOOK_S = 0.4
_MOST_MEMBERS, _MOST_DOMAINS = 4096, 512
"""The first is a copy of kMostMembers in csrc/frame.h."""
MOST_TOKEN_BYTES = 64
"""Maximum length of a token. HMAC-SHA-256 would hash a longer token first."""
_ENDPOINT_AT, _ENDPOINT_BYTES = 64, 1024
_BOARDS = ("/memfd:ps-control", "/dev/shm/#")
"""Targets of /proc/PID/fd links to control-plane memory start with these. The second is used if memfd_create fails."""
_LEFT, _EXITED, _UNREACHABLE, _FAILED, _STOPPED = 1, 2, 4, 8, 32
"""Values of EndFlag in csrc/core.h."""
_KINDS = ((_FAILED, "failed"), (_EXITED, "died"), (_STOPPED, "stopped"))
_DIED, _HAS_LEFT, _DECIDED, _ASKED, _REFUSED, _LOGGED, _OVER = range(1, 8)
"""Values of Inbox::Kind in csrc/driver.h."""
_VERDICTS = ("agreed", "ended", "missing", "undecided")
SAME = "the replay has the same digest\n"
"""Last line of the result of `describe` if a replay of the recorded events ends in the recorded state."""
_MEMBER = struct.Struct("<iQQiQiH")


Answer = bytes | Callable[[Callable[[bytes], None]], None]
"""A reply to a question, or a function that gets a callback and later calls it with the reply."""

_OPEN: WeakSet[World] = WeakSet()


@functools.cache
def _leave_at_exit() -> None:
    atexit.register(_leave_all)
    util.Finalize(None, _leave_all, exitpriority=0)  # processes of multiprocessing skip atexit


def _leave_all() -> None:
    """Tells peers at the program's end that this process leaves. After an uncaught exception does nothing, so that
    peers report a death.
    """
    raised = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if raised is None or (isinstance(raised, SystemExit) and not raised.code):
        for world in list(_OPEN):
            world.leave()


class ControlError(CommunicationError):
    pass


class Endpoint(NamedTuple):
    proc: int
    host: str
    port: int
    token: str
    """Secret of the process. Peers prove by HMAC that they have it."""
    board: int
    """File descriptor of the process's shared memory. Processes that can watch its PID read this memory."""

    def __str__(self) -> str:
        return json.dumps(list(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> Endpoint:
        proc, host, port, token, board = json.loads(text)
        return cls(int(proc), str(host), int(port), str(token), int(board))

    def server(self) -> tuple[str, int, str]:
        """Returns the process's numeric address, port and secret. Raises OSError if the host doesn't resolve."""
        return str(resolve(self.host, self.port)[0][4][0]), self.port, self.token


class Member(NamedTuple):
    rank: int
    domain: str
    """Equal for processes that can watch each other by PID."""
    pid: int
    began: str
    endpoint: Endpoint


class Change(NamedTuple):
    kind: str
    """One of "died", "left", "failed", "unreachable" and "stopped". Stopped: the rank's process doesn't respond, but
    its host's kernel does.
    """
    rank: int
    text: str
    by: int = -1


class Verdict(NamedTuple):
    kind: str
    """One of "agreed", "ended", "missing" and "undecided". If agreed, `values` has the ranks' values, in the order of
    `World.agree`'s `ranks`. Otherwise, the field `ranks` has the ranks that ended, are missing, or didn't answer.
    """
    values: list[bytes]
    ranks: list[int]


class World:
    """This process's membership in one world, a set of ranks that watch each other. Thread-safe."""

    def __init__(
        self, library: Any, address: str, *, limit_s: float, beat_s: float, port: int | None = None, token: str = ""
    ) -> None:
        """Listens at `address` for other ranks, and serves a key-value store for `ControlStore` clients.

        `port`: None for a free port, within PARALLEL_STATE_PORTS if set. `token`: secret that clients must have; random
        if empty. `limit_s`: time without messages after which a host counts as unreachable. `beat_s`: time between two
        heartbeats. Raises ControlError if listening fails, or ResourceLimitError.
        """
        prepare_exit()
        _leave_at_exit()
        self.library, self._pid = library, os.getpid()
        first, last = (port, port) if port is not None else settings.PORTS.get() or (0, 0)
        proc, bound, board = ctypes.c_uint64(), ctypes.c_int(), ctypes.c_int()
        if len(token.encode()) > MOST_TOKEN_BYTES:
            raise InvalidArgumentError(f"the secret token of a world must have at most {MOST_TOKEN_BYTES} bytes")
        shown = ctypes.create_string_buffer(token.encode(), MOST_TOKEN_BYTES + 1)
        try:
            numeric = resolve(address, 0)[0][4][0]
            self._own_handle = library.ps_control_open(
                str(numeric).encode(), first, last, beat_s, limit_s, library.ps_version(),
                ctypes.byref(proc), ctypes.byref(bound), ctypes.byref(board), shown,
            )  # fmt: skip
            if self._own_handle < 0:
                raise OSError(-self._own_handle, os.strerror(-self._own_handle))
        except OSError as error:
            is_range = port is None and last != 0
            of_range = (
                f", ports {first}-{last} ({settings.PORTS.name})," if is_range else f", port {port}," if port else ""
            )
            advice = ". Give a larger range" if is_range and error.errno == errno.EADDRINUSE else ""
            doing = f"listening on {address}{of_range} for other ranks"
            named = name_shortage(error, doing)
            raise (ControlError(f"{doing} failed: {error}{advice}") if named is error else named) from error
        self.endpoint = Endpoint(proc.value, address, bound.value, shown.value.decode(), board.value)
        os.pwrite(board.value, str(self.endpoint).encode()[:_ENDPOINT_BYTES], _ENDPOINT_AT)
        self._procs: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._servers: dict[int, tuple[str, int, str]] = {}
        self._refusal = self._end = ""
        self._on_change: Callable[[Change], None] = lambda change: None
        self._on_question: Callable[[int, bytes], Answer] = lambda rank, question: b""
        self._look: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._is_leaving = False
        _OPEN.add(self)

    def meet(
        self,
        members: Sequence[Member],
        on_change: Callable[[Change], None],
        on_question: Callable[[int, bytes], Answer] | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Joins the world, and returns without waiting for other members. Every member must call this with the same
        `members`.

        `on_change` is called for each `Change` of a rank, including this rank. `on_question` returns the reply to
        another process's question; its rank is -1 if a process outside the world asks with the right token. `look`, the
        caller's periodic check, is called every 0.4 s. One thread calls all callbacks, so they must be quick.
        """
        if self._procs:
            raise UsageError("World.meet was called twice; open another World to join another world")
        members = sorted(members)
        procs = {member.rank: member.endpoint.proc for member in members}
        ranks = {proc: rank for rank, proc in procs.items()}
        if self.endpoint.proc not in ranks or len(ranks) != len(members):
            raise InvalidArgumentError(
                "World.meet needs a list of members with each rank and process once, and this process among them, but "
                f"got ranks {format_ranks([member.rank for member in members])}. Pass the same list on all ranks"
            )
        domains = len({member.domain or member for member in members})
        if len(members) > _MOST_MEMBERS or domains > _MOST_DOMAINS:
            raise UnsupportedError(
                f"a world has at most {_MOST_MEMBERS} ranks on {_MOST_DOMAINS} hosts, but this one has {len(members)} "
                f"ranks on {domains} hosts; divide the ranks into several worlds"
            )
        addresses: dict[str, str] = {}
        packed = b"".join(_pack(member, addresses) for member in members)
        self._on_change, self._on_question, self._look = on_change, on_question or self._on_question, look
        self._servers = {
            rank: (addresses[endpoint.host], endpoint.port, endpoint.token) for rank, *_, endpoint in members
        }
        self._procs, self._ranks = procs, ranks  # before joining: for a store, the callback thread runs already
        try:
            code = self.library.ps_control_meet(self._handle, packed, len(packed), len(members))
            self._check(code, "joining the world")
        except BaseException:
            self._procs, self._ranks = {}, {}
            raise
        self.start_thread()  # last: a process without it can still report its failure

    def start_thread(
        self, on_question: Callable[[int, bytes], Answer] | None = None, look: Callable[[], None] | None = None
    ) -> None:
        """Starts the thread that runs callbacks, if it doesn't run yet. `on_question`, `look`: callbacks as in `meet`;
        None keeps the current one.
        """
        self._on_question, self._look = on_question or self._on_question, look or self._look
        if self._thread is not None:
            return
        thread = HelperThread("control-news", self._listen)
        with naming_shortages("starting the control plane's callback thread"):
            thread.start()
        self._thread = thread

    def agree(
        self,
        purpose: str,
        attempt: int,
        ranks: Sequence[int],
        value: bytes,
        timeout_s: float,
        give_up: Callable[[], bool] = lambda: False,
    ) -> Verdict:
        """Sends `value` to `ranks`, and returns the decision: the values of all ranks, or why these ranks can't agree.

        Each of `ranks` calls this with the same `purpose`, `attempt` and `ranks`. A repetition needs another `attempt`.

        Returns at most 0.5 s after `give_up()` returns True. If the decision is "undecided", other ranks can get
        another one. Raises ControlError if this process leaves the world, and ConfigMismatchError for another protocol
        version.
        """
        ordered = sorted(set(ranks))
        if self._ranks.get(self.endpoint.proc) not in ordered or not set(ordered) <= set(self._procs):
            raise InvalidArgumentError(
                f"ranks of '{purpose}' must be global ranks of this world and include this rank, but are "
                f"{format_ranks(ranks)}"
            )
        procs = (ctypes.c_uint64 * len(ordered))(*[self._procs[rank] for rank in ordered])
        digest, what = ctypes.c_uint64(), f"the agreement '{purpose}' (attempt {attempt})"
        call = (self._handle, purpose.encode(), attempt, procs, len(ordered), value, len(value))
        code = self.library.ps_control_call(*call, timeout_s, ctypes.byref(digest))
        if code == -errno.EEXIST:
            raise InvalidArgumentError(
                f"{what} of ranks {format_ranks(ordered)} is already running in this process; wait for it, or pass "
                "another `attempt` on all ranks"
            )
        key = (self._handle, digest.value, purpose.encode(), attempt)
        try:
            self._check(code, what)
            verdict = self._await_verdict(
                key, what, timeout_s, give_up, lambda: self.library.ps_control_call(*call, -1.0, ctypes.byref(digest))
            )
        except BaseException:
            self.library.ps_control_call(*call, -1.0, ctypes.byref(digest))
            raise
        finally:
            self.library.ps_control_forget(*key)
        values = dict(zip(ordered, verdict.values, strict=False))  # none unless agreed
        return verdict._replace(values=[values[rank] for rank in ranks if values])

    def ask(self, ranks: Sequence[int], question: bytes, timeout_s: float) -> dict[int, bytes | None]:
        """Sends `question` to `ranks` and returns the replies by rank, None if a rank's process runs but its Python
        code doesn't reply. Omits ranks whose process exits or doesn't run. If `question` is empty, a process replies
        without Python code.
        """
        if threading.current_thread() is self._thread:
            raise UsageError(
                f"a question to ranks {format_ranks(ranks)} can't wait in the thread that runs the control plane's "
                "callbacks; ask in another thread"
            )
        if not self._handle:  # checks for a fork, too
            return {}
        servers, own = {rank: self._servers[rank] for rank in ranks}, self._ranks[self.endpoint.proc]
        results = ask(self.library, servers, own, question, timeout_s)
        return {rank: None if code else reply for rank, (code, reply) in results.items() if code in (0, errno.ETIME)}

    def end_waits_of(self, group: int, ranks: Sequence[int], domain: Sequence[int]) -> None:
        """Makes waits in a C++ group end when a rank of `domain` dies. `group`: the C++ group's number. `ranks`: the
        group's global ranks, in order.
        """
        lists = (ranks, sorted(domain))
        arguments = (each for ranks in lists for each in ((ctypes.c_int * len(ranks))(*ranks), len(ranks)))
        if not self.library.ps_group_listen(group, self._handle, *arguments):
            self._check(-errno.ESRCH, f"ending waits of ranks {format_ranks(ranks)}")

    def report_failed(self, text: str) -> None:
        self._report(0, _FAILED, text)

    def report_unreachable(self, ranks: Sequence[int], text: str) -> None:
        for rank in ranks:
            self._report(self._procs[rank], _UNREACHABLE, text)

    def record(self) -> bytes:
        """Returns the last events that this control plane recorded (32 to 64 KiB, encoded for `describe`), or b"" if
        there was no memory for them. The events can contain secret tokens that were passed to `agree`.
        """
        return _filled(lambda buffer, size: self.library.ps_control_record(self._handle, buffer, size))

    def leave(self, linger_s: float = LINGER_S) -> None:
        """Tells peers that this process leaves. Returns when the other hosts' operating systems have received that
        message, after at most `linger_s` + 2 s. Idempotent.
        """
        if self._is_leaving or self._pid != os.getpid():
            return
        self._is_leaving = True
        self.library.ps_control_leave(self._handle, linger_s)
        thread = self._thread
        if thread is None:
            self.library.ps_control_close(self._handle)
        elif thread is not threading.current_thread():
            thread.join(1.0)

    @property
    def _handle(self) -> int:
        """Returns the C++ object's address, or raises ForkedError in a forked child. Use this before taking a lock: the
        parent may have held the lock at the fork.
        """
        if self._pid != os.getpid():
            raise forks.error("the control plane")
        return int(self._own_handle)

    def _report(self, proc: int, flags: int, text: str) -> None:
        cause = text.encode()
        code = self.library.ps_control_report(self._handle, proc, flags, cause, len(cause))
        self._check(code, "a report")

    def _check(self, code: int, what: str) -> None:
        if code == 0:
            return
        known = {errno.ESHUTDOWN: self._end or "its thread ended", errno.ESRCH: "this process left the world"}
        raise ControlError(f"{what} failed in the control plane: {known.get(-code, os.strerror(-code))}")

    def _await_verdict(
        self, key: tuple[Any, ...], what: str, timeout_s: float, give_up: Callable[[], bool], cancel: Callable[[], Any]
    ) -> Verdict:
        buffer, until, is_cancelled = ctypes.create_string_buffer(1 << 12), time.monotonic() + timeout_s, False
        while True:
            size = self.library.ps_control_verdict(*key, _SLICE_S, buffer, len(buffer))
            self._check(min(size, 0), what)
            if 0 < size <= len(buffer):
                break
            if size > 0:
                buffer = ctypes.create_string_buffer(size)
            elif self._refusal:
                raise ConfigMismatchError(self._refusal)
            elif time.monotonic() > until + _GRACE_S:
                raise ControlError(
                    f"{what} did not return within {_GRACE_S:g} s after its timeout of {timeout_s:g} s: thread "
                    "ps-control of this process hangs, or was not scheduled; see the log"
                )
            elif not is_cancelled and (is_cancelled := give_up()):
                cancel()
        news = _Reader(ctypes.string_at(buffer, size))
        kind, *_, text = _head_of(news)
        if kind == _REFUSED:
            raise InvalidArgumentError(_words(text))
        word = _VERDICTS[news.number("B")]
        values = [news.text() for _ in range(news.number("I"))]
        return Verdict(word, values, sorted(self._ranks[news.number("Q")] for _ in range(news.number("I"))))

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self.library.ps_control_eventfd(self._handle), select.POLLIN)
        buffer = ctypes.create_string_buffer(1 << 16)
        try:
            look_at = 0.0
            while not self._end:
                poll.poll(max(0.0, look_at - time.monotonic()) * 1000 + 1)
                if time.monotonic() >= look_at:  # the poll may return earlier, for news
                    self._guarded(self._look)
                    look_at = time.monotonic() + _LOOK_S
                while size := self.library.ps_control_next(self._handle, buffer, len(buffer)):
                    if size > len(buffer):
                        buffer = ctypes.create_string_buffer(size)
                    else:
                        self._guarded(self._take, _Reader(ctypes.string_at(buffer, size)))
        finally:
            self._end = self._end or "its helper thread ended"
            self.library.ps_control_close(self._handle)

    def _take(self, news: _Reader) -> None:
        kind, flags, proc, number, text = _head_of(news)
        rank = self._ranks.get(proc, -1)
        if kind == _ASKED:
            asker, _, question = text.partition(b" ")
            reply = self._guarded(self._on_question, int(asker), question) or b""
            if callable(reply):
                self._guarded(reply, partial(self._reply, number))
            else:
                self._reply(number, reply)
        elif kind == _OVER:
            self._end = f"its thread failed: {_words(text)}" if flags else "this process left the world"
            if flags:
                logger.error("the control plane of this process ended: %s", self._end)
                self._guarded(self._on_change, Change("over", self._ranks.get(self.endpoint.proc, -1), self._end))
        elif kind == _REFUSED:
            self._refusal = _words(text)
            logger.error("the control plane can't join the world: %s", self._refusal)
        elif kind == _LOGGED:
            level = logging.WARNING if flags else logging.INFO
            logger.log(level, "control plane: %s%s", _words(text), f" (rank {rank})" if rank >= 0 else "")
        elif rank >= 0 and not (kind == _HAS_LEFT and proc == self.endpoint.proc):
            word, by = "left" if kind == _HAS_LEFT else _kind_of(flags), self._ranks.get(number, -1)
            self._guarded(self._on_change, Change(word, rank, _words(text), by))

    def _reply(self, number: int, reply: bytes) -> None:
        self.library.ps_control_reply(self._handle, number, reply, len(reply))

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception:
            logger.exception("a callback of the control plane failed: %s", function)
            return None


def describe(library: Any, record: bytes) -> str:
    return _words(_filled(lambda buffer, size: library.ps_control_describe(record, len(record), buffer, size)))


def _filled(fill: Callable[[Any, int], int]) -> bytes:
    needed, buffer = 1 << 17, ctypes.create_string_buffer(0)
    while needed > len(buffer):
        buffer = ctypes.create_string_buffer(needed)
        needed = fill(buffer, len(buffer))
    return ctypes.string_at(buffer, needed)


def find_endpoints() -> dict[int, list[Endpoint]]:
    """Returns PID -> endpoints of its control planes, for processes in this PID namespace whose open files the caller
    can read.
    """
    found: dict[int, list[Endpoint]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):  # exited, or another user's
            for number in os.listdir(folder):
                path = f"{folder}/{number}"
                with contextlib.suppress(OSError, ValueError, TypeError):  # closed, or another file
                    is_own = os.lstat(path).st_mode & stat.S_IWUSR  # other processes' boards are open read-only
                    if is_own and os.readlink(path).startswith(_BOARDS):
                        with open(path, "rb") as board:
                            text = os.pread(board.fileno(), _ENDPOINT_BYTES, _ENDPOINT_AT).rstrip(b"\0")
                        found.setdefault(int(pid), []).append(Endpoint.parse(text))
    return found


def _kind_of(flags: int) -> str:
    return next((word for flag, word in _KINDS if flags & flag), "unreachable")


def _head_of(news: _Reader) -> tuple[int, int, int, int, bytes]:
    kind, flags, proc, number = (news.number(form) for form in "BBQQ")
    head = kind, flags, proc, number, news.text()
    news.number("B")  # a verdict follows
    return head


def _words(text: bytes) -> str:
    return text.decode(errors="replace")


def _pack(member: Member, addresses: dict[str, str]) -> bytes:
    proc, host, port, token, board = member.endpoint
    if host not in addresses:
        try:
            addresses[host] = str(resolve(host, port)[0][4][0])
        except OSError as error:
            raise ControlError(
                f"the address {host!r} of rank {member.rank} can't be resolved on this host: {error}. Check "
                "this host's DNS and /etc/hosts"
            ) from error
    domain = int.from_bytes(hashlib.blake2b(member.domain.encode(), digest_size=8).digest(), "little")
    head = _MEMBER.pack(
        member.rank, proc, domain if member.domain else proc, member.pid, int(member.began or 0), board, port
    )
    texts = (addresses[host].encode(), token.encode())
    return head + b"".join(struct.pack("<I", len(text)) + text for text in texts)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return int(value)

    def text(self) -> bytes:
        size = self.number("I")
        self._at += size
        return self._data[self._at - size : self._at]
