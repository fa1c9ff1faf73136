from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators import (
    CATALOG,
    Communicator,
    GroupContext,
    Request,
    Route,
    Row,
    build_route,
    register_route,
)
from device_communicators.base.errors import GroupDestroyedError, UnsupportedError
from device_communicators.cpu import native
from device_communicators.cpu.native import NativeLibrary
from parallel_state.messages.messenger import Messenger
from tests.contract.attempts import environment, world
from tests.contract.carriers import Carrier, Member, twin_of
from tests.workers import WorkerPool

LIMIT = 16
Pools = Callable[[int], WorkerPool]
ProcessGroupCommunicator: Any = CATALOG[-1].load()


class SmallFloats(ProcessGroupCommunicator):  # type: ignore[misc]
    name = "small_floats"
    picks_by_size = True

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self.carried = 0
        self.events: list[str] = []

    def refusal(self, request: Request) -> str | None:
        if not request.operation.startswith("all_reduce"):
            return f"it has no {request.operation}"
        if request.dtype != torch.float32:
            return f"{request.dtype} is not float32"
        if request.numel > LIMIT:
            return f"{request.numel} numbers are more than {LIMIT}"
        return None

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        self.carried += 1
        super().flat_all_reduce_(x, reduce_op)

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.events.append("capture")
        yield
        self.events.append("end of capture")

    def close(self) -> None:
        self.events.append("close")


def _fits(context: GroupContext) -> str | None:
    return None


def _fits_large_groups(context: GroupContext) -> str | None:
    return None if context.size > 8 else f"it needs more than 8 ranks, the group has {context.size}"


def _fails_on_rank_one(context: GroupContext) -> str | None:
    return "its library is not here" if context.rank == 1 else None


GENERAL = tuple(row for row in CATALOG if not row.partial or row.device != "any")
SMALL = Row("small_floats", __name__, "SmallFloats", unfit=_fits)


def _member(*rows: Row) -> ps.GroupCoordinator:
    group = twin_of(ps.get_tp_group())
    group.route = build_route(group.context, (*rows, *GENERAL))
    register_route(group.route)
    return group


def _pick_body() -> list[int]:
    group = _member(SMALL)
    small, general = group.route.communicators
    assert isinstance(small, SmallFloats)
    assert isinstance(general, ProcessGroupCommunicator)
    counts = []
    for x in (
        torch.ones(LIMIT),
        torch.ones(LIMIT + 1),
        torch.ones(LIMIT, dtype=torch.float64),
        torch.ones(0),
        torch.ones(1),
    ):
        assert torch.equal(group.all_reduce(x), x * group.world_size)
        counts.append(small.carried)
    assert torch.equal(group.all_reduce_(torch.ones(2)), torch.full((2,), float(group.world_size)))
    assert group.all_gather(torch.ones(2), 0).shape == (2 * group.world_size,)
    group.barrier()
    return [*counts, small.carried]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_communicator_is_picked_by_size_and_dtype(pools: Pools, world_size: int) -> None:
    results = pools(world_size).run(_pick_body, tp=world_size)
    assert results == [[1, 1, 1, 2, 3, 4]] * world_size


def _request_body() -> None:
    route = _member(SMALL).route
    names = {
        Request("all_reduce", torch.float32, "cpu", LIMIT, "sum"): "small_floats",
        Request("all_reduce", torch.float32, "cpu", LIMIT + 1, "sum"): "process_group",
        Request("all_reduce", torch.bool, "cpu", 1, "max"): "process_group",
        Request("all_gather", torch.float32, "cpu", 1): "process_group",
        Request("barrier", None, "cpu", 0): "process_group",
    }
    for request, name in names.items():
        assert route.pick(request).name == name, request
    with pytest.raises(UnsupportedError) as caught:
        route.pick(Request("all_reduce", torch.bool, "cpu", 20, "avg"))
    for text in (
        "no communicator of group 'contract:",
        "supports all_reduce(avg) of 20 × torch.bool on cpu: ",
        "small_floats: torch.bool is not float32; ",
        "process_group: avg of torch.bool is not defined",
    ):
        assert text in str(caught.value), f"{text!r} is not in: {caught.value}"


def test_a_request_that_nobody_carries_gets_every_reason(pools: Pools) -> None:
    pools(2).run(_request_body, tp=2)


def _explain_body() -> str:
    return _member(SMALL, Row("crowd", __name__, "SmallFloats", unfit=_fits_large_groups)).explain()


def test_explain_tells_the_order_and_the_reasons(pools: Pools) -> None:
    for rank, text in enumerate(pools(2).run(_explain_body, tp=2)):
        lines = text.splitlines()
        assert lines[0].endswith(f"rank {rank} of 2 (global ranks [0, 1])")
        assert lines[1].startswith("  1. small_floats: ")
        assert lines[2] == "  2. process_group: torch.distributed over gloo, for all CPU tensors"
        assert lines[3:] == [
            "  -  crowd: not used, it needs more than 8 ranks, the group has 2",
            "  -  peer_memory: not used, its device is the CPU",
            "  -  nccl: not used, its device is the CPU",
            "  -  device_group: not used, its device is the CPU",
            "                    eager                  compiled     captured",
            "     small_floats   registered op, Python  the same op  not recordable: the host does it",
            "     process_group  registered op, Python  the same op  not recordable: the host does it",
        ]


def test_explain_of_other_groups() -> None:
    simulated = ps.simulated_group([0, 1], 0).explain().splitlines()
    assert simulated[1:] == [
        "  1. simulated: one process stands for all ranks",
        "                eager                  compiled     captured",
        "     simulated  registered op, copies  the same op  recorded",
    ]
    alone = ps.simulated_group([3], 3).explain().splitlines()
    assert alone[1:] == ["  (one rank: no communication)"]


@pytest.mark.parametrize("name", sorted({row.name for row in CATALOG}))
def test_every_row_says_how_it_is_reached_in_each_state(name: str) -> None:
    (row,) = (row for row in CATALOG if row.name == name)
    assert all(row.paths[:2])
    on_device = row.device != "any" or row.simulated
    assert (row.paths.captured is not None) == on_device, "only communicators of a device have a path for captures"


def _capturing_body(capturing: bool) -> list[str]:
    group = _member(SMALL)
    context = dataclasses.replace(group.context, device=torch.device("cuda", 0))
    route = Route(context, group.route.communicators, {})
    before, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: capturing
    raised = []
    try:
        for operation, args in (("all_reduce", (torch.ones(2), "sum")), ("barrier", ())):
            try:
                route.run(operation, *(args[:1] or (None,)), *args)
                raised.append("nothing")
            except UnsupportedError as error:
                raised.append(str(error))
        messenger = Messenger(route, False)
        try:
            messenger.broadcast(3, 0)
            raised.append("nothing")
        except UnsupportedError as error:
            raised.append(str(error))
        messenger.close()
    finally:
        torch.cuda.is_current_stream_capturing = before
    return raised


@pytest.mark.parametrize("capturing", [True, False])
def test_what_the_host_does_is_refused_while_a_graph_is_recorded(pools: Pools, capturing: bool) -> None:
    for raised in pools(2).run(_capturing_body, capturing, tp=2):
        if not capturing:
            assert raised == ["nothing"] * 3
            continue
        assert raised[0].startswith("all_reduce on group 'contract:")
        assert raised[1].startswith("barrier on group 'contract:")
        assert raised[2].startswith("broadcast_message on group 'contract:")
        assert all("a replay would not repeat it" in text for text in raised)


def _vote_body(local: bool) -> tuple[list[str], str | None, str | None]:
    probed = Row("probed", __name__, "SmallFloats", unfit=_fits, probe=_fails_on_rank_one if local else _fits)
    group = _member(probed, SMALL)
    assert group.all_reduce(torch.ones(3)).tolist() == [group.world_size] * 3
    refusals = group.route.refusals
    return [c.name for c in group.route.communicators], refusals.get("probed"), refusals.get("small_floats")


def test_what_one_rank_turns_down_no_rank_has(pools: Pools) -> None:
    results = pools(4).run(_vote_body, True, tp=4)
    assert [names for names, _, _ in results] == [["small_floats", "process_group"]] * 4
    other = "it is unavailable on global rank 1 of the group"
    assert [reason for _, reason, _ in results] == [other, "its library is not here", other, other]
    assert [reason for _, _, reason in results] == [None] * 4


def test_the_vote_is_the_groups_own(pools: Pools) -> None:
    results = pools(4).run(_vote_body, True, tp=2)
    own = "its library is not here"
    others = [f"it is unavailable on global rank {rank} of the group" for rank in (1, 3)]
    assert [reason for _, reason, _ in results] == [others[0], own, others[1], own]


def test_without_a_refusal_all_have_it(pools: Pools) -> None:
    results = pools(4).run(_vote_body, False, tp=4)
    assert [names for names, _, _ in results] == [["small_floats", "small_floats", "process_group"]] * 4


def _custom_body(enable: bool) -> tuple[list[str], list[str], str | None, str | None]:
    ps.init_distributed_environment(backend="gloo")
    try:
        ps.set_custom_all_reduce(enable)
        ps.initialize_model_parallel(2, 2)
        row = dataclasses.replace(SMALL, custom_all_reduce=True)
        tp, pp = (build_route(group.context, (row, *GENERAL)) for group in (ps.get_tp_group(), ps.get_pp_group()))
        return (
            [c.name for c in tp.communicators], [c.name for c in pp.communicators],
            tp.refusals.get("small_floats"), pp.refusals.get("small_floats"),
        )  # fmt: skip
    finally:
        ps.set_custom_all_reduce(True)
        ps.destroy_distributed_environment()


@pytest.mark.parametrize("enable", [True, False])
def test_kernels_of_our_own_can_be_turned_off(pools: Pools, enable: bool) -> None:
    off = "custom all-reduce is off for this group (set_custom_all_reduce)"
    for tp_names, pp_names, tp_reason, pp_reason in pools(4).run(_custom_body, enable):
        assert tp_names == (["small_floats", "process_group"] if enable else ["process_group"])
        assert tp_reason == (None if enable else off)
        assert (pp_names, pp_reason) == (["process_group"], off)


def _count_body() -> None:
    group = _member(SMALL)
    size = group.world_size
    group.all_reduce(torch.ones(4))
    group.all_reduce(torch.ones(100))
    group.all_gather(torch.ones(3, dtype=torch.int8))
    with pytest.raises(UnsupportedError):
        group.all_reduce(torch.ones(4, dtype=torch.bool), "avg")
    group.barrier()
    traffic = {name: (one.calls, one.bytes) for name, one in group.traffic().items()}
    assert traffic == {"all_reduce": (2, 416), "all_gather": (1, 3), "barrier": (1, 0)}
    assert group.route.sequence == 4
    assert size == 2


def test_what_is_carried_is_counted_whoever_carries_it(pools: Pools) -> None:
    pools(2).run(_count_body, tp=2)


def _life_body() -> None:
    group = _member(SMALL)
    small = group.route.communicators[0]
    assert isinstance(small, SmallFloats)
    with group.route.capture():
        assert small.events == ["capture"]
    group.route.close()
    group.route.close()
    assert small.events == ["capture", "end of capture", "close"]
    with pytest.raises(GroupDestroyedError, match=r"was destroyed; get or create the group again"):
        group.all_reduce(torch.ones(1))


def test_communicators_are_captured_and_closed_with_the_route(pools: Pools) -> None:
    pools(2).run(_life_body, tp=2)


def test_the_catalog_is_a_table_of_communicators() -> None:
    names = [row.name for row in CATALOG]
    assert len(set(names)) == len(names)
    assert names[-1] == "process_group", "the last row must carry everything"
    assert not CATALOG[-1].partial and CATALOG[-1].device == "any"
    for row in CATALOG:
        assert issubclass(row.load(), Communicator)
        assert row.load().name == ("shared_memory" if row.several_hosts else row.name), (
            "one class serves one host and several"
        )


def _carries_something_body(member: Member) -> None:
    with member.case("some request"):
        own = member.group.route.communicators[0]
        assert own.name == member.row
        operations = ("all_reduce", "all_gather", "broadcast", "send")
        requests = [Request(each, torch.float32, "cpu", 8, "sum" if "reduce" in each else None) for each in operations]
        assert None in [own.refusal(request) for request in requests], (
            "later rows would carry all requests in this row's tests"
        )


def test_a_row_carries_something_itself(group_carrier: Carrier) -> None:
    group_carrier.run(_carries_something_body)


def test_a_route_without_communicators_says_so() -> None:
    context = ps.simulated_group([0, 1], 0).context
    with pytest.raises(UnsupportedError, match="no communicator of group 'simulated:"):
        Route(context, (), {}).run("all_reduce", torch.ones(1), torch.ones(1), "sum", reduce_op="sum")


class _Noted(ProcessGroupCommunicator):  # type: ignore[misc]
    log: list[str] = []  # noqa: RUF012  (one for all groups, in order)

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.log.append(f"enter {self.context.name.partition(':')[0]}")
        yield
        self.log.append(f"leave {self.context.name.partition(':')[0]}")


def _capture_body() -> list[str]:
    before = [group.route.communicators for group in (ps.get_tp_group(), ps.get_pp_group())]
    for group in (ps.get_tp_group(), ps.get_pp_group()):
        group.route.communicators = (_Noted(group.context),)
    _Noted.log.clear()
    with ps.graph_capture() as capture:
        assert isinstance(capture, ps.GraphCaptureContext)
        assert capture.stream is None, "the CPU has no stream"
        ps.get_tp_group().all_reduce(torch.ones(1))
    with ps.get_pp_group().graph_capture() as alone, ps.get_tp_group().graph_capture(alone) as same:
        assert same is alone
    with pytest.raises(ZeroDivisionError), ps.graph_capture():
        raise ZeroDivisionError
    for group, communicators in zip((ps.get_tp_group(), ps.get_pp_group()), before, strict=True):
        group.route.communicators = communicators
    return _Noted.log


def test_graph_capture_prepares_tp_then_pp(pools: Pools) -> None:
    together = ["enter tp", "enter pp", "leave pp", "leave tp"]
    expected = [*together, "enter pp", "enter tp", "leave tp", "leave pp", "enter tp", "enter pp"]
    assert pools(4).run(_capture_body, tp=2, pp=2) == [expected] * 4


def _table_of_paths() -> tuple[bool, str, str]:
    with world(2):
        collectives = ps.get_world_group().context.host_memory.collectives
        plain = ps.get_world_group().explain()
    with environment(PARALLEL_STATE_DEBUG="on"), world(2):
        return collectives.library.has_ops, plain, ps.get_world_group().explain()


def test_the_table_of_paths_says_where_ops_go_through_python(pools: Callable[[int], WorkerPool]) -> None:
    for has_ops, plain, debugged in pools(2).run(_table_of_paths):
        assert ("C++ kernel of the op" in plain) == has_ops == ("ops in C++" in plain)
        assert "C++ kernel of the op" not in debugged, "debug mode compares each call in Python"


def _warnings(reason: str | None, variables: dict[str, str]) -> tuple[list[str], list[str]]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger, load = logging.getLogger("parallel_state"), native.load

    def unavailable() -> NativeLibrary:
        raise native.NativeUnavailableError(str(reason))

    logger.addHandler(handler)
    native.load = unavailable if reason else load
    try:
        with environment(**variables), world(2):
            route = [each.name for each in ps.get_tp_group().route.communicators]
    finally:
        native.load = load
        logger.removeHandler(handler)
    return [text for text in told if "shared memory" in text], route


@pytest.mark.parametrize(
    ("reason", "variables", "warns"),
    [
        ("there is no C++ compiler for this test", {}, True),
        (None, {}, False),
        (None, {"PARALLEL_STATE_SHARED_MEMORY": "off"}, False),
        ("it isn't compiled, and PARALLEL_STATE_BUILD is never", {"PARALLEL_STATE_BUILD": "never"}, False),
    ],
    ids=["no compiler", "shared memory", "switched off", "never built"],
)
def test_gloo_within_a_host_is_warned_of_once_unless_it_was_chosen(
    pools: Pools, reason: str | None, variables: dict[str, str], warns: bool
) -> None:
    (first, route), *others = pools(2).run(_warnings, reason, variables)
    carrier = {(None, False): ["shared_memory"], (None, True): ["hierarchical"]}.get((reason, bool(variables)), [])
    assert route == [*carrier, "process_group"]
    assert all(not told for told, _ in others), "only one rank may warn"
    assert len(first) == warns, first
    if warns:
        assert f"runs without shared memory, which is several times faster than gloo: {reason}" in first[0]


def _only_one_has_chosen() -> tuple[list[str], list[str]]:
    return _warnings(None, {"PARALLEL_STATE_SHARED_MEMORY": "off"} if os.environ["RANK"] == "1" else {})


def test_another_ranks_choice_is_no_news(pools: Pools) -> None:
    assert pools(2).run(_only_one_has_chosen) == [([], ["hierarchical", "process_group"])] * 2
