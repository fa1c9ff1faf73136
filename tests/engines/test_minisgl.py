from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines import running
from tests.engines.test_sglang import differences

PROGRAM = Path(__file__).with_name("minisgl_program.py")
DEADLINE_S = 180.0
US = "us of an all_reduce of 256 KiB"


@pytest.fixture(scope="module")
def source() -> Path:
    return running.source("mini-sglang") / "python"


def ranks(source: Path, plugins: Path, folder: Path, **variables: str) -> tuple[list[dict[str, Any]], str]:
    import torch

    environment = running.environment(source, plugins, **variables)
    logged = running.run(running.python(PROGRAM, folder), environment, DEADLINE_S)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)], logged


def test_equal_layers(source: Path, plugins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "stock", tmp_path / "plugin"]
    for folder in folders:
        folder.mkdir()
    theirs, _ = ranks(source, plugins, folders[0])
    ours, _ = ranks(source, plugins, folders[1], OVER="ours")
    assert {each.pop("communicator") for each in theirs} == {"TorchDistributedImpl"}
    assert {each.pop("communicator") for each in ours} == {"ParallelStateImpl"}
    times = [each[0][US] for each in (theirs, ours)]
    for rank in range(2):
        del theirs[rank][US], ours[rank][US]
        assert len(theirs[rank]) == 3
        assert differences(ours[rank], theirs[rank], f"rank {rank}") == []
    with capsys.disabled():
        print(f"\n{US}: stock {times[0]:.1f}, ours {times[1]:.1f}", end="")
