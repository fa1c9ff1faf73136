"""A rank of tensor- and pipeline-parallel inference is killed at a random time. Steps are compared with one
process. Survivors get a typed error soon, even in groups without the dead rank. 4 seeds, 200 with
FAILURE_TESTS=long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from tests.contract.attempts import environment
from tests.extent import LONG
from tests.failure.random_kills import End, check_ends, kill_one, until_killed
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, LONG_TIMEOUT_S, ROUTES, seeds_on_routes, settings_of

SEEDS = seeds_on_routes(200 if LONG else 4)
LAYERS, HIDDEN, INNER, TOKENS = 4, 32, 64, 6


class Model:
    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(7)
        self.up = torch.randn(LAYERS, HIDDEN, INNER, generator=chance, dtype=torch.float64) / HIDDEN**0.5
        self.down = torch.randn(LAYERS, INNER, HIDDEN, generator=chance, dtype=torch.float64) / INNER**0.5

    def whole(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + torch.relu(x @ up) @ down
        return x

    def stage(self, x: Tensor) -> Tensor:
        tp, pp = ps.get_tp_group(), ps.get_pp_group()
        layers = LAYERS // pp.world_size
        part = slice(tp.rank_in_group * INNER // tp.world_size, (tp.rank_in_group + 1) * INNER // tp.world_size)
        for layer in range(pp.rank_in_group * layers, (pp.rank_in_group + 1) * layers):
            x = x + tp.all_reduce(torch.relu(x @ self.up[layer][:, part]) @ self.down[layer][part])
        return x


class Engine:
    def __init__(self) -> None:
        self.model = Model()
        self.world, self.tp, self.pp = ps.get_world_group(), ps.get_tp_group(), ps.get_pp_group()

    def step(self, number: int) -> None:
        chance = torch.Generator().manual_seed(number)
        asked = torch.randn(TOKENS, HIDDEN, generator=chance, dtype=torch.float64)
        if self.pp.is_first_rank:
            x = self.tp.broadcast_tensor_dict({"x": asked, "number": number} if self.tp.is_first_rank else None)
        else:
            x = self.pp.recv_tensor_dict(all_gather_group=self.tp)
        assert x["number"] == number, f"step {number} got step {x['number']}"
        hidden = self.model.stage(x["x"])
        if not self.pp.is_last_rank:
            self.pp.send_tensor_dict({"x": hidden, "number": number}, all_gather_group=self.tp)
            hidden = self.pp.recv((TOKENS, HIDDEN), torch.float64, self.pp.world_size - 1)
        else:
            self.pp.send(hidden, 0)
        answer = self.world.broadcast(hidden.clone(), 0)
        best = self.world.broadcast_object(int(hidden.sum(dim=1).argmax()) if self.world.rank == 0 else None)
        expected = self.model.whole(asked)
        for found in (hidden, answer):
            # The sums have another order. torch.testing would import modules for 1 s in each rank.
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9), f"step {number}: {found} is not {expected}"
        assert best == int(hidden.sum(dim=1).argmax()), f"step {number} has best {best}"


def _infer(route: str, folder: str) -> tuple[End, float]:
    with environment(**settings_of(route)):
        ps.init_distributed_environment(timeout=LONG_TIMEOUT_S)
        ps.initialize_model_parallel(2, 2)
    try:
        engine = Engine()
        end = until_killed(folder, int(os.environ["RANK"]), lambda number: lambda: engine.step(number))
    finally:
        left = time.monotonic()
        ps.destroy_distributed_environment()
    return end, time.monotonic() - left


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_of_an_inference_is_killed(
    ranks: Ranks, tmp_path: Path, seed: int, record_testsuite_property: Callable[[str, object], None]
) -> None:
    def trial(folder: Path) -> float:
        ranks.begin(_infer, ROUTES[seed % len(ROUTES)], str(folder))
        victim, killed_s = kill_one(ranks, seed, folder)
        return check_ends(ranks, ranks.finish(DEADLINE_S), victim, killed_s)

    found = assert_in_time(trial, tmp_path, before=ranks.kill)
    record_testsuite_property(f"inference, seed {seed}: last told after s", found)
