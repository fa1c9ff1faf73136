"""Row 9 of docs/failures.md: a transfer can't be compared with a collective. At the deadline all ranks name
both."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import parallel_state as ps
from parallel_state import TensorDictSpec
from tests.contract.attempts import Outcome, attempt
from tests.extent import LONG
from tests.failure.ranks import Ranks
from tests.failure.test_other_calls import METHODS, in_a_group
from tests.failure.worlds import ROUTES, world_over
from tests.hosts import Hosts, problem

SIZE = 4
TIMEOUT_S = 3.0
"""Longer than ranks take to report their waits."""
LONG_TIMEOUT_S = 15.0
DEADLINE_S = 280.0
LARGE = 4 << 20
Call = Callable[[ps.GroupCoordinator], object]


def _x(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


SPEC = TensorDictSpec.of({"x": _x()})
TRANSFERS: dict[str, Call] = {
    "recv": lambda g: g.recv((4,), torch.float32, 1),
    "irecv": lambda g: g.irecv((4,), torch.float32, 1).wait(),
    "send": lambda g: g.send(_x(LARGE), 1),
    "isend": lambda g: g.isend(_x(LARGE), 1).wait(),
    "recv_object": lambda g: g.recv_object(1),
    "recv_tensor_dict": lambda g: g.recv_tensor_dict(1),
    "recv_tensor_dict with a spec": lambda g: g.recv_tensor_dict(1, spec=SPEC),
    "send_object": lambda g: g.send_object(_x(LARGE), 1),
    "send_tensor_dict": lambda g: g.send_tensor_dict({"x": _x(LARGE)}, 1),
}
ROUTES_AND_HOSTS = (*ROUTES, "two hosts")


def _cases(route: str) -> list[tuple[str, str]]:
    if LONG:
        return [(one, other) for one in TRANSFERS for other in METHODS]
    skip, others = ROUTES_AND_HOSTS.index(route), list(METHODS)
    return [(one, others[(5 * number + skip) % len(others)]) for number, one in enumerate(TRANSFERS)][skip::3]


def _differ(route: str, cases: list[tuple[str, str]]) -> list[Outcome]:
    over = "connections" if route == "connections" else "shared memory"
    with world_over(over, timeout_s=TIMEOUT_S) as world:
        found = [in_a_group(over, world, TRANSFERS[one] if world.rank == 0 else METHODS[other]) for one, other in cases]
        time.sleep(2.0)
        return found


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[str], Any]]:
    pools: dict[str, Any] = {}
    four = Ranks(SIZE)
    four.run(int, timeout_s=DEADLINE_S)
    pools["connections"] = pools["shared memory"] = four
    if problem() is None:
        with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1)) as ranks:
            ranks.run(int, timeout_s=DEADLINE_S)
            pools["two hosts"] = ranks
            yield pools.get
    else:
        yield pools.get
    four.kill()


@pytest.mark.parametrize("route", ROUTES_AND_HOSTS)
def test_row_09_a_transfer_and_a_collective(pool_of: Callable[[str], Any], route: str) -> None:
    pool, cases = pool_of(route), _cases(route)
    if pool is None:
        pytest.skip(f"no hosts can be made here: {problem()}")
    told = pool.run(_differ, route, cases, timeout_s=DEADLINE_S)
    wrong: list[str] = []
    for (one, other), *outcomes in zip(cases, *told, strict=True):
        for rank, each in enumerate(outcomes):
            if each.kind == "ok" or f"in {one}(" not in each.text or f"in {other}" not in each.text:
                wrong.append(f"{one} against {other}, rank {rank}: {each}")
    assert not wrong, "\n".join(wrong)


LONG_WAIT_S = 2.0
"""After 1 s without a call a rank counts as being in none."""


def _others_come_later() -> Outcome:
    with world_over("connections", timeout_s=TIMEOUT_S) as world:

        def call(group: ps.GroupCoordinator) -> object:
            return TRANSFERS["recv"](group) if group.rank == 0 else METHODS["all_gather"](group)

        told = in_a_group("connections", world, call, LONG_WAIT_S if world.rank else 0.0)
        time.sleep(TIMEOUT_S + LONG_WAIT_S if world.rank == 0 else 1.0)
        return told


@pytest.mark.over("connections")
def test_row_09_a_wait_that_has_failed_is_told_to_those_that_came_later(pool_of: Callable[[str], Any]) -> None:
    """Rank 0 makes no further call after its wait. It has closed its connections, so the others fail early."""
    for rank, told in enumerate(pool_of("connections").run(_others_come_later, timeout_s=DEADLINE_S)):
        kinds = ("CollectiveTimeoutError",) if rank == 0 else ("CollectiveTimeoutError", "CommunicationError")
        assert told.kind in kinds, (rank, told)
        assert rank == 0 or re.search(r"global rank 0 is in recv\(", told.text), (rank, told)


def _later(call: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        time.sleep(LONG_WAIT_S)
        call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def _legitimate(route: str) -> list[Outcome]:
    with world_over("connections" if route == "connections" else "shared memory", timeout_s=LONG_TIMEOUT_S) as world:
        rank, x, found = world.rank, torch.ones(4), []
        pair = world.make_sub_group([1, 2])
        thread = _later(lambda: world.send(x, 0)) if rank == 1 else None
        if rank == 0:
            found.append(attempt(world.recv, (4,), torch.float32, 1))
        found.append(attempt(world.all_reduce, x))
        if thread is not None:
            thread.join()
        if rank == 0:
            found.append(attempt(world.recv_object, 1))
        if rank == 2:
            time.sleep(LONG_WAIT_S)
        if pair is not None:
            found.append(attempt(pair.all_reduce, x))
        if rank == 1:
            found.append(attempt(world.send_object, 1, 0))
        sent = world.isend(torch.ones(LARGE), 0) if rank == 1 else None
        if rank == 0:
            got = world.irecv((LARGE,), torch.float32, 1)
            time.sleep(LONG_WAIT_S)
            found.append(attempt(lambda: got.wait().sum()))
        if route == "shared memory":
            if rank == 0:
                time.sleep(LONG_WAIT_S)
            if rank == 2:
                found.append(attempt(world.recv, (4,), torch.float32, 1))
            found.append(attempt(world.broadcast, x, 0))
            if rank == 1:
                found.append(attempt(world.send, x, 2))
        found.append(attempt(world.barrier))
        if sent is not None:
            sent.wait()
        return found


@pytest.mark.parametrize("route", ROUTES_AND_HOSTS)
def test_waits_that_end_are_left_alone(pool_of: Callable[[str], Any], route: str) -> None:
    pool = pool_of(route)
    if pool is None:
        pytest.skip(f"no hosts can be made here: {problem()}")
    for outcomes in pool.run(_legitimate, route, timeout_s=DEADLINE_S):
        assert {each.kind for each in outcomes} == {"ok"}, outcomes
