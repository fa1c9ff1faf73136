"""Prepares a group for CUDA graphs, and chooses the stream on which they are captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from device_communicators.routing.route import Route


@dataclass
class GraphCaptureContext:
    """The stream on which a CUDA graph is captured; None on the CPU."""

    stream: Any


@contextmanager
def side_stream(device: torch.device) -> Iterator[GraphCaptureContext]:
    """Runs the body on a new stream, which first waits for the current one.

    After the body, the previous stream waits for the new one, unless the body raised: waiting would hide the error.
    """
    if device.type != "cuda":
        yield GraphCaptureContext(None)
        return
    current = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield GraphCaptureContext(stream)
    current.wait_stream(stream)


@contextmanager
def prepared(
    route: Route, context: GraphCaptureContext | None, device: torch.device, peers: Sequence[int] = ()
) -> Iterator[GraphCaptureContext]:
    with ExitStack() as stack:
        if context is None:
            context = stack.enter_context(side_stream(device))
        elif context.stream is not None:
            current = torch.cuda.current_stream(device)
            if context.stream != current:
                context.stream.wait_stream(current)
                stack.enter_context(torch.cuda.stream(context.stream))
        stack.enter_context(route.capture(peers))
        yield context
