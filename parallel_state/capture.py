"""CUDA graph capture over the groups: the stream, and each communicator's own preparation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from parallel_state.state import get_pp_group, get_tp_group


@dataclass
class GraphCaptureContext:
    """The stream on which a CUDA graph is captured; None on the CPU."""

    stream: Any


@contextmanager
def graph_capture(device: torch.device | None = None) -> Iterator[GraphCaptureContext]:
    """Capture CUDA graphs within it: a side stream that waits for the current one, tp and pp prepared, in this order.

    On the CPU there is nothing to capture and the body simply runs. Not run on a GPU yet.
    """
    tp, pp = get_tp_group(), get_pp_group()
    device = tp.device if device is None else torch.device(device)
    with ExitStack() as stack:
        stream = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            stack.enter_context(torch.cuda.stream(stream))
        for group in (tp, pp):
            stack.enter_context(group.route.capture())
        yield GraphCaptureContext(stream)
