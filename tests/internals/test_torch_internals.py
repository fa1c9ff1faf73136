from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from device_communicators.base import torch_internals


@pytest.mark.parametrize("is_slow", [True, False])
def test_the_log_says_that_nccl_waits_for_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_slow: bool
) -> None:
    ended: list[object] = []

    def destroy(group: object) -> None:
        deadline = time.monotonic() + (5 if is_slow else 0)
        while time.monotonic() < deadline and not caplog.messages:
            time.sleep(0.01)
        ended.append(group)

    monkeypatch.setattr(torch_internals, "REMIND_S", 0.05 if is_slow else 5.0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    torch_internals.end_process_groups()
    assert ended == [None]
    assert len(caplog.messages) == is_slow
    assert not is_slow or "delete the graph before the group is destroyed" in caplog.messages[0]


class Options:
    def __init__(self, ranks: list[int]) -> None:
        self.global_ranks_in_group = ranks


@pytest.mark.parametrize(("ranks", "told"), [([], [0, 1, 2]), ([2, 1, 0], [2, 1, 0])])
def test_a_group_that_is_split_knows_its_ranks(ranks: list[int], told: list[int]) -> None:
    options = Options(ranks)
    backend = SimpleNamespace(options=options)
    torch_internals.name_ranks(
        SimpleNamespace(_device_types=[torch.device("cuda")], _get_backend=lambda device: backend, size=lambda: 3)
    )
    assert options.global_ranks_in_group == told


def test_torchs_options_of_nccl_have_the_ranks() -> None:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options.global_ranks_in_group = [0, 1]
    assert options.global_ranks_in_group == [0, 1]
