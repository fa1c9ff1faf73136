"""Finds the smallest change of `plan`'s options that makes the layout valid.

A change's size is the product of the factors by which options grow or shrink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import combinations, islice, product
from math import lcm, prod

from device_communicators.base.errors import LayoutError
from parallel_state.layout.axes import AXES, BY_NAME, PRESETS
from parallel_state.layout.ranks import divisors, split_order
from parallel_state.tools.plan.groups import Request

MAX_TRIES = 200
"""Most changes that are tried: 200 take about 0.2 s with 16,384 ranks."""
MAX_VALUES = 12
"""Values tried for each size when two sizes change."""
MAX_MULTIPLES = 16
_TABLE = tuple(axis.name for axis in AXES)
DENSE = tuple(axis.name for axis in AXES if axis.size_parameter and not axis.experts and axis.within is None)


@dataclass(frozen=True)
class Change:
    """A change of `plan`'s options. `values`: option (`tp`, `world-size`, `order`) -> new value, or None to omit it.
    `before`: old values.
    """

    values: Mapping[str, int | str | None]
    before: Mapping[str, int | str | None]

    def __str__(self) -> str:
        return ", ".join(
            f"leave out --{name} ({self.before[name]})" if value is None
            else f"--{name} {value} (from {self.before[name]})"
            for name, value in self.values.items()
        )  # fmt: skip


def changes_that_fit(request: Request) -> list[Change]:
    """Returns changes of options that make `request`'s layout valid, the most likely first. Each changes at most two
    options.
    """
    orders = list(islice(_orders(request), 1))
    if orders:
        return orders
    sizes = list(islice(_sizes(request, 1), 1)) or list(islice(_sizes(request, 2), 1))
    sizes, worlds = [*_experts_whole(request), *sizes], _worlds(request)
    nodes, rest = divmod(request.world_size, request.gpus_per_node)
    return [*worlds, *sizes] if nodes and rest else [*sizes, *worlds]  # a partly filled node is more likely the mistake


def _fits(request: Request) -> bool:
    try:
        request.resolve()
    except LayoutError:
        return False
    return True


def _orders(request: Request) -> Iterator[Change]:
    if request.order in PRESETS:
        return
    tokens = [token.lower() for token in split_order(request.order)]
    completed = [token for token in dict.fromkeys(tokens) if token in BY_NAME]
    if not {"dp", "dp_shard", "dp_replicate"} & {*completed, *request.sizes}:
        completed = _insert(completed, "dp")
    for name in (*DENSE, "ep"):
        if request.sizes.get(name, 1) != 1:
            completed = _insert(completed, name)
    ends_with_pp = [*(name for name in completed if name != "pp"), *(["pp"] if "pp" in completed else [])]
    similar = get_close_matches(request.order, PRESETS, n=1)
    for order in (*similar, "-".join(completed), "-".join(ends_with_pp), *PRESETS):
        if order != request.order and _fits(replace(request, order=order)):
            yield Change({"order": order}, {"order": request.order})


def _insert(names: Sequence[str], name: str) -> list[str]:
    if name in names:
        return list(names)
    later = [place for place, other in enumerate(names) if _TABLE.index(other) > _TABLE.index(name)]
    place = later[0] if later else len(names)
    return [*names[:place], name, *names[place:]]


def _sizes(request: Request, count: int) -> Iterator[Change]:
    if request.world_size < 1:
        return
    candidates = divisors(request.world_size)
    options: list[tuple[float, tuple[tuple[str, int | None], ...]]] = []
    for names in combinations(request.sizes, count):
        limit = MAX_VALUES if count > 1 else len(candidates)
        choices = [[*_nearest(request.sizes[name], candidates, limit), None] for name in names]
        options += (
            (prod(_distance(request.sizes[name], value) for name, value in zip(names, values, strict=True)),
             tuple(zip(names, values, strict=True)))
            for values in product(*choices)
        )  # fmt: skip
    # Of two equally near changes prefer pp: tp is determined by the model and the node.
    options.sort(key=lambda option: (option[0], [(-_TABLE.index(name), value or 0) for name, value in option[1]]))
    sizes = ({**request.sizes, **dict(option)} for _, option in options)
    plausible = (given for given in sizes if request.world_size % _product(given) == 0)
    for given in islice(plausible, MAX_TRIES):
        kept = {name: size for name, size in given.items() if size is not None}
        if _fits(replace(request, sizes=kept)):
            changed = {name: given[name] for name in request.sizes if given[name] != request.sizes[name]}
            yield Change(_by_option(changed), _by_option({name: request.sizes[name] for name in changed}))


def _experts_whole(request: Request) -> list[Change]:
    tp = request.sizes.get("tp", 1)
    if "etp" in request.sizes or tp == 1 or request.sizes.get("ep", 1) == 1:
        return []
    fits = _fits(replace(request, sizes={**request.sizes, "etp": 1}))
    return [Change({"etp": 1}, {"etp": f"{tp}, the tensor-parallel size unless given"})] if fits else []


def _nearest(before: int, candidates: Sequence[int], limit: int) -> list[int]:
    others = [value for value in candidates if value != before]
    return sorted(others, key=lambda value: _distance(before, value))[:limit]


def _distance(before: int, after: int | None) -> float:
    if after is None:
        return 1e9
    before = max(1, before)
    return max(before, after) / min(before, after)


def _by_option(values: Mapping[str, int | None]) -> dict[str, int | str | None]:
    return {name.replace("_", "-"): value for name, value in values.items()}


def _worlds(request: Request) -> list[Change]:
    known = _product(request.sizes)
    step = known if max(known, request.world_size) < request.gpus_per_node else lcm(known, request.gpus_per_node)
    down = (request.world_size - 1) // step
    up = request.world_size // step + 1
    found = []
    for multiples in (range(down, max(0, down - MAX_MULTIPLES), -1), range(up, up + MAX_MULTIPLES)):
        found += _first_that_fits(request, (multiple * step for multiple in multiples))
    if not found and known != request.world_size:  # if all sizes are given, only their product fits
        found = _first_that_fits(request, [known])
    found.sort(key=lambda world: _distance(request.world_size, world))
    return [Change({"world-size": world}, {"world-size": request.world_size}) for world in found]


def _first_that_fits(request: Request, worlds: Iterable[int]) -> list[int]:
    return list(islice((world for world in worlds if _fits(replace(request, world_size=world))), 1))


def _product(sizes: Mapping[str, int | None]) -> int:
    left_out = {"dp_shard", "dp_replicate"} if (sizes.get("dp") or 0) > 0 else {"dp"}
    return prod(max(1, size or 1) for name, size in sizes.items() if name in DENSE and name not in left_out)
