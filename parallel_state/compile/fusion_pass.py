"""Fuses, in torch.compile, an all-reduce, the addition of a residual and an RMS norm into one op.

    fusion = AllReduceFusionPass()
    model = torch.compile(model, options={"post_grad_custom_pre_pass": fusion})
    model(x)                                                # the first call compiles
    print(fusion.report)

Without inductor: `torch.compile(model, backend=fusion.aot_eager)`, or `fusion(graph)` on AOTAutograd's graph.

The norm is `F.rms_norm` over the last dim, or the float32 computation that models of the transformers library use
instead. A static float8 quantization can follow. Graphs for training aren't fused. Graphs with `dynamic=True` are fused
only if torch._dynamo.config.specialize_float is set.

The fused norm can differ from the original in its last bit. It can differ by two steps of the dtype if the original
rounds before it multiplies by the weight. A float8 value can differ by one step. Residual and weight must be equal on
all ranks. All ranks or none must compile with the pass.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from device_communicators.base import torch_internals
from device_communicators.base.torch_internals import register_graph_pass
from parallel_state.collectives import ops
from parallel_state.compile import match as fuse_match
from parallel_state.compile.match import Found, NoMatch

_OPS = torch.ops.parallel_state
_LOG = logging.getLogger(__name__)


@dataclass
class FusionReport:
    """Lists the all-reduces of graphs: `fused` those that were fused, `kept` the others, each with the reason."""

    fused: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.fused)

    def __str__(self) -> str:
        lines = [f"{self.count} of {self.count + len(self.kept)} all-reduces fused"]
        lines += [f"  fused: {each}" for each in self.fused]
        return "\n".join(lines + [f"  kept: {each}" for each in self.kept])


def fuse_all_reduce_rms_norm(graph: Graph) -> FusionReport:
    """In AOTAutograd's functional graph, replaces each all-reduce and the RMS norm that follows by one op. Idempotent.

    The caller must recompile the graph's module.
    """
    report = FusionReport()
    for node in fuse_match.all_reduces(graph):
        try:
            found = fuse_match.find(node)
            _move_inputs_up(graph, found)
        except NoMatch as no:
            report.kept.append(f"{node.name}: {no}")
            continue
        report.fused.append(_replace(graph, found))
    if report.fused or report.kept:
        _LOG.info("%s", report)
    return report


class AllReduceFusionPass:
    """A graph pass for inductor. `report` lists the all-reduces of all graphs compiled so far."""

    def __init__(self) -> None:
        register_graph_pass(type(self))
        self.report = FusionReport()

    def __call__(self, graph: Graph) -> None:
        report = fuse_all_reduce_rms_norm(graph)
        self.report.fused += report.fused
        self.report.kept += report.kept

    def uuid(self) -> str:
        """Returns a hash of the pass's source code, which inductor adds to its cache key."""
        sources = (Path(__file__), Path(fuse_match.__file__), Path(ops.__file__))
        return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

    def aot_eager(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph with the pass, without inductor: a backend for torch.compile."""
        return torch_internals.aot_eager(module, inputs, self)


def _move_inputs_up(graph: Graph, found: Found) -> None:
    """Moves the nodes that compute the fused op's other inputs before the all-reduce. If that is impossible, raises
    NoMatch and moves nothing.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    needed = fuse_match.needed_before(found, order)
    last = max(order[node] for node in (found.normed, found.add, *needed))
    between = list(graph.nodes)[order[found.all_reduce] : last]
    written = next(filter(fuse_match.writes, between), None)
    if written is not None:
        raise NoMatch(
            f"node {written.name} of the graph changes a tensor in place between the all_reduce and the norm, so they "
            "can't be fused"
        )
    for node in needed:
        found.all_reduce.prepend(node)


def _replace(graph: Graph, found: Found) -> str:
    old = found.all_reduce
    token = {name: old.kwargs[name] for name in ("_token_base_index", "_all_bases")}
    arguments: dict[str, Any] = {"x": old.kwargs["x"], "residual": found.residual, "weight": found.weight}
    op = _OPS.all_reduce_add_rms_norm.default
    if found.scale is not None:
        op, arguments["scale"] = _OPS.all_reduce_add_rms_norm_static_fp8_quant.default, found.scale
    arguments |= {"eps": found.eps, "group": old.kwargs["group"], **token}
    results = [found.normed.meta["val"], found.add.meta["val"], *old.meta["val"][1:]]
    with graph.inserting_before(old):
        fused = graph.call_function(fuse_match.FUNCTIONALIZED, (op,), arguments)
        fused.meta = {**old.meta, "val": tuple(results)}
        if "eager_input_vals" in old.meta:  # inductor uses it to pass an op the strides of eager mode
            _, eager = old.meta["eager_input_vals"]
            now = {name: map_arg(value, lambda node: node.meta["val"]) for name, value in arguments.items()}
            kept = {name: eager[name] for name in now.keys() & eager.keys()}
            fused.meta["eager_input_vals"] = ((op,), {**now, **kept})
        normed, y = (_result(graph, fused, i) for i in (0, 1))
    for wanted, given in ((found.normed, normed), (found.add, y)):
        given.meta = {**wanted.meta, "val": given.meta["val"]}
        wanted.replace_all_uses_with(given)
    for node in list(old.users):
        if node is not found.reduced:
            node.args = (fused, cast(int, node.args[1]) + 1)
    fused_nodes = {found.normed, *found.inside, found.add, found.reduced, old}
    for node in reversed(list(graph.nodes)):
        if node in fused_nodes and not node.users:
            graph.erase_node(node)
    name = torch_internals.schema_of(op).name.removeprefix("parallel_state::")
    return f"{name} of {list(results[1].shape)} {results[1].dtype} on {old.kwargs['group']}"


def _result(graph: Graph, fused: Node, index: int) -> Node:
    node = graph.call_function(getitem, (fused, index))
    node.meta["val"] = fused.meta["val"][index]
    return node
