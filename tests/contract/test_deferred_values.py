from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from device_communicators.base.errors import InvalidArgumentError
from device_communicators.calls.memory import DEFERRED_KEYS, as_bytes, holds_values
from parallel_state import TensorDictSpec
from tests.contract import deferred
from tests.contract.carriers import Carrier, Member
from tests.contract.test_objects import OVER, own_group
from tests.helpers.doors import CALLS, OP_NAMES, call_op, written_by
from tests.hosts import HostRanks, Hosts
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
ROWS = 24
"""Both ROWS and ROWS + 16 are divisible by each size of group."""
NO_TENSORS = {"barrier", "empty", "broadcast_flag", "all_sum", "window"}


class Call(NamedTuple):
    name: str
    run: Callable[[Member, Tensor], Any]
    only: str = ""
    """`real`: only real numbers. `peers`: only groups of several ranks. `pair`: rank 0 sends to rank 1."""


def _sends(member: Member) -> bool:
    return member.rank == 0


def _dict(x: Tensor) -> dict[str, Any]:
    return {"x": x, "n": 1}


def _scatter(member: Member, x: Tensor, **size: Any) -> Tensor:
    return member.group.scatter(
        x if member.rank == 0 or member.simulated else None, member.rank * member.simulated, **size
    )


def _sized_scatter(member: Member, x: Tensor) -> Tensor:
    return _scatter(member, x, size=[ROWS // member.size, 4], dtype=x.dtype)


def _splits(member: Member) -> list[int]:
    return [ROWS // member.size] * member.size


def _uneven(member: Member) -> list[int]:
    return _splits(member) if member.simulated else [rank + 1 for rank in range(member.size)]


def _gatherv(member: Member, x: Tensor) -> Tensor:
    sizes = _uneven(member)
    return member.group.all_gatherv(x[: sizes[member.rank]], 0, sizes)


def _norm(name: str) -> Callable[[Member, Tensor], Any]:
    return lambda member, x: getattr(member.group, name)(x, x, x[0], *([torch.ones(1)] if "static" in name else []))


READING = [
    Call("all_reduce", lambda m, x: m.group.all_reduce(x)),
    Call("all_gather", lambda m, x: (m.group.all_gather(x, 0), m.group.all_gather(x, 1))),
    Call("all_gather_to_list", lambda m, x: m.group.all_gather_to_list(x)),
    Call("all_gatherv", _gatherv),
    Call("reduce_scatter", lambda m, x: (m.group.reduce_scatter(x, 0), m.group.reduce_scatter(x.t(), 1))),
    Call("reduce_scatterv", lambda m, x: m.group.reduce_scatterv(x, 0, _splits(m))),
    Call("gather", lambda m, x: (m.group.gather(x, 0, 0), m.group.gather(x, 0, 1))),
    Call("scatter", lambda m, x: (_scatter(m, x), _sized_scatter(m, x))),
    Call("all_to_all", lambda m, x: (m.group.all_to_all(x), m.group.all_to_all(x, 0, 1))),
    Call("all_to_all", lambda m, x: m.group.all_to_all(x, output_split_sizes=_splits(m), input_split_sizes=_splits(m))),
    Call("broadcast", lambda m, x: m.group.broadcast(x, m.rank * m.simulated)),
    Call("split", lambda m, x: m.group.split(x, 0)),
    Call("all_reduce_add_rms_norm", _norm("all_reduce_add_rms_norm"), "real"),
    Call("all_reduce_add_rms_norm_static_fp8_quant", _norm("all_reduce_add_rms_norm_static_fp8_quant"), "real"),
    Call(
        "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant",
        _norm("all_reduce_add_rms_norm_dynamic_per_token_fp8_quant"),
        "real",
    ),
    Call("all_reduce_async", lambda m, x: m.group.all_reduce_async(x).wait()),
    Call("all_gather_async", lambda m, x: [m.group.all_gather_async(x, dim).wait() for dim in (0, 1)]),
    Call("reduce_scatter_async", lambda m, x: m.group.reduce_scatter_async(x, 0).wait()),
    Call("reduce_scatter_async", lambda m, x: m.group.reduce_scatter_async(x.t(), 1).wait()),
    Call("broadcast_async", lambda m, x: m.group.broadcast_async(x, m.rank * m.simulated).wait()),
    Call("send", lambda m, x: m.group.send(x, 1) if _sends(m) else m.group.recv(x.shape, x.dtype, 0), "pair"),
    Call(
        "isend",
        lambda m, x: m.group.isend(x, 1).wait() if _sends(m) else m.group.irecv(x.shape, x.dtype, 0).wait(),
        "pair",
    ),
    Call("batch_isend_irecv", lambda m, x: _batch(m, [("isend", x, 1)], torch.empty(x.shape, dtype=x.dtype)), "pair"),
]

READING_MESSAGES = [
    Call("broadcast_object", lambda m, x: m.group.broadcast_object([x, 1] if _sends(m) else None)),
    Call("broadcast_object_list", lambda m, x: m.group.broadcast_object_list([x] if _sends(m) else [None])),
    Call("all_gather_object", lambda m, x: m.group.all_gather_object((x, "text"))),
    Call("send_object", lambda m, x: m.group.send_object([x], 1) if _sends(m) else m.group.recv_object(0), "pair"),
    Call(
        "isend_object",
        lambda m, x: m.group.isend_object([x], 1).wait() if _sends(m) else m.group.irecv_object(0).wait(),
        "pair",
    ),
    Call("broadcast_tensor_dict", lambda m, x: m.group.broadcast_tensor_dict(_dict(x) if _sends(m) else None)),
    Call(
        "broadcast_tensor_dict",
        lambda m, x: m.group.broadcast_tensor_dict(_dict(x) if _sends(m) else None, spec=TensorDictSpec.of(_dict(x))),
    ),
    Call(
        "send_tensor_dict",
        lambda m, x: m.group.send_tensor_dict(_dict(x), 1) if _sends(m) else m.group.recv_tensor_dict(0),
        "pair",
    ),
    Call("send_tensor_dict", lambda m, x: _by_spec(m, x, None), "pair"),
    Call(
        "isend_tensor_dict",
        lambda m, x: (
            m.group.isend_tensor_dict(_dict(x), 1).wait() if _sends(m) else m.group.irecv_tensor_dict(0).wait()
        ),
        "pair",
    ),
]  # fmt: skip


def _batch(member: Member, sending: list[Any], out: Tensor) -> Tensor | None:
    receiving: list[Any] = [("irecv", out, 0)]
    for handle in member.group.batch_isend_irecv(sending if _sends(member) else receiving):
        handle.wait()
    return None if _sends(member) else out


def _by_spec(member: Member, x: Tensor, out: Tensor | None) -> dict[Any, Any] | None:
    spec = TensorDictSpec.of(_dict(x))
    if _sends(member):
        return member.group.send_tensor_dict(_dict(x), 1, spec=spec)
    return member.group.recv_tensor_dict(0, spec=spec, out=None if out is None else {"x": out})


class Writing(NamedTuple):
    name: str
    shape: Callable[[Member], Sequence[int]]
    run: Callable[[Member, Tensor, Tensor], Any]
    only: str = ""


def _whole(member: Member) -> list[int]:
    return [ROWS, 4]


def _gathered(member: Member) -> list[int]:
    return [ROWS * member.size, 4]


def _slice(member: Member) -> list[int]:
    return [ROWS // member.size, 4]


def _exchange_dicts(member: Member, sent: dict[str, Any], out: Tensor) -> Any:
    if _sends(member):
        return member.group.send_tensor_dict(sent, 1)
    return member.group.recv_tensor_dict(0, out={"x": out})


def _start_dicts(member: Member, sent: dict[str, Any], out: Tensor) -> Any:
    if _sends(member):
        return member.group.isend_tensor_dict(sent, 1).wait()
    return member.group.irecv_tensor_dict(0, out={"x": out}).wait()


def _broadcast_dict(member: Member, sent: dict[str, Any], out: Tensor, spec: TensorDictSpec | None = None) -> Any:
    if _sends(member):
        return member.group.broadcast_tensor_dict(sent, spec=spec)
    return member.group.broadcast_tensor_dict(None, spec=spec, out={"x": out})


def _op(name: str, member: Member, *args: Any) -> None:
    call_op(member.group, name, *args)


WRITING = [
    Writing("all_reduce_", _whole, lambda m, x, out: m.group.all_reduce_(out)),
    Writing("broadcast_", _whole, lambda m, x, out: m.group.broadcast_(out, m.rank * m.simulated)),
    Writing("all_gather", _gathered, lambda m, x, out: m.group.all_gather(x, 0, out=out)),
    Writing("all_gather", lambda m: [ROWS, 4 * m.size], lambda m, x, out: m.group.all_gather(x, 1, out=out)),
    Writing("all_gather_into_tensor", _gathered, lambda m, x, out: m.group.all_gather_into_tensor(out, x)),
    Writing("all_gather within itself", _gathered, lambda m, x, out: m.group.all_gather(out[:ROWS], 0, out=out)),
    Writing("reduce_scatter", _slice, lambda m, x, out: m.group.reduce_scatter(x, 0, out=out)),
    Writing("reduce_scatter_tensor", _slice, lambda m, x, out: m.group.reduce_scatter_tensor(out, x)),
    Writing("all_to_all", _whole, lambda m, x, out: m.group.all_to_all(x, out=out)),
    Writing("all_to_all_single", _whole, lambda m, x, out: m.group.all_to_all_single(out, x, _splits(m), _splits(m))),
    Writing("batch_isend_irecv", _whole, lambda m, x, out: _batch(m, [("isend", x, 1)], out), "pair"),
    Writing("op all_reduce_", _whole, lambda m, x, out: _op("all_reduce_", m, out, "sum"), "peers"),
    Writing("op broadcast_", _whole, lambda m, x, out: _op("broadcast_", m, out, m.rank * m.simulated), "peers"),
]
WRITING_MESSAGES = [
    Writing("irecv_tensor_dict", _whole, lambda m, x, out: _start_dicts(m, _dict(x), out), "pair"),
    Writing("recv_tensor_dict", _whole, lambda m, x, out: _exchange_dicts(m, _dict(x), out), "pair"),
    Writing("recv_tensor_dict", _whole, lambda m, x, out: _by_spec(m, x, out), "pair"),
    Writing("broadcast_tensor_dict", _whole, lambda m, x, out: _broadcast_dict(m, _dict(x), out)),
    Writing(
        "broadcast_tensor_dict",
        _whole,
        lambda m, x, out: _broadcast_dict(m, _dict(x), out, TensorDictSpec.of(_dict(x))),
    ),
]
RECEIVING = {"recv", "irecv", "recv_object", "irecv_object"}


def _values(member: Member, shape: Sequence[int], is_complex: bool) -> Tensor:
    numbers = torch.arange(float(torch.Size(shape).numel())).view(list(shape)) % 31 + 1 + member.rank
    return torch.complex(numbers, numbers.flip(0)) if is_complex else numbers


def _kinds(only: str = "") -> Iterator[tuple[str, bool, Callable[[Tensor], Tensor]]]:
    for name, make in deferred.REAL.items():
        yield name, False, make
    for name, make in deferred.COMPLEX.items() if only != "real" else ():
        yield name, True, make


def _plain(found: Any) -> Any:
    if isinstance(found, Tensor):
        held = found.detach().clone(memory_format=torch.contiguous_format)
        return str(held.dtype), as_bytes(held).tolist()
    if isinstance(found, dict):
        return {key: _plain(each) for key, each in found.items()}
    return [_plain(each) for each in found] if isinstance(found, (list, tuple)) else found


def _takes_part(member: Member, only: str) -> bool:
    if only == "pair":
        return member.rank < 2 <= member.size and not member.simulated
    return only != "peers" or member.size > 1


def _read_body(member: Member, calls: Sequence[Call] = tuple(READING)) -> None:
    cases = [(call, *kind) for call in calls for kind in _kinds(call.only)]
    for call, kind, is_complex, make in member.shared(cases):
        if not _takes_part(member, call.only):
            continue
        with member.case(f"{call.name} of {kind}"):
            values = _values(member, (ROWS, 4), is_complex)
            x = make(values)
            assert torch.equal(x, values) and not holds_values(x)
            expected = call.run(member, values)
            assert _plain(call.run(member, x)) == _plain(expected)
            assert torch.equal(x, values) and not holds_values(x), "the input has changed"
    for call in member.shared(calls):
        if _takes_part(member, call.only):
            with member.case(f"{call.name} of zeros without memory"):
                found = call.run(member, deferred.zeros(ROWS, 4))
                assert _plain(found) == _plain(call.run(member, torch.zeros(ROWS, 4)))


def test_of_what_is_read(carrier: Carrier) -> None:
    carrier.run(_read_body)


def _written_body(member: Member, calls: Sequence[Writing] = tuple(WRITING)) -> None:
    cases = [(call, *kind) for call in calls for kind in _kinds(call.only)]
    for call, kind, is_complex, make in member.shared(cases):
        if not _takes_part(member, call.only):
            continue
        with member.case(f"{call.name} to {kind}"):
            x, first = (_values(member, shape, is_complex) for shape in ((ROWS, 4), call.shape(member)))
            plain, out = first.clone(), make(first)
            expected, version = call.run(member, x, plain), out._version
            found = call.run(member, x, out)
            assert _plain(found) == _plain(expected)
            assert _plain(out) == _plain(plain) and not holds_values(out)
            assert out._version > version or torch.equal(out, first), "the write was not reported to autograd"
    for call in member.shared(calls):
        if _takes_part(member, call.only) and call.name in ("all_reduce_", "broadcast_", "all_gather", "all_to_all"):
            out = deferred.zeros(*call.shape(member))
            with (
                member.case(f"{call.name} to zeros without memory"),
                pytest.raises(InvalidArgumentError, match="clone"),
            ):
                call.run(member, torch.ones(ROWS, 4), out)


def test_of_what_is_written(carrier: Carrier) -> None:
    carrier.run(_written_body)


def _messages(over: str) -> None:
    with contextlib.nullcontext(ps.get_tp_group()) if over == "hosts" else own_group(over) as group:
        member = Member(group, "messages")
        _read_body(member, READING_MESSAGES)
        _written_body(member, WRITING_MESSAGES)


@pytest.mark.parametrize("over", OVER)
def test_messages(pools: Pools, over: str) -> None:
    pools(3).run(_messages, over, tp=3, timeout_s=60.0)


@pytest.mark.parametrize("placement", [(0, 1), (0, 0, 1)])
def test_messages_between_hosts(on_hosts: Callable[[Sequence[int]], HostRanks], placement: tuple[int, ...]) -> None:
    on_hosts(placement).run(_messages, "hosts", tp=len(placement), timeout_s=60.0)


def test_no_call_is_left_out() -> None:
    tested = (*READING, *READING_MESSAGES, *WRITING, *WRITING_MESSAGES)
    called = {call.name for call in tested} | RECEIVING | NO_TENSORS
    assert CALLS - called == set()


def test_every_op_that_writes_copies_back() -> None:
    """torch's own kernel for deferred tensors can't do this for an op without a result."""
    for name in OP_NAMES:
        for space in ("parallel_state", "parallel_state_python"):
            written = written_by(name, space)
            for key in DEFERRED_KEYS:
                has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"{space}::{name}", key)
                assert has_kernel == bool(written), (space, name, key)


KNOWN_KEYS = ("Autograd", "Autocast", "Composite", "FuncTorch", "Python", "StartOf", "EndOf", "Quantized", "Sparse",
              "NestedTensor")  # fmt: skip


def test_torch_defers_nothing_else() -> None:
    """A new dispatch key may mean tensors whose memory doesn't hold their values: see `holds_values`."""
    devices = "CPU CUDA HIP XLA MPS IPU XPU HPU VE Lazy MTIA MAIA PrivateUse1 PrivateUse2 PrivateUse3 Meta"
    others = "Undefined BackendSelect ADInplaceOrView PreDispatch Functionalize Dense"
    known = {*devices.split(), *others.split(), *DEFERRED_KEYS}
    names = {name for name in torch._C.DispatchKey.__members__ if not name.startswith(KNOWN_KEYS)}
    assert names - known == set()


def _compiled() -> None:
    group = ps.get_tp_group()
    values = torch.arange(1.0, 5.0)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        written = torch._neg_view(x.neg())
        group.all_reduce_(written)
        return group.all_gather(torch._neg_view(x), 0), written * 1

    gathered, written = torch.compile(step, fullgraph=True, backend="aot_eager")(values)
    assert torch.equal(gathered, -values.repeat(2)) and torch.equal(written, values * 2)


@pytest.mark.slow
@pytest.mark.door("compiled")
@pytest.mark.over("shared memory")
def test_in_compiled_code(pools: Pools) -> None:
    pools(2).run(_compiled, tp=2, timeout_s=120.0)


def _torch_calls(rank: int, size: int, of: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Any]]:
    w = torch.arange(1.0, 4.0 * size + 1).view(size, 4) + rank

    def outputs(count: int, *shape: int) -> list[Tensor]:
        return [of(torch.zeros(shape)) for _ in range(count)]

    for is_async in (False, True):

        def ends(work: Any, is_async: bool = is_async) -> None:
            if is_async:
                work.wait()

        x = of(w)
        ends(dist.all_reduce(x, async_op=is_async))
        yield "all_reduce", x
        x = of(w)
        ends(dist.broadcast(x, 1, async_op=is_async))
        yield "broadcast", x
        x = of(w)
        ends(dist.reduce(x, 0, async_op=is_async))
        yield "reduce", x if rank == 0 else None
        out = outputs(size, size, 4)
        ends(dist.all_gather(out, of(w), async_op=is_async))
        yield "all_gather", out
        out = outputs(1, size * size, 4)
        ends(dist.all_gather_into_tensor(out[0], of(w), async_op=is_async))
        yield "all_gather_into_tensor", out
        out = outputs(1, 1, 4)
        ends(dist.reduce_scatter_tensor(out[0], of(w), async_op=is_async))
        yield "reduce_scatter_tensor", out
        out = outputs(1, 4)
        ends(dist.reduce_scatter(out[0], [of(row.clone()) for row in w], async_op=is_async))
        yield "reduce_scatter", out
        out = outputs(size, size, 4) if rank == 0 else None
        ends(dist.gather(of(w), out, 0, async_op=is_async))
        yield "gather", out
        out = outputs(1, 4)
        ends(dist.scatter(out[0], [of(row.clone()) for row in w] if rank == 0 else None, 0, async_op=is_async))
        yield "scatter", out
        out = outputs(1, size, 4)
        ends(dist.all_to_all_single(out[0], of(w), async_op=is_async))
        yield "all_to_all_single", out
        out = outputs(size, 4)
        ends(dist.all_to_all(out, [of(row.clone()) for row in w], async_op=is_async))
        yield "all_to_all", out
    x = of(w)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    yield "a future's value", work.get_future().wait()
    yield "a future's tensor", x
    for send, receive in ((dist.send, dist.recv), (dist.isend, dist.irecv)):
        x = of(w if rank == 0 else torch.zeros(size, 4))
        ended = send(x, 1) if rank == 0 else receive(x, 0) if rank == 1 else None
        if hasattr(ended, "wait"):
            ended.wait()
        yield send.__name__, x
    x = of(w)
    dist.all_reduce_coalesced([x], dist.ReduceOp.SUM)
    yield "all_reduce_coalesced", x


def _torch_backend() -> None:
    from tests.contract.test_c10d import torch_world

    with torch_world("gloo") as (rank, size):
        expected = [(name, _plain(found)) for name, found in _torch_calls(rank, size, torch.clone)]
    with torch_world() as (rank, size):
        for kind, make in deferred.REAL.items():
            for (name, found), (_, plain) in zip(_torch_calls(rank, size, make), expected, strict=True):
                assert _plain(found) == plain, f"{name} of {kind}"
        zeros, out = deferred.zeros(2), torch.ones(2 * size)
        dist.all_gather_into_tensor(out, zeros)
        assert not out.any()
        with pytest.raises(ValueError, match="clone"):
            dist.all_reduce(zeros)
        # torch views complex numbers as real ones, and refuses conjugated tensors.
        values = torch.complex(torch.arange(4.0), torch.arange(4.0))
        for make in deferred.COMPLEX.values():
            x = make(values)
            dist.group.WORLD.allreduce([x]).wait()  # type: ignore[union-attr]
            assert torch.equal(x, values * size)


def _torch_backend_over_gloo() -> None:
    from device_communicators.base import settings

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.SHARED_MEMORY.name, "off")
        _torch_backend()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.door("torch.distributed")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(_torch_backend, marks=pytest.mark.over("shared memory")),
        pytest.param(_torch_backend_over_gloo, marks=pytest.mark.over("connections")),
    ],
)
def test_over_the_backend_of_torch_distributed(pools: Pools, body: Callable[[], None]) -> None:
    pools(3).run(body, timeout_s=120.0)


def _torch_backend_on_hosts(backend: str) -> list[tuple[str, Any]]:
    make = torch.clone if backend == "gloo" else deferred.REAL["negative"]
    dist.init_process_group(backend)
    try:
        calls = _torch_calls(dist.get_rank(), dist.get_world_size(), make)
        found = [(name, _plain(each)) for name, each in calls]
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.door("torch.distributed")
def test_over_the_backend_of_torch_distributed_on_hosts(hosts: Hosts) -> None:
    found = []
    for backend in ("gloo", "parallel_state"):
        with hosts.ranks((0, 0, 1)) as ranks:
            found.append(ranks.run(_torch_backend_on_hosts, backend, timeout_s=120.0))
    assert found[1] == found[0]


def _torch_backend_of_another() -> None:
    """After a world over our backend, gloo still gets the values of lazily negated tensors, as torch computes them."""
    from tests.contract.test_c10d import torch_world

    with torch_world():
        pass
    with torch_world("gloo") as (_, size):
        out, x = torch.zeros(2 * size), torch._neg_view(torch.ones(2))
        dist.all_gather_into_tensor(out, x)
        assert torch.equal(out, -torch.ones(2 * size))


@pytest.mark.over("gloo")
@pytest.mark.door("torch.distributed")
def test_other_backends_keep_what_they_had(pools: Pools) -> None:
    pools(2).run(_torch_backend_of_another, timeout_s=60.0)
