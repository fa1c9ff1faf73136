from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import parallel_state as ps
from device_communicators.peer.memory import NotSharedError, run_on_all_ranks, share
from tests.contract.carriers import twin_of
from tests.helpers.peer_stand_in import FOLDER, FileWay
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]


def _context() -> Any:
    return twin_of(ps.get_tp_group()).context


def _share_body(folder: str) -> tuple[str, list[int], int]:
    os.environ[FOLDER] = folder
    context, way = _context(), FileWay()
    memory = share(context, 1 << 16, [way])
    for address in memory.addresses:
        ctypes.c_uint64.from_address(address + 8 * context.rank).value = 100 + context.rank
    run_on_all_ranks(context, "test", lambda: None)
    found = [ctypes.c_uint64.from_address(memory.addresses[context.rank] + 8 * r).value for r in range(context.size)]
    run_on_all_ranks(context, "test", lambda: None)
    memory.close()
    memory.close()
    return str(memory), found, way.closed


def test_all_ranks_map_all_regions(pools: Pools, tmp_path: Path) -> None:
    for text, found, closed in pools(4).run(_share_body, str(tmp_path), tp=4):
        assert text == "0.0625 MiB a rank by files"
        assert found == [100, 101, 102, 103]
        assert closed == 1
    assert list(tmp_path.iterdir()) == []


def _fails_body(folder: str, step: str) -> tuple[str, str, list[int]]:
    os.environ[FOLDER] = folder
    context = _context()
    first, second = FileWay("first", step if context.rank == 2 else None), FileWay("second")
    memory = share(context, 4096, [first, second])
    memory.close()
    try:
        share(context, 4096, [FileWay("one", step if context.rank == 1 else None), FileWay("two", "map")])
    except NotSharedError as error:
        return memory.how, str(error), [first.closed, second.closed]
    return memory.how, "nothing", []


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("allocate", "out of memory, says the stand-in"),
        ("offer", "OSError: can't be offered"),
        ("map", "can't be mapped"),
    ],
)
def test_what_fails_on_one_rank_sends_all_on_to_the_next_way(
    pools: Pools, tmp_path: Path, step: str, reason: str
) -> None:
    for rank, (how, told, closed) in enumerate(pools(4).run(_fails_body, str(tmp_path), step, tp=4)):
        assert how == "second"
        assert told == f"one: rank 1: {reason}; two: rank 0: can't be mapped"
        assert closed == [0 if step == "allocate" and rank == 2 else 1, 1]
    assert list(tmp_path.iterdir()) == []


def test_no_way_is_a_reason_too() -> None:
    with pytest.raises(NotSharedError, match="no way to share"):
        share(None, 1, [])  # type: ignore[arg-type]
