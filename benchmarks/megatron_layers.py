"""Times Megatron-core's tensor-parallel layers over our groups and gloo, with two ranks on the CPU.

    python benchmarks/megatron_layers.py            8 KiB to 1 MiB of activations; needs megatron-core

Measures forward and backward of a column- and a row-parallel linear layer, with and without sequence parallelism, the
embedding's forward, and the layers' collectives alone. Results must be bitwise equal. Times are medians of the slower
rank, in microseconds. The last table has each layer's time without collectives, and the speed-up if collectives cost
nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import parallel_state  # noqa: F401  # registers the backend
from parallel_state.compat import megatron as mpu

HIDDEN = 64
SIZES = (8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="alternating turns of each; the median counts")
    parser.add_argument("--calls", type=int, default=20, help="calls of a turn")
    arguments = parser.parse_args()
    mpu.install()
    # Megatron calls it on the CPU, too.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    import megatron.core  # noqa: F401  # before the ranks are forked

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    child = os.fork()
    rank = 1 if child == 0 else 0
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    try:
        measure(rank, arguments.rounds, arguments.calls)
    finally:
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def measure(rank: int, rounds: int, calls: int) -> None:
    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    ours, gloo = mpu.get_tensor_model_parallel_group(), dist.new_group([0, 1], backend="gloo")
    if rank == 0:
        print(f"{'':38}{'bytes':>9}{'ours µs':>10}{'gloo µs':>10}{'times':>8}", flush=True)
    table: dict[tuple[str, int], dict[str, float]] = {}
    for name, make in WORK.items():
        for size in SIZES:
            work = {"ours": make(size, ours), "gloo": make(size, gloo)}
            answers = {which: run() for which, run in work.items()}
            if any(not torch.equal(a, b) for a, b in zip(answers["ours"], answers["gloo"], strict=True)):
                raise SystemExit(f"{name} of {size} bytes differs")
            found: dict[str, list[float]] = {"ours": [], "gloo": []}
            for at in range(rounds):
                for which in ("ours", "gloo") if at % 2 else ("gloo", "ours"):
                    work[which]()
                    dist.barrier(ours)
                    started = time.perf_counter()
                    for _ in range(calls):
                        work[which]()
                    took = torch.tensor([(time.perf_counter() - started) / calls * 1e6], dtype=torch.float64)
                    dist.all_reduce(took, dist.ReduceOp.MAX, group=ours)
                    found[which].append(float(took))
            medians = table[name, size] = {which: statistics.median(each) for which, each in found.items()}
            if rank == 0:
                ratio = medians["gloo"] / medians["ours"]
                print(f"{name:38}{size:9}{medians['ours']:10.0f}{medians['gloo']:10.0f}{ratio:8.2f}", flush=True)
    for name, collectives in COLLECTIVES_OF.items() if rank == 0 else ():
        for size in SIZES:
            whole, rest = table[name, size], table[name, size]["ours"] - table[collectives, size]["ours"]
            most = f"{whole['gloo'] / rest:.2f}" if rest > 0 else "any"
            print(f"{name}, {size} bytes: {rest:.0f} µs beside the collectives, so at most {most} times", flush=True)
    dist.barrier()
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


def linear_layers(sequence_parallel: bool) -> Callable[[int, Any], Callable[[], list[torch.Tensor]]]:
    def make(size: int, group: Any) -> Callable[[], list[torch.Tensor]]:
        from megatron.core import ModelParallelConfig, tensor_parallel

        config = ModelParallelConfig(
            tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, use_cpu_initialization=True
        )

        def init(weight: torch.Tensor) -> torch.Tensor:
            return torch.nn.init.normal_(weight, std=0.1)

        torch.manual_seed(1)
        options: dict[str, Any] = {"config": config, "init_method": init, "tp_group": group}
        up = tensor_parallel.ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False, bias=False, **options)
        down = tensor_parallel.RowParallelLinear(
            HIDDEN, HIDDEN, bias=False, input_is_parallel=True, skip_bias_add=False, **options
        )
        rows = size // (4 * HIDDEN) // (2 if sequence_parallel else 1)
        x = torch.randn(rows, 1, HIDDEN, requires_grad=True)

        def run() -> list[torch.Tensor]:
            x.grad = None
            y, _ = down(up(x)[0])
            y.backward(y)
            return [y.detach(), x.grad]  # type: ignore[list-item]

        return run

    return make


def regions(size: int, group: Any) -> Callable[[], list[torch.Tensor]]:
    from megatron.core.tensor_parallel import mappings

    torch.manual_seed(2)
    x = torch.randn(size // (4 * HIDDEN) // 2, HIDDEN, requires_grad=True)

    def run() -> list[torch.Tensor]:
        x.grad = None
        whole = mappings.gather_from_sequence_parallel_region(x, group=group)
        y = mappings.reduce_scatter_to_sequence_parallel_region(whole, group=group)
        y.backward(y)
        return [y.detach(), x.grad]  # type: ignore[list-item]

    return run


def all_reduces(size: int, group: Any) -> Callable[[], list[torch.Tensor]]:
    from megatron.core.tensor_parallel import mappings

    torch.manual_seed(2)
    x = torch.randn(size // (4 * HIDDEN), HIDDEN, requires_grad=True)

    def run() -> list[torch.Tensor]:
        x.grad = None
        copied = mappings.copy_to_tensor_model_parallel_region(x, group=group)
        y = mappings.reduce_from_tensor_model_parallel_region(copied, group=group)
        y.backward(y)
        return [y.detach(), x.grad]  # type: ignore[list-item]

    return run


def embedding(size: int, group: Any) -> Callable[[], list[torch.Tensor]]:
    from megatron.core import ModelParallelConfig, tensor_parallel

    config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
    torch.manual_seed(3)
    init: Any = torch.nn.init.normal_
    table = tensor_parallel.VocabParallelEmbedding(1024, HIDDEN, init_method=init, config=config, tp_group=group)
    tokens = torch.randint(1024, (size // (4 * HIDDEN), 1))

    def run() -> list[torch.Tensor]:
        return [table(tokens).detach()]

    return run


WORK = {
    "vocabulary-parallel embedding, forward": embedding,
    "linear layers": linear_layers(False),
    "linear layers, sequence parallel": linear_layers(True),
    "regions of sequence parallelism": regions,
    "all_reduce, forward and backward": all_reduces,
}
COLLECTIVES_OF = {
    "linear layers": "all_reduce, forward and backward",
    "linear layers, sequence parallel": "regions of sequence parallelism",
}

if __name__ == "__main__":
    main()
