"""What a start costs a rank, counted exactly: operations on the store, and calls that make process groups.

`CountingStore` stands between torch and a store: gloo's C++ calls it through the trampolines of `dist.Store`, so its
own operations are counted as well as torch's and ours. `StoreOfOneRank` is a store for one process that plays rank r
of n. What belongs elsewhere: timing (`init_scaling`), processes (`forked_ranks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import parallel_state as ps


class CountingStore(dist.Store):
    """Passes every operation on to `inner`, and counts it in `counts`. An operation on k keys is one operation.

    Not counted: what `TCPStore` sends while it connects (a ping, and an `add` where it waits for the other workers).
    """

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.counts: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.counts["set"] += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.counts["get"] += 1
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        self.counts["add"] += 1
        return self.inner.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.counts["compare_set"] += 1
        return self.inner.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        self.counts["check"] += 1
        return self.inner.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.counts["wait"] += 1
        self.inner.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        self.counts["delete_key"] += 1
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        self.counts["num_keys"] += 1
        return self.inner.num_keys()

    def append(self, key: str, value: Any) -> None:
        self.counts["append"] += 1
        self.inner.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.counts["multi_get"] += 1
        return self.inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self.counts["multi_set"] += 1
        self.inner.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return self.inner.has_extended_api()

    deleteKey = delete_key  # the names under which C++ looks for them  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


class StoreOfOneRank(CountingStore):
    """For one process that is rank `rank` of `world_size`, the others being imagined: the last to come, all agreeing.

    It answers for them in two places of `parallel_state.process_groups.agreement`, and nowhere else:
    - the counter of those that came (`…/agree/<ranks>/<question>/count`) counts all ranks at once;
    - another rank's request (`…/agree/<ranks>/<question>/<rank>`) is this rank's own.
    Whatever else is read and nobody wrote would never come: it raises.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(dist.HashStore())
        self._rank = rank
        self._world_size = world_size

    def get(self, key: str) -> bytes:
        self.counts["get"] += 1
        return self.inner.get(self._written(key))

    def add(self, key: str, amount: int) -> int:
        everyone = "/agree/" in key and key.endswith("/count")
        return super().add(key, self._world_size if everyone else amount)

    def check(self, keys: list[str]) -> bool:
        return super().check([self._answered(key) for key in keys])

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.counts["wait"] += 1
        for key in keys:
            self._written(key)

    def _answered(self, key: str) -> str:
        question, _, last = key.rpartition("/")
        return f"{question}/{self._rank}" if "/agree/" in key and last.isdigit() else key

    def _written(self, key: str) -> str:
        key = self._answered(key)
        if not self.inner.check([key]):
            raise LookupError(f"{key} was written by nobody; in a world of one process it never will be")
        return key


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """How often what makes process groups is called within: `new_group`, and `make`, which all ways come to."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(c10d, name) for name in ("_new_group_with_tag", "_new_process_group_helper")}

    def new_group(*args: Any, **named: Any) -> Any:
        counts["new_group"] += 1
        return originals["_new_group_with_tag"](*args, **named)

    def make(*args: Any, **named: Any) -> Any:
        counts["make"] += 1
        made = originals["_new_process_group_helper"](*args, **named)
        counts["member of"] += made[0] is not dist.GroupMember.NON_GROUP_MEMBER
        return made

    c10d._new_group_with_tag, c10d._new_process_group_helper = new_group, make
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(c10d, name, original)


class Cost(NamedTuple):
    """Of one rank's start."""

    groups: int
    """Process groups that it made and is in, beside the default one."""
    calls: int
    """Calls of torch that make process groups, also those that it is in none of."""
    store: dict[str, int]
    """Operations on the store, by kind."""
    rank_sets: int
    """Different lists of ranks that its groups have, that of itself alone and that of the world among them."""


def cost_of_start(rank: int, world_size: int, sizes: Mapping[str, int], *, eager: bool) -> Cost:
    """What `initialize_model_parallel(**sizes)` costs rank `rank` of `world_size`, on torch's `fake` backend.

    The other ranks don't exist. The process must have no default group, and has none afterwards.
    """
    store = StoreOfOneRank(rank, world_size)
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # the backend `fake` of older versions of torch

    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        with calls_counted() as calls:
            world = ps.init_world_group(list(range(world_size)), 0, "fake")
            if world.pool is not None:
                world.pool.agreement.alone = False  # the store plays the others
            ps.initialize_model_parallel(**sizes, backend="fake", eager=eager)
        groups = ps.get_parallel_groups().groups.values()
        rank_sets = {tuple(group.ranks) for group in groups}
        return Cost(calls["member of"], calls["make"], dict(store.counts), len(rank_sets))
    finally:
        ps.destroy_distributed_environment()
        dist.destroy_process_group()
