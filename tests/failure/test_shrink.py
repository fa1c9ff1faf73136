"""torch's `shrink_group`, `merge_remote_group` and `DeviceMesh.abort` over the backend."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from device_communicators.base.errors import (
    CollectiveTimeoutError,
    GroupFailedError,
    InvalidArgumentError,
    PeerDiedError,
)
from device_communicators.c10d import creation
from parallel_state import error_of
from tests.contract.test_rendezvous import held_port
from tests.failure.changing import IS_THERE, Member, add_up, hear, tell
from tests.failure.over_torch import torch_world
from tests.failure.ranks import Ranks
from tests.failure.worlds import kill_me
from tests.hosts import Hosts, problem

ALL = [0, 1, 2, 3]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    creation.load()


def _error(call: Callable[[], Any]) -> Any:
    try:
        call()
    except Exception as error:
        return error_of(error) or error
    raise AssertionError("it didn't raise")


def _check_groups(size: int) -> None:
    add_up()
    dist.all_reduce(x := torch.ones(3), group=dist.new_group(list(range(size))))
    assert x.tolist() == [float(size)] * 3
    sparse = torch.sparse_coo_tensor([[dist.get_rank()]], [1.0], (size,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * size


def _lose_two(victims: tuple[int, int], port: int | None = None) -> list[str]:
    with torch_world(port):
        name, names, rest = dist.get_rank(), [], list(ALL)
        other = dist.new_group([0, 3])
        for victim in victims:
            add_up()
            if name == victim:
                kill_me()
            error = _error(add_up)
            lost = rest.index(victim)
            assert isinstance(error, PeerDiedError) and error.suspect_ranks == (lost,), error
            made = dist.shrink_group([lost], shrink_flags=c10d.SHRINK_ABORT)
            rest.remove(victim)
            assert made is dist.group.WORLD
            assert (dist.get_rank(), dist.get_world_size()) == (rest.index(name), len(rest))
            _check_groups(len(rest))
            names.append(made.group_desc)
        assert other not in c10d._world.pg_map, "torch destroys the other groups"
    return names


@pytest.mark.parametrize("victims", [(2, 1), (0, 3)])
def test_the_default_group_shrinks_after_deaths(ranks: Ranks, victims: tuple[int, int]) -> None:
    with held_port() as port:
        found = ranks.survivors(_lose_two, victims, port if 0 in victims else None, timeout_s=120.0)
    assert found == {rank: ["default:shrunken"] * 2 for rank in set(ALL) - set(victims)}


@pytest.mark.skipif(problem() is not None, reason=f"no hosts can be made here: {problem()}")
def test_the_default_group_shrinks_over_hosts() -> None:
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1)) as ranks:
        assert set(ranks.survivors(_lose_two, (2, 1), timeout_s=120.0)) == {0, 3}


def _without_a_death(folder: str) -> bool:
    """Removes living rank 1 from a group of ranks 0 to 2, in which ranks equal global ranks: torch's shrink_group
    confuses them."""
    with torch_world():
        rank, part = dist.get_rank(), dist.new_group([0, 1, 2], timeout=timedelta(seconds=20.0))
        if rank in (0, 2):
            made = dist.shrink_group([1], group=part)
            assert dist.get_process_group_ranks(made) == [0, 2]
            for _ in range(3):
                dist.broadcast(x := torch.full((5,), float(rank)), src=2, group=made)
                assert x.tolist() == [2.0] * 5
            assert part not in c10d._world.pg_map
            tell(Path(folder), f"shrunk-{rank}", "")
        elif rank == 1:
            for each in (0, 2):
                hear(Path(folder), f"shrunk-{each}")
            error = _error(lambda: dist.all_reduce(torch.ones(3), group=part))
            assert isinstance(error, PeerDiedError) and "left" in str(error), error
        add_up(1)
    return True


def test_a_group_shrinks_by_a_living_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_without_a_death, str(tmp_path), timeout_s=60.0) == [True] * 4


def _abort_own_call(folder: str) -> str:
    with torch_world():
        text = ""
        if dist.get_rank() == 3:
            hear(Path(folder), "shrunk")
            return text
        if dist.get_rank() == 0:
            errors: list[Any] = []
            thread = threading.Thread(target=lambda: errors.append(_error(add_up)))
            thread.start()
            time.sleep(0.1)
        dist.shrink_group([3], shrink_flags=c10d.SHRINK_ABORT)
        if dist.get_rank() == 0:
            thread.join(1.0)
            (error,) = errors
            text = str(error)
        add_up()
        dist.barrier()
        tell(Path(folder), "shrunk", "")
    return text


def test_shrink_abort_ends_a_call_under_way(ranks: Ranks, tmp_path: Path) -> None:
    assert "aborted" in ranks.run(_abort_own_call, str(tmp_path), timeout_s=60.0)[0]


def _without_one(folder: str) -> str:
    with torch_world(timeout_s=2.0):
        rank = dist.get_rank()
        if rank == 3:
            kill_me()
        _error(add_up)
        if rank == 2:
            for each in (0, 1):
                hear(Path(folder), f"late-{each}")
            time.sleep(0.2)
            kill_me()
        late = _error(lambda: dist.shrink_group([3]))
        assert isinstance(late, CollectiveTimeoutError) and list(late.suspect_ranks) == [2], late
        tell(Path(folder), f"late-{rank}", "")
        hear(Path(folder), f"late-{1 - rank}")
        started = time.monotonic()
        error = _error(lambda: dist.shrink_group([3]))
        assert isinstance(error, PeerDiedError) and 2 in error.suspect_ranks, error
        assert time.monotonic() - started < 1.9, "it took until the deadline"
        dist.shrink_group([2, 3])
        add_up()
    return str(late)


def test_a_rank_that_does_not_shrink_is_named(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.survivors(_without_one, str(tmp_path), timeout_s=60.0)
    assert set(found) == {0, 1}
    assert all("shrink_group" in text for text in found.values()), found


def _wrong_arguments() -> bool:
    with torch_world():
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert backend.supports_shrinking
        rank = dist.get_rank()
        for excluded in ([rank], [9], [-1]):
            assert type(_error(lambda excluded=excluded: backend.shrink(excluded))) is InvalidArgumentError  # type: ignore[misc]
        assert "SHRINK_ABORT" in str(_error(lambda: backend.shrink([(rank + 1) % 4], 2)))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        assert "gloo" in str(_error(lambda: dist.shrink_group([(rank + 1) % 4], pg_options=options)))
        add_up()
        backend.abort()
        assert type(_error(lambda: backend.shrink([(rank + 1) % 4]))) is not AttributeError
    return True


def test_wrong_calls_of_shrink_are_refused(ranks: Ranks) -> None:
    assert ranks.run(_wrong_arguments) == [True] * 4


def _merged() -> list[tuple[int, int, str]]:
    rank, found = int(os.environ["RANK"]), []
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    half = dist.PrefixStore(f"half/{rank // 2}", server)
    dist.init_process_group("parallel_state", store=half, rank=rank % 2, world_size=2)
    default: Any = dist.group.WORLD
    for number in range(2):
        merged = default.merge_remote_group(dist.PrefixStore(f"merge/{number}", server), 4, group_name=f"all/{number}")
        x = torch.ones(3) * rank
        merged.allreduce([x]).wait()
        assert x.tolist() == [6.0] * 3
        found.append((merged.rank(), merged.size(), merged.group_name))
        add_up()
    dist.destroy_process_group()
    return found


def test_remote_groups_merge(ranks: Ranks) -> None:
    found = ranks.run(_merged, timeout_s=60.0)
    for number in range(2):
        assert sorted(each[number] for each in found) == [(rank, 4, f"all/{number}") for rank in ALL]


@pytest.mark.skipif(not IS_THERE, reason="needs torch >= 2.15")
def test_a_mesh_is_aborted(ranks: Ranks) -> None:
    assert ranks.survivors(_abort_mesh, timeout_s=180.0) == {0: True, 1: True, 2: True}


def _abort_mesh() -> bool:
    with torch_world():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name in ("dp", "tp"):
            dist.all_reduce(torch.ones(3), group=mesh[name].get_group())
        if dist.get_rank() == 3:
            kill_me()
        error = _error(lambda: [dist.all_reduce(torch.ones(3), group=mesh[name].get_group()) for name in ("dp", "tp")])
        assert isinstance(error, (PeerDiedError, GroupFailedError)), error
        groups = [mesh[name].get_group() for name in ("dp", "tp")]
        mesh.abort()
        for group in groups:
            assert _error(lambda group=group: group.allreduce([torch.ones(3)]).wait()) is not None  # type: ignore[misc]
        dist.shrink_group([3], shrink_flags=c10d.SHRINK_ABORT)
        again = dist.init_device_mesh("cpu", (3,))
        dist.all_reduce(x := torch.ones(3), group=again.get_group())
        assert x.tolist() == [3.0] * 3
    return True


@pytest.mark.skipif(not IS_THERE, reason="needs torch >= 2.15")
def test_a_reconfigurable_group_shrinks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.survivors(_reconfigured, str(tmp_path), timeout_s=60.0) == {0: True, 2: True, 3: True}


def _reconfigured(folder: str) -> bool:
    member = Member(Path(folder))
    member.become(1, ALL)
    if member.name == 1:
        kill_me()
    _error(add_up)
    dist.shrink_group([1], shrink_flags=c10d.SHRINK_ABORT)
    _check_groups(3)
    dist.destroy_process_group()
    return True
