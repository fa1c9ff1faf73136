"""Ranks as forks of one process that has imported everything, and the store that serves them: many fit one machine.

    results = run_ranks(64, function, deadline)     # each rank's function(rank, port, mark)

A trial is one set of ranks, from their common start to their end; nothing of it is left for the next. `mark(name)`
notes when a step ended. The parent must have one thread only: forks have no other, whatever locks it held.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Function = Callable[[int, int, Callable[[str], None]], Any]
_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


class TrialFailedError(RuntimeError):
    """A rank raised, died, or wasn't done by the deadline."""


class Footprint(NamedTuple):
    """Of this process, now."""

    threads: int
    descriptors: int
    rss_kib: int

    @classmethod
    def now(cls) -> Footprint:
        with open("/proc/self/status") as file:
            status = dict(line.split(":", 1) for line in file)
        # listdir has a descriptor open itself
        return cls(int(status["Threads"]), len(os.listdir("/proc/self/fd")) - 1, int(status["VmRSS"].split()[0]))


class Result(NamedTuple):
    """Of one rank."""

    marks: dict[str, float]
    """When each step ended, in seconds since the common start."""
    cpu: dict[str, float]
    """How many seconds of a core the rank had used until then, in all its threads."""
    before: Footprint
    after: Footprint
    value: Any


def run_ranks(world_size: int, function: Function, deadline: float) -> list[Result]:
    """Each rank's result. `deadline` is of time.monotonic; TrialFailedError with the ranks' tracebacks after it."""
    threads = Footprint.now().threads
    if threads != 1:
        raise TrialFailedError(f"the parent of forks must have one thread, but has {threads}; set OMP_NUM_THREADS=1")
    ranks: list[_Fork] = []
    gate_end, gate = os.pipe()
    release_end, release = os.pipe()
    gc.collect()
    gc.freeze()  # else a collection in a fork copies every page with objects in it: 0.1 s, in whichever step it comes
    server = _Fork(lambda answer: _serve(answer), closes=[gate_end, gate, release_end, release])
    try:
        port = pickle.loads(_answers([server], deadline)[0])
        closes = [gate, release, server.read_end]
        for rank in range(world_size):
            fork = _Fork(_rank_body(rank, port, function, gate_end, release_end), closes=closes)
            ranks.append(fork)
            closes = [*closes, fork.read_end]
        _answers(ranks, deadline)  # all are ready
        started = time.monotonic()
        os.close(gate)
        gate = -1
        found = [pickle.loads(answer) for answer in _answers(ranks, deadline)]
        errors = {rank: text for rank, (text, _) in enumerate(found) if text}
        if errors:
            texts = [f"--- rank {rank} ---\n{text}" for rank, text in list(errors.items())[:2]]
            raise TrialFailedError(f"{len(errors)} of {world_size} ranks raised\n" + "\n".join(texts))
        results = [result for _, result in found]
        os.close(release)
        release = -1
        for fork in ranks:
            fork.join(deadline)
        return [result._replace(marks={name: at - started for name, at in result.marks.items()}) for result in results]
    finally:
        for fork in (*ranks, server):
            fork.end()
        for descriptor in (gate_end, gate, release_end, release):
            if descriptor >= 0:
                os.close(descriptor)


def enter_own_network() -> bool:
    """Leaves for a network namespace with a loopback only, for good; False where this process may not.

    While it connects, TCPStore asks for the name of its own address. With a name server that doesn't answer this
    takes 5 s and more for some ranks, from about 28 ranks on; without a network the answer, none, comes at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0 and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    return True


class _Fork:
    """One child: it runs `body(answer)` and ends; each `answer(bytes)` is read by the parent at `read_end`."""

    def __init__(self, body: Callable[[Callable[[bytes], None]], None], closes: Sequence[int]) -> None:
        self.read_end, write_end = os.pipe()
        self.done = False
        parent = os.getpid()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            os.close(write_end)
            return
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for descriptor in (*closes, self.read_end):
                os.close(descriptor)
            torch.set_num_threads(1)
            if os.getppid() == parent:
                body(lambda data: _write(write_end, data))
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # no exit handlers: those are the parent's

    def join(self, deadline: float) -> None:
        while not self.done and time.monotonic() < deadline:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                self.done = True
            else:
                time.sleep(0.002)

    def end(self) -> None:
        """Kills it if it still runs."""
        if not self.done:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.done = True
        os.close(self.read_end)


def _serve(answer: Callable[[bytes], None]) -> None:
    """The store, in a process of its own, as a launcher serves it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer(pickle.dumps(store.port))
    while True:
        signal.pause()


def _rank_body(
    rank: int, port: int, function: Function, gate_end: int, release_end: int
) -> Callable[[Callable[[bytes], None]], None]:
    def body(answer: Callable[[bytes], None]) -> None:
        marks: dict[str, float] = {}
        cpu: dict[str, float] = {}
        answer(b"ready")
        before = Footprint.now()
        os.read(gate_end, 1)  # until the parent closes its end

        cpu_before = time.process_time()

        def mark(name: str) -> None:
            marks[name] = time.monotonic()
            cpu[name] = time.process_time() - cpu_before

        try:
            value = function(rank, port, mark)
            answer(pickle.dumps((None, Result(marks, cpu, before, Footprint.now(), value))))
        except BaseException:
            answer(pickle.dumps((traceback.format_exc(), None)))
        os.read(release_end, 1)  # no rank ends, and closes connections, while another one needs them

    return body


def _write(descriptor: int, data: bytes) -> None:
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(descriptor, data) :]


def _answers(forks: Sequence[_Fork], deadline: float) -> list[bytes]:
    """The next answer of each."""
    contents = {fork.read_end: b"" for fork in forks}
    pending = set(contents)
    poll = select.poll()
    for descriptor in pending:
        poll.register(descriptor, select.POLLIN)
    while pending:
        remaining_s = deadline - time.monotonic()
        for descriptor, _ in poll.poll(max(0.0, remaining_s) * 1000):
            content = contents[descriptor]
            wanted = int.from_bytes(content[:8], "little") + 8 - len(content) if len(content) >= 8 else 8 - len(content)
            data = os.read(descriptor, wanted)
            if not data:
                rank = list(contents).index(descriptor)
                raise TrialFailedError(f"process {rank} of {len(forks)} ended without an answer")
            content = contents[descriptor] = content + data
            if len(content) >= 8 and len(content) == 8 + int.from_bytes(content[:8], "little"):
                pending.discard(descriptor)
                poll.unregister(descriptor)
        if remaining_s <= 0 and pending:
            late = [position for position, fork in enumerate(forks) if fork.read_end in pending]
            raise TrialFailedError(f"no answer from processes {late[:8]} of {len(forks)} within the deadline")
    return [content[8:] for content in contents.values()]
