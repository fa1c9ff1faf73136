from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import parallel_state as ps

numpy = pytest.importorskip("numpy")


def _init(**arguments: Any) -> None:
    try:
        ps.init_distributed_environment(**arguments)
    finally:
        ps.destroy_distributed_environment()


def _sizes(**sizes: Any) -> None:
    ps.simulate(0, 4, **sizes)


def _rank(rank: Any) -> None:
    ps.simulate(0, 4, tensor_model_parallel_size=4).tp.broadcast(torch.ones(1), rank)


@pytest.mark.parametrize("number", [numpy.int64(2), "2", numpy.array(2), torch.tensor(2)], ids=repr)
@pytest.mark.parametrize("call", [
    lambda number: _init(world_size=number, rank=0),
    lambda number: _init(world_size=4, rank=number),
    lambda number: _sizes(tensor_model_parallel_size=number),
    lambda number: _sizes(cp=number),
    _rank,
])  # fmt: skip
def test_a_number_that_is_no_int(call: Callable[[Any], None], number: Any) -> None:
    with pytest.raises(ps.UsageError, match=r"; pass 2, a Python int"):
        call(number)


@pytest.mark.parametrize("other", [2.0, "two", None, [2]], ids=repr)
def test_what_holds_no_number_gets_no_such_advice(other: Any) -> None:
    with pytest.raises(ps.UsageError) as caught:
        _rank(other)
    assert "Python int" not in str(caught.value)


def test_launch_takes_no_number_in_a_string() -> None:
    with pytest.raises(ps.UsageError, match=r"nproc must be an int, but is '2'; pass 2"):
        ps.launch(print, nproc="2")  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "form"), [
    ("127.0.0.1:29500", "tcp://127.0.0.1:29500"),
    ("[::1]:29500", "tcp://[::1]:29500"),
    ("node-0:29500", "tcp://node-0:29500"),
    ("tcp:127.0.0.1:29500", "tcp://127.0.0.1:29500"),
    ("TCP://127.0.0.1:29500", "tcp://127.0.0.1:29500"),
    ("file:/tmp/store", "file:///tmp/store"),
    ("/tmp/store", "file:///tmp/store"),
    ("env", "env://"),
    ("ENV://", "env://"),
])  # fmt: skip
def test_an_init_method_in_another_form(method: str, form: str) -> None:
    with pytest.raises(ps.UsageError) as caught:
        _init(world_size=2, rank=0, distributed_init_method=method)
    assert str(caught.value).endswith(f"but is {method!r}; write {form!r}")


def test_a_port_that_nobody_else_knows() -> None:
    with pytest.raises(ps.UsageError, match="pass a fixed port"):
        _init(world_size=2, rank=0, distributed_init_method="tcp://127.0.0.1:0")
