"""Every environment variable of the library: its name, type, default and meaning.

A value is read when it is needed, so a variable set by the program before that counts. A value that can't be
read raises `SettingError`; a variable of our prefix that nobody knows is reported by `unknown_names`.
What other programs define (RANK, MASTER_ADDR, SLURM_PROCID, …) is read in `parallel_state.startup.environment`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from device_communicators.base.cores import parse_list
from device_communicators.base.errors import SettingError

logger = logging.getLogger("parallel_state")

T = TypeVar("T")

PREFIX = "PARALLEL_STATE_"

_VARIABLES: Mapping[bytes, bytes] | None = getattr(os.environ, "_data", None) if os.name == "posix" else None
"""The dict behind os.environ: that a variable is missing, as most are, shows there in a tenth of the time."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable; `get()` returns its value, or the default where it is unset or empty."""

    name: str
    default: T
    parse: Callable[[str], T]
    must_be: str
    help: str
    equal: bool = False
    """True if a world's ranks must have equal values, which are compared at start."""

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        if environ is None and _VARIABLES is not None and self.name.encode() not in _VARIABLES:
            return self.default
        text = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingError(
                f"{self.name} must be {self.must_be}, but is {text!r}; unset it to use {self.default!r}"
            ) from error


def _number(kind: Callable[[str], T], least: float, most: float) -> Callable[[str], T]:
    def parse(text: str) -> T:
        number: Any = kind(text)
        if not least <= number <= most:
            raise ValueError(text)
        return number

    return parse


_seconds = _number(float, 1e-9, 10 * 365 * 86400)
_bytes = _number(int, 0, 1 << 42)


def _on_off(text: str) -> bool:
    if text.lower() not in ("on", "off", "true", "false", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("on", "true", "1")


def _auto_on_off(text: str) -> str:
    return "auto" if text.lower() == "auto" else "on" if _on_off(text) else "off"


def _port_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not 1024 <= int(first) <= int(last) <= 65535:
        raise ValueError(text)
    return int(first), int(last)


def _core_lists(text: str) -> tuple[tuple[int, ...], ...]:
    if text.lower() == "share":
        return ()
    lists = tuple(tuple(parse_list(part)) for part in text.split("|"))
    if not all(lists):
        raise ValueError(text)
    return lists


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        found = [word for word in words if word.lower() == text.lower()]
        if not found:
            raise ValueError(text)
        return found[0]

    return parse


TIMEOUT_S: Setting[float] = Setting(
    "PARALLEL_STATE_TIMEOUT_S", 600.0, _seconds, "a positive number of seconds",
    "Deadline of one operation of a group where the caller gave no timeout. The same on all ranks.", equal=True,
)  # fmt: skip
SLOW_S: Setting[float] = Setting(
    "PARALLEL_STATE_SLOW_S", 60.0, _seconds, "a positive number of seconds",
    "How long an operation may wait before the log says for whom, and what those ranks do.",
)  # fmt: skip
START_TIMEOUT_S: Setting[float] = Setting(
    "PARALLEL_STATE_START_TIMEOUT_S", 300.0, _seconds, "a positive number of seconds",
    "How long the ranks look for each other at start, connect, agree on their groups and make them.",
)  # fmt: skip
BARRIER_TIMEOUT_S: Setting[float] = Setting(
    "PARALLEL_STATE_BARRIER_TIMEOUT_S", 60.0, _seconds, "a positive number of seconds",
    "Deadline of the barrier that ends initialize_model_parallel.",
)  # fmt: skip
HEARTBEAT_S: Setting[float] = Setting(
    "PARALLEL_STATE_HEARTBEAT_S", 1.0, _seconds, "a positive number of seconds",
    "How often the hosts of a world show that they live. The same on all ranks.", equal=True,
)  # fmt: skip
HEARTBEAT_LIMIT_S: Setting[float] = Setting(
    "PARALLEL_STATE_HEARTBEAT_LIMIT_S", 20.0, _seconds, "a positive number of seconds",
    "How long a host may be silent before it is given up. The same on all ranks.", equal=True,
)  # fmt: skip
PORTS: Setting[tuple[int, int] | None] = Setting(
    "PARALLEL_STATE_PORTS", None, _port_range, "two ports, as 20000-20999",
    "Ports at which ranks may listen for each other's connections that carry no data, for firewalls; else any. Each "
    "rank takes one for each world, and one more during reinitialize(). So a host needs as many as it has ranks, and "
    "twice as many for reinitialize() or for init_process_group() beside a world of this library.",
)  # fmt: skip
BACKEND: Setting[str | None] = Setting(
    "PARALLEL_STATE_BACKEND", None, str, "a torch.distributed backend",
    "Backend of the device groups where the caller gave none: nccl with CUDA, else gloo. The same on all ranks.",
    equal=True,
)  # fmt: skip
CPU_BACKEND: Setting[str] = Setting(
    "PARALLEL_STATE_CPU_BACKEND", "gloo", _one_of("gloo", "parallel_state"), "gloo or parallel_state",
    "Backend of the process groups for CPU tensors that groups give to torch.distributed's own calls (cpu_group, and "
    "device_group where the device is the CPU). The same on all ranks.", equal=True,
)  # fmt: skip
SHOWN_BACKEND: Setting[str] = Setting(
    "PARALLEL_STATE_SHOWN_BACKEND", "parallel_state", _one_of("gloo", "parallel_state"), "gloo or parallel_state",
    "Name that torch.distributed.get_backend() returns to programs for groups of the backend parallel_state: gloo for "
    "programs that compare it with a list of names. Set it before the first such group is made.",
)  # fmt: skip
GROUP_CREATION: Setting[str] = Setting(
    "PARALLEL_STATE_GROUP_CREATION", "auto", _one_of("auto", "local", "split", "global"),
    "auto, local, split or global",
    "Who makes a process group: its members (local), all ranks by splitting a bound communicator (split), or all ranks "
    "one group after the other (global); auto is what the backend can do best. The same on all ranks.", equal=True,
)  # fmt: skip
SHARED_MEMORY: Setting[bool] = Setting(
    "PARALLEL_STATE_SHARED_MEMORY", True, _on_off, "on or off",
    "Whether collectives of CPU tensors within a host go over shared memory.",
)  # fmt: skip
NCCL: Setting[str] = Setting(
    "PARALLEL_STATE_NCCL", "auto", _auto_on_off, "auto, on or off",
    "Whether CUDA tensors go over NCCL communicators of our own, on the current stream, or over torch's; auto: where a "
    "measured row covers this machine and has them faster.",
)  # fmt: skip
NCCL_ENVIRONMENT: Setting[bool] = Setting(
    "PARALLEL_STATE_NCCL_ENVIRONMENT", True, _on_off, "on or off",
    "Whether NCCL and gloo are told, on several nodes, which interface to take and how InfiniBand is used, where "
    "nobody has said so.",
)  # fmt: skip
NCCL_LIBRARY: Setting[str | None] = Setting(
    "PARALLEL_STATE_NCCL_LIBRARY", None, str, "the path of a libnccl.so",
    "The NCCL to use, 2.27 or newer; else the one that torch uses.",
)  # fmt: skip
SHARE_GPUS: Setting[bool] = Setting(
    "PARALLEL_STATE_SHARE_GPUS", False, _on_off, "on or off",
    "Whether ranks of a host may share a GPU: rank r of the host then takes GPU r % GPUs of those in sight.",
)  # fmt: skip
PEER_MEMORY: Setting[str] = Setting(
    "PARALLEL_STATE_PEER_MEMORY", "auto", _auto_on_off, "auto, on or off",
    "Whether small CUDA tensors within a host go over kernels of our own in memory that all ranks map; auto: where a "
    "measured row covers this machine.",
)  # fmt: skip
PEER_MEMORY_ALGORITHM: Setting[str] = Setting(
    "PARALLEL_STATE_PEER_MEMORY_ALGORITHM", "auto", _one_of("auto", "push", "pull", "two_shot"),
    "auto, push, pull or two_shot",
    "Which kernel all-reduces in peer memory: by size (auto), or this one for every size, so that an element's sum "
    "doesn't depend on the size of the tensor that it is in.",
)  # fmt: skip
PEER_MEMORY_TABLE: Setting[str | None] = Setting(
    "PARALLEL_STATE_PEER_MEMORY_TABLE", None, str, "the path of a table of thresholds",
    "Up to which size which kernel is used, as a tuning writes it; else the user's rows.",
)  # fmt: skip
ROUND_BETWEEN_HOSTS: Setting[bool] = Setting(
    "PARALLEL_STATE_ROUND_BETWEEN_HOSTS", False, _on_off, "on or off",
    "Whether what the bfloat16 tensors of a host's ranks come to is rounded to bfloat16 before it travels to other "
    "hosts, in half the bytes, or travels as float32. The same on all ranks.",
)  # fmt: skip
CONNECTIONS: Setting[int] = Setting(
    "PARALLEL_STATE_CONNECTIONS", 1, _number(int, 1, 8), "a number from 1 to 8",
    "How many TCP connections two ranks of different hosts have, to the interfaces in GLOO_SOCKET_IFNAME in turn; what "
    "has 256 KiB or more goes over all of them. Of two ranks that differ the smaller number counts; a rank that lacks "
    "file descriptors has one.",
)  # fmt: skip
EARLY_BYTES: Setting[int] = Setting(
    "PARALLEL_STATE_EARLY_BYTES", 64 << 20, _bytes, "a number of bytes",
    "How much that a rank of another host sends to this one may be kept here before it is received; what is more stays "
    "with its sender, whose call ends when it is received. 0: nothing is sent before.",
)  # fmt: skip
BUILD: Setting[str] = Setting(
    "PARALLEL_STATE_BUILD", "auto", _one_of("auto", "plain", "never"), "auto, plain or never",
    "Whether the compiled part may be compiled at its first use, into the user's cache; plain: without torch's ops.",
)  # fmt: skip
INSTRUCTIONS: Setting[str] = Setting(
    "PARALLEL_STATE_INSTRUCTIONS", "auto", _one_of("auto", "avx512", "avx2", "plain"), "auto, avx512, avx2 or plain",
    "Instruction set of the reductions in shared memory: the best that the processor has (auto), or one of those that "
    "it has, to measure and test what machines without the others do; read once. Results have the same bits with each.",
)  # fmt: skip
SYMMETRIC_BYTES: Setting[int] = Setting(
    "PARALLEL_STATE_SYMMETRIC_BYTES", 8 << 30, _bytes, "a number of bytes",
    "How much memory for tensors that all ranks of a host map (`group.empty`, large results) a rank may have in each "
    "group. It is mapped as it is used, and of freed memory 256 MiB are kept. On a GPU, how much memory may be "
    "registered with NCCL for each group. 0: none.",
)  # fmt: skip
HUGE_PAGES: Setting[bool] = Setting(
    "PARALLEL_STATE_HUGE_PAGES", False, _on_off, "on or off",
    "Whether the memory for tensors that all ranks of a host map is made of huge pages (2 MiB), where the kernel can: "
    "Linux 6.1 or newer.",
)  # fmt: skip
SPIN_US: Setting[float | None] = Setting(
    "PARALLEL_STATE_SPIN_US", None, _number(float, 0, 1e6), "a number of microseconds, at most a second",
    "How long a rank that waits in shared memory spins before it sleeps: 150, with more ranks than cores 5.",
)  # fmt: skip
CORES: Setting[tuple[tuple[int, ...], ...] | None] = Setting(
    "PARALLEL_STATE_CORES", None, _core_lists, "share, or a list of cores for each rank of the host, as 0-3|4-7",
    "Cores that a rank is bound to when it joins the world, until the world ends: its share of those that the host's "
    "ranks may use (whole physical cores, NUMA nodes evenly), or its own of these lists.",
)  # fmt: skip
AREAS: Setting[str] = Setting(
    "PARALLEL_STATE_AREAS", "off", _one_of("off", "nodes", "caches"), "off, nodes or caches",
    "Whether a large all_reduce of ranks that are bound to several NUMA nodes is one of all ranks (off), goes from "
    "node to node (nodes), or within one node also from cache to cache (caches). A host's first rank decides.",
)  # fmt: skip
MAX_METADATA_BYTES: Setting[int] = Setting(
    "PARALLEL_STATE_MAX_METADATA_BYTES", 64 << 20, _number(int, 1, 1 << 62), "a positive number of bytes",
    "Largest metadata or object, without its tensors, that a rank accepts from a peer.",
)  # fmt: skip
DEBUG: Setting[bool] = Setting(
    "PARALLEL_STATE_DEBUG", False, _on_off, "on or off",
    "Whether the ranks of a group compare their calls before each collective, call sites included (0.5 ms a call).",
)  # fmt: skip
DEBUG_DIR: Setting[str | None] = Setting(
    "PARALLEL_STATE_DEBUG_DIR", None, str, "a folder",
    "Where a rank writes its groups' last operations when one fails; python -m parallel_state debug reads them.",
)  # fmt: skip
METRICS: Setting[bool] = Setting(
    "PARALLEL_STATE_METRICS", False, _on_off, "on or off",
    "Whether the calls of all groups are measured from the first one on, as after `parallel_state.metrics.enable()`.",
)  # fmt: skip
PLUGIN: Setting[str | None] = Setting(
    "PARALLEL_STATE_PLUGIN", None, str, "names of engines with commas between them",
    "Which engines run on this library without a line of code: vllm, sglang. Read by their entry points.",
)  # fmt: skip
LOG_LEVEL: Setting[str] = Setting(
    "PARALLEL_STATE_LOG_LEVEL", "WARNING", _one_of("DEBUG", "INFO", "WARNING", "ERROR"),
    "DEBUG, INFO, WARNING or ERROR",
    "Level of the log: of processes that `launch` started, and of programs that have configured no logging.",
)  # fmt: skip

ALL: tuple[Setting[object], ...] = tuple(each for each in globals().values() if isinstance(each, Setting))


def unknown_names(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns names that carry our prefix and that no setting has: most likely typing errors."""
    known = {setting.name for setting in ALL}
    names = os.environ if environ is None else environ
    return sorted(name for name in names if name.startswith(PREFIX) and name not in known)


def warn_about_unknown_names() -> None:
    """Warns of each such variable of this process, once."""
    for name in unknown_names():
        _warn_about(name)


@functools.cache
def _warn_about(name: str) -> None:
    logger.warning("%s is not a setting of parallel_state and has no effect", name)
