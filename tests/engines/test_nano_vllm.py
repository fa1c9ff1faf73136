"""Two ranks over this backend give gloo's logits bit for bit, and the tokens of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.engines.running import environment, python, run, source
from tests.examples import FOLDER

DEADLINE_S = 400.0
PROGRAM = """
import sys
import torch, nano_vllm
from nanovllm.layers.sampler import Sampler

nano_vllm.PROMPTS = [list(range(7, 107)), [5, 6], [9] * 300, [*range(7, 107), 3]]
nano_vllm.TOKENS_EACH = 24

def find(folder, ranks, backend):
    found, sample = [], Sampler.forward
    def keep(sampler, logits, temperatures):
        found.append(logits.clone())
        return sample(sampler, logits, temperatures)
    Sampler.forward = keep  # rank 0 samples, in this process
    tokens = nano_vllm.generate(folder, ranks, backend)
    Sampler.forward = sample
    return tokens, found

if __name__ == "__main__":
    folder, out = sys.argv[1:]
    torch.save([find(folder, *how) for how in ((1, "gloo"), (2, "gloo"), (2, "parallel_state"))], out)
"""


def test_two_ranks_have_the_tokens_of_one_and_the_logits_of_gloo(models: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = python(tmp_path / "program.py", models("qwen3", max_position_embeddings=512), tmp_path / "found.pt")
    run(command, environment(FOLDER, source("nano-vllm")), DEADLINE_S)
    (one, one_logits), (gloo, gloo_logits), (ours, ours_logits) = torch.load(tmp_path / "found.pt", weights_only=True)
    assert [len(tokens) for tokens in one] == [24] * 4 and len({token for tokens in one for token in tokens}) > 8
    assert ours == gloo == one
    assert len(ours_logits) == len(one_logits) > 24, "logits of a warm-up, of the prompts, and of each token"
    torch.testing.assert_close(ours_logits, gloo_logits, rtol=0, atol=0)
    torch.testing.assert_close(ours_logits[1:], one_logits[1:], rtol=1e-3, atol=1e-3)
