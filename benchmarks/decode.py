"""A decode loop with tensor and pipeline parallelism on more ranks than cores: what waiting costs.

    python benchmarks/decode.py                  4 ranks: TP 2 × PP 2
    python benchmarks/decode.py --ranks 2        TP 2

A small transformer with random weights (26 M parameters with its shards) makes one token for each of four sequences a
step. The same model over this library as it is, over this library with waits that only spin, over torch.distributed
alone (no shared memory), and over vLLM's own coordinators where its wheel is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from measure import options as shared
from measure.report import p50, print_rows, print_table, write_json
from measure.rounds import Row, measure_all
from measure.teams import Team, started

OURS, SPINNING, GLOO, VLLM = "parallel_state", "parallel_state, spinning", "parallel_state over gloo", "vLLM"
BATCH = 4
VARIABLES = {
    SPINNING: {"PARALLEL_STATE_SPIN_US": "1000000"},
    GLOO: {"PARALLEL_STATE_SHARED_MEMORY": "off"},
}


def report(rows: Sequence[Row]) -> None:
    pairs = [(OURS, peer) for peer in (SPINNING, GLOO, VLLM)]
    print_rows("decode step", rows, lambda row: f"{row.case['ranks']} ranks", pairs)
    columns = [f"{row.case['ranks']} ranks" for row in rows]
    names = dict.fromkeys(name for row in rows for name in row.us)
    lines = [(name, [BATCH * 1e6 / p50(row.us[name]) if row.us.get(name) else None for row in rows]) for name in names]
    print_table("tokens/s", columns, lines)


def main() -> None:
    parser = shared.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="2: TP 2; 4: TP 2 × PP 2")
    parser.add_argument("--only", nargs="+", choices=(OURS, SPINNING, GLOO, VLLM), default=(OURS, SPINNING, GLOO, VLLM))
    parser.set_defaults(round_ms=100.0, case_s=30.0)
    options: argparse.Namespace = parser.parse_args()
    peers = shared.peers(options)
    settings = {"pin": not options.no_pin, "tp": 2, "vllm": str(peers.root)}
    names = [name for name in options.only if name != VLLM or peers.vllm is not None]
    rows = []
    for ranks in options.ranks:
        chosen = [Team(name, "decode_torch", ranks, settings, environment=VARIABLES.get(name)) for name in names]
        with started(chosen) as teams:
            rows += measure_all(teams, [{"ranks": ranks, "most_calls": 50}], shared.plan(options))
    report(rows)
    if options.json:
        write_json(options.json, rows, shared.recorded(options))


if __name__ == "__main__":
    main()
