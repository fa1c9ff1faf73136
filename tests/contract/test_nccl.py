"""The contract tests' bodies, over a stand-in for NCCL's library."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators import CATALOG, Row
from tests.contract import (
    test_all_gather,
    test_all_reduce,
    test_all_to_all,
    test_async_collectives,
    test_broadcast,
    test_gather,
    test_gradients,
    test_reduce_scatter,
    test_scatter,
    test_send_recv,
)
from tests.contract.carriers import Carrier, Member, Size, _call, only, twin_of
from tests.helpers import nccl_stand_in
from tests.workers import WorkerPool

ROW = Row("nccl", "tests.helpers.nccl_stand_in", "StandInNccl")

for _module in (
    test_all_gather, test_all_reduce, test_all_to_all, test_async_collectives, test_broadcast, test_gather,
    test_gradients, test_reduce_scatter, test_scatter, test_send_recv,
):  # fmt: skip
    for _name, _test in list(vars(_module).items()):
        if _name.startswith("test_") and inspect.signature(_test).parameters.keys() & {"carrier", "group_carrier"}:
            globals()[f"{_name}_{_module.__name__.rpartition('.test_')[2]}"] = _test


class StandInCarrier(Carrier):
    def __init__(self, size: Size, pools: Callable[[int], WorkerPool], library: Path) -> None:
        super().__init__(ROW, size, pools)
        self._library = library

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        pool = self._pools(self.size.processes)
        answers = pool.run(_run_on_rank, str(self._library), body, args, tp=self.size.group, timeout_s=2 * timeout_s)
        assert all(cases > 0 for _, cases, _ in answers), f"{body.__name__} had no case"
        return [result for _, _, result in answers]


def _run_on_rank(library: str, body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str | None, int, Any]:
    torch.manual_seed(0)
    os.environ.update({nccl_stand_in.LIBRARY: library, nccl_stand_in.FOLDER: str(Path(library).parent)})
    member: Member = only(ROW, twin_of(ps.get_tp_group()))
    try:
        return _call(member, body, args)
    finally:
        member.group.route.close()


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if nccl_stand_in.compiler() is None:
        pytest.skip("there is no C compiler")
    return nccl_stand_in.build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(scope="module", params=[Size(3, 3), pytest.param(Size(4, 2), marks=pytest.mark.long)], ids=str)
def carrier(request: pytest.FixtureRequest, pools: Callable[[int], WorkerPool], stand_in: Path) -> Carrier:
    return StandInCarrier(request.param, pools, stand_in)


@pytest.fixture
def group_carrier(pools: Callable[[int], WorkerPool], stand_in: Path) -> Carrier:
    return StandInCarrier(Size(4, 2), pools, stand_in)


def test_nothing_is_left_behind(stand_in: Path) -> None:
    assert list(stand_in.parent.iterdir()) == [stand_in]


def test_the_catalogs_row_is_before_torchs() -> None:
    names = [row.name for row in CATALOG]
    assert names.index("nccl") < names.index("device_group")
    (row,) = (row for row in CATALOG if row.name == "nccl")
    assert row.device == "cuda" and not row.partial, "the stand-in's tests assume that NCCL's row is not partial"
