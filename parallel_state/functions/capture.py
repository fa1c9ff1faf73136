"""CUDA graph capture over the tensor- and the pipeline-parallel group."""

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
    """Prepares for CUDA graphs captured within it: a side stream that waits for the current one, then tp, then pp.

    `device`: that of the graphs; None: that of the tp group. Every rank of both groups enters it, as preparing may
    make and warm up communicators, and connect the pipeline's neighbours; nothing is sent on the way out. For one
    group, or other peers, there is a group's own `graph_capture`.

    On the CPU there is nothing to capture and the body simply runs.
    """
    tp, pp = get_tp_group(), get_pp_group()
    where = tp.device if device is None else torch.device(device)
    neighbours = sorted({(pp.rank_in_group + step) % pp.world_size for step in (-1, 1)} - {pp.rank_in_group})
    with side_stream(where) as context, tp.graph_capture(context), pp.graph_capture(context, peers=neighbours):
        yield context
