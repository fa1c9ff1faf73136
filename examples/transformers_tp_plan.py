"""Runs a tiny Llama with transformers' tensor-parallel plan over the backend `parallel_state`: two ranks on the CPU.

    python examples/transformers_tp_plan.py          # needs transformers and accelerate

It prints:

    2 ranks, parallel_state: 16 tokens, each rank with half of the layers' weights
    one process:             the same tokens
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist

import parallel_state as ps

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def make_model(folder: str) -> None:
    """Writes a tiny Llama. Its large random weights make the most likely token unambiguous."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def generate(folder: str, **options: str) -> tuple[list[int], int]:
    """Returns the generated tokens and the number of elements of one weight on this rank."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, **options)
    generated = model.generate(PROMPT, max_new_tokens=16, do_sample=False)
    weight = model.model.layers[0].mlp.up_proj.weight
    return generated[0, PROMPT.shape[1] :].tolist(), getattr(weight, "to_local", lambda: weight)().numel()


def rank(folder: str) -> tuple[list[int], int]:
    dist.init_process_group("parallel_state")  # the only change to the program
    try:
        return generate(folder, tp_plan="auto")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        one, whole = generate(folder)
        ranks = ps.launch(rank, nproc=2, args=(folder,))
    half = {2 * held for _, held in ranks} == {whole}
    print(
        f"2 ranks, parallel_state: {len(one)} tokens, each rank with {'half' if half else 'all'} of the layers' weights"
    )
    print(f"one process:             {'the same' if all(tokens == one for tokens, _ in ranks) else 'other'} tokens")
