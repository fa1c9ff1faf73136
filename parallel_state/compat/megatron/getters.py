"""Megatron's getters and setters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from parallel_state import state
from parallel_state.compat.errors import NotInitializedError, RefusedError
from parallel_state.compat.megatron import lookup
from parallel_state.compat.tables import named

# These return the kind for Megatron's flags. Flags of main's axis `gtp_remat`, which has one rank here, change nothing.


def _data_parallel(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> str:
    if partial_data_parallel and not with_context_parallel:
        raise RefusedError("partial_data_parallel needs with_context_parallel=True")
    return "intra_dp_cp" if partial_data_parallel else "dp_cp" if with_context_parallel else "dp"


def _expert_data_parallel(partial_expert_data_parallel: bool = False, *, with_gtp_remat: bool = True) -> str:
    return "intra_edp" if partial_expert_data_parallel else "edp"


def _tensor_and_data_parallel(with_context_parallel: bool = False) -> str:
    return "tp_dp_cp" if with_context_parallel else "tp_dp"


def _expert_tensor_model_pipeline_parallel(with_egtp_remat: bool = False) -> str:
    return "tp_ep_pp"


_BY_FLAGS: dict[str, Callable[..., str]] = {
    "data_parallel": _data_parallel,
    "tensor_and_data_parallel": _tensor_and_data_parallel,
    "expert_tensor_model_pipeline_parallel": _expert_tensor_model_pipeline_parallel,
    "expert_data_parallel": _expert_data_parallel,
}
_TEXTS = {
    "group": "Returns this rank's {} process group. Without one, returns None unless `check_initialized`, else raises "
    "NotInitializedError.",
    "group_gloo": "Returns the gloo group of this rank's {} group. Raises NotInitializedError if none was made.",
    "global_ranks": "Returns the global ranks of this rank's {} group.",
    "src_rank": "Returns the first global rank of this rank's {} group.",
    "world_size": "Returns the number of ranks in this rank's {} group, or the setter's value.",
    "rank": "Returns this rank's position in its {} group, or the setter's value.",
}
_NOT_ZERO = ("tp", "pp")
"""Kinds whose size and rank getters raise an error before init. For other kinds these getters return 0."""
_SETTERS = ("tensor_model_parallel_world_size", "tensor_model_parallel_rank", "pipeline_model_parallel_world_size",
            "pipeline_model_parallel_rank", "virtual_pipeline_model_parallel_world_size",
            "expert_model_parallel_world_size", "expert_model_parallel_rank", "expert_tensor_parallel_world_size",
            "expert_tensor_parallel_rank", "data_parallel_rank")  # fmt: skip


def _getter(stem: str, of_stem: str, fact: str, name: str) -> Callable[..., Any]:
    by_flags = _BY_FLAGS.get(stem, lambda: of_stem)
    flags = [*inspect.signature(by_flags).parameters.values()]
    get: Any
    if fact in ("group", "global_ranks"):

        def get(check_initialized: bool = True, *given: bool, **named: bool) -> Any:
            kind = by_flags(*given, **named)
            if not check_initialized and lookup.group_of(kind) is None:
                return None
            return lookup.required(kind) if fact == "group" else lookup.ranks_of(kind)

        flags.insert(0, next(iter(inspect.signature(get).parameters.values())))
    elif fact in ("world_size", "rank"):
        of = lookup.size_of if fact == "world_size" else lookup.rank_of

        def get(*given: bool, **named: bool) -> Any:
            chosen = lookup.CHOSEN.get(name)
            return _number(by_flags(*given, **named), of, name) if chosen is None else chosen

    elif fact == "src_rank":

        def get() -> int:
            return lookup.ranks_of(by_flags())[0]

    else:  # group_gloo
        flags = [each for each in flags if each.kind is not each.KEYWORD_ONLY]

        def get(*given: bool, **named: bool) -> Any:
            return lookup.gloo_group_of(by_flags(*given, **named))

    get.__signature__ = inspect.signature(get).replace(parameters=flags)
    return get


def _number(kind: str, of: Callable[[str], int], name: str) -> Any:
    has_none = kind in ("etp", "dp_replicate") and lookup.group_of(kind) is None
    if has_none and kind == "etp":  # as in Megatron, for programs that set sizes without making groups
        return lookup.CHOSEN.get(name.replace("expert_tensor", "tensor_model"))
    return 0 if has_none or (kind not in _NOT_ZERO and lookup.is_before_start()) else of(kind)


def _setter(name: str) -> Callable[..., None]:
    def set_world_size(world_size: int | None) -> None:
        lookup.CHOSEN[f"get_{name}"] = world_size

    def set_rank(rank: int | None) -> None:
        lookup.CHOSEN[f"get_{name}"] = rank

    text = f"Sets the value that get_{name}() returns; None resets it to the group's. Only this rank is affected."
    return named(__name__, set_rank if name.endswith("rank") else set_world_size, f"set_{name}", text)


def _stage(place: Callable[[int, int], int], name: str, words: str) -> Callable[[], int]:
    def get() -> int:
        rank, size = (_get(f"pipeline_model_parallel_{fact}") for fact in ("rank", "world_size"))
        return lookup.ranks_of("pp")[place(rank, size)]

    return named(__name__, get, f"get_pipeline_model_parallel_{name}_rank", f"Returns the global rank of {words}.")


def _made() -> Iterator[Callable[..., Any]]:
    for stem, (kind, facts) in lookup.GETTERS.items():
        words = stem.replace("_", "-") if stem in _BY_FLAGS else f"`{kind}`"
        for fact in facts.split():
            name = f"get_{stem}_{fact}"
            yield named(__name__, _getter(stem, kind, fact, name), name, _TEXTS[fact].format(words))
    yield from map(_setter, _SETTERS)
    yield _stage(lambda rank, size: 0, "first", "this pipeline's first stage")
    yield _stage(lambda rank, size: size - 1, "last", "this pipeline's last stage")
    yield _stage(lambda rank, size: (rank + 1) % size, "next", "the next stage; the first follows the last")
    yield _stage(lambda rank, size: (rank - 1) % size, "prev", "the previous stage; the last precedes the first")


globals().update({made.__name__: made for made in _made()})


def _get(fact: str) -> Any:
    return globals()[f"get_{fact}"]()


def _warn(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated, {instead}", DeprecationWarning, stacklevel=3)


def is_initialized() -> bool:
    return lookup.has_group("dp")


def is_unitialized() -> bool:
    _warn("is_unitialized", "use is_initialized instead")
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    return all(map(lookup.has_group, ("tp", "pp", "dp")))


def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
    *,
    with_gtp_remat: bool = True,
) -> Any:
    """Returns the data-parallel group `dp`, or `dp_cp` if `with_context_parallel`.

    Instead of `dp_cp`, returns `intra_dp_cp` (the ranks of one optimizer instance) if `partial_data_parallel`, else a
    second group with the ranks of `dp_cp` if `independent_all_gather`. `with_gtp_remat` has no effect.
    """
    if with_context_parallel and independent_all_gather and not partial_data_parallel:
        return lookup.required("dp_cp_ag")
    return lookup.required(_data_parallel(with_context_parallel, partial_data_parallel))


def has_separate_all_gather_group() -> bool:
    return lookup.group_of("dp_cp_ag") is not None


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    return lookup.ranks_of("dp_cp" if with_context_parallel else "dp")[0]


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Any:
    return lookup.required(("tp" if tp_only_amax_red else "tp_dp") + ("_cp" if with_context_parallel else ""))


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    _warn("get_data_modulo_expert_parallel_group", "use get_expert_data_parallel_group instead")
    return lookup.required(_expert_data_parallel(partial_expert_data_parallel))


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Any] | None:
    """Returns this rank's context-parallel groups, one for each level of the hierarchy.

    Without such groups, returns None, or raises NotInitializedError if `check_initialized`.
    """
    if not lookup.HIERARCHICAL and check_initialized:
        raise NotInitializedError(
            "there are no hierarchical context-parallel groups; pass hierarchical_context_parallel_sizes to "
            "initialize_model_parallel"
        )
    return list(lookup.HIERARCHICAL) or None


def get_hybrid_data_context_parallel_groups(check_initialized: bool = True, group_size: int | None = None) -> Any:
    """Returns this rank's group of `group_size` data- and context-parallel ranks. Raises KeyError if there is none."""
    if (0 if lookup.is_before_start() else lookup.size_of(_data_parallel(True))) == group_size:
        return lookup.required("dp_cp") if check_initialized else lookup.group_of("dp_cp")
    return lookup.HYBRID[group_size]  # type: ignore[index]


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    return lookup.CHOSEN.get("get_virtual_pipeline_model_parallel_rank")


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets this rank's virtual pipeline stage, here and in `parallel_state`'s own groups if they have stage `rank`."""
    _warn("set_virtual_pipeline_model_parallel_rank", "pass vp_stage to is_pipeline_first_stage and others")
    lookup.CHOSEN["get_virtual_pipeline_model_parallel_rank"] = rank
    virtual = state.get_parallel_groups().virtual_pipeline if state.model_parallel_is_initialized() else None
    if virtual is not None and rank is not None and 0 <= rank < virtual.size:
        virtual.rank = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return lookup.CHOSEN.get("get_virtual_pipeline_model_parallel_world_size")


def _is_stage(last: bool, ignore_virtual: bool, vp_stage: int | None) -> bool:
    virtual = get_virtual_pipeline_model_parallel_world_size()
    if not ignore_virtual and virtual is not None:
        if vp_stage is None:
            raise RefusedError("pass vp_stage with ignore_virtual=False, because the pipeline has virtual stages")
        if vp_stage != (virtual - 1 if last else 0):
            return False
    stage = _get("pipeline_model_parallel_world_size") - 1 if last else 0
    return bool(_get("pipeline_model_parallel_rank") == stage)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    return _is_stage(False, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    return _is_stage(True, ignore_virtual, vp_stage)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    if lookup.group_of("embedding") is None:
        return False
    ranks, rank = lookup.ranks_of("embedding"), dist.get_rank()
    if ignore_virtual or rank not in (ranks[0], ranks[-1]):
        return rank in ranks
    return _is_stage(rank != ranks[0], False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    return lookup.group_of("position_embedding") is not None


def get_all_ranks() -> str:
    stems = ("tensor_model_parallel", "data_parallel", "context_parallel", "pipeline_model_parallel",
             "expert_model_parallel")  # fmt: skip
    return "_".join(str(_get(f"{stem}_rank") or 0) for stem in stems)
