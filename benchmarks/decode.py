"""A decode loop with tensor and pipeline parallelism on more ranks than cores: what waiting costs.

    python benchmarks/decode.py                  4 ranks: TP 2 × PP 2
    python benchmarks/decode.py --ranks 2        TP 2
    python benchmarks/decode.py --models 0.5B 7B --layouts TP2 TP4 TP2xPP2 --batches 1 8 64

A small transformer with random weights (26 M parameters with its shards) makes one token for each of four sequences a
step. The same model over this library as it is, over this library with waits that only spin, over torch.distributed
alone (no shared memory), and over vLLM's own coordinators where its wheel is there. It is sharded as engines do it, and
calls of one step are those that vLLM makes: embedding, attention and MLP each end in an all_reduce of [batch, hidden],
the logits in an all_gather; a stage hands {hidden_states, residual} on, and the last one tells the first which tokens
came out.

With --models a step of a model of that shape, whose matmuls only take their time (see decode_models.py), also over
torch.distributed alone: the time of a step, and the share of it in which its ranks do something else than matmuls.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import decode_models
import torch
import torch.nn.functional as F  # noqa: N812
from harness import peers
from harness.collectives import start_ours, start_torch, use_once
from harness.rounds import measure_all
from harness.teams import Team, started
from torch import Tensor

import parallel_state as ps
from parallel_state.tools.bench.report import p50, write_json
from parallel_state.tools.bench.rounds import Row
from parallel_state.tools.bench.worker import Timing, timed

OURS, SPINNING, GLOO, VLLM = "parallel_state", "parallel_state, spinning", "parallel_state over gloo", "vLLM"
TORCH, MATMULS = "gloo", "(matmuls alone)"
LAYERS, HIDDEN, HEADS, VOCABULARY, CONTEXT, BATCH = 8, 512, 8, 4096, 64, 4
TOLERANCE = 0.05  # of the largest logit: bf16 sums in another order
VARIABLES = {
    SPINNING: {"PARALLEL_STATE_SPIN_US": "1000000"},
    GLOO: {"PARALLEL_STATE_SHARED_MEMORY": "off"},
}


def report(rows: Sequence[Row]) -> None:
    pairs = [(OURS, peer) for peer in (SPINNING, GLOO, VLLM)]
    command_line.print_rows("decode step", rows, lambda row: f"{row.case['ranks']} ranks", pairs)
    columns = [f"{row.case['ranks']} ranks" for row in rows]
    names = dict.fromkeys(name for row in rows for name in row.us)
    lines = [(name, [BATCH * 1e6 / p50(row.us[name]) if row.us.get(name) else None for row in rows]) for name in names]
    command_line.print_table("tokens/s", columns, lines)


def report_models(rows: Sequence[Row]) -> None:
    pairs = [(OURS, peer) for peer in (TORCH, VLLM)]

    def column(row: Row) -> str:
        return f"{row.case['layout']} × {row.case['batch']}"

    for model in dict.fromkeys(row.case["model"] for row in rows):
        chosen = [row for row in rows if row.case["model"] == model]
        title = f"{model}, layout × batch"
        command_line.print_rows(title, chosen, column, pairs)
        names = [name for name in dict.fromkeys(n for row in chosen for n in row.us) if name != MATMULS]
        shares = [(name, [_share(row, name) for row in chosen]) for name in names]
        command_line.print_table(f"{title}: % of a step beside its matmuls", [column(row) for row in chosen], shares)


def _share(row: Row, name: str) -> float | None:
    """Returns the part of a candidate's step that the matmuls alone don't take, in percent."""
    if not row.us.get(name) or not row.us.get(MATMULS):
        return None
    return max(0.0, 100 * (1 - p50(row.us[MATMULS]) / p50(row.us[name])))


def measure_models(options: argparse.Namespace, names: Sequence[str], settings: dict[str, Any]) -> list[Row]:
    """Measures steps of large models; matmuls first, while nothing else runs."""
    cases: dict[str, list[dict[str, object]]] = {layout: [] for layout in options.layouts}
    for layout in options.layouts:
        for name in options.models:
            for batch in options.batches:
                tp = decode_models.LAYOUTS[layout][0]
                matmuls_s = decode_models.measure_matmuls(decode_models.MODELS[name], tp, batch)
                case = decode_models.case_of(name, layout, batch, matmuls_s)
                cases[layout].append({**case, "most_calls": 20})
    rows, left_out = [], {}
    for layout, chosen in cases.items():
        tp, pp = decode_models.LAYOUTS[layout]
        made = [
            Team(name, __file__, tp * pp, {**settings, "tp": tp}, environment=VARIABLES.get(name)) for name in names
        ]
        with started(made, left_out) as teams:
            rows += measure_all(teams, chosen, command_line.plan(options))
    report_models(rows)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    return rows


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="2: TP 2; 4: TP 2 × PP 2")
    parser.add_argument("--only", nargs="+", choices=(OURS, SPINNING, GLOO, VLLM), default=(OURS, SPINNING, GLOO, VLLM))
    parser.add_argument("--models", nargs="+", choices=decode_models.MODELS, default=[])
    parser.add_argument("--layouts", nargs="+", choices=decode_models.LAYOUTS, default=[*decode_models.LAYOUTS])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.set_defaults(round_ms=100.0, case_s=30.0)
    options: argparse.Namespace = parser.parse_args()
    found = command_line.peers(options)
    settings = {"pin": not options.no_pin, "tp": 2, "vllm": str(found.root)}
    names = [name for name in options.only if name != VLLM or found.vllm is not None]
    peers_of_models = [name for name in names if name in (OURS, VLLM)] + [TORCH]
    rows = measure_models(options, peers_of_models, settings) if options.models else []
    for ranks in options.ranks if not options.models else ():
        chosen = [Team(name, __file__, ranks, settings, environment=VARIABLES.get(name)) for name in names]
        with started(chosen) as teams:
            rows += measure_all(teams, [{"ranks": ranks, "most_calls": 50}], command_line.plan(options))
    if not options.models:
        report(rows)
    if options.json:
        write_json(options.json, rows, command_line.recorded(options))


def make(name: str, settings: dict[str, Any]) -> DecodeTeam:
    return DecodeTeam(name, settings)


class DecodeTeam:
    """Ranks of a model that is divided among all of them, by tensor and by stage."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.name = name
        tp_size = settings["tp"]
        if name in (VLLM, TORCH):
            self.rank, self.size, _ = start_torch()
            rows = [list(range(start, start + tp_size)) for start in range(0, self.size, tp_size)]
            columns = [list(range(start, self.size, tp_size)) for start in range(tp_size)]
            root = Path(settings["vllm"])
        if name == TORCH:
            self.tp = decode_models.TorchGroup(self.rank, rows)
            self.pp = decode_models.TorchGroup(self.rank, columns)
        elif name == VLLM:
            self.tp = peers.vllm_group(root, self.rank, rows, queue=True)
            self.pp = peers.vllm_group(root, self.rank, columns, "pp")
        else:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.tp, self.pp = start_ours(tp_size, self.size // tp_size), ps.get_pp_group()
            use_once(self.pp)
        self.models_step: decode_models.Step | None = None

    def close(self) -> None:
        if self.name == VLLM:
            self.pp.destroy()
            self.tp.destroy()

    def prepare(self, values: dict[str, Any]) -> list[str]:
        if "model" in values:
            self.models_step = decode_models.Step(self.tp, self.pp, values)
            return [self.name] + [MATMULS] * (self.name == OURS)
        with torch.inference_mode():
            self.stage = Stage(self.tp, self.pp)
        self.tokens = torch.arange(BATCH)
        return [self.name]

    @torch.inference_mode()
    def check(self, name: str) -> str | None:
        """The last stage's logits are those of the whole model on this rank alone."""
        if self.models_step is not None:
            return None if name == MATMULS else self.models_step.check()
        tokens = torch.arange(BATCH)
        logits = self.stage.logits(tokens)
        self.stage.tell(logits)
        if logits is None:
            return None
        expected = Stage(_Alone(), _Alone()).logits(tokens)
        error = (logits.float() - expected.float()).abs().max() / expected.float().abs().max()
        return None if error < TOLERANCE else f"logits of rank {self.rank} are off by {error:.3f} of the largest"

    def run(self, name: str, calls: int) -> Timing:
        with torch.inference_mode():
            if self.models_step is not None:
                return timed(self.models_step.run_matmuls if name == MATMULS else self.models_step.run, calls)
            return timed(self._step, calls)

    def _step(self) -> None:
        self.tokens = self.stage.tell(self.stage.logits(self.tokens))


class _Alone:
    """The groups of a model that is not divided."""

    world_size, rank_in_group, is_first_rank, is_last_rank = 1, 0, True, True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x


class Stage:
    """This rank's layers, and its shard of each."""

    def __init__(self, tp: Any, pp: Any) -> None:
        self.tp, self.pp = tp, pp
        mine = LAYERS // pp.world_size
        self.layers = [_layer(number, tp) for number in range(pp.rank_in_group * mine, (pp.rank_in_group + 1) * mine)]
        self.vocabulary = VOCABULARY // tp.world_size
        self.first_token = tp.rank_in_group * self.vocabulary
        table = _random(1000, VOCABULARY, HIDDEN)
        self.embedding = table[self.first_token : self.first_token + self.vocabulary].clone()

    def logits(self, tokens: Tensor) -> Tensor | None:
        """One decode step of this stage; the last one's result is [batch, vocabulary], the others' None."""
        if self.pp.is_first_rank:
            here = (tokens >= self.first_token) & (tokens < self.first_token + self.vocabulary)
            rows = self.embedding[torch.where(here, tokens - self.first_token, 0)] * here.unsqueeze(-1)
            hidden, residual = self.tp.all_reduce(rows), torch.zeros(BATCH, HIDDEN, dtype=torch.bfloat16)
        else:
            received = self.pp.recv_tensor_dict(all_gather_group=self.tp)
            hidden, residual = received["hidden_states"], received["residual"]
        for layer in self.layers:
            hidden, residual = self._layer(layer, hidden, residual)
        if not self.pp.is_last_rank:
            self.pp.send_tensor_dict({"hidden_states": hidden, "residual": residual}, all_gather_group=self.tp)
            return None
        return self.tp.all_gather(_norm(hidden + residual) @ self.embedding.T)

    def tell(self, logits: Tensor | None) -> Tensor:
        """The next tokens, from the last stage to the first."""
        tokens = None if logits is None else {"tokens": logits.argmax(-1)}
        return self.pp.broadcast_tensor_dict(tokens, src=self.pp.world_size - 1)["tokens"]

    def _layer(self, layer: dict[str, Tensor], hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + hidden
        heads = HEADS // self.tp.world_size
        query, key, value = (_norm(residual) @ layer["qkv"]).view(BATCH, 3, heads, 1, HIDDEN // HEADS).unbind(1)
        keys, values = torch.cat([layer["keys"], key], 2), torch.cat([layer["values"], value], 2)
        attended = F.scaled_dot_product_attention(query, keys, values).reshape(BATCH, -1)
        residual = residual + self.tp.all_reduce(attended @ layer["out"])
        return self.tp.all_reduce(F.gelu(_norm(residual) @ layer["up"]) @ layer["down"]), residual


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (HIDDEN,))


def _random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.05).to(torch.bfloat16)


def _layer(number: int, tp: Any) -> dict[str, Tensor]:
    """The shard of layer `number`: heads and MLP columns of this rank."""

    def part(x: Tensor, dim: int) -> Tensor:
        return x.chunk(tp.world_size, dim)[tp.rank_in_group].contiguous()

    qkv = part(_random(number * 10, HIDDEN, 3, HIDDEN), 2).reshape(HIDDEN, -1)
    past = [part(_random(number * 10 + 4 + each, BATCH, HEADS, CONTEXT, HIDDEN // HEADS), 1) for each in range(2)]
    return {
        "qkv": qkv,
        "out": part(_random(number * 10 + 1, HIDDEN, HIDDEN), 0),
        "up": part(_random(number * 10 + 2, HIDDEN, 4 * HIDDEN), 1),
        "down": part(_random(number * 10 + 3, 4 * HIDDEN, HIDDEN), 0),
        "keys": past[0],
        "values": past[1],
    }


if __name__ == "__main__":
    main()
