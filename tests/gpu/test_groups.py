from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import parallel_state as ps
from tests.gpu.ranks import CARRIERS, DRY, GpuRanks, device, nccl_of, needs_a_gpu, on_gpu, synchronize, world

Gpus = Callable[[int], GpuRanks]


def _sums() -> None:
    for group in (ps.get_tp_group(), ps.get_pp_group(), ps.get_world_group()):
        assert group.all_reduce(torch.ones(3, device=device())).tolist() == [float(group.world_size)] * 3
        if group.world_size > 1:
            received = torch.zeros(2, device=device())
            if group.rank_in_group == 0:
                group.send(torch.full((2,), 7.0, device=device()), 1)
            elif group.rank_in_group == 1:
                received = group.recv([2], torch.float32, 0)
                assert received.tolist() == [7.0, 7.0]
    synchronize()


def _bound_body(nccl: str, tp: int, pp: int) -> dict[str, Any]:
    with world(tp, pp, nccl=nccl, bind_device=on_gpu(), warm_up=True):
        _sums()
        everyone, group = ps.get_world_group(), ps.get_tp_group() if tp > 1 else ps.get_pp_group()
        found = {
            "on a GPU": on_gpu(),
            "bound": str(getattr(everyone.device_group, "bound_device_id", None)),
            "description": str(getattr(group.device_group, "group_desc", "")),
            "route": [each.name for each in group.route.communicators],
        }
        total = torch.ones(2, device=device())
        torch.distributed.all_reduce(total, group=group.device_group)
        assert total.tolist() == [float(group.world_size)] * 2
        synchronize()
    return found


@pytest.mark.parametrize("nccl", ["on", "off"])
def test_a_bound_device(gpus: Gpus, record_property: Callable[[str, object], None], nccl: str) -> None:
    for found in gpus(4).run(_bound_body, nccl, 2, 2, timeout_s=180):
        assert ("nccl" in found["route"]) == (nccl == "on")
        assert found["bound"].startswith("cuda") == found["on a GPU"]
        record_property("found", found)


def _options_body(nccl: str) -> None:
    options = ps.GroupOptions(high_priority_stream=True, min_ctas=1, max_ctas=2, timeout=60)
    with world(2, 1, nccl=nccl, axis_options={"tp": options}):
        _sums()
        backend = ps.get_tp_group().device_group._get_backend(device())
        assert backend.options.is_high_priority_stream
        assert backend.options.config.max_ctas == 2
        own = nccl_of(ps.get_tp_group())
        assert (own is not None) == (nccl == "on")
        if own is not None:
            assert own.context.nccl_config == {"minCTAs": 1, "maxCTAs": 2}
            assert own.streams.side()._stream.priority < 0


@pytest.mark.parametrize("nccl", ["on", "off"])
def test_high_priority_streams_and_numbers_of_blocks(gpus: Gpus, nccl: str) -> None:
    needs_a_gpu("these are options of NCCL")
    gpus(2).run(_options_body, nccl)


def _again_body(nccl: str, rounds: int) -> list[int]:
    used = []
    for _ in range(rounds):
        with world(2, nccl=nccl):
            _sums()
            group = ps.get_tp_group()
            assert group.broadcast_tensor_dict({"n": 1} if group.is_first_rank else None) == {"n": 1}
        used.append(_used_bytes() if on_gpu() else 0)
    return used


def _used_bytes() -> int:
    """Returns the GPU's used memory: the least of five values, because a peer may still be exiting."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    found = []
    for _ in range(5):
        time.sleep(0.1)
        free, total = torch.cuda.mem_get_info()
        found.append(total - free)
    return min(found)


@pytest.mark.parametrize(("nccl", "rounds"), [("on", 6 if DRY else 20), ("off", 6 if DRY else 8)])
def test_ended_and_made_again_memory_stays_flat(
    gpus: Gpus, record_property: Callable[[str, object], None], nccl: str, rounds: int
) -> None:
    for used in gpus(2).run(_again_body, nccl, rounds, timeout_s=400):
        assert len(used) == rounds
        record_property("MiB in use", [each >> 20 for each in used])
        assert max(used[5:]) <= used[4] + (64 << 20), [each >> 20 for each in used]


def _default_group_body() -> str:
    import os
    from datetime import timedelta

    import torch.distributed as dist

    backend = os.environ["RANKS_BACKEND"]
    bound = torch.device("cuda", 0) if backend == "nccl" else None
    if bound is not None:
        torch.cuda.set_device(bound)
    dist.init_process_group(backend, timeout=timedelta(seconds=60), device_id=bound)
    try:
        ps.init_distributed_environment()
        ps.initialize_model_parallel(2)
        _sums()
        text = ps.get_tp_group().explain()
        ps.destroy_distributed_environment()
        total = torch.ones(1, device=bound)
        dist.all_reduce(total)
        assert total.item() == 2
        return text
    finally:
        dist.destroy_process_group()


def test_a_default_group_that_was_there(gpus: Gpus) -> None:
    for text in gpus(2).run(_default_group_body):
        assert "nccl: NCCL" in text


def _shared_body() -> tuple[str, list[str]]:
    from device_communicators.machine.group_topology import uuid_of

    group = ps.get_tp_group()
    return str(uuid_of(device())), group.all_gather_object(str(uuid_of(device())))


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_sees_one_gpu(gpus: Gpus, size: int) -> None:
    needs_a_gpu("there is no GPU to identify")
    answers = gpus(size).run(_shared_body, tp=size)
    assert [uuid for uuid, _ in answers] == answers[0][1]
    assert len(set(answers[0][1])) == min(size, torch.cuda.device_count())


@pytest.mark.parametrize("carrier", CARRIERS)
def test_groups_of_one_rank_set_side_by_side(gpus: Gpus, carrier: str) -> None:
    gpus(2).run_over(carrier, _twins_body, tp=2)


def _twins_body() -> None:
    group = ps.get_tp_group()
    twin = group.make_sub_group(range(group.world_size), name="twin")
    assert twin is not None
    assert [each.name for each in twin.route.communicators] == [each.name for each in group.route.communicators]
    rank = group.rank_in_group
    for number in range(3):
        one, other = (torch.full((4,), base + number, device=device()) for base in (10.0, 20.0))
        assert group.all_reduce(one).tolist() == [2 * (10.0 + number)] * 4
        assert twin.all_reduce(other).tolist() == [2 * (20.0 + number)] * 4
        if rank == 0:
            group.send(one, 1)
            twin.send(other, 1)
        else:
            assert group.recv([4], torch.float32, 0).tolist() == one.tolist()
            assert twin.recv([4], torch.float32, 0).tolist() == other.tolist()
    synchronize()
    twin.destroy()
    assert group.all_reduce(torch.ones(2, device=device())).tolist() == [2.0, 2.0]
