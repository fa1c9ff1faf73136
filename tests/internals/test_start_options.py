from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from parallel_state.groups import world as startup
from tests.contract.attempts import no_launcher
from tests.internals.faults import met_alone


@pytest.mark.parametrize("high", [False, True])
def test_a_high_priority_stream_of_the_default_group(monkeypatch: pytest.MonkeyPatch, high: bool) -> None:
    """This build of torch has no NCCL, so the test checks the request to torch."""
    asked: list[Any] = []

    class Options(SimpleNamespace):
        config = SimpleNamespace()

    class Asked(Exception):
        pass

    def init(*_: Any, **arguments: Any) -> None:
        asked.append(arguments["pg_options"])
        raise Asked

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(startup, "check_backend", lambda _: None)
    monkeypatch.setattr(startup, "device_of", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(startup, "meet", lambda *_, **__: met_alone())
    monkeypatch.setattr(startup.reachability, "check_all_hosts", lambda *_: None)
    monkeypatch.setattr(startup, "prepare", lambda *_: None)
    with no_launcher(), pytest.raises(Asked):
        ps.init_distributed_environment(
            2, 0, "tcp://127.0.0.1:1", 0, backend="nccl", timeout=7, high_priority_stream=high
        )
    (options,) = asked
    assert (options is not None) == high
    if high:
        assert options.is_high_priority_stream
        assert options._timeout == timedelta(seconds=7)
