from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from torch import Tensor, nn

import parallel_state as ps
from tests.workers import WorkerPool


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        tp = ps.get_tp_group()
        tp.all_reduce(x * 2, "max")
        y = tp.all_reduce(torch.sin(x)) + self.offset
        tp.barrier()
        y = tp.all_reduce_(y * 3)
        z = tp.reduce_scatter(tp.all_gather(y, 0), 0)
        tp.all_reduce(x, "min")
        return z


OPERATIONS = ["all_reduce", "all_reduce", "barrier", "all_reduce_", "all_gather", "reduce_scatter", "all_reduce"]


def _logged(function: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, list[str]]:
    route, log = ps.get_tp_group().route, list[str]()
    run = route.run

    def logged(operation: str, *args: Any, **options: Any) -> Any:
        log.append(operation)
        return run(operation, *args, **options)

    route.serve_ops(False)  # compiled kernels would bypass the route
    route.run = logged  # type: ignore[method-assign]
    try:
        return function(x), log
    finally:
        route.run = run  # type: ignore[method-assign]
        route.serve_ops(True)


def _exported_body(strict: bool, folder: str | None) -> None:
    rank = ps.get_tensor_model_parallel_rank()
    layer, x = Layer(), torch.arange(8.0).view(2, 4) + rank
    expected = layer(x)
    program = torch.export.export(layer, (x,), strict=strict)
    made: list[Callable[[Tensor], Any]] = [program.module(), program.run_decompositions().module()]
    if folder is not None:
        path = f"{folder}/{rank}.pt2"
        made.append(
            torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=path))
        )
    for function in made:
        found, log = _logged(function, x)
        torch.testing.assert_close(found, expected)
        assert log == OPERATIONS


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_run_and_decompose(pools: Callable[[int], WorkerPool], strict: bool) -> None:
    pools(2).run(_exported_body, strict, None, tp=2, timeout_s=300)


@pytest.mark.slow
def test_exported_programs_compile_ahead_of_time(tmp_path: Path) -> None:
    """Runs in one process: other ranks' calls would time out during a minute of compiling."""
    with ps.simulate(0, 2, tensor_model_parallel_size=2).use():
        _exported_body(False, str(tmp_path))
