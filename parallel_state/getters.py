"""The getters of every group in the axis table, by its short and by its long name.

    get_ep_group()  get_ep_world_size()  get_ep_rank()  get_ep_src_rank()  get_ep_global_ranks()  try_get_ep_group()
    get_expert_model_parallel_group()  …

They are made from the table, so a new row has them at once. `getters.pyi` says the same to type checkers and editors;
`make stubs` writes it, and a test compares. tp, pp, dp and world have theirs in `state`; what
Megatron's have beyond this is in `aliases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from parallel_state.coordinator import GroupCoordinator
from parallel_state.layout.axes import AXES, Axis
from parallel_state.state import (
    get_dp_group,
    get_group,
    get_group_rank,
    get_group_ranks,
    get_pp_group,
    get_tp_group,
    try_get_dp_group,
    try_get_group,
    try_get_pp_group,
    try_get_tp_group,
)

# Of these the getters of the group itself, hot and in every layer, are written out.
_IN_STATE: dict[str, tuple[Callable[[], GroupCoordinator], Callable[[], GroupCoordinator | None]]] = {
    "tp": (get_tp_group, try_get_tp_group),
    "pp": (get_pp_group, try_get_pp_group),
    "dp": (get_dp_group, try_get_dp_group),
}
_WITH_FLAGS = {
    *(f"get_data_parallel_{what}" for what in ("group", "world_size", "rank", "src_rank")),
    *(f"get_expert_data_parallel_{what}" for what in ("group", "world_size", "rank")),
    "get_tensor_and_data_parallel_group",
}
"""Megatron's take flags; they are in `aliases`."""
_FACTS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "world_size": ("int", lambda name: len(get_group_ranks(name)), "The number of ranks in this rank's {} group."),
    "rank": ("int", get_group_rank, "This rank's position in its {} group."),
    "src_rank": ("int", lambda name: get_group_ranks(name)[0], "Global rank of the first one in this rank's {} group."),
    "global_ranks": ("list[int]", get_group_ranks, "Global ranks of this rank's {} group, a new list."),
}
"""What is known without a group: these make none, and any rank may ask."""


def _getters_of(axis: Axis, stem: str) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Name, signature and function of each getter of a row under one of its names."""
    find, try_find = _IN_STATE.get(axis.name, (None, None))
    what = axis.long_name.replace("_", "-")
    name = axis.name

    def get(check_initialized: bool = True) -> GroupCoordinator | None:
        if not check_initialized:
            return try_get()
        return find() if find is not None else get_group(name)

    def try_get() -> GroupCoordinator | None:
        return try_find() if try_find is not None else try_get_group(name)

    first = "" if axis.always_made else " Every rank of the group makes the first call: it may make the group."
    get.__doc__ = (
        f"This rank's {what} group. {axis.about}{first} GroupNotInitializedError before initialize_model_parallel; "
        "with check_initialized=False None, as in Megatron."
    )
    try_get.__doc__ = (
        f"This rank's {what} group; None before initialize_model_parallel, or where this rank is in none.{first}"
    )
    yield f"get_{stem}_group", "(check_initialized: Literal[True] = True) -> GroupCoordinator", get
    yield f"try_get_{stem}_group", "() -> GroupCoordinator | None", try_get
    for fact, (kind, of, text) in _FACTS.items():
        tell = _teller(name, of)
        tell.__doc__ = f"{text.format(what)} No call to other ranks."
        yield f"get_{stem}_{fact}", f"() -> {kind}", tell


def _teller(name: str, of: Callable[[str], Any]) -> Callable[[], Any]:
    def tell() -> Any:
        return of(name)

    return tell


def _all_getters() -> dict[str, tuple[str, Callable[..., Any]]]:
    made: dict[str, tuple[str, Callable[..., Any]]] = {}
    for axis in AXES:
        for stem in dict.fromkeys((axis.name, axis.long_name)):
            for name, signature, function in _getters_of(axis, stem):
                if name in _WITH_FLAGS or (stem in _IN_STATE and name.endswith(f"{stem}_group")):
                    continue
                function.__name__ = function.__qualname__ = name
                made[name] = (signature, function)
    return made


_MADE = _all_getters()
globals().update({name: function for name, (_, function) in _MADE.items()})
__all__ = sorted(_MADE)


def _definition(name: str, signature: str) -> str:
    if "Literal" not in signature:
        return f"def {name}{signature}: ...\n"
    other = "(check_initialized: bool) -> GroupCoordinator | None"
    return f"@overload\ndef {name}{signature}: ...\n@overload\ndef {name}{other}: ...\n"


def stub() -> str:
    """The text of getters.pyi."""
    names = "".join(f'    "{name}",\n' for name in __all__)
    defs = "".join(_definition(name, _MADE[name][0]) for name in __all__)
    return (
        "# Written by `make stubs` from the axis table.\n"
        "from typing import Literal, overload\n\n"
        "from parallel_state.coordinator import GroupCoordinator\n\n"
        f"__all__ = [\n{names}]\n\n{defs}"
        "def stub() -> str: ...\n"
        "def write_stub() -> None: ...\n"
    )


def write_stub() -> None:
    Path(__file__).with_suffix(".pyi").write_text(stub())
