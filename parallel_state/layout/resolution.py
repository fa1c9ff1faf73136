"""Creates a `Layout` from sizes and an order.

The layout numbers the same ranks in two ways, each by an order of axes:

- dense layers: the given order without `ep`;
- expert layers: the given order with `etp` (expert tensor parallel) in place of `tp`, with `efsdp` (expert data
  parallel) in place of `dp_shard`, and without axes that split a sequence.

Up to three further numberings split one axis in two: `tp` for decode context parallelism (`dcp`), `efsdp` by optimizer
instances, `dp` by nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from device_communicators.base.errors import LayoutError
from parallel_state.layout.axes import (
    AXES,
    BY_NAME,
    DEFAULT_ORDER,
    PRESETS,
    Preset,
    RankPicker,
    by_axis,
    embedding_ranks,
    position_embedding_ranks,
)
from parallel_state.layout.ranks import (
    Grid,
    Layout,
    check_order,
    check_size,
    fill_in_rest,
    product_in_words,
    split_order,
)

_DENSE = tuple(axis.name for axis in AXES if not (axis.spans or axis.experts or axis.within or axis.ends_of))
_NODES = ("dp_intra_node", "dp_inter_node")


def resolve_layout(
    world_size: int,
    sizes: Mapping[str, int | None],
    order: str = DEFAULT_ORDER,
    *,
    ranks_per_node: int | None = None,
    rank_offset: int = 0,
    get_embedding_ranks: RankPicker | None = None,
    get_position_embedding_ranks: RankPicker | None = None,
) -> Layout:
    """Returns the layout of `world_size` ranks, numbered from `rank_offset`.

    `sizes` maps axes (`tp` or `tensor_model_parallel_size`, …) to sizes; -1 takes the remaining ranks. An omitted size
    is 1, but `etp` defaults to the size of `tp`, and `dp` takes the remaining ranks unless another size is -1. `dp` is
    `dp_shard` · `dp_replicate`; by default `dp_replicate` is 1. `order` is a preset or any permutation of the axes,
    fastest first. `ranks_per_node` determines which data-parallel ranks share a node. `get_…_ranks` pick the ranks of
    embedding groups from those of a pipeline group.

    Raises LayoutError if sizes or order don't fit, or if expert layers would have other pipeline groups than dense
    layers.
    """
    if not isinstance(rank_offset, int) or isinstance(rank_offset, bool) or rank_offset < 0:
        raise LayoutError(f"rank_offset must be a rank, 0 or more, but is {rank_offset!r}")
    preset = PRESETS.get(order) if isinstance(order, str) else None
    tokens = [token.lower() for token in split_order(order if preset is None else preset.order)]
    preset = preset or Preset("-".join(tokens), "")
    given = {name: size for name, size in by_axis(sizes).items() if size is not None}
    dense_sizes = _dense_sizes(world_size, given)
    expanded = [name for token in tokens for name in (BY_NAME[token].spans if token == "dp" else (token,))]
    _check_dense_order(order, tokens, dense_sizes)
    dense = _grid(expanded, dense_sizes)
    spans = {row.name: _expand(row.name) for row in AXES if row.spans}
    grids, missing = [dense], {}
    experts: Grid | str = ""
    if "ep" in preset.spans:
        spans |= {name: tuple(axis for part in parts for axis in _expand(part)) for name, parts in preset.spans.items()}
        _check_fixed_experts(order, given, dense, spans)
        missing = dict.fromkeys(
            [row.name for row in AXES if _needs_experts(row.name) and row.name not in preset.spans],
            f"in order {order!r} ep spans {', '.join(preset.spans['ep'])}, and there is no expert-tensor axis",
        )
    else:
        experts = _expert_grid(world_size, preset, expanded, dense, given)
        if isinstance(experts, Grid):
            grids.append(experts)
        else:
            missing |= dict.fromkeys([row.name for row in AXES if _needs_experts(row.name)], experts)
    decode, dcp = _decode(dense, given.get("dcp", 1))
    grids += [decode] if isinstance(decode, Grid) else []
    spans |= {"dcp": decode} if not isinstance(decode, Grid) else {}
    parts: dict[str, tuple[str, int]] = {}
    instances = _instances(order, dense, experts, given)
    if instances > 1 and isinstance(experts, Grid):
        parts["intra_dp_cp"] = ("dp_cp", instances)
        grids.append(_split(experts, "efsdp", "intra_edp", experts.size("efsdp") // instances, "inter_dist_opt"))
    else:  # one instance in each copy of the weights
        spans |= {"intra_dp_cp": spans["fsdp"], "intra_dist_opt": spans["replica"], "inter_dist_opt": ("dp_replicate",)}
        spans["intra_edp"] = ("efsdp",)
        missing.pop("intra_dist_opt", None)
        if "efsdp" in missing:
            missing["intra_edp"] = missing["efsdp"]
    by_node = _node_grid(dense, ranks_per_node)
    if isinstance(by_node, Grid):
        grids.append(by_node)
    else:
        missing |= dict.fromkeys(_NODES, by_node)
    return Layout(
        grids=tuple(grids),
        spans={name: axes for name, axes in spans.items() if name not in missing},
        ends={
            "embedding": ("pp", get_embedding_ranks or embedding_ranks),
            "position_embedding": ("pp", get_position_embedding_ranks or position_embedding_ranks),
        },
        parts=parts,
        missing=missing,
        rank_offset=rank_offset,
        is_sharded=not {"dp_shard", "dp_replicate"}.isdisjoint(given),
        title=_title(tokens, dense, experts if isinstance(experts, Grid) else None, dcp, instances),
    )


def _dense_sizes(world_size: int, given: Mapping[str, int | None]) -> dict[str, int]:
    parts = ("dp_shard", "dp_replicate")
    shard, replicate = (_given(given.get(name), name) for name in parts)
    open_parts = _open_sizes(given, parts)
    merged: dict[str, int | None] = {name: given.get(name, 1) for name in _DENSE if name not in parts}
    someone_takes_the_rest = -1 in merged.values()
    merged["dp"] = given.get("dp")
    if merged["dp"] in (None, -1) and shard and replicate:
        merged["dp"] = shard * replicate
    elif "dp" not in given and someone_takes_the_rest and not open_parts:
        merged["dp"] = (shard or 1) * (replicate or 1)
    full = fill_in_rest(world_size, merged)
    dp = full.pop("dp")
    if shard is None and replicate is None:
        # If one of the two sizes is -1, it takes all remaining ranks; if both are unset, dp_shard does.
        shard, replicate = (1, dp) if open_parts == ["dp_replicate"] else (dp, 1)
    known = (shard or 1) * (replicate or 1)
    if dp % known or (shard and replicate and known != dp):
        raise LayoutError(
            f"data_parallel_shard_size × data_parallel_replicate_size must be the data-parallel size, {dp}, but they "
            f"are {shard or 'not passed'} and {replicate or 'not passed'}; choose sizes whose product is {dp}, or "
            f"pass a divisor of {dp} for one of them"
        )
    return {**full, "dp_shard": shard or dp // known, "dp_replicate": replicate or dp // known}


def _open_sizes(given: Mapping[str, int | None], names: Sequence[str]) -> list[str]:
    found = [name for name in names if given.get(name) == -1]
    if len(found) > 1:
        raise LayoutError(
            f"at most one size may be -1, which takes the remaining ranks, but {' and '.join(map(repr, found))} are"
        )
    return found


def _check_dense_order(order: str, tokens: Sequence[str], sizes: Mapping[str, int]) -> None:
    parts = BY_NAME["dp"].spans
    if not set(parts) & set(tokens):  # the order has dp as a whole, or lacks it
        merged = {name: size for name, size in sizes.items() if name not in parts}
        sizes = {**merged, "dp": prod(sizes[name] for name in parts)}
    elif "dp" in tokens:
        raise LayoutError(
            f"order {order!r} names 'dp' and also {' and '.join(parts)}, into which 'dp' is divided; name either 'dp' "
            "or these"
        )
    check_order(order, tokens, {**sizes, "ep": 1})  # the expert numbering checks whether ep may be left out


def _given(size: int | None, name: str) -> int | None:
    if size is None or size == -1:
        return None
    check_size(name, size)
    return size


def _grid(order: Sequence[str], sizes: Mapping[str, int]) -> Grid:
    names = [name for name in order if name in sizes]
    return Grid(tuple((name, sizes[name]) for name in dict.fromkeys([*names, *sizes])))


def _expand(name: str) -> tuple[str, ...]:
    spans = BY_NAME[name].spans
    return tuple(axis for part in spans for axis in _expand(part)) if spans else (name,)


def _needs_experts(name: str) -> bool:
    return any(BY_NAME[axis].experts for axis in _expand(name))


def _expert_grid(
    world_size: int, preset: Preset, expanded: Sequence[str], dense: Grid, given: Mapping[str, int | None]
) -> Grid | str:
    """Returns the numbering of ranks for expert layers; `dense` is the numbering for dense layers.

    If no numbering fits, returns the reason as a text, or raises LayoutError if the caller passed a size of expert
    layers. `expanded`: the axes of the order `preset`, in which `dp_shard` and `dp_replicate` replace `dp`. `given`:
    the passed sizes.
    """
    asked = "ep" in given or "etp" in given or given.get("inter_dist_opt", 1) != 1
    try:
        sizes = {name: dense.size(name) for name in _DENSE if not BY_NAME[name].cuts_sequence}
        open_sizes = _open_sizes(given, ("etp", "ep"))
        etp = 1 if "etp" in open_sizes else _given(given.get("etp"), "etp")
        sizes["etp"] = etp or preset.defaults.get("etp", sizes["tp"])
        del sizes["tp"], sizes["dp_shard"]
        sizes["ep"] = _given(given.get("ep"), "ep") or 1
        rest, left = divmod(world_size, prod(sizes.values()))
        if left:
            raise LayoutError(
                f"{world_size} ranks are not divisible by {product_in_words(sizes)}, the sizes of expert layers; "
                "choose another expert_model_parallel_size or expert_tensor_parallel_size (default: the tp size)"
            )
        for name in open_sizes:
            sizes[name], rest = rest, 1
        sizes["efsdp"] = rest
        instead = {"tp": "etp", "dp_shard": "efsdp"}
        kept = (name for name in expanded if name not in BY_NAME or not BY_NAME[name].cuts_sequence)
        names = [instead.get(name, name) for name in kept]
        if "ep" not in names and sizes["ep"] == 1:
            names.append("ep")
        check_order(preset.order, names, sizes)
        experts = _grid(names, sizes)
        _check_same_pipelines(preset.order, dense, experts)
        return experts
    except LayoutError as error:
        if asked:
            raise
        return f"expert layers don't fit these sizes ({error})"


def _check_same_pipelines(order: str, dense: Grid, experts: Grid) -> None:
    if dense.size("pp") == 1:
        return
    if dense.stride("pp") != experts.stride("pp"):
        raise LayoutError(
            f"dense and expert layers must have the same pipeline groups, but in order {order!r} they differ: "
            f"neighbouring stages are {dense.stride('pp')} ranks apart in {dense}, and {experts.stride('pp')} in "
            f"{experts}; put pp last"
        )
    dp, edp = dense.size("dp_shard", "dp_replicate"), experts.size("efsdp", "dp_replicate")
    if not order.endswith("pp") and dp != edp:
        raise LayoutError(
            f"dense and expert layers must have the same data-parallel size unless the order ends with pp, but in "
            f"{order!r} they have {dp} and {edp}; put pp last, or choose expert sizes with "
            f"etp · ep = {experts.size('etp', 'ep') * edp // dp}"
        )


def _check_fixed_experts(
    order: str, given: Mapping[str, int | None], dense: Grid, spans: Mapping[str, tuple[str, ...]]
) -> None:
    found = dense.size(*spans["ep"])
    if given.get("ep") not in (None, -1, 1, found) or given.get("etp") not in (None, 1):
        raise LayoutError(
            f"order {order!r} has no axes of their own for expert layers: ep is {' · '.join(spans['ep'])} = {found}, "
            f"and etp is 1, but ep={given.get('ep')} and etp={given.get('etp')} were passed; leave them out"
        )


def _decode(dense: Grid, size: int) -> tuple[Grid | tuple[str, ...], str]:
    """Computes decode-context-parallel groups (dcp) of `size` ranks, as in vLLM; -1 means the largest size.

    If pcp (prefill-context-parallel) is 1, dcp divides tp: returns a grid with the axis dcp. Otherwise returns the axes
    that dcp spans: none, pcp, or pcp and tp. The second result is a text for the layout's title.
    """
    tp, pcp = dense.size("tp"), dense.size("pcp")
    dcp = tp * pcp if size == -1 else size
    check_size("dcp", dcp)
    if pcp == 1:
        if tp % dcp:
            raise LayoutError(
                f"tp={tp} must be divisible by dcp={dcp}, because decode-context-parallel groups are parts of "
                "tensor-parallel groups"
            )
        return _split(dense, "tp", "dcp", dcp, "tp/dcp"), f", dcp={dcp} in tp" if dcp > 1 else ""
    if dcp not in (1, pcp, tp * pcp):
        raise LayoutError(
            f"with prefill-context-parallel size pcp={pcp} and tp={tp}, the decode-context-parallel size dcp must be "
            f"1, pcp or pcp · tp: one of {sorted({1, pcp, tp * pcp})}, but is {dcp}"
        )
    axes = () if dcp == 1 else ("pcp",) if dcp == pcp else ("pcp", "tp")
    return axes, f", dcp={dcp} in {' · '.join(axes)}" if axes else ""


def _instances(order: str, dense: Grid, experts: Grid | str, given: Mapping[str, int]) -> int:
    count = given.get("inter_dist_opt", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise LayoutError(f"num_distributed_optimizer_instances must be a positive integer, but is {count!r}")
    if count == 1:
        return 1
    if isinstance(experts, str):
        raise LayoutError(
            f"num_distributed_optimizer_instances divides the ranks that hold the same experts, but order {order!r} "
            "has no separate layout for expert layers; leave this argument out, or use the default order"
        )
    if dense.size("dp_replicate") > 1:
        raise LayoutError(
            f"num_distributed_optimizer_instances={count} and data_parallel_replicate_size="
            f"{dense.size('dp_replicate')} both divide the data-parallel ranks; pass only one of them"
        )
    for what, size in (("dp · cp", dense.size("dp_shard", "cp")), ("expert-data-parallel", experts.size("efsdp"))):
        if size % count:
            raise LayoutError(
                f"the {what} size must be divisible by the number of optimizer instances, but {size} is not "
                f"divisible by num_distributed_optimizer_instances={count}"
            )
    return count


def _node_grid(dense: Grid, ranks_per_node: int | None) -> Grid | str:
    if ranks_per_node is None:
        return "the nodes may have different numbers of ranks, or ranks that aren't consecutive; pass ranks_per_node"
    if not isinstance(ranks_per_node, int) or isinstance(ranks_per_node, bool) or ranks_per_node < 1:
        raise LayoutError(f"ranks_per_node must be a positive integer, but is {ranks_per_node!r}")
    names = [name for name, size in dense.axes if size > 1]
    parts = [name for name in names if name in ("dp_shard", "dp_replicate")]
    if len(parts) == 2 and names.index("dp_replicate") != names.index("dp_shard") + 1:
        return "dp_replicate doesn't follow dp_shard in the order"
    first = parts[0] if parts else "dp_shard"
    dp, stride = dense.size("dp_shard", "dp_replicate"), dense.stride(first)
    kept = [axis for axis in dense.axes if axis[0] == first or axis[0] not in ("dp_shard", "dp_replicate")]
    merged = Grid(tuple(("dp", dp) if name == first else (name, size) for name, size in kept))
    ranks_per_node = min(ranks_per_node, dense.world_size)
    inside = min(dp, max(1, ranks_per_node // stride))
    if dp > 1 and ranks_per_node > stride and (dp % inside or ranks_per_node % (stride * inside)):
        return f"nodes of {ranks_per_node} ranks cut the data-parallel groups of {dp} ranks, {stride} apart, unevenly"
    return _split(merged, "dp", _NODES[0], inside, _NODES[1])


def _split(grid: Grid, axis: str, inner: str, size: int, outer: str) -> Grid:
    parts = [((inner, size), (outer, total // size)) if name == axis else ((name, total),) for name, total in grid.axes]
    return Grid(tuple(part for each in parts for part in each))


def _title(tokens: Sequence[str], dense: Grid, experts: Grid | None, dcp: str, instances: int) -> str:
    sizes = dict(dense.axes)
    parted = sizes["dp_replicate"] > 1
    words = [
        word
        for token in tokens
        for word in (("dp_shard", "dp_replicate") if token == "dp" and parted else
                     ("dp",) if token == "dp_shard" and not parted else
                     () if token in ("ep", "dp_replicate") and not parted else (token,))
        if word != "ep"
    ]  # fmt: skip
    sizes["dp"] = dense.size("dp_shard", "dp_replicate")
    text = " × ".join(f"{name}={sizes[name]}" for name in words if sizes[name] > 1 or BY_NAME[name].always_made)
    text += dcp
    if experts is not None and (experts.size("ep") > 1 or experts.size("etp") != dense.size("tp")):
        names = [name for name, size in experts.axes if size > 1 or name in ("etp", "ep", "efsdp")]
        text += "; experts " + " × ".join(f"{name}={experts.size(name)}" for name in names)
    if instances > 1:
        text += f"; {instances} optimizer instances"
    return text or "one rank"


def made_at_start(layout: Layout, sizes: Mapping[str, int | None]) -> tuple[str, ...]:
    given = by_axis(sizes)
    return tuple(
        row.name
        for row in AXES
        if row.name in layout.names
        and (row.always_made or (given.get(row.name) not in (None, 1) and layout.size(row.name) > 1))
    )
