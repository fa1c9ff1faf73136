from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import parallel_state as ps
from parallel_state.compat import deepspeed as mpu
from tests.workers import WorkerPool

DEADLINE_S = 60.0
WORDS = sorted(mpu._ASKED)


def _facts(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore(name, agent), rank=rank, world_size=size)
    try:
        if sizes:
            mpu.initialize_model_parallel(**sizes)
        found = {word: getattr(mpu, f"get_{word}_world_size")() for word in WORDS}
        groups = {word: getattr(mpu, f"get_{word}_group", None) for word in WORDS}
        ranks = {word: dist.get_process_group_ranks(get()) for word, get in groups.items() if get is not None}
        assert all(len(ranks[word]) == found[word] for word in ranks)
        for word, each in ranks.items():
            if hasattr(mpu, f"get_{word}_rank"):
                assert each.index(rank) == getattr(mpu, f"get_{word}_rank")()
        assert mpu.get_data_parallel_group_ranks() == ranks["data_parallel"]
        assert mpu.get_tensor_model_parallel_src_rank() == ranks["tensor_model_parallel"][0]
        ps.destroy_distributed_environment()
        return ranks
    finally:
        dist.destroy_process_group()


def test_the_groups_have_deepspeeds_meanings(pools: Callable[[int], WorkerPool]) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    for rank, ranks in enumerate(pools(4).run(_facts, uuid.uuid4().hex, sizes, timeout_s=DEADLINE_S)):
        tp, pp = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert ranks["tensor_model_parallel"] == ranks["slice_parallel"] == tp
        assert ranks["pipeline_model_parallel"] == ranks["pipe_parallel"] == pp
        assert ranks["model_parallel"] == [0, 1, 2, 3]
        assert ranks["data_parallel"] == ranks["sequence_parallel"] == ranks["sequence_data_parallel"] == [rank]


def test_without_sizes_all_ranks_are_data_parallel(pools: Callable[[int], WorkerPool]) -> None:
    for rank, ranks in enumerate(pools(4).run(_facts, uuid.uuid4().hex, {}, timeout_s=DEADLINE_S)):
        assert ranks["data_parallel"] == ranks["sequence_data_parallel"] == [0, 1, 2, 3]
        assert ranks["tensor_model_parallel"] == ranks["model_parallel"] == ranks["pipe_parallel"] == [rank]
