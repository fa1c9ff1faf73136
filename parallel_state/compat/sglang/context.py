"""SGLang's `get_parallel()`: sizes, positions and groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from device_communicators.base.errors import GroupNotInitializedError, InvalidArgumentError, LayoutError
from parallel_state.compat.tables import named

SIZES = {
    "tp_size": 1, "pp_size": 1, "dp_size": 1, "dcp_size": 1, "ep_size": 1, "attn_dp_size": 1, "attn_cp_size": 1,
    "moe_dp_size": 1, "shared_experts_tp_size": None, "max_ep_size": None, "ep_join_rank_offset": 0,
}  # fmt: skip
"""Configured sizes and their defaults. SGLang's own context has no defaults."""

_AXES = ("tp", "pp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp", "dcp")
GROUPS = {each: f"{each}_group" for each in ("world", *_AXES, "shared_experts_tp")}

DERIVED: dict[str, Callable[[Any], Any]] = {
    "attn_tp_size": lambda of: of.tp_size // of.attn_dp_size // of.attn_cp_size,
    "attn_dp_enabled": lambda of: of.attn_dp_size > 1,
    "attn_dp_rank": lambda of: of.tp_rank // (of.attn_tp_size * of.attn_cp_size),
    "attn_dcp_size": lambda of: of.dcp_size,
    "attn_dcp_rank": lambda of: of.dcp_rank if of.dcp_enabled else 0,
    "dcp_enabled": lambda of: of.attn_dcp_size > 1,
    "moe_ep_size": lambda of: of.ep_size,
    "moe_tp_size": lambda of: of.tp_size // of.moe_ep_size // of.moe_dp_size,
    "num_dp_ranks": lambda of: of.dp_size * of.attn_dp_size,
    "dp_rank": lambda of: None,
    "launch_world_rank": lambda of: of.world_group.rank_in_group,
    "launch_world_size": lambda of: of.ep_join_rank_offset + of.tp_size * of.pp_size,
    "max_world_size": lambda of: of.max_ep_size or of.launch_world_size,
    **{f"{each}_rank": attrgetter(f"{each}_group.rank_in_group") for each in _AXES},
}
NAMES = frozenset([*SIZES, *GROUPS.values(), *DERIVED])


class ParallelContext:
    """SGLang's sizes, ranks in groups, and groups, as attributes. Overrides in a `with` block have priority over
    permanent ones.

    Reading a group that doesn't exist raises GroupNotInitializedError; an unknown name raises AttributeError.
    """

    __slots__ = ("_overrides", "_stamp")

    def __init__(self) -> None:
        self._overrides: dict[str, Any] = {}
        self._stamp: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for values in (self._overrides, self._stamp, SIZES):
            if name in values:
                return values[name]
        if name in DERIVED:
            return DERIVED[name](self)
        if name in NAMES:
            raise GroupNotInitializedError(
                f"get_parallel().{name} is not set, because its group doesn't exist; call "
                "initialize_model_parallel() first"
            )
        raise AttributeError(f"get_parallel() has no {name!r}")

    def override_permanently(self, **values: Any) -> None:
        """Sets attributes named in `NAMES`. `destroy_model_parallel` and `clear_stamp` undo this.

        If a name or value is invalid, sets none and raises InvalidArgumentError or LayoutError.
        """
        saved = self._stamp
        self._stamp = {**saved, **_known(values)}
        try:
            _check(self)
        except LayoutError:
            self._stamp = saved
            raise

    def clear_stamp(self) -> None:
        self._stamp = {}

    @contextmanager
    def override(self, **kwargs: Any) -> Iterator[ParallelContext]:
        """Sets values for the duration of a `with` block. Blocks can be nested.

        Raises the errors of override_permanently.
        """
        saved = self._overrides
        self._overrides = {**saved, **_known(kwargs)}
        try:
            _check(self)
            yield self
        finally:
            self._overrides = saved


def _known(values: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(values.keys() - NAMES)
    if unknown:
        raise InvalidArgumentError(f"get_parallel() has no {', '.join(unknown)}; it has {', '.join(sorted(NAMES))}")
    return values


def _check(context: ParallelContext) -> None:
    for whole, parts in {
        "tp_size": ("attn_tp_size", "attn_cp_size", "attn_dp_size"),
        "tp_size of experts": ("moe_tp_size", "moe_ep_size", "moe_dp_size"),
    }.items():
        sizes = [getattr(context, part) for part in parts]
        if sizes[0] * sizes[1] * sizes[2] != context.tp_size:
            shown = " × ".join(f"{part} {size}" for part, size in zip(parts, sizes, strict=True))
            raise LayoutError(f"{whole} must be the product of its parts, {shown}, but is {context.tp_size}")
    # Other groups may differ from their size: moe_dp_group may be attn_cp_group, which is larger.
    for name in ("tp", "pp", "attn_tp", "attn_cp", "moe_ep"):
        group, rank = (
            context._overrides.get(each, context._stamp.get(each)) for each in (f"{name}_group", f"{name}_rank")
        )
        size = getattr(context, f"{name}_size")
        if group is not None and group.world_size != size:
            raise LayoutError(
                f"{name}_size must be the number of ranks in {name}_group, {group.world_size}, but is {size}"
            )
        if rank is not None and not 0 <= rank < size:
            raise LayoutError(f"{name}_rank must be in 0 … {size - 1}, but is {rank}")


_PARALLEL = ParallelContext()


def get_parallel() -> Any:
    """Returns SGLang's own context if SGLang's module is imported, else this library's context."""
    theirs = sys.modules.get("sglang.srt.runtime_context")
    return _PARALLEL if theirs is None else theirs.get_parallel()


def field_getter(module: str, name: str, field: str, fact: str = "") -> Callable[[], Any]:
    def get() -> Any:
        found = getattr(get_parallel(), field)
        return getattr(found, fact) if fact else found

    return named(module, get, name, f"Returns `get_parallel().{field}{fact and '.'}{fact}`, once the group is made.")
