from __future__ import annotations

from collections.abc import Callable
from typing import Any

from device_communicators.machine.group_topology import agree_on_topology, find_shared_gpus, shared_gpu_warning
from parallel_state import get_tp_group, get_world_group
from tests.internals.machines import machine
from tests.workers import WorkerPool


def agree(broken: int | None, absent: int | None) -> tuple[Any, ...]:
    context = get_tp_group().context
    node = machine("dgx-h100", p2p_status={f"{broken} 0 0": 4} if context.rank == broken else {})
    me = None if context.rank == absent else node.gpus[context.rank].uuid

    found = agree_on_topology(context, node, me)
    return found.nvlink_full_mesh, found.peer_access, found.gpus, found.fewest_nvlinks


def test_all_ranks_hear_the_same(pools: Callable[[int], WorkerPool]) -> None:
    results = pools(4).run(agree, None, None, tp=4)
    assert results == [results[0]] * 4
    mesh, peers, gpus, fewest = results[0]
    assert mesh.holds and peers.holds
    assert len({gpu.uuid for gpu in gpus}) == 4
    assert fewest == 18


def test_one_rank_speaks_against_it(pools: Callable[[int], WorkerPool]) -> None:
    results = pools(4).run(agree, 2, None, tp=4)
    assert results == [results[0]] * 4
    mesh, peers, *_ = results[0]
    assert mesh.holds
    assert not peers.holds
    assert peers.reason == "from the GPU of rank 2 to that of rank 0: P2P read is disabled by registry key"


def test_a_rank_without_a_gpu(pools: Callable[[int], WorkerPool]) -> None:
    results = pools(4).run(agree, None, 3, tp=4)
    assert results == [results[0]] * 4
    assert {vote.reason for vote in results[0][:2]} == {"rank 3 has no GPU: it has no GPU"}


def _sharing_body(uuids: list[str | None]) -> tuple[dict[str, list[int]], str]:
    context = get_world_group().context
    shared = find_shared_gpus(context, uuids[context.rank])
    return shared, shared_gpu_warning(context, shared)


def test_ranks_that_share_a_gpu_are_found(pools: Callable[[int], WorkerPool]) -> None:
    for shared, text in pools(4).run(_sharing_body, ["GPU-1", "GPU-2", None, "GPU-1"], tp=2, pp=2):
        assert shared == {"GPU-1": [0, 3]}
        assert text.startswith("global ranks [0, 3] share GPU GPU-1 in group 'world:")
        assert "torch.cuda.set_device(local_rank)" in text
    assert pools(4).run(_sharing_body, ["GPU-1", None, "GPU-2", None], tp=4)[0][0] == {}
