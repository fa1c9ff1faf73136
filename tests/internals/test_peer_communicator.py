"""Contract tests over the peer kernels on the CPU. Process groups carry what the kernels refuse."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators import CATALOG, Row, build_route, register_route
from tests.contract import test_all_gather, test_all_reduce, test_gradients, test_inference, test_reduce_scatter
from tests.contract.attempts import environment
from tests.contract.carriers import Carrier, Member, Size, _call, twin_of
from tests.helpers import cuda_on_cpu, peer_stand_in
from tests.helpers.peer_stand_in import StandInPeerMemory
from tests.helpers.peers import TABLE, write_table
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
ROW = Row("peer_memory", "tests.helpers.peer_stand_in", "StandInPeerMemory")

NOT_CARRIED = (
    "test_all_gatherv", "test_reduce_scatterv", "test_an_average_of_large_half_precision_numbers",
    "test_gradients_of_uneven_shapes", "test_gradient_of_broadcast",
    "test_an_average_of_integers_wraps_and_is_divided_toward_zero",
)  # fmt: skip
for _module in (test_all_gather, test_all_reduce, test_gradients, test_inference, test_reduce_scatter):
    for _name, _test in list(vars(_module).items()):
        if (
            _name.startswith("test_")
            and _name not in NOT_CARRIED
            and inspect.signature(_test).parameters.keys() & {"carrier", "group_carrier"}
        ):
            globals()[f"{_name}_{_module.__name__.rpartition('.test_')[2]}"] = _test


class StandInCarrier(Carrier):
    def __init__(self, size: Size, pools: Pools, settings: dict[str, str]) -> None:
        super().__init__(ROW, size, pools)
        self._settings = settings

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        pool = self._pools(self.size.processes)
        answers = pool.run(run_on_rank, self._settings, body, args, tp=self.size.group, timeout_s=2 * timeout_s)
        assert all(cases > 0 for _, cases, _ in answers), f"{body.__name__} had no case"
        return [result for _, _, result in answers]


def member_of(settings: dict[str, str]) -> Member:
    os.environ.update(settings)
    group = twin_of(ps.get_tp_group())
    group.route = build_route(group.context, (ROW, CATALOG[-1]))
    register_route(group.route)
    assert not group.route.refusals, group.explain()
    return Member(group, ROW.name)


def run_on_rank(settings: dict[str, str], body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[None, int, Any]:
    torch.manual_seed(0)
    member = member_of(settings)
    communicator = member.group.route.communicators[0]
    assert isinstance(communicator, StandInPeerMemory)
    kernels = communicator.device.made
    assert kernels is not None
    kernels.launched.clear()
    try:
        _, cases, result = _call(member, body, args)
        assert kernels.launched, f"{body.__name__} launched no kernel"
        return None, cases, result
    finally:
        member.group.route.close()


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("peers")
    return {
        peer_stand_in.FOLDER: str(folder),
        peer_stand_in.LIBRARY: str(cuda_on_cpu.build()),
        TABLE: write_table(tmp_path_factory.mktemp("table"), "9.0"),
    }


@pytest.fixture(scope="module", params=[Size(3, 3), Size(4, 2)], ids=str)
def carrier(request: pytest.FixtureRequest, pools: Pools, stand_in: dict[str, str]) -> Carrier:
    return StandInCarrier(request.param, pools, stand_in)


@pytest.fixture
def group_carrier(pools: Pools, stand_in: dict[str, str]) -> Carrier:
    return StandInCarrier(Size(4, 2), pools, stand_in)


def test_nothing_is_left_behind(stand_in: dict[str, str]) -> None:
    assert list(Path(stand_in[peer_stand_in.FOLDER]).iterdir()) == []


def test_the_catalogs_row_is_before_nccls() -> None:
    names = [row.name for row in CATALOG]
    assert names.index("peer_memory") < names.index("nccl")
    (row,) = (row for row in CATALOG if row.name == "peer_memory")
    assert row.partial and row.device == "cuda" and row.custom_all_reduce


def _without_cpu_memory_body(stand_in: dict[str, str]) -> tuple[str | None, list[str], float]:
    (of_catalog,) = (row for row in CATALOG if row.name == "peer_memory")
    row = replace(ROW, unfit=of_catalog.unfit)
    with environment(PARALLEL_STATE_SHARED_MEMORY="off", **stand_in):
        ps.init_distributed_environment(backend="gloo")
        try:
            ps.initialize_model_parallel(2)
            group = ps.get_tp_group()
            memory = group.context.host_memory
            group.route = build_route(group.context, (row, CATALOG[-1]))
            register_route(group.route)
            names = [each.name for each in group.route.communicators]
            return memory.apart if memory else None, names, group.all_reduce(torch.ones(8)).sum().item()
        finally:
            ps.destroy_distributed_environment()


def test_ranks_without_shared_memory_of_their_cpus_have_the_kernels(pools: Pools, stand_in: dict[str, str]) -> None:
    for apart, names, total in pools(2).run(_without_cpu_memory_body, stand_in):
        assert apart is not None and "PARALLEL_STATE_SHARED_MEMORY is off" in apart
        assert names == ["peer_memory", CATALOG[-1].name]
        assert total == 16.0
