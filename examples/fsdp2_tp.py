"""Trains with torch's FSDP2 and tensor parallelism over this library's device mesh: 2 × 2 ranks on the CPU.

    python examples/fsdp2_tp.py

It prints the losses of four steps, on four ranks with a quarter of the weights each, and in one process:

    FSDP 2 × TP 2: 2.0720 1.2043 0.6004 0.2613
    one process:   2.0720 1.2043 0.6004 0.2613
    a rank has:    25 % of the weights
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import parallel_state as ps

HIDDEN, BATCH, STEPS = 32, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def train(model: nn.Module, part: int = 0, parts: int = 1) -> Tensor:
    """Trains on one part of each batch. Returns the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(STEPS):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(BATCH, HIDDEN, generator=generator, dtype=torch.float64).chunk(parts)[part]
        target = torch.randn(BATCH, HIDDEN, generator=generator, dtype=torch.float64).chunk(parts)[part]
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def rank() -> tuple[list[float], float]:
    """Returns the losses of the whole batch, and this rank's share of the weights."""
    ps.init_distributed_environment()
    ps.initialize_model_parallel(tensor_model_parallel_size=2, data_parallel_shard_size=2)
    model, data = make(), ps.get_dp_group()
    total = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    tp = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, ps.get_device_mesh("tp"), tp)
    for layer in (*model, model):
        fully_shard(layer, mesh=ps.get_device_mesh("dp_shard"))
    losses = data.all_reduce(train(model, data.rank_in_group, data.world_size)) / data.world_size
    held = sum(weight.to_local().numel() for weight in model.parameters() if weight.dim() == 2)
    return losses.tolist(), held / total


def line(losses: list[float]) -> str:
    return " ".join(f"{loss:.4f}" for loss in losses)


if __name__ == "__main__":
    losses, share = ps.launch(rank, nproc=4)[0]
    print(f"FSDP 2 × TP 2: {line(losses)}")
    print(f"one process:   {line(train(make()).tolist())}")
    print(f"a rank has:    {share:.0%} of the weights".replace("%", " %"))
