"""A call captured in a CUDA graph, and replayed; on the CPU, where there are no graphs, done again.

Tests and benchmarks capture through this, so that on a machine without a GPU the same lines run and are compared with
the same answers. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Captured:
    """`replay()` does a call again, on what its inputs hold now, and leaves the results in `outputs`."""

    standing_in = False
    """Whether a call is made now that a graph would record: on the CPU, where tests look at it."""

    def __init__(self, call: Callable[[], Any], outputs: Any, graph: Any) -> None:
        self.outputs = outputs
        self._call = call
        self._graph = graph

    def replay(self) -> Any:
        """Returns `outputs`, which the next replay overwrites."""
        if self._graph is not None:
            self._graph.replay()
            return self.outputs
        for old, new in zip(_tensors(self.outputs), _tensors(self._call()), strict=True):
            if old is not new:
                old.copy_(new)
        return self.outputs


def captured(call: Callable[[], Any], stream: Any, pool: Any = None) -> Captured:
    """Captures `call` on `stream`, that of `graph_capture()`: None on the CPU.

    `call` takes its inputs from tensors that stay where they are, and must have been made once on this stream before:
    what starts at a first use (cuBLAS, a communicator) can't be captured. Its results may be in dicts, lists and
    tuples. An exception of the call is raised as it is, or from what torch makes of the capture that it has broken.
    """
    if stream is None:
        Captured.standing_in = True
        try:
            return Captured(call, call(), None)
        finally:
            Captured.standing_in = False
    graph = torch.cuda.CUDAGraph()
    failure: BaseException | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            try:
                outputs = call()
            except BaseException as error:
                failure = error
                raise
    except BaseException as error:
        if failure is None or failure is error:
            raise
        raise failure from error  # else the end of the broken capture would hide what broke it
    return Captured(call, outputs, graph)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
