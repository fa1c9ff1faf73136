from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import parallel_state as ps
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
REDUCED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
)  # fmt: skip
MOVED = (*REDUCED, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.uint64)
_WORLDS = iter(range(1_000_000))


@contextlib.contextmanager
def torch_world(backend: str = "parallel_state", timeout_s: float = 60.0) -> Iterator[tuple[int, int]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    client = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(f"c10d/{next(_WORLDS)}", client)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    try:
        yield rank, size
    finally:
        dist.destroy_process_group()


def _numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 3, shape).to(dtype)


def _collectives(group: Any, rank: int, size: int) -> Iterator[tuple[str, list[Tensor]]]:
    ops = {
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
        "product": dist.ReduceOp.PRODUCT,
    }
    for dtype in REDUCED:
        for name, op in ops.items():
            x = _numbers(dtype, 3, 5)
            dist.all_reduce(x, op, group=group)
            yield f"all_reduce {name} {dtype}", [x]
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        x = _numbers(torch.int32, 7)
        dist.all_reduce(x, op, group=group)
        yield f"all_reduce {op}", [x]
    strided = torch.rand(4, 6).t()
    dist.all_reduce(strided, group=group)
    yield "all_reduce of a transposed tensor", [strided]
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,), check_invariants=True)
    dist.all_reduce(sparse, group=group)
    yield "all_reduce of a sparse tensor", [sparse.to_dense()]
    for length in (0, 1, 4099):
        x = torch.rand(length)
        outs = [torch.empty(length) for _ in range(size)]
        dist.all_gather(outs, x, group=group)
        yield f"all_gather of {length}", outs
    for dtype in (torch.float32, torch.int64):
        x, out = _numbers(dtype, 2, 3), torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(out, x, group=group)
        yield f"all_gather_into_tensor {dtype}", [out]
        x, out = _numbers(dtype, 2 * size, 3), torch.empty(2, 3, dtype=dtype)
        dist.reduce_scatter_tensor(out, x, group=group)
        yield f"reduce_scatter_tensor {dtype}", [out]
    out = torch.empty(3)
    dist.reduce_scatter(out, [torch.rand(3) for _ in range(size)], group=group)
    yield "reduce_scatter", [out]
    for root in range(size):
        x = torch.rand(3, 2).t()
        dist.broadcast(x, root, group=group)
        yield f"broadcast from {root}", [x]
        x = torch.rand(5)
        dist.reduce(x, root, group=group)
        yield f"reduce to {root}", [x] if rank == root else []
        outs = [torch.empty(4) for _ in range(size)] if rank == root else []
        dist.gather(torch.rand(4), outs or None, root, group=group)
        yield f"gather to {root}", outs
        out = torch.empty(4)
        dist.scatter(out, [torch.rand(4) for _ in range(size)] if rank == root else None, root, group=group)
        yield f"scatter from {root}", [out]
    out = torch.empty(2 * size, 3)
    dist.all_to_all_single(out, torch.rand(2 * size, 3), group=group)
    yield "all_to_all_single", [out]
    sent, received = [rank + other for other in range(size)], [other + rank for other in range(size)]
    out = torch.empty(sum(received), 2)
    dist.all_to_all_single(out, torch.rand(sum(sent), 2), received, sent, group=group)
    yield "all_to_all_single with splits", [out]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "long": "x" * 100 * rank}, group=group)
    yield "all_gather_object", [torch.tensor([len(each["long"]) for each in objects])]
    dist.barrier(group=group)
    pending = [torch.rand(1000) for _ in range(8)]
    for work in [dist.all_reduce(x, group=group, async_op=True) for x in pending]:
        work.wait()
    yield "started all_reduces", pending
    work = dist.all_reduce(x := torch.rand(10), group=group, async_op=True)
    yield "a future", [work.get_future().then(lambda future: future.value()[0] * 2).wait(), x]
    of_world = dist.group.WORLD if group is None else group
    yield "functional", [functional.all_reduce(torch.rand(9), "sum", of_world) + 1]
    gathered = functional.all_gather_tensor(torch.rand(2, 2), 1, of_world)
    yield "functional all_gather", [functional.wait_tensor(gathered)]


def compare_with_gloo() -> int:
    with torch_world() as (rank, size):
        gloo = dist.new_group(backend="gloo")
        found = []
        for group in (None, gloo):
            torch.manual_seed(rank)
            found.append(list(_collectives(group, rank, size)))
        for (name, ours), (other, theirs) in zip(*found, strict=True):
            assert name == other
            for mine, reference in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, reference, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]
        return len(found[0])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_give_what_gloo_gives(pools: Pools, size: int) -> None:
    assert min(pools(size).run(compare_with_gloo, timeout_s=DEADLINE_S)) >= 60


def move_what_gloo_does_not() -> None:
    with torch_world() as (rank, size):
        for dtype in MOVED:
            x = torch.full((3,), rank + 1).to(dtype)
            outs = [torch.empty(3, dtype=dtype) for _ in range(size)]
            dist.all_gather(outs, x)
            assert [out.to(torch.float64)[0].item() for out in outs] == [
                float(torch.tensor(r + 1).to(dtype)) for r in range(size)
            ]
        z = torch.tensor([1 + 2j])
        dist.all_reduce(z)
        assert z.item() == size * (1 + 2j)
        eighth = torch.ones(3).to(torch.float8_e4m3fn)
        dist.all_reduce(eighth)
        assert eighth.float().tolist() == [float(size)] * 3
        large = torch.tensor([2**63 + rank], dtype=torch.uint64)
        dist.all_reduce(large, dist.ReduceOp.MAX)
        assert large.item() == 2**63 + size - 1
        mean = torch.tensor([float(rank)])
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert mean.item() == (size - 1) / 2
        untouched = torch.ones(2) * rank
        dist.reduce(untouched, 0)
        assert rank == 0 or untouched.tolist() == [rank, rank]
        uneven = [torch.empty(r + 1) for r in range(size)]
        dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
        assert [out.tolist() for out in uneven] == [[float(r)] * (r + 1) for r in range(size)]
        with pytest.raises(ValueError, match="PREMUL_SUM"):
            dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0))


def test_dtypes_and_sizes_beyond_gloo(pools: Pools) -> None:
    pools(3).run(move_what_gloo_does_not, timeout_s=DEADLINE_S)


def take_lists_of_views() -> None:
    with torch_world() as (rank, size):
        whole = torch.arange(4.0 * size).add(100 * rank)
        before = whole.clone()
        parts = list(whole.chunk(size))
        of_root = torch.arange(4.0).add(4 * rank)
        for out in (torch.empty(4), torch.empty(4, 2)[:, 0]):
            dist.scatter(out, parts if rank == 0 else None)
            assert out.equal(of_root)
        total = torch.arange(4.0).add(4 * rank).mul(size).add(100 * sum(range(size)))
        out = torch.empty(4)
        dist.reduce_scatter(out, parts)
        assert out.equal(total)
        columns = torch.stack([torch.arange(4.0).add(4 * rank + 100 * other) for other in range(size)])
        received = torch.empty(size, 4)
        dist.all_to_all(list(received), parts)
        assert received.equal(columns)
        apart = torch.empty(size, 4, 2)
        dist.all_to_all(list(apart[:, :, 0]), parts)
        assert apart[:, :, 0].equal(columns)
        assert whole.equal(before)
        dist.all_to_all(list(whole.flip(0).chunk(size)), parts)
        assert whole.equal(before)
        dist.reduce_scatter(parts[0], parts)
        assert parts[0].equal(total)
        whole.copy_(before)
        dist.all_to_all(parts, parts)
        assert whole.view(size, 4).equal(columns)
        whole.copy_(before)
        dist.scatter(parts[-1], parts if rank == 0 else None)
        assert parts[-1].equal(of_root)


def test_lists_of_views_and_of_what_is_written_to(pools: Pools) -> None:
    pools(3).run(take_lists_of_views, timeout_s=DEADLINE_S)


def transfer() -> None:
    with torch_world() as (rank, size):
        following, preceding = (rank + 1) % size, (rank - 1) % size
        large = torch.full((1 << 20,), float(rank))
        out = torch.empty_like(large)
        works = [dist.isend(large, following), dist.irecv(out, preceding)]
        for work in works:
            work.wait()
        assert out.eq(preceding).all()
        batch = torch.empty(2, 3).t()
        operations = [
            dist.P2POp(dist.isend, torch.full((3, 2), float(rank)), following),
            dist.P2POp(dist.irecv, batch, preceding),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert batch.eq(preceding).all()
        # Tags match in any order; messages of one tag match in the order of sends.
        if rank == 0:
            for tag in (5, 6, 5):
                dist.send(torch.tensor([tag, len(str(tag))]), 1, tag=tag)
            dist.send(torch.empty(0), 1, tag=7)
        elif rank == 1:
            for tag in (7, 6, 5, 5):
                received = torch.empty(0) if tag == 7 else torch.empty(2, dtype=torch.int64)
                dist.recv(received, 0, tag=tag)
                assert tag == 7 or received[0] == tag
        if rank == size - 1:
            sources = []
            for _ in range(size - 1):
                value = torch.empty(1)
                sources.append(dist.recv(value))
                assert value.item() == sources[-1]
            assert sorted(sources) == list(range(size - 1))
        else:
            dist.send(torch.tensor([float(rank)]), size - 1)
        dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_transfers(pools: Pools, size: int) -> None:
    pools(size).run(transfer, timeout_s=DEADLINE_S)


def start_in_opposite_orders() -> None:
    with torch_world() as (rank, size):
        groups = [dist.new_group(), dist.new_group()]
        for length in (16, 100_000):
            xs = [torch.ones(length), torch.ones(length)]
            order = (0, 1) if rank == 0 else (1, 0)
            works = {which: dist.all_reduce(xs[which], group=groups[which], async_op=True) for which in order}
            for which in order:
                works[which].wait()
            assert all(x.eq(size).all() for x in xs)
        x = torch.ones(10)
        dist.all_reduce(x, async_op=True)
        dist.barrier()
        assert x.eq(size).all()
        work = dist.all_reduce(x, async_op=True)
        deadline = time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        y = torch.ones(3)
        future = dist.all_reduce(y, async_op=True).get_future()

        def again(done: Any) -> Tensor:
            dist.all_reduce(z := done.value()[0].clone())
            return z

        assert future.then(again).wait().eq(size * size).all()


def test_started_calls_go_on_by_themselves_and_in_any_order_of_groups(pools: Pools) -> None:
    pools(2).run(start_in_opposite_orders, timeout_s=DEADLINE_S)


def come_late() -> float:
    with torch_world() as (rank, size):
        store = dist.distributed_c10d._get_default_store()
        for length in (
            16,
            100_000,
        ):
            if rank == 1:
                store.wait([f"started {length}"])
            x = torch.ones(length)
            work = dist.all_reduce(x, async_op=True)
            if rank == 0:
                with pytest.raises(dist.DistBackendError, match="the call isn't done after the 50 ms"):
                    work.wait(timedelta(milliseconds=50))
                assert not work.is_completed()
                store.set(f"started {length}", "")
            work.wait()
            assert work.is_success()
            assert x.eq(size).all()
            # The call alone references its tensor and handle.
            held = torch.ones(length)
            alive = weakref.ref(held.untyped_storage())
            dist.all_reduce(held, async_op=True)
            del held
            after = torch.ones(1)
            dist.all_reduce(after)
            assert after == size
            assert alive() is None
        before = time.process_time()
        time.sleep(1)
        return time.process_time() - before


def test_a_started_call_waits_for_no_peer_and_idle_ranks_burn_no_cpu(pools: Pools) -> None:
    assert max(pools(2).run(come_late, timeout_s=DEADLINE_S)) < 0.05


def wait_for_any_source() -> float:
    with torch_world() as (rank, _):
        before = time.thread_time()
        if rank == 1:
            time.sleep(1)
            dist.send(torch.ones(1), 0)
        else:
            dist.recv(torch.empty(1))
        return time.thread_time() - before


def test_a_wait_for_any_rank_sleeps(pools: Pools) -> None:
    assert max(pools(2).run(wait_for_any_source, timeout_s=DEADLINE_S)) < 0.05


def shared_mappings() -> int:
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("/parallel_state-" in line for line in maps)


def make_groups_again_and_again() -> list[int]:
    with torch_world() as (_, size):
        counts = []
        store = dist.distributed_c10d._get_default_store()
        for _ in range(3):
            group = dist.new_group()
            dist.barrier()
            kept = [key for key in getattr(store, "list_keys", list)() if "host_memory" in key]
            assert not kept
            dist.all_reduce(x := torch.ones(4), group=group)
            dist.all_reduce(x, group=group, async_op=True).wait()
            assert x.eq(size * size).all()
            dist.destroy_process_group(group)
            del group
            counts.append(shared_mappings())
        return counts


def test_nothing_stays_of_a_group_that_was_destroyed(pools: Pools) -> None:
    for first, *later in pools(2).run(make_groups_again_and_again, timeout_s=DEADLINE_S):
        assert later == [first, first]


def make_a_group_of_ones_own() -> None:
    """Each rank creates only its own group, as in Megatron. torch then gives both groups the same name."""
    with torch_world() as (rank, _):
        mine = [0, 1] if rank < 2 else [2, 3]
        if rank == 3:
            time.sleep(1.0)
        group = dist.new_group(mine)
        dist.all_reduce(x := torch.tensor([float(rank)]), group=group)
        assert x.item() == sum(mine)
        dist.barrier()


def test_groups_of_one_name_made_by_their_own_ranks_alone(pools: Pools) -> None:
    pools(4).run(make_a_group_of_ones_own, timeout_s=DEADLINE_S)


def leave_work_behind() -> float:
    with contextlib.ExitStack() as stack:
        rank, _ = stack.enter_context(torch_world())
        left = [] if rank else [dist.all_reduce(torch.ones(4), async_op=True), dist.irecv(torch.ones(4), 1)]
        started = time.monotonic()
        stack.close()
        took = time.monotonic() - started
        for work in left:
            with pytest.raises(dist.DistBackendError):
                work.wait()
        return took


def test_the_end_of_a_group_with_work_left_takes_bounded_time(pools: Pools) -> None:
    assert max(pools(2).run(leave_work_behind, timeout_s=DEADLINE_S)) < 10


def fork_a_child() -> None:
    with torch_world() as (rank, _):
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    dist.all_reduce(torch.ones(1))
                except ps.UsageError as error:
                    if "forked" not in str(error):
                        os._exit(2)
                    dist.destroy_process_group()
                    dist.init_process_group("parallel_state", store=dist.HashStore(), rank=0, world_size=1)
                    dist.all_reduce(torch.ones(1))
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        dist.barrier()


def test_a_forked_child_is_no_rank(pools: Pools) -> None:
    pools(2).run(fork_a_child, timeout_s=DEADLINE_S)


def misuse() -> None:
    with torch_world() as (rank, size):
        group = dist.group.WORLD
        x, out = torch.ones(1000), torch.empty(1)
        with pytest.raises(ValueError, match="1000 elements"):
            group.allgather_into_tensor_coalesced([out], [x])
        with pytest.raises(ValueError, match="input of"):
            group.reduce_scatter_tensor_coalesced([out], [x])
        with pytest.raises(ValueError, match="dtype"):
            group.reduce_scatter([torch.ones(1)], [[torch.ones(1, dtype=torch.float64)] * size])
        with pytest.raises(ValueError, match="PREMUL_SUM"):
            dist.reduce(x, 0, op=dist._make_nccl_premul_sum(2.0))
        with pytest.raises(ValueError, match="expanded"):
            dist.irecv(torch.zeros(1).expand(4), 1 - rank)
        with pytest.raises(ValueError, match="expanded"):
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1).expand(4), 1 - rank)])
        dist.all_reduce(x)
        assert x.eq(size).all()


def test_what_is_wrong_on_one_rank_is_refused_there(pools: Pools) -> None:
    pools(2).run(misuse, timeout_s=DEADLINE_S)


def receive_in_a_callback() -> None:
    with torch_world() as (rank, _):
        if rank == 1:
            for value in (1.0, 2.0):
                dist.send(torch.tensor([value]), 0)
        else:
            first, second = torch.empty(1), torch.empty(1)
            future = dist.irecv(first, 1).get_future()
            future.then(lambda done: dist.recv(second, 1)).wait()
            assert (first.item(), second.item()) == (1.0, 2.0)
        dist.barrier()


def test_a_callback_may_receive_from_the_same_rank(pools: Pools) -> None:
    pools(2).run(receive_in_a_callback, timeout_s=DEADLINE_S)


def call_in_a_handler() -> str:
    with torch_world() as (rank, _):
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["handled"])
            return ""

        def handle(number: int, frame: object) -> None:
            try:
                dist.barrier()
            finally:
                store.set("handled", "")

        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            return str(error)
        finally:
            signal.signal(signal.SIGALRM, before)
    raise AssertionError("unreachable")


def test_a_handler_of_signals_can_not_wait_for_the_group_it_interrupts(pools: Pools) -> None:
    assert "in a call of the group already" in pools(2).run(call_in_a_handler, timeout_s=DEADLINE_S)[0]


def interrupt_a_receive(under_way: int) -> tuple[list[str], list[str]] | None:
    with contextlib.suppress(RuntimeError), torch_world() as (rank, _):
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["interrupted"])
            return None
        _others = [dist.irecv(torch.empty(2), 1, tag=7) for _ in range(under_way)]
        return interrupted([lambda: dist.recv(torch.empty(2), 1)] * 2)
    raise AssertionError("unreachable")


def interrupted(calls: Sequence[Callable[[], object]]) -> tuple[list[str], list[str]]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    raised, texts = [], []
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        for call in calls:
            with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
                call()
            raised.append(caught.type.__name__)
            texts.append(str(caught.value))
    finally:
        signal.signal(signal.SIGALRM, before)
        dist.distributed_c10d._get_default_store().set("interrupted", "")
    return raised, texts


@pytest.mark.parametrize("under_way", [0, 2], ids=["alone", "with others under way"])
def test_ctrl_c_ends_a_receive_and_the_group(pools: Pools, under_way: int) -> None:
    told = pools(2).run(interrupt_a_receive, under_way, timeout_s=DEADLINE_S)[0]
    assert told[0] == ["KeyboardInterrupt", "GroupFailedError"]
    assert "interrupted by a signal" in told[1][1]


def interrupt_a_wait() -> tuple[list[str], float] | None:
    with torch_world() as (rank, _):
        x = torch.ones(1 << 18)
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["interrupted"])
            dist.all_reduce(x)
            return None
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.2)
        raised, _ = interrupted([work.wait])
        work.wait()
        return raised, x[0].item()
    raise AssertionError("unreachable")


def test_ctrl_c_ends_a_wait_and_not_the_call(pools: Pools) -> None:
    assert pools(2).run(interrupt_a_wait, timeout_s=DEADLINE_S)[0] == (["KeyboardInterrupt"], 2.0)


def transfer_under_detail() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with torch_world() as (rank, size):
            x = torch.ones(1)
            if rank == 0:
                dist.send(x, 1)
            elif rank == 1:
                dist.recv(x, 0)
            dist.all_reduce(x)
            assert x == size
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_transfers_count_for_nothing_in_torch_s_checks(pools: Pools) -> None:
    pools(3).run(transfer_under_detail, timeout_s=DEADLINE_S)


def reduce_to_different_ranks() -> str:
    with contextlib.suppress(RuntimeError), torch_world() as (rank, _):
        with pytest.raises(dist.DistBackendError) as caught:
            dist.reduce(torch.ones(2), rank)
        return type(caught.value).__name__
    raise AssertionError("unreachable")


def test_reductions_to_different_ranks_are_a_mismatch(pools: Pools) -> None:
    assert pools(2).run(reduce_to_different_ranks, timeout_s=DEADLINE_S) == ["CollectiveMismatchError"] * 2


def differ() -> tuple[str, ...]:
    with contextlib.suppress(RuntimeError), torch_world() as (rank, _):
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(torch.ones(2 + rank))
        return type(caught.value).__name__, str(caught.value)
    raise AssertionError("unreachable")


def test_a_mismatch_is_named_and_a_torch_error(pools: Pools) -> None:
    for kind, text in pools(2).run(differ, timeout_s=DEADLINE_S):
        assert kind == "CollectiveMismatchError"
        assert "2 × float32" in text
        assert "3 × float32" in text


def time_out() -> tuple[str, str] | None:
    with contextlib.suppress(RuntimeError), torch_world() as (rank, _):
        dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
        if rank == 1:
            time.sleep(2.5)
            return None
        with pytest.raises(dist.DistBackendError) as caught:
            dist.recv(torch.ones(2), 1)
        return type(caught.value).__name__, str(caught.value)
    raise AssertionError("unreachable")


def test_a_receive_ends_at_its_deadline_and_names_the_rank(pools: Pools) -> None:
    told = pools(2).run(time_out, timeout_s=DEADLINE_S)[0]
    assert told[0] == "CollectiveTimeoutError"
    assert "global rank 1" in told[1]


def miss_a_barrier() -> str:
    with torch_world() as (rank, size):
        dist.monitored_barrier()
        text = ""
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="can be used further") as caught:
                dist.monitored_barrier(timeout=timedelta(seconds=0.2), wait_all_ranks=True)
            text = str(caught.value)
        dist.all_reduce(x := torch.ones(1))
        assert x.item() == size
        return text


def test_a_monitored_barrier_names_all_who_are_missing(pools: Pools) -> None:
    assert "Ranks 1, 2 failed to pass" in pools(3).run(miss_a_barrier, timeout_s=DEADLINE_S)[0]


def split() -> float | None:
    with torch_world() as (rank, _):
        ranks = [0, 1] if rank < 2 else [2]
        part = dist.group.WORLD.split_group(ranks, timeout=timedelta(seconds=60), group_name=f"part{ranks[0]}")
        work = part.allreduce([x := torch.tensor([rank + 1.0])])
        work.wait()
        part.shutdown()
        return x.item()


def test_a_group_is_split(pools: Pools) -> None:
    assert pools(3).run(split, timeout_s=DEADLINE_S) == [3.0, 3.0, 3.0]


def join_a_world_of_torch() -> None:
    with torch_world() as (rank, size):
        ps.initialize_model_parallel(tensor_model_parallel_size=size)
        try:
            total = ps.get_tp_group().all_reduce(torch.tensor([rank + 1.0]))
            x = torch.tensor([rank + 1.0])
            dist.all_reduce(x)
            assert total.item() == x.item() == size * (size + 1) / 2
        finally:
            ps.destroy_model_parallel()
            ps.destroy_distributed_environment()


def test_model_parallel_groups_join_a_world_of_this_backend(pools: Pools) -> None:
    pools(2).run(join_a_world_of_torch, timeout_s=DEADLINE_S)


def test_importing_registers_it_and_leaves_the_defaults() -> None:
    assert dist.Backend.backend_capability["parallel_state"] == ["cpu"]
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
