"""Runs nano-vllm from its source on the CPU: its engine, scheduler and tensor-parallel Qwen3 over this library.

    PYTHONPATH=folder-of-its-source python examples/nano_vllm.py       # needs transformers

It prints, among nano-vllm's own output:

    1 rank, gloo:            24 tokens
    2 ranks, gloo:           the same
    2 ranks, parallel_state: the same

nano-vllm needs GPUs and torch's `nccl`. `stand_in` selects another backend and replaces device memory, flash-attn (by
torch's attention over the same cache), and the Triton kernel that fills the cache. The communication is nano-vllm's
own, by torch.distributed: all_reduce in the linear layers and the embedding, gather of the logits, barrier.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.machinery
import os
import socket
import sys
import tempfile
import types

import torch
import torch.distributed as dist

import parallel_state  # registers the backend "parallel_state"  # noqa: F401

PROMPTS = [[5, 17, 91, 3, 66], [200, 8], [42] * 20]
TOKENS_EACH = 8
GREEDY = 1e-6
"""So low that nano-vllm always selects the most likely token. It doesn't accept 0."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns causal attention of a sequence's last tokens, [tokens, heads, head_dim]."""
    late = len(key) - len(query)
    mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(late)
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return found.squeeze(0).transpose(0, 1)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, block_table=None, **options):
    parts = []
    for i in range(len(cu_seqlens_q) - 1):
        keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        if block_table is None:
            key, value = k[keys], v[keys]
        else:
            key, value = (cache[block_table[i]].flatten(0, 1)[: keys.stop - keys.start] for cache in (k, v))
        parts.append(attend(q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]], key, value, softmax_scale))
    return torch.cat(parts)


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, **options):
    parts = []
    for query, blocks, length in zip(q, block_table, cache_seqlens, strict=True):
        key, value = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        parts.append(attend(query, key, value, softmax_scale))
    return torch.stack(parts)


def store_kvcache(key, value, k_cache, v_cache, slot_mapping):
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.flatten(0, 1)[slot_mapping.long()] = new


class Hash:
    """The part of xxhash's interface that nano-vllm's prefix cache uses."""

    def __init__(self) -> None:
        self.update, self._digest = (found := hashlib.blake2b(digest_size=8)).update, found.digest

    def intdigest(self) -> int:
        return int.from_bytes(self._digest(), "little")


def stand_in() -> None:
    """Makes nano-vllm run without a GPU, over the backend in NANO_VLLM_BACKEND."""
    flash = types.ModuleType("flash_attn")
    flash.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
    hashes = types.ModuleType("xxhash")
    hashes.xxh64 = Hash
    sys.modules.update(flash_attn=flash, xxhash=hashes)
    torch.compiler.set_stance("force_eager")

    memory = 1 << 26
    torch.cuda.mem_get_info = lambda: (memory, memory)
    torch.cuda.memory_stats = lambda: dict.fromkeys(("allocated_bytes.all.peak", "allocated_bytes.all.current"), 0)
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(torch.cuda, name, lambda *args: None)
    torch.Tensor.cuda = lambda tensor, **options: tensor
    tensor, default_device, init = torch.tensor, torch.set_default_device, dist.init_process_group
    torch.tensor = lambda *args, pin_memory=False, **options: tensor(*args, **options)
    torch.set_default_device = lambda device: default_device("cpu")

    def init_process_group(backend, address, **options):
        if backend != "nccl":
            raise ValueError(f"expected nano-vllm to use the backend nccl, but it uses {backend}")
        init(os.environ["NANO_VLLM_BACKEND"], f"tcp://127.0.0.1:{os.environ['NANO_VLLM_PORT']}", **options)

    dist.init_process_group = init_process_group
    from nanovllm.layers import attention

    attention.store_kvcache = store_kvcache
    del sys.modules["flash_attn"]  # transformers would use it as well


def make_model(folder: str) -> None:
    """Writes a tiny Qwen3 with random weights and a byte tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2, eos_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!").save_pretrained(folder)


@torch.inference_mode()
def generate(folder: str, ranks: int, backend: str) -> list[list[int]]:
    from nanovllm import LLM, SamplingParams

    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(NANO_VLLM_PORT=str(free.getsockname()[1]), NANO_VLLM_BACKEND=backend)
    llm = LLM(folder, enforce_eager=True, tensor_parallel_size=ranks, max_model_len=512, max_num_batched_tokens=512)
    sampling = SamplingParams(temperature=GREEDY, max_tokens=TOKENS_EACH, ignore_eos=True)
    answers = llm.generate(PROMPTS, sampling, use_tqdm=False)
    atexit.unregister(llm.exit)
    llm.exit()
    return [answer["token_ids"] for answer in answers]


stand_in()  # at import, because the ranks that nano-vllm starts import this file

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        one = generate(folder, 1, "gloo")
        print(f"1 rank, gloo:            {sum(map(len, one))} tokens")
        for backend in ("gloo", "parallel_state"):
            same = generate(folder, 2, backend) == one
            print(f"{f'2 ranks, {backend}:':<24} {'the same' if same else 'others'}")
