from __future__ import annotations

import copy
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import parallel_state as ps
from tests.contract.attempts import environment
from tests.contract.cases import INTEGERS, reduced
from tests.contract.test_c10d import DEADLINE_S, REDUCED, torch_world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
OPS = {
    "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT,
}  # fmt: skip
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
ROUTES = {"shared memory": None, "connections": "off"}
CPU = torch.device("cpu")


def _compare(calls: Callable[[Any, int, int], Iterator[tuple[str, Sequence[Tensor]]]]) -> int:
    with torch_world() as (rank, size):
        gloo = dist.new_group(backend="gloo")
        ours, theirs = (list(calls(group, rank, size)) for group in (dist.group.WORLD, gloo))
        for (name, mine), (_, reference) in zip(ours, theirs, strict=True):
            for one, other in zip(mine, reference, strict=True):
                assert one.dtype == other.dtype and one.equal(other), f"{name}: {one} is not gloo's {other}"
        return len(ours)


def _memory(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(count) % 7 + rank + 1).to(dtype)


def _aliased(group: Any, rank: int, size: int) -> Iterator[tuple[str, Sequence[Tensor]]]:
    for count in (4, 70_000):
        x = _memory(rank, count)
        dist.all_reduce_coalesced([x, x], group=group)
        yield "all_reduce_coalesced of a tensor twice", [x]
        base = _memory(rank, count)
        dist.all_reduce_coalesced([base[:-1], base[1:]], group=group)
        yield "all_reduce_coalesced of overlapping views", [base]
        base = _memory(rank, count)
        work = dist.all_reduce_coalesced([base.view(2, -1).t(), base[1:3]], group=group, async_op=True)
        work.wait()
        yield "all_reduce_coalesced of a transposed view and a part of it", [base]
        x = _memory(rank, count)
        with c10d._coalescing_manager(group):
            dist.all_reduce(x, group=group)
            dist.all_reduce(x[: count // 2], group=group)
        yield "all_reduces of a coalescing manager", [x]
        x, others = _memory(rank, count), [torch.empty(count) for _ in range(size - 1)]
        dist.all_gather([x, *others], x, group=group)
        yield "all_gather into the input, the first output", [x, *others]
        x, others = _memory(rank, count), [torch.empty(count) for _ in range(size - 1)]
        dist.all_gather([*others, x], x, group=group)
        yield "all_gather into the input, the last output", [*others, x]
        whole = _memory(rank, count * size)
        dist.all_gather_into_tensor(whole, whole[:count], group=group)
        yield "all_gather_into_tensor of the first part of the output", [whole]
        whole = _memory(rank, count * size)
        dist.all_gather_into_tensor(whole, whole[1 : count + 1], group=group)
        yield "all_gather_into_tensor of an odd part of the output", [whole]
        first, second, outs = _memory(rank, count), _memory(rank + 10, count), torch.empty(2, size, count)
        lists = [[second, outs[1, 0]], *([outs[0, r], outs[1, r]] for r in range(1, size))]
        dist.all_gather_coalesced(lists, [first, second], group=group)
        yield "all_gather_coalesced into a later input", [second, outs[0, 1:], outs[1]]
        whole, later = torch.empty(size * count), _memory(rank + 10, size * count)
        group.allgather_into_tensor_coalesced([later, whole], [_memory(rank, count), later[:count]]).wait()
        yield "all_gather_into_tensor_coalesced into a later input", [later, whole]
        out, later = torch.empty(count), _memory(rank + 10, size * count)
        group.reduce_scatter_tensor_coalesced([later[:count], out], [_memory(rank, size * count), later]).wait()
        yield "reduce_scatter_tensor_coalesced into a later input", [later, out]
        whole = _memory(rank, size * count)
        dist.reduce_scatter_tensor(whole[:count], whole, group=group)
        yield "reduce_scatter_tensor into the input's first part", [whole]
        whole = _memory(rank, size * count)
        dist.reduce_scatter_tensor(whole[1 : count + 1], whole, group=group)
        yield "reduce_scatter_tensor into an odd part of the input", [whole]
        whole = _memory(rank, size * count)
        dist.reduce_scatter(whole[:count], list(whole.chunk(size)), group=group)
        yield "reduce_scatter into the first input", [whole]
        x, others = _memory(rank, count), [torch.empty(count) for _ in range(size - 1)]
        dist.gather(x, [x, *others] if rank == size - 1 else None, size - 1, group=group)
        yield "gather into the input", [x, *others] if rank == size - 1 else []


def _compare_aliased() -> int:
    return _compare(_aliased)


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_a_call_that_share_memory_give_what_gloo_gives(pools: Pools, size: int) -> None:
    assert min(pools(size).run(_compare_aliased, timeout_s=DEADLINE_S)) > 20


def _exchange_in_place() -> None:
    """gloo overwrites input here before peers read it, so the reference uses separate memory."""
    with torch_world() as (rank, size):
        for count in (2 * size, 70_000 * size):
            x = _memory(rank, count)
            dist.all_to_all_single(expected := torch.empty(count), x.clone())
            dist.all_to_all_single(x, x)
            assert x.equal(expected)
            base = torch.cat([_memory(rank, count), torch.zeros(1)])
            dist.all_to_all_single(base[1:], base[:-1])
            assert base[1:].equal(expected)


def test_all_to_all_of_a_tensor_into_itself(pools: Pools) -> None:
    pools(3).run(_exchange_in_place, timeout_s=DEADLINE_S)


def _several(group: Any, rank: int, size: int) -> Iterator[tuple[str, Sequence[Tensor]]]:
    def two(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.tensor([[2 * rank + 1 + index, 1]] * 2).to(dtype) for index in range(2)]

    for dtype in REDUCED:
        for name, op in OPS.items():
            options = dist.AllreduceOptions()
            options.reduceOp = op
            group.allreduce(tensors := two(dtype), options).wait()
            yield f"all_reduce {name} of two tensors of {dtype}", tensors
    group.allreduce(tensors := [*two(), two()[0]]).wait()
    yield "all_reduce of three tensors", tensors
    group.allreduce([x := two()[0], x]).wait()
    yield "all_reduce of a tensor twice", [x]
    for root in range(size):
        for place in range(2):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, place
            group.broadcast(tensors := two(), options).wait()
            yield f"broadcast of tensor {place} of rank {root}", tensors
    outputs = [[torch.empty(2, 2) for _ in range(2 * size)] for _ in range(2)]
    work = group.allgather(outputs, two())
    for number, found in enumerate(work.get_future().wait()):
        yield f"list {number} of a future of an all_gather of two tensors", found
    work.wait()
    yield "all_gather of two tensors", [*outputs[0], *outputs[1]]
    lists = [[torch.empty(2, 2) for _ in range(2)] for _ in range(size)]
    work = group.allgather_coalesced(lists, two())
    for number, found in enumerate(work.get_future().wait() if size > 1 else []):
        yield f"list {number} of a future of an all_gather_coalesced", found
    work.wait()
    yield "all_gather_coalesced", [*itertools.chain(*lists)]
    works = [group.allreduce_coalesced(2 * [torch.tensor([i + rank])]) for i in range(50)]
    yield "futures of all_reduce_coalesced", [x for work in works for x in work.get_future().wait()]


def _compare_several() -> int:
    return _compare(_several)


def _take_and_refuse_several() -> None:
    with torch_world() as (rank, size):
        world: Any = dist.group.WORLD
        numbers = torch.arange(4.0).view(2, 2)
        world.allreduce([columns := numbers.add(rank).t(), rows := numbers.clone()]).wait()
        expected = numbers.t() * size + sum(range(size)) + numbers * size
        assert columns.equal(expected) and rows.equal(expected)
        x, y = torch.ones(2), torch.ones(3)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        for wrong, text in (
            (lambda: world.allreduce([x, y]), "tensors of one size and dtype"),
            (lambda: world.allreduce([x, x.double()]), "tensors of one size and dtype"),
            (lambda: world.allreduce([x, x], options), "one tensor a rank for an average"),
            (lambda: world.broadcast([x, y]), "tensors of one size and dtype"),
            (lambda: world.allgather([[x, x]], [x, x]), "a list of outputs for each of the 2 inputs"),
            (lambda: world.allgather([[x, x]] * 2, [x, x]), "an output for each of the 2 inputs"),
        ):
            with pytest.raises((ValueError, TypeError), match=text):
                wrong()
        dist.all_reduce(x)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_tensors_a_rank_give_what_gloo_gives(pools: Pools, size: int) -> None:
    assert min(pools(size).run(_compare_several, timeout_s=DEADLINE_S)) > 30
    if size > 1:
        pools(size).run(_take_and_refuse_several, timeout_s=DEADLINE_S)


def _average(off: str | None) -> None:
    with environment(PARALLEL_STATE_SHARED_MEMORY=off), torch_world() as (rank, size):
        backend: Any = dist.group.WORLD._get_backend(CPU)
        carried = [dtype for dtype in INTEGERS if dtype != torch.int16] if off else [*INTEGERS, *UNSIGNED]
        for dtype in (*carried, torch.float32, torch.bfloat16):
            numbers = torch.tensor([0, 1, -1, 3, -7, 100, 127, -128])
            if dtype.is_floating_point:
                xs = [(numbers + other).to(dtype) for other in range(size)]
            else:
                info = torch.iinfo(dtype)
                limits = torch.tensor([info.max, info.min], dtype=dtype)
                xs = [torch.cat([(numbers + other).to(dtype), limits]) for other in range(size)]
            expected = _average_of(xs)
            _check_averages(backend, rank, size, xs[rank], expected, dtype)
        with pytest.raises(ValueError, match="AVG takes numbers"):
            dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)


def _average_of(xs: Sequence[Tensor]) -> Tensor:
    if xs[0].dtype not in UNSIGNED:
        return reduced(xs, "avg")
    bits = 8 * xs[0].itemsize
    sums = [sum(numbers) % 2**bits // len(xs) for numbers in zip(*(x.tolist() for x in xs), strict=True)]
    return torch.tensor(sums, dtype=xs[0].dtype)


def _check_averages(backend: Any, rank: int, size: int, x: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    average = dist.ReduceOp.AVG
    found: dict[str, Tensor] = {}
    dist.all_reduce(found.setdefault("all_reduce", x.clone()), average)
    work = dist.all_reduce(found.setdefault("started", x.clone()), average, async_op=True)
    found["future"] = work.get_future().then(lambda done: done.value()[0].clone()).wait()
    work.wait()
    assert work.is_completed()
    both = [x.clone(), x.clone()]
    dist.all_reduce_coalesced(both, average)
    found["first coalesced"], found["second coalesced"] = both
    same = found.setdefault("one tensor twice", x.clone())
    dist.all_reduce_coalesced([same, same], average)
    for root in range(size):
        dist.reduce(total := x.clone(), root, average)
        if rank == root:
            found[f"reduce to {root}"] = total
    rows = torch.cat([x] * size)
    dist.reduce_scatter_tensor(found.setdefault("reduce_scatter_tensor", torch.empty_like(x)), rows, average)
    dist.reduce_scatter(found.setdefault("reduce_scatter", torch.empty_like(x)), [x] * size, average)
    options = dist.ReduceScatterOptions()
    options.reduceOp = average
    outs = [torch.empty_like(x), torch.empty_like(x)]
    backend_group: Any = dist.group.WORLD
    backend_group.reduce_scatter_tensor_coalesced(outs, [rows, rows], options).wait()
    found["reduce_scatter coalesced"] = outs[1]
    for name, one in found.items():
        if dtype.is_floating_point:
            torch.testing.assert_close(one, expected, msg=lambda text, name=name: f"{name} of {dtype}: {text}")  # type: ignore[misc]
        else:
            assert one.equal(expected), f"{name} of {dtype}: {one} is not {expected}"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", [2, 3])
def test_averages(pools: Pools, size: int, route: str) -> None:
    pools(size).run(_average, ROUTES[route], timeout_s=DEADLINE_S)


PARENT_S, CHILD_S = 60.0, 9.0


def _timeout_of(group: Any) -> float:
    return float(group._get_backend(CPU).options._timeout.total_seconds())


def _children(rank: int, size: int) -> Iterator[tuple[str, Any, float]]:
    timeout = timedelta(seconds=CHILD_S)
    world: Any = dist.group.WORLD
    options = world._get_backend(CPU).options
    mine = [0, 1] if rank < 2 else [2, 3]
    yield "new_group", dist.new_group(timeout=timeout), CHILD_S
    yield "new_group of some", dist.new_group([0, 1], timeout=timeout), CHILD_S
    made = dist.new_group(mine, timeout=timeout, use_local_synchronization=True)
    yield "new_group of its own ranks", made, CHILD_S
    yield "new_group with the parent's options", dist.new_group(timeout=timeout, pg_options=options), CHILD_S
    yield "new_subgroups", dist.new_subgroups(2, timeout=timeout)[0], CHILD_S
    listed = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]], timeout=timeout)[0]
    yield "new_subgroups_by_enumeration", listed, CHILD_S
    part = world.split_group(mine, timeout=timeout, group_name=f"a{mine[0]}", group_desc="a part")
    yield "ProcessGroup.split_group", part, CHILD_S
    yield "a part of a part", part.split_group([0, 1], group_name=f"b{mine[0]}"), CHILD_S
    inherits = world.split_group(mine, group_name=f"c{mine[0]}")
    yield "ProcessGroup.split_group without a timeout", inherits, PARENT_S
    for name in ("d", "e"):
        made = world.split_group(mine, timeout=timeout, opts=copy.deepcopy(options), group_name=f"{name}{mine[0]}")
        yield "ProcessGroup.split_group with a copy of the parent's options", made, CHILD_S
    if hasattr(dist, "set_timeout"):
        made = world.split_group(mine, timeout=timeout, opts=options, group_name=f"f{mine[0]}")
        yield "ProcessGroup.split_group with the parent's options", made, CHILD_S
        for name, given in (("no options", None), ("the parent's options", options)):
            made = dist.split_group(None, [[0, 1], [3, 2]], timeout=timeout, pg_options=given)
            yield f"dist.split_group with {name}", made, CHILD_S
        made = dist.split_group(None, [[0, 1], [3, 2]], timeout=timeout, backend="parallel_state")
        yield "dist.split_group of one backend", made, CHILD_S
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    for dim in ("a", "b"):
        yield f"a mesh's {dim}", mesh.get_group(dim), _default_timeout_s()
    yield "a flattened mesh", mesh["a", "b"]._flatten("all").get_group(), _timeout_s_or_any(mesh)
    yield "a mesh of a group", DeviceMesh.from_group(listed, "cpu").get_group(), CHILD_S


def _default_timeout_s() -> float:
    return float(c10d.default_pg_timeout.total_seconds())


def _timeout_s_or_any(mesh: DeviceMesh) -> float:
    return _timeout_of(mesh["a", "b"]._flatten("all").get_group())


def _make_children() -> list[str]:
    with torch_world(timeout_s=PARENT_S) as (rank, size):
        options = dist.group.WORLD._get_backend(CPU).options  # type: ignore[union-attr]
        before = (options._timeout, options.group_name, list(options.global_ranks_in_group), options.backend)
        names = []
        for name, child, timeout_s in _children(rank, size):
            assert dist.group.WORLD._get_backend(CPU).options is options, name  # type: ignore[union-attr]
            found = (options._timeout, options.group_name, list(options.global_ranks_in_group), options.backend)
            assert found == before, f"{name} changed its parent's options from {before} to {found}"
            names.append(name)
            if child is None or child is dist.GroupMember.NON_GROUP_MEMBER:
                continue
            assert child._get_backend(CPU).name() == "parallel_state", name
            assert _timeout_of(child) == timeout_s, f"{name}: {_timeout_of(child)} s"
            child.allreduce([x := torch.tensor([1.0])]).wait()
            assert x.item() == child.size(), name
        assert before[0] == timedelta(seconds=PARENT_S)
        if rank == 0:
            time.sleep(0.5)
        dist.all_reduce(torch.ones(1))
        return names


def test_a_group_made_from_another_leaves_its_options(pools: Pools) -> None:
    assert len(pools(4).run(_make_children, timeout_s=DEADLINE_S)[0]) > 10


def _wait_past_a_child_s_timeout() -> float:
    with torch_world(timeout_s=PARENT_S) as (rank, _):
        world: Any = dist.group.WORLD
        world.split_group([0, 1], timeout=timedelta(seconds=0.3), group_name="short")
        if rank == 1:
            time.sleep(2.0)
        started = time.monotonic()
        dist.all_reduce(torch.ones(1))
        return time.monotonic() - started


def test_a_short_child_leaves_its_parent_time(pools: Pools) -> None:
    assert pools(2).run(_wait_past_a_child_s_timeout, timeout_s=DEADLINE_S)[0] > 0.5


def _set_timeouts() -> None:
    with torch_world(timeout_s=PARENT_S):
        world: Any = dist.group.WORLD
        backend = world._get_backend(CPU)
        options = backend.options
        ways: list[Callable[[timedelta], object]] = [
            c10d._set_pg_timeout,
            lambda timeout: c10d._set_pg_timeout(timeout, world),
            backend._set_default_timeout,
            backend.set_timeout,
            world.set_timeout,
            lambda timeout: setattr(options, "_timeout", timeout),
            lambda timeout: setattr(backend.options, "_timeout", timeout),
        ]
        if hasattr(dist, "set_timeout"):
            ways.append(dist.set_timeout)
        for seconds, way in enumerate(ways, 11):
            way(timedelta(seconds=seconds))
            assert options._timeout.total_seconds() == seconds, inspect.getsource(way) if seconds > 13 else way
        apart = copy.copy(options), copy.deepcopy(options)
        for each in apart:
            assert (each._timeout, each.group_name, each.backend) == (
                options._timeout,
                options.group_name,
                "parallel_state",
            )
            each._timeout = timedelta(seconds=1)
            assert options._timeout.total_seconds() == seconds
        assert backend.options is options


def test_a_timeout_is_set_in_every_way_that_torch_has(pools: Pools) -> None:
    pools(2).run(_set_timeouts, timeout_s=DEADLINE_S)


def _end_at_a_new_timeout(way: str, off: str | None) -> tuple[str, float]:
    with environment(PARALLEL_STATE_SHARED_MEMORY=off), torch_world(timeout_s=PARENT_S) as (rank, _):
        dist.all_reduce(torch.ones(1))
        made = dist.new_group(backend="gloo")
        timeout = timedelta(seconds=0.5)
        if way == "options":
            dist.group.WORLD._get_backend(CPU).options._timeout = timeout  # type: ignore[union-attr]
        else:
            c10d._set_pg_timeout(timeout)
        started = time.monotonic()
        kind = "nothing"
        if rank == 0:
            with pytest.raises(dist.DistBackendError) as caught:
                dist.all_reduce(torch.ones(1))
            kind = type(caught.value).__name__
        elapsed_s = time.monotonic() - started
        dist.barrier(made)
        return kind, elapsed_s


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("way", ["_set_pg_timeout", "options"])
def test_a_call_ends_at_the_timeout_that_was_set(pools: Pools, way: str, route: str) -> None:
    kind, elapsed_s = pools(2).run(_end_at_a_new_timeout, way, ROUTES[route], timeout_s=DEADLINE_S)[0]
    assert kind == "CollectiveTimeoutError"
    assert 0.4 < elapsed_s < 1.5


def _shard() -> None:
    with torch_world() as (rank, _):
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
        x = sharded_tensor.ones(spec, 4, 2)
        assert len(x.local_shards()) == (1 if rank < 2 else 0)
        assert x.device == CPU
        assert x.to(torch.float64).dtype == torch.float64
        assert x.cpu().device == CPU
        out = torch.zeros(4, 2) if rank == 0 else None
        x.gather(0, out)
        assert out is None or out.eq(1).all()


def test_a_rank_without_shards_is_one_of_cpus(pools: Pools) -> None:
    pools(3).run(_shard, timeout_s=DEADLINE_S)


def _asked_by(module: str, group: Any = None) -> str:
    return str(eval("dist.get_backend(group)", {"__name__": module, "dist": dist, "group": group}))


def _show(shown: str | None) -> dict[str, Any]:
    with environment(PARALLEL_STATE_SHOWN_BACKEND=shown), torch_world("cpu:parallel_state") as (_, size):
        plain = dist.new_group(backend="parallel_state")
        again = dist.new_group()
        gloo = dist.new_group(backend="gloo")
        for group in (plain, again):
            dist.all_reduce(x := torch.ones(1), group=group)
            assert x.item() == size
        ps.initialize_model_parallel(tensor_model_parallel_size=size)
        try:
            assert ps.get_tp_group().all_reduce(torch.ones(1)).item() == size
        finally:
            ps.destroy_model_parallel()
            ps.destroy_distributed_environment()
        return {
            "program": [_asked_by("ignite.distributed", group) for group in (None, plain, again, gloo)],
            "torch": [_asked_by("torch.distributed.fsdp", group) for group in (None, plain, again, gloo)],
            "is gloo": dist.get_backend(plain) is dist.Backend.GLOO,
            "carried by": [group._get_backend(CPU).name() for group in (plain, again, gloo)],
        }


def test_the_backend_is_shown_as_gloo_where_that_is_asked_for(pools: Pools) -> None:
    own = ["cpu:parallel_state", "parallel_state", "cpu:parallel_state", "gloo"]
    as_gloo = ["cpu:gloo", "gloo", "cpu:gloo", "gloo"]
    carried = ["parallel_state", "parallel_state", "gloo"]
    for shown, names in ((None, own), ("gloo", as_gloo), ("parallel_state", own)):
        for found in pools(2).run(_show, shown, timeout_s=DEADLINE_S):
            expected = {"program": names, "torch": own, "is gloo": shown == "gloo", "carried by": carried}
            assert found == expected, shown


def _wrap(shown: str | None) -> str:
    import ignite.distributed as idist

    with environment(PARALLEL_STATE_SHOWN_BACKEND=shown), torch_world():
        idist.sync()
        try:
            return type(idist.auto_model(torch.nn.Linear(2, 2))).__name__
        finally:
            idist.sync(temporary=True)


@pytest.mark.skipif(find_spec("ignite") is None, reason="needs pytorch-ignite")
def test_ignite_wraps_a_model_if_it_is_shown_gloo(pools: Pools) -> None:
    assert pools(2).run(_wrap, None, timeout_s=DEADLINE_S) == ["Linear"] * 2
    assert pools(2).run(_wrap, "gloo", timeout_s=DEADLINE_S) == ["DistributedDataParallel"] * 2
