"""`python -m parallel_state plan`: shows a layout without starting ranks.

The exit code is 2 for invalid options or sizes that don't fit, otherwise 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from device_communicators.base.errors import LayoutError
from parallel_state.layout.axes import AXES, PRESETS
from parallel_state.tools.arguments import STDOUT, add_json, as_json, command_parser, positive, write
from parallel_state.tools.plan.fit import changes_that_fit
from parallel_state.tools.plan.groups import Request, count_communicators, make_plan
from parallel_state.tools.plan.page import MAX_RANKS, default_kind, page
from parallel_state.tools.plan.remarks import remarks_on
from parallel_state.tools.plan.report import plan_json, plan_text, rank_text, refusal_json

BAD_SIZES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.html and options.world_size > MAX_RANKS:
        parser.error(f"--html draws at most {MAX_RANKS} ranks, but --world-size is {options.world_size}; drop --html")
    if options.rank is not None and not 0 <= options.rank < options.world_size:
        parser.error(f"--rank must be in 0 … {options.world_size - 1}, but is {options.rank}")
    sizes = {axis.name: getattr(options, axis.name) for axis in AXES if axis.size_parameter}
    given = {name: size for name, size in sizes.items() if size is not None}
    request = Request(options.world_size, given, options.order, options.gpus_per_node)
    try:
        plan = make_plan(request)
    except LayoutError as error:
        return _refuse(parser, request, error, options.json)
    remarks, communicators = remarks_on(plan), count_communicators(plan)
    if options.json is not None:
        write(parser, options.json, as_json(plan_json(plan, remarks, communicators, options.rank)))
    if options.html is not None:
        write(parser, options.html, page(plan, default_kind(plan), remarks))
    if STDOUT not in (options.json, options.html):
        print(plan_text(plan, remarks, communicators) if options.rank is None else rank_text(plan, options.rank))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "plan", "--world-size N [options]",
        "Shows the groups of a layout, their nodes and their cost. Starts no ranks and needs no GPU.",
        epilog="Default sizes are 1, except --dp, which takes the remaining ranks, and --etp, which equals --tp. "
        "A size of -1 takes the remaining ranks instead of --dp.",
    )  # fmt: skip
    parser.add_argument("--world-size", type=positive, required=True, metavar="N", help="number of ranks, one per GPU")
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="default: 8")
    presets = "; ".join(f"{name} ({preset.order})" for name, preset in PRESETS.items())
    parser.add_argument("--order", default="megatron",
                        help=f"axes from neighbouring ranks to distant ones, joined by '-', or a "
                        f"preset: {presets}. Default: megatron")  # fmt: skip
    add_sizes(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--rank", type=int, metavar="N", help="print the groups of one rank instead of the table")
    add_json(output)
    output.add_argument("--html", metavar="FILE", help="write an interactive page with a picture of all nodes and GPUs")
    return parser


def add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")
    for axis in AXES:
        if axis.size_parameter:
            short, long = axis.name.replace("_", "-"), axis.size_parameter.replace("_", "-")
            sizes.add_argument(f"--{short}", f"--{long}", dest=axis.name, type=int, metavar="N", help=axis.about)


def _refuse(parser: argparse.ArgumentParser, request: Request, error: LayoutError, json_path: str | None) -> int:
    changes = changes_that_fit(request)
    if json_path is not None:
        write(parser, json_path, as_json(refusal_json(error, changes)))
    print(f"error: {error}", file=sys.stderr)
    for index, change in enumerate(changes):
        print(f"{'or' if index else 'smallest change'}: {change}", file=sys.stderr)
    if not changes:
        print("no change of one or two sizes makes the layout fit", file=sys.stderr)
    return BAD_SIZES
