"""Programs of other launchers give gloo's numbers over `backend="parallel_state"`. Launcher and ranks are forks of a
process with torch imported."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.programs import Program, module

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "ACCELERATE_")
TORCHRUN_OF_TWO = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

TORCHRUN = """
import os, sys, torch, torch.distributed as dist
import parallel_state

def train(backend):
    dist.init_process_group(backend)
    assert dist.get_backend() == backend
    torch.manual_seed(dist.get_rank())
    layers = torch.nn.Linear(8, 32), torch.nn.Linear(32, 4)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(4):
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [losses, model.state_dict()]
"""

ACCELERATE = """
import os, sys, torch, torch.distributed as dist
import parallel_state
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import broadcast_object_list, gather_object, set_seed

def train(backend):
    dist.init_process_group(backend)  # accelerate takes what is there, and has no other way to name one for the CPU
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2 and accelerator.device.type == "cpu" and dist.get_backend() == backend
    set_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(44, 8), torch.randint(4, (44,)))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    found = []
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                logits = model(x)
                loss = torch.nn.functional.cross_entropy(logits, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
            found += [accelerator.gather_for_metrics(logits.detach()), accelerator.reduce(loss.detach(), "mean")]
            found.append(accelerator.pad_across_processes(torch.ones(accelerator.process_index + 1)))
    told = [f"rank {accelerator.process_index}"]
    found.append([ord(each[-1]) for each in gather_object(told) + broadcast_object_list(told)])
    accelerator.save_state(f"{sys.argv[1]}/{backend}")
    accelerator.wait_for_everyone()
    accelerator.load_state(f"{sys.argv[1]}/{backend}")
    state = accelerator.get_state_dict(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return [found, state]
"""

DEEPSPEED = """
import os, sys, torch, torch.distributed as dist
import parallel_state, deepspeed
deepspeed.ops.__compatible_ops__ = {}  # its own all_reduce, for inference, would be compiled for minutes

def train(backend):
    deepspeed.init_distributed(dist_backend=backend)
    assert dist.get_backend() == backend
    found = {}
    for stage in (1, 2):
        for bf16 in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
            zero = {"stage": stage, "reduce_bucket_size": 200, "allgather_bucket_size": 200, "overlap_comm": stage == 2}
            config = {
                "train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
                "zero_optimization": zero, "bf16": {"enabled": bf16}, "zero_allow_untested_optimizer": True,
            }
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            losses = []
            torch.manual_seed(10 + dist.get_rank())
            for step in range(6):
                loss = engine(torch.randn(6, 8, dtype=model[0].weight.dtype)).float().square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            path = f"{sys.argv[1]}/{backend}/{stage}/{bf16}"
            engine.save_checkpoint(path)
            engine.load_checkpoint(path)
            found[f"{stage} {bf16}"] = [losses, engine.module.state_dict()]
    deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    return found
"""

_BOTH = """
found = []
for backend in ("parallel_state", "gloo"):
    found.append(train(backend))
    if dist.is_initialized():  # models are gone by now: DDP's, where it has gloo's group last, may wait for ever
        dist.destroy_process_group()
torch.save(found, f"{sys.argv[1]}/{os.environ['RANK']}.pt")
"""


def _compare(command: list[str], script: str, folder: Path, before: str = "", **variables: str) -> None:
    (folder / "script.py").write_text(script + _BOTH)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    name, *words = command
    code = f"import os\nos.chdir({str(folder)!r})\n" + module(name, [*words, str(folder / "script.py"), str(folder)])
    program = Program(before + code, {**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables})
    said = "".join(program.communicate(DEADLINE_S))
    assert program.returncode == 0, said
    for rank in range(2):
        found, expected = torch.load(folder / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_torchrun(tmp_path: Path) -> None:
    _compare(TORCHRUN_OF_TWO, TORCHRUN, tmp_path)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate, as the extra dev brings it")
def test_accelerate_launch(tmp_path: Path) -> None:
    # `--cpu` selects one process, or mpirun's. `--multi_gpu` starts several, and the script asks for the CPU.
    options = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    imports = "import accelerate, accelerate.utils\n"
    _compare(["accelerate.commands.launch", *options], ACCELERATE, tmp_path, imports)


@pytest.mark.long
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed")
def test_deepspeed(tmp_path: Path) -> None:
    _compare(TORCHRUN_OF_TWO, DEEPSPEED, tmp_path, DS_ACCELERATOR="cpu")
