"""Marks the calls that the host makes, which torch.compile leaves alone: as torch.compiler.disable does.

torch.compiler.disable imports torch._dynamo (a second) and wraps each call (a microsecond). The marks that it leaves
are set here without either: an attribute, which dynamo reads when it meets the function in a frame that it traces, and
a strategy on the code object, by which its frame hook leaves the function and all that it calls to the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from device_communicators.base.torch_internals import disable_dynamo

OUTSIDE = "call it outside the compiled function"
"""The advice for calls that make, read and end groups."""
Function = TypeVar("Function", bound=Callable[..., Any])


def host_call(advice: str, name: str = "") -> Callable[[Function], Function]:
    """Makes calls of the function a graph break; under `fullgraph=True` torch's error quotes `advice`, one sentence.

    Goes next to the `def`, below `property`, `contextmanager` and the like. `name`: what the user called, where the
    function is a part of it.
    """

    def mark(function: Function) -> Function:
        return disable_dynamo(function, f"{name or function.__name__} runs on the host: {advice}")

    return mark
