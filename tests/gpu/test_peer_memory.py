"""Kernels in peer memory, by 2, 4 and 8 processes on any number of GPUs. Processes that share a GPU take
turns, so counts are small there. torch allows sharing with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators import CATALOG, Row, build_route, register_route
from device_communicators.base import settings
from device_communicators.base.errors import CollectiveTimeoutError, PeerDiedError
from device_communicators.base.member import Timeout
from device_communicators.peer import kernels as peer_kernels
from device_communicators.peer.kernels import KernelError
from parallel_state.tools.bench.devices import captured
from tests.contract.carriers import twin_of
from tests.contract.cases import Form, bytes_of, joined, real_numbers, reduced, sliced, small_numbers
from tests.gpu.ranks import (
    DRY,
    DRY_NCCL,
    GpuRanks,
    capability,
    device,
    needs_a_gpu,
    on_gpu,
    serve_traced,
    synchronize,
    world,
)
from tests.helpers import cuda_on_cpu, peer_stand_in
from tests.helpers.peers import ALGORITHMS, TABLE, WAYS, peers_of, row_over, share_by, write_table

Gpus = Callable[[int], GpuRanks]
WORLDS = (2, 4) if DRY else (2, 4, 8)
COUNTS = (1, 7, 64, 1000, 4096, 33_333)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMS = (Form((33, 8), "transposed"), Form((33, 8), "strided"), Form((33, 8), "offset"))
SETTINGS = {"PARALLEL_STATE_PEER_MEMORY": "on", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


DRY_ROW = Row("peer_memory", "tests.helpers.peer_stand_in", "StandInPeerMemory", custom_all_reduce=True)


def few(calls: int, size: int) -> int:
    if DRY:
        return calls // 50
    return calls if torch.cuda.device_count() >= size else calls // 10


class PeerRanks(GpuRanks):
    table = ""
    dry: dict[str, str] | None = None

    def _environment(self, rank: int) -> dict[str, str]:
        return {**super()._environment(rank), **SETTINGS, TABLE: self.table, **(self.dry or {})}

    def _target(self, rank: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return (serve_traced, ()) if self.dry is None else (serve_dry, ())


def serve_dry(connection: Connection, variables: dict[str, str]) -> None:
    from parallel_state.groups import coordinator

    def build(context: Any) -> Any:
        rows = [DRY_NCCL, CATALOG[-1]] if settings.NCCL.get() == "on" else [CATALOG[-1]]
        return build_route(context, [DRY_ROW, *rows] if context.custom_all_reduce else rows)

    coordinator.build_route = functools.wraps(build_route)(build)  # type: ignore[attr-defined]
    serve_traced(connection, variables)


@pytest.fixture(scope="module")
def new_peers(
    new_ranks: Callable[[int], GpuRanks], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], GpuRanks]:
    if DRY:
        folder = str(tmp_path_factory.mktemp("peers"))
        PeerRanks.dry = {peer_stand_in.FOLDER: folder, peer_stand_in.LIBRARY: str(cuda_on_cpu.build())}
    else:
        try:
            peer_kernels.nvrtc_version()
        except KernelError as error:
            pytest.skip(str(error))
    PeerRanks.table = write_table(tmp_path_factory.mktemp("table"), "9.0" if DRY else capability())
    return PeerRanks


@pytest.fixture(scope="module")
def peers(new_peers: Callable[[int], GpuRanks]) -> Iterator[Gpus]:
    made: dict[int, GpuRanks] = {}

    def pool(world_size: int) -> GpuRanks:
        if world_size not in made:
            made[world_size] = new_peers(world_size)
        return made[world_size]

    yield pool
    for each in made.values():
        each.kill()


def _all_reduce_body() -> list[bytes]:
    group = ps.get_tp_group()
    peers, rank, size = peers_of(group), group.rank_in_group, group.world_size
    found: list[bytes] = []
    for algorithm in ALGORITHMS:
        for dtype in DTYPES:
            for form in (*(Form((count,)) for count in COUNTS), *FORMS):
                what = f"{algorithm} of {form} {dtype}"
                xs = [small_numbers(form, dtype, each) for each in range(size)]
                x = xs[rank].contiguous().clone().to(device())
                out = torch.empty_like(x)
                peers.group.all_reduce(out, x, algorithm)
                assert torch.equal(out.cpu(), reduced(xs, "sum")), what
                peers.group.all_reduce(x, x, algorithm)
                assert torch.equal(x.cpu(), reduced(xs, "sum")), f"{what}, in place"
            real = real_numbers(Form((1337,)), dtype, rank).to(device())
            out = torch.empty_like(real)
            peers.group.all_reduce(out, real, algorithm)
            found.append(bytes(bytes_of(out.cpu()).tolist()))
    return found


@pytest.mark.parametrize("size", WORLDS)
def test_every_kernel_sums_and_all_ranks_and_kernels_have_the_same_bits(peers: Gpus, size: int) -> None:
    answers = peers(size).run(_all_reduce_body, tp=size, timeout_s=600)
    assert all(each == answers[0] for each in answers)
    of_algorithm = [answers[0][at : at + len(DTYPES)] for at in range(0, len(answers[0]), len(DTYPES))]
    assert all(each == of_algorithm[0] for each in of_algorithm)


def _others_body() -> int:
    group = ps.get_tp_group()
    rank, size = group.rank_in_group, group.world_size
    before = _traffic(group)
    for form in (Form((8 * size, 3)), Form((8 * size, 8), "transposed"), Form((8 * size, 5), "offset")):
        for dtype in DTYPES:
            xs = [small_numbers(form, dtype, each) for each in range(size)]
            x = xs[rank].to(device())
            for dim in (0, 1):
                assert torch.equal(group.all_gather(x, dim).cpu(), joined(xs, dim))
            assert torch.equal(group.reduce_scatter(x, 0).cpu(), sliced(reduced(xs, "sum"), 0, size, rank))
            assert torch.equal(group.all_reduce(x).cpu(), reduced(xs, "sum"))
            assert torch.equal(group.all_reduce(x, "max").cpu(), reduced(xs, "max"))
    return _traffic(group) - before


def _traffic(group: ps.GroupCoordinator) -> int:
    return sum(each.calls for each in group.route.traffic().values())


@pytest.mark.parametrize("size", WORLDS)
def test_the_groups_collectives(peers: Gpus, size: int) -> None:
    assert min(peers(size).run(_others_body, tp=size, timeout_s=600)) > 0


def _ways_body(way: str) -> str:
    group = twin_of(ps.get_tp_group())
    group.route = build_route(group.context, (row_over(group, way),))
    register_route(group.route)
    text = group.explain()
    if group.route.communicators:
        for number in range(20):
            x = torch.full((1000,), float(number), device=device())
            assert bool((group.all_reduce(x) == number * group.world_size).all())
    group.route.close()
    synchronize()
    return text


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("size", WORLDS)
def test_a_way_of_sharing_memory(peers: Gpus, size: int, way: str) -> None:
    needs_a_gpu("CUDA shares the memory")
    for text in peers(size).run(_ways_body, way, tp=size, timeout_s=300):
        assert f"by {WAYS[way].name}" in text


def _graph_body(replays: int) -> None:
    group = ps.get_tp_group()
    rank, size = group.rank_in_group, group.world_size
    x = torch.zeros(1000, device=device(), dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        total = group.all_reduce(x)
        return total, group.all_reduce(x, "max"), group.all_gather(x[:8], 0), group.all_reduce(total * 2)

    with ps.graph_capture() as capture:
        step()
        synchronize()
        graph = captured(step, capture.stream)
    own = random.Random(rank)
    for number in range(replays):
        x.fill_(number % 17 + rank)
        if own.random() < 0.05:
            time.sleep(own.random() * 0.002)
        total, most, rows, again = graph.replay()
        if number % 50 == 0 or number == replays - 1:
            expected = sum(number % 17 + each for each in range(size))
            assert total.unique().tolist() == [expected]
            assert most.unique().tolist() == [number % 17 + size - 1]
            assert rows.view(size, 8)[:, 0].tolist() == [number % 17 + each for each in range(size)]
            assert torch.equal(again, (total * 2 * size))
    group.all_reduce(x)
    synchronize()


@pytest.mark.parametrize("size", WORLDS)
def test_a_graph_of_ours_and_nccls_is_replayed_a_thousand_times(peers: Gpus, size: int) -> None:
    peers(size).run(_graph_body, few(1000, size), tp=size, timeout_s=900)


def _compiled_body() -> None:
    group = ps.get_tp_group()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(x * 2) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if on_gpu() else "aot_eager")
    x = torch.full((64, 8), group.rank_in_group + 1.0, device=device())
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("size", WORLDS)
def test_compiled(peers: Gpus, size: int) -> None:
    peers(size).run(_compiled_body, tp=size, timeout_s=600)


def _random_body(calls: int) -> int:
    group = ps.get_tp_group()
    rank, size = group.rank_in_group, group.world_size
    alike, own = random.Random(3), random.Random(rank)
    streams: list[Any] = [torch.cuda.Stream(), torch.cuda.Stream()] if on_gpu() else [None, None]
    wrong = 0
    for number in range(calls):
        count, dtype, stream = alike.choice(COUNTS), alike.choice(DTYPES), alike.choice(streams)
        if own.random() < 0.02:
            time.sleep(own.random() * 0.002)
        with torch.cuda.stream(stream) if on_gpu() else contextlib.nullcontext():
            counts = torch.arange(count, device=device()) % 5 + number % 7
            x, expected = (counts + rank).to(dtype), counts * size + sum(range(size))
            wrong += int(not torch.equal(group.all_reduce(x), expected.to(dtype)))
    return wrong


@pytest.mark.parametrize("size", WORLDS)
def test_a_thousand_calls_on_two_streams(peers: Gpus, size: int) -> None:
    assert peers(size).run(_random_body, few(1000, size), tp=size, timeout_s=900) == [0] * size


def _dying_body(way: str) -> tuple[str, tuple[int, ...], float]:
    if not DRY:
        share_by(way)
    with world(4):
        group = ps.get_tp_group()
        x = torch.ones(64, device=device())
        group.all_reduce(x)
        synchronize()
        group.barrier()
        if group.rank_in_group == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            while time.monotonic() < started + 30:
                group.all_reduce(x)
                synchronize()
        except PeerDiedError as error:
            synchronize()
            return type(error).__name__, error.suspect_ranks, time.monotonic() - started
        return "nothing", (), time.monotonic() - started


@pytest.mark.parametrize("way", ["symmetric"] if DRY else list(WAYS))
def test_a_rank_that_ends_is_named_and_frees_those_that_wait(new_peers: Callable[[int], GpuRanks], way: str) -> None:
    """Running kernels still write to a dead rank's memory."""
    pool = new_peers(4)
    try:
        answers = pool.survivors(_dying_body, way, timeout_s=180)
    finally:
        pool.kill()
    assert sorted(answers) == [0, 1, 2]
    for name, suspects, elapsed_s in answers.values():
        assert (name, suspects) == ("PeerDiedError", (3,))
        assert elapsed_s < 15


LATE_S = 1.0 if DRY else 3.0


def _late_body() -> tuple[str, tuple[int, ...], float]:
    """The kernel's deadline breaks this process's CUDA, so nothing may follow."""
    ps.init_distributed_environment(backend=os.environ["RANKS_BACKEND"])
    ps.initialize_model_parallel(2)
    first = ps.get_tp_group()
    peers = type(peers_of(first))(dataclasses.replace(first.context, timeout=Timeout(LATE_S)))
    assert peers.admit() is None
    started = time.monotonic()
    if first.rank_in_group == 1:
        time.sleep(2 * LATE_S)
        return "nothing", (), 0.0
    try:
        while time.monotonic() < started + 30:
            peers.all_reduce(torch.ones(8, device=device()), "sum")
            synchronize()
    except CollectiveTimeoutError as error:
        return type(error).__name__, error.suspect_ranks, time.monotonic() - started
    except RuntimeError:  # the trap makes torch's call fail; our next call has the cause
        try:
            peers.group.check_usable()
        except CollectiveTimeoutError as error:
            return type(error).__name__, error.suspect_ranks, time.monotonic() - started
    return "nothing", (), time.monotonic() - started


def test_a_late_rank_is_named_at_the_deadline(new_peers: Callable[[int], GpuRanks]) -> None:
    pool = new_peers(2)
    try:
        answers = pool.survivors(_late_body, timeout_s=180)
    finally:
        pool.kill()
    assert answers[0][:2] == ("CollectiveTimeoutError", (1,))
    assert LATE_S <= answers[0][2] < LATE_S + 3.0


def _again_body() -> list[int]:
    used = []
    for _ in range(10):
        with world(2):
            assert ps.get_tp_group().all_reduce(torch.ones(1, device=device())).item() == 2
        if DRY:
            used.append(len(os.listdir("/proc/self/fd")))
            continue
        synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    return used


def test_destroyed_and_made_again_the_memory_stays_flat(peers: Gpus) -> None:
    for used in peers(2).run(_again_body, timeout_s=300):
        # Files are closed a moment later, with the last thread that uses them.
        highest = min(used[5:]) if DRY else max(used[5:])
        assert len(used) == 10 and highest <= used[4] + (0 if DRY else 64 << 20), used
