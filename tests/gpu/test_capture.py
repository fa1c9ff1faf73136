from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from parallel_state.tools.bench.devices import Captured, captured
from tests.gpu.ranks import CARRIERS, REPLAYS, GpuRanks, device, nccl_of, needs_a_gpu, on_gpu, synchronize
from tests.gpu.test_messages import plain, same

Gpus = Callable[[int], GpuRanks]
ROWS = 8


def calls(group: ps.GroupCoordinator) -> dict[str, Callable[[Tensor], Tensor]]:
    rank, size = group.rank_in_group, group.world_size
    sizes = [ROWS - size + 1, *[1] * (size - 1)]
    ones = torch.ones(3, device=device())

    def in_place(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: call(x.clone())

    return {
        "all_reduce": group.all_reduce,
        "all_reduce, max": lambda x: group.all_reduce(x, "max"),
        "all_reduce, avg of bf16": lambda x: group.all_reduce(x.bfloat16(), "avg"),
        "all_reduce_": in_place(group.all_reduce_),
        "all_gather": lambda x: group.all_gather(x, 0),
        "all_gather, last dim": lambda x: group.all_gather(x, -1),
        "all_gatherv": lambda x: group.all_gatherv(x[: sizes[rank]], 0, sizes),
        "reduce_scatter": lambda x: group.reduce_scatter(x, 0),
        "reduce_scatterv": lambda x: group.reduce_scatterv(x, 0, sizes),
        "broadcast": lambda x: group.broadcast(x, size - 1),
        "broadcast_": in_place(lambda x: group.broadcast_(x, size - 1)),
        "gather": lambda x: _or_empty(group.gather(x, size - 1, 0), x),
        "scatter": lambda x: group.scatter(x if rank == 0 else None, 0, 0, size=[ROWS // size, 3], dtype=x.dtype),
        "all_to_all": group.all_to_all,
        "started": lambda x: group.all_reduce_async(x).wait(),
        "all_reduce_add_rms_norm": lambda x: group.all_reduce_add_rms_norm(x, x.new_ones(x.shape), ones)[1],
    }


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def expected(group: ps.GroupCoordinator, name: str, xs: list[Tensor]) -> Tensor:
    rank, size = group.rank_in_group, group.world_size
    sizes = [ROWS - size + 1, *[1] * (size - 1)]
    total = torch.stack(xs).sum(0)
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return {
        "all_reduce": lambda: total,
        "all_reduce, max": lambda: torch.stack(xs).amax(0),
        "all_reduce, avg of bf16": lambda: (total / size).bfloat16(),
        "all_reduce_": lambda: total,
        "all_gather": lambda: torch.cat(xs),
        "all_gather, last dim": lambda: torch.cat(xs, -1),
        "all_gatherv": lambda: torch.cat([x[:length] for x, length in zip(xs, sizes, strict=True)]),
        "reduce_scatter": lambda: total[rows],
        "reduce_scatterv": lambda: total[mine],
        "broadcast": lambda: xs[-1],
        "broadcast_": lambda: xs[-1],
        "gather": lambda: torch.cat(xs) if rank == size - 1 else total.new_empty(0),
        "scatter": lambda: xs[0][rows],
        "all_to_all": lambda: torch.cat([x[rows] for x in xs]),
        "started": lambda: total,
        "all_reduce_add_rms_norm": lambda: total + 1,
    }[name]()


def inputs(size: int, number: int) -> list[Tensor]:
    """Small integers, whose sums are exact in bf16 too."""
    base = torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3) % 5
    return [base + (number + rank) % 8 for rank in range(size)]


def check(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.device.type == device().type, what
    assert torch.equal(found.cpu(), wanted.to(found.dtype)), f"{what}: {found.tolist()}, not {wanted.tolist()}"


def graph_of(call: Callable[[], Any], stream: Any) -> Captured:
    """Calls once eagerly, as programs do before a capture."""
    call()
    synchronize()
    return captured(call, stream)


def _every_op_body() -> int:
    groups = [group for group in (ps.get_tp_group(), ps.get_pp_group()) if group.world_size > 1]
    held = {group.unique_name: torch.zeros(ROWS, 3, device=device()) for group in groups}
    graphs: list[tuple[ps.GroupCoordinator, str, Captured]] = []
    with ps.graph_capture() as capture:
        for group in groups:
            x = held[group.unique_name]
            for name, call in calls(group).items():
                graphs.append((group, name, graph_of(lambda call=call, x=x: call(x), capture.stream)))
    for number in range(10):
        for group, name, graph in graphs:
            xs = inputs(group.world_size, number)
            held[group.unique_name].copy_(xs[group.rank_in_group])
            graph.replay()
            check(graph.outputs, expected(group, name, xs), f"{name}, replay {number} on {group.context}")
        for group in groups:
            total = group.all_reduce(torch.ones(3, device=device()))
            assert total.tolist() == [float(group.world_size)] * 3
    count = len(graphs)
    synchronize()
    graphs.clear()
    return count


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("world", "tp", "pp"), [(2, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_every_op_is_captured(gpus: Gpus, carrier: str, world: int, tp: int, pp: int) -> None:
    assert min(gpus(world).run_over(carrier, _every_op_body, tp=tp, pp=pp, timeout_s=300)) >= 16


def _replays_body(replays: int) -> None:
    tp, pp, everyone = ps.get_tp_group(), ps.get_pp_group(), ps.get_world_group()
    x = torch.zeros(ROWS, 3, device=device())

    def step() -> tuple[Tensor, Tensor]:
        y = tp.all_reduce(x) * 2
        z = pp.all_gather(y, 0)
        return y, everyone.all_reduce(z)

    with ps.graph_capture() as capture, everyone.graph_capture(capture):
        graph = graph_of(step, capture.stream)
    grid = [[row * tp.world_size + column for column in range(tp.world_size)] for row in range(pp.world_size)]
    for number in range(replays):
        held = inputs(everyone.world_size, number)
        x.copy_(held[everyone.rank_in_group])
        y, z = graph.replay()
        if number % 10 == 0 or number > replays - 10:  # checking each would leave the device idle between replays
            sums = [torch.stack([held[rank] for rank in ranks]).sum(0) * 2 for ranks in grid]
            check(y, sums[pp.rank_in_group], f"tp in replay {number}")
            check(z, torch.cat(sums) * everyone.world_size, f"world in replay {number}")
    synchronize()
    del graph


@pytest.mark.parametrize(("world", "tp", "pp"), [(2, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_a_thousand_replays(
    gpus: Gpus, record_property: Callable[[str, object], None], world: int, tp: int, pp: int
) -> None:
    gpus(world).run_over("nccl", _replays_body, REPLAYS, tp=tp, pp=pp, timeout_s=300)
    record_property("replays", REPLAYS)


def _dicts_body() -> None:
    tp, pp = ps.get_tp_group(), ps.get_pp_group()
    between = tp if tp.world_size > 1 else None
    mine, spec = plain(1), ps.TensorDictSpec.of(plain(1))

    def told() -> dict[str, Any]:
        return tp.broadcast_tensor_dict(mine if tp.is_first_rank else None, spec=spec)

    def handed_on() -> dict[str, Any]:
        if pp.is_first_rank:
            pp.send_tensor_dict(mine, all_gather_group=between, spec=spec)
            return mine
        return pp.recv_tensor_dict(all_gather_group=between, spec=spec)

    graphs: list[Captured] = []
    with ps.graph_capture() as capture:
        for call, group in ((told, tp), (handed_on, pp)):
            if group.world_size > 1:
                graphs.append(graph_of(call, capture.stream))
    for number in range(50):
        fresh = plain(number)
        for name in ("hidden", "residual"):
            mine[name].copy_(fresh[name])
        for graph in graphs:
            same(graph.replay(), fresh)
    synchronize()
    graphs.clear()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("world", "tp", "pp"), [(2, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_tensor_dicts_with_a_spec_are_captured(gpus: Gpus, carrier: str, world: int, tp: int, pp: int) -> None:
    gpus(world).run_over(carrier, _dicts_body, tp=tp, pp=pp)


def _raising_body() -> str:
    group = ps.get_tp_group()
    x = torch.ones(4, device=device())
    group.all_reduce(x)

    def fails() -> None:
        group.all_reduce(x)
        raise ValueError("of my own")

    with pytest.raises(ValueError, match="of my own") as raised, ps.graph_capture() as capture:
        captured(fails, capture.stream)
    assert group.all_reduce(x).tolist() == [float(group.world_size)] * 4
    with ps.graph_capture() as capture:
        graph = graph_of(lambda: group.all_reduce(x), capture.stream)
    for number in range(5):
        x.fill_(number)
        assert graph.replay().tolist() == [float(group.world_size * number)] * 4
    del graph
    return str(raised.value)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_exception_inside_surfaces(gpus: Gpus, carrier: str) -> None:
    assert gpus(2).run_over(carrier, _raising_body, tp=2) == ["of my own"] * 2


def _unprepared_body() -> list[str]:
    group, found = ps.get_tp_group(), []
    fresh = group.make_sub_group(range(group.world_size), name="fresh")
    assert fresh is not None
    assert nccl_of(fresh) is not None
    x = torch.ones(4, device=device())
    stream = torch.cuda.Stream()
    synchronize()
    with pytest.raises(ps.UsageError) as raised:
        captured(lambda: fresh.all_reduce(x), stream)
    found.append(str(raised.value))
    with pytest.raises(ps.UsageError) as raised:
        captured(fresh.barrier, stream)
    found.append(str(raised.value))
    assert fresh.all_reduce(x).tolist() == [float(group.world_size)] * 4
    synchronize()
    fresh.destroy()
    return found


def test_what_cant_be_captured_says_so(gpus: Gpus) -> None:
    needs_a_gpu("a dry run captures nothing")
    for first, second in gpus(2).run(_unprepared_body, tp=2):
        assert "was not used before the capture of this CUDA graph" in first
        assert "can't be captured" in second or "capture" in second


def _compiled_body() -> int:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    group = ps.get_tp_group()
    weight = torch.eye(16, device=device()) * 2

    def layer(x: Tensor) -> Tensor:
        return group.all_reduce(torch.nn.functional.linear(x, weight)) + 1

    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    with torch.inference_mode():
        for number in range(10):
            x = torch.full((4, 16), float(number + group.rank_in_group), device=device())
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(x).clone()
            total = sum(number + rank for rank in range(group.world_size))
            assert y.unique().tolist() == [2.0 * total + 1], f"step {number}"
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    skips = counters["inductor"]["cudagraph_skips"] if on_gpu() else 0
    synchronize()
    del compiled
    torch._dynamo.reset()
    if on_gpu():  # graphs must be deleted before the group
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()
    return skips


@pytest.mark.parametrize("carrier", CARRIERS)
def test_compiled_with_reduce_overhead(
    gpus: Gpus, record_property: Callable[[str, object], None], carrier: str
) -> None:
    skips = gpus(2).run_over(carrier, _compiled_body, tp=2, timeout_s=300)
    record_property("CUDA graphs that inductor went without", skips)
    assert skips == [0, 0], "inductor didn't capture: its log (TORCH_LOGS=perf_hints) says why"
