"""Sums with order="tree": equal bits for every tensor-parallel size that is a power of two."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators.base.errors import InvalidArgumentError, UnsupportedError
from tests.contract.attempts import Outcome, attempt, environment, world
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import FLOATS, Form, bytes_of, in_tree_order, real_numbers, tree
from tests.contract.test_objects import Pools, own_group
from tests.hosts import HostRanks

OnHosts = Callable[[Sequence[int]], HostRanks]
DEADLINE_S = 120.0
COUNTS = (24, 1000, 20_008, 300_008)
"""The largest is divided into several chunks, within a host and between hosts. None is a multiple of a vector's length
on all ranks."""


def _same(found: Tensor, expected: Tensor) -> bool:
    return bytes_of(found).equal(bytes_of(expected))


def _check_calls(group: ps.GroupCoordinator, xs: Sequence[Tensor], expected: Tensor) -> None:
    x, rank, size = xs[group.rank_in_group], group.rank_in_group, group.world_size
    assert _same(group.all_reduce(x, order="tree"), expected)
    assert _same(group.all_reduce_(x.clone(), order="tree"), expected)
    assert _same(group.all_reduce_async(x, order="tree").wait(), expected)
    shared = group.empty(x.shape, x.dtype)
    shared.copy_(x)
    assert _same(group.all_reduce(shared, order="tree"), expected), "an input that others read in place"
    assert _same(group.all_reduce_(shared, order="tree"), expected)
    for form, dim in (((size, -1), 0), ((2, -1), 1)):
        mine = expected.view(form).chunk(size, dim)[rank]
        assert _same(group.reduce_scatter(x.view(form), dim, order="tree"), mine)
        assert _same(group.reduce_scatter_async(x.view(form), dim, order="tree").wait(), mine)
        out = torch.empty(mine.shape, dtype=x.dtype)
        assert group.reduce_scatter(x.view(form), dim, out=out, order="tree") is out
        assert _same(out, mine)


def _body(member: Member) -> None:
    group, size = member.group, member.size
    has_trees = size == 1 or group.route.communicators[0].adds_in_tree_order
    for dtype, count in member.shared(list(itertools.product(FLOATS, COUNTS))):
        with member.case(f"{count} {dtype}"):
            xs = member.of_ranks(functools.partial(real_numbers, Form((count,)), dtype))
            x = xs[member.rank]
            if size & (size - 1):
                with pytest.raises(InvalidArgumentError, match=f"1, 2, 4, 8, … ranks, but the group has {size}"):
                    group.all_reduce(x, order="tree")
                with pytest.raises(InvalidArgumentError, match="ranks"):
                    group.reduce_scatter(x, order="tree")
            elif has_trees and not (member.row == "hierarchical" and size == 4):
                _check_calls(group, xs, in_tree_order(xs))
            else:
                with pytest.raises(UnsupportedError, match="order='tree'"):
                    group.all_reduce(x, order="tree")
                with pytest.raises(UnsupportedError, match="order='tree'"):
                    group.reduce_scatter(x, order="tree")
                assert group.all_reduce(torch.ones(4)).eq(size).all(), "the group is usable"


def test_sums_are_those_of_the_tree(carrier: Carrier) -> None:
    """The placement of four ranks on two hosts is 0, 1, 0, 1, so that no host has a subtree."""
    carrier.run(_body, timeout_s=DEADLINE_S)


def _bits(dtypes: Sequence[torch.dtype]) -> list[bytes]:
    group, found = ps.get_tp_group(), []
    for dtype, count in itertools.product(dtypes, COUNTS):
        xs = [real_numbers(Form((count,)), dtype, rank) for rank in range(group.world_size)]
        _check_calls(group, xs, in_tree_order(xs))
        found.append(bytes(bytes_of(group.all_reduce(xs[group.rank_in_group], order="tree")).tolist()))
    return found


def _with_rounding_between_hosts() -> list[bytes]:
    with environment(PARALLEL_STATE_ROUND_BETWEEN_HOSTS="on"), world(4):
        return _bits([torch.bfloat16])


def test_hosts_have_the_bits_of_one_host(pools: Pools, on_hosts: OnHosts) -> None:
    on_one = {dtype: pools(4).run(_bits, [dtype], tp=4, timeout_s=DEADLINE_S) for dtype in FLOATS}
    on_two = on_hosts((0, 0, 1, 1))
    for dtype in FLOATS:
        assert on_two.run(_bits, [dtype], tp=4, timeout_s=DEADLINE_S) == on_one[dtype], dtype
    assert on_two.run(_with_rounding_between_hosts, timeout_s=DEADLINE_S) == on_one[torch.bfloat16]


def _refused_on_hosts() -> None:
    with pytest.raises(UnsupportedError, match="equally many ranks"):
        ps.get_tp_group().all_reduce(torch.ones(4), order="tree")


def test_hosts_with_different_numbers_of_ranks_are_refused(on_hosts: OnHosts) -> None:
    on_hosts((0, 0, 0, 1)).run(_refused_on_hosts, tp=4, timeout_s=DEADLINE_S)


BLOCKS, TOKENS, BLOCK, HIDDEN = 8, 5, 48, 72


@functools.cache
def _layer() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(BLOCKS)
    x = torch.randn(TOKENS, BLOCKS * BLOCK, generator=draw)
    return x, torch.randn(BLOCKS * BLOCK, HIDDEN, generator=draw)


def _products(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Returns a product for each block of the inner dim. Shapes and strides, and so bits, are equal on any rank."""
    blocks = zip(x.split(BLOCK, 1), weight.split(BLOCK, 0), strict=True)
    return [a.contiguous() @ b.contiguous() for a, b in blocks]


def _row_parallel(order: Literal["rank", "tree"]) -> bytes:
    group = ps.get_tp_group()
    x, weight = _layer()
    x, weight = (
        x.chunk(group.world_size, 1)[group.rank_in_group],
        weight.chunk(group.world_size, 0)[group.rank_in_group],
    )
    partial = tree(_products(x, weight))
    y = group.all_reduce(partial, order=order)
    scattered = group.reduce_scatter(partial, -1, order=order)
    assert _same(group.all_gather(scattered, -1), y)
    return bytes(bytes_of(y).tolist())


def test_a_row_parallel_matmul_has_equal_bits_for_every_size(pools: Pools) -> None:
    expected = bytes(bytes_of(tree(_products(*_layer()))).tolist())
    found = {tp: set(pools(8).run(_row_parallel, "tree", tp=tp, timeout_s=DEADLINE_S)) for tp in (1, 2, 4, 8)}
    assert found == {tp: {expected} for tp in (1, 2, 4, 8)}
    in_rank_order = set(pools(8).run(_row_parallel, "rank", tp=8, timeout_s=DEADLINE_S))
    assert len(in_rank_order) == 1 and in_rank_order != {expected}, "these numbers must tell the orders apart"


def _mismatch(count: int) -> Outcome:
    with own_group() as group:
        return attempt(group.all_reduce, torch.ones(count), order="tree" if group.is_first_rank else "rank")


@pytest.mark.parametrize("count", [10, 300_000])
@pytest.mark.parametrize("placement", [(0, 0), (0, 1), (0, 0, 1, 1)], ids=str)
def test_different_orders_are_a_mismatch(
    pools: Pools, request: pytest.FixtureRequest, placement: tuple[int, ...], count: int
) -> None:
    size = len(placement)
    pool = request.getfixturevalue("on_hosts")(placement) if any(placement) else pools(size)
    outcomes = pool.run(_mismatch, count, tp=size, timeout_s=DEADLINE_S)
    assert all(outcome.kind == "CollectiveMismatchError" for outcome in outcomes), outcomes
    assert any("all_reduce(tree_sum)" in each.text and "all_reduce(sum)" in each.text for each in outcomes), outcomes


def _compiled(backend: str) -> None:
    torch._dynamo.reset()
    group = ps.get_tp_group()
    xs = [real_numbers(Form((8, 500)), torch.float32, rank) for rank in range(group.world_size)]

    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        in_place = group.all_reduce_(x * 1, order="tree")
        return group.all_reduce(x, order="tree"), in_place, group.reduce_scatter(x, 0, order="tree")

    expected = in_tree_order(xs)
    whole, in_place, part = torch.compile(step, fullgraph=True, backend=backend)(xs[group.rank_in_group])
    assert _same(whole, expected) and _same(in_place, expected)
    assert _same(part, expected.chunk(group.world_size)[group.rank_in_group])


def test_compiled_code_has_the_same_bits(pools: Pools) -> None:
    pools(4).run(_compiled, "aot_eager", tp=4, timeout_s=DEADLINE_S)


@pytest.mark.slow
def test_inductor_has_the_same_bits(pools: Pools) -> None:
    pools(2).run(_compiled, "inductor", tp=2, timeout_s=300)


def _gradients() -> None:
    group = ps.get_tp_group()
    grads = [real_numbers(Form((4, 100)), torch.float32, 7 + rank) for rank in range(group.world_size)]
    x, y = (torch.ones(4, 100, requires_grad=True) for _ in range(2))
    group.all_reduce(x, order="tree").backward(grads[group.rank_in_group])
    assert x.grad is not None and _same(x.grad, in_tree_order(grads))
    parts = [grad[:1] for grad in grads]
    group.reduce_scatter(y, 0, order="tree").backward(parts[group.rank_in_group])
    assert y.grad is not None and torch.equal(y.grad, torch.cat(parts))


def test_the_gradient_is_added_in_tree_order_too(pools: Pools) -> None:
    pools(4).run(_gradients, tp=4, timeout_s=DEADLINE_S)


def _refused() -> list[str]:
    group, x = ps.get_tp_group(), torch.ones(4)
    calls: list[Callable[[], object]] = [
        lambda: group.all_reduce(x, "max", order="tree"),
        lambda: group.all_reduce_(x, "avg", order="tree"),
        lambda: group.reduce_scatter(x, op="product", order="tree"),
        lambda: group.all_reduce(x, order="host"),  # type: ignore[arg-type]
        lambda: group.all_reduce_async(x, order=None),  # type: ignore[arg-type]
        lambda: group.all_reduce(x, "tree_sum"),  # type: ignore[arg-type]
        lambda: group.all_reduce_(x, "tree_sum"),  # type: ignore[arg-type]
        lambda: group.reduce_scatter(x, op="tree_sum"),  # type: ignore[arg-type]
        lambda: group.reduce_scatterv(x, sizes=[2, 2], op="tree_sum"),  # type: ignore[arg-type]
    ]
    return [attempt(call).kind for call in calls]


def test_wrong_orders_are_refused(pools: Pools) -> None:
    assert pools(2).run(_refused, tp=2) == [["InvalidArgumentError"] * 9] * 2
