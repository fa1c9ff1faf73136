from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from parallel_state.compat import megatron
from tests.contract.test_c10d import torch_world

CALLS = 1500
MOST_ELEMENTS = 1 << 20
KEPT_MIB = 256
SLOTS_MIB = 64
GROWN_MIB = 24
"""Above the heap's noise, below what a leak of CALLS tensors would add."""


def _resident_mib() -> dict[str, float]:
    found = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssShmem"):
            found[name] = int(value.split()[0]) / 1024
    return found


def _steps(draw: random.Random) -> Iterator[None]:
    tp = ps.get_tp_group()
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "object", "dict", "views", "started", "isend")
    while True:
        kind, count = draw.choice(kinds), draw.choice((1, 1000, 30_000, draw.randrange(2, MOST_ELEMENTS)))
        x = torch.ones(count)
        if kind == "all_reduce":
            tp.all_reduce(x)
        elif kind == "all_gather":
            tp.all_gather(x, 0)
        elif kind == "reduce_scatter":
            tp.reduce_scatter(x.repeat(2), 0)
        elif kind == "object":
            tp.broadcast_object({"a": ["x" * draw.randrange(100)], "x": x})
        elif kind == "started":
            tp.all_reduce_async(x).wait()
        elif kind == "isend":
            handles = [tp.isend(x, 1)] if tp.rank_in_group == 0 else []
            if tp.rank_in_group == 1:
                tp.recv([count], torch.float32, 0)
            for handle in handles:
                handle.wait()
        elif tp.rank_in_group == 0:
            tp.send_tensor_dict({"x": x, "count": count}, 1)
        else:
            tp.recv_tensor_dict(0, views=kind == "views")
        yield


def _soak() -> list[dict[str, float]]:
    steps, found = _steps(random.Random(0)), [_resident_mib()]
    for _ in range(3):
        for _ in range(CALLS // 3):
            next(steps)
        found.append(_resident_mib())
    return found


@pytest.mark.slow
def test_resident_memory_is_bounded(pools: Any) -> None:
    for start, warm, _, end in pools(2).run(_soak, tp=2, timeout_s=120.0):
        assert end["RssAnon"] - warm["RssAnon"] < GROWN_MIB, "memory of the process itself"
        assert end["RssShmem"] - start["RssShmem"] < 2 * KEPT_MIB + SLOTS_MIB, "shared memory"


def _divided_again() -> list[int]:
    with torch_world("gloo") as (rank, size):
        counts = []
        for _ in range(4):
            megatron.initialize_model_parallel(tensor_model_parallel_size=size)
            megatron.destroy_model_parallel()
            dist.barrier()
            counts.append(dist.distributed_c10d._get_default_store().num_keys() if rank == 0 else 0)
            dist.barrier()
        ps.destroy_distributed_environment()
        return counts


def test_dividing_the_world_again_leaves_no_keys(pools: Any) -> None:
    counts = pools(2).run(_divided_again)[0]
    assert counts[0] > 0 and counts[1:] == counts[:1] * 3, counts
