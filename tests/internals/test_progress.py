"""A started receive takes no CPU time while its sender sends nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

import parallel_state as ps
from device_communicators.cpu import native
from tests.internals.test_streams import _two
from tests.workers import WorkerPool

DEADLINE_S = 60.0
BEGIN_S, IDLE_S = 0.5, 1.0
MOST_SWITCHES = 3
"""The kernel may move a sleeping thread."""


def _switches() -> int:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "ps-transfers":
            lines = (task / "status").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return found


def _switches_while_idle() -> int:
    time.sleep(BEGIN_S)
    before = _switches()
    assert before, "nothing was started"
    time.sleep(IDLE_S)
    return _switches() - before


def test_an_outstanding_receive_between_hosts_is_idle() -> None:
    native.load()
    near, far = _two()
    out = torch.zeros(4)
    received = far.irecv(out, 0)
    assert _switches_while_idle() <= MOST_SWITCHES
    began = time.monotonic()
    near.send(torch.ones(4), 1)
    while not received.is_completed() and time.monotonic() < began + DEADLINE_S:
        time.sleep(0.001)
    assert out.eq(1).all() and time.monotonic() - began < 1.0
    near.close()
    far.close()


def _receive_idly() -> tuple[int, float]:
    ps.init_distributed_environment(timeout=DEADLINE_S)
    ps.initialize_model_parallel(2)
    group, out, switches = ps.get_tp_group(), torch.zeros(4), 0
    group.barrier()
    if group.rank:
        received = group.irecv((4,), torch.float32, 0)
        switches = _switches_while_idle()
    group.barrier()
    began = time.monotonic()
    if group.rank == 0:
        group.send(torch.ones(4), 1)
    else:
        while not received.is_completed() and time.monotonic() < began + DEADLINE_S:
            time.sleep(0.001)
        out = received.wait()
        assert out.eq(1).all()
    took_s = time.monotonic() - began
    group.barrier()
    ps.destroy_distributed_environment()
    return switches, took_s


def test_an_outstanding_receive_within_a_host_is_idle(pools: Callable[[int], WorkerPool]) -> None:
    told = pools(2).run(_receive_idly, timeout_s=2 * DEADLINE_S)
    switches, took_s = told[1]
    assert switches <= MOST_SWITCHES and took_s < 1.0, told


def _wait_for_one_that_leaves() -> str:
    ps.init_distributed_environment(timeout=DEADLINE_S)
    ps.initialize_model_parallel(2)
    group = ps.get_tp_group().make_sub_group(range(2))
    group.barrier()
    told = ""
    if group.rank:
        received = group.irecv((4,), torch.float32, 0)
        time.sleep(BEGIN_S)
        ps.get_tp_group().barrier()
        began = time.monotonic()
        while not received.is_completed() and time.monotonic() < began + DEADLINE_S:
            time.sleep(0.001)
        try:
            received.wait()
        except ps.CommunicationError as error:
            told = f"{error} after {'long' if time.monotonic() - began > 1.5 else 'a moment'}"
    else:
        ps.get_tp_group().barrier()
        group.destroy()
    ps.get_tp_group().barrier()
    ps.destroy_distributed_environment()
    return told


def test_an_idle_receive_ends_as_its_sender_leaves(pools: Callable[[int], WorkerPool]) -> None:
    told = pools(2).run(_wait_for_one_that_leaves, timeout_s=2 * DEADLINE_S)
    assert "global rank 0" in told[1] and told[1].endswith("after a moment"), told
