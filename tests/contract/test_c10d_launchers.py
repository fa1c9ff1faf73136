"""Programs that other people's launchers start, over `backend="parallel_state"`: the numbers that gloo gives them.

Each is a small script in a temporary folder. What it has of this library is the import, and the backend's name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "ACCELERATE_")

TORCHRUN = """
import sys, torch, torch.distributed as dist
import parallel_state
backend, folder = sys.argv[1:]
dist.init_process_group(backend)
assert dist.get_backend() == backend
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for step in range(4):
    loss = model(torch.randn(6, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
torch.save([losses, model.state_dict()], f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""

ACCELERATE = """
import sys, torch, torch.distributed as dist
import parallel_state
backend, folder = sys.argv[1:]
dist.init_process_group(backend)  # accelerate takes what is there, and has no other way to name a backend for the CPU
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
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
accelerator.save_state(f"{folder}/state")
accelerator.wait_for_everyone()
accelerator.load_state(f"{folder}/state")
torch.save([found, accelerator.get_state_dict(model)], f"{folder}/{accelerator.process_index}.pt")
accelerator.end_training()
"""


def _launch(command: list[str], script: str, folder: Path, backend: str, **variables: str) -> list[Any]:
    """What each rank saved."""
    folder = folder / backend
    folder.mkdir()
    (folder / "script.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    process = subprocess.run(
        [sys.executable, "-m", *command, str(folder / "script.py"), backend, str(folder)],
        cwd=folder, env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def _compare(command: list[str], script: str, folder: Path, **variables: str) -> None:
    """Two ranks have one order to add in: nothing may differ by a bit."""
    expected, found = (_launch(command, script, folder, backend, **variables) for backend in ("gloo", "parallel_state"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_torchrun(tmp_path: Path) -> None:
    _compare(["torch.distributed.run", "--standalone", "--nproc-per-node", "2"], TORCHRUN, tmp_path)


def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate, as the extra dev brings it")
    # `--cpu` is for one process, or for mpirun's; this is the launcher of several, and the script asks for the CPU.
    options = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    _compare(["accelerate.commands.launch", *options], ACCELERATE, tmp_path)
