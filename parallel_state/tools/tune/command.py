"""`python -m parallel_state tune`: measures which kernel is fastest for which size on this machine, and stores the
result.

    python -m parallel_state tune                            starts 2, 4, 6 and 8 ranks, if there are as many GPUs
    torchrun --nproc-per-node 8 -m parallel_state tune       in the ranks that torchrun started

Kernels are checked, then timed in turns, on GPUs as replays of a CUDA graph. The choice is then tested.

The choice is written to the user's table, as a row for this hardware and software. PARALLEL_STATE_PEER_MEMORY=auto and
PARALLEL_STATE_NCCL=auto read that table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import parallel_state as ps
from parallel_state.startup import environment
from parallel_state.tools.arguments import command_parser, positive, require_writable
from parallel_state.tools.tune import PROOF_CALLS, SIZES

RUN_S = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("tune", "[options]", __doc__)
    parser.add_argument("--ranks", type=positive, nargs="+", help="default: 2, 4, 6 and 8, up to the number of GPUs")
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, help="bytes per rank")
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--proof-calls", type=positive, default=PROOF_CALLS, help="number of checked calls")
    parser.add_argument("--out", type=Path, help="file to write instead of the user's rows")
    options = parser.parse_args(arguments)
    require_writable(parser, options.out)
    import torch  # slow, and `--help` doesn't need it

    from device_communicators.peer.thresholds import user_path
    from parallel_state.tools.tune.tuning import Plan, keep, tune_rank

    options.plan = Plan(options.rounds, sizes=tuple(options.sizes), proof_calls=options.proof_calls)
    path = options.out or user_path()
    gpus = torch.cuda.device_count()
    if gpus == 0:
        print("torch finds no CUDA device: there is nothing to measure here", file=sys.stderr)
        return 2
    if environment.detect(rendezvous=False).world_size > 1:
        keep(tune_rank(options), path)
        return 0
    code = 0
    for ranks in options.ranks or [each for each in (2, 4, 6, 8) if each <= gpus] or [2]:
        try:
            keep(ps.launch(tune_rank, ranks, args=(options,), timeout=RUN_S)[0], path)
        except ps.LaunchError as error:
            print(f"{ranks} ranks: {error}", file=sys.stderr)
            code = 1
    return code
