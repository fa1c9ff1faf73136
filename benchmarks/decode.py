"""Times a decode step with tensor and pipeline parallelism, and the share of its collectives.

    python benchmarks/decode.py                  a model of 26 M parameters, TP 2 × PP 2, a batch of 4
    python benchmarks/decode.py --models 0.5B 7B --layouts TP2 TP4 TP2xPP2 --batches 1 8 64

Compares this library (by default, with spinning waits, and without shared memory), torch.distributed, and vLLM's
coordinators if vLLM is installed. The model is sharded as in engines, with simulated matmuls (see decode_models.py).
Prints the time of a step and its share outside matmuls.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import decode_models
import torch
from harness import peers
from harness.collectives import start_ours, start_torch, use_once
from harness.rounds import Row, measure_all
from harness.teams import Team, started
from harness.timing import timed

import parallel_state as ps
from parallel_state.tools.bench.report import p50, write_json
from parallel_state.tools.bench.rounds import Timing

OURS, SPINNING, GLOO, VLLM = "parallel_state", "parallel_state, spinning", "parallel_state over gloo", "vLLM"
TORCH, MATMULS = "gloo", "(matmuls alone)"
VARIABLES = {
    SPINNING: {"PARALLEL_STATE_SPIN_US": "1000000"},
    GLOO: {"PARALLEL_STATE_SHARED_MEMORY": "off"},
}


def report(rows: Sequence[Row]) -> None:
    pairs = [(OURS, peer) for peer in (SPINNING, GLOO, TORCH, VLLM)]

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
    if not row.us.get(name) or not row.us.get(MATMULS):
        return None
    return max(0.0, 100 * (1 - p50(row.us[MATMULS]) / p50(row.us[name])))


def main() -> None:
    every = (OURS, SPINNING, GLOO, TORCH, VLLM)
    parser = command_line.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--models", nargs="+", choices=decode_models.MODELS, default=["26M"])
    parser.add_argument("--layouts", nargs="+", choices=decode_models.LAYOUTS, default=["TP2xPP2"])
    parser.add_argument("--batches", type=int, nargs="+", default=[4])
    parser.set_defaults(round_ms=100.0, case_s=30.0)
    options: argparse.Namespace = parser.parse_args()
    found = command_line.peers(options)
    names = [name for name in options.only if name != VLLM or found.vllm is not None]
    cases: dict[str, list[dict[str, object]]] = {layout: [] for layout in options.layouts}
    for layout, name, batch in itertools.product(options.layouts, options.models, options.batches):
        tp = decode_models.LAYOUTS[layout][0]
        matmuls_s = decode_models.measure_matmuls(decode_models.MODELS[name], tp, batch)
        cases[layout].append({**decode_models.case_of(name, layout, batch, matmuls_s), "most_calls": 20})
    rows, left_out = [], {}
    for layout, chosen in cases.items():
        tp, pp = decode_models.LAYOUTS[layout]
        settings = {"pin": not options.no_pin, "tp": tp, "vllm": str(found.root)}
        made = [Team(name, __file__, tp * pp, settings, environment=VARIABLES.get(name)) for name in names]
        with started(made, left_out) as teams:
            rows += measure_all(teams, chosen, command_line.plan(options))
    report(rows)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    if options.json:
        write_json(options.json, rows, command_line.recorded(options))


def make(name: str, settings: dict[str, Any]) -> DecodeTeam:
    return DecodeTeam(name, settings)


class DecodeTeam:
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

    def close(self) -> None:
        if self.name == VLLM:
            self.pp.destroy()
            self.tp.destroy()

    def prepare(self, values: dict[str, Any]) -> list[str]:
        self.step = decode_models.Step(self.tp, self.pp, values)
        return [self.name] + [MATMULS] * (self.name == OURS)

    @torch.inference_mode()
    def check(self, name: str) -> str | None:
        return None if name == MATMULS else self.step.check()

    @torch.inference_mode()
    def run(self, name: str, calls: int) -> Timing:
        return timed(self.step.run_matmuls if name == MATMULS else self.step.run, calls)


if __name__ == "__main__":
    main()
