"""A pipeline stage of the demo, captured in a CUDA graph for each shape of its inputs. Not run on a GPU.

Belongs here: graphs and the buffers that they read. What does not: the stage (`minilm`), who sends what to whom
(`inference`). On the CPU, where tests run it, a replay is a call of the stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import minilm
import torch
from measure.graphs import Captured, captured
from torch import Tensor

from parallel_state import graph_capture

Batch = dict[str, Tensor]
Shape = tuple[int, int]
TOKENS = 32
"""Batches are padded to multiples of it, so that few graphs do for all."""


class StageGraphs:
    """Called as the stage is; what it gives is overwritten by the next call with inputs of the same shape."""

    def __init__(self, stage: minilm.Stage) -> None:
        self._stage = stage
        self._graphs: dict[Shape, tuple[Batch, Captured]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self, shapes: Sequence[Shape]) -> None:
        """A graph for each [texts, tokens]. Every rank calls it, with the same shapes in the same order."""
        with graph_capture() as capture:
            for shape in shapes:
                inputs = self._stage.example(*shape)
                self._stage(inputs)  # compiles, and starts what can't start within a capture
                self._graphs[shape] = inputs, captured(lambda inputs=inputs: self._stage(inputs), capture.stream)

    def __call__(self, inputs: Batch) -> Batch:
        texts, tokens = inputs["token_ids" if "token_ids" in inputs else "mask"].shape
        held, graph = self._graphs[texts, tokens]
        for name, x in held.items():
            x.copy_(inputs[name])
        return graph.replay()

    def close(self) -> None:
        """The graphs go; they must be gone before the groups that they use."""
        self._graphs.clear()
