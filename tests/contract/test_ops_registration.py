"""torch's opcheck of schema, fake kernel, autograd and tracing. A new op needs a row in CASES."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import parallel_state as ps
from device_communicators.base.errors import GroupDestroyedError, GroupNotInitializedError
from tests.extent import LONG
from tests.helpers.doors import OP_NAMES, answering_group, call_op, schema_of, token_of
from tests.workers import WorkerPool, fork_context

Group = ps.GroupCoordinator
Arguments = tuple[Any, ...]
CPU = torch.device("cpu")
F32, FP8 = torch.float32, torch.float8_e4m3fn
FORM = "0123456789abcdef" * 2
"""A digest like a TensorDictSpec's: it makes C++ carry lists of tensors."""


class Case(NamedTuple):
    op: str
    shape: tuple[int, ...] | None
    """Shape of `x`; None if the op takes none."""
    arguments: Arguments
    """Those between the token and the group's name."""
    result: Any
    """On rank 0 of two: the shape of a float32 tensor, or a list of dtypes and shapes."""
    differentiable: bool = False
    rank: int | None = None
    """The only one of two ranks that makes this call; None for both."""

    def of(self, group: Group, x: Tensor | None) -> Arguments:
        first: Arguments = () if self.op in ("recv", "barrier") else (x,)
        if "_list" in self.op and x is not None:
            first = ([x, x.new_empty(2).fill_(1.0)],)
        return (*first, token_of(group), *self.arguments, group.unique_name)

    def __str__(self) -> str:
        return f"{self.op}{list(self.arguments)}"


CASES = (
    Case("all_reduce", (), ("max",), ()),
    Case("all_reduce", (4, 3), ("avg",), (4, 3), differentiable=True),
    Case("all_reduce", (4, 3), ("sum",), (4, 3), differentiable=True),
    Case("all_reduce_", (4, 3), ("sum",), None),
    Case("all_reduce_add_rms_norm", (4, 3), (torch.ones(4, 3), torch.ones(3), 1e-6), (4, 3), differentiable=True),
    Case(
        "all_reduce_add_rms_norm_static_fp8_quant",
        (4, 3),
        (torch.ones(4, 3), torch.ones(3), torch.ones(1), 1e-6),
        [(FP8, (4, 3)), (F32, (4, 3))],
    ),
    Case(
        "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant",
        (4, 3),
        (torch.ones(4, 3), torch.ones(3), 1e-6),
        [(FP8, (4, 3)), (F32, (4, 1)), (F32, (4, 3))],
    ),
    Case("all_gather", (4, 3), (0,), (8, 3), differentiable=True),
    Case("all_gather", (), (0,), (2,), differentiable=True),
    Case("all_gather", (4, 3), (1,), (4, 6), differentiable=True),
    Case("all_gatherv", (4, 3), (0, [4, 4]), (8, 3), differentiable=True),
    Case("reduce_scatter", (3, 4), (1, "min"), (3, 2)),
    Case("reduce_scatter", (4, 3), (0, "sum"), (2, 3), differentiable=True),
    Case("reduce_scatterv", (4, 3), (0, [2, 2], "avg"), (2, 3), differentiable=True),
    Case("all_gather_into", (4, 3), (torch.empty(8, 3), 0), None),
    Case("all_gather_into", (4, 3), (torch.empty(4, 6), 1), None),
    Case("reduce_scatter_into", (4, 3), (torch.empty(2, 3), 0, "sum"), None),
    Case("all_to_all_into", (4, 3), (torch.empty(4, 3), [2, 2], [2, 2]), None),
    Case("gather", (4, 3), (1, 0), (4, 6)),
    Case("gather", (4, 3), (0, 1), (0,)),
    Case("scatter", (4, 3), ([2, 3], torch.float32, CPU, 0, 0), (2, 3)),
    Case("all_to_all", (4, 3), ([2, 2], [2, 2]), (4, 3), differentiable=True),
    Case("broadcast", (4, 3), (0,), (4, 3), differentiable=True),
    Case("broadcast_", (4, 3), (0,), None),
    Case("copy_region", (4, 3), (), (4, 3), differentiable=True),
    Case("reduce_region", (4, 3), (), (4, 3), differentiable=True),
    Case("scatter_region", (4, 3), (0,), (2, 3), differentiable=True),
    Case("gather_region", (4, 3), (1, True), (4, 6), differentiable=True),
    Case("gather_region", (4, 3), (0, False), (8, 3), differentiable=True),
    Case("reduce_scatter_region", (4, 3), (0,), (2, 3), differentiable=True),
    Case("send", (4, 3), (1,), None, rank=0),
    Case("recv", None, ([4, 3], torch.float32, CPU, 0), (4, 3), rank=1),
    Case("broadcast_list", (4, 3), (FORM, 0), None, rank=0),
    Case("broadcast_list_", (4, 3), (FORM, 0), None, rank=1),
    Case("send_list", (4, 3), (FORM, 1), None, rank=0),
    Case("recv_list_", (4, 3), (FORM, 0), None, rank=1),
    Case("barrier", None, (), None),
)


ALLOCATES = {"empty"}
NAMES = sorted(OP_NAMES - ALLOCATES)


def _x(case: Case, rank: int = 0, requires_grad: bool = False) -> Tensor | None:
    if case.shape is None:
        return None
    return (torch.arange(12.0)[: torch.Size(case.shape).numel()].view(case.shape) + rank).requires_grad_(requires_grad)


def _op(name: str) -> Any:
    return getattr(torch.ops.parallel_state, name).default


def test_every_op_has_a_case() -> None:
    assert {case.op for case in CASES} == set(NAMES)


def _local_peer(case: Case) -> Case:
    return case._replace(arguments=(*case.arguments[:-1], 1)) if case.op in ("recv", "recv_list_") else case


RECORDED = [(case, False) for case in CASES] + [(case, True) for case in CASES if case.differentiable]


@pytest.mark.parametrize(("case", "requires_grad"), RECORDED, ids=str)
def test_opcheck_in_one_process(case: Case, requires_grad: bool) -> None:
    group = answering_group()
    torch.library.opcheck(_op(case.op), _local_peer(case).of(group, _x(case, 0, requires_grad)))
    if requires_grad or case.op not in ("copy_region", "scatter_region"):
        assert sum(traffic.calls for traffic in group.traffic().values()) > 1, "opcheck must have run the op"


ON_TWO_RANKS = NAMES if LONG else NAMES[::3]


def _opcheck_body() -> list[str]:
    """opcheck runs the op equally often on both ranks."""
    group = ps.get_tp_group()
    checked = []
    for case in {case.op: case for case in CASES}.values():
        if case.op not in ON_TWO_RANKS:
            continue
        x = _x(case, group.rank_in_group, case.differentiable)
        if case.op == "scatter" and group.rank_in_group != 0:
            x = None
        if case.rank in (None, group.rank_in_group):
            torch.library.opcheck(_op(case.op), case.of(group, x))
            checked.append(case.op)
        else:
            _answer(group, case)
    group.barrier()
    return checked


def _answer(group: Group, case: Case) -> None:
    alone = answering_group()
    torch.library.opcheck(_op(case.op), _local_peer(case).of(alone, _x(case)))
    lists = [torch.ones(4, 3), torch.ones(2)]
    answers: dict[str, Callable[[], object]] = {
        "send": lambda: group.recv([4, 3], torch.float32, 0),
        "recv": lambda: group.send(torch.ones(4, 3), 1),
        "send_list": lambda: call_op(group, "recv_list_", lists, FORM, 0),
        "recv_list_": lambda: call_op(group, "send_list", lists, FORM, 1),
        "broadcast_list": lambda: call_op(group, "broadcast_list_", lists, FORM, 0),
        "broadcast_list_": lambda: call_op(group, "broadcast_list", lists, FORM, 0),
    }
    for _ in range(alone.traffic()[case.op.removesuffix("_")].calls):
        answers[case.op]()


def test_opcheck_on_two_ranks(pools: Callable[[int], WorkerPool]) -> None:
    first, second = pools(2).run(_opcheck_body, tp=2)
    assert set(first) == set(ON_TWO_RANKS) - {"recv", "recv_list_", "broadcast_list_"}
    assert set(second) == set(ON_TWO_RANKS) - {"send", "send_list", "broadcast_list"}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_for_cpu_cuda_meta_and_autograd(name: str) -> None:
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"parallel_state::{name}", key), key
    takes_input = name not in ("recv", "barrier")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"parallel_state::{name}", "Autograd") == takes_input


@pytest.mark.parametrize("name", NAMES)
def test_every_op_writes_the_token(name: str) -> None:
    """The write keeps the op's order in compiled code. No result may alias an argument."""
    schema = schema_of(name)
    (token,) = (argument for argument in schema.arguments if argument.name == "token")
    assert token.alias_info is not None
    assert token.alias_info.is_write
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    also = {"_": ["x", "token"], "o": ["token", "out"]}
    assert written == also.get(name[-1] if name.endswith(("_", "_into")) else "", ["token"])
    assert all(result.alias_info is None for result in schema.returns)
    assert torch.Tag.pt2_compliant_tag in _op(name).tags


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_unknown_group_raises(case: Case) -> None:
    group = ps.simulated_group([0, 1], 0)
    arguments = case.of(group, _x(case))
    with pytest.raises(GroupNotInitializedError, match="this process has no group named 'nobody:0'; its groups are"):
        _op(case.op)(*arguments[:-1], "nobody:0")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_destroyed_group_raises(case: Case) -> None:
    group = ps.simulated_group([0, 1], 0)
    arguments = case.of(group, _x(case))
    group.destroy()
    with pytest.raises(GroupDestroyedError, match=f"{group.unique_name}.* was destroyed; get or create the group"):
        _op(case.op)(*arguments)
    del group
    with pytest.raises(GroupDestroyedError, match="was destroyed"):
        _op(case.op)(*arguments)


def test_unknown_and_destroyed_groups_raise_when_a_model_is_traced() -> None:
    group = ps.simulated_group([0, 1], 0)
    x, token = torch.ones(2, device="meta"), token_of(group)
    with pytest.raises(GroupNotInitializedError):
        torch.ops.parallel_state.all_gather(x, token, 0, "nobody:0")


def _check_shape(found: object, case: Case, device: str, kind: type[Tensor]) -> None:
    if case.result is None:
        assert found is None
        return
    results = found if isinstance(found, tuple) else (found,)
    expected = case.result if isinstance(case.result, list) else [(F32, case.result)] * len(results)
    for each, (dtype, shape) in zip(results, expected, strict=True):
        assert isinstance(each, kind)
        assert each.shape == shape
        assert each.dtype == dtype
        assert each.device.type == device
        assert each.is_contiguous()


# An op without tensor arguments runs on its group token's device.
ON_META = [(case, device) for case in CASES for device in ("cpu", "meta") if device == "meta" or case.shape is not None]


@pytest.mark.parametrize(("case", "group_device"), ON_META, ids=str)
def test_meta_tensors(case: Case, group_device: str) -> None:
    group = ps.simulated_group([0, 1], 0, device=group_device)
    x = _x(case)
    arguments = [
        torch.device("meta") if each is CPU else each for each in case.of(group, None if x is None else x.to("meta"))
    ]
    before = group.traffic()
    _check_shape(_op(case.op)(*arguments), case, "meta", Tensor)
    assert group.traffic() == before, "computing a shape must not use a communicator"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fake_tensors(case: Case) -> None:
    """The token is a real tensor, which the caller's own FakeTensorMode must accept."""
    group = ps.simulated_group([0, 1], 0)
    with FakeTensorMode() as mode:
        mine = (mode.from_tensor(each) if isinstance(each, Tensor) else each for each in case.arguments)
        found = _op(case.op)(*case._replace(arguments=tuple(mine)).of(group, _x(case)))
    _check_shape(found, case, "cpu", FakeTensor)
    assert type(token_of(group)) is Tensor
    assert not group.traffic()


def test_the_calls_of_a_group_take_fake_tensors() -> None:
    group = ps.simulated_group([0, 1], 0)
    with FakeTensorMode():
        x = torch.ones(4, 3, requires_grad=True)
        found = group.all_gather(group.all_reduce(x), 0)
        group.barrier()
        assert group.recv([5], torch.int8, 1).shape == (5,)
        spec = ps.TensorDictSpec.of({"y": torch.ones(2)})
        assert isinstance(group.recv_tensor_dict(1, spec=spec)["y"], FakeTensor)
        assert isinstance(group.broadcast_tensor_dict(None, 1, spec=spec)["y"], FakeTensor)
        found.sum().backward()
    assert isinstance(found, FakeTensor)
    assert x.grad is not None
    assert x.grad.shape == (4, 3)
    again = group.all_reduce(x)
    assert isinstance(again, FakeTensor)


def _make_in_a_fake_mode() -> None:
    with FakeTensorMode():
        group = ps.simulated_group([0, 1], 0)
        assert isinstance(group.all_reduce(torch.ones(2)), FakeTensor)
    found = group.all_reduce(torch.ones(2))
    assert type(found) is Tensor
    assert found.tolist() == [2.0, 2.0]


def test_a_group_made_in_a_fake_mode_is_real_afterwards() -> None:
    process = fork_context().Process(target=_make_in_a_fake_mode)
    process.start()
    process.join(60.0)
    assert process.exitcode == 0


def test_a_real_input_in_a_fake_mode_is_still_an_error() -> None:
    group = ps.simulated_group([0, 1], 0)
    x = torch.ones(2)
    with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        group.all_reduce(x)
