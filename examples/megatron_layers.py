"""Trains two tensor-parallel layers of Megatron-core on two CPU processes, over this library's groups.

    pip install parallel-state megatron-core
    python examples/megatron_layers.py

It prints within a minute (`…` are digits):

    groups: parallel_state, ranks [0, 1]
    loss 0: …
    loss 50: 0.…

Only the first two lines of `main` differ from a program that uses Megatron's own parallel state.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel_state import launch
from parallel_state.compat import megatron as mpu


def main(steps: int = 51) -> list[float]:
    mpu.install()  # before the import of Megatron, whose modules then use our groups
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # for its global memory buffer
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    if dist.get_rank() == 0:
        print(f"groups: {dist.get_backend(group)}, ranks {dist.get_process_group_ranks(group)}", flush=True)

    torch.manual_seed(0)
    config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
    options = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": True, "skip_bias_add": False}
    up = tensor_parallel.ColumnParallelLinear(8, 64, gather_output=False, **options)
    down = tensor_parallel.RowParallelLinear(64, 8, input_is_parallel=True, **options)
    optimizer = torch.optim.Adam([*up.parameters(), *down.parameters()], lr=0.01)
    x = torch.randn(16, 8)
    losses = []
    for step in range(steps):
        hidden, _ = up(x)
        y, _ = down(torch.relu(hidden))
        loss = torch.nn.functional.mse_loss(y, x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"loss {step}: {loss.item():.4f}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    first, second = launch(main, nproc=2)
    if first != second:
        raise SystemExit("the ranks of one group have different losses")
