"""Random programs on three hosts while ranks are stopped and links fail for a while: every result is right.
Small kernel buffers let most messages arrive in parts. Each pause ends before the heartbeat limit. One
seed, 40 with FAILURE_TESTS=long."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators.c10d import creation
from tests.extent import LONG
from tests.failure.over_torch import OverTorch, torch_world
from tests.hosts import Hosts, problem

pytestmark = pytest.mark.over("hosts")
PLACEMENT = (0, 0, 1, 1, 2, 2)
SIZE = len(PLACEMENT)
COUNTS = (1, 7, 300, 2_048, 20_000, 90_000)
DTYPES = (torch.float32, torch.int64, torch.bfloat16)
EARLY_BYTES = ("0", "20000", "")
SMALL_BUFFERS = "net.ipv4.tcp_wmem='4096 4096 4096' net.ipv4.tcp_rmem='4096 8192 8192'"
CALLS = 80 if LONG else 25
LONGEST_PAUSE_S = 0.6
PROGRAM_S = 100.0


def _of_rank(rank: int, number: int, count: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(count) + 3 * rank + number) % 16).to(dtype)


class Program:
    def __init__(self, group: ps.GroupCoordinator | OverTorch, seed: int) -> None:
        self.group: Any = group
        self.rank = group.rank_in_group
        self.draw = random.Random(seed)
        self.number = 0
        self.started: list[tuple[Callable[[], Any], Tensor | None]] = []

    def run(self) -> None:
        kinds = [
            self.reduction, self.gathering, self.scattering, self.exchange, self.rooted, self.started_reduction,
            self.ring, self.object_to_all,
        ]  # fmt: skip
        if isinstance(self.group, ps.GroupCoordinator):
            kinds += [self.message_ring, self.dict_to_all, self.pairs]
        for self.number in range(CALLS):
            self.draw.choice(kinds)()
            if self.draw.random() < 0.3:
                self.end_started()
        self.end_started()

    def drawn(self) -> tuple[list[Tensor], Tensor]:
        count, dtype = self.draw.choice(COUNTS), self.draw.choice(DTYPES)
        each = [_of_rank(rank, self.number, count, dtype) for rank in range(SIZE)]
        return each, each[self.rank]

    def drawn_rows(self) -> tuple[list[Tensor], Tensor]:
        count, dtype = self.draw.choice(COUNTS), self.draw.choice(DTYPES)
        each = [_of_rank(rank, self.number, count * SIZE, dtype) for rank in range(SIZE)]
        return each, each[self.rank]

    def check(self, found: Tensor | None, expected: Tensor | None, call: str) -> None:
        if found is None or expected is None:
            assert found is expected, (self.number, call)
        else:
            assert torch.equal(found, expected), (self.number, call, found, expected)

    def reduction(self) -> None:
        each, mine = self.drawn()
        op = self.draw.choice(("sum", "max"))
        expected = torch.stack(each).sum(0).to(mine.dtype) if op == "sum" else torch.stack(each).amax(0)
        self.check(self.group.all_reduce(mine, op), expected, "all_reduce")

    def gathering(self) -> None:
        each, mine = self.drawn()
        self.check(self.group.all_gather(mine), torch.cat(each), "all_gather")
        sizes = [self.draw.randrange(len(mine) + 1) for _ in range(SIZE)]
        parts = [x[:size] for x, size in zip(each, sizes, strict=True)]
        self.check(self.group.all_gatherv(parts[self.rank], 0, sizes), torch.cat(parts), "all_gatherv")

    def scattering(self) -> None:
        each, mine = self.drawn_rows()
        expected = torch.stack(each).sum(0).to(mine.dtype).chunk(SIZE)[self.rank]
        self.check(self.group.reduce_scatter(mine), expected, "reduce_scatter")

    def exchange(self) -> None:
        each, mine = self.drawn_rows()
        self.check(self.group.all_to_all(mine), torch.cat([x.chunk(SIZE)[self.rank] for x in each]), "all_to_all")

    def rooted(self) -> None:
        root, kind = self.draw.randrange(SIZE), self.draw.choice(("broadcast", "gather", "scatter"))
        each, mine = self.drawn_rows()
        if kind == "broadcast":
            self.check(self.group.broadcast(mine.clone(), root), each[root], kind)
        elif kind == "gather":
            found = self.group.gather(mine, root)
            self.check(found, torch.cat(each) if self.rank == root else None, kind)
        else:
            part = each[root].chunk(SIZE)[self.rank]
            given = mine if self.rank == root else None
            self.check(self.group.scatter(given, root, size=part.shape, dtype=part.dtype), part, kind)

    def started_reduction(self) -> None:
        each, mine = self.drawn()
        handle = self.group.all_reduce_async(mine)
        self.started.append((handle.wait, torch.stack(each).sum(0).to(mine.dtype)))

    def end_started(self) -> None:
        self.draw.shuffle(self.started)
        for wait, expected in self.started:
            found = wait()
            if expected is not None:
                self.check(found, expected, "a started call")
        self.started.clear()

    def ring(self) -> None:
        each, mine = self.drawn()
        step = self.draw.randrange(1, SIZE)
        dst, src = (self.rank + step) % SIZE, (self.rank - step) % SIZE
        if self.draw.random() < 0.5:
            self.started.append((self.group.isend(mine, dst).wait, None))
            self.check(self.group.recv(mine.shape, mine.dtype, src), each[src], "recv")
        else:
            receiving = self.group.irecv(mine.shape, mine.dtype, src)
            self.group.send(mine, dst)
            self.started.append((receiving.wait, each[src]))

    def message_ring(self) -> None:
        each, mine = self.drawn()
        step = self.draw.randrange(1, SIZE)
        dst, src = (self.rank + step) % SIZE, (self.rank - step) % SIZE
        sent = {"x": mine, "n": [self.number, "text" * self.draw.randrange(40)], "few": mine[:5].clone()}
        sending = self.group.isend_tensor_dict(sent, dst)
        found = self.group.recv_tensor_dict(src)
        self.check(found["x"], each[src], "recv_tensor_dict")
        self.check(found["few"], each[src][:5], "recv_tensor_dict")
        assert found["n"] == sent["n"]
        self.started.append((sending.wait, None))

    def object_to_all(self) -> None:
        root = self.draw.randrange(SIZE)
        sent = {"n": self.number, "root": root, "data": b"x" * self.draw.choice((0, 10, 5_000, 100_000))}
        assert self.group.broadcast_object(sent if self.rank == root else None, root) == sent

    def dict_to_all(self) -> None:
        root = self.draw.randrange(SIZE)
        each, mine = self.drawn()
        found = self.group.broadcast_tensor_dict({"x": mine, "n": root} if self.rank == root else None, root)
        assert found is not None
        self.check(found["x"], each[root], "broadcast_tensor_dict")
        assert found["n"] == root

    def pairs(self) -> None:
        each, mine = self.drawn()
        partner = (SIZE - 1 - self.rank) % SIZE
        out = torch.empty_like(mine)
        for handle in self.group.batch_isend_irecv([("isend", mine, partner), ("irecv", out, partner)]):
            handle.wait()
        self.check(out, each[partner], "batch_isend_irecv")


def _run(seed: int, folder: str, over_torch: bool) -> int:
    if not over_torch:
        ps.init_distributed_environment()
        found = _run_on(ps.get_world_group(), seed, folder)
        ps.destroy_distributed_environment()
        return found
    with torch_world() as group:
        return _run_on(group, seed, folder)


def _run_on(group: ps.GroupCoordinator | OverTorch, seed: int, folder: str) -> int:
    program = Program(group, seed)
    Path(folder, f"pid-{program.rank}").write_text(str(os.getpid()), encoding="utf-8")
    program.run()
    # A rank that leaves while its link is down may be reported before its last bytes arrive.
    Path(folder, f"ended-{program.rank}").touch()
    while len(list(Path(folder).glob("ended-*"))) < SIZE:
        time.sleep(0.01)
    return program.number + 1


class Disturbance(threading.Thread):
    def __init__(self, hosts: Hosts, seed: int, folder: Path) -> None:
        super().__init__(name="disturbance")
        self.is_over = threading.Event()
        self.count = 0
        self._hosts = hosts
        self._draw = random.Random(seed + 1)
        self._folder = folder

    def __enter__(self) -> Disturbance:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self.join()

    def run(self) -> None:
        pids: list[str] = []
        while len(pids) < SIZE and not self.is_over.wait(0.002):
            texts = [path.read_text(encoding="utf-8") for path in self._folder.glob("pid-*")]
            pids = [text for text in texts if text]
        while not self.is_over.wait(self._draw.uniform(0.0, 0.1)):
            pause_s = self._draw.uniform(0.02, LONGEST_PAUSE_S)
            if self._draw.random() < 0.5:
                pid = int(self._draw.choice(pids))
                os.kill(pid, signal.SIGSTOP)
                self.is_over.wait(pause_s)
                os.kill(pid, signal.SIGCONT)
            else:
                host = self._draw.randrange(len(set(PLACEMENT)))
                self._hosts.link(host, up=False)
                self.is_over.wait(pause_s)
                self._hosts.link(host, up=True)
            self.count += 1


@pytest.mark.parametrize("door", ["coordinator", "torch.distributed"])
@pytest.mark.parametrize("seed", range(40 if LONG else 1))
def test_every_result_is_right_while_ranks_stop_and_links_fail(tmp_path: Path, seed: int, door: str) -> None:
    creation.load()
    if problem() is not None:
        pytest.skip(f"no hosts can be made here: {problem()}")
    early_bytes = EARLY_BYTES[seed % 3]
    early = {"PARALLEL_STATE_EARLY_BYTES": early_bytes} if early_bytes else {}
    with Hosts(len(set(PLACEMENT))) as hosts:
        for host in range(len(set(PLACEMENT))):
            hosts.run_on(host, f"sysctl -qw {SMALL_BUFFERS}")
        with hosts.ranks(PLACEMENT, **early) as ranks, Disturbance(hosts, seed, tmp_path) as disturbance:
            assert ranks.run(_run, seed, str(tmp_path), door != "coordinator", timeout_s=PROGRAM_S) == [CALLS] * SIZE
    assert disturbance.count > 0
