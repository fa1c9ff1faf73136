from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from device_communicators import REDUCE_OPS
from parallel_state import GroupCoordinator
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import FLOATS, Form, bytes_of, real_numbers
from tests.contract.test_objects import Pools

COUNTS = (12, 12_000)
"""Over gloo the first fits the message that compares the calls; each kernel has another path for the second."""
FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}
STATES = ("flushes denormals", "rounds upward")
SPECIAL = (-0.0, 0.0, -0.0, float("nan"), -1.5, 0.0, float("inf"), -float("inf"))


def _special(dtype: torch.dtype, rank: int, count: int) -> Tensor:
    values = torch.tensor([SPECIAL[(rank * (1 + place // 8) + place) % 8] for place in range(64)])
    return values.repeat(count // 64 + 1)[:count].to(dtype)


def _reference(xs: Sequence[Tensor], op: str) -> Tensor:
    """Folds in rank order in a wide dtype. Of two zeros, max returns +0 and min -0."""

    def extreme(a: float, b: float) -> float:
        if a != a or b != b:
            return float("nan")
        if a == b == 0:
            signs = [torch.signbit(torch.tensor(x)).item() for x in (a, b)]
            return -0.0 if (all(signs) if op == "max" else any(signs)) else 0.0
        return max(a, b) if op == "max" else min(a, b)

    if op in ("max", "min"):
        rows = [x.double().tolist() for x in xs]
        values = [functools.reduce(extreme, each) for each in zip(*rows, strict=True)]
        return torch.tensor(values, dtype=torch.float64).to(xs[0].dtype)
    combine = torch.mul if op == "product" else torch.add
    wide = xs[0].dtype if xs[0].dtype.itemsize >= 4 else torch.float32
    total = functools.reduce(combine, (x.to(wide) for x in xs))
    return (total / len(xs) if op == "avg" else total).to(xs[0].dtype)


def _check_bits(found: Tensor, expected: Tensor) -> None:
    """Processors' NaNs differ, so any NaN equals any other."""
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan), (found[:16], expected[:16])
    same = bytes_of(found.masked_fill(nan, 0)).equal(bytes_of(expected.masked_fill(nan, 0)))
    assert same, (found[:16], expected[:16])


def _special_body(member: Member) -> None:
    for (dtype, op), count in member.shared(list(itertools.product(itertools.product(FLOATS, REDUCE_OPS), COUNTS))):
        group, size = member.group, member.size
        with member.case(f"{op} of {count} {dtype}"):
            xs = member.of_ranks(lambda rank, d=dtype, n=count: _special(d, rank, n))
            x, expected = xs[member.rank], _reference(xs, op)
            _check_bits(group.all_reduce(x, op), expected)
            _check_bits(group.all_reduce_async(x.clone(), op).wait(), expected)
            if size > 1:
                mine = expected.chunk(size)[member.rank]
                assert count % size == 0
                _check_bits(group.reduce_scatter(x, 0, op), mine)
                _check_bits(group.reduce_scatter_async(x, 0, op).wait(), mine)
                sizes = [len(expected) - size + 1] + [1] * (size - 1)
                _check_bits(group.reduce_scatterv(x, 0, sizes, op), expected.split(sizes)[member.rank])


def test_zeros_keep_their_sign_and_nan_stays(carrier: Carrier) -> None:
    carrier.run(_special_body)


TOKENS, HIDDEN = 35, 8208


def _slices_body(member: Member) -> None:
    draw, cuts = random.Random(TOKENS), [(0, 1), (TOKENS - 1, TOKENS)]
    cuts += [sorted(draw.sample(range(TOKENS + 1), 2)) for _ in range(3)]
    weight = torch.linspace(0.5, 2, HIDDEN, dtype=torch.float64)
    by_gloo = member.row == "process_group" and member.size > 2  # only started reductions have their own order there
    for dtype, op in member.shared(list(itertools.product(FLOATS, ("sum", "avg", "product")))):
        xs = member.of_ranks(lambda rank, d=dtype: real_numbers(Form((TOKENS, HIDDEN)), d, rank))
        x, group = xs[member.rank], member.group
        residual, w = real_numbers(Form((TOKENS, HIDDEN)), dtype, 99), weight.to(dtype)

        def results(
            part: Tensor, res: Tensor, op: str = op, group: GroupCoordinator = group, w: Tensor = w
        ) -> list[Tensor]:
            found = [group.all_reduce_async(part.clone(), op).wait(), group.reduce_scatter_async(part, 1, op).wait()]
            if by_gloo:
                return found
            found += [group.all_reduce(part, op), group.reduce_scatter(part, 1, op)]
            return [*found, *group.all_reduce_add_rms_norm(part, res, w, 1e-6)]

        with member.case(f"{op} of {dtype}"):
            whole = results(x, residual)
            for first, end in cuts:
                alone = results(x[first:end], residual[first:end])
                for number, (part, full) in enumerate(zip(alone, whole, strict=True)):
                    assert bytes_of(part).equal(bytes_of(full[first:end])), (number, first, end)
            shuffled = torch.tensor(draw.sample(range(TOKENS), TOKENS))
            for number, (part, full) in enumerate(zip(results(x[shuffled], residual[shuffled]), whole, strict=True)):
                assert bytes_of(part).equal(bytes_of(full[shuffled])), (number, "shuffled")


def test_reductions_are_batch_invariant(carrier: Carrier) -> None:
    carrier.run(_slices_body)


def _slices_over_the_backend() -> None:
    group = dist.new_group(backend="parallel_state")
    for dtype in FLOATS:
        x = real_numbers(Form((TOKENS, HIDDEN)), dtype, dist.get_rank())
        parts = [x.clone(), x[:1].clone(), x[3:20].clone(), x[TOKENS - 1 :].clone()]
        for part in parts:
            dist.all_reduce(part, group=group)
        whole = parts[0]
        for part, full in zip(parts[1:], (whole[:1], whole[3:20], whole[TOKENS - 1 :]), strict=True):
            assert bytes_of(part).equal(bytes_of(full)), dtype
    dist.destroy_process_group(group)


def test_sums_over_the_backend_are_batch_invariant(pools: Pools) -> None:
    pools(3).run(_slices_over_the_backend, tp=3)


@contextmanager
def _state(kind: str) -> Iterator[None]:
    libm, kept = ctypes.CDLL("libm.so.6"), ctypes.create_string_buffer(64)
    libm.fegetenv(kept)
    try:
        if kind == "flushes denormals":
            assert torch.set_flush_denormal(True)
        elif kind == "rounds upward":
            assert libm.fesetround(FE_UPWARD[_machine()]) == 0
        yield
    finally:
        libm.fesetenv(kept)


def _machine() -> str:
    return platform.machine()


def _delicate(dtype: torch.dtype, rank: int, count: int) -> Tensor:
    tiny = torch.finfo(dtype).tiny
    values = [tiny / 4, tiny / 2, 1.0, torch.finfo(dtype).eps / 4 + 1, 1 / 3, tiny * 0.75]
    return torch.tensor(values, dtype=torch.float64).mul(1 + rank).repeat(count // 6).to(dtype)


def _in_states_body(member: Member, kind: str) -> list[bytes]:
    found = []
    group, last = member.group, member.size - 1
    for dtype, count in member.shared(list(itertools.product(FLOATS, COUNTS))):
        xs = member.of_ranks(lambda rank, d=dtype, n=count: _delicate(d, rank, n))
        x = xs[member.rank]
        expected = {op: _reference(xs, op) for op in REDUCE_OPS}
        residual, weight = _delicate(dtype, 1, count).view(-1, 6), torch.full((6,), 1 / 3, dtype=dtype)
        results: list[Tensor] = []
        with _state(kind if member.rank == last else ""):
            for op in REDUCE_OPS:
                results += [group.all_reduce(x, op), group.all_reduce_async(x.clone(), op).wait()]
            results += [group.all_gather(group.reduce_scatter(x, 0, op), 0) for op in REDUCE_OPS]
            sizes = [count - member.size + 1] + [1] * (member.size - 1)
            results += [group.all_gatherv(group.reduce_scatterv(x, 0, sizes, "sum"), 0, sizes)]
            results += group.all_reduce_add_rms_norm(x.view(-1, 6), residual, weight, 1e-30)
        with member.case(f"{count} {dtype}"):
            for op, result in zip(REDUCE_OPS, results[::2], strict=False):
                assert bytes_of(result).equal(bytes_of(expected[op])) or _may_differ(member, dtype, op), op
        found += [bytes(bytes_of(each).tolist()) for each in results]
    return found


def _may_differ(member: Member, dtype: torch.dtype, op: str) -> bool:
    return member.size > 2 or (dtype.itemsize < 4 and op in ("sum", "avg", "product"))


@pytest.mark.parametrize("kind", STATES)
def test_a_rank_whose_thread_has_another_state_gets_the_same_bits(carrier: Carrier, kind: str) -> None:
    if carrier.simulated or carrier.size.group == 1:
        pytest.skip("a group of one rank has no peer to differ from")
    if kind == "rounds upward" and _machine() not in FE_UPWARD:
        pytest.skip("FE_UPWARD is unknown on this processor")
    answers = carrier.run(_in_states_body, kind)
    groups = [answers[start : start + carrier.size.group] for start in range(0, len(answers), carrier.size.group)]
    assert all(answer == group[0] for group in groups for answer in group)


def _over_the_backend(kind: str) -> tuple[list[bytes], bool]:
    group = dist.new_group(backend="parallel_state")
    found = []
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
    with _state(kind if dist.get_rank() == 1 else ""):
        for dtype, count, op in itertools.product(FLOATS, COUNTS, ops):
            x = _delicate(dtype, dist.get_rank(), count)
            dist.all_reduce(x, op, group=group)
            found.append(x)
        z = torch.complex(_delicate(torch.float32, 0, 12), _delicate(torch.float32, 1, 12))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.PRODUCT
        group.allreduce([z], options).wait()
        found.append(z)
        kept = torch.full((1,), torch.finfo(torch.float32).tiny / 2).mul(1.0).item() == 0
    dist.destroy_process_group(group)
    return [bytes(bytes_of(each).tolist()) for each in found], kept


@pytest.mark.parametrize("kind", STATES)
def test_over_the_backend_too(pools: Pools, kind: str) -> None:
    (first, _), (second, flushes) = pools(2).run(_over_the_backend, kind, tp=2, timeout_s=60.0)
    assert first == second
    assert flushes == (kind == "flushes denormals"), "a thread must keep its floating-point state"
