from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import parallel_state as ps
from device_communicators import REDUCE_OPS
from tests.contract.attempts import attempt, world
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import FLOATS, INTEGERS, Form, Unchanged, any_bytes, is_defined
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
DTYPES = (*FLOATS, *INTEGERS, torch.float8_e4m3fn, torch.complex64, torch.bool)
FORMS = [Form(shape, layout) for shape in ((24,), (24, 48), (24, 2, 24)) for layout in ("contiguous", "transposed")]
EMPTY = [Form((0,)), Form((24, 0))]
EVERY_NUMBER = list(itertools.product(DTYPES, REDUCE_OPS))
ITS_FORMS = list(itertools.product((FORMS[0], FORMS[3]), (0, -1)))


def _numbers(form: Form, dtype: torch.dtype, rank: int) -> Tensor:
    x = torch.arange(max(1, Form(form.shape).shape and torch.Size(form.shape).numel())) % 3 + rank % 2
    x = x[: torch.Size(form.shape).numel()].to(dtype).view(form.shape)
    return x.transpose(0, -1).contiguous().transpose(0, -1) if form.layout == "transposed" else x


def _comparable(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x  # torch can't compare float8


def _pairs(group: ps.GroupCoordinator, x: Tensor, dim: int, op: str) -> list[tuple[str, Callable[[], Any], Tensor]]:
    found = [
        ("all_gather", lambda: group.all_gather_async(x, dim), group.all_gather(x, dim)),
    ]
    if is_defined(x.dtype, op):
        found.append(("all_reduce", lambda: group.all_reduce_async(x, op), group.all_reduce(x, op)))
        found.append(
            ("reduce_scatter", lambda: group.reduce_scatter_async(x, dim, op), group.reduce_scatter(x, dim, op))
        )
    return found


def _body(member: Member) -> None:
    cases = [(*number, *place) for number, place in member.in_turn(EVERY_NUMBER, ITS_FORMS)]
    cases += [(torch.float32, "sum", *place) for place in itertools.product((*FORMS, *EMPTY), (0, -1))]
    for dtype, op, form, dim in member.shared(cases):
        x = _numbers(form, dtype, member.rank)
        with member.case(f"{dtype} {form} along {dim}, {op}"):
            pairs = _pairs(member.group, x, dim, op)
            unchanged = Unchanged(x)
            handles = [start() for _, start, _ in pairs]
            for handle, (name, _, expected) in zip(handles, pairs, strict=True):
                result = handle.wait()
                assert torch.equal(_comparable(result), _comparable(expected)), name
                assert result.dtype == expected.dtype
                assert handle.wait() is result, "a second wait must return the same tensor"
                assert handle.is_completed()
                assert result.is_contiguous() or member.size == 1
            unchanged.check()


def test_as_with_waiting(carrier: Carrier) -> None:
    carrier.run(_body)


def _broadcast_body(member: Member) -> None:
    for src in range(member.size):
        if not member.can_hear(src):
            continue
        xs = member.of_ranks(lambda rank: any_bytes(Form((3, 5), "transposed"), torch.bfloat16, rank))
        with member.case(f"from {src}"):
            unchanged = Unchanged(xs[member.rank])
            result = member.group.broadcast_async(xs[member.rank], src).wait()
            assert torch.equal(result.view(torch.int16), xs[src].contiguous().view(torch.int16))
            unchanged.check()


def test_broadcast(carrier: Carrier) -> None:
    carrier.run(_broadcast_body)


def _in_flight() -> dict[str, Any]:
    with world(4):
        tp, rank = ps.get_tp_group(), ps.get_rank()
        handles = [tp.all_reduce_async(torch.full((1000,), float(rank + n))) for n in range(50)]
        sums = [handle.wait()[7].item() for handle in reversed(handles)]
        x = torch.ones(4, requires_grad=True)
        facts: dict[str, Any] = {
            "sums": sums == [6.0 + 4 * n for n in reversed(range(50))],
            "detached": not tp.all_reduce_async(x).wait().requires_grad,
            "polled": _polls(tp),
            "traffic": tp.traffic()["iall_reduce_"].calls,
            "split": [tp.split(torch.arange(8.0).view(2, 4), dim).tolist() for dim in (-1, 1)],
            "wrong": [
                attempt(tp.all_reduce_async, 5).kind,
                attempt(tp.all_reduce_async, torch.ones(2), "xor").kind,
                attempt(tp.all_gather_async, torch.ones(2), 3).kind,
                attempt(tp.reduce_scatter_async, torch.ones(3)).kind,
                attempt(tp.broadcast_async, torch.ones(3), 4).kind,
                attempt(tp.split, torch.ones(3)).kind,
                attempt(tp.all_reduce_async, torch.ones(2, dtype=torch.bool), "avg").kind,
            ],
        }
        tp.destroy()
        facts["destroyed"] = [
            attempt(call, torch.ones(4)).kind for call in (tp.all_reduce_async, tp.all_gather_async, tp.broadcast_async)
        ]
    return facts


def _polls(group: ps.GroupCoordinator) -> bool:
    handle = group.all_reduce_async(torch.ones(4))
    while not handle.is_completed():
        pass
    return bool(handle.wait()[0] == 4)


def test_many_in_flight(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_in_flight, timeout_s=DEADLINE_S)):
        assert facts == {
            "sums": True,
            "detached": True,
            "polled": True,
            "traffic": 52,
            "split": [[[float(rank)], [4.0 + rank]]] * 2,
            "wrong": ["InvalidArgumentError"] * 6 + ["UnsupportedError"],
            "destroyed": ["GroupDestroyedError"] * 3,
        }
