"""Ops have the gradients of the sum of all ranks' losses, regions those of Megatron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import gelu, layer_norm, linear

import parallel_state as ps
from device_communicators.base.errors import InvalidArgumentError
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import Form, check_close, real_numbers, sliced
from tests.workers import WorkerPool

Group = ps.GroupCoordinator
Pools = Callable[[int], WorkerPool]
EPSILON = 1e-14


class Op(NamedTuple):
    name: str
    shape: Callable[[int], tuple[int, ...]]
    call: Callable[[Group, Tensor], Tensor]
    reference: Callable[[Sequence[Tensor], int], Tensor]


def _mean(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).mean(0)


def _total(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def _exchanged(xs: Sequence[Tensor], rank: int, scatter_dim: int, gather_dim: int) -> Tensor:
    return torch.cat([sliced(x, scatter_dim, len(xs), rank) for x in xs], gather_dim)


OPS = (
    Op("all_reduce", lambda n: (3, 4), lambda g, x: g.all_reduce(x), lambda xs, r: _total(xs)),
    Op("all_reduce avg", lambda n: (3, 4), lambda g, x: g.all_reduce(x, "avg"), lambda xs, r: _mean(xs)),
    Op("all_reduce of a scalar", lambda n: (), lambda g, x: g.all_reduce(x), lambda xs, r: _total(xs)),
    Op("all_reduce of nothing", lambda n: (0, 3), lambda g, x: g.all_reduce(x), lambda xs, r: _total(xs)),
    Op("all_reduce transposed", lambda n: (3, 4), lambda g, x: g.all_reduce(x.t()), lambda xs, r: _total(xs).t()),
    Op("all_reduce twice", lambda n: (3,), lambda g, x: g.all_reduce(x * g.all_reduce(x)),
       lambda xs, r: _total([x * _total(xs) for x in xs])),
    Op("all_gather 0", lambda n: (3, 4), lambda g, x: g.all_gather(x, 0), lambda xs, r: torch.cat(list(xs))),
    Op("all_gather -1", lambda n: (3, 4), lambda g, x: g.all_gather(x), lambda xs, r: torch.cat(list(xs), -1)),
    Op("all_gather 1 of 3", lambda n: (2, 1, 3), lambda g, x: g.all_gather(x, 1), lambda xs, r: torch.cat(list(xs), 1)),
    Op("all_gather of a scalar", lambda n: (), lambda g, x: g.all_gather(x), lambda xs, r: torch.stack(list(xs))),
    Op("all_gather_to_list", lambda n: (3,), lambda g, x: torch.stack(g.all_gather_to_list(x)),
       lambda xs, r: torch.stack(list(xs))),
    Op("reduce_scatter 0", lambda n: (2 * n, 3), lambda g, x: g.reduce_scatter(x, 0),
       lambda xs, r: sliced(_total(xs), 0, len(xs), r)),
    Op("reduce_scatter -1", lambda n: (3, 2 * n), lambda g, x: g.reduce_scatter(x),
       lambda xs, r: sliced(_total(xs), 1, len(xs), r)),
    Op("reduce_scatter avg", lambda n: (3, 2 * n), lambda g, x: g.reduce_scatter(x, 1, "avg"),
       lambda xs, r: sliced(_mean(xs), 1, len(xs), r)),
    Op("all_to_all", lambda n: (2 * n, 3), lambda g, x: g.all_to_all(x), lambda xs, r: _exchanged(xs, r, 0, 0)),
    Op("all_to_all 1 to 0", lambda n: (3, 2 * n), lambda g, x: g.all_to_all(x, 1, 0),
       lambda xs, r: _exchanged(xs, r, 1, 0)),
    Op("all_to_all 0 to -1", lambda n: (2 * n, 3, 4), lambda g, x: g.all_to_all(x, 0, -1),
       lambda xs, r: _exchanged(xs, r, 0, -1)),
)  # fmt: skip


def _positive(shape: tuple[int, ...], rank: int, salt: int = 0) -> Tensor:
    return real_numbers(Form(shape), torch.float64, rank, salt).abs() + 0.5


def _body(member: Member) -> None:
    for op in OPS:
        with member.case(op.name):
            _check(member, op, [op.shape(member.size)] * member.size)


def _check(member: Member, op: Op, shapes: Sequence[tuple[int, ...]]) -> None:
    xs = [x.clone().requires_grad_() for x in member.of_ranks(lambda rank: _positive(shapes[rank], rank))]
    outputs = [op.reference(xs, rank) for rank in range(member.size)]
    weights = member.of_ranks(lambda rank: _positive(tuple(outputs[rank].shape), rank, salt=1))
    torch.stack([(out * weight).sum() for out, weight in zip(outputs, weights, strict=True)]).sum().backward()

    x = xs[member.rank].detach().clone().requires_grad_()
    found = op.call(member.group, x)
    check_close(found.detach(), outputs[member.rank].detach(), rtol=EPSILON)
    (found * weights[member.rank]).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    check_close(x.grad, xs[member.rank].grad, rtol=EPSILON)


def test_gradients_are_those_of_the_sum_of_all_losses(carrier: Carrier) -> None:
    carrier.run(_body)


def _uneven_body(member: Member) -> None:
    lengths = member.of_ranks(lambda rank: (2, 0, 3, 1)[rank])
    gather = Op(
        "all_gatherv", lambda n: (), lambda g, x: g.all_gatherv(x, 1, lengths), lambda xs, r: torch.cat(list(xs), 1)
    )
    scatter = Op(
        "reduce_scatterv", lambda n: (), lambda g, x: g.reduce_scatterv(x, 0, lengths),
        lambda xs, r: _total(xs).split(lengths)[r],
    )  # fmt: skip
    average = Op(
        "reduce_scatterv avg", lambda n: (), lambda g, x: g.reduce_scatterv(x, -1, lengths, "avg"),
        lambda xs, r: _mean(xs).split(lengths, -1)[r],
    )  # fmt: skip
    cases = [
        (gather, [(3, length) for length in lengths]),
        (scatter, [(sum(lengths), 3)] * member.size),
        (average, [(3, sum(lengths))] * member.size),
    ]
    table = [[1 if member.simulated else (2 * a + b) % 3 for b in range(member.size)] for a in range(member.size)]
    rows = Op(
        "all_to_all of rows",
        lambda n: (),
        lambda g, x: g.all_to_all(
            x, output_split_sizes=[row[member.rank] for row in table], input_split_sizes=table[member.rank]
        ),
        lambda xs, r: torch.cat([x.split(row)[r] for x, row in zip(xs, table, strict=True)]),
    )
    cases.append((rows, [(sum(row), 2) for row in table]))
    for op, shapes in cases:
        with member.case(f"{op.name}, {shapes}"):
            _check(member, op, shapes)


def test_gradients_of_uneven_shapes(carrier: Carrier) -> None:
    carrier.run(_uneven_body)


def _broadcast_body(member: Member) -> None:
    for src in range(member.size):
        if member.can_hear(src):
            with member.case(f"broadcast from rank {src}"):
                op = Op(
                    "broadcast",
                    lambda n: (),
                    lambda g, x, src=src: g.broadcast(x, src),
                    lambda xs, r, src=src: xs[src] * 1,
                )
                if member.rank == src:
                    _check(member, op, [(3, 2)] * member.size)
                    continue
                x = _positive((3, 2), member.rank).requires_grad_()
                found = member.group.broadcast(x, src)
                assert torch.equal(found, _positive((3, 2), src))
                (found * _positive((3, 2), member.rank, salt=1)).sum().backward()
                assert x.grad is not None
                assert torch.equal(x.grad, torch.zeros(3, 2, dtype=torch.float64))


def test_gradient_of_broadcast(carrier: Carrier) -> None:
    carrier.run(_broadcast_body)


def _dtypes_body(member: Member) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64):
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            with member.case(f"{name} of {dtype}"):
                x = torch.ones(2 * member.size, dtype=dtype, requires_grad=True)
                getattr(member.group, name)(x).sum().abs().backward()
                assert x.grad is not None
                assert x.grad.dtype == dtype
                expected = 1 if name == "reduce_scatter" else member.size
                assert torch.equal(x.grad, torch.full_like(x, expected))


def test_gradients_have_the_dtype_of_the_input(carrier: Carrier) -> None:
    carrier.run(_dtypes_body)


SLICE: dict[str, Any] = {"size": [2], "dtype": torch.float32}
WITHOUT: tuple[tuple[str, Callable[[Group, Tensor], object]], ...] = (
    ("all_reduce", lambda group, x: group.all_reduce(x, "max")),
    ("all_reduce", lambda group, x: group.all_reduce(x, "min")),
    ("all_reduce", lambda group, x: group.all_reduce(x, "product")),
    ("all_reduce_", lambda group, x: group.all_reduce_(x)),
    ("reduce_scatter", lambda group, x: group.reduce_scatter(x, 0, "max")),
    ("reduce_scatterv", lambda group, x: group.reduce_scatterv(x, 0, [1, 3], "product")),
    ("gather", lambda group, x: group.gather(x)),
    ("broadcast_", lambda group, x: group.broadcast_(x, group.rank_in_group)),
    ("scatter", lambda group, x: group.scatter(x, group.rank_in_group, **SLICE)),
    ("send", lambda group, x: group.send(x)),
)


def _without_body(member: Member) -> None:
    group = member.group
    for name, call in WITHOUT:
        with member.case(f"{name} of what requires a gradient"):
            for x in (torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True) * 2):
                before = group.route.sequence
                with pytest.raises(InvalidArgumentError) as caught:
                    call(group, x)
                for text in (
                    f"{name} on group {group.unique_name!r}",
                    "isn't differentiable",
                    "a gradient",
                    "no_grad()",
                ):
                    assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
                assert group.route.sequence == before, "a refused call was counted as an operation"
            assert group.all_reduce(torch.ones(1)).item() == member.size


def test_an_op_without_a_formula_raises_where_a_gradient_would_be_lost(group_carrier: Carrier) -> None:
    group_carrier.run(_without_body)


def _unrecorded_body(member: Member) -> None:
    group = member.group
    src, dst = (member.rank, member.rank) if member.simulated else (0, 1)
    for mode in (torch.no_grad, torch.inference_mode):
        with member.case(mode.__name__), mode():
            x = torch.ones(4, requires_grad=True)
            assert group.all_reduce(x, "max").tolist() == [1.0] * 4
            assert group.reduce_scatter(x, 0, "product").tolist() == [1.0] * 2
            assert group.reduce_scatterv(x, 0, [2, 2], "max").tolist() == [1.0] * 2
            assert not group.all_reduce(x).requires_grad
            group.gather(x)
            assert group.all_reduce_(x) is x
            assert x.tolist() == [2.0] * 4
            assert group.broadcast_(x, src) is x
            assert group.scatter(x, src, **SLICE).tolist() == [2.0] * 2
            if member.rank == src and not member.simulated:
                group.send(x, dst)
            elif not member.simulated:
                assert group.recv([4], torch.float32, src).tolist() == [2.0] * 4
    with member.case("detached"):
        x = torch.ones(4, requires_grad=True)
        assert not group.all_reduce(x.detach(), "max").requires_grad
        assert not group.all_reduce(torch.ones(4)).requires_grad


def test_without_recording_every_op_works(group_carrier: Carrier) -> None:
    group_carrier.run(_unrecorded_body)


def _saved_body(member: Member) -> None:
    """Backward must not use a saved tensor that was then reduced in place."""
    for name in ("all_reduce_", "broadcast_"):
        with member.case(name):
            weight = torch.ones(3, requires_grad=True)
            x = torch.ones(3)
            y = weight * x
            getattr(member.group, name)(x, *((member.rank if member.simulated else 0,) if name == "broadcast_" else ()))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_autograd_notices_an_op_in_place(group_carrier: Carrier) -> None:
    group_carrier.run(_saved_body)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at the first dual tensor
def test_a_forward_mode_gradient_raises() -> None:
    group = ps.simulated_group([0, 1], 0)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        for call in (group.all_reduce, group.all_reduce_, group.all_gather):
            with pytest.raises(InvalidArgumentError, match="no forward-mode gradient"):
                call(x)
        assert group.all_reduce(torch.ones(1)).item() == 2
    assert group.all_reduce(x).tolist() == [2.0] * 3, "outside its dual level, a dual tensor must count as a plain one"


class Region(NamedTuple):
    name: str
    options: dict[str, bool]
    forward: Callable[[Sequence[Tensor], int], Tensor]
    backward: Callable[[Sequence[Tensor], int], Tensor]


REGIONS = (
    Region("copy_to_tensor_model_parallel_region", {}, lambda xs, r: xs[r], lambda gs, r: _total(gs)),
    Region("reduce_from_tensor_model_parallel_region", {}, lambda xs, r: _total(xs), lambda gs, r: gs[r]),
    Region("scatter_to_tensor_model_parallel_region", {}, lambda xs, r: sliced(xs[r], -1, len(xs), r),
           lambda gs, r: torch.cat(list(gs), -1)),
    Region("gather_from_tensor_model_parallel_region", {}, lambda xs, r: torch.cat(list(xs), -1),
           lambda gs, r: sliced(gs[r], -1, len(gs), r)),
    Region("scatter_to_sequence_parallel_region", {}, lambda xs, r: sliced(xs[r], 0, len(xs), r),
           lambda gs, r: torch.cat(list(gs))),
    Region("gather_from_sequence_parallel_region", {}, lambda xs, r: torch.cat(list(xs)),
           lambda gs, r: sliced(_total(gs), 0, len(gs), r)),
    Region("gather_from_sequence_parallel_region", {"tensor_parallel_output_grad": False},
           lambda xs, r: torch.cat(list(xs)), lambda gs, r: sliced(gs[r], 0, len(gs), r)),
    Region("all_gather_last_dim_from_tensor_parallel_region", {}, lambda xs, r: torch.cat(list(xs), -1),
           lambda gs, r: sliced(_total(gs), -1, len(gs), r)),
    Region("reduce_scatter_last_dim_to_tensor_parallel_region", {}, lambda xs, r: sliced(_total(xs), -1, len(xs), r),
           lambda gs, r: torch.cat(list(gs), -1)),
    Region("reduce_scatter_to_sequence_parallel_region", {}, lambda xs, r: sliced(_total(xs), 0, len(xs), r),
           lambda gs, r: torch.cat(list(gs))),
)  # fmt: skip


def _regions_body(member: Member) -> None:
    n = member.size
    for region in REGIONS:
        for transposed in (False, True):
            with member.case(f"{region.name}, {region.options}, {'transposed' if transposed else 'contiguous'}"):
                xs = member.of_ranks(lambda rank: _positive((2 * n, 3 * n), rank))
                x = xs[member.rank].t().contiguous().t() if transposed else xs[member.rank].clone()
                x.requires_grad_()
                found = getattr(ps, region.name)(x, group=member.group, **region.options)
                check_close(found.detach(), region.forward(xs, member.rank), rtol=EPSILON)
                gradients = member.of_ranks(lambda rank, found=found: _positive(tuple(found.shape), rank, salt=1))
                found.backward(gradients[member.rank])
                assert x.grad is not None
                expected = region.backward(gradients, member.rank)
                assert x.grad.shape == expected.shape
                check_close(x.grad, expected, rtol=EPSILON)


def test_regions_follow_megatrons_conventions(carrier: Carrier) -> None:
    carrier.run(_regions_body)


def test_every_region_has_a_case() -> None:
    assert {region.name for region in REGIONS} == {name for name in ps.__all__ if name.endswith("_region")}


def _divisible_body(member: Member) -> None:
    with member.case("a dim that can't be cut"):
        for name, shape in (
            ("scatter_to_tensor_model_parallel_region", (2, 3)),
            ("scatter_to_sequence_parallel_region", (3, 2)),
            ("reduce_scatter_to_sequence_parallel_region", (3, 2)),
        ):
            with pytest.raises(InvalidArgumentError, match="must be divisible by 2"):
                getattr(ps, name)(torch.ones(shape), member.group)
        assert member.group.all_reduce(torch.ones(1)).item() == member.size


def test_a_region_that_cannot_be_cut_raises(group_carrier: Carrier) -> None:
    group_carrier.run(_divisible_body)


HIDDEN, INNER, TOKENS, STEPS = 6, 24, 12, 5
Weights = dict[str, Tensor]


def _weights() -> Weights:
    shapes = {"scale": (HIDDEN,), "shift": (HIDDEN,), "up": (INNER, HIDDEN), "up_bias": (INNER,),
              "down": (HIDDEN, INNER), "down_bias": (HIDDEN,)}  # fmt: skip
    return {
        name: (0.3 * real_numbers(Form(shape), torch.float64, 0, salt)).requires_grad_()
        for salt, (name, shape) in enumerate(shapes.items())
    }


def _sharded(whole: Weights, size: int, rank: int) -> Weights:
    dims = {"up": 0, "up_bias": 0, "down": 1}
    return {
        name: (sliced(x, dims[name], size, rank) if name in dims else x).detach().clone().requires_grad_()
        for name, x in whole.items()
    }


def _batch(step: int) -> tuple[Tensor, Tensor]:
    shape = Form((TOKENS, HIDDEN))
    return real_numbers(shape, torch.float64, step, 20), real_numbers(shape, torch.float64, step, 21)


def _plain(w: Weights, x: Tensor) -> Tensor:
    y = layer_norm(x, (HIDDEN,), w["scale"], w["shift"])
    y = linear(gelu(linear(y, w["up"], w["up_bias"])), w["down"])
    return x + y + w["down_bias"]


def _tensor_parallel(w: Weights, x: Tensor) -> Tensor:
    y = layer_norm(x, (HIDDEN,), w["scale"], w["shift"])
    y = ps.copy_to_tensor_model_parallel_region(y)
    y = linear(gelu(linear(y, w["up"], w["up_bias"])), w["down"])
    return x + ps.reduce_from_tensor_model_parallel_region(y) + w["down_bias"]


def _sequence_parallel(w: Weights, x: Tensor) -> Tensor:
    y = layer_norm(x, (HIDDEN,), w["scale"], w["shift"])
    y = ps.gather_from_sequence_parallel_region(y)
    y = linear(gelu(linear(y, w["up"], w["up_bias"])), w["down"])
    return x + ps.reduce_scatter_to_sequence_parallel_region(y) + w["down_bias"]


def _trained(weights: Weights, loss_of: Callable[[Weights, int], Tensor], partial: Sequence[str] = ()) -> Weights:
    for step in range(STEPS):
        loss_of(weights, step).backward()
        with torch.no_grad():
            for name, weight in weights.items():
                assert weight.grad is not None
                gradient = ps.get_tp_group().all_reduce(weight.grad) if name in partial else weight.grad
                weight -= 0.1 * gradient
                weight.grad = None
    return weights


def _training_body(kind: str) -> None:
    group = ps.get_tp_group()
    size, rank = group.world_size, group.rank_in_group

    def whole_loss(forward: Callable[[Weights, Tensor], Tensor]) -> Callable[[Weights, int], Tensor]:
        def loss(w: Weights, step: int) -> Tensor:
            x, target = _batch(step)
            return (forward(w, x) - target).square().mean()

        return loss

    def loss_of_own_tokens(w: Weights, step: int) -> Tensor:
        x, target = (sliced(each, 0, size, rank) for each in _batch(step))
        return (_sequence_parallel(w, x) - target).square().sum() / (TOKENS * HIDDEN)

    def loss_of_gathered_tokens(w: Weights, step: int) -> Tensor:
        x, target = _batch(step)
        y = _sequence_parallel(w, ps.scatter_to_sequence_parallel_region(x))
        y = ps.gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=False)
        return (y - target).square().mean()

    start = _weights()
    expected = _trained({name: x.detach().clone().requires_grad_() for name, x in start.items()}, whole_loss(_plain))
    on_own_tokens = ("scale", "shift", "down_bias")
    shards = _sharded(start, size, rank)
    if kind == "tensor":
        found = _trained(shards, whole_loss(_tensor_parallel))
    elif kind == "sequence":
        found = _trained(shards, loss_of_own_tokens, on_own_tokens)
    else:
        found = _trained(shards, loss_of_gathered_tokens, on_own_tokens)
    for name, weight in _sharded(expected, size, rank).items():
        error = float((found[name] - weight).detach().abs().max())
        moved = float((weight - _sharded(start, size, rank)[name]).detach().abs().max())
        assert error < 1e-13 < 1e-3 < moved, f"{name} is {error} off, and moved by {moved}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["tensor", "sequence", "sequence, gathered"])
def test_a_sharded_layer_trains_as_the_whole_one(pools: Pools, kind: str, world_size: int) -> None:
    pools(world_size).run(_training_body, kind, tp=world_size)
