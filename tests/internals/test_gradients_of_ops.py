from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from parallel_state.collectives import ops
from tests.helpers.doors import op_arguments
from tests.unit.test_simulated import RANK, SIZE, G


def test_a_broadcasts_gradient_is_its_sources() -> None:
    """Other ranks' gradient is zero, not None: their backward takes part in the collective."""
    group = ps.simulated_group([1, 3, 5, 7], 5)
    token, key = op_arguments(group)
    grads = [ops._grad_broadcast(G, token, src, key) for src in (RANK, 0)]
    assert torch.equal(grads[0], G * SIZE)
    assert torch.equal(grads[1], torch.zeros_like(G))


def test_uneven_gradients_have_the_splits_of_the_other_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Ops:
        def __getattr__(self, name: str) -> Callable[..., Tensor]:
            return lambda x, token, *args: asked.append((name, *args)) or x  # type: ignore[func-returns-value]

    monkeypatch.setattr(ops, "_OPS", Ops())
    token = torch.zeros(1, dtype=torch.uint8)
    ops._grad_all_to_all(G, token, [1, 2], [3, 4], "tp")
    ops._grad_all_gatherv(G, token, 1, [1, 3], "tp")
    ops._grad_reduce_scatterv(G, token, 1, [1, 3], "sum", "tp")
    assert asked == [
        ("all_to_all", [3, 4], [1, 2], "tp"),
        ("reduce_scatterv", 1, [1, 3], "sum", "tp"),
        ("all_gatherv", 1, [1, 3], "tp"),
    ]
