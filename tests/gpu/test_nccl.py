"""NCCL on the current stream: every collective and transfer equals the reference that the CPU computes.

World sizes 1, 2 and 4 on however many GPUs there are. Not run on a GPU yet.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators.base import REDUCE_OPS
from device_communicators.errors import CommunicationError, PeerDiedError
from device_communicators.nccl import NcclCommunicator
from tests.contract.cases import (
    MOVABLE,
    REDUCIBLE,
    Form,
    any_bytes,
    bytes_of,
    is_defined,
    joined,
    laid_out,
    reduced,
    sliced,
    small_numbers,
)
from tests.gpu.conftest import GpuRanks

Gpus = Callable[[int], GpuRanks]
LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1)]
"""World size, tp, pp."""
FORMS = (Form((7,)), Form((4, 3)), Form((4, 6), "transposed"), Form((4, 5), "strided"), Form((4, 3), "offset"))


def _on_gpu(x: Tensor, form: Form) -> Tensor:
    return laid_out(x.contiguous().cuda(), form.layout)


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.device.type == "cuda", what
    assert found.shape == expected.shape, what
    assert torch.equal(bytes_of(found.cpu()), bytes_of(expected)), f"{what}: {found.tolist()}, not {expected.tolist()}"


def _groups() -> list[ps.GroupCoordinator]:
    return [ps.get_tp_group(), ps.get_pp_group(), ps.get_world_group()]


def _reductions_body() -> int:
    cases = 0
    for group in _groups():
        rank, size = group.rank_in_group, group.world_size
        for form in FORMS:
            for dtype in REDUCIBLE:
                xs = [small_numbers(form, dtype, each) for each in range(size)]
                for op in (op for op in REDUCE_OPS if is_defined(dtype, op)):
                    what = f"{op} of {form} {dtype} on {group.context}"
                    x, expected = _on_gpu(xs[rank], form), reduced(xs, op)
                    _same(group.all_reduce(x, op), expected, f"all_reduce, {what}")
                    _same(group.all_reduce_(x.clone(), op), expected, f"all_reduce_, {what}")
                    if form.shape[0] % size == 0:
                        part = sliced(expected, 0, size, rank)
                        _same(group.reduce_scatter(x, 0, op), part, f"reduce_scatter, {what}")
                    sizes = [form.shape[0], *[0] * (size - 1)]
                    part = expected if rank == 0 else expected[:0]
                    _same(group.reduce_scatterv(x, 0, sizes, op), part, f"reduce_scatterv, {what}")
                    cases += 1
    return cases


@pytest.mark.parametrize(("world", "tp", "pp"), LAYOUTS)
def test_reductions(gpus: Gpus, world: int, tp: int, pp: int) -> None:
    assert min(gpus(world).run(_reductions_body, tp=tp, pp=pp, timeout_s=300)) > 0


def _moves_body() -> int:
    cases = 0
    for group in _groups():
        rank, size = group.rank_in_group, group.world_size
        for form in FORMS:
            for dtype in MOVABLE:
                what = f"{form} {dtype} on {group.context}"
                xs = [any_bytes(form, dtype, each) for each in range(size)]
                x = _on_gpu(xs[rank], form)
                for dim in range(len(form.shape)):
                    _same(group.all_gather(x, dim), joined(xs, dim), f"all_gather, {what}")
                lengths = [each % form.shape[0] for each in range(1, size + 1)]
                parts = [each[:length] for each, length in zip(xs, lengths, strict=True)]
                mine = x[: lengths[rank]]
                _same(group.all_gatherv(mine, 0, sizes=lengths), joined(parts, 0), f"all_gatherv, {what}")
                _same(group.broadcast(x, size - 1), xs[-1], f"broadcast, {what}")
                gathered = group.gather(x, size - 1, 0)
                assert (gathered is not None) == (rank == size - 1)
                if gathered is not None:
                    _same(gathered, joined(xs, 0), f"gather, {what}")
                if form.shape[0] % size == 0:
                    row = [sliced(each, 0, size, rank) for each in xs]
                    _same(group.all_to_all(x), joined(row, 0), f"all_to_all, {what}")
                    expected = sliced(xs[0], 0, size, rank)
                    _same(group.scatter(x if rank == 0 else None, 0, 0), expected, f"scatter, {what}")
                cases += 1
    return cases


@pytest.mark.parametrize(("world", "tp", "pp"), LAYOUTS)
def test_moves(gpus: Gpus, world: int, tp: int, pp: int) -> None:
    assert min(gpus(world).run(_moves_body, tp=tp, pp=pp, timeout_s=300)) > 0


def _transfers_body() -> None:
    """A ring in which all send first, of sizes that NCCL doesn't buffer; plain, started, and as tensor dicts."""
    group = ps.get_tp_group()
    rank, size = group.rank_in_group, group.world_size
    following, previous = (rank + 1) % size, (rank - 1) % size
    nccl = _nccl_of(group)
    for peer in (following, previous) if rank % 2 else (previous, following):
        nccl.connect(peer)
    for numel in (1, 1000, 1 << 22):
        sent = torch.full((numel,), float(rank), device="cuda")
        sending, receiving = group.isend(sent, following), group.irecv([numel], torch.float32, previous)
        assert bool((receiving.wait() == previous).all())
        sending.wait()
    x = torch.full((5,), float(rank), device="cuda")
    if rank % 2 == 0:
        group.send(x, following)
        got = group.recv([5], torch.float32, previous)
    else:
        got = group.recv([5], torch.float32, previous)
        group.send(x, following)
    assert got.tolist() == [float(previous)] * 5
    out = torch.empty(5, device="cuda")
    nccl.exchange([(x, following)], [(out, previous)])
    assert out.tolist() == [float(previous)] * 5


def _nccl_of(group: ps.GroupCoordinator) -> NcclCommunicator:
    return next(each for each in group.route.communicators if isinstance(each, NcclCommunicator))


@pytest.mark.parametrize("world", [2, 4])
def test_transfers(gpus: Gpus, world: int) -> None:
    gpus(world).run(_transfers_body, tp=world)


def _explain_body() -> tuple[str, Any]:
    return ps.get_tp_group().explain(), torch.cuda.nccl.version()


def test_the_library_is_the_one_that_torch_uses(gpus: Gpus) -> None:
    for text, version in gpus(2).run(_explain_body, tp=2):
        assert f"nccl: NCCL {'.'.join(map(str, version))} (" in text
        assert "cuda tensors on the current stream" in text


def _streams_body() -> None:
    """A call goes behind what the current stream has to do, and what comes after it there sees its result."""
    group = ps.get_tp_group()
    x = torch.zeros(1 << 20, device="cuda")
    group.all_reduce(x)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            x.fill_(group.rank_in_group + 1.0)
            y = group.all_reduce(x) * 2
            started = group.all_reduce_async(x)
            z = started.wait() * 3
        torch.cuda.current_stream().wait_stream(stream)
        total = sum(range(1, group.world_size + 1))
        assert y.unique().tolist() == [2.0 * total]
        assert z.unique().tolist() == [3.0 * total]


def test_a_call_is_on_the_current_stream(gpus: Gpus) -> None:
    gpus(2).run(_streams_body, tp=2)


def _graph_body() -> None:
    group = ps.get_tp_group()
    x = torch.zeros(1000, device="cuda")
    with ps.graph_capture() as capture:
        group.all_reduce(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capture.stream):
            y = group.all_reduce(x) + group.all_gather(x[:10], 0).sum()
    for number in range(100):
        x.fill_(number + group.rank_in_group)
        graph.replay()
        expected = sum(number + rank for rank in range(group.world_size)) * 11.0
        assert y.unique().tolist() == [expected]
    del graph


def test_a_captured_call_can_be_replayed_with_fresh_inputs(gpus: Gpus) -> None:
    gpus(2).run(_graph_body, tp=2)


def _again_body() -> list[int]:
    """The memory that is used on the device, as the driver counts it, behind each round."""
    used = []
    for _ in range(20):
        ps.init_distributed_environment(backend="nccl")
        ps.initialize_model_parallel(2)
        assert ps.get_tp_group().all_reduce(torch.ones(1, device="cuda")).item() == 2
        ps.destroy_distributed_environment()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    return used


def test_destroyed_and_made_again_the_memory_stays_flat(gpus: Gpus) -> None:
    for used in gpus(2).run(_again_body, timeout_s=300):
        assert max(used[5:]) <= used[4] + (64 << 20), used


def _dying_body() -> tuple[str, tuple[int, ...], float]:
    ps.init_distributed_environment(backend="nccl")
    ps.initialize_model_parallel(4)
    group = ps.get_tp_group()
    x = torch.ones(1 << 20, device="cuda")
    group.all_reduce(x)
    torch.cuda.synchronize()
    group.barrier()
    if group.rank_in_group == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        while time.monotonic() < started + 30:
            group.all_reduce(x)
            torch.cuda.synchronize()
    except PeerDiedError as error:
        return type(error).__name__, error.suspect_ranks, time.monotonic() - started
    return "nothing", (), time.monotonic() - started


def test_a_rank_that_ends_is_named_and_frees_those_that_wait() -> None:
    pool = GpuRanks(4)
    try:
        answers = pool.survivors(_dying_body, timeout_s=120)
    finally:
        pool.kill()
    assert sorted(answers) == [0, 1, 2]
    for name, suspects, elapsed_s in answers.values():
        assert (name, suspects) == ("PeerDiedError", (3,))
        assert elapsed_s < 10


def _late_body() -> tuple[str, float]:
    group = ps.get_tp_group()
    nccl = NcclCommunicator(dataclasses.replace(group.context, timeout_s=3.0))
    nccl.set_up()
    started = time.monotonic()
    try:
        if group.rank_in_group == 0:  # the other one doesn't come
            nccl.all_reduce(torch.ones(1, device="cuda"), "sum")
            torch.cuda.synchronize()
            nccl.all_reduce(torch.ones(1, device="cuda"), "sum")
        return "nothing", time.monotonic() - started
    except CommunicationError as error:
        return type(error).__name__, time.monotonic() - started
    finally:
        group.barrier()
        nccl.close()


def test_what_the_device_doesnt_get_done_ends_at_the_deadline(gpus: Gpus) -> None:
    one, other = gpus(2).run(_late_body, tp=2)
    assert one[0] == "CollectiveTimeoutError"
    assert 3.0 <= one[1] < 15.0
    assert other[0] == "nothing"
