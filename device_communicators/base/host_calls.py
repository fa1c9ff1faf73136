"""Excludes host calls from torch.compile, as torch.compiler.disable does, without its import (1 s) and wrapper (1 µs).

Sets the same two marks: an attribute, which dynamo reads when a traced frame calls the function, and a strategy of the
code object, by which dynamo's frame hook leaves the function and its callees to the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from device_communicators.base.torch_internals import disable_dynamo

OUTSIDE = "call it outside the compiled function"
"""Advice for calls that create, read or destroy groups."""
Function = TypeVar("Function", bound=Callable[..., Any])


def host_call(advice: str, name: str = "") -> Callable[[Function], Function]:
    """Makes calls of the function a graph break. Under `fullgraph=True`, torch's error quotes the one-line `advice`.

    Apply it first, below `property`, `contextmanager` and the like. `name`: the method that the user called, if it
    isn't the function.
    """

    def mark(function: Function) -> Function:
        return disable_dynamo(function, f"{name or function.__name__} runs on the host: {advice}")

    return mark
