from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from device_communicators.base.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    GroupDestroyedError,
    GroupFailedError,
    PeerDiedError,
    UnsupportedError,
    UsageError,
)
from device_communicators.base.member import Timeout
from device_communicators.calls.recorder import Operation
from device_communicators.calls.user_call import begin_locally
from device_communicators.liveness.health import FailureDomain, Watcher
from device_communicators.routing import observers
from device_communicators.routing import route as routing
from device_communicators.routing.communicator import Communicator, GroupContext, Request
from device_communicators.routing.observers import FailureEvent
from device_communicators.routing.route import Route

RANKS = (4, 5, 6, 7)
X = torch.ones(3)


class Server:
    def __init__(self) -> None:
        self.served: list[bool] = []

    def serve(self, key: str, after: int = 0) -> None:
        self.served.append(True)

    def stop_serving(self, key: str) -> dict[str, tuple[int, int]]:
        self.served.append(False)
        return {}

    def traffic(self, key: str) -> dict[str, tuple[int, int]]:
        return {}

    def operations(self, key: str) -> list[Any]:
        return []

    def next_operation(self, key: str) -> int:
        return 0

    def has_transfers(self, key: str) -> bool:
        return False


class Failing(Communicator):
    name = "failing"
    tells_sending = True

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        self.error: Exception | None = None
        self.sends = True
        self.calls = 0
        self.closed = False
        self.server = Server()

    @property
    def op_server(self) -> Server:
        return self.server

    def refusal(self, request: Request) -> str | None:
        return "it carries no barrier" if request.operation == "barrier" else None

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        self.calls += 1
        if self.sends:
            routing.begin_sending()
        else:
            begin_locally()
        if self.error is not None:
            raise self.error
        return x.clone()

    def close(self) -> None:
        self.closed = True


Failing.__abstractmethods__ = frozenset()


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def failing(watcher: Watcher) -> Failing:
    domain = FailureDomain(range(8))
    return Failing(GroupContext("tp:0", RANKS, 1, torch.device("cpu"), Timeout(5.0), watcher=watcher, domain=domain))


@pytest.fixture
def route(failing: Failing) -> Route:
    return Route(failing.context, [failing], {})


@pytest.fixture
def told() -> Iterator[list[int]]:
    calls: list[int] = []

    def hear(_: FailureEvent) -> None:
        calls.append(1)

    observers.ON_FAILURE.append(hear)
    yield calls
    observers.ON_FAILURE.remove(hear)


def _call(route: Route) -> Tensor:
    return route.run("all_reduce", X, X, "sum", reduce_op="sum")


def _facts() -> dict[str, Any]:
    return {"group": "tp:0", "operation": "all_reduce", "rank": 1, "suspect_ranks": (6,)}


ENDS: list[tuple[Callable[[], Exception], type[CommunicationError]]] = [
    (lambda: CollectiveTimeoutError("late", **_facts()), CollectiveTimeoutError),
    (lambda: CollectiveMismatchError("other", **_facts()), CollectiveMismatchError),
    (lambda: CommunicationError("broken", **_facts()), CommunicationError),
    (lambda: RuntimeError("gloo: timed out"), CollectiveTimeoutError),
    (lambda: RuntimeError("some other thing"), CommunicationError),
]


@pytest.mark.parametrize(("make", "kind"), ENDS)
def test_a_failure_ends_the_group(
    route: Route, failing: Failing, told: list[int], make: Callable[[], Exception], kind: type[CommunicationError]
) -> None:
    route.serve_ops(True)
    _call(route)
    failing.error = make()
    with pytest.raises(kind) as first:
        _call(route)
    assert type(first.value) is kind
    assert first.value.sequence == 2
    assert route.has_failed and route.first_failure is first.value
    assert len(first.value.recent) == 2
    assert failing.server.served == [True, False], "the ops would go past this route"
    failing.error = None
    seconds = []
    for call in (_call, _call, Route.check_usable, Route.set_up, Route.capture):
        started = time.monotonic()
        with pytest.raises(GroupFailedError) as later:
            call(route)
        seconds.append(time.monotonic() - started)
        assert later.value.__cause__ is first.value
        assert later.value.suspect_ranks == first.value.suspect_ranks
        assert (later.value.operation, later.value.sequence) == ("all_reduce", 2)
    assert sorted(seconds)[2] < 0.01
    assert failing.calls == 2, "nothing was sent any more"
    assert told == [1]


def test_a_failure_is_explained_by_its_call_and_the_one_before(
    route: Route, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def explain(
        context: GroupContext, last: Operation, failure: CommunicationError, before: Operation
    ) -> CommunicationError:
        told.append((last.sequence, last, before))
        return failure

    monkeypatch.setattr(routing, "explained", explain)
    route.run("all_reduce", torch.ones(7), torch.ones(7), "sum", reduce_op="sum")
    failing.error = RuntimeError("gloo: timed out")
    with pytest.raises(CollectiveTimeoutError):
        _call(route)
    (sequence, call, before), *more = told
    assert sequence == 2 and (before.sequence, before.shape) == (1, (7,)) and before.key != call.key, told
    assert not more, told


@pytest.mark.parametrize(
    "error", [ValueError("a shape"), UsageError("a mistake"), NotImplementedError("no such kernel")]
)
def test_a_mistake_leaves_the_group_as_it_was(
    route: Route, failing: Failing, told: list[int], error: Exception
) -> None:
    failing.error = error
    with pytest.raises(type(error)) as caught:
        _call(route)
    assert caught.value is error
    failing.error = None
    assert torch.equal(_call(route), X)
    assert not route.has_failed and route.first_failure is None
    assert told == []


def test_what_failed_before_anything_was_sent_is_a_mistake(route: Route, failing: Failing, told: list[int]) -> None:
    failing.error, failing.sends = RuntimeError("out of descriptors"), False
    with pytest.raises(UsageError, match="before anything was sent, by RuntimeError: out of descriptors"):
        _call(route)
    failing.error = None
    _call(route)
    assert told == [] and route.first_failure is None


def test_an_operation_that_nobody_carries_leaves_the_group_as_it_was(route: Route, told: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="failing: it carries no barrier"):
        route.run("barrier", None)
    _call(route)
    assert told == []


def test_the_first_failure_stays(route: Route, told: list[int]) -> None:
    first = CommunicationError("first", **_facts())
    assert route.failure_of(first, "all_reduce", time.monotonic()) is first
    second = CommunicationError("second", **_facts())
    assert route.failure_of(second, "all_reduce", time.monotonic()) is second
    assert route.first_failure is first
    assert route.failure_of(first, "all_reduce", time.monotonic()) is first
    assert told == [1]


def test_a_death_anywhere_in_the_failure_domain_ends_the_group(
    route: Route, watcher: Watcher, failing: Failing, told: list[int]
) -> None:
    _call(route)
    watcher.report(0, "has ended")
    assert route.has_failed
    for _ in range(2):
        with pytest.raises((PeerDiedError, GroupFailedError)) as caught:
            _call(route)
        assert caught.value.suspect_ranks == (0,)
    assert isinstance(caught.value, GroupFailedError)
    assert failing.calls == 1
    assert told == [1]


def test_a_death_outside_of_the_failure_domain_is_nothing_to_the_group(route: Route, watcher: Watcher) -> None:
    watcher.report(8, "has ended")
    _call(route)
    assert not route.has_failed


def test_all_that_died_together_are_named(route: Route, watcher: Watcher, failing: Failing) -> None:
    failing.error = PeerDiedError("gone", **_facts())
    original = Failing.all_reduce

    def dies(self: Failing, x: Tensor, op: str) -> Tensor:
        watcher.report(6, "has ended")
        watcher.report(7, "has ended")
        return original(self, x, op)

    failing.all_reduce = dies.__get__(failing)  # type: ignore[method-assign]
    with pytest.raises(PeerDiedError) as caught:
        _call(route)
    assert caught.value.suspect_ranks == (6, 7)


def test_a_destroyed_group_keeps_nothing(route: Route, failing: Failing, told: list[int]) -> None:
    failing.error = CollectiveTimeoutError("late", **_facts())
    with pytest.raises(CollectiveTimeoutError):
        _call(route)
    route.close()
    route.close()
    assert failing.closed and route.first_failure is None
    with pytest.raises(GroupDestroyedError):
        _call(route)
    route.failure_of(CommunicationError("late news", **_facts()), "all_reduce", time.monotonic())
    assert route.first_failure is None, "nobody uses it any more"
    assert told == [1]


class Graph:
    def __init__(self) -> None:
        self.own = self


def test_graphs_that_only_a_cycle_keeps_are_gone_before_the_communicators_end(
    route: Route, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    route.capture()
    monkeypatch.setattr(Failing, "close", lambda self: found.append(graph()))
    gc.disable()
    try:
        graph = weakref.ref(Graph())
        route.close()
    finally:
        gc.enable()
    assert found == [None]
