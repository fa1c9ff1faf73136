"""Ranks for `init_scaling`. `run_ranks` forks the ranks, and a server of their store, from this process, which has
imported everything. The process must have only one thread: locks that other threads hold would stay locked in a fork.

`mark(name)` records the end of a step. On torch's `fake` backend, one process with a `StoreOfOneRank` acts as rank r of
n, and also runs Megatron-core's `initialize_model_parallel`.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib.util
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import parallel_state as ps
from parallel_state import resolve_layout

Function = Callable[[int, int, Callable[[str], None]], Any]
_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


class TrialFailedError(RuntimeError):
    pass


class Footprint(NamedTuple):
    threads: int
    descriptors: int
    rss_kib: int

    @classmethod
    def now(cls) -> Footprint:
        with open("/proc/self/status", encoding="utf-8") as file:
            status = dict(line.split(":", 1) for line in file)
        # - 1: listdir itself opens a descriptor
        return cls(int(status["Threads"]), len(os.listdir("/proc/self/fd")) - 1, int(status["VmRSS"].split()[0]))


class Result(NamedTuple):
    marks: dict[str, float]
    """Seconds from the common start to each step's end."""
    cpu: dict[str, float]
    """CPU seconds of all threads until each step's end."""
    before: Footprint
    after: Footprint
    value: Any


def run_ranks(world_size: int, function: Function, deadline: float) -> list[Result]:
    """Runs `function` on forked ranks. Returns the results by rank. Raises TrialFailedError with tracebacks on failure
    or at `deadline` (monotonic).
    """
    threads = Footprint.now().threads
    if threads != 1:
        raise TrialFailedError(f"the parent of forks must have one thread, but has {threads}; set OMP_NUM_THREADS=1")
    ranks: list[_Fork] = []
    gate_end, gate = os.pipe()
    release_end, release = os.pipe()
    gc.collect()
    gc.freeze()  # otherwise a collection in a fork copies all pages, 0.1 s in a random step
    server = _Fork(lambda answer: _serve(answer), closes=[gate_end, gate, release_end, release])
    try:
        port = pickle.loads(_answers([server], deadline)[0])
        closes = [gate, release, server.read_end]
        for rank in range(world_size):
            fork = _Fork(_rank_body(rank, port, function, gate_end, release_end), closes=closes)
            ranks.append(fork)
            closes = [*closes, fork.read_end]
        _answers(ranks, deadline)
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
    """Moves this process into a new network namespace; returns False if this isn't permitted. TCPStore resolves its
    address's name: with an unresponsive name server this takes 5 s or more, without a network it fails at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0 and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    return True


class _Fork:
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
            os._exit(code)

    def join(self, deadline: float) -> None:
        while not self.done and time.monotonic() < deadline:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                self.done = True
            else:
                time.sleep(0.002)

    def end(self) -> None:
        if not self.done:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.done = True
        os.close(self.read_end)


def _serve(answer: Callable[[bytes], None]) -> None:
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
        os.read(gate_end, 1)

        cpu_before = time.process_time()

        def mark(name: str) -> None:
            marks[name] = time.monotonic()
            cpu[name] = time.process_time() - cpu_before

        try:
            value = function(rank, port, mark)
            answer(pickle.dumps((None, Result(marks, cpu, before, Footprint.now(), value))))
        except BaseException:
            answer(pickle.dumps((traceback.format_exc(), None)))
        os.read(release_end, 1)  # no rank may exit while another one needs its connections

    return body


def _write(descriptor: int, data: bytes) -> None:
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(descriptor, data) :]


def _answers(forks: Sequence[_Fork], deadline: float) -> list[bytes]:
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


class CountingStore(dist.Store):
    """Counts operations on a store, including those of gloo's C++ code. An operation on k keys counts once. The
    messages with which a `TCPStore` connects don't count.
    """

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.counts: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.counts["set"] += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.counts["get"] += 1
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        self.counts["add"] += 1
        return self.inner.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.counts["compare_set"] += 1
        return self.inner.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        self.counts["check"] += 1
        return self.inner.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.counts["wait"] += 1
        self.inner.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        self.counts["delete_key"] += 1
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        self.counts["num_keys"] += 1
        return self.inner.num_keys()

    def append(self, key: str, value: Any) -> None:
        self.counts["append"] += 1
        self.inner.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.counts["multi_get"] += 1
        return self.inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self.counts["multi_set"] += 1
        self.inner.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return self.inner.has_extended_api()

    deleteKey = delete_key  # the names in C++  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


class StoreOfOneRank(CountingStore):
    """A store for one process that acts as rank `rank` of `world_size`. The counter of arrived ranks (`…/count`)
    becomes `world_size` at once, and any other rank's request (`parallel_state.process_groups.agreement`) reads as this
    rank's. Reading any other unwritten key raises LookupError.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(dist.HashStore())
        self._rank = rank
        self._world_size = world_size

    def get(self, key: str) -> bytes:
        self.counts["get"] += 1
        return self.inner.get(self._written(key))

    def add(self, key: str, amount: int) -> int:
        everyone = "/agree/" in key and key.endswith("/count")
        return super().add(key, self._world_size if everyone else amount)

    def check(self, keys: list[str]) -> bool:
        return super().check([self._answered(key) for key in keys])

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.counts["wait"] += 1
        for key in keys:
            self._written(key)

    def _answered(self, key: str) -> str:
        question, _, last = key.rpartition("/")
        return f"{question}/{self._rank}" if "/agree/" in key and last.isdigit() else key

    def _written(self, key: str) -> str:
        key = self._answered(key)
        if not self.inner.check([key]):
            raise LookupError(f"{key} was written by nobody; in a world of one process it never will be")
        return key


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    originals = {name: getattr(c10d, name) for name in ("_new_group_with_tag", "_new_process_group_helper")}

    def new_group(*args: Any, **named: Any) -> Any:
        counts["new_group"] += 1
        return originals["_new_group_with_tag"](*args, **named)

    def make(*args: Any, **named: Any) -> Any:
        counts["make"] += 1
        made = originals["_new_process_group_helper"](*args, **named)
        counts["member of"] += made[0] is not dist.GroupMember.NON_GROUP_MEMBER
        return made

    c10d._new_group_with_tag, c10d._new_process_group_helper = new_group, make
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(c10d, name, original)


class Cost(NamedTuple):
    groups: int
    calls: int
    """Calls of torch that make process groups, also those without this rank."""
    store: dict[str, int]
    rank_sets: int
    """Distinct rank lists of its groups, with that of itself and of the world."""


def cost_of_start(rank: int, world_size: int, sizes: Mapping[str, int], *, eager: bool) -> Cost:
    """Returns the cost of `initialize_model_parallel(**sizes)` on one rank. The process must have no default group,
    before and after. `eager`: creates all groups now.
    """
    store = StoreOfOneRank(rank, world_size)
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # the backend `fake` of older versions of torch

    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        with calls_counted() as calls:
            world = ps.init_world_group(list(range(world_size)), 0, "fake")
            if world.pool is not None:
                world.pool.agreement.alone = False  # the store answers for the others
            ps.initialize_model_parallel(**sizes, backend="fake", eager=eager)
        groups = ps.get_parallel_groups().groups.values()
        rank_sets = {tuple(group.ranks) for group in groups}
        return Cost(calls["member of"], calls["make"], dict(store.counts), len(rank_sets))
    finally:
        ps.destroy_distributed_environment()
        dist.destroy_process_group()


class Case(NamedTuple):
    world_size: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int

    @property
    def title(self) -> str:
        return " · ".join(f"{name} {size}" for name, size in self._asdict().items() if name != "world_size")

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }


GROWING = tuple(Case(world_size, tp=8, pp=8, cp=2, ep=8, etp=8) for world_size in (1024, 8192, 16384))
CITED = (Case(1024, tp=8, pp=16, cp=1, ep=8, etp=1), Case(8192, tp=8, pp=16, cp=1, ep=8, etp=8))
"""Published: 3,569 and 16,617 calls of `create_group` on every rank, which is in 8 and 12 rank sets."""


def in_one_process(function: Callable[[], Any], deadline: float) -> Any:
    return run_ranks(1, lambda rank, port, mark: function(), deadline)[0].value


def counts_of(case: Case, deadline: float) -> list[dict[str, Any]]:
    rows = []
    for rank in sorted({0, case.world_size // 2, case.world_size - 1}):
        costs: dict[str, Callable[[], Any]] = {
            "ours": partial(cost_of_start, rank, case.world_size, case.sizes, eager=False),
            "ours, all kinds": partial(cost_of_start, rank, case.world_size, case.sizes, eager=True),
        }
        if megatron_file() is not None:
            costs["megatron-core"] = partial(cost_of_megatron, rank, case)
        for variant, measure in costs.items():
            cost: Cost = in_one_process(measure, deadline)
            rows.append({"variant": variant, **case._asdict(), "rank": rank, "cost": cost._asdict()})
    return rows


def check_constant(rows: Sequence[Mapping[str, Any]]) -> None:
    first: dict[tuple[str, str], Any] = {}
    for row in rows:
        if row["variant"].startswith("ours"):
            place = "middle" if 0 < row["rank"] < row["world_size"] - 1 else "end"
            found = first.setdefault((row["variant"], place), row)
            if found["cost"] != row["cost"]:
                raise RuntimeError(
                    f"what a rank does must not grow with the world, but with {row['variant']!r} it was "
                    f"{found['cost']} on rank {found['rank']} of {found['world_size']} and {row['cost']} on rank "
                    f"{row['rank']} of {row['world_size']}"
                )


def times_of(case: Case, repetitions: int, deadline: float) -> list[dict[str, Any]]:
    variants: dict[str, Callable[[], float]] = {
        "ours": partial(_time_ours, case, eager=False),
        "ours, all kinds": partial(_time_ours, case, eager=True),
        "ours, layout only": partial(_time_layout, case),
    }
    if megatron_file() is not None:
        variants["megatron-core"] = partial(_time_megatron, case)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, measure in variants.items():
            samples[name].append(round(in_one_process(measure, deadline), 3))
    return [{"variant": name, **case._asdict(), "ms": times} for name, times in samples.items()]


def _time_ours(case: Case, *, eager: bool) -> float:
    store = _join_fake_world(case.world_size // 2, case.world_size)
    ps.init_world_group(list(range(case.world_size)), 0, "fake")
    started = time.perf_counter()
    ps.initialize_model_parallel(**case.sizes, backend="fake", eager=eager)
    ended = time.perf_counter()
    del store  # torch keeps only its C++ half
    return (ended - started) * 1000


def _time_layout(case: Case) -> float:
    sizes = {name: getattr(case, name) for name in ("tp", "pp", "cp", "ep", "etp")}
    started = time.perf_counter()
    layout = resolve_layout(case.world_size, sizes)
    for name in layout.names:
        layout.group_of(case.world_size // 2, name)
    return (time.perf_counter() - started) * 1000


def _time_megatron(case: Case) -> float:
    _join_fake_world(case.world_size // 2, case.world_size)
    megatron = load_megatron()
    started = time.perf_counter()
    megatron.initialize_model_parallel(**case.sizes)
    return (time.perf_counter() - started) * 1000


def _join_fake_world(rank: int, world_size: int) -> StoreOfOneRank:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    store = StoreOfOneRank(rank, world_size)
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    return store


def megatron_file() -> Path | None:
    spec = importlib.util.find_spec("megatron")  # a namespace: finding it imports nothing
    paths = [Path(place, "core", "parallel_state.py") for place in (spec and spec.submodule_search_locations) or ()]
    return next((path for path in paths if path.exists()), None)


def load_megatron() -> Any:
    """Imports Megatron's `parallel_state` alone: `megatron.core` would import dozens of unrelated modules. Uses the
    default backend instead of gloo, which would wait for the missing ranks.
    """
    path = megatron_file()
    if path is None:
        raise ModuleNotFoundError("megatron-core isn't installed; pip install --no-deps megatron-core==0.16.1")
    utils = ModuleType("megatron_alone.utils")
    vars(utils).update(
        GlobalMemoryBuffer=object, GlobalSymmetricMemoryBuffer=object, is_torch_min_version=lambda _: True
    )
    package = ModuleType("megatron_alone")
    package.__path__ = []
    sys.modules.update({"megatron_alone": package, "megatron_alone.utils": utils})
    spec = importlib.util.spec_from_file_location("megatron_alone.parallel_state", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{path.name} of megatron-core can't be loaded")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    create_group = module.create_group
    module.create_group = lambda *args, **named: create_group(*args, **{**named, "backend": None})
    return module


def cost_of_megatron(rank: int, case: Case) -> Cost:
    store = _join_fake_world(rank, case.world_size)
    megatron = load_megatron()
    create_group = megatron.create_group
    rank_sets = set()
    calls_of_create_group = 0

    def counted(ranks: list[int], *args: Any, **named: Any) -> Any:
        nonlocal calls_of_create_group
        calls_of_create_group += 1
        if rank in ranks:
            rank_sets.add(tuple(ranks))
        return create_group(ranks, *args, **named)

    megatron.create_group = counted
    with calls_counted() as calls:
        megatron.initialize_model_parallel(**case.sizes)
    dist.destroy_process_group()
    if calls["make"] != calls_of_create_group:
        raise RuntimeError(f"{calls_of_create_group} calls of create_group came to {calls['make']} of torch's")
    return Cost(calls["member of"], calls["make"], dict(store.counts), len(rank_sets))
