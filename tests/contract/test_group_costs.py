from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
MIB = 1 << 20


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _descriptors() -> tuple[int, int]:
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return len(links), sum("/dev/shm/" in link or "pidfd" in link for link in links)


@contextlib.contextmanager
def _limit(which: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def _another(made: list[ps.ParallelGroups]) -> ps.GroupCoordinator:
    """Appends groups to `made` that have another timeout, and so their own process groups."""
    made.append(ps.create_parallel_groups(ps.get_world_group(), {"tp": 2}, backend="gloo", timeout=100.0 + len(made)))
    return made[-1].tp


def _many(count: int, descriptors: int, address_bytes: int) -> dict[str, Any]:
    made: list[ps.ParallelGroups] = []
    with (
        _limit(resource.RLIMIT_NOFILE, descriptors),
        _limit(resource.RLIMIT_AS, _address_space() + address_bytes),
        world(),
    ):
        _another(made)
        space, (_, own) = _address_space(), _descriptors()
        while len(made) < count:
            _another(made)
        total, own_later = _descriptors()
        facts = {
            "beyond the soft limit": total > descriptors,
            "MiB": (_address_space() - space) / (count - 1) / MIB,
            "descriptors": own_later - own,
            "shared memory": all("shared segment" in each.tp.explain() for each in made),
            "sums": {int(each.tp.all_reduce(torch.ones(60_000))[-1]) for each in made},
        }
        for each in reversed(made):
            each.close()
        facts["left descriptors"] = _descriptors()[1] - own
    return facts


@pytest.mark.parametrize(
    ("count", "descriptors", "address_bytes"),
    [
        (60, 256, 8 << 30),
        pytest.param(300, 1024, 32 << 30, marks=pytest.mark.long),
    ],
)
def test_many_groups_under_limits(pools: Pools, count: int, descriptors: int, address_bytes: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 8 * count:
        pytest.skip("the hard limit of open files is too low")
    for facts in pools(2).run(_many, count, descriptors, address_bytes, timeout_s=DEADLINE_S):
        assert facts.pop("MiB") < 128, facts  # stacks of gloo's three threads, and malloc's arenas
        assert facts.pop("left descriptors") <= 0
        assert facts == {
            "beyond the soft limit": True,
            "descriptors": 0,
            "shared memory": True,
            "sums": {2},
        }


def _growing() -> list[float]:
    beside = []
    with world(2):
        group = ps.get_tp_group()
        group.barrier()
        before, kept = _address_space(), []
        for mib in (1, 3, 20, 10, 75):
            x, out = group.empty([mib * MIB], torch.uint8), group.empty([mib * MIB], torch.uint8)
            x.fill_(mib % 100 + group.rank_in_group)
            expected = 2 * (mib % 100) + 1
            for total in (group.all_reduce(x), group.all_reduce_(out.copy_(x))):
                assert int(total[0]) == int(total[-1]) == expected
            assert int(group.broadcast(x, 1)[-1]) == mib % 100 + 1
            assert group.all_gather(x[-MIB:], 0).view(2, -1)[:, -1].tolist() == [mib % 100, mib % 100 + 1]
            kept.append((x, mib))
            beside.append((_address_space() - before) / MIB)
        for x, mib in kept:
            assert int(group.all_reduce(x)[-1]) == 2 * (mib % 100) + 1
    return beside


def test_memory_for_tensors_grows_with_its_use(pools: Pools) -> None:
    for beside in pools(2).run(_growing, timeout_s=DEADLINE_S):
        assert beside[0] < 128, beside
        assert beside[-1] < 8192, beside


def _without_descriptors() -> tuple[Outcome, int]:
    made: list[ps.ParallelGroups] = []
    with world():
        _another(made)
        enough = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with _limit(resource.RLIMIT_NOFILE, _descriptors()[0] + 20 if ps.get_world_group().rank == 1 else enough):
            refused = attempt(_another, made)
        total = int(_another(made).all_reduce(torch.ones(1))[0])
        for each in reversed(made):
            each.close()
    return refused, total


def test_a_group_for_which_one_rank_has_no_descriptors(pools: Pools) -> None:
    """gloo would abort that process."""
    for refused, total in pools(2).run(_without_descriptors, timeout_s=DEADLINE_S):
        assert refused.kind == "CommunicationError" and refused.suspect_ranks == (1,), refused
        assert "global rank 1 can't" in refused.text and "(ulimit -n; the hard one is" in refused.text
        assert total == 2


def _without_address_space() -> Outcome:
    with world(2):
        group = ps.get_tp_group()
        first = group.rank_in_group == 0
        x = group.empty([16 * MIB]) if first else torch.empty(16 * MIB)
        x.fill_(1)
        group.barrier()
        with contextlib.nullcontext() if first else _limit(resource.RLIMIT_AS, _address_space() + 24 * MIB):
            return attempt(group.all_reduce_, x)


def test_a_tensor_that_one_rank_can_not_map(pools: Pools) -> None:
    told = pools(2).run(_without_address_space, timeout_s=DEADLINE_S)
    assert [each.kind for each in told] == ["CommunicationError"] * 2, told
    assert [each.suspect_ranks for each in told] == [(1,), (1,)]
    assert "global rank 1 gave up, because it had no address space left (ulimit -v)" in told[0].text
    assert "PARALLEL_STATE_SYMMETRIC_BYTES=0" in told[1].text
