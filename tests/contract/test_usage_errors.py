from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from device_communicators import Row
from device_communicators.base.errors import CommunicationError, InvalidArgumentError, UnsupportedError, UsageError
from tests.contract.carriers import Carrier, Member, Size
from tests.contract.cases import bytes_of
from tests.workers import WorkerPool

Group = ps.GroupCoordinator


class Wrong(NamedTuple):
    name: str
    call: Callable[[Group], object]
    must_say: Sequence[str]
    error: type[UsageError] = InvalidArgumentError


def _wrong_ranks() -> list[Wrong]:
    ones = torch.ones(2, 4)
    calls: dict[str, tuple[str, Callable[[Group, Any], object]]] = {
        "gather": ("dst", lambda group, rank: group.gather(ones, rank)),
        "scatter": ("src", lambda group, rank: group.scatter(ones, rank)),
        "broadcast": ("src", lambda group, rank: group.broadcast(ones, rank)),
        "broadcast_": ("src", lambda group, rank: group.broadcast_(ones, rank)),
        "send": ("dst", lambda group, rank: group.send(ones, rank)),
        "recv": ("src", lambda group, rank: group.recv([2], torch.float32, rank)),
        "broadcast_object": ("src", lambda group, rank: group.broadcast_object(1, rank)),
        "broadcast_object_list": ("src", lambda group, rank: group.broadcast_object_list([1], rank)),
        "broadcast_tensor_dict": ("src", lambda group, rank: group.broadcast_tensor_dict({"x": ones}, rank)),
        "isend_object": ("dst", lambda group, rank: group.isend_object(1, rank)),
        "recv_object": ("src", lambda group, rank: group.recv_object(rank)),
        "irecv_object": ("src", lambda group, rank: group.irecv_object(rank)),
        "send_object": ("dst", lambda group, rank: group.send_object(1, rank)),
        "send_tensor_dict": ("dst", lambda group, rank: group.send_tensor_dict({"x": ones}, rank)),
        "isend_tensor_dict": ("dst", lambda group, rank: group.isend_tensor_dict({"x": ones}, rank)),
        "recv_tensor_dict": ("src", lambda group, rank: group.recv_tensor_dict(rank)),
        "irecv_tensor_dict": ("src", lambda group, rank: group.irecv_tensor_dict(rank)),
    }
    wrong = []
    for operation, (name, call) in calls.items():
        for rank in (-1, 2, 7, True, 1.0, "0", torch.tensor(0)):
            wrong.append(
                Wrong(
                    f"{operation}, {name}={rank!r}",
                    lambda group, call=call, rank=rank: call(group, rank),
                    [f"{name} of {operation}", "must be a rank in the group, 0 … 1", f"but is {rank!r}"],
                )
            )
        if name == "dst" or operation.endswith(("recv", "recv_object", "recv_tensor_dict")):
            if operation == "gather":
                continue
            wrong.append(
                Wrong(
                    f"{operation} with itself",
                    lambda group, call=call: call(group, group.rank_in_group),
                    [f"{name} of {operation}", "is this rank itself"],
                )
            )
    return wrong


def _wrong_dims() -> list[Wrong]:
    x = torch.ones(2, 4)
    calls: dict[str, Callable[[Group, Any], object]] = {
        "all_gather": lambda group, dim: group.all_gather(x, dim),
        "all_gatherv": lambda group, dim: group.all_gatherv(x, dim, [2, 2]),
        "reduce_scatter": lambda group, dim: group.reduce_scatter(x, dim),
        "reduce_scatterv": lambda group, dim: group.reduce_scatterv(x, dim, [1, 1]),
        "gather": lambda group, dim: group.gather(x, 0, dim),
        "scatter": lambda group, dim: group.scatter(x, 0, dim, size=[1, 4], dtype=torch.float32),
    }
    wrong = []
    for operation, call in calls.items():
        for dim in (2, -3, 1.0, True, None, "0"):
            wrong.append(
                Wrong(
                    f"{operation}, dim={dim!r}",
                    lambda group, call=call, dim=dim: call(group, dim),
                    [f"dim of {operation}", "must be in -2 … 1", f"but is {dim!r}"],
                )
            )
    for dims in ((2, 0), (0, -3), (True, 0)):
        wrong.append(
            Wrong(f"all_to_all {dims}", lambda group, dims=dims: group.all_to_all(x, *dims), ["must be in -2 … 1"])
        )
    return wrong


def _wrong_shapes() -> list[Wrong]:
    odd, scalar, even = torch.ones(3, 5), torch.tensor(1.0), torch.ones(4, 3)
    indivisible = ["must be divisible by 2", "the shape is [3, 5]"]
    sizes_of = {
        "sizes of all_gatherv": lambda sizes: lambda group: group.all_gatherv(even, 0, sizes),
        "sizes of reduce_scatterv": lambda sizes: lambda group: group.reduce_scatterv(even, 0, sizes),
        "input_split_sizes of all_to_all": lambda sizes: lambda group: group.all_to_all(even, input_split_sizes=sizes),
        "output_split_sizes of all_to_all": lambda sizes: (
            lambda group: group.all_to_all(even, output_split_sizes=sizes)
        ),
    }
    wrong = [
        Wrong("reduce_scatter odd", lambda group: group.reduce_scatter(odd, 1), ["dim 1", *indivisible]),
        Wrong("reduce_scatterv odd", lambda group: group.reduce_scatterv(odd, 0), ["dim 0", *indivisible]),
        Wrong("reduce_scatter scalar", lambda group: group.reduce_scatter(scalar), ["divisible by 2", "is []"]),
        Wrong("all_to_all odd", lambda group: group.all_to_all(odd, 0, 1), ["dim 0", *indivisible]),
        Wrong("all_to_all scalar", lambda group: group.all_to_all(scalar), ["divisible by 2", "is []"]),
        Wrong(
            "all_to_all odd, half told",
            lambda group: group.all_to_all(odd, output_split_sizes=[1, 2]),
            ["dim 0", *indivisible],
        ),
        Wrong(
            "all_to_all scalar, all told",
            lambda group: group.all_to_all(scalar, output_split_sizes=[1, 0], input_split_sizes=[1, 0]),
            ["is []"],
        ),
        Wrong(
            "all_to_all split along dim 1",
            lambda group: group.all_to_all(even, 1, 1, output_split_sizes=[2, 1], input_split_sizes=[2, 1]),
            ["works along dim 0", "scatter_dim is 1 and gather_dim 1"],
        ),
        Wrong(
            "all_gatherv total",
            lambda group: group.all_gatherv(even, 0, [3, 3]),
            ["sizes[this rank]", "dim 0", "3", "[4, 3]"],
        ),
        Wrong("all_gatherv scalar", lambda group: group.all_gatherv(scalar, 0, [1, 1]), ["dim 0", "[]"]),
        Wrong("reduce_scatterv total", lambda group: group.reduce_scatterv(even, 0, [3, 2]), ["add up", "5", "[4, 3]"]),
        Wrong("reduce_scatterv scalar", lambda group: group.reduce_scatterv(scalar, 0, [1, 0]), ["add up", "[]"]),
        Wrong(
            "input_split_sizes total",
            lambda group: group.all_to_all(even, output_split_sizes=[2, 2], input_split_sizes=[3, 2]),
            ["input_split_sizes", "add up", "5", "[4, 3]"],
        ),
    ]
    for what, call in sizes_of.items():
        wrong += [
            Wrong(f"{what}: too few", call([4]), [what, "one size per rank, 2, but has 1"]),
            Wrong(f"{what}: too many", call((2, 2, 2)), [what, "one size per rank, 2, but has 3"]),
            Wrong(f"{what}: negative", call([5, -1]), [what, "non-negative", "[5, -1]"]),
            Wrong(f"{what}: float", call([2.0, 2.0]), [what, "ints", "[2.0, 2.0]"]),
            Wrong(f"{what}: bool", call([True, True]), [what, "ints", "[True, True]"]),
            Wrong(f"{what}: str", call(["2", "2"]), [what, "ints", "['2', '2']"]),
            Wrong(f"{what}: a number", call(4), [what, "list or tuple of ints", "int"]),
        ]
    for size, say in (([2, -1], "[2, -1]"), ([1.5], "[1.5]"), (4, "int"), ("4", "str"), (None, "NoneType")):
        wrong.append(
            Wrong(
                f"recv size={size!r}",
                lambda group, size=size: group.recv(size, torch.float32),
                ["size of recv", "ints", say],
            )
        )
    wrong.append(Wrong("recv dtype", lambda group: group.recv([1], "float32"), ["dtype of recv", "'float32'"]))
    return wrong


def _wrong_ops() -> list[Wrong]:
    x = torch.ones(2, 4)
    calls: dict[str, Callable[[Group, Any], object]] = {
        "all_reduce": lambda group, op: group.all_reduce(x, op),
        "all_reduce_": lambda group, op: group.all_reduce_(x, op),
        "reduce_scatter": lambda group, op: group.reduce_scatter(x, 0, op),
        "reduce_scatterv": lambda group, op: group.reduce_scatterv(x, 0, [1, 1], op),
    }
    return [
        Wrong(
            f"{operation}, op={op!r}",
            lambda group, call=call, op=op: call(group, op),
            [f"op of {operation}", "'sum', 'avg', 'max', 'min', 'product'", f"but is {op!r}"],
        )
        for operation, call in calls.items()
        for op in ("mean", "SUM", "", None, 0, dist.ReduceOp.BAND)
    ]


def _wrong_tensors() -> list[Wrong]:
    calls: dict[str, Callable[[Group, Any], object]] = {
        "all_reduce": lambda group, x: group.all_reduce(x),
        "all_reduce_": lambda group, x: group.all_reduce_(x),
        "all_gather": lambda group, x: group.all_gather(x),
        "all_gather_to_list": lambda group, x: group.all_gather_to_list(x),
        "all_gatherv": lambda group, x: group.all_gatherv(x, 0, [2, 2]),
        "reduce_scatter": lambda group, x: group.reduce_scatter(x),
        "reduce_scatterv": lambda group, x: group.reduce_scatterv(x, 0, [1, 1]),
        "gather": lambda group, x: group.gather(x),
        "scatter": lambda group, x: group.scatter(x, group.rank_in_group, size=[1], dtype=torch.float32),
        "all_reduce_async": lambda group, x: group.all_reduce_async(x),
        "all_gather_async": lambda group, x: group.all_gather_async(x),
        "reduce_scatter_async": lambda group, x: group.reduce_scatter_async(x),
        "broadcast_async": lambda group, x: group.broadcast_async(x),
        "all_reduce_add_rms_norm": lambda group, x: group.all_reduce_add_rms_norm(x, x, x),
        "out= of all_gather": lambda group, x: group.all_gather(torch.ones(1), 0, out=x),
        "isend": lambda group, x: group.isend(x),
        "all_to_all": lambda group, x: group.all_to_all(x),
        "broadcast": lambda group, x: group.broadcast(x),
        "broadcast_": lambda group, x: group.broadcast_(x),
        "send": lambda group, x: group.send(x),
    }
    eye = torch.eye(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        csr, nested = eye.to_sparse_csr(), torch.nested.nested_tensor([eye[0], eye[1, :1]])
        quantized = torch.quantize_per_tensor(eye, 0.5, 0, torch.qint8)
    values = [
        ([1.0, 2.0], "takes a torch.Tensor, but got a list"),
        (1.0, "takes a torch.Tensor, but got a float"),
        (None, "takes a torch.Tensor, but got a NoneType"),
        (np.ones(2), "takes a torch.Tensor, but got a ndarray"),
        (eye.to_sparse(), "takes a dense tensor, but got layout torch.sparse_coo"),
        (csr, "takes a dense tensor, but got layout torch.sparse_csr"),
        (nested, "takes a dense tensor, but got a nested one"),
        (quantized, "takes a dense tensor, but got a quantized tensor, torch.qint8"),
        (torch.ones(2, 2, device="meta"), "takes a tensor with values, but got a meta tensor"),
    ]
    wrong = [
        Wrong(f"{operation} of {say}", lambda group, call=call, x=x: call(group, x), [operation, say])
        for operation, call in calls.items()
        for x, say in values
        if not (operation.startswith("out") and x is None)
    ]
    leaf = torch.zeros(2, requires_grad=True)
    with torch.inference_mode():
        inference = torch.zeros(2)
    for out, say in ((leaf, "a leaf that requires"), (leaf[:], "a leaf that requires"), (inference, "inference mode")):
        wrong.append(
            Wrong(
                f"out of all_gather where {say}",
                lambda group, out=out: group.all_gather(torch.ones(1), 0, out=out),
                ["out= of all_gather", say],
            )
        )
    for value in ("a", [1], torch.ones(1)):
        wrong.append(
            Wrong(
                f"all_sum of {value!r}",
                lambda group, value=value: group.all_sum(value),
                ["all_sum", f"takes a number, but got a {type(value).__name__}"],
            )
        )
    for operation in ("all_reduce_", "broadcast_"):
        for x, say in (
            (torch.ones(1).expand(3), "elements must not share memory, but shape [3] has strides [0]"),
            (torch.ones(3, 1).expand(3, 2), "shape [3, 2] has strides [1, 0]"),
            (torch._efficientzerotensor((3,)), "but this is torch's efficient zero tensor"),
        ):
            wrong.append(
                Wrong(
                    f"{operation} where {say}",
                    lambda group, operation=operation, x=x: getattr(group, operation)(x),
                    [operation, say],
                )
            )
    return wrong


WRONG = [*_wrong_ranks(), *_wrong_dims(), *_wrong_shapes(), *_wrong_ops(), *_wrong_tensors()]


def _body(member: Member) -> None:
    group = member.group
    for wrong in WRONG:
        if member.simulated and wrong.name.endswith("a meta tensor"):
            continue
        with member.case(wrong.name):
            before = group.route.sequence
            with pytest.raises(wrong.error) as caught:
                wrong.call(group)
            assert type(caught.value) is wrong.error
            for text in (*wrong.must_say, repr(group.unique_name)):
                assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
            assert group.route.sequence == before, "a refused call was counted as an operation"
            assert group.all_reduce(torch.ones(1)).item() == member.size


def test_a_wrong_call_raises_and_the_group_goes_on(group_carrier: Carrier) -> None:
    group_carrier.run(_body)


def _alone_body(member: Member) -> None:
    for wrong in (*_wrong_ranks(), *_wrong_dims(), *_wrong_ops(), *_wrong_tensors()):
        if wrong.name.endswith(("send_tensor_dict with itself", "recv_tensor_dict with itself")):
            continue
        if member.simulated and wrong.name.endswith("a meta tensor"):
            continue
        with member.case(wrong.name):
            with pytest.raises(wrong.error) as caught:
                wrong.call(member.group)
            assert repr(member.group.unique_name) in str(caught.value)


def test_a_wrong_call_is_as_wrong_in_a_group_of_one(row: Row, pools: Callable[[int], WorkerPool]) -> None:
    Carrier(row, Size(1, 1), pools).run(_alone_body)


def test_a_global_rank_is_explained() -> None:
    group = ps.simulated_group([4, 6, 8], 6)
    with pytest.raises(InvalidArgumentError, match=r"but is 8; global rank 8 is rank 2 of this group"):
        group.broadcast(torch.ones(1), 8)
    with pytest.raises(InvalidArgumentError, match=r"but is 5$"):
        group.broadcast(torch.ones(1), 5)


def _global_rank_body(member: Member) -> None:
    with member.case("a global rank"):
        first = member.group.first_global_rank
        with pytest.raises(InvalidArgumentError) as caught:
            member.group.send(torch.ones(1), first + 2)
        assert "of this group" not in str(caught.value)
        if first > 0:
            with pytest.raises(InvalidArgumentError, match=f"global rank {first} is rank 0 of this group"):
                member.group.broadcast(torch.ones(1), first)
        assert member.group.all_reduce(torch.ones(1)).item() == member.size


def test_a_global_rank_in_place_of_one_of_the_group(group_carrier: Carrier) -> None:
    group_carrier.run(_global_rank_body)


UNSUPPORTED: list[tuple[str, Callable[[Group], object], str]] = [
    (
        "avg of bools",
        lambda group: group.reduce_scatter(torch.ones(2, dtype=torch.bool), 0, "avg"),
        "avg of torch.bool",
    ),
    (
        "max of complex",
        lambda group: group.reduce_scatterv(torch.ones(2, dtype=torch.complex64), 0, [1, 1], "max"),
        "max of torch.complex64",
    ),
    ("sum of uint16", lambda group: group.all_reduce(torch.ones(2, dtype=torch.uint16)), "uint16 can't be reduced"),
]


def _unsupported_body(member: Member) -> None:
    group = member.group
    for name, call, must_say in UNSUPPORTED:
        with member.case(name):
            with pytest.raises(UnsupportedError) as caught:
                call(group)
            for text in (must_say, member.row, repr(group.unique_name), "no communicator of"):
                assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
            assert isinstance(caught.value, NotImplementedError)
            assert group.all_reduce(torch.ones(1)).item() == member.size


def test_what_no_communicator_carries(group_carrier: Carrier) -> None:
    group_carrier.run(_unsupported_body)


def _scatter_body(member: Member) -> None:
    group, is_src = member.group, member.rank == 1
    cases: list[tuple[Any, int, str]] = [
        (torch.ones(2, 2, requires_grad=True), 0, "scatter on"),
        (torch.ones(2, 2, device="meta"), 0, "a tensor with values"),
        (torch.ones(3, 5), 0, "must be divisible by 2"),
        (torch.ones(3, 5), 7, "must be in -2 … 1"),
        (torch.tensor(1.0), 0, "must be divisible by 2"),
    ]
    for x, dim, must_say in cases:
        if not member.can_hear(1) or (member.simulated and x.is_meta):
            continue
        with member.case(f"{list(x.shape)} along dim {dim}"):
            error: type[Exception] = InvalidArgumentError if is_src else ps.RemoteError
            with pytest.raises(error) as caught:
                group.scatter(x if is_src else None, 1, dim)
            for text in (must_say, repr(group.unique_name)):
                assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
            assert group.all_reduce(torch.ones(1)).item() == member.size
    with member.case("size and dtype that are not the slice's"):
        if is_src:
            for size, dtype in (([2], torch.float32), ([1, 2], torch.float32), ([1], torch.float64)):
                with pytest.raises(InvalidArgumentError, match=r"must be those of a slice of x, \[1\]"):
                    group.scatter(torch.ones(2), 1, size=size, dtype=dtype)
        for size, dtype in (([-1], torch.float32), (1, torch.float32), ([1], float)):
            with pytest.raises(InvalidArgumentError, match="of scatter"):
                group.scatter(torch.ones(2), 1, size=size, dtype=dtype)
        assert group.all_reduce(torch.ones(1)).item() == member.size


def test_scatter_that_is_wrong_on_its_source(group_carrier: Carrier) -> None:
    group_carrier.run(_scatter_body)


def _spec_body(member: Member) -> None:
    spec = ps.TensorDictSpec.of({"hidden": torch.ones(2, 3), "step": 3})
    right: dict[str, Any] = {"hidden": torch.ones(2, 3), "step": 3}
    wrong: list[tuple[Any, str]] = [
        ({**right, "more": torch.ones(1)}, "must have the 2 keys of its spec, but has 3"),
        ({"hidden": torch.ones(2, 3)}, "must have the 2 keys of its spec, but has 1"),
        ({"hidden": torch.ones(2, 3), "other": 3}, "must have all keys of its spec, but lacks 'step'"),
        ({**right, "step": 4}, "'step' must be 3"),
        ({**right, "step": torch.ones(1)}, "'step' must be 3"),
        ({**right, "hidden": torch.ones(3, 2)}, "'hidden' must be a torch.float32 tensor of shape [2, 3]"),
        ({**right, "hidden": torch.ones(2, 3).double()}, "'hidden' must be a torch.float32 tensor"),
        ({**right, "hidden": torch.ones(2, 3, device="meta")}, "on cpu"),
        ({**right, "hidden": [1.0]}, "'hidden' must be a torch.float32 tensor"),
        (None, "must pass the tensor dict"),
    ]
    for tensors, must_say in wrong:
        with member.case(must_say):
            # Each rank would send, so no rank waits for a message.
            for call in (
                lambda tensors=tensors: member.group.broadcast_tensor_dict(tensors, member.rank, spec=spec),
                lambda tensors=tensors: member.group.send_tensor_dict(tensors, spec=spec),
            ):
                with pytest.raises(InvalidArgumentError) as caught:
                    call()
                assert must_say in str(caught.value)
            assert member.group.all_reduce(torch.ones(1)).item() == member.size


def test_a_tensor_dict_that_is_not_of_its_spec(group_carrier: Carrier) -> None:
    group_carrier.run(_spec_body)


def test_a_spec_of_something_else() -> None:
    for value in ({1: 2}, {"x": [1]}, {"x": object()}):
        with pytest.raises(
            InvalidArgumentError, match="TensorDictSpec has str keys, and tensors and constants as values"
        ):
            ps.TensorDictSpec.of(value)


def _untouched_body(member: Member) -> None:
    with member.case("an input of a wrong call"):
        x: Tensor = torch.arange(6).view(2, 3) % 2 == 0
        before = bytes_of(x)
        for call in (
            lambda: member.group.all_reduce_(x, "avg"),
            lambda: member.group.all_reduce_(x, "mean"),
            lambda: member.group.broadcast_(x, 9),
        ):
            with pytest.raises(UsageError):
                call()
        assert torch.equal(bytes_of(x), before)


def test_a_wrong_call_in_place_changes_nothing(group_carrier: Carrier) -> None:
    group_carrier.run(_untouched_body)


TOO_LARGE = (1 << 50,)
"""Elements of an expanded tensor: no machine has memory for them."""


def _local_body(member: Member) -> None:
    with member.case("a tensor that this rank can't copy"):
        if member.simulated:
            return
        group, x = member.group, torch.ones(1).expand(TOO_LARGE)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: group.all_reduce(x),
            "all_gather": lambda: group.all_gather(x),
            "gather": lambda: group.gather(x),
            "broadcast": lambda: group.broadcast(x),
            "send": lambda: group.send(x, (member.rank + 1) % member.size),
        }
        for name, call in calls.items():
            if member.rank == 0:
                with pytest.raises((UsageError, RuntimeError)) as caught:
                    call()
                assert not isinstance(caught.value, CommunicationError), caught.value
                assert "memory" in str(caught.value) or "storage" in str(caught.value), (name, caught.value)
            assert group.all_reduce(torch.ones(1)).item() == member.size, name


def test_a_mistake_of_one_rank_is_its_own(group_carrier: Carrier) -> None:
    group_carrier.run(_local_body)
