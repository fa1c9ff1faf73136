"""The smallest change that makes sizes fit: candidates by distance, tried one after the other with `resolve_layout`.

Distance is the ratio of new and old value, so that tp=4 is nearer to 3 than 2 is; a change of two sizes is as far as
the product of both ratios. Sizes are searched among the divisors of the world, world sizes among the multiples of the
product of the sizes that fill whole nodes. `resolve_layout` decides; a cheap test of the product goes before it.
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
"""Tries of one search: about 0.2 s with 16,384 ranks."""
MAX_VALUES = 12
"""Values of a size in a pair: each pair of sizes has its square."""
MAX_MULTIPLES = 16
"""World sizes to try on either side."""
_TABLE = tuple(axis.name for axis in AXES)
DENSE = tuple(
    axis.name for axis in AXES if axis.size_parameter and not axis.experts and axis.within is None
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """New values that fit, by option without dashes (`tp`, `world-size`, `order`); None: leave the option out."""

    values: Mapping[str, int | str | None]
    before: Mapping[str, int | str | None]

    def __str__(self) -> str:
        return ", ".join(
            f"leave out --{name} ({self.before[name]})" if value is None
            else f"--{name} {value} (from {self.before[name]})"
            for name, value in self.values.items()
        )  # fmt: skip


def changes_that_fit(request: Request) -> list[Change]:
    """Returns what would make `request` fit, the smallest change first; empty if there is none of one or two values."""
    orders = list(islice(_orders(request), 1))
    if orders:
        return orders
    sizes = list(islice(_sizes(request, 1), 1)) or list(islice(_sizes(request, 2), 1))
    sizes = [*_experts_whole(request), *sizes]
    worlds = _worlds(request)
    nodes, rest = divmod(request.world_size, request.gpus_per_node)
    return [*worlds, *sizes] if nodes and rest else [*sizes, *worlds]  # a partly filled node is likelier the slip


def _fits(request: Request) -> bool:
    try:
        request.resolve()
    except LayoutError:
        return False
    return True


def _orders(request: Request) -> Iterator[Change]:
    """Yields presets of a similar name, the order with what it lacks and pp at its end, then other presets."""
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
    """Returns `names` with `name` before the first that comes later in the table of axes, whose order is Megatron's."""
    if name in names:
        return list(names)
    later = [place for place, other in enumerate(names) if _TABLE.index(other) > _TABLE.index(name)]
    place = later[0] if later else len(names)
    return [*names[:place], name, *names[place:]]


def _sizes(request: Request, count: int) -> Iterator[Change]:
    """Changes of `count` of the given sizes, the nearest first."""
    if request.world_size < 1:
        return
    candidates = divisors(request.world_size)
    options: list[tuple[float, tuple[tuple[str, int | None], ...]]] = []
    for names in combinations(request.sizes, count):
        limit = MAX_VALUES if count > 1 else len(candidates)
        choices = [[*_nearest(request.sizes[name], candidates)[:limit], None] for name in names]
        options += (
            (prod(_distance(request.sizes[name], value) for name, value in zip(names, values, strict=True)),
             tuple(zip(names, values, strict=True)))
            for values in product(*choices)
        )  # fmt: skip
    # Of two that are equally near, rather pp than tp, which the model and the node set.
    options.sort(key=lambda option: (option[0], [(-_TABLE.index(name), value or 0) for name, value in option[1]]))
    sizes = ({**request.sizes, **dict(option)} for _, option in options)
    plausible = (given for given in sizes if request.world_size % _product(given) == 0)
    for given in islice(plausible, MAX_TRIES):
        kept = {name: size for name, size in given.items() if size is not None}
        if _fits(replace(request, sizes=kept)):
            changed = {name: given[name] for name in request.sizes if given[name] != request.sizes[name]}
            yield Change(_by_option(changed), _by_option({name: request.sizes[name] for name in changed}))


def _experts_whole(request: Request) -> list[Change]:
    """Returns `--etp 1` if experts took the tensor-parallel size over and fit without it: no given size changes."""
    tp = request.sizes.get("tp", 1)
    if "etp" in request.sizes or tp == 1 or request.sizes.get("ep", 1) == 1:
        return []
    fits = _fits(replace(request, sizes={**request.sizes, "etp": 1}))
    return [Change({"etp": 1}, {"etp": f"{tp}, the tensor-parallel size unless given"})] if fits else []


def _nearest(before: int, candidates: Sequence[int]) -> list[int]:
    others = [value for value in candidates if value != before]
    return sorted(others, key=lambda value: _distance(before, value))


def _distance(before: int, after: int | None) -> float:
    """Returns the ratio of both; leaving a size out comes after every value that fits."""
    if after is None:
        return 1e9
    before = max(1, before)
    return max(before, after) / min(before, after)


def _by_option(values: Mapping[str, int | None]) -> dict[str, int | str | None]:
    return {name.replace("_", "-"): value for name, value in values.items()}


def _worlds(request: Request) -> list[Change]:
    """Returns the nearest world size below and the nearest one above that fit.

    They fill whole nodes, unless one node is enough.
    """
    known = _product(request.sizes)
    step = known if max(known, request.world_size) < request.gpus_per_node else lcm(known, request.gpus_per_node)
    down = (request.world_size - 1) // step
    up = request.world_size // step + 1
    found = []
    for multiples in (range(down, max(0, down - MAX_MULTIPLES), -1), range(up, up + MAX_MULTIPLES)):
        worlds = _first_that_fits(request, (multiple * step for multiple in multiples))
        found += worlds
    if not found and known != request.world_size:  # a size of every axis was given: only their product fits
        found = _first_that_fits(request, [known])
    found.sort(key=lambda world: _distance(request.world_size, world))
    return [Change({"world-size": world}, {"world-size": request.world_size}) for world in found]


def _first_that_fits(request: Request, worlds: Iterable[int]) -> list[int]:
    return list(islice((world for world in worlds if _fits(replace(request, world_size=world))), 1))


def _product(sizes: Mapping[str, int | None]) -> int:
    """Returns the product of the sizes that dense layers have: the world must be a multiple of it."""
    left_out = {"dp_shard", "dp_replicate"} if (sizes.get("dp") or 0) > 0 else {"dp"}
    return prod(max(1, size or 1) for name, size in sizes.items() if name in DENSE and name not in left_out)
