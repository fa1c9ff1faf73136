"""Simulates a decode step: makes the collectives of all layers as vLLM does, with simulated matmuls, because a large
model's weights don't fit into one machine. A simulated matmul reads memory for as much CPU time as `measure_matmuls`
found for a real one, in bf16 on one core. Attention is left out. All numbers are small integers, so results are exact.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_STREAMED = 64 << 20
"""Bytes that a rank's matmuls cycle through, more than a core's caches."""
_SLICE = 64 << 10


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    kv: int
    intermediate: int
    vocabulary: int

    def matmuls(self, tp: int) -> dict[str, list[tuple[int, int]]]:
        return {
            "attention": [(self.hidden, (self.hidden + 2 * self.kv) // tp), (self.hidden // tp, self.hidden)],
            "mlp": [(self.hidden, 2 * self.intermediate // tp), (self.intermediate // tp, self.hidden)],
            "head": [(self.hidden, self.vocabulary // tp)],
        }


MODELS = {
    "26M": Model(layers=8, hidden=512, kv=512, intermediate=1408, vocabulary=4096),
    "0.5B": Model(layers=24, hidden=896, kv=128, intermediate=4864, vocabulary=151936),  # Qwen2.5-0.5B
    "7B": Model(layers=28, hidden=3584, kv=512, intermediate=18944, vocabulary=152064),  # Qwen2.5-7B
}
LAYOUTS = {"TP2": (2, 1), "TP4": (4, 1), "TP2xPP2": (2, 2)}


def measure_matmuls(model: Model, tp: int, batch: int, repeats: int = 5) -> dict[str, float]:
    """Measures one rank's matmuls in a model that is sharded over `tp` ranks. Returns the CPU seconds of a layer's
    "attention" and "mlp", and of the "head".
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {part: sum(_matmul_s(batch, *shape, repeats) for shape in shapes)
                for part, shapes in model.matmuls(tp).items()}  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def _matmul_s(batch: int, inputs: int, outputs: int, repeats: int) -> float:
    x, w = torch.ones(batch, inputs, dtype=torch.bfloat16), torch.ones(outputs, inputs, dtype=torch.bfloat16)
    other = torch.ones(_STREAMED // 4)
    found = []
    for _ in range(1 + repeats):
        other.add_(1)
        started = time.thread_time()
        torch.nn.functional.linear(x, w)
        found.append(time.thread_time() - started)
    return sorted(found[1:])[repeats // 2]


def case_of(name: str, layout: str, batch: int, matmuls_s: dict[str, float]) -> dict[str, Any]:
    return {"model": name, **asdict(MODELS[name]), "layout": layout, "batch": batch, "matmuls_s": matmuls_s}


class Step:
    def __init__(self, tp: Any, pp: Any, values: dict[str, Any]) -> None:
        self.tp, self.pp = tp, pp
        self.matmuls_s: dict[str, float] = values["matmuls_s"]
        self.layers = values["layers"]
        batch, hidden = values["batch"], values["hidden"]
        self.partial = torch.full((batch, hidden), tp.rank_in_group + 1.0, dtype=torch.bfloat16)
        self.residual = torch.arange(batch * hidden).remainder(100).view(batch, hidden).bfloat16()
        self.logits = torch.full((batch, values["vocabulary"] // tp.world_size), tp.rank_in_group, dtype=torch.bfloat16)
        self.streamed = torch.ones(_STREAMED // _SLICE, _SLICE // 4)
        self.at = 0

    def run(self) -> list[Tensor]:
        if self.pp.is_first_rank:
            hidden, residual = self.tp.all_reduce(self._partial()), self.residual
        else:
            received = self.pp.recv_tensor_dict(all_gather_group=self.tp)
            hidden, residual = received["hidden_states"], received["residual"]
        for _ in range(self.layers // self.pp.world_size):
            for part in ("attention", "mlp"):
                self._stream(self.matmuls_s[part])
                hidden = self.tp.all_reduce(self._partial())
        told = None
        if self.pp.is_last_rank:
            self._stream(self.matmuls_s["head"])
            told = {"tokens": self.tp.all_gather(self.logits).argmax(-1)}
        else:
            self.pp.send_tensor_dict({"hidden_states": hidden, "residual": residual}, all_gather_group=self.tp)
        tokens = self.pp.broadcast_tensor_dict(told, src=self.pp.world_size - 1)["tokens"]
        return [hidden, residual, tokens]

    def _partial(self) -> Tensor:
        """Returns a copy of this rank's partial sum, because vLLM's all_reduce can change its input."""
        return self.partial.clone()

    def run_matmuls(self) -> None:
        if self.pp.is_first_rank:
            for _ in range(self.layers):
                for part in ("attention", "mlp"):
                    self._stream(self.matmuls_s[part])
            self._stream(self.matmuls_s["head"])

    def check(self) -> str | None:
        size = self.tp.world_size
        hidden, residual, tokens = self.run()
        first_of_last_shard = (size - 1) * self.logits.shape[1]
        if not bool((hidden == size * (size + 1) / 2).all()):
            return "hidden states are not the sum of those of all ranks"
        if not torch.equal(residual, self.residual):
            return "the residual is not that of the first stage"
        if tokens.tolist() != [first_of_last_shard] * len(self.residual):
            return f"tokens are {tokens.tolist()}, not {first_of_last_shard}"
        return None

    def _stream(self, cpu_s: float) -> None:
        """Reads memory for `cpu_s` of CPU time, not of wall time, because ranks that share a core must slow each
        other.
        """
        until = time.thread_time() + cpu_s
        while time.thread_time() < until:
            self.streamed[self.at].sum()
            self.at = (self.at + 1) % len(self.streamed)


class TorchGroup:
    """A coordinator like `GroupCoordinator`, over torch.distributed. Sends a dict as pickled metadata, then each
    tensor.
    """

    def __init__(self, rank: int, rows: list[list[int]]) -> None:
        for ranks in rows:
            group = dist.new_group(ranks)
            if rank in ranks:
                self.group, self.ranks = group, ranks
        self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(rank)
        self.is_first_rank, self.is_last_rank = rank == self.ranks[0], rank == self.ranks[-1]

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.world_size * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(out, x, group=self.group)
        return out.view(self.world_size, *x.shape).movedim(0, 1).flatten(1)

    def send_tensor_dict(self, tensors: dict[str, Tensor], all_gather_group: object = None) -> None:
        following = self.ranks[self.rank_in_group + 1]
        dist.send_object_list([_described(tensors)], following, group=self.group)
        for x in tensors.values():
            dist.send(x, following, group=self.group)

    def recv_tensor_dict(self, all_gather_group: object = None) -> dict[str, Tensor]:
        previous, described = self.ranks[self.rank_in_group - 1], [None]
        dist.recv_object_list(described, previous, group=self.group)
        tensors = _rooms(described[0])
        for x in tensors.values():
            dist.recv(x, previous, group=self.group)
        return tensors

    def broadcast_tensor_dict(self, tensors: dict[str, Tensor] | None, src: int) -> dict[str, Tensor]:
        if self.world_size == 1 and tensors is not None:
            return tensors
        described = [None if tensors is None else _described(tensors)]
        dist.broadcast_object_list(described, self.ranks[src], group=self.group)
        tensors = _rooms(described[0]) if tensors is None else tensors
        for x in tensors.values():
            dist.broadcast(x, self.ranks[src], group=self.group)
        return tensors


def _described(tensors: dict[str, Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(key, tuple(x.shape), x.dtype) for key, x in tensors.items()]


def _rooms(described: Any) -> dict[str, Tensor]:
    return {key: torch.empty(shape, dtype=dtype) for key, shape, dtype in described}
