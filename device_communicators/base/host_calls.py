"""Marks the calls that the host makes, which torch.compile leaves alone: as torch.compiler.disable does.

torch.compiler.disable imports torch._dynamo (a second) and wraps each call (a microsecond). The marks that it leaves
are set here without either: an attribute, which dynamo reads when it meets the function in a frame that it traces, and
a strategy on the code object, by which its frame hook leaves the function and all that it calls to the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

OUTSIDE = "call it outside the compiled function"
"""The advice for calls that make, read and end groups."""
Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from torch._C._dynamo import eval_frame as _frames

    _SKIP: Any = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
except (ImportError, AttributeError):  # a torch that keeps them elsewhere
    _SKIP = None


def host_call(advice: str, name: str = "") -> Callable[[Function], Function]:
    """Makes calls of the function a graph break; under `fullgraph=True` torch's error quotes `advice`, one sentence.

    Goes next to the `def`, below `property`, `contextmanager` and the like. `name`: what the user called, where the
    function is a part of it.
    """

    def mark(function: Function) -> Function:
        reason = f"{name or function.__name__} runs on the host: {advice}"
        if _SKIP is None:
            import torch

            return torch.compiler.disable(function, reason=reason)
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
        leave_to_interpreter(function)
        return function

    return mark


def leave_to_interpreter(function: Callable[..., Any]) -> None:
    """Keeps dynamo's frame hook away from the function and from what it calls.

    For kernels, which run beneath torch's dispatcher: dynamo sees the op, not them, but meets their frames where the op
    is called from a frame that it has given up.
    """
    if _SKIP is not None:
        _frames.set_code_exec_strategy(function.__code__, _SKIP)
