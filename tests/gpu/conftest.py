from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from device_communicators.cpu import native
from device_communicators.cuda import nccl_library
from device_communicators.peer import kernels as peer_kernels
from device_communicators.peer.kernels import KernelError
from tests import workers
from tests.extent import LONG
from tests.gpu import report
from tests.gpu.ranks import DRY, GpuRanks, capability
from tests.helpers import nccl_stand_in


def problem() -> str | None:
    if DRY:
        return None if nccl_stand_in.compiler() else "a dry run, but there is no C compiler for the stand-in of NCCL"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device" if torch.version.cuda else "this torch was built without CUDA"
    try:
        nccl_library.load()
    except nccl_library.NcclUnavailableError as error:
        return str(error)
    return None


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("GPU_TESTS_REPORT")
    if folder and problem() is None:
        machine = report.dry_machine() if DRY else report.machine()
        config.pluginmanager.register(report.Recorder(report.Report(machine, Path(folder))), "gpu-report")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    repeating = [item for item in items if DRY and not LONG and _repeats(item)]
    if repeating:
        config.hook.pytest_deselected(items=repeating)
        items[:] = [item for item in items if item not in set(repeating)]
    if DRY:
        workers.modules_of_tests.add(workers.COMPILING)  # on a GPU no fork server may look for Triton
    ours = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    reason = problem() if ours else None
    for item in ours:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


def _repeats(item: pytest.Item) -> bool:
    """True if `item` tests nothing in a dry run that other cases and contract tests don't."""
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    return (
        4 in (chosen.get("world"), chosen.get("size"))
        or chosen.get("carrier") == "device_group"
        or chosen.get("flags") in ((), ("--compile",), ("--cuda-graph",))
        or chosen.get("how") == "torchrun"
    )


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    with contextlib.suppress(native.NativeUnavailableError):
        native.load()
    if not DRY:
        with contextlib.suppress(KernelError):
            peer_kernels.cubin(f"sm_{capability().replace('.', '')}")


@pytest.fixture(scope="session")
def new_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], GpuRanks]:
    if DRY:
        GpuRanks.stand_in = nccl_stand_in.build(tmp_path_factory.mktemp("nccl"))
    return GpuRanks


@pytest.fixture(scope="session")
def gpus(new_ranks: Callable[[int], GpuRanks]) -> Iterator[Callable[[int], GpuRanks]]:
    made: dict[int, GpuRanks] = {}

    def pool(world_size: int) -> GpuRanks:
        if world_size not in made:
            made[world_size] = new_ranks(world_size)
        return made[world_size]

    yield pool
    for each in made.values():
        each.kill()
