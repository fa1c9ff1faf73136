"""A job of four ranks that computes while strangers connect to its ports."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators.base.torch_internals import default_store

DEADLINE_S = 60.0
SLACK_S = 5.0
PAUSE_S = 0.015
"""Tests beside it need the cores, too."""
STEPS_AFTER = 30


def compute(folder: str, own_init: bool) -> int:
    if own_init:
        ps.init_distributed_environment(timeout=DEADLINE_S)
        ps.initialize_model_parallel(4)
    group, store, steps, more = ps.get_tp_group(), default_store(), 0, STEPS_AFTER
    while more:
        if group.rank == 0 and steps == 1:
            Path(folder, "port.new").write_text(os.environ["MASTER_PORT"], encoding="utf-8")
            Path(folder, "port.new").rename(Path(folder, "port"))
        flag = float(group.rank == 0 and Path(folder, "stop").exists())
        stopped, total = group.all_reduce(torch.tensor([flag, float(group.rank + steps)])).tolist()
        if total != 6.0 + 4 * steps:
            raise ValueError(f"step {steps}: {total}")
        if steps % 10 == 0:
            three = group.make_sub_group([0, 1, 3])
            if three is not None:
                if three.all_gather(torch.tensor([group.rank])).tolist() != [0, 1, 3]:
                    raise ValueError(f"step {steps}: the sub-group of rank {group.rank} is wrong")
                three.destroy()
        store.add("steps", 1)
        steps += 1
        more -= stopped > 0
        time.sleep(PAUSE_S)
    group.barrier()
    if int(store.get("steps")) != 4 * steps:
        raise ValueError(f"{store.get('steps')!r} is not 4 * {steps}")
    if own_init:
        ps.destroy_distributed_environment()
    return steps


@contextmanager
def running_job(folder: Path, start: Callable[[], list[int]]) -> Iterator[int]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.extend(start())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until = time.monotonic() + DEADLINE_S
        while not (folder / "port").exists():
            assert time.monotonic() < until and not results, results
            time.sleep(0.01)
        yield int((folder / "port").read_text())
    finally:
        (folder / "stop").touch()
        thread.join(DEADLINE_S)
    assert len(results) == 4 and len(set(results)) == 1, results
    assert results[0] > STEPS_AFTER


def pids_then_compute(folder: str) -> int:
    Path(folder, f"{os.environ['RANK']}.pid").write_text(str(os.getpid()), encoding="utf-8")
    return compute(folder, False)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def until_closed(stranger: socket.socket, limit_s: float) -> bytes:
    stranger.settimeout(limit_s)
    received = bytearray()
    try:
        while data := stranger.recv(4096):
            received += data
    except ConnectionError:
        pass
    except TimeoutError:
        pytest.fail(f"the connection is open after {limit_s} s")
    return bytes(received)


def send_all(stranger: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):
        stranger.sendall(data)
