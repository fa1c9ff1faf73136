"""What a call costs: alone, where no byte moves, and as the small all-reduce that an engine's layers make most.

    python benchmarks/dispatch.py                      one rank, then two, 4 and 8 KiB
    python benchmarks/dispatch.py --sizes 8192 --modes inference_mode --json found.json

*one rank*: nothing goes anywhere, so that what is left is the way through Python and torch's dispatcher. *two ranks*:
the whole call, under each of the modes in which models run: `inference_mode`, `no_grad`, `grad` (gradients are on but
the input has none), `requires_grad` (of an input that has one; forward only).
vLLM is vLLM's own coordinator, which calls its shared-memory op right away and works in place; "vLLM op by name" is the
registered op that it puts between the two on GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from measure import options as shared
from measure.report import print_rows, size_name, write_json
from measure.rounds import Row, measure_all
from measure.teams import Team, started

MODES = ("inference_mode", "no_grad", "grad", "requires_grad")
PAIRS = (
    *(("coordinator", peer) for peer in ("vLLM coordinator, in place", "vLLM op by name, in place")),
    ("coordinator, in place", "vLLM coordinator, in place"),
    ("op, in place", "vLLM coordinator, in place"),
    *(("coordinator", peer) for peer in ("torch.distributed, in place", "functional collective")),
)


def cases(options: argparse.Namespace, ranks: int) -> list[dict[str, object]]:
    sizes = options.sizes if ranks > 1 else options.sizes[:1]
    return [{"ranks": ranks, "mode": mode, "bytes": size} for mode in options.modes for size in sizes]


def report(rows: Sequence[Row]) -> None:
    for ranks in dict.fromkeys(row.case["ranks"] for row in rows):
        chosen = [row for row in rows if row.case["ranks"] == ranks]
        title = f"all_reduce of bfloat16, {ranks} rank{'s' if ranks > 1 else ', nothing moves'}"
        print_rows(title, chosen, lambda row: f"{row.case['mode']} {size_name(row.case['bytes'])}", PAIRS)


def main() -> None:
    parser = shared.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 << 10, 8 << 10])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args()
    peers = shared.peers(options)
    settings = {"pin": not options.no_pin, "vllm": str(peers.root) if peers.vllm is not None else None}
    rows = []
    for ranks in options.ranks:
        with started([Team("torch", "dispatch_torch", ranks, settings)]) as teams:
            rows += measure_all(teams, cases(options, ranks), shared.plan(options))
    report(rows)
    if options.json:
        write_json(options.json, rows, shared.recorded(options))


if __name__ == "__main__":
    main()
