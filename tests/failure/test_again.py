"""Row 31 of docs/failures.md: 14 worlds, 100 with FAILURE_TESTS=long, follow each other in the same
processes, however each of them ends."""

from __future__ import annotations

import gc
import os
from typing import NamedTuple

import pytest
import torch

import parallel_state as ps
from tests.contract.test_rendezvous import held_port
from tests.extent import LONG
from tests.failure.ranks import Ranks

WORLDS, SETTLED = (100, 15) if LONG else (14, 8)
DEADLINE_S = 120.0
MOST_KIB = 8192
"""Half of it is one step, when torch prints its first backtrace. torch also leaks 5 KiB a world."""


class Footprint(NamedTuple):
    descriptors: int
    threads: int
    rss_kib: int
    maps: int


def footprint() -> Footprint:
    gc.collect()
    with open("/proc/self/status", encoding="utf-8") as file:
        status = dict(line.split(":", 1) for line in file)
    with open("/proc/self/maps", encoding="utf-8") as file:
        maps = sum("parallel_state-" in line for line in file)
    return Footprint(len(os.listdir("/proc/self/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0]), maps)


def _worlds(port: int) -> list[Footprint]:
    rank, found = int(os.environ["RANK"]), []
    for number in range(1, WORLDS + 1):
        ps.init_distributed_environment(4, rank, f"tcp://127.0.0.1:{port}", timeout=DEADLINE_S / 4)
        ps.initialize_model_parallel(2, 2)
        assert ps.get_tp_group().all_reduce(torch.ones(1 << 16)).sum().item() == 2 << 16
        assert ps.get_pp_group().all_gather_object(number) == [number] * 2
        ps.destroy_distributed_environment()
        if number in (SETTLED, WORLDS):
            found.append(footprint())
    return found


@pytest.mark.over("shared memory")
def test_row_31_worlds_on_one_port(ranks: Ranks) -> None:
    with held_port() as port:
        for settled, after in ranks.run(_worlds, port, timeout_s=DEADLINE_S + WORLDS):
            assert after.descriptors <= settled.descriptors + 1
            assert after.threads <= settled.threads
            assert after.rss_kib - settled.rss_kib < MOST_KIB
            assert after.maps == 0
