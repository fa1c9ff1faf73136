from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators.base.errors import InvalidArgumentError

RANK, SIZE = 2, 4
DEADLINE_S = 10.0


@pytest.fixture
def group() -> ps.GroupCoordinator:
    return ps.simulated_group([1, 3, 5, 7], 5)


@pytest.fixture(autouse=True)
def _outside_of_any_groups() -> Iterator[None]:
    assert ps.try_get_current_groups() is None
    yield
    assert ps.try_get_current_groups() is None
    assert ps.try_get_world_group() is None


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (2, 3, 4), (4, 1, 3), (8, 2, 1)]


@pytest.mark.parametrize(("tp", "dp", "pp"), LAYOUTS)
@pytest.mark.parametrize("order", ["tp-dp-pp", "pp-tp-dp"])
def test_every_rank_of_a_layout(tp: int, dp: int, pp: int, order: str) -> None:
    sizes = {"tp": tp, "dp": dp, "pp": pp}
    strides, stride = {}, 1
    for axis in order.split("-"):
        strides[axis] = stride
        stride *= sizes[axis]
    for rank in range(tp * dp * pp):
        groups = ps.simulate(rank, tp * dp * pp, tp, pp, order=order)
        assert groups.world.ranks == list(range(tp * dp * pp))
        assert groups.world.rank == groups.world.rank_in_group == rank
        assert groups.root is groups.world
        assert groups.is_coordinator == (rank == 0)
        for axis, size in sizes.items():
            group: ps.GroupCoordinator = getattr(groups, axis)
            position = rank // strides[axis] % size
            assert group.rank == rank
            assert (group.rank_in_group, group.world_size) == (position, size)
            assert group.ranks == [rank + (other - position) * strides[axis] for other in range(size)]
            assert group.is_first_rank == (position == 0)
            assert group.is_last_rank == (position == size - 1)
            assert group.next_rank_in_group == (position + 1) % size
            assert group.prev_rank_in_group == (position - 1) % size
            assert (group.first_rank_in_group, group.last_rank_in_group) == (0, size - 1)
            for end in ("next", "prev", "first", "last"):
                in_group, found = getattr(group, f"{end}_rank_in_group"), getattr(group, f"{end}_global_rank")
                assert found == group.ranks[in_group]
        with groups.use():
            assert ps.is_pipeline_first_stage() == (groups.pp.rank_in_group == 0)
            assert ps.is_pipeline_last_stage() == (groups.pp.rank_in_group == pp - 1)
            assert ps.get_tensor_model_parallel_rank() == groups.tp.rank_in_group
            assert ps.get_data_parallel_world_size() == dp


def test_a_rank_of_a_large_layout() -> None:
    started = time.monotonic()
    groups = ps.simulate(4095, 4096, 8, 4)
    assert groups.tp.ranks == list(range(4088, 4096))
    assert groups.dp.world_size == 128
    assert groups.pp.ranks == [1023, 2047, 3071, 4095]
    assert groups.pp.is_last_rank
    assert torch.equal(groups.world.all_reduce(torch.ones(2)), torch.full((2,), 4096.0))
    assert time.monotonic() - started < DEADLINE_S


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"rank": 4, "world_size": 4}, ps.LayoutError, "rank must be in 0 … 3, but is 4"),
        ({"rank": -1, "world_size": 4}, ps.LayoutError, "rank must be in 0 … 3, but is -1"),
        ({"world_size": 0}, ps.LayoutError, "world size must be at least 1, but is 0"),
        ({"world_size": 4, "tensor_model_parallel_size": 3}, ps.LayoutError, "not divisible by tp=3"),
        ({"world_size": 4, "tensor_model_parallel_size": 0}, ps.LayoutError, "'tp' must be a positive integer"),
        ({"world_size": 4, "data_parallel_size": 2}, ps.LayoutError, "pass -1 for one size"),
        ({"world_size": 4, "order": "tp-dp"}, None, ""),
        ({"world_size": 4, "order": "tp-pp"}, ps.LayoutError, "it lacks 'dp', whose size is 4"),
        ({"world_size": 4, "order": "tp-dp-xx"}, ps.LayoutError, "'xx', which isn't an axis"),
    ],
)
def test_sizes_are_checked_as_for_real_groups(
    kwargs: dict[str, Any], error: type[Exception] | None, match: str
) -> None:
    if error is None:
        ps.simulate(**kwargs)
    else:
        with pytest.raises(error, match=match):
            ps.simulate(**kwargs)


@pytest.mark.parametrize("ranks", [[0, 1], [2, 2], []])
def test_ranks_of_a_group_are_checked(ranks: list[int]) -> None:
    with pytest.raises(ps.InvalidArgumentError, match="ranks must be distinct and include rank 2"):
        ps.simulated_group(ranks, 2)


def test_a_set_of_groups_is_frozen_and_its_coordinator_is_checked() -> None:
    groups = ps.simulate(0, 4, 2, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        groups.world = groups.pp  # type: ignore[misc]
    other = dataclasses.replace(groups, groups={**groups.groups, "tp": ps.simulated_group([0, 1], 0)})
    assert other.is_coordinator
    with pytest.raises(ps.LayoutError, match="rank 0 of the world must also be rank 0 of each of its groups"):
        dataclasses.replace(groups, groups={"tp": ps.simulated_group([1, 0], 0)})
    dataclasses.replace(ps.simulate(1, 4, 2, 2), groups={"tp": ps.simulated_group([1, 0], 1)})


X = torch.tensor([[1.0, -2.0, 3.0, 0.5], [4.0, 5.0, -6.0, 2.0]])


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", X * SIZE), ("avg", X), ("max", X), ("min", X), ("product", X**SIZE)],
)
def test_reductions(group: ps.GroupCoordinator, op: str, expected: Tensor) -> None:
    kept = X.clone()
    assert torch.equal(group.all_reduce(X, op), expected)
    assert torch.equal(group.all_reduce(X.t(), op), expected.t())
    assert torch.equal(group.reduce_scatter(X, 1, op), expected[:, RANK : RANK + 1])
    assert torch.equal(group.reduce_scatterv(X, 1, [1, 0, 2, 1], op), expected[:, 1:3])
    assert torch.equal(X, kept), "the input was changed"
    assert group.all_reduce_(kept, op) is kept
    assert torch.equal(kept, expected)


def test_reductions_of_other_dtypes(group: ps.GroupCoordinator) -> None:
    for dtype in (torch.bfloat16, torch.float64, torch.int8, torch.int16, torch.int64, torch.complex64):
        assert torch.equal(group.all_reduce(torch.tensor([3], dtype=dtype)), torch.tensor([12], dtype=dtype))
    for op in ("sum", "max", "min", "product"):
        assert group.all_reduce(torch.tensor([True, False]), op).tolist() == [True, False]
    assert group.all_reduce(torch.empty(0, 3)).shape == (0, 3)
    for dtype in (torch.uint8, torch.int16, torch.int64, torch.complex64):
        assert torch.equal(group.all_reduce(torch.tensor([3], dtype=dtype), "avg"), torch.tensor([3], dtype=dtype))
    assert group.all_reduce(torch.tensor([100, -3], dtype=torch.int8), "avg").tolist() == [-28, -3]
    with pytest.raises(ps.UnsupportedError, match=r"avg of torch.bool is not defined"):
        group.all_reduce(torch.tensor([True]), "avg")
    with pytest.raises(ps.InvalidArgumentError, match="op of all_reduce"):
        group.all_reduce(X, "median")


def test_gathers_copy(group: ps.GroupCoordinator) -> None:
    assert torch.equal(group.all_gather(X, 0), torch.cat([X] * SIZE, 0))
    assert torch.equal(group.all_gather(X), torch.cat([X] * SIZE, 1))
    assert torch.equal(group.all_gather(torch.tensor(3)), torch.tensor([3] * SIZE))
    assert all(torch.equal(x, X) for x in group.all_gather_to_list(X))
    assert len(group.all_gather_to_list(X)) == SIZE
    assert torch.equal(group.all_gatherv(X, 0, [2] * SIZE), torch.cat([X] * SIZE, 0))
    gathered = group.gather(X, RANK, 0)
    assert gathered is not None
    assert torch.equal(gathered, torch.cat([X] * SIZE, 0))
    assert group.gather(X, 0, 0) is None
    with pytest.raises(ps.UnsupportedError, match="all its ranks have tensors of this rank's shape"):
        group.all_gatherv(X, 0, [2, 2, 2, 3])


def test_scatter_and_all_to_all(group: ps.GroupCoordinator) -> None:
    assert torch.equal(group.scatter(X, RANK, 1), X[:, RANK : RANK + 1])
    rows = torch.arange(8.0).view(8, 1)
    assert torch.equal(group.all_to_all(rows), rows[4:6].repeat(SIZE, 1))
    assert torch.equal(group.all_to_all(X, 1, 0), X[:, 2:3].repeat(SIZE, 1))
    with pytest.raises(
        ps.UnsupportedError, match=r"each rank sends this rank 2 rows, as many as this rank sends itself, but .* has 1"
    ):
        group.all_to_all(rows, output_split_sizes=[1, 1, 2, 4], input_split_sizes=[2] * 4)


def test_objects(group: ps.GroupCoordinator) -> None:
    value = {"tensor": X, "text": "x" * 5000}
    assert group.broadcast_object(value, RANK) is value
    assert group.broadcast_tensor_dict(value, RANK) is value
    gathered = group.all_gather_object(value)
    assert gathered[RANK] is value
    assert len(gathered) == SIZE
    for other in gathered:
        assert torch.equal(other["tensor"], X)
        assert other["text"] == value["text"]
    assert group.all_sum(2.5) == 10.0
    assert group.broadcast_flag(True, RANK) is True
    assert group.broadcast_object_list([1, 2], RANK) == [1, 2]
    group.barrier()
    with pytest.raises(ps.MessageEncodeError):
        group.broadcast_object(object(), RANK)


def test_what_is_sent_is_lost(group: ps.GroupCoordinator) -> None:
    group.send(X, 0)
    group.send_object({"x": X}, 1)
    group.send_tensor_dict({"x": X})
    sending = group.isend_tensor_dict({"x": X}, 3)
    assert sending.is_completed()
    sending.wait()


REFUSED: dict[str, Callable[[ps.GroupCoordinator], Any]] = {
    "broadcast": lambda group: group.broadcast(X, 0),
    "broadcast_": lambda group: group.broadcast_(X.clone(), 0),
    "broadcast_object": lambda group: group.broadcast_object(None, 0),
    "broadcast_object_list": lambda group: group.broadcast_object_list([None], 0),
    "broadcast_tensor_dict": lambda group: group.broadcast_tensor_dict(None, 0),
    "broadcast with spec": lambda group: group.broadcast_tensor_dict(None, 0, spec=ps.TensorDictSpec.of({"x": X})),
    "broadcast_flag": lambda group: group.broadcast_flag(True, 0),
    "scatter": lambda group: group.scatter(None, 0, size=[2, 1], dtype=X.dtype),
    "scatter, told": lambda group: group.scatter(None, 0),
    "recv": lambda group: group.recv([2], torch.float32),
    "recv_object": lambda group: group.recv_object(0),
    "irecv_object": lambda group: group.irecv_object(),
    "recv_tensor_dict": lambda group: group.recv_tensor_dict(0),
    "irecv_tensor_dict": lambda group: group.irecv_tensor_dict(0),
    "recv with spec": lambda group: group.recv_tensor_dict(0, spec=ps.TensorDictSpec.of({"x": X})),
}


@pytest.mark.parametrize("call", list(REFUSED))
def test_what_only_a_peer_could_say_is_refused(group: ps.GroupCoordinator, call: str) -> None:
    peer = 1 if call in ("recv", "irecv_object") else 0
    for _ in range(2):
        with pytest.raises(ps.UnsupportedError) as raised:
            REFUSED[call](group)
        message = str(raised.value)
        assert f"from rank {peer} needs that rank, but group {group.unique_name!r}, rank 2 of 4" in message
        assert message.endswith("is simulated: only rank 2 exists")
    assert torch.equal(group.all_reduce(X), X * SIZE), "a refusal must not spoil the group"


@pytest.mark.parametrize("operation", [("isend", 1), 3, ("send", torch.ones(1), 1), ("isend", torch.ones(1), SIZE)])
def test_a_transfer_of_another_form_is_refused(group: ps.GroupCoordinator, operation: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"of batch_isend_irecv .* must be"):
        group.batch_isend_irecv([operation])


def test_there_is_no_process_group(group: ps.GroupCoordinator) -> None:
    for get in (lambda: group.device_group, lambda: group.cpu_group, group.as_process_group):
        with pytest.raises(ps.GroupNotInitializedError, match="is simulated and has no process group"):
            get()
    with pytest.raises(ps.GroupNotInitializedError, match="is simulated and has no process group"):
        ps.in_the_same_node_as(group)
    with pytest.raises(ps.GroupNotInitializedError, match=r"simulated world can't be divided.*simulate"):
        ps.create_parallel_groups(group, {"tp": 2, "pp": 1, "dp": None}, "tp-dp-pp")
    with (
        ps.simulate(0, 4, 2, 2).use(),
        pytest.raises(ps.GroupNotInitializedError, match="the current world is simulated"),
    ):
        ps.init_model_parallel_group([[0, 1], [2, 3]], 0, "gloo")
    assert "simulated" in group.explain()


def test_sub_groups_renumber(group: ps.GroupCoordinator) -> None:
    sub = group.make_sub_group([0, 2, 3])
    assert sub is not None
    assert sub.ranks == [1, 5, 7]
    assert (sub.rank, sub.rank_in_group, sub.world_size) == (5, 1, 3)
    assert torch.equal(sub.all_reduce(X), X * 3)
    assert sub.unique_name != group.unique_name
    inner = sub.make_sub_group([1, 2])
    assert inner is not None
    assert inner.ranks == [5, 7]
    assert inner.is_first_rank
    alone = sub.make_sub_group([1])
    assert alone is not None
    assert alone.world_size == 1
    assert alone.all_reduce(X) is X
    assert group.make_sub_group([0, 1]) is None
    for wrong in ([], [2, 2], [2, 4], [2, -1], [2, 5]):
        with pytest.raises(ps.InvalidArgumentError):
            group.make_sub_group(wrong)


def test_traffic_is_counted(group: ps.GroupCoordinator) -> None:
    group.all_reduce(X)
    group.all_reduce(X)
    group.send(X)
    assert {name: (t.calls, t.bytes) for name, t in group.traffic().items()} == {
        "all_reduce": (2, 2 * X.nbytes),
        "send": (1, X.nbytes),
    }


G = torch.tensor([[1.0, 2.0, -3.0, 4.0], [-5.0, 6.0, 7.0, 0.5]])
GRADIENTS: dict[str, tuple[Callable[[ps.GroupCoordinator, Tensor], Tensor], Tensor, Tensor]] = {
    "all_reduce": (lambda group, x: group.all_reduce(x), G, G * SIZE),
    "all_reduce avg": (lambda group, x: group.all_reduce(x, "avg"), G, G),
    "all_gather 0": (lambda group, x: group.all_gather(x, 0), torch.cat([G * n for n in (1, 2, 3, 4)]), 3 * G * SIZE),
    "all_gather 1": (lambda group, x: group.all_gather(x), torch.cat([G * n for n in (1, 2, 3, 4)], 1), 3 * G * SIZE),
    "all_gatherv": (lambda group, x: group.all_gatherv(x, 0, [2] * 4), torch.cat([G, -G, 5 * G, G]), 5 * G * SIZE),
    "reduce_scatter": (lambda group, x: group.reduce_scatter(x), G[:, :1], G[:, :1].expand(2, 4)),
    "reduce_scatter avg": (lambda group, x: group.reduce_scatter(x, 1, "avg"), G[:, :1], G[:, :1].expand(2, 4) / SIZE),
    "reduce_scatterv": (lambda group, x: group.reduce_scatterv(x, 1, [1] * 4), G[:, :1], G[:, :1].expand(2, 4)),
    "reduce_scatterv avg": (
        lambda group, x: group.reduce_scatterv(x, 1, [1] * 4, "avg"),
        G[:, :1],
        G[:, :1].expand(2, 4) / SIZE,
    ),
    "all_to_all": (
        lambda group, x: group.all_to_all(x, 1, 0),
        torch.cat([G[:, :1] * n for n in (1, 2, 3, 4)]),
        3 * G[:, :1].expand(2, 4),
    ),
    "broadcast": (lambda group, x: group.broadcast(x, RANK), G, G * SIZE),
    "copy": (lambda group, x: ps.copy_to_tensor_model_parallel_region(x, group), G, G * SIZE),
    "reduce": (lambda group, x: ps.reduce_from_tensor_model_parallel_region(x, group), G, G),
    "scatter": (lambda group, x: ps.scatter_to_tensor_model_parallel_region(x, group), G[:, :1], G[:, :1].expand(2, 4)),
    "gather": (
        lambda group, x: ps.gather_from_tensor_model_parallel_region(x, group),
        torch.cat([G * n for n in (1, 2, 3, 4)], 1),
        3 * G,
    ),
    "gather of parts": (
        lambda group, x: ps.gather_from_sequence_parallel_region(x, group=group),
        torch.cat([G * n for n in (1, 2, 3, 4)]),
        3 * G * SIZE,
    ),
    "reduce_scatter region": (
        lambda group, x: ps.reduce_scatter_last_dim_to_tensor_parallel_region(x, group),
        G[:, :1],
        G[:, :1].expand(2, 4),
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(group: ps.GroupCoordinator, name: str) -> None:
    call, grad, expected = GRADIENTS[name]
    x = X.clone().requires_grad_()
    result = call(group, x)
    result.backward(grad)
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)
