"""mini-sglang's own layers on two ranks over torch.distributed and, by the plug-in, over ours: equal results.

Its engine takes CUDA for granted (streams, graphs, FlashInfer, kernels compiled by nvcc); its layers run on a CPU.
"""

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
    ours, _ = ranks(source, plugins, folders[1], PARALLEL_STATE_PLUGIN="minisgl")
    assert {each.pop("communicator") for each in theirs} == {"TorchDistributedImpl"}
    assert {each.pop("communicator") for each in ours} == {"ParallelStateImpl"}
    times = [each[0][US] for each in (theirs, ours)]
    for rank in range(2):
        del theirs[rank][US], ours[rank][US]
        assert len(theirs[rank]) == 3
        assert differences(ours[rank], theirs[rank], f"rank {rank}") == []
    with capsys.disabled():
        print(f"\n{US}: stock {times[0]:.1f}, with the plug-in {times[1]:.1f}", end="")


def test_nothing_is_imported_until_it_is_asked(source: Path, plugins: Path) -> None:
    code = (
        "import sys, torch; print('finders', any('_Awaited' in type(each).__name__ for each in sys.meta_path))\n"
        "import minisgl.distributed as d\n"
        "print(len(d.DistributedCommunicator.plugins), 'parallel_state' in sys.modules)\n"
    )
    for value, expected in (("", "finders False\n1 False\n"), ("vllm", "finders False\n1 False\n"),
                            ("minisgl", "finders True\n2 True\n")):  # fmt: skip
        environment = running.environment(source, plugins, PARALLEL_STATE_PLUGIN=value)
        assert running.run(running.python("-c", code), environment, 120).endswith(expected)
