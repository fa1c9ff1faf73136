"""Program: mini-sglang's embedding, linear layers and head on two CPU ranks. python minisgl_program.py
RESULTS. torch's look-up replaces the CUDA kernel `minisgl.kernel.indexing`, and NVTX ranges do nothing."""

from __future__ import annotations

import os
import socket
import sys
import time
from types import SimpleNamespace
from typing import Any

SIZE, TOKENS = 2, 12
ROUNDS, CALLS = 5, 100


def indexing(torch: Any, weights: Any, indices: Any, vocab_range: tuple[int, int] | None = None) -> Any:
    if vocab_range is None:
        return weights[indices]
    at = indices - vocab_range[0]
    inside = (at >= 0) & (at < vocab_range[1])
    return weights[at.clamp(0, len(weights) - 1)] * inside[:, None].to(weights.dtype)


def rank_of(rank: int, port: int, results: str) -> None:
    import minisgl.kernel
    import torch
    from minisgl.core import Context, set_global_ctx
    from minisgl.distributed import DistributedCommunicator, destroy_distributed, set_tp_info
    from minisgl.layers import (
        LinearColParallelMerged,
        LinearOProj,
        LinearQKVMerged,
        LinearRowParallel,
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    if os.environ.get("OVER") == "ours":
        from parallel_state.compat.minisgl import install

        install()
        from minisgl.distributed import destroy_distributed
    minisgl.kernel.indexing = lambda **given: indexing(torch, **given)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0  # type: ignore[assignment]
    set_tp_info(rank, SIZE)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    random = torch.Generator().manual_seed(rank)
    made = {
        "embedding": VocabParallelEmbedding(96, 32), "qkv": LinearQKVMerged(32, 8, 4, 2, has_bias=True),
        "o": LinearOProj(32, 32, has_bias=False), "up": LinearColParallelMerged(32, [64, 64], has_bias=False),
        "down": LinearRowParallel(64, 32, has_bias=False), "head": ParallelLMHead(96, 32),
    }  # fmt: skip
    for each in made.values():
        for name in ("weight", "bias"):
            values = getattr(each, name, None)
            if values is not None:
                values.copy_(torch.randint(-2, 3, values.shape, generator=random))
    context = Context(1)
    set_global_ctx(context)
    found: dict[str, Any] = {"communicator": type(DistributedCommunicator.plugins[-1]).__name__}
    for prefill, size in ((False, TOKENS), (False, 1), (True, 2)):
        last = SimpleNamespace(get_last_indices=lambda size: torch.arange(size) * 3)
        context._batch = SimpleNamespace(size=size, is_prefill=prefill, attn_metadata=last)
        x = made["embedding"].forward(torch.arange(TOKENS if prefill else size) * 7 % 96)
        q, _, value = made["qkv"].forward(x).clamp(-3, 3).split([16, 8, 8], -1)
        o = made["o"].forward(q * value.repeat(1, 2))
        gate, up = made["up"].forward(o.clamp(-3, 3)).clamp(-3, 3).chunk(2, -1)
        down = made["down"].forward(gate * up)
        found[f"prefill {prefill}, {size}"] = [x, o, down, made["head"].forward(down)]
    y = torch.zeros(16, 4096)
    rounds = []
    for _ in range(ROUNDS):
        torch.distributed.barrier()
        started = time.perf_counter()
        for _ in range(CALLS):
            DistributedCommunicator().all_reduce(y)
        rounds.append((time.perf_counter() - started) / CALLS * 1e6)
    found["us of an all_reduce of 256 KiB"] = min(rounds)
    torch.save(found, f"{results}/{rank}.pt")
    torch.distributed.barrier()
    destroy_distributed()
    torch.distributed.destroy_process_group()


def main(results: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    import minisgl.layers  # noqa: F401

    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_of(rank, port, results)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(child)
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))


if __name__ == "__main__":
    main(sys.argv[1])
