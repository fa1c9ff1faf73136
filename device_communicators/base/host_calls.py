"""Marks functions that torch.compile must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from device_communicators.base.torch_internals import disable_dynamo

OUTSIDE = "call it outside the compiled function"
Function = TypeVar("Function", bound=Callable[..., Any])


def host_call(advice: str, name: str = "") -> Callable[[Function], Function]:
    """Returns a decorator: torch.compile breaks the graph at a call of the decorated function. Under `fullgraph=True`,
    torch's error contains `name` (default: the function's) and `advice`, one line.

    Apply the decorator below `property`, `contextmanager` and similar decorators.
    """

    def mark(function: Function) -> Function:
        return disable_dynamo(function, f"{name or function.__name__} runs on the host: {advice}")

    return mark
