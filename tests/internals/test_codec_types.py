from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from device_communicators.base.errors import InvalidArgumentError, MessageEncodeError
from parallel_state.messages.codec import coding as codec
from tests.internals.codec_classes import Pair, Record, Request, Span

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode


class Unregistered(NamedTuple):
    x: int


@dataclasses.dataclass
class UnregisteredRequest(Request):
    pass


class MyTensor(torch.Tensor):
    pass


class MyStr(str):
    pass


def decode(data: bytes, tensors: list[torch.Tensor] | None = None, **kwargs: bool) -> Any:
    message = codec.read(data, **kwargs)
    if tensors is None:
        tensors = [torch.empty(t.shape, dtype=t.dtype) for t in message.tensors if t.nbytes < 1 << 20]
    return message.build(tensors) if len(tensors) == len(message.tensors) else None


def round_trip(value: Any, **kwargs: bool) -> Any:
    encoded = codec.encode(value, **kwargs)
    assert type(encoded.metadata) is bytes
    return decode(encoded.metadata, encoded.tensors, **kwargs)


def test_dataclass_is_built_without_its_init():
    request = Request("abc")
    request.length = 99
    made = round_trip(request)
    assert type(made) is Request and made == request and made.length == 99


def test_dataclass_with_a_field_never_set():
    request = object.__new__(Request)
    with pytest.raises(MessageEncodeError, match=r"value at \[0\] is a test.Request with a field that was never set"):
        codec.encode([request])


def test_register_type_as_function_and_decorator():
    @codec.register_type
    @dataclasses.dataclass
    class A:
        x: int

    @codec.register_type(name="types.other")
    @dataclasses.dataclass
    class B:
        x: int

    assert codec.is_registered(A) and codec.is_registered(B) and not codec.is_registered(UnregisteredRequest)
    assert codec.register_type(A) is A and codec.register_type(B, name="types.other") is B
    assert type(round_trip(A(1))) is A and type(round_trip(B(1))) is B
    name = f"{A.__module__}.{A.__qualname__}"
    assert "<locals>.A" in name and name.encode() in codec.encode(A(1)).metadata
    with pytest.raises(InvalidArgumentError, match="belongs to"):
        codec.register_type(dataclasses.make_dataclass("C", ["x"]), name=name)
    with pytest.raises(InvalidArgumentError, match="is registered as"):
        codec.register_type(A, name="types.A2")


@pytest.mark.parametrize("cls", [dict, int, object, MyStr, MyTensor, collections.OrderedDict, Exception], ids=repr)
def test_other_classes_are_not_registered(cls):
    with pytest.raises(InvalidArgumentError, match="must be a dataclass"):
        codec.register_type(cls)
    assert not codec.is_registered(cls)


def test_what_is_no_plain_dataclass_is_not_registered():
    @dataclasses.dataclass
    class Error(Exception):
        x: int

    with pytest.raises(InvalidArgumentError, match="only plain dataclasses"):
        codec.register_type(Error)
    for wrong in (5, "test.Span", list[int], Span(1, 2)):
        with pytest.raises(InvalidArgumentError, match="`cls` must be a class"):
            codec.register_type(wrong)
    for name in ("", 5):
        with pytest.raises(InvalidArgumentError, match="`name` must be"):
            codec.register_type(UnregisteredRequest, name=name)
    assert not codec.is_registered(UnregisteredRequest)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: None, "a function"),
        (object(), "an object"),
        (int, "a type"),
        (range(3), "a range"),
        (memoryview(b"x"), "a memoryview"),
        (datetime.date(2020, 1, 1), "a datetime.date"),
        (datetime.datetime(2020, 1, 1), "a datetime.datetime"),
        (decimal.Decimal(1), "a decimal.Decimal"),
        (collections.deque([1]), "a collections.deque"),
        (collections.defaultdict(list), "a collections.defaultdict, which is not sent as its base dict"),
        (collections.Counter(), "a collections.Counter, which is not sent as its base dict"),
        (type("MyInt", (int,), {})(3), r"an? .*MyInt, which is not sent as its base int"),
        (MyStr("x"), r"a .*MyStr, which is not sent as its base str"),
        (Unregistered(1), r"a .*Unregistered, which is not sent as its base tuple"),
        (UnregisteredRequest("x"), r"a .*UnregisteredRequest, which is not sent as its base Request"),
        (enum.IntEnum("E", "A").A, r"a .*E, which is not sent as its base int"),
        (type("S", (msgspec.Struct,), {})(), r"an? .*S;"),
        (msgspec.Raw(b"\xc0"), r"a msgspec.Raw"),
        (Ext(5, b"x"), r"a msgspec.msgpack.Ext"),
        ("\ud800", "a str with a lone surrogate"),
        (np.ma.array([1]), r"a numpy.ma.*MaskedArray"),
        (np.array([None]), "a numpy value of dtype object"),
        (np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), r"a numpy value of dtype \[\('a'"),
        (np.bytes_(b"x\0"), "a bytes_ that ends in NUL"),
        (torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (torch.eye(2, device="meta"), "a meta tensor"),
        (torch.nn.Parameter(torch.eye(2, device="meta")), "a meta tensor"),
        (torch.ones(1).as_subclass(MyTensor), r"a .*MyTensor, which is not sent as its base Tensor"),
        (torch.Generator(), "a torch.*Generator"),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_refused_type_names_its_path(value, text):
    for obj, path in (
        ({"requests": [0, {}, (), Request("r", callback=value)]}, r"\['requests'\]\[3\]\.callback"),
        ([1, ({"deep": [Span(1, {7: value})]},)], r"\[1\]\[0\]\['deep'\]\[0\]\.stop\[7\]"),
        (collections.OrderedDict(a=[value]), r"\['a'\]\[0\]"),
        ({(1, 2): value}, r"\[\(1, 2\)\]"),
        (Pair(0, Record(key=0, value=value)), r"\.right\.value"),
    ):
        with pytest.raises(MessageEncodeError, match=f"^value at {path} is {text}") as caught:
            codec.encode(obj)
        assert "parallel_state.register_type(cls)" in str(caught.value)
        assert "allow_pickle=True" in str(caught.value)
    with pytest.raises(MessageEncodeError, match=f"^value is {text}"):
        codec.encode(value)


@pytest.mark.parametrize("key", [Unregistered(1), MyStr("a"), len, "\ud800"], ids=repr)
def test_refused_key_names_its_path(key):
    with pytest.raises(MessageEncodeError, match=r"^value at \['a'\]\.keys\(\)\[1\] is a "):
        codec.encode({"a": {1: 2, key: 3}})
    with pytest.raises(MessageEncodeError, match=r"^value at \['a'\]\[0\] is a "):
        codec.encode({"a": {key}})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*nested")
def test_nested_and_quantized_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(MessageEncodeError, match=r"value at \[0\] is a nested tensor"):
        codec.encode([nested])
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(MessageEncodeError, match=r"value at \[0\] is a quantized tensor"):
        codec.encode([quantized])


def test_path_survives_a_key_without_a_repr():
    key = 10**5000  # its repr exceeds the interpreter's limit on digits
    with pytest.raises(MessageEncodeError, match=r"^value at \[<int>\] is a function"):
        codec.encode({key: lambda: None})
    with pytest.raises(MessageEncodeError) as caught:
        codec.encode({"k" * 10**5: [[[[lambda: None]]]]})
    assert len(str(caught.value)) < 500
