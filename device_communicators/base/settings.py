"""The library's environment variables. They are read at each use."""

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
"""The dict inside os.environ, in which looking up an unset variable takes a tenth of the time."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """An environment variable. `get` returns `default` if it is unset or empty, else `parse(text)`. If `parse` raises
    ValueError, `get` raises a SettingError with the text `must_be`.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    must_be: str
    help: str
    equal: bool = False
    """True if all ranks must have the same value. The ranks compare these values at start."""

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
    "Timeout of a group's operations if the caller gives none. The same on all ranks.", equal=True,
)  # fmt: skip
SLOW_S: Setting[float] = Setting(
    "PARALLEL_STATE_SLOW_S", 60.0, _seconds, "a positive number of seconds",
    "An operation that waits longer than this is logged, with the state of the ranks that it waits for.",
)  # fmt: skip
START_TIMEOUT_S: Setting[float] = Setting(
    "PARALLEL_STATE_START_TIMEOUT_S", 300.0, _seconds, "a positive number of seconds",
    "Timeout of start-up: the ranks find each other, connect, agree on their groups and create them.",
)  # fmt: skip
BARRIER_TIMEOUT_S: Setting[float] = Setting(
    "PARALLEL_STATE_BARRIER_TIMEOUT_S", 60.0, _seconds, "a positive number of seconds",
    "Timeout of the barrier at the end of initialize_model_parallel.",
)  # fmt: skip
HEARTBEAT_S: Setting[float] = Setting(
    "PARALLEL_STATE_HEARTBEAT_S", 1.0, _seconds, "a positive number of seconds",
    "Interval at which the hosts of a world send heartbeats. The same on all ranks.", equal=True,
)  # fmt: skip
HEARTBEAT_LIMIT_S: Setting[float] = Setting(
    "PARALLEL_STATE_HEARTBEAT_LIMIT_S", 20.0, _seconds, "a positive number of seconds",
    "A host that sends nothing for this time, or for four heartbeats if that is longer, counts as lost. The same on "
    "all ranks.", equal=True,
)  # fmt: skip
PORTS: Setting[tuple[int, int] | None] = Setting(
    "PARALLEL_STATE_PORTS", None, _port_range, "two ports, as 20000-20999",
    "Ports at which ranks listen for control connections, which carry no tensors; any free port if unset. Set it if a "
    "firewall opens only some ports. A rank uses one port for each world, and one more during reinitialize(). So a "
    "host needs one port for each of its ranks, or two if they call reinitialize(), or init_process_group() in "
    "addition to a world of this library.",
)  # fmt: skip
BACKEND: Setting[str | None] = Setting(
    "PARALLEL_STATE_BACKEND", None, str, "a torch.distributed backend",
    "Backend of the device groups if the caller gives none. If this is unset as well: nccl with CUDA, else gloo. The "
    "same on all ranks.", equal=True,
)  # fmt: skip
CPU_BACKEND: Setting[str] = Setting(
    "PARALLEL_STATE_CPU_BACKEND", "gloo", _one_of("gloo", "parallel_state"), "gloo or parallel_state",
    "Backend of the process groups that groups offer for torch.distributed's own calls on CPU tensors: cpu_group, and "
    "device_group if the device is the CPU. The same on all ranks.", equal=True,
)  # fmt: skip
SHOWN_BACKEND: Setting[str] = Setting(
    "PARALLEL_STATE_SHOWN_BACKEND", "parallel_state", _one_of("gloo", "parallel_state"), "gloo or parallel_state",
    "Name that torch.distributed.get_backend() returns for groups of the backend parallel_state. Use gloo for programs "
    "that compare the name with a list. Set it before the first such group is created.",
)  # fmt: skip
SHARED_MEMORY: Setting[bool] = Setting(
    "PARALLEL_STATE_SHARED_MEMORY", True, _on_off, "on or off",
    "Whether collectives of CPU tensors within a host use shared memory.",
)  # fmt: skip
NCCL: Setting[str] = Setting(
    "PARALLEL_STATE_NCCL", "auto", _auto_on_off, "auto, on or off",
    "Whether CUDA tensors use this library's own NCCL communicators, on the current stream, instead of torch's. auto: "
    "if measurements of this kind of machine show them to be faster.",
)  # fmt: skip
NCCL_ENVIRONMENT: Setting[bool] = Setting(
    "PARALLEL_STATE_NCCL_ENVIRONMENT", True, _on_off, "on or off",
    "Whether, in a world of several nodes, the library chooses the network interface and the use of InfiniBand for "
    "NCCL and gloo, by environment variables that aren't set yet.",
)  # fmt: skip
NCCL_LIBRARY: Setting[str | None] = Setting(
    "PARALLEL_STATE_NCCL_LIBRARY", None, str, "the path of a libnccl.so",
    "NCCL library to use, 2.27 or newer; torch's if unset.",
)  # fmt: skip
SHARE_GPUS: Setting[bool] = Setting(
    "PARALLEL_STATE_SHARE_GPUS", False, _on_off, "on or off",
    "Whether ranks of a host may share GPUs: rank r of the host then uses visible GPU r modulo the number of GPUs.",
)  # fmt: skip
PEER_MEMORY: Setting[str] = Setting(
    "PARALLEL_STATE_PEER_MEMORY", "auto", _auto_on_off, "auto, on or off",
    "Whether small CUDA tensors within a host use this library's kernels, in memory that all ranks map. auto: if "
    "measurements of this kind of machine exist. on: needs measurements of this kind of GPU.",
)  # fmt: skip
PEER_MEMORY_ALGORITHM: Setting[str] = Setting(
    "PARALLEL_STATE_PEER_MEMORY_ALGORITHM", "auto", _one_of("auto", "push", "pull", "two_shot"),
    "auto, push, pull or two_shot",
    "Kernel of all_reduce in peer memory. auto: chosen by size. Another value: this kernel for every size, so that the "
    "sum of an element doesn't depend on the size of its tensor.",
)  # fmt: skip
PEER_MEMORY_TABLE: Setting[str | None] = Setting(
    "PARALLEL_STATE_PEER_MEMORY_TABLE", None, str, "the path of a table of thresholds",
    "Table of the sizes up to which each kernel is used, as a tuning run writes it; the user's own table if unset.",
)  # fmt: skip
ROUND_BETWEEN_HOSTS: Setting[bool] = Setting(
    "PARALLEL_STATE_ROUND_BETWEEN_HOSTS", False, _on_off, "on or off",
    "Whether a reduction of bfloat16 tensors sends each host's partial result to other hosts as bfloat16 (half the "
    "bytes, rounded) instead of float32. The same on all ranks.",
)  # fmt: skip
CONNECTIONS: Setting[int] = Setting(
    "PARALLEL_STATE_CONNECTIONS", 1, _number(int, 1, 8), "a number from 1 to 8",
    "Number of TCP connections between two ranks of different hosts, spread over the interfaces in GLOO_SOCKET_IFNAME. "
    "Transfers of 256 KiB or more use all of them. If two ranks have different values, the smaller one counts. A rank "
    "without enough file descriptors uses one.",
)  # fmt: skip
EARLY_BYTES: Setting[int] = Setting(
    "PARALLEL_STATE_EARLY_BYTES", 64 << 20, _bytes, "a number of bytes",
    "Bytes that each rank of another host may send to this rank before this rank receives them. Data beyond that stays "
    "with the sender, whose call then returns after the receive. 0: nothing is sent early.",
)  # fmt: skip
BUILD: Setting[str] = Setting(
    "PARALLEL_STATE_BUILD", "auto", _one_of("auto", "plain", "never"), "auto, plain or never",
    "Whether native code may be compiled at its first use, into the user's cache. plain: without the torch ops.",
)  # fmt: skip
INSTRUCTIONS: Setting[str] = Setting(
    "PARALLEL_STATE_INSTRUCTIONS", "auto", _one_of("auto", "avx512", "avx2", "plain"), "auto, avx512, avx2 or plain",
    "Instruction set of the reductions in shared memory. auto: the best one of the processor. Another value: to test "
    "and measure what machines with fewer instructions do. Read once. Results have the same bits with each.",
)  # fmt: skip
SYMMETRIC_BYTES: Setting[int] = Setting(
    "PARALLEL_STATE_SYMMETRIC_BYTES", 8 << 30, _bytes, "a number of bytes",
    "Limit of shared memory for tensors (`group.empty`, large results) of a rank in each group. The memory is mapped "
    "when used; 256 MiB of freed memory are kept. On a GPU: limit of the memory registered with NCCL in each group. 0: "
    "none.",
)  # fmt: skip
HUGE_PAGES: Setting[bool] = Setting(
    "PARALLEL_STATE_HUGE_PAGES", False, _on_off, "on or off",
    "Whether shared memory for tensors uses huge pages (2 MiB). Needs Linux 6.1 or newer.",
)  # fmt: skip
SPIN_US: Setting[float | None] = Setting(
    "PARALLEL_STATE_SPIN_US", None, _number(float, 0, 1e6), "a number of microseconds, at most a second",
    "How long a rank that waits in shared memory spins before it sleeps. Unset: 150, or 5 with more ranks than cores.",
)  # fmt: skip
CORES: Setting[tuple[tuple[int, ...], ...] | None] = Setting(
    "PARALLEL_STATE_CORES", None, _core_lists, "share, or a list of cores for each rank of the host, as 0-3|4-7",
    "Cores that a rank is bound to while it is in a world. share: a share of the cores that the host's ranks may use, "
    "in whole physical cores and spread evenly over NUMA nodes. Lists: the cores of each rank of the host.",
)  # fmt: skip
AREAS: Setting[str] = Setting(
    "PARALLEL_STATE_AREAS", "off", _one_of("off", "nodes", "caches"), "off, nodes or caches",
    "How ranks that are bound to several NUMA nodes of a host do a large all_reduce. off: all ranks together. nodes: "
    "the sum is passed from node to node. caches: the same, and from cache to cache if all ranks are on one node. The "
    "value on the host's first rank counts.",
)  # fmt: skip
MAX_METADATA_BYTES: Setting[int] = Setting(
    "PARALLEL_STATE_MAX_METADATA_BYTES", 64 << 20, _number(int, 1, 1 << 62), "a positive number of bytes",
    "Largest metadata or object, not counting its tensors, that a rank accepts from a peer.",
)  # fmt: skip
DEBUG: Setting[bool] = Setting(
    "PARALLEL_STATE_DEBUG", False, _on_off, "on or off",
    "Whether the ranks of a group compare their calls and call sites before each collective. Costs 0.5 ms a call.",
)  # fmt: skip
DEBUG_DIR: Setting[str | None] = Setting(
    "PARALLEL_STATE_DEBUG_DIR", None, str, "a folder",
    "Folder for the last operations of each group, written when a group fails. Read them with python -m parallel_state "
    "debug.",
)  # fmt: skip
METRICS: Setting[bool] = Setting(
    "PARALLEL_STATE_METRICS", False, _on_off, "on or off",
    "Whether all calls of all groups are measured, from the first one on, as by `parallel_state.metrics.enable()`.",
)  # fmt: skip
PLUGIN: Setting[str | None] = Setting(
    "PARALLEL_STATE_PLUGIN", None, str, "names of engines with commas between them",
    "Engines that this library plugs into without a change of code: vllm, sglang. Read by their entry points.",
)  # fmt: skip
LOG_LEVEL: Setting[str] = Setting(
    "PARALLEL_STATE_LOG_LEVEL", "WARNING", _one_of("DEBUG", "INFO", "WARNING", "ERROR"),
    "DEBUG, INFO, WARNING or ERROR",
    "Log level of processes started by `launch`, and of programs that have not configured logging.",
)  # fmt: skip

ALL: tuple[Setting[object], ...] = tuple(each for each in globals().values() if isinstance(each, Setting))


def unknown_names(environ: Mapping[str, str] | None = None) -> list[str]:
    known = {setting.name for setting in ALL}
    names = os.environ if environ is None else environ
    return sorted(name for name in names if name.startswith(PREFIX) and name not in known)


def warn_about_unknown_names() -> None:
    for name in unknown_names():
        _warn_about(name)


@functools.cache
def _warn_about(name: str) -> None:
    logger.warning("%s is not a setting of parallel_state and has no effect", name)
