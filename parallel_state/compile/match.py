"""Finds all-reduces that can be fused with an addition, an RMS norm and possibly a quantization into one op.

In the graph, the all-reduce is an `auto_functionalized_v2` node.

    all_reduce ─ getitem 0 ─ add ┬─ (to float32) ┬───────────── mul ─ mul by weight ─ (back) ┬─ (quantise)
                        residual ┘               └ square, mean, + eps, rsqrt ┘              └─ other users

The norm can also be a single node of aten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from device_communicators.base.torch_internals import FUSED_RMS_NORM, TO_COPY, schema_of
from device_communicators.calls.reductions import FP8, FP8_MAX

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims
_ALL_REDUCE = torch.ops.parallel_state.all_reduce.default
FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
_TOKEN = {"_token_base_index", "_all_bases"}
_ONE_NODE = (_ATEN.rms_norm.default, FUSED_RMS_NORM)
_CLAMPS = (_ATEN.clamp.default, _ATEN.clamp_min.default, _ATEN.clamp_max.default)
_WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float32) | {torch.float64: torch.float64}
"""Dtype of a norm's input -> dtype in which the norm must be computed."""


class NoMatch(Exception):
    """Raised if an all-reduce can't be fused; the text is the reason."""


@dataclass
class Found:
    """The nodes that one fused op reads or replaces.

    `reduced` is the all-reduce's result, `inside` the intermediate results, `normed` the norm's result (quantized if
    there is a `scale`).
    """

    all_reduce: Node
    reduced: Node
    add: Node
    residual: Node
    weight: Node
    eps: float
    normed: Node
    scale: Node | None = None
    inside: list[Node] = field(default_factory=list)


def all_reduces(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target is FUNCTIONALIZED and node.args[:1] == (_ALL_REDUCE,)]


def find(all_reduce: Node) -> Found:
    if set(all_reduce.kwargs) - _TOKEN != {"x", "reduce_op", "group"}:
        raise NoMatch(f"the all_reduce op has unknown arguments, so it can't be fused: {sorted(all_reduce.kwargs)}")
    if all_reduce.kwargs["reduce_op"] != "sum":
        raise NoMatch(f"the all_reduce computes {all_reduce.kwargs['reduce_op']}, not sum; only sum can be fused")
    results = [node for node in all_reduce.users if node.target is getitem and node.args[1] == 0]
    if len(results) != 1 or len(results[0].users) != 1:
        raise NoMatch("to be fused, the result of the all_reduce must be used once, by one addition")
    reduced = results[0]
    add = next(iter(reduced.users))
    residual = _residual(reduced, add)
    reasons = []
    for look in (_one_node, _written_out):
        try:
            found = look(Found(all_reduce, reduced, add, residual, add, 0.0, add))
        except NoMatch as no:
            reasons.append(str(no))
        else:
            return _quantized(found)
    raise NoMatch("; ".join(dict.fromkeys(reasons)))


def _residual(reduced: Node, add: Node) -> Node:
    if add.target is not _ATEN.add.Tensor or add.kwargs.get("alpha", 1) != 1:
        raise NoMatch(
            f"the all_reduce is followed by {add.target}, not by an addition of the residual, so it can't be fused"
        )
    residual = _other(add, reduced)
    if residual is None:
        raise NoMatch(
            "the result of the all_reduce is added to a number or to itself, not to a residual, so it can't be fused"
        )
    if _value(add).dtype not in _WIDE or any(_value(each).dtype != _value(add).dtype for each in (reduced, residual)):
        raise NoMatch(
            f"the result of the all_reduce is {_value(reduced).dtype} and the residual {_value(residual).dtype}; "
            "to be fused, both must have the same float dtype"
        )
    if not (_alike(reduced, residual) and _alike(reduced, add)) or _value(reduced).dim() == 0:
        raise NoMatch(
            "the residual has another shape or device than the all_reduce's result, so their addition can't be fused"
        )
    if not _same(_value(add).stride(), _value(reduced).stride()):
        raise NoMatch("the residual has other strides than the all_reduce's result, so their addition can't be fused")
    return residual


def _one_node(found: Found) -> Found:
    norms = [node for node in found.add.users if node.target in _ONE_NODE and node.args[0] is found.add]
    if not norms:
        raise NoMatch(
            "no norm follows the addition of the all_reduce's result and the residual, so nothing can be fused"
        )
    norm = norms[0]
    _, shape, weight, eps, *_ = (*norm.args, None, None)
    normed = norm
    if norm.target is FUSED_RMS_NORM:
        results = {node.args[1]: node for node in norm.users}
        if 0 not in results or 1 in results:
            raise NoMatch(
                "the rsqrt of the norm is also used elsewhere, perhaps in a backward pass, or the result of the norm "
                "is unused, so the norm can't be fused"
            )
        normed = results[0]
        found.inside.append(norm)
    if not isinstance(shape, (list, tuple)) or len(shape) != 1:
        raise NoMatch("to be fused, the norm must be over the last dim only, not over other dims")
    return _complete(found, normed, weight, eps)


def _written_out(found: Found) -> Found:
    y = found.add
    dtype = _value(y).dtype
    wide_dtype = _WIDE[dtype]
    wides = [y] if dtype == wide_dtype else [node for node in y.users if _converted(node, wide_dtype) is y]
    squares = [node for wide in wides for node in wide.users if _is_square(node)]
    reasons = ["no norm of the sum follows, in " + str(wide_dtype)]
    for square in squares:
        try:
            scaled, eps = _scaled(found, wides, square)
            found.inside += [wide for wide in wides if wide is not y]
            weight, normed = _weighted(found, scaled)
            return _complete(found, normed, weight, eps)
        except NoMatch as no:
            reasons.append(str(no))
            found.inside.clear()
    raise NoMatch(reasons[-1])


def _scaled(found: Found, wides: list[Node], square: Node) -> tuple[Node, Any]:
    """Matches x · rsqrt(mean(x²) + eps) and returns the product's node and eps.

    `square`: the node of x². `wides`: x, or its conversions to float32 or wider.
    """
    mean = _only_user(square)
    last = _value(found.add).dim() - 1
    dims = mean.args[1] if mean.target is _ATEN.mean.dim and len(mean.args) > 1 else None
    if not isinstance(dims, (list, tuple)) or list(dims) not in ([-1], [last]) or mean.args[2:] != (True,):
        raise NoMatch("to be fused, the norm must be over the last dim only, not over other dims")
    if mean.kwargs.get("dtype") not in (None, _value(square).dtype):
        raise NoMatch("to be fused, the norm's mean must not convert the dtype")
    plus = _only_user(mean)
    if plus.target not in (_ATEN.add.Tensor, _ATEN.add.Scalar) or plus.args[0] is not mean or plus.kwargs:
        raise NoMatch("to be fused, the norm must add an eps to the mean")
    root = _only_user(plus)
    if root.target is not _ATEN.rsqrt.default:
        raise NoMatch("the norm has no rsqrt after the mean, so it can't be fused")
    scaled = _only_user(root)
    if scaled.target is not _ATEN.mul.Tensor or _other(scaled, root) not in wides:
        raise NoMatch("to be fused, the norm must multiply its rsqrt by its own input")
    found.inside += [square, mean, plus, root, scaled]
    return scaled, plus.args[1]


def _weighted(found: Found, scaled: Node) -> tuple[Node | None, Node]:
    dtype = _value(found.add).dtype
    after = _only_user(scaled)
    if _converted(after, dtype) is scaled and dtype != _value(scaled).dtype:
        found.inside.append(after)
        product = _only_user(after)
        weight = _other(product, after) if product.target is _ATEN.mul.Tensor else None
        return weight, product
    if after.target is not _ATEN.mul.Tensor:
        raise NoMatch("the norm has no weight, so it can't be fused")
    weight = _other(after, scaled)
    if weight is not None and _converted(weight, torch.float32) is not None and dtype != torch.float32:
        found.inside.append(weight)
        weight = _converted(weight, torch.float32)
    if dtype == _value(after).dtype:
        return weight, after
    product = _only_user(after)
    found.inside.append(after)
    if _converted(product, dtype) is not after:
        raise NoMatch(f"to be fused, the result of the norm must be converted back to {dtype}, the dtype of its input")
    return weight, product


def _complete(found: Found, normed: Node, weight: Any, eps: Any) -> Found:
    y = _value(found.add)
    if not isinstance(weight, Node):
        raise NoMatch("the norm has no weight, so it can't be fused")
    if not isinstance(eps, float):
        raise NoMatch(
            "the norm can't be fused, because its eps isn't a constant (with dynamic=True, set "
            "torch._dynamo.config.specialize_float)"
        )
    scale = _value(weight)
    if scale.dtype != y.dtype or scale.device != y.device or not _same(scale.shape, y.shape[-1:]):
        raise NoMatch(
            f"the weight of the norm is {list(scale.shape)} {scale.dtype}; to be fused, it must have the last dim, "
            "dtype and device of the norm's input"
        )
    if not _is_result(normed, y.dtype, found):
        raise NoMatch("to be fused, the result of the norm must have the shape and dtype of its input")
    found.weight, found.eps, found.normed = weight, eps, normed
    return found


def _quantized(found: Found) -> Found:
    chain: list[Node] = [found.normed]
    try:
        node = _only_user(found.normed)
        if _converted(node, torch.float32) is found.normed:
            chain.append(node)
            node = _only_user(node)
        scale = _divided_by(node, chain[-1])
        if scale is None or _value(node).dtype != torch.float32 or _value(scale).numel() != 1:
            return found
        if _value(scale).dtype != torch.float32 or _value(scale).device != _value(found.add).device:
            return found
        chain.append(node)
        limits: set[str] = set()
        node = _only_user(node)
        while (found_limits := _limits(node, chain[-1])) and not limits & found_limits:
            limits |= found_limits
            chain.append(node)
            node = _only_user(node)
    except NoMatch:
        return found
    if limits != {"low", "high"} or _converted(node, FP8) is not chain[-1] or not _is_result(node, FP8, found):
        return found
    found.inside += chain
    found.normed, found.scale = node, scale
    return found


def _divided_by(node: Node, x: Node) -> Node | None:
    if node.target is _ATEN.div.Tensor and node.args[0] is x and not node.kwargs:
        return node.args[1] if isinstance(node.args[1], Node) else None
    other = _other(node, x) if node.target is _ATEN.mul.Tensor else None
    if other is None or other.target is not _ATEN.reciprocal.default:
        return None
    return other.args[0] if isinstance(other.args[0], Node) else None


def _limits(node: Node, x: Node) -> set[str]:
    if node.target not in _CLAMPS or node.args[0] is not x or node.kwargs:
        return set()
    limits = (*node.args[1:], None)[:2]
    if node.target is _ATEN.clamp_max.default:
        limits = (None, limits[0])
    if limits[0] not in (None, -FP8_MAX) or limits[1] not in (None, FP8_MAX):
        return set()
    return {name for name, limit in zip(("low", "high"), limits, strict=True) if limit is not None}


def _value(node: Node) -> Tensor:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise NoMatch(
            f"node {node.name} of the graph has no meta['val'] with its shape and dtype, so it can't be fused"
        )
    return value


def _only_user(node: Node) -> Node:
    users = list(node.users)
    if len(users) != 1:
        raise NoMatch(
            f"the intermediate result {node.name} of the norm is also used elsewhere, perhaps in a backward pass, "
            "so the norm can't be fused"
        )
    return users[0]


def _other(node: Node, one: Node) -> Node | None:
    if len(node.args) != 2 or one not in node.args:
        return None
    other = node.args[1] if node.args[0] is one else node.args[0]
    return other if isinstance(other, Node) and other is not one else None


def _converted(node: Node, dtype: torch.dtype) -> Node | None:
    if node.target is _PRIMS.convert_element_type.default and node.args[1] == dtype:
        return node.args[0] if isinstance(node.args[0], Node) else None
    if node.target is TO_COPY and node.kwargs.get("dtype") == dtype:
        source = node.args[0]
        if isinstance(source, Node) and not set(node.kwargs) - {"dtype", "layout", "device"}:
            return source if _value(source).device == _value(node).device else None
    return None


def _is_square(node: Node) -> bool:
    if node.target is _ATEN.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    return node.target is _ATEN.mul.Tensor and node.args[0] is node.args[1]


def _is_result(node: Node, dtype: torch.dtype, found: Found) -> bool:
    value, reduced = _value(node), _value(found.reduced)
    return value.dtype == dtype and _alike(node, found.reduced) and _same(value.stride(), reduced.stride())


def _alike(one: Node, other: Node) -> bool:
    return _value(one).device == _value(other).device and _same(_value(one).shape, _value(other).shape)


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, as the compiler does

    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def needed_before(found: Found, order: dict[Node, int]) -> list[Node]:
    start = order[found.all_reduce]
    needed: set[Node] = set()
    waiting = [each for each in (found.residual, found.weight, found.scale) if each is not None]
    while waiting:
        node = waiting.pop()
        if node is found.all_reduce:
            raise NoMatch(
                "the residual, the weight or the scale is computed from the result of the all_reduce, so the norm "
                "can't be fused"
            )
        if order[node] > start and node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return sorted(needed, key=order.__getitem__)


def writes(node: Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and schema.is_mutable
