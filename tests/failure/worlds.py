"""A world of four ranks, calls on it, and what each rank reports after a failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, environment
from tests.extent import LONG
from tests.failure.over_torch import OVER_TORCH, torch_world

T = TypeVar("T")

TIMEOUT_S = 5.0
"""T of the failure table."""
SLACK_S = 5.0
LONG_TIMEOUT_S = 30.0


def some(of_all: Sequence[T], count: int) -> Sequence[T]:
    return of_all if LONG else of_all[:count]


ROUTES = ("shared memory", "connections")
ROUTES_AND_TORCH = (*ROUTES, pytest.param(OVER_TORCH, marks=pytest.mark.over("shared memory")))


def on_routes(values: Sequence[T]) -> list[tuple[T, str]]:
    """Pairs each value with one route in turn; with both if FAILURE_TESTS=long."""
    pairs = [(value, route) for value in values for route in reversed(ROUTES)]
    return pairs if LONG else [pairs[2 * number + number % 2] for number in range(len(values))]


def seeds_on_routes(count: int) -> list[Any]:
    """Returns parameters of tests whose seed n uses ROUTES[n % 2]."""
    return [pytest.param(seed, marks=pytest.mark.over(ROUTES[seed % len(ROUTES)])) for seed in range(count)]


DEADLINE_S = 60.0


def settings_of(route: str) -> dict[str, str | None]:
    return {"PARALLEL_STATE_SHARED_MEMORY": "off" if route == "connections" else None}


@contextmanager
def world_over(route: str, port: int | None = None, timeout_s: float = TIMEOUT_S) -> Iterator[ps.GroupCoordinator]:
    if route == OVER_TORCH:
        with torch_world(port, timeout_s) as group:
            yield group  # type: ignore[misc]
        return
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    method = "env://" if port is None else f"tcp://127.0.0.1:{port}"
    with environment(**settings_of(route)):
        ps.init_distributed_environment(size, rank, method, timeout=timeout_s)
        ps.initialize_model_parallel(size)
    try:
        yield ps.get_tp_group()
    finally:
        ps.destroy_distributed_environment()


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def later(seconds: float, act: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def around(group: ps.GroupCoordinator, send: Callable[[int], Any], recv: Callable[[int], Any]) -> Any:
    after, before = (group.rank_in_group + 1) % group.world_size, (group.rank_in_group - 1) % group.world_size
    if group.rank_in_group % 2 == 0:
        send(after)
        return recv(before)
    received = recv(before)
    send(after)
    return received


def calls_of_all(group: ps.GroupCoordinator) -> dict[str, Callable[[], None]]:
    size, rank = group.world_size, group.rank_in_group
    ones, mine = torch.ones(size * 6), torch.full((6,), float(rank))
    everyone = torch.arange(size).repeat_interleave(6).float()
    before = (rank - 1) % size

    def same(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(found, expected), f"{found.tolist()} is not {expected.tolist()}"

    def equal(found: object, expected: object) -> None:
        assert found == expected, f"{found} is not {expected}"

    def norm() -> None:
        _, total = group.all_reduce_add_rms_norm(torch.ones(3, 8), torch.ones(3, 8), torch.ones(8))
        same(total, torch.full((3, 8), size + 1.0))

    def gathered() -> None:
        found = group.gather(mine)
        if found is not None:
            same(found, everyone)

    def tensor_dict() -> None:
        found = around(
            group,
            lambda dst: group.send_tensor_dict({"x": mine, "name": rank}, dst),
            lambda src: group.recv_tensor_dict(src),
        )
        same(found["x"], torch.full((6,), float(before)))

    def no_wait() -> None:
        sent = group.isend(mine, (rank + 1) % size)
        same(group.irecv((6,), torch.float32, before).wait(), torch.full((6,), float(before)))
        sent.wait()

    return {
        "all_reduce": lambda: same(group.all_reduce(ones), ones * size),
        "all_reduce_": lambda: same(group.all_reduce_(ones.clone()), ones * size),
        "all_reduce of 4 MiB": lambda: same(group.all_reduce(torch.ones(1 << 20)), torch.full((1 << 20,), float(size))),
        "all_reduce of int16": lambda: same(group.all_reduce(ones.short()), ones.short() * size),
        "all_reduce_async": lambda: same(group.all_reduce_async(ones).wait(), ones * size),
        "all_reduce_add_rms_norm": norm,
        "all_gather": lambda: same(group.all_gather(mine), everyone),
        "all_gatherv": lambda: same(group.all_gatherv(mine, 0, [6] * size), everyone),
        "reduce_scatter": lambda: same(group.reduce_scatter(ones), torch.full((6,), float(size))),
        "broadcast": lambda: same(group.broadcast(mine, 1), torch.ones(6)),
        "gather": gathered,
        "scatter": lambda: same(group.scatter(everyone if rank == 0 else None), mine),
        "all_to_all": lambda: same(group.all_to_all(torch.full((size * 6,), float(rank))), everyone),
        "barrier": group.barrier,
        "send and recv": lambda: same(
            around(group, lambda dst: group.send(mine, dst), lambda src: group.recv((6,), torch.float32, src)),
            torch.full((6,), float(before)),
        ),
        "isend and irecv": no_wait,
        "broadcast_object": lambda: equal(group.broadcast_object({"a": rank}, 1), {"a": 1}),
        "all_gather_object": lambda: equal(group.all_gather_object(rank), list(range(size))),
        "send_object": lambda: equal(
            around(group, lambda dst: group.send_object(rank, dst), lambda src: group.recv_object(src)), before
        ),
        "send_tensor_dict": tensor_dict,
    }


OPERATIONS = (
    "all_reduce", "all_reduce_", "all_reduce of 4 MiB", "all_reduce of int16", "all_reduce_async",
    "all_reduce_add_rms_norm", "all_gather", "all_gatherv", "reduce_scatter", "broadcast", "gather", "scatter",
    "all_to_all", "barrier", "send and recv", "isend and irecv", "broadcast_object", "all_gather_object", "send_object",
    "send_tensor_dict",
)  # fmt: skip


class Told(NamedTuple):
    outcome: Outcome
    at_s: float
    again: Outcome
    facts: dict[str, Any]


def facts_of(error: BaseException | None) -> dict[str, Any]:
    names = ("group", "operation", "sequence", "rank", "suspect_ranks", "elapsed_s", "timeout_s")
    return {name: getattr(error, name, None) for name in names}


def until_it_fails(group: ps.GroupCoordinator, call: Callable[[], Any], limit_s: float = DEADLINE_S / 2) -> Told:
    until = time.monotonic() + limit_s
    outcome = attempt(call)
    while outcome.kind == "ok" and time.monotonic() < until:
        outcome = attempt(call)
    at_s = time.monotonic()
    again = attempt(group.all_reduce, torch.ones(3))
    return Told(outcome, at_s, again, facts_of(group.route.first_failure))
