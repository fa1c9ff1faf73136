"""Checks and fills the tensors in the argument `out` of calls that receive a dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.calls.memory import copy_values
from device_communicators.routing.communicator import GroupContext
from parallel_state.collectives import checks


class Buffers(NamedTuple):
    method: str
    tensors: Mapping[str, Tensor]


def checked_buffers(context: GroupContext, method: str, out: object, views: bool = False) -> Buffers | None:
    if not isinstance(views, bool):
        raise checks.wrong(context, method, "views", "be a bool", f"is a {type(views).__name__}")
    if out is None:
        return None
    if views:
        raise InvalidArgumentError(
            f"{method} on {context} takes out= or views=True, not both: views are in the sender's memory, not in "
            "your tensors; leave one out"
        )
    if not isinstance(out, Mapping):
        raise checks.wrong(context, method, "out=", "be a dict of tensors", f"is a {type(out).__name__}")
    for key, buffer in out.items():
        if not isinstance(key, str) or not isinstance(buffer, Tensor):
            found = f"{key!r} is a {type(buffer).__name__}; pass tensors only: the call returns the dict's other values"
            raise checks.wrong(context, method, "out=", "have str keys and tensors", found)
        if buffer.requires_grad or buffer.layout is not torch.strided:
            raise InvalidArgumentError(
                f"out[{key!r}] of {method} on {context} is overwritten, so it must be dense and must not require a "
                "gradient; pass its .detach(), or a new tensor"
            )
        checks.check_writable(context, method, buffer)
    return Buffers(method, out)


def misfit(key: str, buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device_type: str) -> str | None:
    if tuple(buffer.shape) == tuple(shape) and buffer.dtype == dtype and buffer.device.type == device_type:
        return None
    return (
        f"{key!r} is a {dtype} tensor of shape {list(shape)} on {device_type}, and its buffer a {buffer.dtype} tensor "
        f"of shape {list(buffer.shape)} on {buffer.device.type}"
    )


def refused(context: GroupContext, out: Buffers, problem: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"out= of {out.method} on {context} must have a buffer for each tensor of the dict, and no others: {problem}. "
        f"{remedy}"
    )


def note_writes(out: Buffers) -> None:
    """Increments the version counters of the tensors in `out`, because autograd can't detect the writes to them."""
    written = [buffer for buffer in out.tensors.values() if not buffer.is_inference()]
    if written:
        torch.autograd.graph.increment_version(written)


def place(context: GroupContext, src: int, received: Any, out: Buffers) -> Any:
    received = fill(context, src, received, out)
    note_writes(out)
    return received


def fill(context: GroupContext, src: int, received: Any, out: Buffers) -> dict[str, Any]:
    """Returns the dict `received` from group rank `src`, with its tensors in the buffers `out`. Copies tensors that
    were received elsewhere.

    If a tensor doesn't fit, raises an error and changes no buffer.
    """
    buffers, tensors = out.tensors, {}
    problem = None
    if isinstance(received, dict):
        tensors = {key: each for key, each in received.items() if isinstance(each, Tensor)}
    else:
        problem = f"rank {src} sent a {type(received).__name__}"
    if problem is None and tensors.keys() != buffers.keys():
        missing = [key for key in tensors if key not in buffers]
        problem = (
            f"it lacks {missing}" if missing else f"rank {src} sent no tensor for {[*buffers.keys() - tensors.keys()]}"
        )
    elif problem is None:
        problems = (misfit(key, buffers[key], x.shape, x.dtype, x.device.type) for key, x in tensors.items())
        problem = next(filter(None, problems), None)
    if problem is not None:
        raise refused(context, out, problem, "The dict was received and is lost; the group remains usable")
    for key, x in tensors.items():
        if x is not buffers[key]:
            copy_values(buffers[key], x)
        received[key] = buffers[key]
    return received
