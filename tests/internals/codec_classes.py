from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import msgspec

from parallel_state.messages.codec import coding as codec


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class Pair(NamedTuple):
    left: Any
    right: Any = None


@dataclasses.dataclass
class Request:
    name: str
    callback: Any = None
    length: int = dataclasses.field(init=False, default=-1)

    def __post_init__(self) -> None:
        self.length = len(self.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    start: Any
    stop: Any


class Record(msgspec.Struct, frozen=True, kw_only=True):
    key: Any
    value: Any = None


for cls in (Color, Access, Level, Pair, Request, Span, Record):
    codec.register_type(cls, name=f"test.{cls.__name__}")
