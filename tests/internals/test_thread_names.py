"""Each thread of this library has a kernel name, such as `ps-control` in `top -H`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.base.helper_threads import THREADS, HelperThread, run_in_thread
from device_communicators.c10d import creation
from device_communicators.cpu import native

DEADLINE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    native.load()
    creation.load()


def _tasks() -> dict[int, str]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[int(task.name)] = (task / "comm").read_text().strip()
        except OSError:
            continue
    return found


def _until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S / 2
    while not is_true() and time.monotonic() < until:
        time.sleep(0.01)


def _names_in_a_world() -> tuple[list[str], dict[str, str]]:
    before = _tasks()
    ps.init_distributed_environment(timeout=DEADLINE_S)
    ps.initialize_model_parallel(2)
    group = ps.get_tp_group()
    endpoint = ps.metrics.serve(0)
    other = 1 - group.rank
    group.all_reduce_async(torch.ones(4)).wait()
    handle = group.irecv((4,), torch.float32, other)
    handle.is_completed()
    sent = group.isend(torch.ones(4), other)
    group.all_gather_object(group.rank)
    told = _told(before)
    sent.wait()
    handle.wait()
    group.barrier()
    endpoint.close()
    ps.destroy_distributed_environment()
    return told


def _threads_at_rest() -> list[str]:
    before = _tasks()
    ps.init_distributed_environment(timeout=DEADLINE_S)
    ps.initialize_model_parallel(2)
    group = ps.get_tp_group()
    group.all_reduce(torch.ones(4))
    group.all_gather_object(group.rank)
    group.barrier()
    new = [name for number, name in _tasks().items() if number not in before and name.startswith("ps-")]
    group.barrier()
    ps.destroy_distributed_environment()
    return sorted(new)


def _threads_of_started_transfers() -> tuple[int, list[float]]:
    ps.init_distributed_environment(timeout=DEADLINE_S)
    ps.initialize_model_parallel(2)
    groups = [ps.get_tp_group().make_sub_group(range(2)) for _ in range(3)]
    other, large = 1 - groups[0].rank, 2 << 20
    received = [group.irecv((large,), torch.float32, other) for group in groups]
    ps.get_tp_group().barrier()
    sent = [group.isend(torch.full((large,), float(at)), other) for at, group in enumerate(groups)]
    _until(lambda: all(each.is_completed() for each in (*received, *sent)))
    threads = list(_tasks().values()).count("ps-transfers")
    values = [each.wait()[-1].item() for each in received if each.is_completed()]
    ps.get_tp_group().barrier()
    ps.destroy_distributed_environment()
    return threads, values


def _names_over_torch() -> tuple[list[str], dict[str, str]]:
    before = _tasks()
    dist.init_process_group("parallel_state")
    other = 1 - dist.get_rank()
    x = torch.ones(4)
    works = [dist.all_reduce(x, async_op=True) for _ in range(4)]
    received = dist.irecv(torch.empty(4), other)
    _until(lambda: {"ps-lane", "ps-transfers"} <= set(_tasks().values()))
    told = _told(before)
    dist.barrier()
    dist.isend(torch.ones(4), other).wait()
    for work in (*works, received):
        work.wait()
    dist.barrier()
    dist.destroy_process_group()
    return told


def _told(before: dict[int, str]) -> tuple[list[str], dict[str, str]]:
    ours = {each.name: each.native_id for each in threading.enumerate() if each.name.startswith(THREADS)}
    _until(lambda: all(_tasks().get(number or 0, "ps-").startswith("ps-") for number in ours.values()))
    now = _tasks()
    named = {name: now[number] for name, number in ours.items() if number in now}
    return [name for number, name in now.items() if number not in before], named


def _check(told: list[tuple[list[str], dict[str, str]]], expected: set[str], others: tuple[str, ...] = ()) -> None:
    for new, named in told:
        assert named
        assert named == {name: f"ps-{name.removeprefix(THREADS)}"[:15] for name in named}
        assert expected <= set(new)
        assert [name for name in new if not name.startswith(("ps-", *others))] == []


@pytest.mark.parametrize("shared_memory", [True, False])
def test_threads_of_a_world(shared_memory: bool) -> None:
    env = {} if shared_memory else {"PARALLEL_STATE_SHARED_MEMORY": "off"}
    _check(
        ps.launch(_names_in_a_world, 2, env=env, timeout=DEADLINE_S),
        {"ps-control", "ps-control-news", "ps-metrics"},
        ("gloo", "pt_gloo"),
    )


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_has_few_threads(shared_memory: bool) -> None:
    """ps-helper is an idle thread of the pool, if a store was used."""
    env = {} if shared_memory else {"PARALLEL_STATE_SHARED_MEMORY": "off"}
    for names in ps.launch(_threads_at_rest, 2, env=env, timeout=DEADLINE_S):
        assert len(names) <= 3
        assert {"ps-control", "ps-control-news"} <= set(names) <= {"ps-control", "ps-control-news", "ps-helper"}


def test_threads_of_the_torch_backend() -> None:
    _check(ps.launch(_names_over_torch, 2, timeout=DEADLINE_S), {"ps-lane", "ps-transfers"})


def test_one_thread_moves_what_nobody_waits_for() -> None:
    for threads, values in ps.launch(_threads_of_started_transfers, 2, timeout=DEADLINE_S):
        assert values == [0.0, 1.0, 2.0]
        assert threads == 1


def test_a_long_name_is_cut() -> None:
    found: list[str] = []
    thread = HelperThread("much-too-long-a-name", lambda: found.append(_tasks()[threading.get_native_id()]))
    thread.start()
    thread.join(DEADLINE_S)
    assert found == ["ps-much-too-lon"]
    assert thread.daemon
    assert thread.name == f"{THREADS}much-too-long-a-name"


def test_threads_that_are_used_again_are_named() -> None:
    found: list[str] = []
    done = threading.Event()
    run_in_thread(lambda: (found.append(_tasks()[threading.get_native_id()]), done.set()))
    assert done.wait(DEADLINE_S)
    assert found == ["ps-helper"]
