"""The caller's own tensors for a dict to be received: `out` of the calls that receive one.

They are checked before the call begins as far as they can be without the message, and against it once it is there. A
dict that doesn't fit has been received by then, and is dropped: the group goes on.
"""

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
    """The buffers that were given to a call."""

    method: str
    tensors: Mapping[str, Tensor]


def checked_buffers(context: GroupContext, method: str, out: object, views: bool = False) -> Buffers | None:
    """Returns `out` of a method, or None where that is None.

    Raises InvalidArgumentError unless it is a mapping of str to dense tensors that may be written to, and no `views`
    are wanted.
    """
    if not isinstance(views, bool):
        raise InvalidArgumentError(f"views of {method} on {context} must be a bool, but is a {type(views).__name__}")
    if out is None:
        return None
    if views:
        raise InvalidArgumentError(
            f"{method} on {context} must have out= or views=True, but has both: views lie where the sender has put "
            "them, and not in buffers of the caller; leave one out"
        )
    if not isinstance(out, Mapping):
        raise InvalidArgumentError(
            f"out of {method} on {context} must be a dict of tensors, but is a {type(out).__name__}"
        )
    for key, buffer in out.items():
        if not isinstance(key, str) or not isinstance(buffer, Tensor):
            raise InvalidArgumentError(
                f"out of {method} on {context} must have str keys and tensors, but {key!r} is a "
                f"{type(buffer).__name__}; other values of the dict are in what the call returns"
            )
        if buffer.requires_grad or buffer.layout is not torch.strided:
            raise InvalidArgumentError(
                f"out[{key!r}] of {method} on {context} must be a dense tensor without gradient, which is overwritten; "
                "pass x.detach(), or a new tensor"
            )
        checks.check_writable(context, method, buffer)
    return Buffers(method, out)


def misfit(key: str, buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device_type: str) -> str | None:
    """Returns in words how a buffer differs from the tensor that it is for."""
    if tuple(buffer.shape) == tuple(shape) and buffer.dtype == dtype and buffer.device.type == device_type:
        return None
    return (
        f"{key!r} is a {dtype} tensor of shape {list(shape)} on {device_type}, and its buffer a {buffer.dtype} tensor "
        f"of shape {list(buffer.shape)} on {buffer.device.type}"
    )


def refused(context: GroupContext, out: Buffers, problem: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"out of {out.method} on {context} must have a buffer for each tensor of the dict and no other: {problem}. "
        f"{remedy}"
    )


def note_writes(out: Buffers) -> None:
    """Tells autograd that the buffers were written to, of which memory that is written to directly doesn't."""
    written = [buffer for buffer in out.tensors.values() if not buffer.is_inference()]
    if written:
        torch.autograd.graph.increment_version(written)


def place(context: GroupContext, src: int, received: Any, out: Buffers) -> Any:
    """Returns the received dict with the buffers in place of its tensors, which may be they."""
    received = fill(context, src, received, out)
    note_writes(out)
    return received


def fill(context: GroupContext, src: int, received: Any, out: Buffers) -> dict[str, Any]:
    """Returns the received dict with the buffers in place of its tensors, of which those not read into them are copied.

    Raises InvalidArgumentError, and writes to none of them, where they don't fit.
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
        raise refused(context, out, problem, "The dict has come, and is lost; the group can be used further")
    for key, x in tensors.items():
        if x is not buffers[key]:
            copy_values(buffers[key], x)
        received[key] = buffers[key]
    return received
