from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import parallel_state as ps
from tests.contract.attempts import world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 90.0
TOLERANCE = 1e-12
"""For float64 values near 1: ranks add some hundred terms in another order."""
HIDDEN, HEADS, VOCABULARY, TOKENS, BATCH = 16, 4, 12, 5, 8
STEPS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


PLAN = {
    **{f"{layer}.{name}": ColwiseParallel() for layer in ("1", "2") for name in ("q", "k", "v", "up")},
    **{f"{layer}.{name}": RowwiseParallel() for layer in ("1", "2") for name in ("out", "down")},
}


def _transformer(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, HIDDEN), *(Block() for _ in range(blocks)), nn.Linear(HIDDEN, VOCABULARY)]
    return nn.Sequential(*layers).double()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # torch 2.10's pipelining refuses other strides


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _train(model: nn.Module, part: int = 0, parts: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        tokens, target = (half.chunk(parts)[part] for half in _batch(step))
        loss = _loss(model(tokens), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE, msg=lambda text: f"{what}: {text}")


def _sharded(sizes: dict[str, Any], dims: tuple[str, ...], data: str) -> dict[str, Any]:
    with world(sizes.pop("tp", 1), **sizes):
        group, model = ps.get_group(data), _transformer()
        parallelize_module(model, ps.get_device_mesh("tp"), PLAN)
        mesh = ps.get_device_mesh(*dims)
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        losses = _train(model, group.rank_in_group, group.world_size)
        weight = model[1].up.weight
        copies = weight.to_local().numel() * ps.get_world_group().world_size // weight.numel()
        return {
            "losses": losses,
            "weights": {name: value.full_tensor() for name, value in model.state_dict().items()},
            "dims": (weight.device_mesh.mesh_dim_names, copies),
            "groups": all(weight.device_mesh.get_group(n) is ps.get_group(n).device_group for n in (*dims, "tp")),
        }


SHARDED: dict[str, tuple[dict[str, int], tuple[str, ...], str, int]] = {
    "fsdp": ({"tp": 2, "dp_shard": 2}, ("dp_shard",), "dp", 1),
    "hybrid": ({"tp": 2, "dp_replicate": 2, "dp_shard": 2}, ("dp_replicate", "dp_shard"), "dp", 2),
    "hybrid, one copy": ({"tp": 4, "dp_shard": 2}, ("dp_replicate", "dp_shard"), "dp", 1),
    "hybrid, cp": ({"tp": 2, "dp_replicate": 2, "cp": 2}, ("dp_replicate", "fsdp"), "dp_cp", 2),
    "one dim": ({"tp": 2, "dp_replicate": 2, "dp_shard": 2}, ("dp",), "dp", 1),
}
PARTS = ("hybrid", "hybrid, one copy", "one dim")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in PARTS else case for case in SHARDED]
)
def test_fully_shard_with_tensor_parallelism(pools: Pools, case: str) -> None:
    sizes, dims, data, copies = SHARDED[case]
    reference = _transformer()
    losses, weights = _train(reference), reference.state_dict()
    assert max(losses) - min(losses) > 0.01, "the steps must change something"
    found = pools(math.prod(sizes.values())).run(_sharded, sizes, dims, data, timeout_s=DEADLINE_S)
    mean = torch.tensor([facts["losses"] for facts in found], dtype=torch.float64).mean(0)
    _assert_close(mean, torch.tensor(losses, dtype=torch.float64), "losses")
    for facts in found:
        assert facts["dims"] == ((*dims, "tp"), copies)
        assert facts["groups"]
        assert facts["weights"].keys() == weights.keys()
        for name, value in facts["weights"].items():
            _assert_close(value, weights[name], name)


SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def _piped(pp: int, schedule_name: str, microbatches: int) -> dict[str, Any]:
    with world(1, pp):
        group, data, whole = ps.get_pp_group(), ps.get_dp_group(), _transformer(blocks=4)
        cuts = [at * len(whole) // pp for at in range(pp + 1)]
        at = group.rank_in_group
        module = whole[cuts[at] : cuts[at + 1]]
        stage = PipelineStage(module, at, pp, group.device, group=group.device_group)
        schedule = SCHEDULES[schedule_name](stage, microbatches, loss_fn=_loss)
        tokens, target = (half.chunk(data.world_size)[data.rank_in_group] for half in _batch(0))
        losses: list[torch.Tensor] = []
        if at == pp - 1:
            schedule.step(*([tokens] if pp == 1 else []), target=target, losses=losses)
        else:
            schedule.step(*([tokens] if at == 0 else []))
        grads = {}
        for name, parameter in module.named_parameters():
            layer, _, rest = name.partition(".")
            name = f"{cuts[at] + int(layer)}.{rest}" if next(iter(module._modules)) == "0" else name
            grads[name] = data.all_reduce(parameter.grad) / data.world_size
        return {"losses": [loss.item() for loss in losses], "grads": grads}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [4, 2])
def test_pipelining(pools: Pools, pp: int, schedule: str) -> None:
    microbatches = 4
    reference, (tokens, target) = _transformer(blocks=4), _batch(0)
    _loss(reference(tokens), target).backward()
    parts = zip(tokens.chunk(4 // pp), target.chunk(4 // pp), strict=True)
    expected = [
        [
            _loss(reference(x), y).item()
            for x, y in zip(some.chunk(microbatches), wanted.chunk(microbatches), strict=True)
        ]
        for some, wanted in parts
    ]
    found = pools(4).run(_piped, pp, schedule, microbatches, timeout_s=DEADLINE_S)
    seen = set()
    for rank, facts in enumerate(found):
        stage, part = divmod(rank, 4 // pp)
        losses = torch.tensor(facts["losses"], dtype=torch.float64)
        _assert_close(losses, torch.tensor(expected[part] if stage == pp - 1 else [], dtype=torch.float64), "losses")
        seen |= facts["grads"].keys()
        for name, grad in facts["grads"].items():
            _assert_close(grad, reference.get_parameter(name).grad, name)
    assert seen == {name for name, _ in reference.named_parameters()}


def _distributed_tensors() -> dict[str, Any]:
    with world(2):
        mesh, dp, tp = ps.get_device_mesh("dp", "tp"), ps.get_dp_group(), ps.get_tp_group()
        torch.manual_seed(ps.get_rank())  # rank 0's values are distributed
        full = torch.randn(7, 6, dtype=torch.float64)
        x = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
        facts: dict[str, Any] = {"local": x.to_local(), "coordinates": (dp.rank_in_group, tp.rank_in_group)}
        facts["replicated"] = x.redistribute(mesh, [Replicate(), Replicate()]).to_local()
        facts["other way"] = x.redistribute(mesh, [Shard(1), Shard(0)]).to_local()
        part = DTensor.from_local(full * 0 + 10.0**dp.rank_in_group, mesh, [Partial(), Replicate()])
        facts["sum"] = part.full_tensor()
        facts["sum, sharded"] = part.redistribute(mesh, [Shard(0), Replicate()]).to_local()
        up = distribute_tensor(torch.eye(6, 8, dtype=torch.float64), mesh["tp"], [Shard(1)])
        down = distribute_tensor(torch.ones(8, 3, dtype=torch.float64), mesh["tp"], [Shard(0)])
        y = DTensor.from_local(facts["replicated"], mesh["tp"], [Replicate()]) @ up @ down
        facts["matmul"] = (str(y.placements), y.full_tensor())
        return facts


def _shard(x: torch.Tensor, parts: int, at: int, dim: int) -> torch.Tensor:
    """Returns a rank's chunk as DTensor cuts: sizes are rounded up, and the last chunks can be empty."""
    chunks = x.chunk(parts, dim)
    return chunks[at] if at < len(chunks) else x.narrow(dim, 0, 0)


def test_distributed_tensors(pools: Pools) -> None:
    found = pools(8).run(_distributed_tensors, timeout_s=DEADLINE_S)
    full = found[0]["replicated"]
    torch.manual_seed(0)
    assert torch.equal(full, torch.randn(7, 6, dtype=torch.float64))
    for facts in found:
        d, t = facts["coordinates"]
        assert torch.equal(facts["replicated"], full)
        assert torch.equal(facts["local"], _shard(_shard(full, 4, d, 0), 2, t, 1))
        assert torch.equal(facts["other way"], _shard(_shard(full, 4, d, 1), 2, t, 0))
        assert torch.equal(facts["sum"], torch.full((7, 6), 1111.0, dtype=torch.float64))
        assert torch.equal(facts["sum, sharded"], _shard(facts["sum"], 4, d, 0))
        placements, product = facts["matmul"]
        assert placements == "(Partial(sum),)"
        _assert_close(product, full.sum(1, keepdim=True).expand(7, 3), "matmul")
