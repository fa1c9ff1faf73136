"""Program: SGLang's own calls. python sglang_program.py stock|compat|plugin RESULTS. In `compat` our modules
replace SGLang's of the same names. Empty modules replace sgl_kernel, which has no build for CPUs, and
torchvision, whose wheels need CUDA."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import socket
import statistics
import sys
import time
from types import ModuleType
from typing import Any

SIZE = 4
LAYOUTS = [
    {"tp_size": 4, "moe_ep_size": 2},
    {"tp_size": 4, "attn_dp_size": 2, "moe_ep_size": 4},
    {"tp_size": 4, "attn_cp_size": 2, "moe_dp_size": 2},
    {"tp_size": 2, "pp_size": 2},
]
PLAIN = dict.fromkeys(
    ("tp_size", "pp_size", "attn_dp_size", "attn_cp_size", "attn_dcp_size", "moe_ep_size", "moe_dp_size"), 1
)
ROUNDS, CALLS = 5, 40


class Nothing:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(f"{self.name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name} isn't here")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, *names: str) -> None:
        self.names = {name for name in names if importlib.util.find_spec(name) is None}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = name.partition(".")[0] in self.names
        return importlib.util.spec_from_loader(name, self, is_package=True) if absent else None

    def exec_module(self, module: ModuleType) -> None:
        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Nothing(f"{module.__name__}.{name}")

        module.__getattr__ = get  # type: ignore[method-assign]


def groups_of(parallel: Any) -> dict[str, Any]:
    names = ("tp", "pp", "attn_tp", "attn_cp", "moe_ep", "moe_dp", "moe_tp")
    return {name: getattr(parallel, f"{name}_group") for name in names}


def calls(torch: Any, group: Any, rank: int) -> list[Any]:
    size, at = group.world_size, group.rank_in_group
    random = torch.Generator().manual_seed(rank)
    x = torch.randint(-9, 9, (4 * size, 6), generator=random).to(torch.bfloat16)
    found: list[Any] = [group.ranks, at, group.first_rank, group.last_rank, group.next_rank, group.prev_rank]
    found += [group.is_first_rank, group.is_last_rank]
    found.append(group.all_reduce(x.clone()))
    found += [group.all_gather(x, dim) for dim in (0, 1, -1)]
    into, share, list_ = x.new_empty(4 * size * size, 6), x.new_empty(4, 6), [torch.empty_like(x) for _ in range(size)]
    group.all_gather_into_tensor(into, x)
    group.reduce_scatter_tensor(share, x)
    group.all_gather(x, output_tensor_list=list_)
    exchanged = torch.empty_like(x)
    if size > 1:
        group._all_to_all_single(exchanged, x) if hasattr(group, "_all_to_all_single") else group.all_to_all_single(
            exchanged, x
        )
    else:
        exchanged = x
    found += [into, share, *list_, exchanged, group.reduce_scatter_along_dim(x, 0), group.gather(x, size - 1, 0)]
    found.append(group.reduce_scatter(torch.empty_like(share), list(x.clone().chunk(size))))
    found.append(group.broadcast(x.clone(), size - 1))
    found.append(group.broadcast_object({"from": rank, "tensor": x[:2]}, 0))
    found.append(group.broadcast_object_list([rank, "x"], 0))
    found.append(group.all_gather_object((rank, "object")))
    found.append(group.broadcast_tensor_dict({"x": x, "none": None, "empty": x[:0]} if at == 0 else None))
    if size > 1:
        found.append(group.send_recv_tensor_dict({"x": x, "rank": rank}))
        if at % 2 == 0:
            group.send(x)
            works = group.send_tensor_dict({"x": x, "n": 3}, async_send=True)
            works += group.send_object(["late"], (at + 1) % size, async_send=True, tag=3)
            for work in works:
                work.work.wait()
        else:
            found.append(group.recv(x.size(), x.dtype))
            found.append(group.recv_tensor_dict())
            found.append(group.recv_object((at - 1) % size, tag=3))
    group.barrier()
    return found


def layers(torch: Any, parallel: Any) -> list[Any]:
    from sglang.srt.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    random = torch.Generator().manual_seed(parallel.tp_rank)
    embedding = VocabParallelEmbedding(96, 32)
    up = MergedColumnParallelLinear(32, [64, 64], bias=False)
    down = RowParallelLinear(64, 32, bias=False)
    head = ColumnParallelLinear(32, 96, bias=False, gather_output=True)
    for each in (embedding, up, down, head):
        weight = each.weight.data
        weight.copy_(torch.randint(-2, 3, weight.shape, generator=random).to(weight.dtype))
    with torch.no_grad():
        x = embedding(torch.arange(0, 96, 7))
        gate, value = up(x)[0].clamp(-3, 3).chunk(2, -1)
        return [x, y := down(gate * value)[0], head(y.clamp(-5, 5))[0]]


def timed(torch: Any, group: Any) -> dict[str, float]:
    found = {}
    for kib in (8, 64, 1024):
        x = torch.zeros(kib * 512, dtype=torch.bfloat16)
        group.all_reduce(x)
        rounds = []
        for _ in range(ROUNDS):
            group.barrier()
            started = time.perf_counter()
            for _ in range(CALLS):
                group.all_reduce(x)
            rounds.append((time.perf_counter() - started) / CALLS)
        found[f"all_reduce of {kib} KiB"] = min(rounds) * 1e6
        found[f"all_reduce of {kib} KiB, median"] = statistics.median(rounds) * 1e6
    return found


def rank_of(mode: str, rank: int, port: int, results: str) -> None:
    import torch
    from sglang.srt.distributed import parallel_state as ps
    from sglang.srt.runtime_context import get_parallel

    torch.manual_seed(0)
    if mode == "plugin":
        from sglang.srt.plugins import load_plugins

        load_plugins()
    backend = ps.get_default_distributed_backend("cpu")
    ps.init_distributed_environment(SIZE, rank, f"tcp://127.0.0.1:{port}", rank, backend)
    found: dict[str, Any] = {"backend": str(torch.distributed.get_backend(ps.get_world_group().device_group))}
    for number, sizes in enumerate(LAYOUTS):
        parallel = get_parallel()
        widths = {**PLAIN, **sizes}
        inside = widths["tp_size"] // widths["attn_dp_size"] // widths["attn_cp_size"]
        moe_tp = widths["tp_size"] // widths["moe_ep_size"] // widths["moe_dp_size"]
        tp_rank, pp_rank = rank % widths["tp_size"], rank // widths["tp_size"]
        parallel.override_permanently(
            **widths, attn_tp_size=inside, moe_tp_size=moe_tp, shared_experts_tp_size=None, dcp_size=1,
            dcp_enabled=False, enable_cp_tp_group_sharing=False,
            tp_rank=tp_rank, pp_rank=pp_rank, world_group=ps.get_world_group(), attn_tp_rank=tp_rank % inside,
        )  # fmt: skip
        ps.initialize_model_parallel()
        for name, group in groups_of(parallel).items():
            found[f"{number} {name}"] = calls(torch, group, rank)
        found[f"{number} layers"] = layers(torch, parallel)
        if number == 0:
            found["times"] = timed(torch, parallel.tp_group)
        ps.get_world_group().barrier()
        world = ps.get_world_group()
        ps.destroy_model_parallel()
        get_parallel().override_permanently(world_group=world)
    torch.save(found, f"{results}/{mode}-{rank}.pt")
    ps.destroy_distributed_environment()


def main(mode: str, results: str) -> None:
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGLANG_PLUGINS="parallel_state")
    if mode == "plugin":
        os.environ["PARALLEL_STATE_PLUGIN"] = "sglang"
    import transformers.models.auto.processing_auto  # noqa: F401
    from transformers.utils import is_torchvision_available

    assert not is_torchvision_available()  # SGLang caches the answer, which the module below would change
    sys.meta_path.append(Absent("sgl_kernel", "torchvision"))
    if mode == "compat":
        from parallel_state.compat.sglang import install

        install()
    import sglang.srt.distributed.parallel_state
    import sglang.srt.layers.linear
    import sglang.srt.layers.vocab_parallel_embedding
    import sglang.srt.server_args  # noqa: F401

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_of(mode, rank, port, results)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main(*sys.argv[1:])
