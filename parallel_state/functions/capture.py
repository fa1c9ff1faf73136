"""CUDA graph capture for the tensor- and pipeline-parallel groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from device_communicators.base.host_calls import OUTSIDE, host_call
from parallel_state.collectives.capture_stream import GraphCaptureContext, side_stream
from parallel_state.state import get_pp_group, get_tp_group

__all__ = ["GraphCaptureContext", "graph_capture"]


@contextmanager
@host_call(OUTSIDE)
def graph_capture(device: torch.device | str | None = None) -> Iterator[GraphCaptureContext]:
    """Prepares the tp and pp groups for CUDA graphs that the body captures.

    The body runs on a side stream, which waits for the current stream. On the CPU the context has no effect. `device`
    is by default the tp group's. Every rank of both groups must enter this context.
    """
    tp, pp = get_tp_group(), get_pp_group()
    where = tp.device if device is None else torch.device(device)
    neighbours = sorted({(pp.rank_in_group + step) % pp.world_size for step in (-1, 1)} - {pp.rank_in_group})
    with side_stream(where) as context, tp.graph_capture(context), pp.graph_capture(context, peers=neighbours):
        yield context
