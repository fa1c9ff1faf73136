"""Row 44 of docs/failures.md: threads and signal handlers call one group at the same time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, environment
from tests.failure.test_other_calls import METHODS
from tests.failure.worlds import ROUTES, settings_of
from tests.helpers.doors import call_op
from tests.helpers.queues import encode_slowly, is_busy, is_past_python
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 90.0
LIMIT_S = 10.0

UNDER_WAY: dict[str, Callable[[ps.GroupCoordinator], object]] = {
    "barrier": lambda group: group.barrier(),
    "gather": lambda group: group.gather(torch.ones(3)),
    "broadcast_object": lambda group: group.broadcast_object("x", src=1),
}


def _groups(route: str, count: int) -> list[ps.GroupCoordinator]:
    with environment(**settings_of(route)):
        made = [ps.get_tp_group().make_sub_group(range(2)) for _ in range(count)]
    return [group for group in made if group is not None]


def _until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until, "the condition was not met in time"
        time.sleep(0.001)


def _second(route: str, under_way: str) -> tuple[dict[str, Outcome], list[Any]]:
    group, other, signals = _groups(route, 3)
    told: dict[str, Outcome] = {}
    results: list[Any] = []
    try:
        if group.rank_in_group == 0:
            thread = threading.Thread(target=lambda: results.append(attempt(UNDER_WAY[under_way], group).kind))
            thread.start()
            _until(lambda: is_busy(group))
            told = {name: attempt(call, group) for name, call in METHODS.items()}
            sent = group.isend(torch.ones(2), 1)
            results.append(group.recv((3,), torch.float32, 1).tolist())
            sent.wait()
            results.append(other.all_reduce(torch.ones(1)).item())
            signals.barrier()
            thread.join(LIMIT_S)
        else:
            results.append(group.irecv((2,), torch.float32, 0).wait().tolist())
            group.send(torch.ones(3), 0)
            results.append(other.all_reduce(torch.ones(1)).item())
            signals.barrier()
            UNDER_WAY[under_way](group)
        results.append(group.all_reduce(torch.ones(1)).item())
        results.append(group.broadcast_object("fine"))
    finally:
        for each in (group, other, signals):
            each.destroy()
    return told, results


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("under_way", UNDER_WAY)
def test_a_collective_that_begins_while_another_thread_is_in_one(pools: Pools, route: str, under_way: str) -> None:
    (told, results), (_, others) = pools(2).run(_second, route, under_way, tp=2, timeout_s=DEADLINE_S)
    for name, outcome in told.items():
        assert outcome.kind == "UsageError", (name, outcome)
        assert "give each thread a group of its own" in outcome.text and "make_sub_group" in outcome.text
        assert outcome.seconds < 1.0, (name, outcome)
    assert len(told) == len(METHODS)
    assert results == [[1.0, 1.0, 1.0], 2.0, "ok", 2.0, "fine"]
    assert others == [[1.0, 1.0], 2.0, 2.0, "fine"]


def _own_groups(route: str) -> list[bool]:
    groups = _groups(route, 4)
    right: list[bool] = []

    def work(number: int) -> None:
        for turn in range(60):
            x = torch.full((8 if turn % 2 else 5000,), float(number + turn))
            right.append(torch.equal(groups[number].all_reduce(x), 2 * x))
            right.append(groups[number].broadcast_object((number, turn)) == (number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    for group in groups:
        group.destroy()
    return right


@pytest.mark.parametrize("route", ROUTES)
def test_threads_with_groups_of_their_own(pools: Pools, route: str) -> None:
    for right in pools(2).run(_own_groups, route, tp=2, timeout_s=DEADLINE_S):
        assert right == [True] * 480


def _in_a_handler(route: str) -> tuple[str, float]:
    (group, signals) = _groups(route, 2)
    told: list[str] = []

    def handle(*_: object) -> None:
        told.append(attempt(group.all_reduce, torch.ones(1)).kind)
        signals.barrier()

    try:
        if group.rank_in_group == 0:
            before = signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                group.barrier()
            finally:
                signal.signal(signal.SIGALRM, before)
        else:
            signals.barrier()
            group.barrier()
        return ",".join(told), group.all_reduce(torch.ones(1)).item()
    finally:
        group.destroy()
        signals.destroy()


@pytest.mark.parametrize("route", ROUTES)
def test_a_signal_handler_in_the_middle_of_a_call(pools: Pools, route: str) -> None:
    told = pools(2).run(_in_a_handler, route, tp=2, timeout_s=DEADLINE_S)
    assert told == [("UsageError", 2.0), ("", 2.0)]


LARGE = torch.ones(4 << 20)
TRANSFERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], str]] = {
    "recv_object": (
        lambda g: g.recv_object(1), lambda g: g.recv_object(1), lambda g: g.send_object("x", 0), "UsageError"),
    "irecv_object": (
        lambda g: g.irecv_object(1).wait(), lambda g: g.irecv_object(1).wait(), lambda g: g.send_object("x", 0),
        "UsageError"),
    "recv": (
        lambda g: g.recv((3,), torch.float32, 1), lambda g: g.recv((3,), torch.float32, 1),
        lambda g: g.send(torch.ones(3), 0), "UsageError"),
    "irecv": (
        lambda g: g.irecv((3,), torch.float32, 1).wait(), lambda g: g.irecv((3,), torch.float32, 1),
        lambda g: g.send(torch.ones(3), 0), "UsageError"),
    "send": (
        lambda g: g.send(LARGE, 1), lambda g: g.send(torch.ones(3), 1),
        lambda g: g.recv((LARGE.numel(),), torch.float32, 0), "UsageError"),
    "isend": (
        lambda g: g.send(LARGE, 1), lambda g: g.isend(torch.ones(3), 1),
        lambda g: (g.recv((LARGE.numel(),), torch.float32, 0), g.recv((3,), torch.float32, 0)), "ok"),
    "send_object": (
        lambda g: g.send_object(LARGE, 1), lambda g: g.isend_object("x", 1),
        lambda g: (g.recv_object(0), g.recv_object(0)), "ok"),
}  # fmt: skip


def _transfer_in_a_handler(what: str) -> tuple[str, float]:
    (group,) = _groups("shared memory", 1)
    told: list[str] = []
    under_way, in_handler, of_the_other, _ = TRANSFERS[what]
    try:
        if group.rank_in_group == 0:
            before = signal.signal(signal.SIGALRM, lambda *_: told.append(attempt(in_handler, group).kind))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                under_way(group)
            finally:
                signal.signal(signal.SIGALRM, before)
        else:
            time.sleep(1.0)
            of_the_other(group)
        return ",".join(told), group.all_reduce(torch.ones(1)).item()
    finally:
        group.destroy()


@pytest.mark.parametrize("what", TRANSFERS)
def test_a_signal_handler_in_the_middle_of_a_transfer(pools: Pools, what: str) -> None:
    told = pools(2).run(_transfer_in_a_handler, what, tp=2, timeout_s=DEADLINE_S)
    assert told == [(TRANSFERS[what][-1], 2.0), ("", 2.0)]


def _sends_of_handlers(seconds: float) -> int:
    (group,) = _groups("shared memory", 1)
    others, until = 0, time.monotonic() + seconds
    large, from_handler = b"x" * (1 << 20), "from the handler"

    def handle(*_: object) -> None:
        nonlocal others
        others += 1
        group.isend_object(from_handler, 1)
        signal.setitimer(signal.ITIMER_REAL, 0.001 + others % 7 * 0.0003)

    try:
        if group.rank_in_group == 1:
            while (value := group.recv_object(0)) is not None:
                assert value in (large, from_handler), value[:100]
                others += value == from_handler
            return others
        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while time.monotonic() < until:
            group.send_object(large, 1)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        group.send_object(None, 1)
        signal.signal(signal.SIGALRM, before)
        return others
    finally:
        group.destroy()


def test_a_signal_handler_sends_in_the_middle_of_sends(pools: Pools) -> None:
    sent, came = pools(2).run(_sends_of_handlers, 2.0, tp=2, timeout_s=30.0)
    assert sent == came > 100


def _interrupted_send() -> tuple[list[str], str]:
    (group,) = _groups("shared memory", 1)
    told = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        if group.rank_in_group == 0:
            group.send(torch.ones(3), 1)
            before = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                with pytest.raises(KeyboardInterrupt):
                    group.send(LARGE, 1)
            finally:
                signal.signal(signal.SIGALRM, before)
            told = [attempt(group.isend, torch.ones(3), 1) for _ in range(2)]
        else:
            group.recv((3,), torch.float32, 0)
            time.sleep(1.0)
        return [each.kind for each in told], told[0].text if told else ""
    finally:
        group.destroy()


def test_ctrl_c_in_the_middle_of_a_send_ends_the_group(pools: Pools) -> None:
    kinds, text = pools(2).run(_interrupted_send, tp=2, timeout_s=DEADLINE_S)[0]
    assert kinds == ["CommunicationError", "GroupFailedError"]
    assert "interrupted by a signal" in text


def _awaited_again(begun: bool) -> tuple[str, bool]:
    (group,) = _groups("shared memory", 1)
    try:
        if group.rank_in_group:
            if not begun:
                time.sleep(0.6)
            work = group.isend(LARGE, 0)
            time.sleep(0.6 if begun else 0.0)
            work.wait()
            return "", True
        if begun:
            time.sleep(0.2)  # the ring is full by then
        work = group.irecv(LARGE.shape, LARGE.dtype, 1)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        told = "ok"
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.002 if begun else 0.3)
        try:
            work.wait()
        except KeyboardInterrupt:
            told = "KeyboardInterrupt"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return told, torch.equal(work.wait(), LARGE)
    finally:
        group.destroy()


@pytest.mark.parametrize("begun", [False, True])
def test_a_wait_that_ctrl_c_broke_off_can_be_repeated(pools: Pools, begun: bool) -> None:
    told, is_right = pools(2).run(_awaited_again, begun, tp=2, timeout_s=DEADLINE_S)[0]
    assert is_right
    assert told == "KeyboardInterrupt" or begun, "only a begun message can complete before the signal"


SPEC = ps.TensorDictSpec.of({"x": torch.ones(3)})


def _list_op(group: ps.GroupCoordinator, name: str) -> None:
    call_op(group, name, [torch.empty(3)], SPEC.digest, 1)


PAST_PYTHON: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "recv_object": (lambda g: g.recv_object(1), lambda g: g.send_object("x", 0)),
    "recv_tensor_dict": (lambda g: g.recv_tensor_dict(1), lambda g: g.send_tensor_dict({"x": torch.ones(3)}, 0)),
    "recv_tensor_dict with a spec": (
        lambda g: g.recv_tensor_dict(1, spec=SPEC), lambda g: g.send_tensor_dict({"x": torch.ones(3)}, 0, spec=SPEC)),
    "recv_list_": (
        lambda g: _list_op(g, "recv_list_"), lambda g: g.send_tensor_dict({"x": torch.ones(3)}, 0, spec=SPEC)),
    "broadcast_object": (lambda g: g.broadcast_object(None, 1), lambda g: g.broadcast_object("x", 1)),
    "broadcast_tensor_dict with a spec": (
        lambda g: g.broadcast_tensor_dict(None, 1, spec=SPEC),
        lambda g: g.broadcast_tensor_dict({"x": torch.ones(3)}, 1, spec=SPEC)),
    "broadcast_list_": (
        lambda g: _list_op(g, "broadcast_list_"),
        lambda g: g.broadcast_tensor_dict({"x": torch.ones(3)}, 1, spec=SPEC)),
}  # fmt: skip


def _interrupted_past_python(what: str, handle: Callable[[ps.GroupCoordinator], object]) -> tuple[list[Any], str]:
    (group,) = _groups("shared memory", 1)
    receive, send = PAST_PYTHON[what]
    told: list[Any] = []
    try:
        for _ in range(2):
            send(group) if group.rank_in_group else receive(group)
        if group.rank_in_group:
            time.sleep(1.0)
            attempt(send, group), attempt(send, group)
            attempt(group.barrier)
            return told, ""

        def handler(*_: object) -> None:
            told.append(is_past_python(group))
            told.append(handle(group))

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            receive(group)
            told.append("ok")
        except KeyboardInterrupt:
            told.append("KeyboardInterrupt")
        finally:
            signal.signal(signal.SIGALRM, before)
        after = attempt(receive, group)
        attempt(group.barrier)
        return told, f"{after.kind}: {after.text}"
    finally:
        group.destroy()


def _receives(group: ps.GroupCoordinator) -> list[str]:
    receives = [receive for what, (receive, _) in PAST_PYTHON.items() if "recv" in what]
    return [attempt(each, group).kind for each in (*receives, lambda g: g.irecv_object(1))]


def _broadcasts(group: ps.GroupCoordinator) -> list[str]:
    return [attempt(receive, group).kind for what, (receive, _) in PAST_PYTHON.items() if "broadcast" in what]


def _ctrl_c(group: ps.GroupCoordinator) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", PAST_PYTHON)
def test_a_signal_handler_in_a_receive_past_python(pools: Pools, what: str) -> None:
    handle = _broadcasts if "broadcast" in what else _receives
    told, after = pools(2).run(_interrupted_past_python, what, handle, tp=2, timeout_s=DEADLINE_S)[0]
    assert told[0] and set(told[1]) == {"UsageError"} and told[2] == "ok"
    assert after.startswith("ok")


@pytest.mark.parametrize("what", PAST_PYTHON)
def test_ctrl_c_in_a_receive_past_python(pools: Pools, what: str) -> None:
    told, after = pools(2).run(_interrupted_past_python, what, _ctrl_c, tp=2, timeout_s=DEADLINE_S)[0]
    assert told == [True, "KeyboardInterrupt"]
    if "broadcast" in what:
        assert after.startswith("CommunicationError") and "interrupted by a signal" in after
    else:
        assert after.startswith("ok")


LARGE_SPEC = ps.TensorDictSpec.of({"x": LARGE})


def _interrupted_in_a_message(of_op: bool) -> tuple[list[str], str]:
    (group,) = _groups("shared memory", 1)
    told: list[str] = []
    pids = group.all_gather_object(os.getpid())

    def receive() -> None:
        if of_op:
            call_op(group, "recv_list_", [torch.empty_like(LARGE)], LARGE_SPEC.digest, 1)
        else:
            group.recv_tensor_dict(1, spec=LARGE_SPEC)

    def handler(*_: object) -> None:
        told.append(str(is_past_python(group)))
        raise KeyboardInterrupt

    try:
        if group.rank_in_group:
            group.send_tensor_dict({"x": LARGE}, 0, spec=LARGE_SPEC)
            group.barrier()  # an empty ring has room for the beginning of the next message
            attempt(group.send_tensor_dict, {"x": LARGE}, 0, spec=LARGE_SPEC)
            time.sleep(1.0)
            return told, ""
        receive()
        group.barrier()
        time.sleep(0.5)  # the ring is full by then
        os.kill(pids[1], signal.SIGSTOP)
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        try:
            with pytest.raises(KeyboardInterrupt):
                receive()
        finally:
            signal.signal(signal.SIGALRM, before)
            os.kill(pids[1], signal.SIGCONT)
        after = [attempt(group.recv_tensor_dict, 1, spec=LARGE_SPEC) for _ in range(2)]
        return told + [each.kind for each in after], after[0].text
    finally:
        group.destroy()


@pytest.mark.parametrize("of_op", [False, True])
def test_ctrl_c_in_the_middle_of_a_message_past_python_ends_the_group(pools: Pools, of_op: bool) -> None:
    told, text = pools(2).run(_interrupted_in_a_message, of_op, tp=2, timeout_s=DEADLINE_S)[0]
    assert told == ["True", "CommunicationError", "GroupFailedError"], text
    assert "interrupted by a signal" in text


def _started(route: str) -> list[Any]:
    (group,) = _groups(route, 1)
    results: list[Any] = []
    try:
        handle = group.all_reduce_async(torch.ones(5000))
        thread = threading.Thread(target=lambda: results.append(handle.wait().unique().tolist()))
        thread.start()
        total = group.all_reduce(torch.ones(1)).item()
        thread.join(LIMIT_S)
        return [*results, total]
    finally:
        group.destroy()


@pytest.mark.parametrize("route", ROUTES)
def test_waiting_for_what_was_started_is_no_call(pools: Pools, route: str) -> None:
    assert pools(2).run(_started, route, tp=2, timeout_s=DEADLINE_S) == [[[2.0], 2.0]] * 2


def _in_a_handler_of_a_broadcast() -> list[str]:
    (group,) = _groups("shared memory", 1)
    told: list[str] = []
    try:
        for _ in range(3):
            group.broadcast_object("x", 1)
        if group.rank_in_group:
            with pytest.MonkeyPatch.context() as patch:
                encode_slowly(patch, 1.0)
                group.broadcast_object({1, 2}, 1)
        else:
            before = signal.signal(
                signal.SIGALRM, lambda *_: told.append(attempt(group.all_reduce, torch.ones(1)).kind)
            )
            signal.setitimer(signal.ITIMER_REAL, 0.4)
            told.append(str(group.broadcast_object(None, 1)))
            signal.signal(signal.SIGALRM, before)
        return [*told, str(group.all_reduce(torch.ones(1)).item())]
    finally:
        group.destroy()


def test_a_signal_handlers_collective_is_no_part_of_the_broadcast_that_it_interrupts(pools: Pools) -> None:
    told = pools(2).run(_in_a_handler_of_a_broadcast, tp=2, timeout_s=DEADLINE_S)
    assert told == [["UsageError", "{1, 2}", "2.0"], ["2.0"]]


def _replaced_while_it_is_sent() -> None:
    """Another thread drops texts of rank 0's broadcast while they wait for room in a ring."""
    (group,) = _groups("shared memory", 1)
    sent, stop, size = {"text": "a" * (3 << 20)}, threading.Event(), 3 << 20

    def replace() -> None:
        while not stop.is_set():
            sent["text"] = "b" * size

    thread = threading.Thread(target=replace)
    try:
        if group.rank_in_group == 0:
            thread.start()
        for _ in range(100):
            text = group.broadcast_object(sent, 0)["text"]
            assert group.rank_in_group == 0 or text in ("a" * size, "b" * size)
    finally:
        stop.set()
        if group.rank_in_group == 0:
            thread.join()
        group.destroy()


def test_another_thread_lets_go_of_what_is_sent_to_all(pools: Pools) -> None:
    pools(2).run(_replaced_while_it_is_sent, tp=2, timeout_s=DEADLINE_S)
