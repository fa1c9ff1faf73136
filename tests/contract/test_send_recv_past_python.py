from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, environment, world
from tests.helpers.doors import op_arguments
from tests.helpers.queues import RING_BYTES, carried_calls, count_waiting, live_states
from tests.workers import WorkerPool

Group = ps.GroupCoordinator
Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
T_S = 1.0
RING_ELEMENTS = RING_BYTES // 4
SMALL, LARGE = 16, 2 * RING_ELEMENTS


def _carried(group: Group) -> tuple[int, int]:
    return carried_calls(group, "send"), carried_calls(group, "recv")


@contextmanager
def _pair(timeout_s: float | None = None, *, served: bool = True) -> Iterator[Group]:
    everyone = ps.get_tp_group()
    if timeout_s is None:
        group = everyone.make_sub_group(range(2))
    else:
        group = ps.create_parallel_groups(everyone, {"tp": 2}, timeout=timeout_s).tp
    assert group is not None
    try:
        if not served:
            group.route.serve_ops(False)
        _pass(group, torch.ones(1))
        group.barrier()
        yield group
    finally:
        group.destroy()


def _pass(group: Group, x: torch.Tensor) -> torch.Tensor | None:
    return group.send(x, 1) if group.rank_in_group == 0 else group.recv(x.shape, x.dtype, 0)


def _forms() -> int:
    with _pair() as group:
        cases = [
            torch.arange(12.0).view(3, 4),
            torch.arange(12.0).view(3, 4).t(),
            torch.arange(24, dtype=torch.int16)[::3],
            torch.ones(5, dtype=torch.complex64).mul(1j),
            torch.tensor(3.5),
            torch.ones(2, 3, dtype=torch.bool),
            torch.arange(RING_ELEMENTS // 4),
        ]
        for number, x in enumerate(cases, 1):
            found = _pass(group, x)
            if found is not None:
                assert found.dtype == x.dtype and found.is_contiguous() and torch.equal(found, x), number
            ours, others = (number, 0) if group.rank_in_group == 0 else (0, number)
            assert _carried(group) == (ours, others), number
            group.barrier()
        return len(cases)


def test_tensors_of_all_forms_go_past_python(pools: Pools) -> None:
    assert pools(2).run(_forms, tp=2, timeout_s=DEADLINE_S) == [7, 7]


def _what_does_not() -> None:
    with _pair() as group:
        for x in (torch.ones(0), torch.ones(LARGE), torch.ones(3, dtype=torch.complex64).conj()):
            found = _pass(group, x)
            assert found is None or torch.equal(found, x)
            group.barrier()
        sent, received = _carried(group)
        assert sent == (1 if group.rank_in_group == 0 else 0)  # torch resolves the conjugate before the op's kernel
        assert received == (2 if group.rank_in_group == 1 else 0)


def test_what_is_left_to_python_arrives_as_well(pools: Pools) -> None:
    pools(2).run(_what_does_not, tp=2, timeout_s=DEADLINE_S)


def _ops() -> None:
    with _pair() as group:
        ops, (token, key) = torch.ops.parallel_state, op_arguments(group)
        x = torch.arange(6.0, requires_grad=True)
        if group.rank_in_group == 0:
            version = x._version
            with torch.no_grad():
                ops.send(x, token, 1, key)
            assert x._version == version
            with pytest.raises(ps.InvalidArgumentError, match="isn't differentiable"):
                ops.send(x * 2, token, 1, key)
        else:
            found = ops.recv(token, [2, 3], torch.float32, torch.device("cpu"), 0, key)
            assert torch.equal(found, x.detach().view(2, 3))
        assert sum(_carried(group)) == 1


def test_the_registered_ops_go_past_python(pools: Pools) -> None:
    pools(2).run(_ops, tp=2, timeout_s=DEADLINE_S)


def _mixed(seed: int) -> int:
    shared, own = random.Random(seed), random.Random(seed + 1 + ps.get_tp_group().rank_in_group)
    sizes = [shared.choice((1, SMALL, SMALL, 1000, 40_000, RING_ELEMENTS // 3, LARGE)) for _ in range(150)]
    waiting: deque[tuple[int, Any]] = deque()

    def finish() -> None:
        number, handle = waiting.popleft()
        check(number, handle.wait())

    def check(number: int, found: torch.Tensor | None) -> None:
        if found is not None:
            assert found.shape == (sizes[number],) and found.eq(number).all(), number

    with _pair() as group:
        for number, size in enumerate(sizes):
            starts = own.random() < 0.4
            if group.rank_in_group == 0:
                x = torch.full((size,), float(number))
                if starts:
                    waiting.append((number, group.isend(x, 1)))
                else:
                    group.send(x, 1)
                    x.fill_(-1)
            elif starts:
                waiting.append((number, group.irecv((size,), torch.float32, 0)))
            else:
                check(number, group.recv((size,), torch.float32, 0))
            while waiting and own.random() < 0.3:
                finish()
        while waiting:
            finish()
        return max(_carried(group))


@pytest.mark.parametrize("seed", range(3))
def test_order_with_what_is_started(pools: Pools, seed: int) -> None:
    sent, received = pools(2).run(_mixed, seed, tp=2, timeout_s=DEADLINE_S)
    assert sent > 10 and received > 10


def _after_started() -> None:
    with _pair() as group:
        if group.rank_in_group == 1:
            group.barrier()
            for size in (LARGE, LARGE, SMALL, SMALL):
                group.recv((size,), torch.float32, 0)
            group.barrier()
            group.recv((SMALL,), torch.float32, 0)
            return
        handles = [group.isend(torch.ones(size), 1) for size in (LARGE, LARGE)]
        behind = threading.Thread(target=lambda: group.send(torch.ones(SMALL), 1))
        behind.start()
        until = time.monotonic() + DEADLINE_S
        while count_waiting(group, 1) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        assert count_waiting(group, 1) == 2 and _carried(group) == (0, 0)
        group.barrier()
        behind.join(DEADLINE_S)
        for handle in handles:
            handle.wait()
        group.send(torch.ones(SMALL), 1)
        group.barrier()
        before, _ = _carried(group)
        group.send(torch.ones(SMALL), 1)
        assert _carried(group) == (before + 1, 0)


def test_a_send_behind_started_ones_waits_and_the_next_does_not(pools: Pools) -> None:
    pools(2).run(_after_started, tp=2, timeout_s=DEADLINE_S)


def _behind_started_receives() -> None:
    with _pair() as group:
        if group.rank_in_group == 0:
            for number in range(6):
                group.send(torch.full((SMALL,), float(number)), 1)
            return
        receive = ((SMALL,), torch.float32, 0)
        first, second = group.irecv(*receive), group.irecv(*receive)
        assert group.recv(*receive).eq(2).all()
        assert second.wait().eq(1).all() and first.wait().eq(0).all()
        before = _carried(group)[1]
        assert group.recv(*receive).eq(3).all() and _carried(group)[1] == before + 1
        # A receive that another thread starts during this blocking one is queued behind it.
        others: list[float] = []
        thread = threading.Thread(target=lambda: others.append(group.irecv(*receive).wait()[0].item()))
        own = threading.Thread(target=lambda: others.append(group.recv(*receive)[0].item()))
        own.start()
        thread.start()
        own.join(DEADLINE_S)
        thread.join(DEADLINE_S)
        assert sorted(others) == [4.0, 5.0]


def test_a_receive_does_not_overtake_started_ones(pools: Pools) -> None:
    pools(2).run(_behind_started_receives, tp=2, timeout_s=DEADLINE_S)


def _many_threads() -> None:
    threads, each = 4, 50
    with _pair() as group:
        if group.rank_in_group == 0:
            for number in range(threads * each):
                group.send(torch.tensor([number]), 1)
            group.barrier()
            return
        found: list[int] = []

        def work(starts: bool) -> None:
            for _ in range(each):
                if starts:
                    found.append(int(group.irecv((1,), torch.int64, 0).wait().item()))
                else:
                    found.append(int(group.recv((1,), torch.int64, 0).item()))

        workers = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(DEADLINE_S)
        group.barrier()
        assert sorted(found) == list(range(threads * each))


def test_threads_that_start_and_wait(pools: Pools) -> None:
    pools(2).run(_many_threads, tp=2, timeout_s=DEADLINE_S)


FAILURES: dict[str, tuple[Callable[[Group], object], Callable[[Group], object]]] = {
    "another size": (lambda g: g.send(torch.ones(3), 1), lambda g: g.recv((4,), torch.float32, 0)),
    "another dtype": (lambda g: g.send(torch.ones(4), 1), lambda g: g.recv((4,), torch.int32, 0)),
    "an empty one": (lambda g: g.send(torch.ones(0), 1), lambda g: g.recv((4,), torch.float32, 0)),
    "something instead of nothing": (lambda g: g.send(torch.ones(3), 1), lambda g: g.recv((0,), torch.float32, 0)),
    "nobody sends": (lambda g: None, lambda g: g.recv((4,), torch.float32, 0)),
    "nobody receives": (lambda g: None, lambda g: g.send(torch.ones(LARGE), 0)),
    "wrong rank": (lambda g: None, lambda g: g.recv((4,), torch.float32, 2)),
    "this rank": (lambda g: None, lambda g: g.send(torch.ones(4), 1)),
    "wrong size": (lambda g: None, lambda g: g.recv((4, -1), torch.float32, 0)),
    "wrong dtype": (lambda g: None, lambda g: g.recv((4,), "float32", 0)),
    "a gradient": (lambda g: None, lambda g: g.send(torch.ones(4, requires_grad=True) * 2, 0)),
    "closed": (lambda g: None, lambda g: (g.destroy(), g.recv((4,), torch.float32, 0))),
    "to a closed one": (lambda g: None, lambda g: (g.destroy(), g.send(torch.ones(4), 0))),
}


def _failing(what: str, served: bool) -> list[Outcome]:
    act, fail = FAILURES[what]
    found: list[Outcome] = []
    with _pair(T_S, served=served) as group:
        if group.rank_in_group == 0:
            act(group)
        else:
            if what == "nobody receives":
                group.send(torch.ones(1), 0)
            found = [attempt(fail, group), attempt(group.recv, (4,), torch.float32, 0)]
        ps.get_tp_group().barrier()  # an early exit would add its own report to the error
    return found


def _in_general(outcome: Outcome) -> tuple[str, str]:
    text = re.split(r"\. (?:This rank called it at|Last known states:) ?", outcome.text)[0]
    return outcome.kind, re.sub(r"\d+(\.\d+)?", "#", text)


@pytest.mark.parametrize("what", FAILURES)
def test_errors_are_those_of_the_python_route(pools: Pools, what: str) -> None:
    _, found = pools(2).run(_failing, what, True, tp=2, timeout_s=DEADLINE_S)
    _, expected = pools(2).run(_failing, what, False, tp=2, timeout_s=DEADLINE_S)
    assert expected[0].kind != "ok"
    assert [_in_general(each) for each in found] == [_in_general(each) for each in expected]


def _interrupted(served: bool, raises: bool) -> tuple[list[str], str]:
    with _pair(10.0, served=served) as group:
        if group.rank_in_group == 0:
            time.sleep(0.8)
            attempt(group.send, torch.ones(4), 1)
            attempt(group.send, torch.ones(4), 1)
            time.sleep(0.5)
            return [], ""
        receive, told = ((4,), torch.float32, 0), []

        def handler(*_: object) -> None:
            told.append(attempt(group.recv, *receive).kind)
            told.append(attempt(group.irecv, *receive).kind)
            if raises:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            told.append(str(group.recv(*receive).tolist()))
        except KeyboardInterrupt:
            told.append("KeyboardInterrupt")
        finally:
            signal.signal(signal.SIGALRM, before)
        after = attempt(group.recv, *receive)
        return [*told, after.kind], _in_general(after)[1]


@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_handler_in_a_receive(pools: Pools, raises: bool) -> None:
    _, found = pools(2).run(_interrupted, True, raises, tp=2, timeout_s=DEADLINE_S)
    _, expected = pools(2).run(_interrupted, False, raises, tp=2, timeout_s=DEADLINE_S)
    assert found == expected
    assert found[0][:3] == ["UsageError", "UsageError", "KeyboardInterrupt" if raises else str([1.0] * 4)]


def _records(served: bool) -> tuple[list[Any], dict[str, Any], str]:
    with _pair(served=served) as group:
        for _ in range(3):
            _pass(group, torch.ones(2, 3))
        waits = ""
        if group.rank_in_group == 1:
            thread = threading.Thread(target=lambda: group.recv((5,), torch.int32, 0))
            thread.start()
            until = time.monotonic() + 5.0
            while not waits and time.monotonic() < until:
                waits = live_states()[str(group.rank)]["call"]
        group.barrier()
        if group.rank_in_group == 0:
            group.send(torch.ones(5, dtype=torch.int32), 1)
        else:
            thread.join(DEADLINE_S)
        names = ("send", "recv")
        records = [
            (each.name, each.dtype, each.shape, each.peer, each.call_text, each.ended_s is not None)
            for each in group.route.operations()
            if each.name in names
        ]
        traffic = group.route.traffic()
        return records, {name: traffic[name] for name in names if name in traffic}, waits


def test_records_and_counts(pools: Pools) -> None:
    found = pools(2).run(_records, True, tp=2, timeout_s=DEADLINE_S)
    expected = pools(2).run(_records, False, tp=2, timeout_s=DEADLINE_S)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert found[1][2] == "recv(src global rank 0) of [5] int32"


def _watched_and_in_debug_mode(debug: bool) -> tuple[int, list[str]]:
    events: list[Any] = []
    with world(2), _pair() as group:
        remove = (lambda: None) if debug else ps.on_operation(events.append)
        _pass(group, torch.ones(2))
        remove()
        return sum(_carried(group)), [each.operation for each in events]


def test_observers_are_told(pools: Pools) -> None:
    found = pools(2).run(_watched_and_in_debug_mode, False, timeout_s=DEADLINE_S)
    assert found == [(0, ["send"]), (0, ["recv"])]


def test_in_debug_mode_none_goes_past_python(pools: Pools) -> None:
    assert pools(2).run(_in_debug_mode, timeout_s=DEADLINE_S) == [0, 0]


def _in_debug_mode() -> int:
    with environment(PARALLEL_STATE_DEBUG="1"):
        return _watched_and_in_debug_mode(True)[0]
