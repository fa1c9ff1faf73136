"""Part B of `init_scaling`: what the start of 1,024 and more ranks costs one of them, counted, and how long it takes.

One process plays rank r of n on torch's `fake` backend: the groups are made, but nothing is sent. Of the incumbents it
runs Megatron-core's own `initialize_model_parallel`, as it is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist
from counting_store import Cost, StoreOfOneRank, calls_counted, cost_of_start
from forked_ranks import run_ranks

import parallel_state as ps
from parallel_state import resolve_layout


class Case(NamedTuple):
    """A layout of a number of ranks."""

    world_size: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int

    @property
    def title(self) -> str:
        return " · ".join(f"{name} {size}" for name, size in self._asdict().items() if name != "world_size")

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }


GROWING = tuple(Case(world_size, tp=8, pp=8, cp=2, ep=8, etp=8) for world_size in (1024, 8192, 16384))
CITED = (Case(1024, tp=8, pp=16, cp=1, ep=8, etp=1), Case(8192, tp=8, pp=16, cp=1, ep=8, etp=8))
"""Publicly known: 3,569 and 16,617 calls of `create_group` on every rank, each of which is in 8 and 12 rank sets."""


def in_one_process(function: Callable[[], Any], deadline: float) -> Any:
    """The function's result, from a process of its own."""
    return run_ranks(1, lambda rank, port, mark: function(), deadline)[0].value


def counts_of(case: Case, deadline: float) -> list[dict[str, Any]]:
    """Rows of ours and of Megatron's, of the first, the middle and the last rank."""
    rows = []
    for rank in sorted({0, case.world_size // 2, case.world_size - 1}):
        costs: dict[str, Callable[[], Any]] = {
            "ours": partial(cost_of_start, rank, case.world_size, case.sizes, eager=False),
            "ours, all kinds": partial(cost_of_start, rank, case.world_size, case.sizes, eager=True),
        }
        if megatron_file() is not None:
            costs["megatron-core"] = partial(cost_of_megatron, rank, case)
        for variant, measure in costs.items():
            cost: Cost = in_one_process(measure, deadline)
            rows.append({"variant": variant, **case._asdict(), "rank": rank, "cost": cost._asdict()})
    return rows


def check_constant(rows: Sequence[Mapping[str, Any]]) -> None:
    """RuntimeError unless a rank's groups, calls and store operations are those of the smallest world in every one."""
    first: dict[tuple[str, str], Any] = {}
    for row in rows:
        if row["variant"].startswith("ours"):
            place = "middle" if 0 < row["rank"] < row["world_size"] - 1 else "end"  # the ends have embedding groups
            found = first.setdefault((row["variant"], place), row)
            if found["cost"] != row["cost"]:
                raise RuntimeError(
                    f"what a rank does must not grow with the world, but with {row['variant']!r} it was "
                    f"{found['cost']} on rank {found['rank']} of {found['world_size']} and {row['cost']} on rank "
                    f"{row['rank']} of {row['world_size']}"
                )


def times_of(case: Case, repetitions: int, deadline: float) -> list[dict[str, Any]]:
    """Milliseconds of one rank's initialize in a fresh process: a sample per repetition, interleaved."""
    variants: dict[str, Callable[[], float]] = {
        "ours": partial(_time_ours, case, eager=False),
        "ours, all kinds": partial(_time_ours, case, eager=True),
        "ours, layout only": partial(_time_layout, case),
    }
    if megatron_file() is not None:
        variants["megatron-core"] = partial(_time_megatron, case)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, measure in variants.items():
            samples[name].append(round(in_one_process(measure, deadline), 3))
    return [{"variant": name, **case._asdict(), "ms": times} for name, times in samples.items()]


def _time_ours(case: Case, *, eager: bool) -> float:
    store = _join_fake_world(case.world_size // 2, case.world_size)
    ps.init_world_group(list(range(case.world_size)), 0, "fake")
    started = time.perf_counter()
    ps.initialize_model_parallel(**case.sizes, backend="fake", eager=eager)
    ended = time.perf_counter()
    del store  # until here: torch keeps only the half of it that is in C++
    return (ended - started) * 1000


def _time_layout(case: Case) -> float:
    sizes = {name: getattr(case, name) for name in ("tp", "pp", "cp", "ep", "etp")}
    started = time.perf_counter()
    layout = resolve_layout(case.world_size, sizes)
    for name in layout.names:
        layout.group_of(case.world_size // 2, name)
    return (time.perf_counter() - started) * 1000


def _time_megatron(case: Case) -> float:
    _join_fake_world(case.world_size // 2, case.world_size)
    megatron = load_megatron()
    started = time.perf_counter()
    megatron.initialize_model_parallel(**case.sizes)
    return (time.perf_counter() - started) * 1000


def _join_fake_world(rank: int, world_size: int) -> StoreOfOneRank:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    store = StoreOfOneRank(rank, world_size)
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    return store


def megatron_file() -> Path | None:
    """megatron-core's parallel_state, where it is installed."""
    spec = importlib.util.find_spec("megatron")  # a namespace: finding it imports nothing
    paths = [Path(place, "core", "parallel_state.py") for place in (spec and spec.submodule_search_locations) or ()]
    return next((path for path in paths if path.exists()), None)


def load_megatron() -> Any:
    """Its `parallel_state` alone: `megatron.core` would import dozens of modules that have nothing to do with it.

    Its gloo groups, which would wait for ranks that don't exist, are asked of the default backend instead.
    """
    path = megatron_file()
    if path is None:
        raise ModuleNotFoundError("megatron-core isn't installed; pip install --no-deps megatron-core==0.16.1")
    utils = ModuleType("megatron_alone.utils")
    vars(utils).update(
        GlobalMemoryBuffer=object, GlobalSymmetricMemoryBuffer=object, is_torch_min_version=lambda _: True
    )
    package = ModuleType("megatron_alone")
    package.__path__ = []
    sys.modules.update({"megatron_alone": package, "megatron_alone.utils": utils})
    spec = importlib.util.spec_from_file_location("megatron_alone.parallel_state", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{path.name} of megatron-core can't be loaded")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    create_group = module.create_group
    module.create_group = lambda *args, **named: create_group(*args, **{**named, "backend": None})
    return module


def cost_of_megatron(rank: int, case: Case) -> Cost:
    """Of its initialize_model_parallel with its defaults: gloo groups too for its three kinds of data-parallel ones."""
    store = _join_fake_world(rank, case.world_size)
    megatron = load_megatron()
    create_group = megatron.create_group
    rank_sets = set()
    calls_of_create_group = 0

    def counted(ranks: list[int], *args: Any, **named: Any) -> Any:
        nonlocal calls_of_create_group
        calls_of_create_group += 1
        if rank in ranks:
            rank_sets.add(tuple(ranks))
        return create_group(ranks, *args, **named)

    megatron.create_group = counted
    with calls_counted() as calls:
        megatron.initialize_model_parallel(**case.sizes)
    dist.destroy_process_group()
    if calls["make"] != calls_of_create_group:
        raise RuntimeError(f"{calls_of_create_group} calls of create_group came to {calls['make']} of torch's")
    return Cost(calls["member of"], calls["make"], dict(store.counts), len(rank_sets))
