"""Getters of every group: by this library's short names, and by the long names of other projects.

    get_ep_group()  get_ep_world_size()  get_ep_rank()  get_ep_src_rank()  get_ep_global_ranks()  try_get_ep_group()
    get_expert_model_parallel_group()  …         if Megatron-core, vLLM or SGLang has the name

`make stubs` writes `getters.pyi`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from device_communicators.base.errors import RenamedError, no_such_name
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.layout.axes import AXES, Axis
from parallel_state.state import get_group, get_group_rank, get_group_ranks, try_get_group

_IN_STATE = {f"{prefix}get_{axis}_group" for prefix in ("", "try_") for axis in ("tp", "pp", "dp")}
FACTS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "world_size": ("int", lambda name: len(get_group_ranks(name)), "Returns the number of ranks in this rank's"),
    "rank": ("int", get_group_rank, "Returns this rank's position in its"),
    "src_rank": (
        "int",
        lambda name: get_group_ranks(name)[0],
        "Returns the first global rank of this rank's",
    ),
    "global_ranks": ("list[int]", get_group_ranks, "Returns a new list of the global ranks of this rank's"),
}
"""Last part of a getter's name -> (return type, function, beginning of the docstring)."""
LONG_NAMES = {
    "tp": ("group", "world_size", "rank", "src_rank"),
    "pp": ("group", "world_size", "rank"),
    "cp": ("group", "world_size", "rank", "global_ranks"),
    "ep": ("group", "world_size", "rank", "src_rank"),
    "etp": ("group", "world_size", "rank"),
    "model": ("group", "src_rank"),
    "tp_cp": ("group", "world_size", "rank"),
    "tp_ep": ("group", "world_size", "rank"),
    "tp_ep_pp": ("group",),
    "intra_dist_opt": ("group",),
    "inter_dist_opt": ("group",),
}
"""Axis -> last parts of the getters that Megatron-core, vLLM or SGLang has with the axis's long name."""


def _getters_of(axis: Axis) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    group_name, kind = axis.name, f"{axis.long_name.replace('_', '-')} group"
    first = "" if axis.always_made else " The first call may create the group: every rank of it must make that call."
    for stem, facts in ((axis.name, ("group", *FACTS)), (axis.long_name, LONG_NAMES.get(axis.name, ()))):
        for fact in facts:
            if fact == "group":

                def getter(check_initialized: bool = True) -> GroupCoordinator | None:
                    return get_group(group_name) if check_initialized else try_get_group(group_name)

                getter.__doc__ = (
                    f"Returns this rank's {kind}. {axis.about}{first} Before initialize_model_parallel it raises "
                    "GroupNotInitializedError, or returns None with check_initialized=False, as in Megatron."
                )
                yield f"get_{stem}_group", "(check_initialized: Literal[True] = True) -> GroupCoordinator", getter
            else:
                returned, of, text = FACTS[fact]
                fact_getter = _bound(of, group_name)
                fact_getter.__doc__ = f"{text} {kind}. Involves no other rank."
                yield f"get_{stem}_{fact}", f"() -> {returned}", fact_getter

    def try_get() -> GroupCoordinator | None:
        return try_get_group(group_name)

    try_get.__doc__ = f"Returns this rank's {kind}; None before initialize_model_parallel or if it is in none.{first}"
    yield f"try_get_{axis.name}_group", "() -> GroupCoordinator | None", try_get


def _bound(of: Callable[[str], Any], name: str) -> Callable[[], Any]:
    return lambda: of(name)


def _all_getters() -> dict[str, tuple[str, Callable[..., Any]]]:
    made: dict[str, tuple[str, Callable[..., Any]]] = {}
    for axis in AXES:
        for name, signature, function in _getters_of(axis):
            if name not in _IN_STATE:
                function.__name__ = function.__qualname__ = name
                made[name] = (signature, function)
    return made


def raise_missing(name: str, known: Sequence[str]) -> NoReturn:
    """Raises the error for a name that isn't among the package's `known` names.

    During `from parallel_state import …` this is an ImportError, because Python then drops an AttributeError's text.
    """
    for axis in AXES:
        old = {f"get_{axis.long_name}_{fact}" for fact in ("group", *FACTS)} | {f"try_get_{axis.long_name}_group"}
        if name in old:
            new = name.replace(axis.long_name, axis.name)
            text = f"parallel_state has no {name}, as neither Megatron-core, vLLM nor SGLang has it. Use {new}"
            if sys._getframe(2).f_code.co_filename.startswith("<frozen importlib"):
                raise ImportError(text, name=name)
            raise RenamedError(text)
    problem = "module 'parallel_state' has no attribute"
    if like := get_close_matches(name, [each for each in dir(GroupCoordinator) if each[0] != "_"], 1, 0.85):
        raise AttributeError(f"{problem} {name!r}; call a group's method: get_tp_group().{like[0]}(…)", name=name)
    raise AttributeError(no_such_name(problem, name, known), name=name)


_MADE = _all_getters()
globals().update({name: function for name, (_, function) in _MADE.items()})
__all__ = sorted(_MADE)
