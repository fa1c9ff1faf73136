from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators import Traffic
from device_communicators.cpu import native
from tests.contract.test_objects import DEADLINE_S, FRAME_BYTES, Pools, check_usable, own_group, same
from tests.contract.test_tensor_dicts import counted
from tests.helpers.doors import call_op
from tests.internals import raw_messages


def past_python() -> None:
    torch._dynamo.reset()
    fit: dict[str, Any] = {"x": torch.ones(2, 3), "none": None, "n": 1, "empty": torch.ones(0), "y": torch.arange(3)}
    spec = ps.TensorDictSpec.of(fit)
    with own_group() as group, pytest.MonkeyPatch.context() as patch:
        rank = group.rank_in_group

        def exchange(x: Tensor) -> tuple[Tensor, Tensor]:
            values = {**fit, "x": x}
            if rank == 0:
                group.send_tensor_dict(values, 1, spec=spec)
                values = group.broadcast_tensor_dict(values, 0, spec=spec)
                return x, values["x"] * 2
            received = group.recv_tensor_dict(0, spec=spec)
            return received["x"], group.broadcast_tensor_dict(src=0, spec=spec)["x"] * 2

        def exchange_by_ops(x: Tensor) -> list[Tensor]:
            tensors = [x, torch.full((3,), 7)] if rank == 0 else [torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)]
            call_op(group, "recv_list_" if rank else "send_list", tensors, spec.digest, 1 - rank)
            call_op(group, "broadcast_list_" if rank else "broadcast_list", tensors, spec.digest, 0)
            if rank:
                assert all(each._version == 2 for each in tensors)
            return tensors

        def exchange_objects(number: int) -> None:
            """Dicts without a spec run in C++ from the third on, when their form is known."""
            value = {"texts": ["a", b"b", "long" * number], "n": [number, None, 1.5, {"k": True}]}
            batch = {**fit, "x": fit["x"] + number}
            for method, sent in (("object", value), ("tensor_dict", batch)):
                send, receive = getattr(group, f"send_{method}"), getattr(group, f"recv_{method}")
                broadcast = getattr(group, f"broadcast_{method}")
                if rank == 0:
                    send(sent, 1)
                    assert broadcast(sent, 0) is sent
                else:
                    assert same(receive(0), sent)
                    assert same(broadcast(None, 0), sent)

        exchange(fit["x"])
        for number in range(4):
            exchange_objects(number)
            group.broadcast_object([torch.ones(number)] if rank == 0 else None)
            numbers = [each.sequence for each in group.route.operations() if each.peer < 0]
            assert numbers == list(range(1, 2 + 3 * (number + 1))), numbers
        raw_messages.without_queue_calls(patch)
        with counted(group) as carried:
            for number in range(4, 10):
                exchange_objects(1 << number)
                ps.get_world_group().barrier()
        kind = "recv" if rank else "send"
        assert {name: each.calls for name, each in carried.items()} == {f"{kind}_message": 12, "broadcast_message": 12}
        calls = {f"{kind}_object", f"{kind}_tensor_dict", "broadcast_object(rank 0)", "broadcast_tensor_dict(rank 0)"}
        assert {each.call for each in group.route.operations()[-24:]} == calls
        raw_messages.without_list_calls(patch)
        compiled = torch.compile(exchange, fullgraph=True, backend="aot_eager")
        with counted(group) as carried:
            for seed in range(100):
                x = fit["x"] + seed
                ps.get_world_group().barrier()  # otherwise the source runs ahead until the ring is full
                assert same((compiled if seed % 5 == 0 else exchange)(x), (x, x * 2))
            assert same(exchange_by_ops(x), [x, torch.full((3,), 7)])
        method, other = ("recv_list", 0) if rank else ("send_list", 1)
        assert carried == {name: Traffic(101, 101 * (FRAME_BYTES + 48)) for name in (method, "broadcast_list")}
        recorded = group.route.operations()
        assert {(each.name, each.peer) for each in recorded} == {(method, other), ("broadcast_list", -1)}
        assert all(each.ended_s is not None and each.ended_s >= each.started_s for each in recorded)
        assert "broadcast_tensor_dict with a spec(rank 0)" in {each.call for each in recorded}
        # A dict of another form must not be sent by this spec's C++ path.
        others: list[dict[str, Any]] = [
            {**fit, "n": True}, {**fit, "x": torch.ones(3, 2)}, {**fit, "x": torch.ones(2, 3).int()},
            {**fit, "x": torch.ones(6)}, {**fit, "x": torch.ones(3, 2).t()}, {**fit, "x": 1},
            {**fit, "x": torch.ones(2, 3, device="meta")}, {**fit, "more": 1}, {"x": fit["x"]},
            {**fit, "empty": torch.ones(0, 1)}, {**fit, "x": torch._lazy_clone(fit["x"])},
            {**{key: value for key, value in fit.items() if key != "none"}, "other": None},
            {**{key: value for key, value in fit.items() if key != "y"}, "other": fit["y"]},
        ]  # fmt: skip
        has_left = raw_messages.sends_past_python(group, spec)
        assert has_left is not None
        for values in others if rank == 0 else []:
            assert not has_left(values), values
        assert raw_messages.sends_past_python(group, ps.TensorDictSpec.of({"n": 1, "empty": torch.ones(0)})) is None
        patch.undo()
        check_usable(group)


def test_messages_go_past_python(pools: Pools) -> None:
    if not native.load().has_ops:
        pytest.skip("the library without ops can't read tensors")
    pools(2).run(past_python, tp=1, timeout_s=DEADLINE_S)
