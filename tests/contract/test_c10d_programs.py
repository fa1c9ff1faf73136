"""Programs that know only torch.distributed run over our backend and over gloo, from the same seeds. Two ranks'
results are equal bit for bit; four ranks add in another order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp, pipelining
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import parallel_state as ps
from tests.contract.test_c10d import torch_world
from tests.extent import LONG
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 180.0
STEPS = 3
HIDDEN, CLASSES, BATCH = 16, 4, 6


def run_over(backend: str, program: Callable[..., Any], *args: Any) -> Any:
    with torch_world(backend) as (rank, size):
        assert dist.get_backend() == backend
        torch.manual_seed(rank)
        return program(rank, size, *args)


def _leaves(found: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(found, Mapping):
        for name, each in found.items():
            yield from _leaves(each, f"{path}.{name}")
    elif isinstance(found, (list, tuple)):
        for at, each in enumerate(found):
            yield from _leaves(each, f"{path}[{at}]")
    else:
        yield path, found


def compare(program: Callable[..., Any], *args: Any) -> int:
    expected, found = (list(_leaves(run_over(backend, program, *args), "")) for backend in ("gloo", "parallel_state"))
    assert expected, "the program returned nothing"
    tolerances = {} if int(os.environ["WORLD_SIZE"]) > 2 else {"rtol": 0, "atol": 0}
    for (name, reference), (other, mine) in zip(expected, found, strict=True):
        assert name == other
        if isinstance(reference, Tensor):
            torch.testing.assert_close(mine, reference, **tolerances, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[arg-type,misc]
        else:
            assert mine == reference, name
    return len(found)


class Model(nn.Module):
    seen: Tensor

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(8, 64), nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.norm = nn.LayerNorm(64)
        self.register_buffer("seen", torch.zeros(8))
        self.branch = nn.Linear(HIDDEN, HIDDEN) if branch else None

    def forward(self, x: Tensor, takes_branch: bool = False) -> Tensor:
        self.seen += x.detach().mean(0)
        x = torch.relu(self.middle(torch.relu(self.norm(self.up(x)))))
        if self.branch is not None and takes_branch:
            x = self.branch(x)
        out: Tensor = self.down(x)
        return out


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 8, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def _loss(model: nn.Module, step: int, rank: int, **options: Any) -> Tensor:
    x, y = _batch(step, rank)
    return nn.functional.cross_entropy(model(x, **options).float(), y)


def _full(value: Tensor) -> Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value.to_dense() if value.is_sparse else value
    return whole.detach().clone()


def _facts(model: nn.Module, losses: Sequence[Tensor]) -> dict[str, Any]:
    assert len({loss.item() for loss in losses}) == len(losses), "the steps must change something"
    gradients = {name: _full(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    return {
        "losses": [loss.detach().clone() for loss in losses],
        "gradients": gradients,
        "state": {name: _full(value) for name, value in model.state_dict().items() if isinstance(value, Tensor)},
    }


def _train(
    model: nn.Module,
    rank: int,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = STEPS,
    options: Callable[[int], dict[str, Any]] = lambda step: {},
) -> dict[str, Any]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = _loss(model, step, rank, **options(step))
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return _facts(model, losses)


def _count_buckets(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and these are text
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0].div_(dist.get_world_size()))


def ddp_with_buckets(rank: int, size: int) -> Any:
    found = {}
    for view in (False, True):
        model = DistributedDataParallel(Model(), bucket_cap_mb=0.001, gradient_as_bucket_view=view)  # type: ignore[arg-type]
        indices: list[int] = []
        found[f"view {view}"] = _train(model, rank)
        model = DistributedDataParallel(Model(), bucket_cap_mb=0.001)  # type: ignore[arg-type]
        model.register_comm_hook(indices, _count_buckets)
        found[f"hook {view}"] = _train(model, rank)
        assert max(indices) >= 1, "there must be several buckets"
    return found


def ddp_with_no_sync(rank: int, size: int) -> Any:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, apart = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            with model.no_sync() if part < 2 else nullcontext():
                loss = _loss(model, 10 * step + part, rank)
                loss.backward()
            if part == 1:
                apart.append(model.module.down.weight.grad.clone())
        optimizer.step()
        losses.append(loss)
    assert apart[0].abs().sum() > 0
    return {"apart": apart, **_facts(model, losses)}


def ddp_with_unused_parameters(rank: int, size: int) -> Any:
    found = {}
    model = DistributedDataParallel(Model(branch=True), find_unused_parameters=True, bucket_cap_mb=0.001)  # type: ignore[arg-type]
    found["some"] = _train(model, rank, steps=4, options=lambda step: {"takes_branch": step % 2 == rank % 2})
    model = DistributedDataParallel(Model(branch=True), find_unused_parameters=True)
    found["none"] = _train(model, rank)
    model = DistributedDataParallel(Model(branch=True), static_graph=True)
    found["static"] = _train(model, rank)
    return found


def ddp_with_join(rank: int, size: int) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Model(), bucket_cap_mb=0.001)  # type: ignore[arg-type]
    with model.join():
        found = {"model": _train(model, rank, steps=2 + 2 * rank)}
    model = DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        found["and optimizer"] = _train(model, rank, optimizer, steps=2 + 2 * rank)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = optimizer.state_dict()["state"]
        found["optimizer"] = {str(name): value["exp_avg"] for name, value in state.items()}
    model = DistributedDataParallel(Model())
    with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
        _train(model, rank, steps=2 + rank)
    return found


def ddp_with_hooks(rank: int, size: int) -> Any:
    """PowerSGD's callbacks call the group and wait in it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    own, _ = dist.new_subgroups(1)
    hooks: dict[str, tuple[Any, Any]] = {
        "all_reduce": (None, default_hooks.allreduce_hook),
        "float16": (None, default_hooks.fp16_compress_hook),
        "local SGD": (PostLocalSGDState(None, own, start_localSGD_iter=2), post_localSGD_hook),
    }
    for kept in (1, 2):
        hooks[f"PowerSGD {kept}"] = PowerSGDState(None, kept, start_powerSGD_iter=2), powerSGD_hook
    power = PowerSGDState(None, start_powerSGD_iter=2)
    hooks["float16, PowerSGD"] = power, default_hooks.fp16_compress_wrapper(powerSGD_hook)  # type: ignore[arg-type]
    found = {}
    for name, (state, hook) in hooks.items():
        # With several buckets, PowerSGD's callbacks would call in different orders on the ranks.
        is_power = isinstance(state, PowerSGDState)
        model = DistributedDataParallel(Model(), bucket_cap_mb=25 if is_power else 0.001)  # type: ignore[arg-type]
        model.register_comm_hook(state, hook)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if name == "local SGD":
            optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=2, warmup_steps=2))
        found[name] = _train(model, rank, optimizer, steps=4)
        assert not is_power or 0 < state.total_numel_after_compression < state.total_numel_before_compression
    return found


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.down = nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.table(x.abs().mul(5).long()))
        return out


def ddp_with_sparse_gradients(rank: int, size: int) -> Any:
    model = DistributedDataParallel(Table())
    return _train(model, rank, torch.optim.SGD(model.parameters(), lr=0.1))


def _named(value: Any) -> str:
    return str(getattr(value, "__name__", value))


DDP = (
    ddp_with_buckets, ddp_with_hooks, ddp_with_no_sync, ddp_with_unused_parameters, ddp_with_join,
    ddp_with_sparse_gradients,
)  # fmt: skip


@pytest.mark.parametrize(("program", "size"), [*((each, 2) for each in DDP), (ddp_with_buckets, 4)], ids=_named)
def test_distributed_data_parallel(pools: Pools, program: Callable[..., Any], size: int) -> None:
    pools(size).run(compare, program, timeout_s=DEADLINE_S)


def fsdp1(rank: int, size: int) -> Any:
    cpu = torch.device("cpu")
    common: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "device_id": cpu}
    cases: dict[str, dict[str, Any]] = {
        "full": {"forward_prefetch": True, "use_orig_params": True},
        "prefetch after": {"backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_POST},
        "gradients": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        "not": {"sharding_strategy": ShardingStrategy.NO_SHARD},
        "bfloat16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)},
        "float16": {"mixed_precision": MixedPrecision(torch.float16, torch.float16, torch.float32)},
    }
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        cases = {
            "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh},
            "hybrid, gradients": {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "device_mesh": mesh},
        }
    found = {}
    for name, options in cases.items():
        torch.manual_seed(0)
        model = FullyShardedDataParallel(Model(), **common, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses, norms = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            with model.no_sync():
                _loss(model, step + 100, rank).backward()
            loss = _loss(model, step, rank)
            loss.backward()
            norms.append(model.clip_grad_norm_(0.5))
            optimizer.step()
            losses.append(loss.detach())
        with FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT):
            state = {key: value.clone() for key, value in model.state_dict().items()}
            moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        found[name] = {
            "losses": losses,
            "norms": norms,
            "state": state,
            "moments": {key: value["momentum_buffer"] for key, value in moments.items()},
        }
        with FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT):
            again = model.state_dict()
            model.load_state_dict(again)
        found[name]["loss of the loaded"] = _loss(model, 0, rank).detach()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp1(pools: Pools, size: int) -> None:
    pools(size).run(compare, fsdp1, timeout_s=DEADLINE_S)


def fsdp2(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "not resharded": {"reshard_after_forward": False},
        "bfloat16": {"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "float16": {"mp_policy": fsdp.MixedPrecisionPolicy(torch.float16, torch.float16)},
        "offload": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
    }
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        cases = {"hybrid": {}, "hybrid, bfloat16": cases["bfloat16"]}
    found = {}
    for name, options in cases.items():
        torch.manual_seed(0)
        model = Model()
        layers = [model.up, model.middle, model.down]
        for layer in (*layers, model):
            fully_shard(layer, mesh=mesh, **options)
        for before, after in pairwise(layers):
            before.set_modules_to_forward_prefetch([after])  # type: ignore[operator]
            after.set_modules_to_backward_prefetch([before])  # type: ignore[operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses, norms = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
            _loss(model, step + 100, rank).backward()
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
            model.unshard(async_op=True)  # type: ignore[operator]
            loss = _loss(model, step, rank)
            loss.backward()
            norms.append(_full(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            losses.append(loss)
        found[name] = {"norms": norms, **_facts(model, losses)}
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp2(pools: Pools, size: int) -> None:
    pools(size).run(compare, fsdp2, timeout_s=DEADLINE_S)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


VOCABULARY, TOKENS = 12, 8


def _transformer(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, HIDDEN), *(Block() for _ in range(blocks)), nn.LayerNorm(HIDDEN)]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, VOCABULARY))


def _tokens(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _language_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tensor_parallel(rank: int, size: int) -> Any:
    grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    rows = {name: RowwiseParallel() for name in ("out", "down")}
    into_sequence = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "down")}
    sequence: dict[str, Any] = {
        **columns, **into_sequence,
        "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        **{name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v")},
    }  # fmt: skip
    found = {}
    for case in ("tensor", "sequence") if size == 2 or LONG else ("sequence",):
        model = _transformer()
        in_sequence = case == "sequence"
        for block in model[1:3]:
            parallelize_module(block, grid["tp"], sequence if in_sequence else {**columns, **rows})
        if in_sequence:
            embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
            head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(model, grid["tp"], {"0": embedding, "3": SequenceParallel(), "4": head})
            into = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
            parallelize_module(model, grid["tp"], into)
        if size == 4:
            for layer in (*model, model):
                fully_shard(layer, mesh=grid["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            tokens, target = _tokens(step + 10 * grid.get_local_rank("dp"))
            with loss_parallel() if in_sequence else nullcontext():
                loss = _language_loss(model(tokens), target)
                loss.backward()
            optimizer.step()
            losses.append(_full(loss))
        found[case] = _facts(model, losses)
    return found


def distributed_tensors(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    places = {"0": Shard(0), "1": Shard(1), "copies": Replicate(), "sum": Partial(), "avg": Partial("avg"),
              "max": Partial("max")}  # fmt: skip
    found: dict[str, Any] = {}
    local = {name: torch.rand(7, 5) for name in ("sum", "avg", "max")}
    for name, source in places.items():
        if name in local:
            x = DTensor.from_local(local[name], mesh, [source])
        else:
            x = distribute_tensor(torch.rand(7, 5), mesh, [source])
        for other, target in places.items():
            if other not in local or name == other:
                found[f"{name} into {other}"] = x.redistribute(mesh, [target]).to_local()
    up = distribute_tensor(torch.rand(6, 8), mesh, [Shard(1)]).requires_grad_()
    down = distribute_tensor(torch.rand(8, 3), mesh, [Shard(0)]).requires_grad_()
    product = torch.rand(4, 6)
    product = distribute_tensor(product, mesh, [Replicate()]) @ up @ down
    product.full_tensor().square().sum().backward()
    assert up.grad is not None
    assert down.grad is not None
    found["product"] = [product.full_tensor(), up.grad.full_tensor(), down.grad.full_tensor()]
    found["softmax"] = up.softmax(1).full_tensor()
    asynchronous = up.redistribute(mesh, [Replicate()], async_op=True)
    found["async"] = asynchronous.to_local() + 1
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("program", [tensor_parallel, distributed_tensors], ids=lambda program: program.__name__)
def test_dtensor(pools: Pools, program: Callable[..., Any], size: int) -> None:
    pools(size).run(compare, program, timeout_s=DEADLINE_S)


SCHEDULES = {
    pipelining.ScheduleGPipe: 1,
    pipelining.Schedule1F1B: 1,
    pipelining.ScheduleLoopedBFS: 2,
    pipelining.ScheduleInterleaved1F1B: 2,
    pipelining.ScheduleInterleavedZeroBubble: 2,
}


def pipelines(rank: int, size: int) -> Any:
    cpu, microbatches = torch.device("cpu"), 4
    found = {}
    for kind, each in SCHEDULES.items():
        whole = _transformer(blocks=max(1, size * each - 3))
        cuts = [at * len(whole) // (size * each) for at in range(size * each + 1)]
        mine = range(rank, size * each, size)
        stages = [PipelineStage(whole[cuts[at] : cuts[at + 1]], at, size * each, cpu) for at in mine]
        schedule: Any = kind(stages[0] if each == 1 else stages, microbatches, loss_fn=_language_loss)  # type: ignore[abstract,arg-type]
        losses: list[Tensor] = []
        for step in range(2):
            tokens, target = _tokens(step)
            last = {"target": target, "losses": losses} if rank == size - 1 else {}
            schedule.step(*([tokens] if rank == 0 else []), **last)
        gradients = [{name: each.grad for name, each in stage.submod.named_parameters()} for stage in stages]
        assert (rank == size - 1) == bool(losses)
        found[kind.__name__] = {"losses": [loss.detach() for loss in losses], "gradients": gradients}
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_pipelining(pools: Pools, size: int) -> None:
    pools(size).run(compare, pipelines, timeout_s=DEADLINE_S)


def checkpoints(rank: int, size: int, folder: str) -> Any:
    path = f"{folder}/{dist.get_backend()}"
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))

    def made(seed: int, sharded: Sequence[str]) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Model()
        for name in sharded:
            fully_shard(model.get_submodule(name), mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = made(0, ["up", "middle", ""])
    found = {"saved": _train(model, rank, optimizer)}
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": STEPS}, checkpoint_id=f"{path}/now")
    dcp.async_save({"model": weights, "optimizer": moments, "step": STEPS}, checkpoint_id=f"{path}/later").result()
    for which in ("now", "later"):
        other, its_optimizer = made(1, [""])
        weights, moments = get_state_dict(other, its_optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=f"{path}/{which}")
        assert state["step"] == STEPS
        set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=moments)
        found[which] = {
            "loaded": {name: _full(value) for name, value in other.state_dict().items()},
            "further": _train(other, rank, its_optimizer),
        }
    plain = Model().state_dict()
    dcp.load({"model": plain}, checkpoint_id=f"{path}/now")
    found["whole"] = plain
    return found


def test_distributed_checkpoints(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(compare, checkpoints, str(tmp_path), timeout_s=DEADLINE_S)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def with_gradients(rank: int, size: int) -> Any:
    import torch.distributed.nn.functional as differentiable

    world = dist.group.WORLD  # torch 2.15's default group is the world at import time

    def parts() -> list[Tensor]:
        return [torch.rand(3, 2, requires_grad=True) for _ in range(size)]

    calls: dict[str, Callable[[list[Tensor]], Any]] = {
        "broadcast": lambda xs: differentiable.broadcast(xs[0], 1, group=world),
        "gather": lambda xs: differentiable.gather(xs[0], 1, group=world),
        "scatter": lambda xs: differentiable.scatter(xs, 1, group=world),
        "all_gather": lambda xs: differentiable.all_gather(xs[0], group=world),
        "all_gather, transposed": lambda xs: differentiable.all_gather(xs[0].t(), group=world),
        "reduce_scatter": lambda xs: differentiable.reduce_scatter(torch.empty(3, 2), xs, group=world),
        "all_to_all": lambda xs: differentiable.all_to_all([torch.empty(3, 2) for _ in xs], xs, group=world),
        "all_to_all_single": lambda xs: differentiable.all_to_all_single(
            torch.empty(3 * size, 2), torch.cat(xs), group=world
        ),
        "all_reduce": lambda xs: differentiable.all_reduce(xs[0], group=world),
        "all_reduce, product": lambda xs: differentiable.all_reduce(xs[0], dist.ReduceOp.MAX, group=world),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        xs = parts()
        out = call(xs)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        sum(((at + 1 + rank) * each.square().sum() for at, each in enumerate(outs)), torch.zeros(())).backward()
        found[name] = [[each.detach() for each in outs], [x.grad for x in xs if x.grad is not None]]
        assert found[name][1], "no input has a gradient"
    # On ranks other than the root, gloo's result is undefined; ours is the input.
    x = torch.rand(3, requires_grad=True)
    out = differentiable.reduce(x, 1)
    out.square().sum().backward()
    found["reduce"] = [out.detach(), x.grad] if rank == 1 else [x.grad is not None]
    return found


def functional_collectives(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    world, ranks = dist.group.WORLD, list(range(size))
    assert world is not None
    found: dict[str, Any] = {}
    for at, (name, group) in enumerate({"group": world, "mesh": (mesh, 0), "ranks": ranks}.items()):
        torch.manual_seed(rank + 10 * at)
        x, rows = torch.rand(4, 3), torch.rand(2 * size, 4)
        found[name] = {
            "all_reduce": [functional.all_reduce(x, op, group) + 0 for op in ("sum", "avg", "max", "product")],
            "all_gather": [functional.all_gather_tensor(x, dim, group) + 0 for dim in (0, 1)],
            "reduce_scatter": [functional.reduce_scatter_tensor(rows, "sum", 0, group) + 0],
            "all_to_all": functional.all_to_all_single(rows, None, None, group) + 0,
            "all_to_all, uneven": functional.all_to_all_single(
                torch.rand(sum(rank + other for other in range(size)), 2),
                [other + rank for other in range(size)], [rank + other for other in range(size)], group,
            ) + 0,
            "broadcast": functional.broadcast(x, 1, group) + 0,
            "permute": functional.permute_tensor(x.flatten(), [(each + 1) % size for each in ranks], group) + 0,
            "of list": [y + 0 for y in functional.all_reduce_coalesced([x, rows], "sum", group)],
            "gathered list": [y + 0 for y in functional.all_gather_into_tensor_coalesced([x, rows], group)],
            "scattered list": [
                y + 0 for y in functional.reduce_scatter_tensor_coalesced([rows, rows.t().contiguous().view(-1, 2)],
                                                                          "sum", [0, 0], group)
            ],
        }  # fmt: skip
        leaf = torch.rand(2 * size, 3, requires_grad=True)
        gathered = functional.all_gather_tensor_autograd(leaf, 0, group)
        scattered = functional.reduce_scatter_tensor_autograd(gathered * (rank + 1), "sum", 0, group)
        swapped = functional.all_to_all_single_autograd(scattered, None, None, group)
        swapped.square().sum().backward()
        found[name]["gradients"] = [swapped.detach() + 0, leaf.grad]
    pending = functional.all_reduce(torch.rand(5, 2), "sum", world)
    assert isinstance(pending, functional.AsyncCollectiveTensor)
    view = pending.t()
    functional.all_reduce(torch.rand(3), "sum", world)
    found["view"] = view + 1
    return found


def objects(rank: int, size: int) -> Any:
    mine: Any = {"rank": rank, "text": "é" * 300 * (rank + 1), "tensor": torch.arange(rank + 3)}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine)
    at_root: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(mine, at_root, dst=1)
    told = [mine, None, rank] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(told, src=1)
    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, [{"for": to} for to in range(size)] if rank == 0 else None, src=0)
    received: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([mine, "end"], dst=1)
    elif rank == 1:
        assert dist.recv_object_list(received, src=0) == 0
        dist.send_object_list([("back", 1)], dst=0)
    if rank == 0:
        received = [None]
        dist.recv_object_list(received, src=1)
    pair = dist.new_group([0, 1])
    in_pair: list[Any] = [None, None]
    if rank < 2:
        dist.all_gather_object(in_pair, rank, group=pair)
    return {"gathered": gathered, "at root": at_root, "told": told, "dealt": dealt, "received": received,
            "pair": in_pair}  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("program", [with_gradients, functional_collectives, objects], ids=lambda each: each.__name__)
def test_functions(pools: Pools, program: Callable[..., Any], size: int) -> None:
    pools(size).run(compare, program, timeout_s=DEADLINE_S)


def _compiled(call: Callable[..., Any], *args: Tensor, **options: Any) -> tuple[Any, str]:
    from torch._inductor.utils import run_and_get_code  # takes a second; collecting tests must not pay it

    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False, **options):
        found, codes = run_and_get_code(torch.compile(call, fullgraph=True), *args)
    (code,) = codes
    return found, code


def _in_order(code: str, *steps: str) -> bool:
    at = [code.index(step) for step in steps]
    return at == sorted(at)


START, WAIT, MATMUL = "_c10d_functional.all_reduce_.default(", "_c10d_functional.wait_tensor.default(", ".mm("


def compiled(rank: int, size: int) -> Any:
    world = dist.group.WORLD
    assert world is not None
    x, y = torch.rand(8, 8), torch.rand(8, 8)

    def every(x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            functional.all_reduce(x * 2, "sum", world) + 1,
            functional.all_gather_tensor(y[:4].relu(), 0, world) + 1,
            functional.all_gather_tensor(y, 1, world) + 1,
            functional.reduce_scatter_tensor(torch.cat([x, y]), "avg", 0, world) + 1,
            functional.all_to_all_single(x @ y, None, None, world) + 1,
            functional.broadcast(y * 3, 1, world) + 1,
            *functional.all_reduce_coalesced([x, y], "max", world),
            *functional.all_gather_into_tensor_coalesced([x, y], world),
            *functional.reduce_scatter_tensor_coalesced([x, y], "sum", [0, 1], world),
        ]

    def used_late(x: Tensor, y: Tensor) -> Tensor:
        return functional.all_reduce(x + 1, "sum", world) * 2 + (y @ y).relu()

    if dist.get_backend() == "gloo":
        return {"every": [each + 0 for each in every(x, y)], "used late": used_late(x, y)}
    found: dict[str, Any] = {}
    found["every"], _ = _compiled(every, x, y)
    # Inductor moves the wait to the first use.
    passes = {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": ["sink_waits"]}
    found["used late"], code = _compiled(used_late, x, y, **passes)
    assert _in_order(code, START, MATMUL, WAIT), code
    return found


def compiled_training(rank: int, size: int) -> Any:
    torch._dynamo.reset()
    model = DistributedDataParallel(Model())
    return {"ddp": _train(torch.compile(model), rank)}  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("program", [compiled, compiled_training], ids=lambda program: program.__name__)
def test_compiled(pools: Pools, program: Callable[..., Any]) -> None:
    pools(2).run(compare, program, timeout_s=2 * DEADLINE_S)


LLAMA = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


def save_llama(path: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    if os.environ["RANK"] == "0":
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(path)


def tensor_parallel_llama(rank: int, size: int, path: str) -> Any:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path, tp_plan="auto")
    tokens = torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(0))
    assert isinstance(model.model.layers[0].mlp.down_proj.weight, DTensor)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    gradients = {name: _full(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    model.eval()
    with torch.no_grad():
        logits = model(tokens).logits
    told = model.generate(tokens, max_new_tokens=8, do_sample=False)
    return {"loss": _full(loss), "logits": _full(logits), "gradients": gradients, "told": told}


@pytest.mark.slow
def test_transformers_with_a_tensor_parallel_plan(pools: Pools, tmp_path: Path) -> None:
    pytest.importorskip("transformers", "5.20", exc_type=ImportError)
    pytest.importorskip("accelerate", reason="transformers asks for accelerate, which the extra dev brings")
    pools(2).run(save_llama, str(tmp_path))
    pools(2).run(compare, tensor_parallel_llama, str(tmp_path), timeout_s=DEADLINE_S)


def _ddp_alone(rank: int, size: int) -> tuple[str, str, tuple[int, ...]]:
    model = DistributedDataParallel(Model(), process_group=dist.new_group(timeout=timedelta(seconds=1)))
    loss = model(torch.ones(2, 8)).sum()
    found = None
    if rank == 0:
        with pytest.raises(dist.DistBackendError) as caught:
            loss.backward()
        found = ps.error_of(caught.value)
        assert str(found) in str(caught.value)
    dist.barrier()
    return str(found), type(found).__name__, getattr(found, "suspect_ranks", ())


def test_error_of_finds_what_the_backward_of_ddp_raises(pools: Pools) -> None:
    text, kind, suspects = pools(2).run(run_over, "parallel_state", _ddp_alone, timeout_s=DEADLINE_S)[0]
    assert (kind, suspects) == ("CollectiveTimeoutError", (1,)), text
