"""A model-parallel unit for DeepSpeed 0.19: `deepspeed.initialize(…, mpu=parallel_state.compat.deepspeed)`.

Call `initialize_model_parallel` after deepspeed.init_distributed and before deepspeed.initialize. Otherwise the first
getter call creates one data-parallel group of all ranks; every rank must then make this call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel_state.compat.tables import absent, named
from parallel_state.functions.getters import FACTS
from parallel_state.state import get_group, initialize_model_parallel, model_parallel_is_initialized

_FACTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "group": (lambda name: get_group(name).device_group, "Returns the torch ProcessGroup of this rank's"),
    **{fact.replace("global_", "group_"): row[1:] for fact, row in FACTS.items()},
}
_USUAL = ("group", "rank", "world_size")
_ASKED: dict[str, tuple[str, tuple[str, ...]]] = {
    "data_parallel": ("dp", (*_USUAL, "group_ranks")),
    "model_parallel": ("model", _USUAL),
    "tensor_model_parallel": ("tp", (*_USUAL, "src_rank")),
    "slice_parallel": ("tp", _USUAL),
    "pipeline_model_parallel": ("pp", _USUAL),
    "pipe_parallel": ("pp", ("group", "world_size")),
    "pipeline_parallel": ("pp", ("world_size",)),
    "sequence_parallel": ("cp", _USUAL),
    "sequence_data_parallel": ("dp_cp", _USUAL),
}
"""DeepSpeed's name of a group -> (this library's name, endings of the getters that DeepSpeed has)."""

MISSING: dict[str, str] = {
    "initialize_sequence_parallel": "DeepSpeed treats an mpu with this name as sequence parallel only and calls none "
    "of its other getters; pass the sizes to initialize_model_parallel instead",
    "_init_tp_mesh_device": "part of DeepSpeed's own `utils.groups`, which AutoTP uses as the mpu",
}


def _getter(name: str, axis: str, fact: str) -> Callable[[], Any]:
    find, words = _FACTS[fact]

    def getter() -> Any:
        if not model_parallel_is_initialized():
            initialize_model_parallel()
        return find(axis)

    return named(__name__, getter, name, f"{words} `{axis}` group.")


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, MISSING)


__all__ = ["initialize_model_parallel"]
for _word, (_axis, _facts) in _ASKED.items():
    for _fact in _facts:
        _name = f"get_{_word}_{_fact}"
        globals()[_name] = _getter(_name, _axis, _fact)
        __all__ += [_name]
