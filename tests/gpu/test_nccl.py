from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators import REDUCE_OPS
from device_communicators.cuda import nccl_library
from device_communicators.nccl import windows
from device_communicators.nccl.communicator import NcclCommunicator
from tests.contract.cases import (
    MOVABLE,
    REDUCIBLE,
    Form,
    any_bytes,
    bytes_of,
    is_defined,
    joined,
    reduced,
    sliced,
    small_numbers,
)
from tests.gpu.ranks import (
    CARRIERS,
    DRY,
    GpuRanks,
    device,
    groups_of_several,
    nccl_of,
    needs_a_gpu,
    on_gpu,
    synchronize,
)
from tests.gpu.test_capture import graph_of
from tests.helpers import nccl_stand_in

Gpus = Callable[[int], GpuRanks]
LAYOUTS = [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1)]
FORMS = (Form((7,)), Form((4, 3)), Form((4, 6), "transposed"), Form((4, 5), "strided"), Form((4, 3), "offset"))


def _on_device(x: Tensor) -> Tensor:
    """Copies `x` as bytes, because other copies don't support all dtypes."""
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).to(device(), copy=True)
    return memory.view(x.dtype).as_strided(x.size(), x.stride(), x.storage_offset())


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.device.type == device().type, what
    assert found.shape == expected.shape, what
    assert torch.equal(bytes_of(found.cpu()), bytes_of(expected)), f"{what}: {found.tolist()}, not {expected.tolist()}"


def _cases(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Form, torch.dtype]]:
    """Yields all pairs on 2 ranks. More ranks are slower on one GPU, and get one form for each dtype."""
    for number, dtype in enumerate(dtypes):
        for place, form in enumerate(FORMS):
            if ps.get_world_group().world_size == 2 or (number + place) % len(FORMS) == 0:
                yield form, dtype


def _reductions_body() -> int:
    cases = 0
    for group in groups_of_several():
        rank, size = group.rank_in_group, group.world_size
        for form, dtype in _cases(REDUCIBLE):
            xs = [small_numbers(form, dtype, each) for each in range(size)]
            x = _on_device(xs[rank])
            for op in (op for op in REDUCE_OPS if is_defined(dtype, op)):
                what, expected = f"{op} of {form} {dtype} on {group.context}", reduced(xs, op)
                _same(group.all_reduce(x, op), expected, f"all_reduce, {what}")
                _same(group.all_reduce_(x.clone(), op), expected, f"all_reduce_, {what}")
                if form.shape[0] % size == 0:
                    part = sliced(expected, 0, size, rank)
                    _same(group.reduce_scatter(x, 0, op), part, f"reduce_scatter, {what}")
                sizes = [form.shape[0], *[0] * (size - 1)]
                part = expected if rank == 0 else expected[:0]
                _same(group.reduce_scatterv(x, 0, sizes, op), part, f"reduce_scatterv, {what}")
                cases += 1
            assert torch.equal(bytes_of(x.cpu()), bytes_of(xs[rank])), f"an input of {group.context} was changed"
    return cases


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("world", "tp", "pp"), LAYOUTS)
def test_reductions(gpus: Gpus, carrier: str, world: int, tp: int, pp: int) -> None:
    assert min(gpus(world).run_over(carrier, _reductions_body, tp=tp, pp=pp, timeout_s=300)) > 0


def _moves_body() -> int:
    cases = 0
    for group in groups_of_several():
        rank, size = group.rank_in_group, group.world_size
        for form, dtype in _cases(MOVABLE):
            what = f"{form} {dtype} on {group.context}"
            xs = [any_bytes(form, dtype, each) for each in range(size)]
            x = _on_device(xs[rank])
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


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("world", "tp", "pp"), LAYOUTS)
def test_moves(gpus: Gpus, carrier: str, world: int, tp: int, pp: int) -> None:
    assert min(gpus(world).run_over(carrier, _moves_body, tp=tp, pp=pp, timeout_s=300)) > 0


def _started_body() -> None:
    group = ps.get_tp_group()
    rank, size = group.rank_in_group, group.world_size
    x = torch.arange(4 * size, device=device(), dtype=torch.float32) + rank
    total = torch.arange(4 * size) * size + sum(range(size))
    summed, gathered = group.all_reduce_async(x), group.all_gather_async(x, 0)
    part, told = group.reduce_scatter_async(x, 0), group.broadcast_async(x, size - 1)
    assert part.wait().tolist() == total[4 * rank : 4 * rank + 4].tolist()
    assert told.wait().tolist() == (torch.arange(4 * size) + size - 1).tolist()
    assert gathered.wait().tolist() == [each + other for other in range(size) for each in range(4 * size)]
    assert summed.wait().tolist() == total.tolist()
    ones = torch.ones(3, 8, device=device())
    norm, residual = group.all_reduce_add_rms_norm(ones, ones, torch.ones(8, device=device()))
    assert residual.unique().tolist() == [size + 1.0]
    torch.testing.assert_close(norm, torch.ones_like(norm))


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 4])
def test_what_is_started_and_waited_for_later(gpus: Gpus, carrier: str, world: int) -> None:
    gpus(world).run_over(carrier, _started_body, tp=world)


def _alone_body() -> None:
    group, x = ps.get_tp_group(), torch.arange(6.0, device=device())
    assert group.all_reduce(x) is x
    assert group.all_gather(x, 0).tolist() == group.reduce_scatter(x, 0).tolist() == x.tolist()
    assert group.broadcast_tensor_dict({"x": x})["x"] is x
    assert device() == ps.get_pp_group().device


def test_one_rank(gpus: Gpus) -> None:
    gpus(1).run(_alone_body, tp=1)


def _ring_body() -> None:
    """All ranks send first, more than NCCL buffers; in blocking and started calls, and in one launch."""
    group = ps.get_tp_group()
    rank, size = group.rank_in_group, group.world_size
    following, previous = (rank + 1) % size, (rank - 1) % size
    nccl = nccl_of(group)
    assert nccl is not None
    for numel in (1, 1000, 1 << (16 if DRY else 20)):
        sent = torch.full((numel,), float(rank), device=device())
        sending, receiving = group.isend(sent, following), group.irecv([numel], torch.float32, previous)
        assert bool((receiving.wait() == previous).all())
        sending.wait()
    input_splits = [5 if peer == following else 0 for peer in range(size)]
    output_splits = [5 if peer == previous else 0 for peer in range(size)]
    x = torch.full((5,), float(rank), device=device())
    assert nccl.all_to_all(x, output_splits, input_splits).tolist() == [float(previous)] * 5


@pytest.mark.parametrize("world", [2, 4])
def test_a_ring_in_which_all_send_first(gpus: Gpus, world: int) -> None:
    gpus(world).run_over("nccl", _ring_body, tp=world)


def _pairs_body() -> None:
    group = ps.get_world_group()
    rank, size = group.rank_in_group, group.world_size
    form = Form((3, 5))
    for src in range(size):
        for dst in range(size):
            for dtype in MOVABLE if size == 2 else MOVABLE[:3]:
                x = any_bytes(form, dtype, src)
                if rank == src != dst:
                    group.send(_on_device(x), dst)
                elif rank == dst != src:
                    _same(group.recv(form.shape, dtype, src), x, f"{dtype} from {src} to {dst}")


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("world", "tp", "pp"), [(2, 1, 2), (4, 2, 2)])
def test_send_and_receive(gpus: Gpus, carrier: str, world: int, tp: int, pp: int) -> None:
    gpus(world).run_over(carrier, _pairs_body, tp=tp, pp=pp)


def _explain_body() -> tuple[str, str]:
    return ps.get_tp_group().explain(), nccl_library.load().path


def test_the_library_is_the_one_that_torch_uses(gpus: Gpus, record_property: Callable[[str, object], None]) -> None:
    needs_a_gpu("it tests torch's NCCL library")
    for text, path in gpus(2).run(_explain_body, tp=2):
        version = ".".join(map(str, torch.cuda.nccl.version()))
        assert f"nccl: NCCL {version} ({path})" in text
        assert "cuda tensors on the current stream" in text
        record_property("library", path)


def _streams_body(priorities: list[int]) -> None:
    group = ps.get_tp_group()
    x = torch.zeros(1 << 20, device=device())
    group.all_reduce(x)
    for stream in (torch.cuda.Stream(priority=priority) for priority in priorities):
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


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_call_is_on_the_current_stream(gpus: Gpus, carrier: str) -> None:
    needs_a_gpu("the CPU has no streams")
    gpus(2).run_over(carrier, _streams_body, [0, -1], tp=2)


def _alone_window_body() -> str:
    gloo = torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1, timedelta(seconds=60))
    context = dataclasses.replace(ps.get_tp_group().context, make_cpu_group=lambda: gloo)
    nccl = nccl_stand_in.StandInNccl(context) if DRY else NcclCommunicator(context)
    memory = nccl.allocate(1 << 20)
    said = str(nccl)
    assert memory is not None, said
    assert memory.device == device()
    assert (memory.dtype, memory.nbytes, memory.data_ptr() % 512) == (torch.uint8, 1 << 20, 0)
    x = memory.view(torch.float32)
    x.copy_(torch.arange(1 << 18))
    nccl.flat_all_reduce_(x, "sum")
    assert torch.equal(x.cpu(), torch.arange(1 << 18, dtype=torch.float32))
    assert torch.equal(nccl.all_reduce(x, "sum"), x)
    with nccl.capture():
        if on_gpu():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                nccl.flat_all_reduce_(x, "sum")
                x.add_(1)
            for _ in range(3):
                graph.replay()
            synchronize()
            assert torch.equal(x.cpu(), torch.arange(1 << 18, dtype=torch.float32) + 3)
            del graph
    begin = memory.data_ptr()
    del x, memory
    again = nccl.allocate(1 << 19)
    assert again is not None and again.data_ptr() == begin, "freed memory must be reused"
    nccl.close()
    assert again.fill_(7).unique().tolist() == [7], "a tensor outlives the communicator"
    before = torch.cuda.mem_get_info()[0] if on_gpu() else 0
    del again
    windows.free_closed()
    assert not windows._CLOSED
    if on_gpu():
        assert torch.cuda.mem_get_info()[0] - before >= windows.WINDOW_BYTES
    return said


def test_a_window_of_one_rank(gpus: Gpus, record_property: Callable[[str, object], None]) -> None:
    (said,) = gpus(1).run(_alone_window_body, tp=1)
    assert "tensors of empty in registered memory, 16 MiB in 1 windows" in said
    record_property("windows", said)


def _window_body() -> str:
    group = ps.get_tp_group()
    rank, size = group.rank_in_group, group.world_size
    total = float(sum(range(1, size + 1)))
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for numel in (8, 1 << 12, 1 << (16 if DRY else 20)):
            x, out = group.empty([size * numel], dtype), group.empty([numel], dtype)
            assert x.device == device()
            x.fill_(rank + 1)
            group.all_reduce_(x)
            assert x.unique().tolist() == [total]
            out.fill_(rank + 1)
            group.all_gather(out, 0, out=x)
            assert x.view(size, numel).float().mean(1).tolist() == list(range(1, size + 1))
            group.reduce_scatter(x, 0, out=out)
            assert out.unique().tolist() == [size * (rank + 1)]
            assert group.all_reduce(out).unique().tolist() == [size * total]
            assert group.all_reduce_async(out).wait().unique().tolist() == [size * total]
            if size == 2:
                sending = group.isend(out, 1 - rank)
                assert group.recv([numel], dtype).unique().tolist() == [size * (2 - rank)]
                sending.wait()
    x = group.empty([1 << 12])
    with group.graph_capture() as capture:
        graph = graph_of(lambda: group.all_reduce_(x), capture.stream)
    for number in range(1, 4):
        x.fill_(number * (rank + 1))
        graph.replay()
        assert x.unique().tolist() == [number * total]
    synchronize()
    del graph
    return group.explain()


@pytest.mark.parametrize("world", [2, 4])
def test_tensors_of_empty_lie_in_a_registered_window(
    gpus: Gpus, record_property: Callable[[str, object], None], world: int
) -> None:
    """NCCL may refuse to register memory of ranks that share a GPU. Results are right either way."""
    for text in gpus(world).run_over("nccl", _window_body, tp=world):
        (line,) = (line for line in text.splitlines() if "tensors of empty in" in line)
        record_property("windows", line.partition("; ")[2])
        assert "in registered memory" in line or "ncclCommWindowRegister" in line


def _memory_body() -> str:
    from device_communicators.base.errors import UnsupportedError

    group = ps.get_tp_group()
    nccl = nccl_of(group)
    assert nccl is not None
    x = torch.ones(1 << 20, device=device())
    group.all_reduce(x)
    torch.cuda.synchronize()
    group.barrier()
    try:
        before = torch.cuda.mem_get_info()[0]
        nccl.suspend()
        found = f"gave back {(torch.cuda.mem_get_info()[0] - before) >> 20} MiB"
        nccl.resume()
    except UnsupportedError as error:
        found = str(error)
    assert group.all_reduce(x).unique().tolist() == [float(group.world_size)]
    torch.cuda.synchronize()
    return found


def test_suspend_works_or_says_why_not(gpus: Gpus, record_property: Callable[[str, object], None]) -> None:
    needs_a_gpu("the memory is the GPU's")
    for suspended in gpus(2).run(_memory_body, tp=2):
        record_property("suspend", suspended)
        assert suspended.startswith("gave back") or "ncclCommSuspend" in suspended
