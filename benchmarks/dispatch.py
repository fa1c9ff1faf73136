"""Times the overhead of a call: in a group of one rank, and for a small all_reduce of two ranks.

    python benchmarks/dispatch.py                      one rank, then two, 4 and 8 KiB

One rank sends nothing, so its time is that of Python and torch's dispatcher. In the mode `grad` the input requires no
gradient, in `requires_grad` it does (forward only). "vLLM coordinator" calls its shared-memory op directly and works in
place. "vLLM op by name" is the op that vLLM's coordinator calls on GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import command_line
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import peers
from harness.collectives import VLLM, load, ours_by_op, start_ours, start_torch
from harness.rounds import Row, measure_all
from harness.teams import Team, started
from harness.timing import timed
from torch import Tensor

from parallel_state.tools.bench.report import size_name, write_json
from parallel_state.tools.bench.rounds import OWN, Timing

__all__ = ["load", "make"]

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
        command_line.print_rows(title, chosen, lambda row: f"{row.case['mode']} {size_name(row.case['bytes'])}", PAIRS)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 << 10, 8 << 10])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args()
    found = command_line.peers(options)
    settings = {"pin": not options.no_pin, "vllm": str(found.root)}
    names = [OWN, VLLM] if found.vllm is not None else [OWN]
    rows = []
    for ranks in options.ranks:
        with started([Team(name, __file__, ranks, settings) for name in names]) as teams:
            rows += measure_all(teams, cases(options, ranks), command_line.plan(options))
    report(rows)
    if options.json:
        write_json(options.json, rows, command_line.recorded(options))


_LIBRARIES: list[torch.library.Library] = []
_GROUPS: dict[str, Any] = {}


def make(name: str, settings: dict[str, Any]) -> DispatchTeam:
    return VllmTeam(settings) if name == VLLM else OwnTeam(settings)


class DispatchTeam:
    rank: int
    size: int

    def ways(self) -> dict[str, Callable[[Tensor], Any]]:
        raise NotImplementedError

    def prepare(self, values: dict[str, Any]) -> list[str]:
        self.mode = values["mode"]
        count = values["bytes"] // 2
        with _modes(self.mode):
            self.x = torch.zeros(count, dtype=torch.bfloat16)
        if self.mode == "requires_grad":
            self.x.requires_grad_()
        self.calls = self.ways()
        if self.mode == "requires_grad":
            self.calls = {name: call for name, call in self.calls.items() if "in place" not in name}
        return list(self.calls)

    def check(self, name: str) -> str | None:
        with _modes(self.mode):
            x = torch.full_like(self.x, self.rank + 1.0)
            if self.mode == "requires_grad":
                x.requires_grad_()
            try:
                y = self.calls[name](x)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            expected = torch.full_like(self.x, sum(range(1, self.size + 1)))
            return None if y is not None and torch.equal(y, expected) else f"{name}: wrong on rank {self.rank}"

    def run(self, name: str, calls: int) -> Timing:
        call, x = self.calls[name], self.x
        with _modes(self.mode):
            return timed(lambda: call(x), calls)


class OwnTeam(DispatchTeam):
    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.group = start_ours()
        if not dist.is_initialized():  # one rank needs no default group, but torch.distributed does
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size == 1:
            _define_noops()

    def ways(self) -> dict[str, Callable[[Tensor], Any]]:
        world = dist.group.WORLD

        def through_torch(x: Tensor) -> Tensor:
            dist.all_reduce(x)
            return x

        def through_functional(x: Tensor) -> Tensor:
            return functional.wait_tensor(functional.all_reduce(x, "sum", world))

        found = {"coordinator": self.group.all_reduce, "coordinator, in place": self.group.all_reduce_}
        if self.size > 1:
            found["op"] = ours_by_op(self.group, "all_reduce")
            found["op, in place"] = ours_by_op(self.group, "all_reduce_")
        found |= {"torch.distributed, in place": through_torch, "functional collective": through_functional}
        return found | _NOOPS


class VllmTeam(DispatchTeam):
    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank, self.size, _ = start_torch()
        self.group = peers.vllm_group(Path(settings["vllm"]), self.rank, [list(range(self.size))])

    def ways(self) -> dict[str, Callable[[Tensor], Any]]:
        name = self.group.unique_name
        found = {"vLLM coordinator, in place": self.group.all_reduce}
        if self.size > 1:
            op = torch.ops.vllm.all_reduce
            found["vLLM op by name, in place"] = lambda x: op(x, group_name=name)
        return found


def _modes(mode: str) -> contextlib.AbstractContextManager[Any]:
    return {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}.get(mode, torch.enable_grad)()


def _plain(x: Tensor) -> Tensor:
    return x


def _noop_in_place(x: Tensor, group: str) -> None:
    if group not in _GROUPS:
        raise KeyError(group)


def _noop(x: Tensor, group: str) -> Tensor:
    if group not in _GROUPS:
        raise KeyError(group)
    return torch.empty_like(x).copy_(x)


_NOOPS: dict[str, Callable[[Tensor], Any]] = {}


def _define_noops() -> None:
    _GROUPS["tp:0"] = object()
    library = torch.library.Library("dispatch_benchmark", "DEF")
    _LIBRARIES.append(library)
    library.define("noop_(Tensor(a!) x, str group) -> ()")
    library.impl("noop_", _noop_in_place, "CPU")
    library.define("noop(Tensor x, str group) -> Tensor")
    library.impl("noop", _noop, "CPU")
    decorated = torch.library.custom_op("dispatch_benchmark::decorated", _noop, mutates_args=())
    namespace = torch.ops.dispatch_benchmark

    def in_place(x: Tensor) -> Tensor:
        namespace.noop_(x, "tp:0")
        return x

    _NOOPS["plain function"] = _plain
    _NOOPS["no-op in Python, in place"] = in_place
    _NOOPS["no-op in Python, copies"] = lambda x: namespace.noop(x, "tp:0")
    _NOOPS["no-op by custom_op, copies"] = lambda x: decorated(x, "tp:0")
    _NOOPS["no-op of torch (aten.clone)"] = torch.ops.aten.clone
    _NOOPS["no-op of torch, in place (aten.squeeze_)"] = torch.ops.aten.squeeze_


if __name__ == "__main__":
    main()
