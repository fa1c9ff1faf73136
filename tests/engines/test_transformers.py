from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.running import environment, run, torchrun

DEADLINE_S = 400.0
BOTH = """
found = [run(backend) for backend in ("parallel_state", "gloo")]
torch.save(found, f"{sys.argv[2]}/{os.environ['RANK']}.pt")
"""
PLAN = """
import os, sys, torch, torch.distributed as dist, transformers
import parallel_state

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])

def generate(**options):
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
    with torch.no_grad():
        logits = model(PROMPT).logits
    told = model.generate(PROMPT, max_new_tokens=24, do_sample=False, eos_token_id=None)
    cut = any(each.shape != whole for each, whole in zip(local(model), shapes, strict=True)) if options else None
    return [getattr(logits, "full_tensor", lambda: logits)(), told, cut]

def local(model):
    return [getattr(each, "to_local", lambda each=each: each)() for each in model.parameters()]

def run(backend):
    dist.init_process_group(backend)
    try:
        return generate(tp_plan="auto")
    finally:
        dist.destroy_process_group()

whole = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
shapes = [each.shape for each in whole.parameters()]
if os.environ["RANK"] == "0":
    torch.save(generate(), f"{sys.argv[2]}/one.pt")
"""
TRAINER = """
import os, sys, torch, torch.distributed as dist, transformers
from accelerate.state import AcceleratorState
import parallel_state

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, at):
        tokens = torch.randint(256, (16,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}

def run(backend):
    dist.init_process_group(backend)  # the Trainer takes what is there
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    arguments = transformers.TrainingArguments(
        output_dir=f"{sys.argv[2]}/{backend}", use_cpu=True, max_steps=6, per_device_train_batch_size=4,
        logging_steps=1, report_to=[], disable_tqdm=True, gradient_accumulation_steps=2,
        per_device_eval_batch_size=4, seed=0,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel" and dist.get_backend() == backend
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = [losses, trainer.evaluate()["eval_loss"], dict(model.state_dict())]
    del trainer
    AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found
"""


def _run(code: str, model: Path, folder: Path, size: int = 2) -> list[list[object]]:
    (folder / "program.py").write_text(code + BOTH)
    run(torchrun(size, folder / "program.py", model, folder), environment(), DEADLINE_S, cwd=folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_a_tensor_parallel_plan(kind: str, models: Callable[..., Path], tmp_path: Path) -> None:
    found = _run(PLAN, models(kind), tmp_path)
    logits, told, _ = torch.load(tmp_path / "one.pt", weights_only=True)
    for ours, gloo in found:
        torch.testing.assert_close(ours, gloo, rtol=0, atol=0)
        assert ours[2], "no weight was sharded"
        assert torch.equal(ours[1], told) and told.shape[1] == 8 + 24
        torch.testing.assert_close(ours[0], logits, rtol=1e-3, atol=1e-3)


def test_the_trainer(models: Callable[..., Path], tmp_path: Path) -> None:
    for ours, gloo in _run(TRAINER, models("llama"), tmp_path):
        assert len(ours[0]) == 6 and len(set(ours[0])) == 6
        torch.testing.assert_close(ours, gloo, rtol=0, atol=0)
