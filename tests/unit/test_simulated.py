from __future__ import annotations

import copy
import dataclasses
import pydoc
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    with pytest.raises(ps.LayoutError, match="rank 0 of the world must be the first rank of each of its groups"):
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
    with pytest.raises(ps.UnsupportedError, match="all ranks have tensors of this rank's shape"):
        group.all_gatherv(X, 0, [2, 2, 2, 3])


def test_scatter_and_all_to_all(group: ps.GroupCoordinator) -> None:
    assert torch.equal(group.scatter(X, RANK, 1), X[:, RANK : RANK + 1])
    rows = torch.arange(8.0).view(8, 1)
    assert torch.equal(group.all_to_all(rows), rows[4:6].repeat(SIZE, 1))
    assert torch.equal(group.all_to_all(X, 1, 0), X[:, 2:3].repeat(SIZE, 1))
    with pytest.raises(
        ps.UnsupportedError,
        match=r"this one, which sends itself 2 rows. So all output_split_sizes must be 2, but one is 1",
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
    with pytest.raises(ps.GroupNotInitializedError, match=r"made by parallel_state.simulate"):
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


def test_close(group: ps.GroupCoordinator) -> None:
    groups = ps.simulate(3, 8, 2, 2)
    groups.close()
    groups.close()
    for closed in (groups.tp, groups.pp, groups.dp):
        with pytest.raises(ps.GroupDestroyedError):
            closed.all_reduce(X)
    assert torch.equal(groups.world.all_reduce(X), X * 8)
    groups.world.destroy()
    with pytest.raises(ps.GroupDestroyedError):
        groups.world.barrier()


SHAPES: dict[str, tuple[Callable[[ps.GroupCoordinator, Tensor], Any], tuple[int, ...]]] = {
    "all_reduce": (lambda group, x: group.all_reduce(x), (8, 12)),
    "all_reduce_": (lambda group, x: group.all_reduce_(x), (8, 12)),
    "all_gather 0": (lambda group, x: group.all_gather(x, 0), (32, 12)),
    "all_gather -1": (lambda group, x: group.all_gather(x), (8, 48)),
    "all_gather 0-d": (lambda group, x: group.all_gather(x[0, 0]), (4,)),
    "all_gather_to_list": (lambda group, x: group.all_gather_to_list(x)[3], (8, 12)),
    "all_gatherv": (lambda group, x: group.all_gatherv(x, 0, [1, 2, 8, 0]), (11, 12)),
    "reduce_scatter 0": (lambda group, x: group.reduce_scatter(x, 0), (2, 12)),
    "reduce_scatter -1": (lambda group, x: group.reduce_scatter(x), (8, 3)),
    "reduce_scatterv": (lambda group, x: group.reduce_scatterv(x, 0, [1, 1, 5, 1]), (5, 12)),
    "gather": (lambda group, x: group.gather(x, RANK, 0), (32, 12)),
    "scatter": (lambda group, x: group.scatter(x, RANK, 1), (8, 3)),
    "all_to_all": (lambda group, x: group.all_to_all(x), (8, 12)),
    "all_to_all 0 1": (lambda group, x: group.all_to_all(x, 0, 1), (2, 48)),
    "all_to_all 1 0": (lambda group, x: group.all_to_all(x, 1, 0), (32, 3)),
    "all_to_all splits": (
        lambda group, x: group.all_to_all(x, output_split_sizes=[1, 2, 3, 4], input_split_sizes=[5, 1, 1, 1]),
        (10, 12),
    ),
    "broadcast": (lambda group, x: group.broadcast(x, 0), (8, 12)),
    "broadcast_": (lambda group, x: group.broadcast_(x, 0), (8, 12)),
    "recv": (lambda group, x: group.recv([5, 2], x.dtype), (5, 2)),
    "recv_tensor_dict": (
        lambda group, x: group.recv_tensor_dict(spec=ps.TensorDictSpec.of({"x": x[:3]}))["x"],
        (3, 12),
    ),
}


@pytest.mark.parametrize("call", list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_shapes_on_meta_tensors(call: str, dtype: torch.dtype) -> None:
    group = ps.simulated_group([1, 3, 5, 7], 5, device="meta")
    function, shape = SHAPES[call]
    result = function(group, torch.empty(8, 12, dtype=dtype, device="meta"))
    assert result.shape == shape
    assert result.dtype == dtype
    assert result.device.type == "meta"


@pytest.mark.parametrize("call", [name for name in SHAPES if name.split()[0] in ("all_reduce", "all_gather")])
def test_shapes_on_meta_and_real_tensors_are_equal(group: ps.GroupCoordinator, call: str) -> None:
    function, shape = SHAPES[call]
    assert function(group, torch.ones(8, 12)).shape == function(group, torch.ones(8, 12, device="meta")).shape == shape


def test_wrong_shapes_are_refused_on_meta_tensors_too(group: ps.GroupCoordinator) -> None:
    x = torch.empty(7, 12, device="meta")
    for call in (
        lambda: group.reduce_scatter(x, 0),
        lambda: group.all_to_all(x),
        lambda: group.all_gather(x, 2),
        lambda: group.reduce_scatterv(x, 0, [1, 2, 3]),
    ):
        with pytest.raises(ps.InvalidArgumentError):
            call()


class Stage(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, layers: int, device: str) -> None:
        super().__init__()
        tp, pp = ps.get_tp_group(), ps.get_pp_group()
        here = layers // pp.world_size
        self.embedding = nn.Embedding(vocabulary, hidden, device=device) if ps.is_pipeline_first_stage() else None
        self.columns = nn.ModuleList(
            nn.Linear(hidden, 4 * hidden // tp.world_size, bias=False, device=device) for _ in range(here)
        )
        self.rows = nn.ModuleList(
            nn.Linear(4 * hidden // tp.world_size, hidden, bias=False, device=device) for _ in range(here)
        )
        self.head = (
            nn.Linear(hidden, vocabulary // tp.world_size, bias=False, device=device)
            if ps.is_pipeline_last_stage()
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for column, row in zip(self.columns, self.rows, strict=True):
            inside = ps.copy_to_tensor_model_parallel_region(x)
            x = x + ps.reduce_from_tensor_model_parallel_region(row(torch.relu(column(inside))))
        if self.head is None:
            ps.get_pp_group().send_tensor_dict({"hidden": x}, spec=ps.TensorDictSpec.of({"hidden": x}))
            return x
        return ps.gather_from_tensor_model_parallel_region(self.head(x))


@pytest.mark.parametrize("rank", [0, 5, 14, 31])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_model_code_of_any_rank(rank: int, device: str) -> None:
    groups = ps.simulate(rank, 32, 4, 4, device=device)
    tokens = torch.zeros(2, 7, dtype=torch.int64, device=device)
    hidden = torch.zeros(2, 7, 16, device=device, requires_grad=True)
    with groups.use():
        stage = Stage(vocabulary=64, hidden=16, layers=8, device=device)
        out = stage(tokens if ps.is_pipeline_first_stage() else hidden)
        out.sum().backward()
    assert len(stage.columns) == 2
    assert (stage.embedding is not None) == (rank < 8)
    assert (stage.head is not None) == (rank >= 24)
    assert stage.columns[0].weight.shape == (16, 16)
    assert out.shape == ((2, 7, 64) if rank >= 24 else (2, 7, 16))
    for parameter in stage.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    if device == "cpu":
        assert groups.tp.traffic()["all_reduce"].calls == 4


def test_helpers_take_a_simulated_world_for_one_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    states = torch.get_rng_state(), random.getstate()
    try:
        with ps.simulate(6, 8, 2, 2).use():
            assert ps.read_file_dist(path).read() == b"content"
            with ps.master_first(), ps.local_master_first():
                pass
            assert ps.set_random_seed(3) == 1003
            assert not ps.is_global_first_rank()
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])


@pytest.mark.parametrize("end", ["next", "prev", "first", "last"])
def test_names_that_mean_two_things_are_gone(end: str) -> None:
    """On [0, 2, 4, 6] the next rank's global rank, 2, is also another rank's index in the group."""
    group = ps.simulated_group([0, 2, 4, 6], 0)
    old = f"{end}_rank"
    for touch in (lambda: getattr(group, old), lambda: setattr(group, old, 1)):
        with pytest.raises(ps.RenamedError, match=rf"{end}_rank_in_group.*{end}_global_rank") as raised:
            touch()
        assert isinstance(raised.value, AttributeError)
        assert isinstance(raised.value, ps.UsageError)
    assert not hasattr(group, old)
    assert getattr(group, old, 7) == 7
    assert old not in dir(group)
    assert {f"{end}_rank_in_group", f"{end}_global_rank", "ranks", "all_reduce"} <= set(dir(group))
    assert old not in vars(copy.copy(group))
    assert f"{end}_global_rank" in pydoc.plain(pydoc.render_doc(type(group)))


def check_outside() -> None:
    assert ps.try_get_current_groups() is None
    assert ps.try_get_tp_group() is ps.try_get_pp_group() is ps.try_get_dp_group() is None
    assert ps.try_get_world_group() is None
    assert not ps.model_parallel_is_initialized()
    with pytest.raises(ps.GroupNotInitializedError, match="uses no parallel groups"):
        ps.current_groups()
    for get in (ps.get_tp_group, ps.get_pp_group, ps.get_dp_group, ps.get_world_group, ps.get_parallel_groups):
        with pytest.raises(ps.GroupNotInitializedError):
            get()


def check_inside(groups: ps.ParallelGroups) -> None:
    assert ps.current_groups() is ps.try_get_current_groups() is ps.get_parallel_groups() is groups
    assert ps.get_tp_group() is ps.try_get_tp_group() is groups.tp
    assert ps.get_pp_group() is groups.pp
    assert ps.get_dp_group() is groups.dp
    assert ps.get_world_group() is groups.world
    assert ps.model_parallel_is_initialized()


def test_use_nests() -> None:
    outer, inner = ps.simulate(1, 4, 2, 2), ps.simulate(5, 8, 8)
    check_outside()
    with outer.use() as entered:
        assert entered is outer
        check_inside(outer)
        with inner.use():
            check_inside(inner)
            with outer.use():
                check_inside(outer)
            check_inside(inner)
        check_inside(outer)
        with pytest.raises(KeyError), inner.use():
            raise KeyError
        check_inside(outer)
    check_outside()


def test_each_thread_has_its_own() -> None:
    sets = [ps.simulate(1, 4, 2, 2), ps.simulate(5, 8, 8), None]
    meeting = threading.Barrier(len(sets) + 1, timeout=DEADLINE_S)
    errors: list[BaseException] = []
    results: dict[int, float] = {}

    def run(index: int, groups: ps.ParallelGroups | None) -> None:
        try:
            check_outside()
            meeting.wait()
            if groups is None:
                for _ in range(3):
                    meeting.wait()
                    check_outside()
                return
            with groups.use():
                meeting.wait()
                for _ in range(50):
                    check_inside(groups)
                    results[index] = ps.tensor_model_parallel_all_reduce(torch.ones(())).item()
                meeting.wait()
                check_inside(groups)
            meeting.wait()
            check_outside()
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(sets)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            meeting.wait()
            check_outside()
    except threading.BrokenBarrierError:
        pass
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    assert results == {0: 2.0, 1: 8.0}


def test_groups_outlive_the_thread_that_made_them() -> None:
    made: list[ps.ParallelGroups] = []
    thread = threading.Thread(target=lambda: made.append(ps.simulate(1, 4, 2, 2)), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    with made[0].use():
        check_inside(made[0])
        assert torch.equal(ps.tensor_model_parallel_all_reduce(X), X * 2)


def test_layers_of_stages() -> None:
    """As in vLLM, the last stage, with the output head, gets no extra layer."""
    assert [ps.get_pp_indices(12, stage, 4) for stage in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert [ps.get_pp_indices(14, stage, 4) for stage in range(4)] == [(0, 3), (3, 7), (7, 11), (11, 14)]
    assert ps.get_pp_indices(5, 0, 1) == (0, 5)
    with pytest.raises(ps.InvalidArgumentError, match="3, 3 and 12"):
        ps.get_pp_indices(12, 3, 3)
    assert ps.divide(12, 4) == 3
    with pytest.raises(ps.InvalidArgumentError, match="13 must be divisible by 4"):
        ps.divide(13, 4)
    pieces = ps.split_tensor_along_last_dim(torch.arange(8.0).view(2, 4), 2, contiguous_split_chunks=True)
    assert [piece.tolist() for piece in pieces] == [[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]]]
    assert all(piece.is_contiguous() for piece in pieces)


def test_torchs_reduce_operations_are_taken(group: ps.GroupCoordinator) -> None:
    x = torch.ones(8)
    for theirs, ours in (("SUM", "sum"), ("AVG", "avg"), ("MAX", "max"), ("MIN", "min"), ("PRODUCT", "product")):
        operation = getattr(dist.ReduceOp, theirs)
        for op in (operation, dist.ReduceOp(operation)):
            assert torch.equal(group.all_reduce(x, op), group.all_reduce(x, ours))
            assert torch.equal(group.all_reduce_(x.clone(), op), group.all_reduce_(x.clone(), ours))
            assert torch.equal(group.all_reduce_async(x, op).wait(), group.all_reduce(x, ours))
            for call in (group.reduce_scatter, lambda *args: group.reduce_scatter_async(*args).wait()):
                assert torch.equal(call(x, 0, op), call(x, 0, ours))
            assert torch.equal(group.reduce_scatterv(x, 0, [2] * 4, op), group.reduce_scatterv(x, 0, [2] * 4, ours))
    compiled = torch.compile(lambda x: group.all_reduce(x, dist.ReduceOp.MAX), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), x)
    for wrong in (dist.ReduceOp.BXOR, "SUM", 0, None):
        with pytest.raises(ps.InvalidArgumentError, match="or torch's ReduceOp of that name, but is"):
            group.all_reduce(x, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "before"),
    [
        (ps.initialize_model_parallel, ()),
        (ps.ensure_model_parallel_initialized, ()),
        (ps.simulate, (0, 8)),
        (ps.reinitialize, ([0],)),
    ],
)
def test_sizes_by_position_behind_the_first_two_are_refused_with_what_each_incumbent_means(
    function: Callable[..., object], before: tuple[object, ...]
) -> None:
    """Megatron's third argument is the virtual pipeline size, vLLM's the prefill context size."""
    for sizes in ((2, 2, 2), (2, 2, None), (2, 2, 3, 4, "nccl")):
        with pytest.raises(InvalidArgumentError, match="by position") as caught:
            function(*before, *sizes)
        message = str(caught.value)
        assert message.startswith(f"{function.__name__}() takes")
        assert f"virtual_pipeline_model_parallel_size={sizes[2]}," in message
        assert f"prefill_context_model_parallel_size={sizes[2]}" in message
        assert ("decode_context_model_parallel_size=4" in message) == (len(sizes) > 3)
        assert f"data_parallel_size={sizes[2]}" in message
