from __future__ import annotations

import errno
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallel_state as ps
from device_communicators.cpu import segment
from parallel_state.functions import utilities
from tests.contract.test_objects import DEADLINE_S, Pools, check_usable

LOOK_S = 0.15  # time to detect a rank that is where it must not be


@pytest.fixture
def no_groups() -> None:
    assert ps.try_get_world_group() is None


def read_on_rank_zero_only(path: str, size: int) -> None:
    world = ps.get_world_group()
    with pytest.MonkeyPatch.context() as patch:
        if not world.is_first_rank:
            patch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"rank 0 alone may read {self}"))
        for given in (path, Path(path)):
            content = ps.read_file_dist(given)
            assert content.tell() == 0
            data = content.read()
            assert len(data) == size
            assert data == bytes(range(256)) * (size // 256)
            content.getbuffer()[:1] = b"x" if size else b""
    assert ps.read_file_dist(path).read(2) == bytes([0, 1])[: min(size, 2)]
    check_usable(world)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("size", [0, 256, 5 << 20])
def test_read_file_dist(pools: Pools, tmp_path: Path, world_size: int, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (size // 256))
    pools(world_size).run(read_on_rank_zero_only, str(path), size, tp=1, timeout_s=DEADLINE_S)


def read_what_can_not_be_read(path: Any, error: type[Exception]) -> None:
    world = ps.get_world_group()
    if world.is_first_rank:
        with pytest.raises(error):
            ps.read_file_dist(path)
    else:
        with pytest.raises(ps.RemoteError, match=rf"rank 0 could not read .*{error.__name__}") as raised:
            ps.read_file_dist(path)
        assert raised.value.rank == 0
    check_usable(world)


def test_a_file_that_can_not_be_read(pools: Pools, tmp_path: Path) -> None:
    for path, error in (
        (str(tmp_path / "missing"), FileNotFoundError),
        (tmp_path, IsADirectoryError),
        (str(tmp_path / "with\0nul"), ValueError),
        (None, TypeError),
    ):
        pools(4).run(read_what_can_not_be_read, path, error, tp=1, timeout_s=DEADLINE_S)


def read_without_numpy(path: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        data = ps.read_file_dist(path).read()
    assert data == bytes(range(256)) * (size // 256)


def test_read_file_dist_needs_no_numpy(pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    pools(2).run(read_without_numpy, str(path), 1 << 20, tp=1, timeout_s=DEADLINE_S)


@pytest.mark.usefixtures("no_groups")
def test_read_file_dist_without_init(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert ps.read_file_dist(path).read() == b"content"
    with pytest.raises(FileNotFoundError):
        ps.read_file_dist(tmp_path / "missing")


class Log:
    def __init__(self, name: str) -> None:
        self.store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())

    def reached(self, what: str, rank: int) -> None:
        self.store.set(f"{what}/{rank}", b"1")
        assert self.has(what, rank)  # stores don't confirm a set; now it is visible to all

    def has(self, what: str, rank: int) -> bool:
        return self.store.check([f"{what}/{rank}"])

    def never(self, what: str, ranks: list[int]) -> None:
        until = time.monotonic() + LOOK_S
        while ranks and time.monotonic() < until:
            for rank in ranks:
                assert not self.has(what, rank), f"rank {rank} must not have reached {what}"


FirstContext = Callable[[], AbstractContextManager[None]]
BOTH = pytest.mark.parametrize("first", [ps.master_first, ps.local_master_first])


@contextmanager
def hosts(nodes: list[list[int]]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "get_nodes", lambda: nodes)
        yield


def rank_zero_goes_first(first: FirstContext, name: str) -> None:
    world, log = ps.get_world_group(), Log(name)
    rank, others = world.rank_in_group, list(range(1, world.world_size))
    with first():
        log.reached("inside", rank)
        if rank == 0:
            log.never("inside", others)
            log.reached("done", 0)
        else:
            assert log.has("done", 0)
            if rank == others[-1]:
                log.never("left", [0, *others])
            log.reached("done", rank)
    log.reached("left", rank)
    for other in [0, *others]:
        assert log.has("done", other)
    check_usable(world)


@BOTH
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_master_first(pools: Pools, first: FirstContext, world_size: int) -> None:
    pools(world_size).run(rank_zero_goes_first, first, f"{first.__name__}/{time.time_ns()}", tp=1, timeout_s=DEADLINE_S)


def each_host_by_itself(name: str) -> None:
    world, log = ps.get_world_group(), Log(name)
    rank = world.rank_in_group
    with hosts([[0, 3], [1], [2]]):
        if rank == 0:
            assert world.recv_object(1) == "rank 1 is done"
            assert world.recv_object(2) == "rank 2 is done"
        with ps.local_master_first():
            log.reached("inside", rank)
            if rank == 0:
                log.never("inside", [3])
                log.reached("done", 0)
            elif rank == 3:
                assert log.has("done", 0)
                log.reached("done", 3)
        if rank in (0, 3):
            assert log.has("done", 3)
        else:
            world.send_object(f"rank {rank} is done", 0)
    check_usable(world)


def test_local_master_first_on_several_hosts(pools: Pools) -> None:
    pools(4).run(each_host_by_itself, f"hosts/{time.time_ns()}", tp=1, timeout_s=DEADLINE_S)


class Odd(Exception):
    pass


def body_fails(first: FirstContext, failing: list[int], error: type[BaseException], text: str) -> None:
    world = ps.get_world_group()
    rank, entered = world.rank_in_group, False
    raising = rank in failing
    first_failing = failing[0]
    with pytest.raises(error if raising else ps.RemoteError) as raised, first():
        entered = True
        if raising:
            raise error(text)
    assert entered == (rank == 0 or 0 not in failing), "if the first rank fails, no other may run the body"
    if raising:
        assert raised.value.args == (text,)
    else:
        assert isinstance(raised.value, ps.RemoteError)
        assert raised.value.rank == first_failing
        assert f"local_master_first() failed on rank {first_failing} of" in str(raised.value)
        assert f"{error.__name__}: {text}" in str(raised.value)
        assert "Traceback" in str(raised.value)
    check_usable(world)


@BOTH
@pytest.mark.parametrize(
    ("failing", "error"),
    [([0], KeyboardInterrupt), ([0], Odd), ([1], Odd), ([3], SystemExit), ([1, 2], Odd)],
)
def test_an_exception_in_the_body(
    pools: Pools, first: FirstContext, failing: list[int], error: type[BaseException]
) -> None:
    text = "long " * 2000 if error is Odd else "short"
    pools(4).run(body_fails, first, failing, error, text, tp=1, timeout_s=DEADLINE_S)


def failure_stays_on_its_host() -> None:
    world = ps.get_world_group()
    rank, entered = world.rank_in_group, []
    with hosts([[0, 1], [2, 3]]):
        try:
            with ps.local_master_first():
                entered.append(rank)
                if rank == 2:
                    raise Odd
        except Odd:
            assert rank == 2
        except ps.RemoteError as error:
            assert rank == 3
            assert error.rank == 2
            assert entered == []
        else:
            assert rank in (0, 1)
    check_usable(world)


def test_a_failing_body_stops_its_own_host_only(pools: Pools) -> None:
    pools(4).run(failure_stays_on_its_host, tp=1, timeout_s=DEADLINE_S)


def leave_early(first: FirstContext) -> str:
    with first():
        return "early"


def odd_ways_through() -> None:
    for first in (ps.master_first, ps.local_master_first):
        assert leave_early(first) == "early"
        for _ in range(3):
            with first():
                break

        @first()
        def decorated() -> int:
            return 1

        assert decorated() + decorated() == 2
    check_usable(ps.get_world_group())


def test_other_ways_through_the_body(pools: Pools) -> None:
    pools(2).run(odd_ways_through, tp=1, timeout_s=DEADLINE_S)


@BOTH
@pytest.mark.usefixtures("no_groups")
def test_master_first_without_init(first: FirstContext) -> None:
    entered = False
    with first():
        entered = True
    assert entered
    with pytest.raises(Odd), first():
        raise Odd


def simulated_beside_the_real(path: str) -> None:
    world, tp = ps.get_world_group(), ps.get_tp_group()
    for turn in range(1 + world.rank):
        with ps.simulate(turn + 3, 8, 2, 2).use(), ps.master_first(), ps.local_master_first():
            assert ps.get_world_group().world_size == 8
            assert ps.get_tp_group() is not tp
            assert ps.read_file_dist(path).read() == b"content"
    assert ps.get_tp_group() is tp
    check_usable(world)


def test_helpers_in_a_simulated_world_beside_a_real_one(pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    pools(4).run(simulated_beside_the_real, str(path), tp=2, pp=2, timeout_s=DEADLINE_S)


def draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), numpy.random.rand()]


def draw(seed: int) -> tuple[int, list[float], list[float], tuple[int, int, int]]:
    used = ps.set_random_seed(seed)
    first = draws()
    assert ps.set_random_seed(seed) == used
    again = draws()
    where = (ps.get_tp_group(), ps.get_dp_group(), ps.get_pp_group())
    return used, first, again, tuple(group.rank_in_group for group in where)  # type: ignore[return-value]


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 2), (1, 4), (2, 1)])
@pytest.mark.parametrize("seed", [0, 2**40])
def test_set_random_seed(pools: Pools, tp: int, pp: int, seed: int) -> None:
    results = pools(4).run(draw, seed, tp=tp, pp=pp, timeout_s=DEADLINE_S)
    by_stage: dict[int, list[float]] = {}
    for used, first, again, (_, _, stage) in results:
        assert first == again
        assert used == seed + 1000 * stage
        assert by_stage.setdefault(stage, first) == first, "ranks of one stage must draw alike"
    assert len(by_stage) == pp
    for column in zip(*by_stage.values(), strict=True):
        assert len(set(column)) == pp, "each stage draws its own"
    other = pools(4).run(draw, seed + 1, tp=tp, pp=pp, timeout_s=DEADLINE_S)
    assert all(a != b for a, b in zip(other[0][1], results[0][1], strict=True))


@pytest.mark.usefixtures("no_groups")
def test_set_random_seed_without_init() -> None:
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        for seed in (5, -1, 2**63):
            assert ps.set_random_seed(seed) == seed
            first = draws()
            ps.set_random_seed(seed)
            assert draws() == first
        ps.set_random_seed(5)
        expected = torch.Generator().manual_seed(5)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        numpy.random.set_state(before[2])


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def wrap_and_unwrap() -> None:
    group = ps.get_world_group().cpu_group
    model = Holder()
    wrapped = DistributedDataParallel(model, process_group=group)
    assert ps.unwrap_dist(wrapped) is model
    assert ps.unwrap_dist(DistributedDataParallel(wrapped, process_group=group)) is model
    assert ps.unwrap_dist(model) is model
    wrapped(torch.full((1, 2), float(ps.get_world_group().rank))).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((2, 2), 0.5))


def test_unwrap_dist(pools: Pools) -> None:
    pools(2).run(wrap_and_unwrap, tp=1, timeout_s=DEADLINE_S)
    model = Holder()
    assert ps.unwrap_dist(model) is model


@contextmanager
def segments_made() -> Iterator[list[str]]:
    made: list[str] = []
    real = segment.secrets.token_hex

    def draw(size: int) -> str:
        made.append(os.path.join(segment.DIRECTORY, f"parallel_state-k{real(size)}"))
        return made[-1][-2 * size :]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment.secrets, "token_hex", draw)
        yield made
    assert not any(map(os.path.lexists, made)), "a segment was left behind"


def look_for_neighbours() -> None:
    world, pp = ps.get_world_group(), ps.get_pp_group()
    for group in (world, pp, world.cpu_group, ps.get_tp_group()):
        size = group.world_size if isinstance(group, ps.GroupCoordinator) else group.size()
        rank = group.rank_in_group if isinstance(group, ps.GroupCoordinator) else group.rank()
        for source in range(size):
            with segments_made() as made:
                assert ps.in_the_same_node_as(group, source) == [True] * size
            assert len(made) == (rank == source)
    assert ps.in_the_same_node_as(world) == [True] * world.world_size
    assert ps.get_nodes() == [list(range(world.world_size))]
    assert ps.get_node_count() == 1
    for source in (-1, world.world_size):
        with pytest.raises(ps.InvalidArgumentError, match=rf"source_rank .* 0 … 3, but is {source}"):
            ps.in_the_same_node_as(world, source)
    check_usable(world)


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 1)])
def test_ranks_of_one_host(pools: Pools, tp: int, pp: int) -> None:
    pools(4).run(look_for_neighbours, tp=tp, pp=pp, timeout_s=DEADLINE_S)


def look_over_two_hosts(elsewhere: str) -> None:
    world = ps.get_world_group()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank in (1, 3):
            patch.setattr(segment, "DIRECTORY", elsewhere)
        with segments_made():
            assert ps.in_the_same_node_as(world, 0) == [True, False, True, False]
            assert ps.in_the_same_node_as(world, 3) == [False, True, False, True]
        if world.rank == 3:
            patch.setattr(segment, "DIRECTORY", os.path.join(elsewhere, "missing"))
        assert ps.in_the_same_node_as(world, 0) == [True, False, True, False]
        assert ps.in_the_same_node_as(world, 1) == [False, True, False, False]
        assert ps.in_the_same_node_as(world, 3) == [False, False, False, True]
    check_usable(world)


def test_ranks_of_several_hosts(pools: Pools, tmp_path: Path) -> None:
    pools(4).run(look_over_two_hosts, str(tmp_path), tp=1, timeout_s=DEADLINE_S)
    assert list(tmp_path.iterdir()) == []


def source_has_no_memory() -> None:
    world = ps.get_world_group()
    source = 2
    real_open = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(segment.DIRECTORY) and args[0] & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, segments_made() as made:
        if world.rank == source:
            patch.setattr(os, "open", refuse)
        assert ps.in_the_same_node_as(world, source) == [rank == source for rank in range(4)]
        assert len(made) == (world.rank == source)
        assert ps.in_the_same_node_as(world, 0) == [True] * 4, "rank 0, which has memory, must find all ranks"
    check_usable(world)


def test_a_source_that_can_not_make_a_segment(pools: Pools) -> None:
    pools(4).run(source_has_no_memory, tp=1, timeout_s=DEADLINE_S)


@pytest.mark.usefixtures("no_groups")
def test_hosts_are_unknown_before_init() -> None:
    for call in (ps.get_nodes, ps.get_node_count):
        with pytest.raises(ps.GroupNotInitializedError):
            call()
