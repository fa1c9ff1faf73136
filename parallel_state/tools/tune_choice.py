"""From times by size to thresholds: which candidate is chosen up to which size. Pure arithmetic.

Candidates stand in an order, from the one for small messages to the one for all that is larger; each begins where the
one before it ends. Among all such divisions the one is chosen whose times are least, as ratios: each size counts alike,
whether it takes a microsecond or a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def boundaries(times: Mapping[int, Mapping[str, float]], order: Sequence[str]) -> dict[str, int]:
    """For each candidate but the last of `order` the largest size in bytes that it gets; 0 where it gets none.

    `times`: size -> candidate -> its time, of the slowest rank. A candidate that has none at a size (it was wrong, or
    the size doesn't fit) isn't chosen there; sizes at which only one candidate has a time still count. Of divisions
    that are equally good, the one that leaves more to later candidates is taken.
    """
    sizes = sorted(size for size, by_name in times.items() if any(name in by_name for name in order))
    # best[c]: of the sizes so far, the cost of the best division whose last size has candidate c, and where each ended.
    best: list[tuple[float, dict[str, int]]] = [(0.0, {})] * len(order)
    for size in sizes:
        after: list[tuple[float, dict[str, int]]] = []
        for at, name in enumerate(order):
            cost, ends = min(best[: at + 1], key=lambda each: each[0])
            time = times[size].get(name)
            after.append((cost + (math.inf if time is None else math.log(time)), {**ends, name: size}))
        best = after
    _, ends = min(reversed(best), key=lambda each: each[0]) if sizes else (0.0, {})
    return {name: ends.get(name, 0) for name in order[:-1]}
