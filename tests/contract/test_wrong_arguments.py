"""A wrong value for a single argument raises UsageError at once, or the call works. Both ranks pass the same value."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import parallel_state as ps
from device_communicators.base.errors import RemoteError, UsageError

AT_ONCE_S = 1.0


class Odd:
    pass


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "an object": Odd, "a class": lambda: Odd, "a function": lambda: len, "text": lambda: "x",
    "bytes": lambda: b"x", "-1": lambda: -1, "2^63": lambda: 1 << 63, "-2^70": lambda: -(1 << 70), "1.5": lambda: 1.5,
    "nan": lambda: float("nan"), "True": lambda: True, "[]": list, "{}": dict, "[None]": lambda: [None],
    "['x']": lambda: ["x"], "[-1]": lambda: [-1], "[2^63]": lambda: [1 << 63], "[2^62, 4]": lambda: [1 << 62, 4],
    "{'x': object}": lambda: {"x": Odd()}, "{1: 2}": lambda: {1: 2}, "float32": lambda: torch.float32,
    "quint8": lambda: torch.quint8, "a tensor": lambda: torch.ones(3), "an empty tensor": lambda: torch.ones(0),
    "a meta tensor": lambda: torch.ones(2, device="meta"), "a sparse tensor": lambda: torch.ones(2).to_sparse(),
    "an array": lambda: np.ones(2), "numpy's 1": lambda: np.int64(1), "a generator": lambda: (x for x in (1, 2)),
}  # fmt: skip


ONLY_AT_THE_SOURCE = {
    "scatter": ("x",), "broadcast_tensor_dict": ("out",), "broadcast_object_list": ("obj_list",),
    "broadcast_tensor_dict, spec": ("tensor_dict",),
}  # fmt: skip
TOLD_TO_THE_RECEIVER = {
    "send_object": ("obj",), "isend_object": ("obj",),
    "send_tensor_dict": ("tensor_dict",), "isend_tensor_dict": ("tensor_dict",),
}  # fmt: skip


class Call(NamedTuple):
    function: Callable[..., Any]
    arguments: dict[str, Any]
    before: Callable[[], Any] = lambda: None
    """Sends what a receive needs."""
    after: Callable[[], Any] = lambda: None
    """Receives that if the receive failed."""
    taken: Callable[[dict[str, Any]], Any] = lambda _: None
    """Receives what a send with these arguments sent."""


def _calls(group: ps.GroupCoordinator) -> dict[str, Call]:
    peer = 1 - group.rank_in_group
    x, rows, even = torch.ones(4), torch.ones(4, 6), [2, 2]
    spec = ps.TensorDictSpec.of({"x": x})
    norm = {"x": rows, "residual": torch.zeros(4, 6), "weight": torch.ones(6), "eps": 1e-6}
    send_tensor = functools.partial(group.send, x, peer)
    recv_tensor = functools.partial(group.recv, [4], torch.float32, peer)
    send_object = functools.partial(group.send_object, {"a": 1}, peer)
    recv_object = functools.partial(group.recv_object, peer)
    send_dict = functools.partial(group.send_tensor_dict, {"x": x}, peer)
    recv_dict = functools.partial(group.recv_tensor_dict, peer)
    send_with_spec = functools.partial(group.send_tensor_dict, {"x": x}, peer, spec=spec)
    recv_with_spec = functools.partial(group.recv_tensor_dict, peer, spec=spec)
    nothing = lambda: None  # noqa: E731
    take_tensor = lambda given: group.recv(list(given["x"].shape), given["x"].dtype, peer)  # noqa: E731
    take_object, take_dict = (lambda _: recv_object()), (lambda _: recv_dict())
    sharing = {"all_gather_group": None, "all_gather_tensors": None}
    return {
        "all_reduce": Call(group.all_reduce, {"x": x, "op": "sum"}),
        "all_reduce_": Call(group.all_reduce_, {"x": x.clone(), "op": "sum"}),
        "all_reduce_async": Call(lambda **given: group.all_reduce_async(**given).wait(), {"x": x, "op": "sum"}),
        "all_gather": Call(group.all_gather, {"x": x, "dim": 0, "out": torch.empty(8)}),
        "all_gather_async": Call(lambda **given: group.all_gather_async(**given).wait(), {"x": x, "dim": 0}),
        "all_gather_into_tensor": Call(group.all_gather_into_tensor, {"out": torch.empty(8), "x": x}),
        "all_gather_to_list": Call(group.all_gather_to_list, {"x": x}),
        "all_gatherv": Call(group.all_gatherv, {"x": torch.ones(2), "dim": 0, "sizes": even}),
        "reduce_scatter": Call(group.reduce_scatter, {"x": x, "dim": 0, "op": "sum", "out": torch.empty(2)}),
        "reduce_scatter_async": Call(
            lambda **given: group.reduce_scatter_async(**given).wait(), {"x": x, "dim": 0, "op": "sum"}
        ),
        "reduce_scatter_tensor": Call(group.reduce_scatter_tensor, {"out": torch.empty(2), "x": x, "op": "sum"}),
        "reduce_scatterv": Call(group.reduce_scatterv, {"x": x, "dim": 0, "sizes": even, "op": "sum"}),
        "gather": Call(group.gather, {"x": x, "dst": 0, "dim": 0}),
        "scatter": Call(group.scatter, {"x": x, "src": 0, "dim": 0, "size": [2], "dtype": torch.float32}),
        "all_to_all": Call(
            group.all_to_all,
            {"x": x, "scatter_dim": 0, "gather_dim": 0, "output_split_sizes": even, "input_split_sizes": even},
        ),
        "all_to_all_single": Call(
            group.all_to_all_single,
            {"out": torch.empty(4), "x": x, "output_split_sizes": even, "input_split_sizes": even},
        ),
        "broadcast": Call(group.broadcast, {"x": x, "src": 0}),
        "broadcast_": Call(group.broadcast_, {"x": x.clone(), "src": 0}),
        "broadcast_async": Call(lambda **given: group.broadcast_async(**given).wait(), {"x": x.clone(), "src": 0}),
        "broadcast_flag": Call(group.broadcast_flag, {"flag": True, "src": 0}),
        "all_sum": Call(group.all_sum, {"value": 1}),
        "split": Call(group.split, {"x": x, "dim": 0}),
        "empty": Call(group.empty, {"size": [2], "dtype": torch.float32, "device": torch.device("cpu")}),
        "window": Call(lambda **given: group.window(**given).deregister(), {"size": [2], "dtype": torch.float32}),
        "within": Call(lambda **given: group.within(**given).__enter__(), {"timeout": 60.0}),
        "all_gather_object": Call(group.all_gather_object, {"obj": 1}),
        "broadcast_object": Call(group.broadcast_object, {"obj": 1, "src": 0}),
        "broadcast_object_list": Call(group.broadcast_object_list, {"obj_list": [1], "src": 0}),
        "broadcast_tensor_dict": Call(
            group.broadcast_tensor_dict, {"tensor_dict": {"x": x}, "src": 0, "out": None, "views": False}
        ),
        "broadcast_tensor_dict, spec": Call(
            group.broadcast_tensor_dict, {"tensor_dict": {"x": x}, "src": 0, "spec": spec}
        ),
        "make_sub_group": Call(group.make_sub_group, {"ranks": [0, 1], "name": "sub"}),
        "batch_isend_irecv": Call(group.batch_isend_irecv, {"operations": []}),
        "graph_capture": Call(group.graph_capture, {"context": None, "peers": ()}),
        "all_reduce_add_rms_norm": Call(group.all_reduce_add_rms_norm, norm),
        "all_reduce_add_rms_norm_static_fp8_quant": Call(
            group.all_reduce_add_rms_norm_static_fp8_quant, {**norm, "scale": torch.ones(1)}
        ),
        "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant": Call(
            group.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant, norm
        ),
        "send": Call(group.send, {"x": x, "dst": peer}, nothing, nothing, take_tensor),
        "send_object": Call(group.send_object, {"obj": 1, "dst": peer}, nothing, nothing, take_object),
        "send_tensor_dict": Call(
            group.send_tensor_dict,
            {"tensor_dict": {"x": x}, "dst": peer, **sharing, "spec": None}, nothing, nothing, take_dict,
        ),
        "isend": Call(
            lambda **given: group.isend(**given).wait(), {"x": x, "dst": peer}, nothing, nothing, take_tensor
        ),
        "isend_object": Call(
            lambda **given: group.isend_object(**given).wait(),
            {"obj": 1, "dst": peer}, nothing, nothing, take_object,
        ),
        "isend_tensor_dict": Call(
            lambda **given: group.isend_tensor_dict(**given).wait(),
            {"tensor_dict": {"x": x}, "dst": peer, **sharing}, nothing, nothing, take_dict,
        ),
        "recv": Call(
            group.recv,
            {"size": [4], "dtype": torch.float32, "src": peer, "device": torch.device("cpu")}, send_tensor, recv_tensor,
        ),
        "irecv": Call(
            lambda **given: group.irecv(**given).wait(),
            {"size": [4], "dtype": torch.float32, "src": peer}, send_tensor, recv_tensor,
        ),
        "recv_object": Call(group.recv_object, {"src": peer}, send_object, recv_object),
        "irecv_object": Call(
            lambda **given: group.irecv_object(**given).wait(), {"src": peer}, send_object, recv_object
        ),
        "recv_tensor_dict": Call(
            group.recv_tensor_dict, {"src": peer, **sharing, "views": False}, send_dict, recv_dict
        ),
        "recv_tensor_dict, spec": Call(
            group.recv_tensor_dict, {"src": peer, **sharing, "spec": spec}, send_with_spec, recv_with_spec
        ),
        "irecv_tensor_dict": Call(
            lambda **given: group.irecv_tensor_dict(**given).wait(),
            {"src": peer, **sharing, "views": False}, send_dict, recv_dict,
        ),
    }  # fmt: skip


def _legal(name: str, parameter: str, value: str) -> bool:
    if parameter in ONLY_AT_THE_SOURCE.get(name, ()):
        return True
    return (name, parameter, value) in {
        ("scatter", "size", "[]"), ("scatter", "dtype", "quint8"),
        ("recv", "size", "[]"), ("irecv", "size", "[]"), ("recv", "dtype", "quint8"),
        ("irecv", "dtype", "quint8"), ("recv_tensor_dict, spec", "spec", "None"),
    }  # fmt: skip


def _tried(part: int, parts: int) -> Iterator[tuple[str, str, str]]:
    names = list(_calls(ps.simulated_group([0, 1], 0)))
    for name in names[part::parts]:
        for parameter in _calls(ps.simulated_group([0, 1], 0))[name].arguments:
            yield from ((name, parameter, value) for value in WRONG if not _legal(name, parameter, value))


def _outcome(group: ps.GroupCoordinator, name: str, parameter: str, value: str) -> str:
    call = _calls(group)[name]
    call.before()
    started = time.monotonic()
    try:
        given = {**call.arguments, parameter: WRONG[value]()}
        call.function(**given)
        call.taken(given)
        found = ""
    except UsageError:
        if parameter in TOLD_TO_THE_RECEIVER.get(name, ()):
            with pytest.raises(RemoteError):
                group.recv_object(1 - group.rank_in_group)
        call.after()
        found = ""
    except RemoteError:
        found = ""
    except Exception as error:
        found = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        call.after()
    took_s = time.monotonic() - started
    return found or (f"after {took_s:.1f} s" if took_s > AT_ONCE_S else "")


def _of_part(part: int, parts: int) -> tuple[int, list[str]]:
    wrong, tried = [], 0
    group = ps.get_tp_group()
    for name, parameter, value in _tried(part, parts):
        tried += 1
        outcome = _outcome(group, name, parameter, value)
        if outcome:
            wrong.append(f"{name}({parameter}={value}): {outcome}")
        if outcome.startswith(("Collective", "PeerDied", "GroupFailed", "Communication")):
            break
    if not wrong:
        assert group.all_sum(1) == 2
    return tried, wrong


PARTS = 6


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_wrong_argument_is_a_usage_error_at_once(pools: Any, part: int) -> None:
    for rank, (tried, wrong) in enumerate(pools(2).run(_of_part, part, PARTS, tp=2, timeout_s=60.0)):
        assert tried > 100
        assert not wrong, "\n".join([f"rank {rank}, {len(wrong)} of {tried}", *wrong])


def test_every_public_call_is_tried() -> None:
    names = {name.partition(",")[0] for name in _calls(ps.simulated_group([0, 1], 0))}
    methods = {
        name
        for name, found in inspect.getmembers(ps.GroupCoordinator, inspect.isfunction)
        if not name.startswith("_") and len(inspect.signature(found).parameters) > 1
    }
    assert methods - {"from_process_group"} <= names
