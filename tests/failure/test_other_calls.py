"""Rows 9 and 40 of docs/failures.md: one rank makes another collective, or the same one with other arguments.
All ranks raise and name both methods. Each pair has a sub-group, because a failed one is unusable. A rank
that only sends may succeed; its next call fails with both names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import parallel_state as ps
from parallel_state import TensorDictSpec
from tests.contract.attempts import Outcome, attempt, environment
from tests.extent import LONG
from tests.failure.ranks import Ranks
from tests.failure.worlds import ROUTES, settings_of, world_over

SIZE, ODD = 4, 2
TIMEOUT_S = 3.0
BATCH = 40
DEADLINE_S = 300.0
Call = Callable[[ps.GroupCoordinator], object]


def _x(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def _scatter(group: ps.GroupCoordinator, src: int = 0, dim: int = 0, told: bool = True) -> object:
    x = _x(group.world_size, group.world_size) if group.rank_in_group == src else None
    mine = [1, group.world_size] if dim == 0 else [group.world_size, 1]
    return group.scatter(x, src, dim, size=mine, dtype=torch.float32) if told else group.scatter(x, src, dim)


def _scatter_of(group: ps.GroupCoordinator, size: list[int]) -> object:
    x = _x(group.world_size * size[0], *size[1:]) if group.rank_in_group == 0 else None
    return group.scatter(x, 0, size=size, dtype=torch.float32)


def _gatherv(group: ps.GroupCoordinator, sizes: list[int]) -> object:
    return group.all_gatherv(_x(sizes[group.rank_in_group]), 0, sizes)


SPEC = TensorDictSpec.of({"x": _x(4)})
METHODS: dict[str, Call] = {
    "all_reduce": lambda g: g.all_reduce(_x(4)),
    "all_reduce_": lambda g: g.all_reduce_(_x(4)),
    "all_reduce_async": lambda g: g.all_reduce_async(_x(4)).wait(),
    "all_reduce_add_rms_norm": lambda g: g.all_reduce_add_rms_norm(_x(1, 4), _x(1, 4), _x(4)),
    "all_reduce_add_rms_norm_static_fp8_quant": lambda g: g.all_reduce_add_rms_norm_static_fp8_quant(
        _x(1, 4), _x(1, 4), _x(4), _x(1)
    ),
    "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant": (
        lambda g: g.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(_x(1, 4), _x(1, 4), _x(4))
    ),
    "all_gather": lambda g: g.all_gather(_x(4), 0),
    "all_gather_to_list": lambda g: g.all_gather_to_list(_x(4)),
    "all_gather_async": lambda g: g.all_gather_async(_x(4), 0).wait(),
    "all_gatherv": lambda g: g.all_gatherv(_x(4), 0, [4] * g.world_size),
    "reduce_scatter": lambda g: g.reduce_scatter(_x(16), 0),
    "reduce_scatter_async": lambda g: g.reduce_scatter_async(_x(16), 0).wait(),
    "reduce_scatterv": lambda g: g.reduce_scatterv(_x(4 * g.world_size), 0, [4] * g.world_size),
    "gather": lambda g: g.gather(_x(4), 0, 0),
    "scatter": _scatter,
    "all_to_all": lambda g: g.all_to_all(_x(4)),
    "broadcast": lambda g: g.broadcast(_x(4)),
    "broadcast_": lambda g: g.broadcast_(_x(4)),
    "broadcast_async": lambda g: g.broadcast_async(_x(4)).wait(),
    "broadcast_flag": lambda g: g.broadcast_flag(True),
    "barrier": lambda g: g.barrier(),
    "broadcast_object": lambda g: g.broadcast_object(1),
    "broadcast_object_list": lambda g: g.broadcast_object_list([1]),
    "broadcast_tensor_dict": lambda g: g.broadcast_tensor_dict({"x": _x(4)} if g.rank_in_group == 0 else None),
    "broadcast_tensor_dict with a spec": (
        lambda g: g.broadcast_tensor_dict({"x": _x(4)} if g.rank_in_group == 0 else None, spec=SPEC)
    ),
    "all_gather_object": lambda g: g.all_gather_object(1),
    "all_sum": lambda g: g.all_sum(1),
}
ALIKE = (
    {"all_reduce", "all_reduce_", "all_reduce_async"},
    {"all_gather", "all_gather_to_list", "all_gather_async"},
    {"reduce_scatter", "reduce_scatter_async"},
    {"broadcast", "broadcast_", "broadcast_async"},
    {"all_gather_object", "all_sum"},
)


def _match(one: str, other: str) -> bool:
    return one == other or any(one in alike and other in alike for alike in ALIKE)


PAIRS = [(one, other) for one in METHODS for other in METHODS if not _match(one, other)]

ARGUMENTS: dict[str, tuple[Call, Call, tuple[str, str]]] = {
    "sizes of all_gatherv": (
        lambda g: g.all_gatherv(_x(4), 0, [4, 4, 4, 4]), lambda g: g.all_gatherv(_x(4), 0, [4, 4, 4, 3]),
        ("all_gatherv", "all_gatherv")),
    "order of the sizes of all_gatherv": (
        partial(_gatherv, sizes=[4, 3, 4, 4]), partial(_gatherv, sizes=[3, 4, 4, 4]),
        ("all_gatherv", "all_gatherv")),
    "sizes of a large all_gatherv": (
        lambda g: g.all_gatherv(_x(90_000), 0, [90_000] * 4),
        lambda g: g.all_gatherv(_x(90_000), 0, [90_000] * 3 + [80_000]), ("all_gatherv", "all_gatherv")),
    "sizes of reduce_scatterv": (
        lambda g: g.reduce_scatterv(_x(16), 0, [4, 4, 4, 4]), lambda g: g.reduce_scatterv(_x(16), 0, [5, 4, 4, 3]),
        ("reduce_scatterv", "reduce_scatterv")),
    "reduction of reduce_scatterv": (
        lambda g: g.reduce_scatterv(_x(16), 0, [4] * 4), lambda g: g.reduce_scatterv(_x(16), 0, [4] * 4, "max"),
        ("(sum", "(max")),
    "reduction of reduce_scatter": (
        lambda g: g.reduce_scatter(_x(16), 0), lambda g: g.reduce_scatter(_x(16), 0, "max"), ("(sum", "(max")),
    "dim of all_gather": (
        lambda g: g.all_gather(_x(4, 4), 0), lambda g: g.all_gather(_x(4, 4), 1), ("dim 0", "dim 1")),
    "dim of all_gather_async": (
        lambda g: g.all_gather_async(_x(4, 4), 0).wait(), lambda g: g.all_gather_async(_x(4, 4), 1).wait(),
        ("dim 0", "dim 1")),
    "dim of reduce_scatter": (
        lambda g: g.reduce_scatter(_x(4, 4), 0), lambda g: g.reduce_scatter(_x(4, 4), 1), ("dim 0", "dim 1")),
    "dim of gather": (lambda g: g.gather(_x(4, 4), 0, 0), lambda g: g.gather(_x(4, 4), 0, 1), ("dim 0", "dim 1")),
    "dst of gather": (lambda g: g.gather(_x(4), 0), lambda g: g.gather(_x(4), 1), ("rank 0", "rank 1")),
    "the odd rank's dst of gather": (lambda g: g.gather(_x(4), 0), lambda g: g.gather(_x(4), 2), ("rank 0", "rank 2")),
    "src of scatter": (_scatter, partial(_scatter, src=2), ("rank 0", "rank 2")),
    "dim of scatter": (_scatter, partial(_scatter, dim=1), ("dim 0", "dim 1")),
    "scatter told and not": (_scatter, partial(_scatter, told=False), ("scatter", "scatter")),
    "splits of all_to_all": (
        lambda g: g.all_to_all(_x(4), output_split_sizes=[1] * 4, input_split_sizes=[1] * 4),
        lambda g: g.all_to_all(_x(4), output_split_sizes=[1] * 4, input_split_sizes=[1, 2, 1, 0]),
        ("all_to_all", "expects")),
    "own part of all_to_all": (
        lambda g: g.all_to_all(_x(4), output_split_sizes=[1] * 4, input_split_sizes=[1] * 4),
        lambda g: g.all_to_all(
            _x(5), output_split_sizes=[1] * 4, input_split_sizes=[1 + (rank == g.rank_in_group) for rank in range(4)]),
        ("all_to_all", "expects")),
    "rows of all_to_all": (
        lambda g: g.all_to_all(_x(4, 4, 8)), lambda g: g.all_to_all(_x(4, 4, 8), 1), ("rows of", "rows of")),
    "order of the splits' rows": (
        lambda g: g.all_to_all(_x(4, 2, 3)), lambda g: g.all_to_all(_x(4, 3, 2)), ("of [2, 3]", "of [3, 2]")),
    "shape of all_reduce": (
        lambda g: g.all_reduce(_x(2, 3)), lambda g: g.all_reduce(_x(3, 2)), ("[2, 3] × ", "[3, 2] × ")),
    "shape of a large all_reduce": (
        lambda g: g.all_reduce(_x(200, 300)), lambda g: g.all_reduce(_x(300, 200)), ("[200, 300] ×", "[300, 200] ×")),
    "dims of all_reduce_": (lambda g: g.all_reduce_(_x(6)), lambda g: g.all_reduce_(_x(6, 1)), ("6 × ", "[6, 1] × ")),
    "shape of all_reduce_async": (
        lambda g: g.all_reduce_async(_x(2, 3)).wait(), lambda g: g.all_reduce_async(_x(3, 2)).wait(),
        ("[2, 3] ×", "[3, 2] ×")),
    "shape of all_reduce_add_rms_norm": (
        lambda g: g.all_reduce_add_rms_norm(_x(2, 4, 8), _x(2, 4, 8), _x(8)),
        lambda g: g.all_reduce_add_rms_norm(_x(4, 2, 8), _x(4, 2, 8), _x(8)), ("[2, 4, 8] × ", "[4, 2, 8] × ")),
    "shape of all_gather": (
        lambda g: g.all_gather(_x(3, 4), 1), lambda g: g.all_gather(_x(4, 3), 1), ("[3, 4] × ", "[4, 3] × ")),
    "shape of all_gather_async": (
        lambda g: g.all_gather_async(_x(3, 4), 1).wait(), lambda g: g.all_gather_async(_x(4, 3), 1).wait(),
        ("[3, 4] × ", "[4, 3] × ")),
    "rows of all_gatherv": (
        lambda g: g.all_gatherv(_x(4, 2, 3), 0, [4] * 4), lambda g: g.all_gatherv(_x(4, 3, 2), 0, [4] * 4),
        ("of [2, 3]", "of [3, 2]")),
    "width of the rows of all_gatherv": (
        lambda g: g.all_gatherv(_x(4, 6), 0, [4] * 4), lambda g: g.all_gatherv(_x(4, 3), 0, [4] * 4),
        ("of [6]", "of [3]")),
    "rows of all_gatherv along dim 1": (
        lambda g: g.all_gatherv(_x(2, 4, 3), 1, [4] * 4), lambda g: g.all_gatherv(_x(3, 4, 2), 1, [4] * 4),
        ("of [2, 3]", "of [3, 2]")),
    "shape of reduce_scatter": (
        lambda g: g.reduce_scatter(_x(8, 12), 0), lambda g: g.reduce_scatter(_x(12, 8), 0),
        ("[8, 12] × ", "[12, 8] × ")),
    "shape of reduce_scatter_async": (
        lambda g: g.reduce_scatter_async(_x(2, 12), 1).wait(), lambda g: g.reduce_scatter_async(_x(3, 8), 1).wait(),
        ("[2, 12] × ", "[3, 8] × ")),
    "shape of reduce_scatterv": (
        lambda g: g.reduce_scatterv(_x(4, 2, 3), 0, [1] * 4), lambda g: g.reduce_scatterv(_x(4, 3, 2), 0, [1] * 4),
        ("[4, 2, 3] × ", "[4, 3, 2] × ")),
    "shape of gather": (
        lambda g: g.gather(_x(3, 4), 0, 1), lambda g: g.gather(_x(4, 3), 0, 1), ("[3, 4] × ", "[4, 3] × ")),
    "shape of scatter": (
        partial(_scatter_of, size=[2, 3]), partial(_scatter_of, size=[3, 2]), ("[2, 3] × ", "[3, 2] × ")),
    "shape of broadcast": (
        lambda g: g.broadcast(_x(2, 3)), lambda g: g.broadcast(_x(3, 2)), ("[2, 3] × ", "[3, 2] × ")),
    "shape of broadcast_": (
        lambda g: g.broadcast_(_x(2, 3)), lambda g: g.broadcast_(_x(3, 2)), ("[2, 3] × ", "[3, 2] × ")),
    "shape of broadcast_async": (
        lambda g: g.broadcast_async(_x(2, 3)).wait(), lambda g: g.broadcast_async(_x(3, 2)).wait(),
        ("[2, 3] × ", "[3, 2] × ")),
    "dtype of all_gather": (
        lambda g: g.all_gather(_x(4)), lambda g: g.all_gather(_x(4).int()), ("float32", "int32")),
    "dtype of broadcast": (
        lambda g: g.broadcast(_x(4)), lambda g: g.broadcast(_x(4).int()), ("float32", "int32")),
    "src of broadcast": (lambda g: g.broadcast(_x(4), 0), lambda g: g.broadcast(_x(4), 2), ("rank 0", "rank 2")),
    "src of broadcast_object": (
        lambda g: g.broadcast_object(1, 0), lambda g: g.broadcast_object(1, 1), ("rank 0", "rank 1")),
    "the odd rank's own src of broadcast_object": (
        lambda g: g.broadcast_object(1, 0), lambda g: g.broadcast_object(1, 2), ("rank 0", "rank 2")),
}  # fmt: skip


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    pool = Ranks(SIZE)
    pool.run(int, timeout_s=DEADLINE_S)
    yield pool
    pool.kill()


def _told(group: ps.GroupCoordinator, call: Call) -> Outcome:
    told = attempt(call, group)
    return attempt(group.all_reduce, torch.ones(3)) if told.kind == "ok" else told


def _all_pairs(route: str, pairs: list[tuple[str, str]]) -> list[Outcome]:
    with world_over(route, timeout_s=TIMEOUT_S) as world:
        return [in_a_group(route, world, METHODS[other if world.rank == ODD else usual]) for usual, other in pairs]


def in_a_group(route: str, world: ps.GroupCoordinator, call: Call, pause_s: float = 0.0) -> Outcome:
    with environment(**settings_of(route)):
        group = world.make_sub_group(range(SIZE))
    assert group is not None
    try:
        time.sleep(pause_s)
        return _told(group, call)
    finally:
        group.destroy()


def wrong(outcomes: list[Outcome], words: tuple[str, str], *, is_late: bool = False) -> list[str]:
    """Returns what is wrong. `is_late`: ranks may name the next call, but must suspect the odd rank."""
    texts = []
    for rank, told in enumerate(outcomes):
        named = all(word in told.text for word in words) and (words[0] != words[1] or told.text.count(words[0]) > 1)
        named = named or (is_late and words[0] in told.text and ODD in told.suspect_ranks)
        if told.kind != "CollectiveMismatchError" or not named or not told.suspect_ranks or "4096 ×" in told.text:
            texts.append(f"rank {rank}, {' and '.join(words)}: {told}")
    return texts


def names(pair: tuple[str, str]) -> tuple[str, str]:
    return f"in {pair[0]}", f"in {pair[1]}"


def apart_by(steps: int) -> list[tuple[str, str]]:
    methods = list(METHODS)
    pairs = zip(methods, methods[steps:] + methods[:steps], strict=True)
    return [pair for pair in pairs if not _match(*pair)]


def _chosen(route: str) -> list[list[tuple[str, str]]]:
    pairs = PAIRS
    if not LONG:
        pairs = [pair for steps in ((7, 19), (11, 23))[ROUTES.index(route)] for pair in apart_by(steps)]
    return [pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH)]


BATCHES = [(route, batch) for route in ROUTES for batch in range(len(_chosen(route)))]


@pytest.mark.parametrize(("route", "batch"), BATCHES)
def test_rows_09_and_40_every_call_against_every_other(four: Ranks, route: str, batch: int) -> None:
    pairs = _chosen(route)[batch]
    told = four.run(_all_pairs, route, pairs, timeout_s=DEADLINE_S)
    found: list[str] = []
    for pair, *outcomes in zip(pairs, *told, strict=True):
        # In gather over connections, senders don't wait. Messages use other connections.
        found += wrong(outcomes, names(pair), is_late=route == "connections" and pair[0] == "gather")
    assert not found, "\n".join(found)


def _arguments(route: str) -> dict[str, Outcome]:
    with world_over(route, timeout_s=TIMEOUT_S) as world:
        return {
            name: in_a_group(route, world, other if world.rank == ODD else usual)
            for name, (usual, other, _) in ARGUMENTS.items()
        }


@pytest.mark.parametrize("route", ROUTES)
def test_row_40_arguments_that_differ(four: Ranks, route: str) -> None:
    told: list[dict[str, Any]] = four.run(_arguments, route, timeout_s=DEADLINE_S)
    found: list[str] = []
    for name, (_, _, words) in ARGUMENTS.items():
        found += [f"{name}: {text}" for text in wrong([outcomes[name] for outcomes in told], words)]
    assert not found, "\n".join(found)


GIVERS: dict[str, Callable[[ps.GroupCoordinator, int], object]] = {
    "broadcast": lambda g, me: g.broadcast(_x(4), me),
    "large broadcast": lambda g, me: g.broadcast(_x(90_000), me),
    "broadcast_": lambda g, me: g.broadcast_(_x(4), me),
    "broadcast_async": lambda g, me: g.broadcast_async(_x(4), me).wait(),
    "broadcast_flag": lambda g, me: g.broadcast_flag(True, me),
    "broadcast_object": lambda g, me: g.broadcast_object(1, me),
    "broadcast_object_list": lambda g, me: g.broadcast_object_list([1], me),
    "broadcast_tensor_dict": lambda g, me: g.broadcast_tensor_dict({"x": _x(4)}, me),
    "broadcast_tensor_dict with a spec": lambda g, me: g.broadcast_tensor_dict({"x": _x(4)}, me, spec=SPEC),
    "scatter": lambda g, me: _scatter(g, me),
    "gather": lambda g, me: g.gather(_x(4), (me + 1) % SIZE),
}


def _each_its_own(route: str) -> dict[str, tuple[Outcome, Outcome]]:
    found = {}
    with world_over(route, timeout_s=TIMEOUT_S) as world:
        for name, call in GIVERS.items():
            with environment(**settings_of(route)):
                group = world.make_sub_group(range(SIZE))
            assert group is not None
            found[name] = attempt(call, group, group.rank_in_group), attempt(group.all_reduce, torch.ones(3))
            world.barrier()  # ranks that leave first are reported, too
            group.destroy()
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_row_10_each_rank_its_own_source(four: Ranks, route: str) -> None:
    told: list[dict[str, Any]] = four.run(_each_its_own, route, timeout_s=DEADLINE_S)
    wrong = []
    for name in GIVERS:
        outcomes = [outcomes[name] for outcomes in told]
        through = [again.kind for outcome, again in outcomes if outcome.kind == "ok"]
        failed = {outcome.kind for outcome, _ in outcomes} - {"ok"}
        if failed - {"CollectiveMismatchError"} or set(through) - {"CollectiveMismatchError"}:
            wrong.append(f"{name}: {outcomes}")
        if route == "shared memory" and len(through) > 1:
            wrong.append(f"{name}: {outcomes}")
    assert not wrong, "\n".join(wrong)


def _alike(route: str) -> list[Outcome]:
    with world_over(route, timeout_s=TIMEOUT_S) as world:
        found = []
        for alike in ALIKE:
            names = sorted(alike)
            found += [attempt(METHODS[names[(world.rank + turn) % len(names)]], world) for turn in range(len(names))]
        return found


@pytest.mark.parametrize("route", ROUTES)
def test_methods_that_match_each_other(four: Ranks, route: str) -> None:
    for outcomes in four.run(_alike, route, timeout_s=DEADLINE_S):
        assert {told.kind for told in outcomes} == {"ok"}, outcomes
