"""Makes tiny models with random weights and a tokenizer of bytes. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

END_OF_TEXT = 256
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": END_OF_TEXT,
}  # fmt: skip
"""Sizes that CPU engines accept: heads of 32; layers and heads divide by two. Wide weights keep the most
likely token clear of rounding."""
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
}  # fmt: skip


def make(kind: str, folder: Path, seed: int = 0, **sizes: Any) -> Path:
    import torch
    import transformers

    config_name, model_name, own = KINDS[kind]
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**{**SIZES, **own, **sizes}))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    of_bytes.add_special_tokens(["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
