from __future__ import annotations

import gc
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators.base.errors import LaunchError, RendezvousError, UnsupportedError
from device_communicators.cpu import native
from parallel_state import (
    LaunchConfig,
    destroy_distributed_environment,
    get_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
    launch,
)
from tests.contract.test_rendezvous import held_port

DEADLINE_S = 60.0
SECRET = secrets.token_bytes(32)


def _plain_world() -> float:
    dist.init_process_group("gloo")
    gc.collect()
    total = torch.ones(1)
    dist.all_reduce(total)
    sub = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(total, group=sub)
    dist.monitored_barrier(timeout=timedelta(seconds=DEADLINE_S))
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, dist.get_rank())
    if objects != list(range(dist.get_world_size())):
        raise ValueError(objects)
    dist.destroy_process_group()
    return total.item()


def test_torchs_own_rendezvous_finds_it() -> None:
    assert launch(_plain_world, 4, timeout=DEADLINE_S) == [8.0, 8.0, 4.0, 4.0]


def _worlds() -> list[int]:
    counts = []
    for _ in range(10):
        init_distributed_environment()
        initialize_model_parallel(2, 2)
        get_tp_group().all_reduce(torch.ones(1))
        destroy_distributed_environment()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_worlds_that_follow_each_other_leave_no_connections() -> None:
    for counts in launch(_worlds, 4, timeout=DEADLINE_S):
        assert counts[-1] <= counts[0] + 4, counts  # up to four idle connections stay open


def _tcp_store() -> str:
    try:
        dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=1))
    except dist.DistError as error:
        return type(error).__name__
    return "it came in"


def test_torchs_client_is_a_stranger_there() -> None:
    assert launch(_tcp_store, 2, timeout=DEADLINE_S) == ["DistNetworkError"] * 2


def _explain() -> str:
    return get_tp_group().explain()


def test_explain_names_the_store(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET)
    for secret_file in (None, str(path)):
        texts = launch(_explain, 2, tensor_model_parallel_size=2, timeout=DEADLINE_S, secret_file=secret_file)
        for text in texts:
            assert "store: launch's store at 127.0.0.1:" in text or "store: the store of launch at 127.0.0.1:" in text
            assert "requires the job's secret" in text
            assert SECRET.hex() not in text


def _sum() -> float:
    return float(get_tp_group().all_reduce(torch.ones(1)).item())


def _launch_node(offset: int, port: int, path: Path | None) -> list[float]:
    config = LaunchConfig(world_size=4, master_port=port, timeout=DEADLINE_S, tensor_model_parallel_size=4)
    file = None if path is None else str(path)
    return launch(_sum, 2, config=config, rank_offset=offset, secret_file=file)


@pytest.mark.parametrize("given", [True, False])
def test_several_nodes(given: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET)
    with held_port() as port, ThreadPoolExecutor(2) as pool:
        nodes = [pool.submit(_launch_node, offset, port, path if given else None) for offset in (2, 0)]
        assert [node.result(DEADLINE_S) for node in nodes] == [[4.0, 4.0]] * 2
    assert ("several nodes have no secret_file" in caplog.text) is not given


def test_several_nodes_with_different_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_STATE_START_TIMEOUT_S", "3")
    paths = [tmp_path / "one", tmp_path / "other"]
    for path in paths:
        path.touch(0o600)
        path.write_bytes(secrets.token_bytes(32))
    with held_port() as port, ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(_launch_node, offset, port, path) for offset, path in zip((0, 2), paths, strict=True)
        )
        with pytest.raises(RendezvousError, match="don't share a secret: the server can't prove"):
            second.result(DEADLINE_S)
        with pytest.raises(LaunchError, match=r"ranks \[2, 3\] did not come"):
            first.result(DEADLINE_S)


def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise native.NativeUnavailableError("no compiler")

    monkeypatch.setattr(native, "load", refuse)


def test_one_node_without_the_library_uses_torchs_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _without(monkeypatch)
    assert launch(_tcp_store, 2, timeout=DEADLINE_S) == ["it came in"] * 2
    assert (
        "any process that reaches this job's store can change it: no compiled library is available (no compiler"
        in caplog.text
    )


def test_a_secret_file_needs_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _without(monkeypatch)
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET)
    with pytest.raises(UnsupportedError, match=r"secret_file needs this library's C\+\+ part.*no compiler"):
        launch(_tcp_store, 2, timeout=DEADLINE_S, secret_file=str(path))
