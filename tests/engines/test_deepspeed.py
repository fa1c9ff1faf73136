from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.engines.running import environment, run, torchrun

DEADLINE_S = 300.0

TRAIN = """
import json, os, sys, torch, torch.distributed as dist
import deepspeed
deepspeed.ops.__compatible_ops__ = {}  # its own all_reduce, for inference, would be compiled for minutes

class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x
    @staticmethod
    def backward(ctx, grad):
        return grad, None

class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None

class Split(torch.nn.Module):
    "Two layers, the first cut by columns and the second by rows; the same numbers whatever the cut."
    def __init__(self, group):
        super().__init__()
        first, second = torch.nn.Linear(8, 64), torch.nn.Linear(64, 4)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        cut = lambda x, dim: torch.nn.Parameter(x.detach().chunk(size, dim)[rank].clone())
        self.first, self.bias, self.second = cut(first.weight, 0), cut(first.bias, 0), cut(second.weight, 1)
        self.last = torch.nn.Parameter(second.bias.detach().clone())
        for weight in (self.first, self.bias, self.second):
            weight.tensor_model_parallel = weight.model_parallel = True
        self.group = group
    def forward(self, x):
        hidden = torch.relu(torch.nn.functional.linear(_Same.apply(x, self.group), self.first, self.bias))
        return _Sum.apply(torch.nn.functional.linear(hidden, self.second), self.group) + self.last

kind, folder, *stages = sys.argv[1:]
deepspeed.init_distributed(dist_backend="gloo")
if kind == "ours":
    from parallel_state.compat import deepspeed as mpu
    mpu.initialize_model_parallel(2)
elif kind == "on demand":
    from parallel_state.compat import deepspeed as mpu
elif kind == "megatron":
    from megatron.core import parallel_state as mpu
    mpu.initialize_model_parallel(2)
    mpu.get_model_parallel_rank = mpu.get_tensor_model_parallel_rank
    mpu.get_model_parallel_world_size = mpu.get_tensor_model_parallel_world_size
else:
    mpu = None
tensor_group = None if mpu is None else mpu.get_tensor_model_parallel_group()
if mpu is None:
    tensor_group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
data_rank = dist.get_rank() if mpu is None else mpu.get_data_parallel_rank()
found = {}
for stage in map(int, stages):
    torch.manual_seed(0)
    model = Split(tensor_group)
    zero = {"stage": stage, "reduce_bucket_size": 200, "allgather_bucket_size": 200}
    config = {
        "train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05,
        "zero_optimization": zero, "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    losses = []
    torch.manual_seed(10 + data_rank)
    for step in range(8):
        loss = engine(torch.randn(6, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    norm = torch.tensor(float(engine.get_global_grad_norm()))
    weights = engine.module.state_dict()
    if stage == 3:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
        found["3"] = [losses, norm, weights, engine.dp_world_size, engine.mp_world_size]
        continue
    path = f"{folder}/{kind}/{stage}"
    engine.save_checkpoint(path)
    engine.load_checkpoint(path)
    found[str(stage)] = [losses, norm, engine.module.state_dict(), engine.dp_world_size, engine.mp_world_size]
torch.save(found, f"{folder}/{kind} {dist.get_rank()}.pt")
"""


def _train(kind: str, size: int, folder: Path, stages: tuple[int, ...] = (1, 2)) -> list[object]:
    script = folder / "train.py"
    script.write_text(TRAIN)
    variables = environment(DS_ACCELERATOR="cpu")
    run(torchrun(size, script, kind, folder, *map(str, stages)), variables, DEADLINE_S, cwd=folder)
    return [torch.load(folder / f"{kind} {rank}.pt", weights_only=True) for rank in range(size)]


def test_zero_over_tensor_parallel_layers(tmp_path: Path) -> None:
    """Two ranks have one order of additions, so results are equal bit for bit."""
    ours, theirs = (_train(kind, 4, tmp_path) for kind in ("ours", "megatron"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_zero_3_over_tensor_parallel_layers(tmp_path: Path) -> None:
    ours, theirs = (_train(kind, 4, tmp_path, (3,)) for kind in ("ours", "megatron"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_zero_without_sizes(tmp_path: Path) -> None:
    ours, theirs = (_train(kind, 2, tmp_path) for kind in ("on demand", "none"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _asked() -> set[str]:
    spec = find_spec("deepspeed")
    assert spec is not None and spec.submodule_search_locations
    found = set()
    for path in Path(spec.submodule_search_locations[0]).rglob("*.py"):
        text = path.read_text()
        if "mpu" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "mpu":
                found.add(node.attr)
            elif (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("hasattr", "getattr", "_mpu_world_size")
                and ast.unparse(node.args[0]).rpartition(".")[2] == "mpu"
            ):
                found |= {each.value for each in node.args[1:] if isinstance(each, ast.Constant)}
    return found - {None}


def test_it_has_the_names_that_are_asked_for() -> None:
    mpu = importlib.import_module("parallel_state.compat.deepspeed")
    asked = _asked()
    assert len(asked) > 20
    assert asked - set(mpu.__all__) == set(mpu.MISSING)
    assert set(mpu.__all__) - asked - {"initialize_model_parallel"} == set()
    assert not any(hasattr(mpu, name) for name in mpu.MISSING)
