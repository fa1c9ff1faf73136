"""Windows: `group.window`, and torch's over our backend."""

from __future__ import annotations

import importlib
import itertools
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import parallel_state as ps
from device_communicators.c10d import creation
from tests.contract.attempts import Outcome, attempt, environment, world
from tests.contract.test_c10d import torch_world
from tests.extent import LONG
from tests.failure.worlds import ROUTES, settings_of
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
TORCHS: Any = c10d  # its windows are in torch 2.15
ROUNDS = 1_000_000 if LONG else 100_000
LITMUS_DEADLINE_S = 60.0 + ROUNDS * 1e-3
DTYPES = (torch.float32, torch.int32, torch.int8, torch.bfloat16, torch.bool, torch.float64, torch.complex64)
needs_torchs_windows = pytest.mark.skipif(
    not hasattr(TORCHS, "_new_window"), reason=f"torch {torch.__version__} has no windows: needs torch >= 2.15"
)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    creation.load()


def _around() -> int:
    cases = 0
    with world(3):
        group = ps.get_world_group()
        size, rank = group.world_size, group.rank_in_group
        after, before = (rank + 1) % size, (rank - 1) % size
        for dtype, count in itertools.product(DTYPES, (1, 7, 5000)):
            window = group.window([size, count], dtype)
            assert window.tensor.dtype == dtype and window.tensor.shape == (size, count)
            assert not window.tensor.to(torch.float64 if not dtype.is_complex else dtype).any(), "it isn't zeros"
            group.barrier()
            for turn in range(3):
                sent = ((torch.arange(2 * count) + rank + turn) % 2).to(dtype)[::2]
                window.put(sent, after, rank * count, signal=turn > 0)
                if turn == 0:
                    window.signal(after)
                window.wait_signal(before)
                came = ((torch.arange(2 * count) + before + turn) % 2).to(dtype)[::2]
                assert torch.equal(window.tensor[before], came), (dtype, count, turn)
                other = window.map_remote_tensor(after)
                assert other.shape == (size, count) and torch.equal(other[rank], sent)
                window.signal(before)
                window.wait_signal(after)
                cases += 1
            window.map_remote_tensor(after)[after].fill_(1)
            window.signal(after)
            window.wait_signal(before)
            assert torch.equal(window.tensor[rank], torch.ones(count, dtype=dtype))
            window.put(torch.zeros(count, dtype=dtype), rank, 0, signal=True)
            window.wait_signal(rank)
            assert torch.equal(window.tensor[0], torch.zeros(count, dtype=dtype))
            window.deregister()
    return cases


def test_puts_signals_and_mapped_tensors(pools: Pools) -> None:
    assert pools(3).run(_around, timeout_s=DEADLINE_S) == [len(DTYPES) * 9] * 3


def _parts_differ() -> list[Any]:
    with world(2):
        group = ps.get_world_group()
        rank = group.rank_in_group
        window = group.window(
            [9000] if rank else [8000, 1, 1, 1, 1, 1, 1, 1, 1, 1], torch.int64 if rank else torch.float16
        )
        other = window.map_remote_tensor(1 - rank)
        empty = group.window([0, 4])
        empty.put(torch.empty(0), 1 - rank, 0)
        empty.put(torch.empty(0), 1 - rank, 0, signal=True)
        empty.wait_signal(1 - rank)
        assert attempt(empty.wait_signal, 1 - rank, 0).kind == "CollectiveTimeoutError"
        assert empty.map_remote_tensor(1 - rank).shape == (0, 4)
        group.barrier()
        address = window.tensor.data_ptr()
        window.deregister()
        del other
        again = group.window([9000] if rank else [2000], torch.int64)
        found = [window.tensor.dim(), again.tensor.data_ptr() == address]
        again.deregister()
    return found


def test_ranks_may_have_different_parts(pools: Pools) -> None:
    assert pools(2).run(_parts_differ, timeout_s=DEADLINE_S) == [[10, True], [1, True]]


def _wrong() -> list[Outcome]:
    with world(2):
        group = ps.get_world_group()
        peer = 1 - group.rank_in_group
        window = group.window([8])
        gone = group.window([8])
        gone.deregister()
        found = [
            attempt(call)
            for call in (
                lambda: window.put(torch.ones(2), peer, 7),
                lambda: window.put(torch.ones(9), peer, signal=True),
                lambda: window.put(torch.ones(1), peer, -1),
                lambda: window.put(torch.ones(2, dtype=torch.int32), peer),
                lambda: window.put(torch.ones(2, device="meta"), peer),
                lambda: window.put(torch.ones(2), 2),
                lambda: window.signal(-1),
                lambda: window.map_remote_tensor(2),
                lambda: gone.put(torch.ones(1), peer),
                lambda: gone.signal(peer),
                lambda: gone.wait_signal(peer),
                lambda: gone.map_remote_tensor(peer),
            )
        ]
        found.append(attempt(window.wait_signal, peer, 0.05))
        group.barrier()
        window.signal(peer)
        window.wait_signal(peer)
        assert group.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        assert not window.tensor.any()
    found.append(attempt(window.put, torch.ones(1), peer))
    return found


def test_wrong_calls_are_refused_and_change_nothing(pools: Pools) -> None:
    for rank, found in enumerate(pools(2).run(_wrong, timeout_s=DEADLINE_S)):
        kinds = [each.kind for each in found]
        assert kinds == ["InvalidArgumentError"] * 12 + ["CollectiveTimeoutError", "GroupDestroyedError"], found
        words = ("elements 7 to 9", "elements 0 to 9", "elements -1", "dtype", "CPU tensor", "0 to 1, but is 2")
        for word, outcome in zip((*words, "but is -1", "but is 2", *["deregistered"] * 4), found, strict=False):
            assert word in outcome.text, outcome
        assert f"global rank {1 - rank} has not signalled" in found[12].text


def _without_symmetric_memory() -> Outcome:
    with environment(PARALLEL_STATE_SYMMETRIC_BYTES="0"), world(2):
        found = attempt(ps.get_world_group().window, [2])
        assert ps.get_world_group().all_reduce(torch.ones(1)).item() == 2.0
    return found


def test_without_symmetric_memory_it_is_refused_on_all(pools: Pools) -> None:
    for found in pools(2).run(_without_symmetric_memory, timeout_s=DEADLINE_S):
        assert found.kind == "UnsupportedError" and "PARALLEL_STATE_SYMMETRIC_BYTES" in found.text, found


def _without_shared_memory() -> list[str]:
    with environment(PARALLEL_STATE_SHARED_MEMORY="off"), world(2):
        group = ps.get_world_group()
        rank, peer = group.rank_in_group, 1 - group.rank_in_group
        window = group.window([2], torch.int64)
        window.put(torch.tensor([5 + rank]), peer, 1)
        window.signal(peer)
        window.wait_signal(peer)
        assert window.tensor.tolist() == [0, 5 + peer]
        found = [attempt(window.map_remote_tensor, peer).kind]
        window.deregister()
        found += [attempt(window.put, torch.tensor([1]), peer).kind, attempt(window.wait_signal, peer).kind]
    return [*found, attempt(window.signal, peer).kind]


def test_without_shared_memory_it_goes_over_connections(pools: Pools) -> None:
    for found in pools(2).run(_without_shared_memory, timeout_s=DEADLINE_S):
        assert found == ["UnsupportedError", *["InvalidArgumentError"] * 3]


def _alone() -> list[str]:
    with world(2, 1):
        one = ps.get_pp_group()
        assert one.world_size == 1
        window, other = one.window([4], torch.int64), one.window([1])
        address = window.tensor.data_ptr()
        window.put(torch.tensor([7, 8]), 0, 2)
        window.signal(0)
        window.wait_signal(0)
        assert window.tensor.tolist() == [0, 0, 7, 8]
        assert window.map_remote_tensor(0).data_ptr() == address
        found = [attempt(window.put, torch.tensor([1]), 1).kind, attempt(window.wait_signal, 0, 0.01).kind]
        window.deregister()
        found.append(attempt(window.signal, 0).kind)
    return [*found, attempt(other.signal, 0).kind]


def test_a_group_of_one_has_windows(pools: Pools) -> None:
    for found in pools(2).run(_alone, timeout_s=DEADLINE_S):
        assert found == [
            "InvalidArgumentError",
            "CollectiveTimeoutError",
            "InvalidArgumentError",
            "GroupDestroyedError",
        ]


def _interrupted(route: str) -> tuple[str, int]:
    def handler(*_: Any) -> None:
        raise InterruptedError("a handler")

    with environment(**settings_of(route)), world(2):
        group = ps.get_world_group()
        window = group.window([1], torch.int64)
        kind = ""
        if group.rank_in_group == 0:
            before = signal.signal(signal.SIGUSR1, handler)
            timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1))  # type: ignore[arg-type]
            timer.start()
            kind = attempt(window.wait_signal, 1).kind
            timer.join()
            signal.signal(signal.SIGUSR1, before)
            window.signal(1)
            window.wait_signal(1)
        else:
            window.wait_signal(0)
            window.put(torch.tensor([5]), 0)
            window.signal(0)
        group.barrier()
        return kind, int(window.tensor.item())


@pytest.mark.parametrize("route", ROUTES)
def test_a_signal_handler_ends_a_wait(pools: Pools, route: str) -> None:
    assert pools(2).run(_interrupted, route, timeout_s=DEADLINE_S) == [("InterruptedError", 5), ("", 0)]


def _message_passing(rounds: int) -> int:
    """Returns how often rank 1 didn't read what rank 0 put before its signal."""
    with world(2):
        group = ps.get_world_group()
        window = group.window([2, 64], torch.int64)
        seen, wrong, values = window.tensor.numpy(), 0, torch.empty(64, dtype=torch.int64)
        for number in range(1, rounds + 1):
            count = 1 + number % 64
            if group.rank_in_group == 0:
                values[:count] = number
                window.put(values[:count], 1, 64 - count)
                window.put(values[:1], 1, 64)
                window.signal(1)
                window.wait_signal(1)
            else:
                window.wait_signal(0)
                wrong += bool((seen[0, 64 - count :] != number).any() or seen[1, 0] != number)
                window.signal(0)
        return wrong


def test_message_passing(pools: Pools) -> None:
    assert pools(2).run(_message_passing, ROUNDS, timeout_s=LITMUS_DEADLINE_S) == [0, 0]


def _store_buffering(rounds: int) -> tuple[int, int]:
    """Each rank puts, then reads the other's: at least one must read the new number. Returns how often neither did,
    and how often both did."""
    with world(2):
        group = ps.get_world_group()
        peer = 1 - group.rank_in_group
        window = group.window([1], torch.int64)
        numbers, own = torch.arange(rounds + 1), window.tensor.numpy()
        found = torch.empty(rounds, dtype=torch.int64)
        read = found.numpy()
        for number in range(1, rounds + 1):
            window.put(numbers[number : number + 1], peer)
            read[number - 1] = own[0]
            window.signal(peer)
            window.wait_signal(peer)
        expected = torch.arange(1, rounds + 1)
        both = group.all_gather(found.view(1, -1), 0)
        missed = (both < expected).sum(0)
        return int((missed == 2).sum()), int((missed == 0).sum())


def test_store_buffering(pools: Pools) -> None:
    results = pools(2).run(_store_buffering, ROUNDS, timeout_s=LITMUS_DEADLINE_S)
    assert results[0][0] == 0, f"in {results[0][0]} of {ROUNDS} rounds neither rank read what the other had put"


def _torchs(count: int, dtype: torch.dtype, is_async: bool, registers: bool) -> None:
    """Does as torchcomms' WindowRmaTest.py. `registers`: the window gets its memory after its creation."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    memory = torch.ones(count * size, dtype=dtype)
    window = TORCHS._new_window(None if registers else memory)
    if registers:
        window.tensor_register(memory)
    x = torch.full([count], rank, dtype=dtype)
    for _ in range(10):
        works = [window.put(x, after, after * count, is_async)]
        works[0].wait()
        works.append(window.signal(after, is_async))
        works.append(window.wait_signal(before, is_async))
        for work in works:
            assert work.wait() and work.is_completed()
        mine = window.map_remote_tensor(rank)
        assert torch.equal(mine[rank * count :][:count], torch.full([count], before, dtype=dtype))
        window.signal(before, False)
        window.wait_signal(after, False)
    window.tensor_deregister()


def _oracle() -> int:
    cases = 0
    with torch_world():
        assert TORCHS._supports_window()
        for count, dtype, is_async, registers in itertools.product(
            (4, 1024, 100_000), (torch.float, torch.int, torch.int8), (True, False), (True, False)
        ):
            _torchs(count, dtype, is_async, registers)
            cases += 1
        rank, size = dist.get_rank(), dist.get_world_size()
        for dtype in (torch.float32, torch.int32, torch.bfloat16):
            memory = (torch.arange(64 * size) % 100).to(dtype).view(size, 64)
            window = TORCHS._new_window(memory)
            kinds = [window.get_attr(each).access_type.name for each in range(size)]
            assert kinds == ["SEPARATE"] * size, "the tensor was copied"
            there = window.map_remote_tensor((rank + 1) % size)
            assert there.dtype == dtype and there.shape == memory.shape and torch.equal(there, memory)
            dist.barrier()
            own = window.map_remote_tensor(rank)
            inside = TORCHS._new_window(own[1:])
            assert inside.get_attr(rank).access_type.name == "UNIFIED"
            assert inside.map_remote_tensor(rank).data_ptr() == own[1:].data_ptr()
            inside.put(torch.full([2], 3.0).to(dtype), rank, 1, False)
            assert own[1, :4].tolist() == [memory[1, 0].item(), 3, 3, memory[1, 3].item()]
            inside.tensor_deregister()
            window.tensor_deregister()
            cases += 1
    return cases


@needs_torchs_windows
@pytest.mark.parametrize("size", [2, 3])
def test_torchs_windows(pools: Pools, size: int) -> None:
    assert pools(size).run(_oracle, timeout_s=DEADLINE_S) == [39] * size


def _alone_over_torch() -> Outcome:
    with torch_world():
        for rank in range(2):  # torch makes groups on all ranks
            group = dist.new_group([rank])
            if rank == dist.get_rank():
                own = group
        assert TORCHS._supports_window(own)
        window = TORCHS._new_window(torch.zeros(4), own)
        window.put(torch.tensor([7.0, 8.0]), 0, 2, False)
        window.signal(0, False)
        window.wait_signal(0, False)
        assert window.map_remote_tensor(0).tolist() == [0, 0, 7, 8]
        wrong = attempt(lambda: window.put(torch.ones(2), 1, 0, False))
        window.tensor_deregister()
    return wrong


@needs_torchs_windows
def test_a_group_of_torch_with_one_rank_has_windows(pools: Pools) -> None:
    for wrong in pools(2).run(_alone_over_torch, timeout_s=DEADLINE_S):
        assert wrong.kind == "InvalidArgumentError", wrong


def _wrong_over_torch() -> list[Outcome]:
    with torch_world():
        rank = dist.get_rank()
        peer = 1 - rank
        window, gone = TORCHS._new_window(torch.zeros(8)), TORCHS._new_window(torch.zeros(8))
        bare = TORCHS._new_window()
        gone.tensor_deregister()
        bindings: Any = importlib.import_module("torch._C._distributed_c10d")
        hinted, brief = bindings.PutOptions(), bindings.WaitSignalOptions()
        hinted.hints = {"channels": "4"}
        brief.timeout = timedelta(milliseconds=50)
        found = [
            attempt(call)
            for call in (
                lambda: window.put(torch.ones(2), peer, 7, False),
                lambda: window.put(torch.ones(2, dtype=torch.int32), peer, 0, False),
                lambda: window.put(torch.ones(2), 2, 0, False),
                lambda: window.signal(2, False),
                lambda: window.wait_signal(2, True),
                lambda: gone.put(torch.ones(1), peer, 0, False),
                lambda: bare.signal(peer, False),
                lambda: bare.tensor_register(torch.ones(4, 4).t()),
                lambda: window.tensor_register(torch.ones(4)),
                lambda: window.put(torch.ones(2), peer, 0, False, hinted),
                lambda: window.wait_signal(peer, False, brief),
                lambda: window.wait_signal(peer, True, brief).wait(),
            )
        ]
        late = window.wait_signal(peer, True)
        assert not late.is_completed()
        dist.barrier()
        window.signal(peer, False)
        assert late.wait() and late.get_future().done()
        dist.all_reduce(torch.ones(3))
        dist.barrier()
    found.append(attempt(lambda: window.signal(peer, False)))
    return found


@needs_torchs_windows
def test_wrong_calls_of_torchs_windows(pools: Pools) -> None:
    for found in pools(2).run(_wrong_over_torch, timeout_s=DEADLINE_S):
        kinds = [each.kind for each in found]
        wrong, torchs = ["InvalidArgumentError"] * 5, ["ValueError"] * 4
        assert kinds[:9] == wrong + torchs, found
        assert kinds[9:] == ["NotImplementedError", *["CollectiveTimeoutError"] * 2, "DistBackendError"], found
        assert "channels" in found[9].text and "has not signalled" in found[10].text


def _views_outlive() -> float:
    with world(2):
        group = ps.get_world_group()
        window = group.window([1000])
        window.put(torch.ones(1000), 1 - group.rank_in_group)
        group.barrier()
        views: list[Tensor] = [window.tensor, window.map_remote_tensor(1 - group.rank_in_group)]
        del window
    return sum(each.sum().item() for each in views)


def test_views_outlive_window_and_group(pools: Pools) -> None:
    assert pools(2).run(_views_outlive, timeout_s=DEADLINE_S) == [2000.0] * 2
