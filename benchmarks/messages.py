"""Compares objects and tensor dicts within one host: this library, gloo, vLLM's queue, zmq.

    python benchmarks/messages.py                        2 and 4 ranks: 1 and 3 readers

A sample is the time from the sender's call to the last reader's return. All readers wait before the sender's call
begins. The other libraries are optional (`python benchmarks/harness/peers.py setup`).

`object` is a dict as schedulers send it; `many` is 1 MB of small values, `blob` 1 MB of bytes; in `idle` the sender
sleeps for 5 ms before each message. `broadcast` sends a dict of ten tensors and some numbers. `pipeline` sends two
tensors to another rank, as in a decode step and a prefill. `views` receives views of the sender's memory, not copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import command_line
from harness.collectives import VLLM
from harness.messages import COPY, KINDS, OBJECTS, SPEC_VIEWS, TOKENS, VIEWS, WITH_SPEC, ZMQ
from harness.peers import SIZES_OF_VLLM
from harness.rounds import Row, measure_all
from harness.teams import Team, started

from parallel_state.tools.bench.report import write_json
from parallel_state.tools.bench.rounds import GLOO, OWN

PEERS = (GLOO, VLLM, ZMQ, COPY)
PAIRS = (
    (WITH_SPEC, OWN),
    (VIEWS, OWN),
    (SPEC_VIEWS, WITH_SPEC),
    *((ours, peer) for ours in (OWN, WITH_SPEC, VIEWS, SPEC_VIEWS) for peer in PEERS),
)
MODULE = "harness.messages"
MOST_CALLS, MOST_IDLE_CALLS = 60, 10


def cases(options: argparse.Namespace, readers: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    common = {"readers": readers, "idle_ms": 0, "most_calls": MOST_CALLS}
    if "object" in options.kinds:
        found += [{**common, "kind": "object", "what": what} for what in options.objects]
        idle = {"idle_ms": 5, "most_calls": MOST_IDLE_CALLS}
        found += [{**common, **idle, "kind": "object", "what": what} for what in options.objects[:1]]
    for kind in ("broadcast", "pipeline"):
        if kind in options.kinds and (kind == "broadcast" or readers == 1):
            found += [{**common, "kind": kind, "what": what} for what in TOKENS]
    return found


def column(row: Row) -> str:
    return f"{row.case['what']}{', idle' if row.case['idle_ms'] else ''}"


def report(rows: Sequence[Row]) -> None:
    for key in dict.fromkeys((row.case["kind"], row.case["readers"]) for row in rows):
        kind, readers = key
        chosen = [row for row in rows if (row.case["kind"], row.case["readers"]) == key]
        command_line.print_rows(f"{kind}, {readers} reader{'s' if readers > 1 else ''}", chosen, column, PAIRS)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--objects", nargs="+", choices=OBJECTS, default=OBJECTS)
    options = parser.parse_args()
    peers = command_line.peers(options)
    settings = {
        "pin": not options.no_pin,
        "vllm": str(peers.root),
        "site": str(peers.site),
    }
    names = [OWN, GLOO] + [VLLM] * (peers.vllm is not None) + [ZMQ] * (peers.site is not None)
    rows = []
    for readers in options.readers:
        chosen = [name for name in names if name != VLLM or readers + 1 in SIZES_OF_VLLM]
        with started([Team(name, MODULE, readers + 1, settings) for name in chosen]) as teams:
            rows += measure_all(teams, cases(options, readers), command_line.plan(options))
    report(rows)
    if options.json:
        write_json(options.json, rows, command_line.recorded(options))


if __name__ == "__main__":
    main()
