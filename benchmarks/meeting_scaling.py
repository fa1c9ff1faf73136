"""Measures how up to 1,024 ranks find each other over the store, before a backend connects them.

    python benchmarks/meeting_scaling.py                                    16 to 1,024 ranks, some minutes on 2 cores

The ranks are threads in forks of this process; eight of them count as a host and use its address. With the real store,
they run the steps before torch's `init_process_group`: the rendezvous, the watch for ranks that exit meanwhile, and the
check that all hosts reach each other.

An untimed run counts store operations and bytes, and fits the exponent of their growth with the number of ranks; 1 is
linear.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harness.picture import Panel, draw
from init_scaling import start_afresh
from init_scaling_ranks import CountingStore, TrialFailedError, enter_own_network, run_ranks

from parallel_state.startup import interfaces, rendezvous
from parallel_state.startup import stores as start_stores
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.interfaces import Address
from parallel_state.tools.bench.report import circumstances

RANKS = (16, 32, 64, 128, 256, 512, 1024)
PER_HOST = 8
HOSTS_PER_FORK = 4
TRIAL_S = 240.0


class BytesStore(CountingStore):
    connections: list[BytesStore]

    def set(self, key: str, value: Any) -> None:
        self.counts["bytes"] += len(key) + len(value)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        found = super().get(key)
        self.counts["bytes"] += len(key) + len(found)
        return found

    def add(self, key: str, amount: int) -> int:
        self.counts["bytes"] += len(key) + 8
        return super().add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        found = super().compare_set(key, expected, desired)
        self.counts["bytes"] += len(key) + len(expected) + len(desired) + len(found)
        return found

    def check(self, keys: list[str]) -> bool:
        self.counts["bytes"] += sum(map(len, keys)) + 1
        return super().check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = super().multi_get(keys)
        self.counts["bytes"] += sum(map(len, keys)) + sum(map(len, found))
        return found

    def clone(self) -> BytesStore:
        store = BytesStore(self.inner.clone())
        store.connections = self.connections
        self.connections.append(store)
        return store


class Told(NamedTuple):
    seconds: float
    operations: int
    bytes: int


def host_address(host: int) -> str:
    return f"10.{200 + host // 65_536}.{host // 256 % 256}.{host % 256}"


def give_addresses(hosts: int) -> None:
    lines = "".join(f"addr add {host_address(host)}/32 dev lo\n" for host in range(hosts))
    subprocess.run(["ip", "-force", "-batch", "-"], input=lines, text=True, check=False, stderr=subprocess.DEVNULL)


def hosts_of_fork(world_size: int, count: bool, fork: int, port: int, mark: Callable[[str], None]) -> list[Told]:
    ranks = range(fork * HOSTS_PER_FORK * PER_HOST, min(world_size, (fork + 1) * HOSTS_PER_FORK * PER_HOST))
    own = threading.local()
    interfaces.whereabouts = lambda: _place_of(own.rank)
    stores: dict[int, list[BytesStore]] = {rank: [] for rank in ranks}
    if count:
        start_stores.open_tcp_store = _counting(start_stores.open_tcp_store, own, stores)
    # Call `make` in the rank's own thread, which has its thread-local state.
    start_stores.within = rendezvous.within = lambda deadline, make, grace_s=0.0: make()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    told: dict[int, Told | BaseException] = {}

    def rank_body(rank: int) -> None:
        own.rank = rank
        try:
            began = time.monotonic()
            find_others(rank, world_size, port)
            seconds = time.monotonic() - began
            counts = [store.counts for store in stores[rank]]
            sent = sum(each["bytes"] for each in counts)
            told[rank] = Told(seconds, sum(each.total() for each in counts) - sent, sent)
        except BaseException as error:
            told[rank] = error

    threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mark("met")
    for rank, each in told.items():
        if isinstance(each, BaseException):
            raise RuntimeError(f"rank {rank}: {each}") from each
    return [told[rank] for rank in ranks]  # type: ignore[misc]


def find_others(rank: int, world_size: int, port: int) -> None:
    place = ProcessEnvironment(rank, rank % PER_HOST, world_size, PER_HOST, "127.0.0.1", port, "torchrun")
    _MET.append(rendezvous.meet("env://", place, TRIAL_S))


_MET: list[rendezvous.Met] = []
"""Kept until the fork exits: rank 0's result owns the store, which others may still read."""


def _place_of(rank: int) -> Address:
    host = rank // PER_HOST
    name = f"node-{host:04}.cluster.example"
    own = interfaces.process()
    return own._replace(
        network=f"4:{host}", address=host_address(host), name=name, interface="eth0", processes=str(host)
    )


def _counting(
    make: Callable[..., Any], own: threading.local, stores: dict[int, list[BytesStore]]
) -> Callable[..., Any]:
    def counting(*args: Any, **named: Any) -> BytesStore:
        store = BytesStore(make(*args, **named))
        store.connections = stores[own.rank]
        store.connections.append(store)
        return store

    return counting


def trial(world_size: int, count: bool, deadline: float) -> list[Told]:
    forks = math.ceil(world_size / (HOSTS_PER_FORK * PER_HOST))
    results = run_ranks(forks, partial(hosts_of_fork, world_size, count), min(deadline, time.monotonic() + TRIAL_S))
    return [each for result in results for each in result.value]


def measure(world_size: int, repetitions: int, deadline: float) -> dict[str, Any]:
    seconds = [max(each.seconds for each in trial(world_size, False, deadline)) for _ in range(repetitions)]
    first, *others = trial(world_size, True, deadline)
    return {
        "ranks": world_size,
        "seconds": [round(each, 3) for each in seconds],
        "operations": {
            "rank 0": first.operations,
            "busiest other": max(each.operations for each in others),
            "all": first.operations + sum(each.operations for each in others),
        },
        "bytes": {
            "rank 0": first.bytes,
            "busiest other": max(each.bytes for each in others),
            "all": first.bytes + sum(each.bytes for each in others),
        },
    }


def print_rows(rows: Sequence[dict[str, Any]], head: bool = False) -> None:
    if head:
        print(f"{'ranks':>6}{'seconds':>9}{'operations':>12}{'':16}{'KiB':>12}")
    for row in rows:
        operations = "".join(f"{each:9}" for each in row["operations"].values())
        sent = "".join(f"{each / 1024:9.0f}" for each in row["bytes"].values())
        print(f"{row['ranks']:6}{median(row['seconds']):9.2f}{operations}{sent}", flush=True)


def growth(rows: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    low, high = rows[len(rows) // 2], rows[-1]
    return math.log(of(high) / of(low)) / math.log(high["ranks"] / low["ranks"])


def picture(rows: Sequence[dict[str, Any]]) -> str:
    seconds = {"all ranks have met": [(row["ranks"], median(row["seconds"])) for row in rows]}
    panels = [Panel("until all ranks have met", seconds, "s", str, "ranks")]
    for kind, title in (("operations", "operations on the store"), ("bytes", "bytes to and from the store")):
        lines = {name: [(row["ranks"], row[kind][name]) for row in rows] for name in rows[0][kind]}
        panels.append(Panel(title, lines, "", str, "ranks"))
    return draw(panels, [name for panel in panels for name in panel.lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="world sizes, multiples of 8")
    parser.add_argument("--repetitions", type=int, default=3, help="repetitions of each timed trial; the median counts")
    parser.add_argument("--deadline-s", type=float, default=1800)
    parser.add_argument("--json", type=Path, help="write raw samples here")
    parser.add_argument("--plot", type=Path, help="write a picture here, as SVG")
    options = parser.parse_args()
    start_afresh()
    if not enter_own_network():
        sys.exit("this needs a network namespace of its own, in which hosts have addresses: root, or user namespaces")
    give_addresses(max(options.ranks) // PER_HOST)
    deadline = time.monotonic() + options.deadline_s
    rows: list[dict[str, Any]] = []
    failure = ""
    for world_size in options.ranks:
        try:
            rows.append(measure(world_size, options.repetitions, deadline))
            print_rows(rows[-1:], len(rows) == 1)
        except TrialFailedError as error:
            failure = f"{world_size} ranks: {error}"
            break
    if len(rows) > 2:
        for kind in ("operations", "bytes"):
            power = growth(rows, lambda row, kind=kind: row[kind]["all"])  # type: ignore[misc]
            print(f"{kind} of all ranks grow by the power {power:.2f} of the number of ranks")
    result = {"benchmark": "meeting_scaling", **circumstances(), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot and rows:
        options.plot.write_text(picture(rows))
    if failure:
        sys.exit(f"failed: {failure}")


if __name__ == "__main__":
    main()
