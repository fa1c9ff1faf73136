"""Part A of `init_scaling`: real ranks start, make their groups, and check the first all-reduce over each.

Ours beside what Megatron and vLLM do, one `new_group` on every rank for every list of ranks, and beside torch's
`init_device_mesh`: the same layout, the same kinds of group, the same first all-reduces.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from counting_store import CountingStore, calls_counted
from forked_ranks import Result, run_ranks
from torch.distributed.device_mesh import init_device_mesh

import parallel_state as ps
from parallel_state import resolve_layout
from parallel_state.groups.division import made_at_start
from parallel_state.layout.axes import AXES
from parallel_state.layout.ranks import Layout
from parallel_state.startup import rendezvous

VARIANTS = ("ours", "new_group", "device_mesh", "ours, all kinds", "new_group, all kinds")
STEPS = ("init", "groups", "collectives")
MEGATRON_KINDS = (
    "dp_cp", "dp", "cp", "model", "tp", "pp", "embedding", "position_embedding", "tp_dp_cp", "tp_dp", "tp_cp", "ep",
    "etp", "tp_ep", "tp_ep_pp", "edp",
)  # fmt: skip
"""All that its initialize_model_parallel makes, in its order; it makes three of them a second time for gloo."""

Mark = Callable[[str], None]


class Division(NamedTuple):
    """A layout of real ranks."""

    name: str
    world_size: int
    sizes: dict[str, int]

    @property
    def layout(self) -> Layout:
        return resolve_layout(self.world_size, self.sizes, ranks_per_node=self.world_size)

    @property
    def arguments(self) -> dict[str, int]:
        return {axis.size_parameter: self.sizes[axis.name] for axis in AXES if axis.name in self.sizes}


def divisions(world_size: int) -> list[Division]:
    """The layouts of this many ranks: dense from 2 on, with context and expert axes from 8 on."""
    pp = 2 if world_size >= 4 else 1
    found = [Division("dense", world_size, {"tp": 2, "pp": pp})]
    if world_size >= 8:
        ep = 2 if world_size == 8 else 4
        found.append(Division("experts", world_size, {"tp": 2, "pp": 2, "cp": 2, "ep": ep}))
    return found


class Trial(NamedTuple):
    """What is measured once."""

    division: Division
    variant: str
    lazy: bool
    """Whether gloo connects two ranks at their first message (TORCH_GLOO_LAZY_INIT=1) instead of all at creation."""


class Report(NamedTuple):
    """What a rank tells beside its times."""

    steps: dict[str, dict[str, int]]
    """After each step: operations on the store by kind, where they are counted, `groups` it is in, `calls` for them."""
    modules: list[str]
    """What was imported meanwhile."""


def preload(deadline: float) -> list[str]:
    """Imports what any variant imports while it starts, which it then doesn't do in each rank; returns the names.

    In an engine, it is there by then or is imported once; in forks on few cores, it would be most of the time.
    """
    division = Division("dense", 2, {"tp": 2})
    names: dict[str, None] = {}
    for variant in VARIANTS:
        report = run_trial(Trial(division, variant, False), deadline)[0].value
        names.update(dict.fromkeys(report.modules))
    for name in names:
        importlib.import_module(name)
    return list(names)


def run_trial(trial: Trial, deadline: float, *, count: bool = False) -> list[Result]:
    """Each rank's result; with `count`, where times mean nothing, their value has operations on the store too."""
    lists = _lists(trial.division, trial.variant)  # before the start: Megatron's own arithmetic isn't what is compared
    function = partial(_rank, trial, lists, count)
    return run_ranks(trial.division.world_size, function, deadline)


def _lists(division: Division, variant: str) -> list[list[list[int]]]:
    """Of each kind of group the lists of all its groups."""
    layout = division.layout
    kinds = MEGATRON_KINDS if variant.endswith("all kinds") else made_at_start(layout, division.sizes)
    return [layout.groups(kind) for kind in kinds]


def _rank(
    trial: Trial, lists: Sequence[Sequence[Sequence[int]]], count: bool, rank: int, port: int, mark: Mark
) -> Report:
    loaded = set(sys.modules)
    size = str(trial.division.world_size)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCH_GLOO_LAZY_INIT=str(int(trial.lazy)),
    )
    stores = _count_store_operations() if count else []
    steps: dict[str, dict[str, int]] = {}

    with calls_counted() as calls:

        def ended(step: str) -> None:
            mark(step)
            operations: Counter[str] = sum((store.counts for store in stores), Counter())
            steps[step] = {**operations, "groups": calls["member of"], "calls": calls["make"]}

        if trial.variant.startswith("ours"):
            _ours(trial, ended)
        elif trial.variant == "device_mesh":
            _device_mesh(trial, ended)
        else:
            _plain(lists, ended)
    return Report(steps, sorted(set(sys.modules) - loaded))


def _ours(trial: Trial, ended: Mark) -> None:
    ps.init_distributed_environment(backend="gloo")
    ended("init")
    ps.initialize_model_parallel(**trial.division.arguments, eager=trial.variant.endswith("all kinds"))
    ended("groups")
    for group in (ps.get_world_group(), *ps.get_parallel_groups().groups.values()):
        total = group.all_reduce(torch.tensor([group.rank]))
        _check(total, group.ranks)
    ended("collectives")


def _plain(lists: Sequence[Sequence[Sequence[int]]], ended: Mark) -> None:
    dist.init_process_group("gloo")
    ended("init")
    rank = dist.get_rank()
    mine: list[tuple[Any, Sequence[int]]] = [(dist.group.WORLD, range(dist.get_world_size()))]
    for kind in lists:
        for ranks in kind:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                mine.append((group, ranks))
    ended("groups")
    _reduce_each(mine)
    ended("collectives")


def _device_mesh(trial: Trial, ended: Mark) -> None:
    """One mesh of the dense layers, and one of the experts', as torchtitan has them; axes of one rank left out."""
    dist.init_process_group("gloo")
    ended("init")
    layout = trial.division.layout
    mine: list[tuple[Any, Sequence[int]]] = [(dist.group.WORLD, range(dist.get_world_size()))]
    for kind in ("tp", "ep") if "ep" in trial.division.sizes else ("tp",):
        axes = [(name, size) for name, size in reversed(layout.grid_of(kind).axes) if size > 1]
        mesh = init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
        mine += [(mesh.get_group(name), dist.get_process_group_ranks(mesh.get_group(name))) for name, _ in axes]
    ended("groups")
    _reduce_each(mine)
    ended("collectives")


def _reduce_each(groups: Sequence[tuple[Any, Sequence[int]]]) -> None:
    for group, ranks in groups:
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=group)
        _check(total, ranks)


def _check(total: torch.Tensor, ranks: Sequence[int]) -> None:
    if total.tolist() != [sum(ranks)]:
        raise RuntimeError(f"the sum of the ranks {list(ranks)} must be {sum(ranks)}, but is {total.tolist()}")


def _count_store_operations() -> list[CountingStore]:
    """From now on each connection that this process makes to a store is counted, in the list that is returned."""
    of_torch = sys.modules["torch.distributed.rendezvous"]  # a function has its name
    stores: list[CountingStore] = []
    for module, name in ((rendezvous, "_tcp_store"), (of_torch, "_create_c10d_store")):
        setattr(module, name, _counting(getattr(module, name), stores))
    return stores


def _counting(make: Callable[..., dist.Store], stores: list[CountingStore]) -> Callable[..., CountingStore]:
    def counting(*args: Any, **named: Any) -> CountingStore:
        stores.append(CountingStore(make(*args, **named)))
        return stores[-1]

    return counting
