"""Finds problems of a layout (warnings) and makes other remarks (notes)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from device_communicators.base.errors import LayoutError
from parallel_state.tools.plan.groups import Kind, Plan, steps_of


@dataclass(frozen=True)
class Remark:
    """A remark on a layout. `level`: "warning" or "note". `code`: the same in all versions."""

    level: str
    code: str
    text: str


def remarks_on(plan: Plan) -> list[Remark]:
    found = [remark for check in CHECKS for remark in check(plan)]
    return sorted(found, key=lambda remark: remark.level != "warning")


def _partial_node(plan: Plan) -> Iterator[Remark]:
    rest = plan.world_size % plan.gpus_per_node
    if rest and plan.nodes > 1:
        yield Remark(
            "warning", "partial-node",
            f"{plan.world_size} ranks are not a multiple of {plan.gpus_per_node} GPUs per node: the last of "
            f"{plan.nodes} nodes has {rest}, and groups that cross nodes have fewer ranks there",
        )  # fmt: skip


def _tensor_parallel(plan: Plan) -> Iterator[Remark]:
    for name in ("tp", "etp"):
        kind = plan.made(name)
        if kind is None or kind.nodes == 1 or (name == "etp" and "tp" in kind.same_as):
            continue
        per_node = plan.gpus_per_node
        if kind.size > per_node:
            advice = (f"a node has {per_node} GPUs. Use --{name} {per_node} and more pp or cp. If NVLink connects "
                      f"nodes, set --gpus-per-node to the size of the NVLink domain")  # fmt: skip
        elif steps_of(plan.layout, name)[0].stride > 1:
            advice = "put tp first in --order"
        else:
            advice = f"choose a size that divides {per_node}"
        yield Remark(
            "warning", f"{name}-across-nodes",
            f"{_crossing(kind)}: several all-reduces per layer go over the network; {advice}",
        )  # fmt: skip


def _expert_parallel(plan: Plan) -> Iterator[Remark]:
    kind = plan.made("ep")
    if kind is None or kind.nodes == 1:
        return
    etp = plan.layout.size("etp") if "etp" in plan.layout.names else 1
    advice = "it needs all-to-all kernels for the network, such as DeepEP's"
    if kind.size <= plan.gpus_per_node:
        advice = "it fits into a node if ep is next to tp in the order and etp · ep ≤ the node's GPUs"
        if etp > 1 and _stays_in_node_with(plan, "etp", 1):
            advice = f"with --etp 1 (now {etp}; default: the tensor-parallel size) it stays in the node"
    yield Remark(
        "warning", "ep-across-nodes",
        f"{_crossing(kind)}: each layer's all-to-alls of tokens go over the network; {advice}",
    )  # fmt: skip


def _stays_in_node_with(plan: Plan, axis: str, size: int) -> bool:
    try:
        layout = replace(plan.request, sizes={**plan.request.sizes, axis: size}).resolve()
    except LayoutError:
        return False
    return all(len({plan.place(rank)[0] for rank in ranks}) == 1 for ranks in layout.groups("ep"))


def _pipeline_in_node(plan: Plan) -> Iterator[Remark]:
    pp = plan.made("pp")
    if pp is None or pp.nodes == pp.size:
        return
    for name in ("tp", "cp", "pcp"):
        kind = plan.made(name)
        if kind is not None and kind.nodes > 1 and kind.size <= plan.gpus_per_node:
            yield Remark(
                "warning", "pp-inside-node",
                f"neighbouring pipeline stages share a node while {name} crosses nodes, but stages send the least "
                f"data: put pp after {name} in --order",
            )  # fmt: skip
            return


def _context_parallel(plan: Plan) -> Iterator[Remark]:
    for name in ("cp", "pcp"):
        kind = plan.made(name)
        if kind is not None and kind.nodes > 1:
            yield Remark(
                "note", f"{name}-across-nodes",
                f"{_crossing(kind)}: keys and values go over the network in each attention layer; computation hides "
                f"that for long sequences only",
            )  # fmt: skip


def _data_parallel(plan: Plan) -> Iterator[Remark]:
    dp = plan.made("dp")
    if dp is None or dp.nodes == 1:
        return
    if "dp_intra_node" not in plan.layout.names:
        yield Remark("note", "dp-cut-unevenly",
                     "the layout has no dp_intra_node and dp_inter_node groups for reductions in two steps: "
                     f"{plan.layout.missing.get('dp_intra_node', 'unknown')}")  # fmt: skip
    elif plan.layout.size("dp_intra_node") > 1:
        inside, nodes = plan.layout.size("dp_intra_node"), plan.layout.size("dp_inter_node")
        yield Remark("note", "dp-in-two-steps",
                     f"a dp group has {inside} ranks on each of {nodes} nodes: dp_intra_node and dp_inter_node can "
                     f"reduce within the node first")  # fmt: skip


def _sharding(plan: Plan) -> Iterator[Remark]:
    shard, replicate = plan.made("dp_shard"), plan.kind("dp_replicate")
    if shard is None or replicate is None or shard.nodes == 1:
        return
    if replicate.size > 1 and replicate.nodes == 1:
        yield Remark("warning", "replicas-inside-node",
                     "dp_replicate is within the node while dp_shard crosses nodes, but shards are gathered in each "
                     "layer and replicas reduce once per step: put dp_shard first in --order")  # fmt: skip
    elif replicate.size == 1:
        yield Remark("note", "dp-shard-across-nodes",
                     f"{_crossing(shard)}: every layer's weights are gathered over the network; --dp-replicate with a "
                     f"smaller --dp-shard keeps the gathers on fewer nodes (HSDP)")  # fmt: skip


def _crossing(kind: Kind) -> str:
    return f"{kind.crossing} of {kind.count} {kind.name} groups cross nodes (up to {kind.nodes})"


CHECKS: tuple[Callable[[Plan], Iterator[Remark]], ...] = (
    _partial_node,
    _tensor_parallel,
    _expert_parallel,
    _pipeline_in_node,
    _context_parallel,
    _sharding,
    _data_parallel,
)
