"""What a layout's groups cost a rank: how many communicators, and an estimate of the GPU memory that they take.

The library measures nothing here. The figures are what others published, each with its source; they differ by GPU,
NCCL version and settings (`NCCL_BUFFSIZE`, `NCCL_MAX_NCHANNELS`), so that a range is all one can give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parallel_state.tools.plan.groups import Plan, whole_of


@dataclass(frozen=True)
class Figure:
    """A published figure of the memory that NCCL takes on one GPU."""

    what: str
    megabytes: float
    source: str


LOW = Figure("a communicator of 2 A100s after its first all-reduce", 544, "github.com/NVIDIA/nccl/issues/964")
HIGH = Figure("a communicator after its first all-reduce, GPU not told", 1600, "github.com/NVIDIA/nccl/issues/864")
ALL_TO_ALL = Figure("the first all-to-all on 8 H100s, in addition", 3280, "github.com/NVIDIA/nccl/issues/1685")
FIGURES = (
    LOW,
    HIGH,
    ALL_TO_ALL,
    Figure(
        "one connection in one channel; a ring has two in each of up to 32 channels", 10.5,
        "github.com/NVIDIA/nccl/issues/1685, issues/864",
    ),
    Figure("NCCL_BUFFSIZE, the largest part of it", 4.2, "NCCL user guide, environment variables"),
    Figure("all of a rank's communicators, Megatron with tp=2 pp=2 dp=2 on 8 H100s", 7000,
           "github.com/verl-project/verl/pull/6408"),
    Figure("all of a rank's communicators, vLLM with tp=4", 1000, "github.com/vllm-project/vllm/pull/51485"),
)  # fmt: skip
"""The first three are reckoned with; the rest is there to judge the result by."""

BASIS = "cited, not measured here"


@dataclass(frozen=True)
class Communicators:
    """The sets of ranks that a rank of the first stage is in: each is one process group and one communicator."""

    made: tuple[tuple[str, ...], ...]
    """Per set, the kinds of group that share it; those that initialize_model_parallel makes, and the world."""
    all_kinds: tuple[tuple[str, ...], ...]
    """The same if somebody asked for every kind in the table."""
    groups_made: int
    """Process groups in the whole world: every rank of torch takes part in making each."""
    groups_of_all_kinds: int
    all_to_all: bool
    """Whether expert-parallel ranks exchange tokens."""

    def megabytes(self, communicators: int) -> tuple[float, float]:
        """GPU memory of a rank with so many communicators, least and most: their number times a published figure.

        Expert-parallel ranks exchange tokens by all-to-all, which may connect every pair of ranks: that counts for the
        most, not for the least.
        """
        extra = ALL_TO_ALL.megabytes if self.all_to_all and communicators else 0
        return communicators * LOW.megabytes, communicators * HIGH.megabytes + extra


def count_communicators(plan: Plan, rank: int = 0) -> Communicators:
    """The communicators of `rank`; rank 0 has as many as any, for only first stages have both embedding groups."""
    made = [kind.name for kind in plan.kinds if kind.made]
    everything = [kind.name for kind in plan.kinds]
    ends = {
        kind.name: list(map(tuple, plan.layout.groups(kind.name)))
        for kind in plan.kinds
        if whole_of(plan.layout, kind.name) is not None and kind.size > 1
    }
    return Communicators(
        made=_sets_of(plan, rank, made),
        all_kinds=_sets_of(plan, rank, everything),
        groups_made=_count_groups(plan, made, ends),
        groups_of_all_kinds=_count_groups(plan, everything, ends),
        all_to_all=plan.made("ep") is not None,
    )


def _sets_of(plan: Plan, rank: int, names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    sets: dict[tuple[int, ...], list[str]] = {tuple(range(plan.world_size)): ["world"]}
    for name in names:
        sets.setdefault(tuple(plan.layout.group_of(rank, name)), []).append(name)
    return tuple(tuple(sharing) for ranks, sharing in sets.items() if len(ranks) > 1)


def _count_groups(plan: Plan, names: Iterable[str], ends_of: Mapping[str, Sequence[tuple[int, ...]]]) -> int:
    """How many sets of several ranks these kinds have; kinds that are no ends of others share all of them, or none."""
    kinds = [kind for kind in map(plan.kind, names) if kind is not None and kind.size > 1]
    shared: set[str] = set()
    ends: set[tuple[int, ...]] = set()
    count = 1 if plan.world_size > 1 else 0
    for kind in sorted(kinds, key=lambda kind: whole_of(plan.layout, kind.name) is not None):
        if kind.name in shared or kind.size == plan.world_size:
            continue
        shared.update(kind.same_as)
        if whole_of(plan.layout, kind.name) is None:
            count += kind.count
        else:
            ends.update(ends_of[kind.name])
    whole: dict[tuple[int, ...], list[str]] = {tuple(range(plan.world_size)): []}
    for kind in kinds:
        if whole_of(plan.layout, kind.name) is None:
            whole.setdefault(_from_zero(kind.first), []).append(kind.name)

    def is_counted(ranks: tuple[int, ...]) -> bool:
        """Whether it is the world, or one of a kind that is no end of another."""
        names = whole.get(_from_zero(ranks), [])
        return len(ranks) == plan.world_size or any(
            plan.layout.group_of(ranks[0], name) == list(ranks) for name in names
        )

    return count + sum(len(ranks) > 1 and not is_counted(ranks) for ranks in ends)


def _from_zero(ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank - ranks[0] for rank in ranks)
