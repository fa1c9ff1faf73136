"""Each operation gives one right answer through every door, on every transport of CPUs. A door is a way to call:
coordinator methods, forms with `out` or a handle, ops, compiled calls, torch.distributed, compat modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from device_communicators.cpu import native
from parallel_state.compat import sglang, vllm
from tests.contract.attempts import environment, world
from tests.contract.test_compat_sglang import PLAIN
from tests.helpers.doors import call_op
from tests.hosts import HostRanks
from tests.workers import WorkerPool

SIZE = 3
SHAPE = (6, SIZE)
TRANSPORTS = {
    "shared memory": "shared_memory", "connections": "hierarchical", "hosts": "hierarchical", "gloo": "process_group",
}  # fmt: skip
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather", "send")
Call = Callable[[Tensor], Tensor]
Found = tuple[str, dict[tuple[str, str], str]]


def _expected(operation: str, rank: int) -> Tensor:
    xs = [_input(each) for each in range(SIZE)]
    rows = SHAPE[0] // SIZE
    mine = slice(rank * rows, (rank + 1) * rows)
    return {
        "all_reduce": lambda: torch.stack(xs).sum(0),
        "all_gather": lambda: torch.cat(xs),
        "reduce_scatter": lambda: torch.stack(xs).sum(0)[mine],
        "broadcast": lambda: xs[1],
        "all_to_all": lambda: torch.cat([x[mine] for x in xs]),
        "gather": lambda: torch.cat(xs) if rank == 0 else torch.empty(0, SHAPE[1]),
        "send": lambda: xs[(rank - 1) % SIZE],
    }[operation]()


def _input(rank: int) -> Tensor:
    return (torch.arange(SHAPE[0] * SHAPE[1]) % 5 + 10 * rank).float().view(SHAPE)


def _sent_around(rank: int, send: Callable[[], object], receive: Callable[[], Tensor]) -> Tensor:
    if rank == SIZE - 1:
        x = receive()
        send()
        return x
    send()
    return receive()


def _of_coordinator(tp: ps.GroupCoordinator) -> dict[str, dict[str, Call]]:
    before, after = (tp.rank_in_group - 1) % SIZE, (tp.rank_in_group + 1) % SIZE

    def started_send(x: Tensor) -> Tensor:
        sent, came = tp.isend(x, after), tp.irecv(SHAPE, torch.float32, before)
        sent.wait()
        return came.wait()

    return {
        "coordinator": {
            "all_reduce": tp.all_reduce,
            "all_gather": lambda x: tp.all_gather(x, 0),
            "reduce_scatter": lambda x: tp.reduce_scatter(x, 0),
            "broadcast": lambda x: tp.broadcast(x, 1),
            "all_to_all": tp.all_to_all,
            "gather": lambda x: _or_empty(tp.gather(x, 0, 0)),
            "send": lambda x: _sent_around(
                tp.rank_in_group, lambda: tp.send(x, after), lambda: tp.recv(SHAPE, torch.float32, before)
            ),
        },
        "into a tensor": {
            "all_reduce": lambda x: tp.all_reduce_(x.clone()),
            "all_gather": lambda x: tp.all_gather(x, 0, out=torch.empty(SIZE * SHAPE[0], SHAPE[1])),
            "broadcast": lambda x: tp.broadcast_(x.clone(), 1),
        },
        "started": {
            "all_reduce": lambda x: tp.all_reduce_async(x).wait(),
            "all_gather": lambda x: tp.all_gather_async(x, 0).wait(),
            "reduce_scatter": lambda x: tp.reduce_scatter_async(x, 0).wait(),
            "broadcast": lambda x: tp.broadcast_async(x, 1).wait(),
            "send": started_send,
        },
    }


def _of_ops(tp: ps.GroupCoordinator) -> dict[str, Call]:
    before, after = (tp.rank_in_group - 1) % SIZE, (tp.rank_in_group + 1) % SIZE
    cpu = torch.device("cpu")
    return {
        "all_reduce": lambda x: call_op(tp, "all_reduce", x, "sum"),
        "all_gather": lambda x: call_op(tp, "all_gather", x, 0),
        "reduce_scatter": lambda x: call_op(tp, "reduce_scatter", x, 0, "sum"),
        "broadcast": lambda x: call_op(tp, "broadcast", x, 1),
        "all_to_all": lambda x: call_op(tp, "all_to_all", x, None, None),
        "gather": lambda x: call_op(tp, "gather", x, 0, 0).view(-1, SHAPE[1]),
        "send": lambda x: _sent_around(
            tp.rank_in_group,
            lambda: call_op(tp, "send", x, after),
            lambda: call_op(tp, "recv", None, SHAPE, torch.float32, cpu, before),
        ),
    }


def _of_torch(group: dist.ProcessGroup) -> dict[str, Call]:
    rank = dist.get_rank(group)

    def into(rows: int, call: Callable[[Tensor], object]) -> Tensor:
        out = torch.empty(rows, SHAPE[1])
        call(out)
        return out

    def in_place(call: Callable[..., object], x: Tensor, *arguments: Any) -> Tensor:
        y = x.clone()
        call(y, *arguments, group=group)
        return y

    def gathered(x: Tensor) -> Tensor:
        parts = [torch.empty(SHAPE) for _ in range(SIZE)] if rank == 0 else None
        dist.gather(x, parts, group=group)
        return _or_empty(None if parts is None else torch.cat(parts))

    return {
        "all_reduce": lambda x: in_place(dist.all_reduce, x),
        "all_gather": lambda x: into(
            SIZE * SHAPE[0], lambda out: dist.all_gather(list(out.chunk(SIZE)), x, group=group)
        ),
        "reduce_scatter": lambda x: into(
            SHAPE[0] // SIZE, lambda out: dist.reduce_scatter(out, list(x.chunk(SIZE)), group=group)
        ),
        "broadcast": lambda x: in_place(dist.broadcast, x, 1),
        "all_to_all": lambda x: into(SHAPE[0], lambda out: dist.all_to_all_single(out, x, group=group)),
        "gather": gathered,
        "send": lambda x: _sent_around(
            rank,
            lambda: dist.send(x, (rank + 1) % SIZE, group=group),
            lambda: into(SHAPE[0], lambda out: dist.recv(out, (rank - 1) % SIZE, group=group)),
        ),
    }


def _or_empty(x: Tensor | None) -> Tensor:
    return torch.empty(0, SHAPE[1]) if x is None else x


def _compiled(call: Call) -> Call:
    return torch.compile(call, backend="aot_eager", fullgraph=True)


def _doors() -> dict[str, dict[str, Call]]:
    tp = ps.get_tp_group()
    coordinator = _of_coordinator(tp)
    return {
        **coordinator,
        "registered op": _of_ops(tp),
        "compiled": {name: _compiled(call) for name, call in coordinator["coordinator"].items()},
        "functions": {
            "all_reduce": ps.reduce_from_tensor_model_parallel_region,
            "all_gather": lambda x: ps.gather_from_sequence_parallel_region(x, False),
            "reduce_scatter": ps.reduce_scatter_to_sequence_parallel_region,
        },
        "torch.distributed": _of_torch(dist.new_group(backend="parallel_state")),
        "compat vllm": {
            "all_reduce": vllm.tensor_model_parallel_all_reduce,
            "all_gather": lambda x: vllm.tensor_model_parallel_all_gather(x, 0),
            "reduce_scatter": lambda x: vllm.tensor_model_parallel_reduce_scatter(x, 0),
            "broadcast": lambda x: vllm.get_tp_group().broadcast(x.clone(), 1),
            "gather": lambda x: _or_empty(vllm.tensor_model_parallel_gather(x, 0, 0)),
        },
    }


def _of_sglang() -> dict[str, Call]:
    return {
        "all_reduce": lambda x: sglang.tensor_model_parallel_all_reduce(x.clone()),
        "all_gather": lambda x: sglang.tensor_model_parallel_all_gather(x, 0),
        "broadcast": lambda x: sglang.get_tp_group().broadcast(x.clone(), 1),
    }


CASES = {
    "coordinator": OPERATIONS,
    "into a tensor": ("all_reduce", "all_gather", "broadcast"),
    "started": ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"),
    "registered op": OPERATIONS,
    "compiled": OPERATIONS,
    "functions": ("all_reduce", "all_gather", "reduce_scatter"),
    "torch.distributed": OPERATIONS,
    "compat vllm": ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather"),
    "compat sglang": ("all_reduce", "all_gather", "broadcast"),
}


@contextlib.contextmanager
def _over(transport: str) -> Iterator[None]:
    def unavailable() -> Any:
        raise native.NativeUnavailableError("a test wants gloo")

    load = native.load
    try:
        if transport == "gloo":
            native.load = unavailable
        with environment(PARALLEL_STATE_SHARED_MEMORY="off" if transport == "connections" else "on"):
            yield
    finally:
        native.load = load


def _through_all(transport: str) -> Found:
    found = {}
    with _over(transport):
        with world(SIZE) as group:
            row = ps.get_tp_group().route.communicators[0].name
            for door, calls in _doors().items():
                found.update({(door, each): _wrong(group.rank, each, call) for each, call in calls.items()})
        with world() as group:
            sglang.init_distributed_environment(backend="gloo")
            sglang.get_parallel().override_permanently(**{**PLAIN, "tp_size": SIZE})
            sglang.initialize_model_parallel()
            calls = _of_sglang()
            found.update({("compat sglang", each): _wrong(group.rank, each, call) for each, call in calls.items()})
            sglang.destroy_model_parallel()
    return row, found


def _wrong(rank: int, operation: str, call: Call) -> str:
    x, expected = _input(rank), _expected(operation, rank)
    try:
        answer = call(x)
    except Exception as error:
        return repr(error)
    told = "" if answer.equal(expected) else f"{answer} is not {expected}"
    return told if x.equal(_input(rank)) else f"{told}; its input has changed"


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Callable[[str], list[Found]]:
    found: dict[str, list[Found]] = {}

    def of(transport: str) -> list[Found]:
        if transport in found:
            return found[transport]
        found[transport] = []
        pool: WorkerPool | HostRanks
        if transport == "hosts":
            pool = request.getfixturevalue("on_hosts")((0, 0, 1))
        else:
            pool = request.getfixturevalue("pools")(SIZE)
        found[transport] = pool.run(_through_all, transport, timeout_s=120.0)
        return found[transport]

    return of


@pytest.mark.parametrize(("door", "operation"), [(door, each) for door, offered in CASES.items() for each in offered])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_door_gives_the_same(
    answers: Callable[[str], list[Found]], transport: str, door: str, operation: str
) -> None:
    found = answers(transport)
    assert found, "the ranks failed in a test before this one"
    for row, errors in found:
        assert row == TRANSPORTS[transport]
        assert errors[door, operation] == ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_door_is_left_out(answers: Callable[[str], list[Found]], transport: str) -> None:
    offered = {(door, each) for door, operations in CASES.items() for each in operations}
    found = answers(transport)
    assert found and all(set(errors) == offered for _, errors in found)
