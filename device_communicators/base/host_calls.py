"""Excludes functions from torch.compile without the import (1 s) and wrapper (1 µs) of torch.compiler.disable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from device_communicators.base.torch_internals import disable_dynamo

OUTSIDE = "call it outside the compiled function"
Function = TypeVar("Function", bound=Callable[..., Any])


def host_call(advice: str, name: str = "") -> Callable[[Function], Function]:
    """Makes the function a graph break. Under `fullgraph=True`, torch's error quotes `advice`, one line.

    Apply it below `property`, `contextmanager` and the like.
    """

    def mark(function: Function) -> Function:
        return disable_dynamo(function, f"{name or function.__name__} runs on the host: {advice}")

    return mark
