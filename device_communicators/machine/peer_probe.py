"""Tries if GPUs can use each other's memory: written, and read back by the memory's owner.

A driver may report P2P that loses or corrupts data (an IOMMU in the way, bridges that redirect), and then says so
nowhere. What is tried, and how, is in `peer_probe_child`. It runs in a process of its own, so that a crash or a hang of
the driver is an answer and harms nobody; GPUs are named by UUID, so a process that sees one GPU only can ask for
others. An answer holds for the two GPUs, the driver's version and until the next boot: it is kept in memory, and in the
user's cache so that the next start needs no probe.

Not run on two GPUs: tests play it with a libcuda of their own that works, lies, crashes and hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from device_communicators.build_cache import cache_folder
from device_communicators.host import boot_id

LIBRARY = "libcuda.so.1"
TIMEOUT_S = 60.0
"""The limit for one pair, the start of CUDA included."""

_CHILD = Path(__file__).with_name("peer_probe_child.py")
_VERSION = 1  # of what is tried
_HUNG = "probe hung"
_KILL_S = 5.0
_known: dict[str, Probe] = {}
_lock = threading.Lock()

Pair = tuple[str, str]


@dataclass(frozen=True)
class Probe:
    """The result of a probe: `works` is None where it couldn't be tried, and `reason` says what was found."""

    works: bool | None
    reason: str


def probe_peers(
    pairs: Sequence[Pair],
    driver_version: str | None,
    *,
    library: str = LIBRARY,
    timeout_s: float = TIMEOUT_S,
    cache: Path | None = None,
) -> dict[Pair, Probe]:
    """Probes for each pair of GPUs, by UUID, whether the first can load from, store to and copy to the second's memory.

    Raises nothing. A GPU of two slices has no peers: give GPUs, not slices. `cache` is a folder; the user's by default.
    """
    folder = cache_folder() / "peers" if cache is None else cache
    keys = {pair: _key(pair, driver_version, library) for pair in pairs}
    found: dict[Pair, Probe] = {}
    with _lock:  # one probe at a time in this process: they would wait for each other's memory
        for pair, key in keys.items():
            probe = _known.get(key) or _read(folder, key)
            if probe is not None:
                found[pair] = _known[key] = probe
        left = [pair for pair in keys if pair not in found]
        for pair, probe, is_fact in _try(left, library, timeout_s):
            found[pair] = probe
            if is_fact:  # what may be a mishap is tried again
                _known[keys[pair]] = probe
                _write(folder, keys[pair], probe)
    return found


def forget_probes() -> None:
    """Lets this process ask the cache, or try, again."""
    with _lock:
        _known.clear()


def _try(pairs: list[Pair], library: str, timeout_s: float) -> Iterator[tuple[Pair, Probe, bool]]:
    """Gives each pair's probe, and whether it is a fact. A child goes through the pairs; when it dies, another does."""
    while pairs:
        answers, mishap = _run(pairs, library, timeout_s)
        for pair, answer in zip(pairs, answers, strict=False):
            yield pair, answer, answer.works is not None
        pairs = pairs[len(answers) :]
        if pairs:
            yield pairs[0], mishap, False
            pairs = pairs[1:]
            if _HUNG in mishap.reason:  # as the others would, one deadline after the other
                yield from ((pair, Probe(None, f"not tried, since another {mishap.reason}"), False) for pair in pairs)
                return


def _run(pairs: list[Pair], library: str, timeout_s: float) -> tuple[list[Probe], Probe]:
    """Returns the answers for the first pairs, and what stopped the child before the next."""
    uuids = sorted({uuid for pair in pairs for uuid in pair})
    task = {
        "library": library,
        "uuids": [uuid.partition("-")[2].replace("-", "") for uuid in uuids],
        "pairs": [[uuids.index(uuid) for uuid in pair] for pair in pairs],
    }
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    answers: list[Probe] = []
    hung = Probe(False, f"{_HUNG}: no answer within {timeout_s:g} s")
    try:
        child = subprocess.Popen(
            [sys.executable or "python3", "-I", str(_CHILD), json.dumps(task)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return answers, Probe(None, f"the probe can't be started: {error}")
    try:
        last = _listen(child, answers, timeout_s)
        return answers, hung if last is None else _ended(child.wait(timeout_s), last)
    except subprocess.TimeoutExpired:
        return answers, hung
    finally:
        child.kill()
        # A process can hang in the driver, where no signal reaches it: it is left behind then.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_S)
        if child.stdout is not None:
            child.stdout.close()


def _listen(child: subprocess.Popen[bytes], answers: list[Probe], timeout_s: float) -> str | None:
    """Adds the child's answers until it has no more; then its last other words, or None where it fell silent."""
    pipe = child.stdout
    if pipe is None:
        return "it has no output"
    buffer, last = b"", ""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    while True:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        data = os.read(pipe.fileno(), 1 << 16)
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").strip()
            if text.startswith("probe {"):
                answer: dict[str, Any] = json.loads(text.removeprefix("probe "))
                answers.append(Probe(answer["works"], answer["reason"]))
                deadline = time.monotonic() + timeout_s
            elif text and not text.startswith("probe begin"):
                last = text
        if not data:
            return last


def _ended(exit_code: int, last: str) -> Probe:
    """Returns the meaning of a child's end: by a signal, the driver crashed."""
    words = f": {last}" if last else ""
    if exit_code >= 0:
        return Probe(None, f"the probe ended with exit code {exit_code}{words}")
    with contextlib.suppress(ValueError):
        return Probe(False, f"the probe was ended by {signal.Signals(-exit_code).name}{words}")
    return Probe(False, f"the probe was ended by signal {-exit_code}{words}")


# The cache: a small file for each pair.


def _key(pair: Pair, driver_version: str | None, library: str) -> str:
    # What an IOMMU or a bridge does is decided when the system starts.
    return sha256(repr((_VERSION, pair, driver_version, library, boot_id())).encode()).hexdigest()[:32]


def _read(folder: Path, key: str) -> Probe | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        path = folder / f"{key}.json"
        if path.stat().st_uid == os.geteuid():  # nobody else says what this user's kernels rely on
            answer = json.loads(path.read_text())
            return Probe(answer["works"], answer["reason"]) if isinstance(answer["works"], bool) else None
    return None


def _write(folder: Path, key: str, probe: Probe) -> None:
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = folder / f".{key}.{os.getpid()}"
        mine.write_text(json.dumps({"works": probe.works, "reason": probe.reason}))
        mine.replace(folder / f"{key}.json")
