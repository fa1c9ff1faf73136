from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import grad

import parallel_state as ps
from tests.contract.attempts import attempt
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import check_close
from tests.contract.test_gradients import EPSILON, OPS, REGIONS, Op, _positive
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
SAMPLES = 3


def _calls(member: Member) -> int:
    return sum(traffic.calls for traffic in member.group.traffic().values())


def _loss(member: Member, op: Op) -> Callable[[Tensor], Tensor]:
    weights = member.of_ranks(lambda rank: rank + 1)
    return lambda x: op.call(member.group, x).square().sum() * weights[member.rank]


def _inputs(member: Member, op: Op) -> list[Tensor]:
    return member.of_ranks(lambda rank: _positive(op.shape(member.size), rank))


def _weighted(member: Member, op: Op, xs: Sequence[Tensor]) -> Tensor:
    weights = member.of_ranks(lambda rank: rank + 1)
    return torch.stack([op.reference(xs, rank).square().sum() * weights[rank] for rank in range(member.size)]).sum()


def _has_gradient(member: Member, op: Op) -> bool:
    """False in a simulated group, whose ranks have equal gradients, if the op gives each rank another slice."""
    return not member.simulated or op.name.startswith(("all_reduce", "all_gather"))


def _grad_body(member: Member) -> None:
    for op in OPS:
        with member.case(op.name):
            xs = [x.clone().requires_grad_() for x in _inputs(member, op)]
            x = xs[member.rank].detach()
            firsts = grad(_weighted(member, op, xs), xs, create_graph=True)
            penalty = torch.stack([first.square().sum() for first in firsts]).sum()
            second = grad(penalty, xs[member.rank])[0]

            loss = _loss(member, op)
            if not _has_gradient(member, op):
                continue
            check_close(func.grad(loss)(x), firsts[member.rank].detach(), rtol=EPSILON)
            with torch.no_grad():
                check_close(func.grad(loss)(x), firsts[member.rank].detach(), rtol=EPSILON)
            if member.simulated:
                continue
            check_close(func.grad(lambda x, loss=loss: func.grad(loss)(x).square().sum())(x), second, rtol=1e-12)
            leaf = x.clone().requires_grad_()
            (first,) = grad(loss(leaf), leaf, create_graph=True)
            check_close(grad(first.square().sum(), leaf)[0], second, rtol=1e-12)


def test_grad_and_the_gradient_of_a_gradient(group_carrier: Carrier) -> None:
    group_carrier.run(_grad_body)


def _vmap_body(member: Member) -> None:
    for op in OPS:
        with member.case(op.name):
            batches = member.of_ranks(lambda rank, op=op: _positive((SAMPLES, *op.shape(member.size)), rank))
            samples = [[batch[i] for batch in batches] for i in range(SAMPLES)]
            expected = torch.stack([op.reference(xs, member.rank) for xs in samples])
            mine = batches[member.rank]
            before = _calls(member)

            check_close(func.vmap(lambda x, op=op: op.call(member.group, x))(mine), expected, rtol=EPSILON)
            moved = mine.movedim(0, -1)
            check_close(func.vmap(lambda x, op=op: op.call(member.group, x), -1)(moved), expected, rtol=EPSILON)
            nested = func.vmap(func.vmap(lambda x, op=op: op.call(member.group, x)))(mine.unsqueeze(1))
            check_close(nested.squeeze(1), expected, rtol=EPSILON)
            if "nothing" not in op.name:
                calls = _calls(member) - before
                assert calls == (6 if "twice" in op.name else 3), "one collective for all samples"

            if not _has_gradient(member, op):
                continue
            loss, gradients = _loss(member, op), []
            for xs in samples:
                xs = [x.clone().requires_grad_() for x in xs]
                gradients.append(grad(_weighted(member, op, xs), xs[member.rank])[0])
            check_close(func.vmap(func.grad(loss))(mine), torch.stack(gradients), rtol=EPSILON)
            check_close(
                func.grad(lambda x, loss=loss: func.vmap(loss)(x).sum())(mine), torch.stack(gradients), rtol=EPSILON
            )


def test_vmap_makes_one_collective_of_all_samples(group_carrier: Carrier) -> None:
    group_carrier.run(_vmap_body)


def _jacrev_body(member: Member) -> None:
    for op in OPS:
        if op.name in ("all_reduce", "all_gather 1 of 3", "reduce_scatter avg", "all_to_all 0 to -1"):
            with member.case(op.name):
                xs = [x.clone().requires_grad_() for x in _inputs(member, op)]
                outputs = torch.stack([op.reference(xs, rank).flatten() for rank in range(member.size)]).sum(0)
                rows = [grad(each, xs[member.rank], retain_graph=True)[0] for each in outputs]
                x = xs[member.rank].detach()
                found = func.jacrev(lambda x, op=op: op.call(member.group, x))(x)
                check_close(found.flatten(0, -1 - x.dim()), torch.stack(rows), rtol=EPSILON)
                (pulled,) = func.vjp(lambda x, op=op: op.call(member.group, x), x)[1](
                    found.new_ones(found.shape[: -x.dim()])
                )
                check_close(pulled, torch.stack(rows).sum(0), rtol=EPSILON)


def test_jacrev_and_vjp(group_carrier: Carrier) -> None:
    group_carrier.run(_jacrev_body)


def _uneven_and_in_place_body(member: Member) -> None:
    group, size = member.group, member.size
    with member.case("sizes"):
        lengths = [2, 1]
        xs = member.of_ranks(lambda rank: _positive((SAMPLES, 3, lengths[rank]), rank))
        if not member.simulated:
            found = func.vmap(lambda x: group.all_gatherv(x, -1, lengths))(xs[member.rank])
            assert torch.equal(found, torch.cat(xs, -1))
            back = func.vmap(lambda x: group.reduce_scatterv(x, 1, lengths))(found)
            assert torch.equal(back, size * xs[member.rank])
    with member.case("in place"):
        xs = member.of_ranks(lambda rank: _positive((2, SAMPLES), rank))
        for call, expected in (
            (group.all_reduce_, sum(xs)),
            (lambda x: group.broadcast_(x, member.rank if member.simulated else 1), xs[-1]),
        ):
            x = xs[member.rank].clone()
            func.vmap(call, 1)(x)
            assert torch.equal(x, expected)
    with member.case("fused"):
        xs = member.of_ranks(lambda rank: _positive((SAMPLES, 4, 6), rank).float())
        residual, weight = _positive((SAMPLES, 4, 6), 7).float(), _positive((6,), 8).float()
        for dims, inner in (((0, 0), residual), ((0, None), residual[0])):
            normed, total = func.vmap(lambda x, y: group.all_reduce_add_rms_norm(x, y, weight), dims)(
                xs[member.rank], inner
            )
            for i in range(SAMPLES):
                alone = group.all_reduce_add_rms_norm(xs[member.rank][i], residual[i if dims[1] == 0 else 0], weight)
                check_close(normed[i], alone[0], rtol=1e-5)
                check_close(total[i], alone[1], rtol=1e-6)


def test_vmap_of_other_forms(group_carrier: Carrier) -> None:
    group_carrier.run(_uneven_and_in_place_body)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Any], Tensor], object]] = {
    "grad": lambda f, x: func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "hessian": lambda f, x: func.hessian(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: func.vmap(f)(torch.stack([x, x])),
    "vmap, not of the input": lambda f, x: func.vmap(lambda _: f(x))(torch.ones(2)),
}
FORWARD, ALL, MAPPED = ("jvp", "jacfwd", "hessian"), tuple(TRANSFORMS), ("vmap", "vmap, not of the input")
REFUSED: tuple[tuple[str, tuple[str, ...], Callable[[ps.GroupCoordinator, Tensor], Any]], ...] = (
    ("all_reduce", FORWARD, lambda g, x: g.all_reduce(x)),
    ("all_reduce", ("grad", *FORWARD), lambda g, x: g.all_reduce(x, "max")),
    ("all_reduce_", ("grad", *FORWARD), lambda g, x: g.all_reduce_(x)),
    ("all_gather", FORWARD, lambda g, x: g.all_gather(x)),
    ("out= of all_gather", ("grad", "jvp", "vmap"), lambda g, x: g.all_gather(x, out=OUT)),
    ("broadcast", FORWARD, lambda g, x: g.broadcast(x, g.rank_in_group)),
    ("all_reduce_add_rms_norm", ("jvp", "jacfwd"), lambda g, x: g.all_reduce_add_rms_norm(x, x, x)[0]),
    ("gather", ALL, lambda g, x: g.gather(x)),
    ("scatter", MAPPED, lambda g, x: g.scatter(x, g.rank_in_group, size=[2], dtype=torch.float32)),
    ("send", MAPPED, lambda g, x: g.send(x)),
    ("recv", MAPPED, lambda g, x: g.recv([4], torch.float32)),
    ("all_reduce_async", ALL, lambda g, x: g.all_reduce_async(x).wait()),
    ("all_gather_async", ALL, lambda g, x: g.all_gather_async(x).wait()),
    ("reduce_scatter_async", ALL, lambda g, x: g.reduce_scatter_async(x).wait()),
    ("broadcast_async", ALL, lambda g, x: g.broadcast_async(x).wait()),
    ("isend", ALL, lambda g, x: g.isend(x)),
    ("irecv", ALL, lambda g, x: g.irecv([4], torch.float32)),
    ("broadcast_object", ALL, lambda g, x: g.broadcast_object(x)),
    ("broadcast_tensor_dict", ALL, lambda g, x: g.broadcast_tensor_dict({"x": x})["x"]),
    ("all_gather_object", ALL, lambda g, x: g.all_gather_object(x)),
    ("send_tensor_dict", ALL, lambda g, x: g.send_tensor_dict({"x": x})),
    ("recv_object", ALL, lambda g, x: g.recv_object()),
    ("copy_region", FORWARD, lambda g, x: ps.copy_to_tensor_model_parallel_region(x, g)),
    ("reduce_scatter_region", FORWARD, lambda g, x: ps.reduce_scatter_to_sequence_parallel_region(x, g)),
)
OUT = torch.empty(8)


def _refused_body(member: Member) -> None:
    for name, transforms, call in REFUSED:
        for transform in transforms:
            with member.case(f"{transform} of {name}"):
                x, before = torch.ones(4), _calls(member)
                found = attempt(TRANSFORMS[transform], lambda x, call=call: call(member.group, x), x)
                assert found.kind == "InvalidArgumentError", found
                assert f"{name} on group {member.group.unique_name!r}" in found.text, found.text
                assert x.tolist() == [1.0] * 4
                if transform != "hessian":
                    assert _calls(member) == before, "a refused call was counted as an operation"
    assert member.group.all_reduce(torch.ones(1)).item() == member.size


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at the first dual tensor
def test_what_has_no_rule_is_refused_on_every_rank(group_carrier: Carrier) -> None:
    group_carrier.run(_refused_body)


def _regions_body(member: Member) -> None:
    n = member.size
    for region in REGIONS:
        with member.case(f"{region.name}, {region.options}"):
            call = getattr(ps, region.name)
            batches = member.of_ranks(lambda rank: _positive((SAMPLES, 2 * n, 3 * n), rank))
            samples = [[batch[i] for batch in batches] for i in range(SAMPLES)]
            outputs = torch.stack([region.forward(xs, member.rank) for xs in samples])
            gradients = member.of_ranks(lambda rank, outputs=outputs: _positive(tuple(outputs.shape), rank, salt=1))
            expected = torch.stack([region.backward([g[i] for g in gradients], member.rank) for i in range(SAMPLES)])

            def forward(x: Tensor, call: Any = call, options: dict[str, bool] = region.options) -> Tensor:
                return call(x, group=member.group, **options)

            mine = batches[member.rank]
            found, pull = func.vjp(func.vmap(forward), mine)
            check_close(found, outputs, rtol=EPSILON)
            check_close(pull(gradients[member.rank])[0], expected, rtol=EPSILON)
            each = func.vmap(func.grad(lambda x, g: (forward(x) * g).sum()))(mine, gradients[member.rank])
            check_close(each, expected, rtol=EPSILON)


def test_regions_under_func(group_carrier: Carrier) -> None:
    group_carrier.run(_regions_body)


def _in_place_body(member: Member) -> None:
    for region in REGIONS:
        call = getattr(ps, region.name)
        for recorded in (False, True):
            with member.case(f"{region.name}, {region.options}, {recorded}"):
                x = _positive((4, 6), member.rank).requires_grad_(recorded)
                before, gradients = x.detach().clone(), []
                for change in (lambda y: y.mul_(3), lambda y: y * 3):
                    y = call(x * 1, group=member.group, **region.options)
                    changed = change(y)
                    if recorded:
                        gradients.append(grad(changed.square().sum(), x)[0])
                assert torch.equal(x.detach(), before)
                if recorded:
                    assert torch.equal(gradients[0], gradients[1])
                with torch.inference_mode():
                    call(before, group=member.group, **region.options).zero_()
                assert torch.equal(x.detach(), before)


def test_what_a_region_gives_may_be_changed_in_place(group_carrier: Carrier) -> None:
    group_carrier.run(_in_place_body)


def _penalty_body() -> tuple[list[Tensor], list[Tensor]]:
    group = ps.get_tp_group()
    up, down, x = _positive((12, 6), 1), _positive((6, 12), 2), _positive((8, 6), 3)

    def whole(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (torch.tanh(x @ up.t() / 20) @ down.t()).square().sum()

    def parallel(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = torch.tanh(ps.copy_to_tensor_model_parallel_region(x) @ up.t() / 20) @ down.t()
        return ps.reduce_from_tensor_model_parallel_region(y).square().sum()

    def sequence(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x = ps.gather_from_sequence_parallel_region(ps.scatter_to_sequence_parallel_region(x))
        y = ps.reduce_scatter_to_sequence_parallel_region(torch.tanh(x @ up.t() / 20) @ down.t())
        return ps.gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=False).square().sum()

    def second(loss: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
        inputs = tuple(each.clone().requires_grad_() for each in inputs)
        (first,) = grad(loss(*inputs), inputs[0], create_graph=True)
        return list(grad(first.square().sum(), inputs))

    size, rank = group.world_size, group.rank_in_group
    mine = x, up.chunk(size)[rank], down.chunk(size, 1)[rank]
    expected = second(whole, x, up, down)
    expected = [expected[0], expected[1].chunk(size)[rank], expected[2].chunk(size, 1)[rank]]
    by_func = func.grad(lambda *inputs: func.grad(parallel)(*inputs).square().sum(), argnums=(0, 1, 2))(*mine)
    around = func.grad(lambda x: func.grad(lambda z: z * parallel(x, *mine[1:]))(torch.tensor(1.0, dtype=x.dtype)))(x)
    check_close(around, grad(whole(leaf := x.clone().requires_grad_(), up, down), leaf)[0], rtol=1e-11)
    for found in (second(parallel, *mine), second(sequence, *mine), by_func):
        for ours, theirs in zip(found, expected, strict=True):
            check_close(ours, theirs, rtol=1e-11)
    return expected


def test_the_gradient_of_a_gradient_through_regions_is_that_of_the_whole_layer(pools: Pools) -> None:
    pools(2).run(_penalty_body, tp=2)


def _broadcast_body(member: Member) -> None:
    """The receivers' zero gradient is differentiable, through a collective that all ranks must make."""
    src = member.rank if member.simulated else 1
    with member.case("broadcast twice differentiated"):
        x = _positive((3,), member.rank).requires_grad_()
        weights = member.of_ranks(lambda rank: rank + 1.0)
        (first,) = grad((member.group.broadcast(x, src) ** 3).sum() * weights[member.rank], x, create_graph=True)
        (second,) = grad(first.square().sum(), x)
        source = _positive((3,), src)
        # The loss of all ranks is w x^3: x is src's, w the sum of the weights.
        expected = 36 * sum(weights) ** 2 * source**3 if member.rank == src else torch.zeros(3, dtype=source.dtype)
        if not member.simulated:  # its other ranks would have `src`'s gradient too
            check_close(second, expected, rtol=1e-12)


def test_gradient_of_the_gradient_of_broadcast(group_carrier: Carrier) -> None:
    group_carrier.run(_broadcast_body)
