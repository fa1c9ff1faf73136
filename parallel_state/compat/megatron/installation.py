"""`install`: replaces `megatron.core.parallel_state` by this package, for unchanged programs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

from device_communicators.base.errors import AlreadyInitializedError, UnsupportedError

logger = logging.getLogger("parallel_state")

_CORE, _NAME = "megatron.core", "megatron.core.parallel_state"


def install() -> None:
    """Replaces `megatron.core.parallel_state` by this module, in this process.

    Call it before the first import of Megatron. In modules that imported Megatron's own already, `install` replaces
    attributes that hold the module or its functions, but not default arguments or closures. It logs their names. Twice
    is fine. Raises UnsupportedError without megatron-core, AlreadyInitializedError if Megatron's own groups exist.
    """
    ours = sys.modules[__package__]
    theirs = sys.modules.get(_NAME)
    if theirs is ours:
        return
    if theirs is None:
        if importlib.util.find_spec("megatron") is None or not _has_core():
            raise UnsupportedError("megatron-core isn't installed; run: pip install megatron-core")
        sys.modules[_NAME] = ours
        logger.info("replaced %s by %s", _NAME, ours.__name__)
        return
    if getattr(theirs, "_DATA_PARALLEL_GROUP", None) is not None:
        raise AlreadyInitializedError(
            "Megatron's own parallel state already has groups; call install() before its initialize_model_parallel(), "
            "or call its destroy_model_parallel() first"
        )
    sys.modules[_NAME] = ours
    replaced = _replace(theirs, ours)
    logger.info(
        "replaced %s by %s; also in modules that had imported it: %s",
        _NAME,
        ours.__name__,
        ", ".join(replaced) or "none",
    )


def _has_core() -> bool:
    spec = importlib.util.find_spec("megatron")
    paths = [] if spec is None else list(spec.submodule_search_locations or [])
    return importlib.machinery.PathFinder.find_spec(_CORE, paths) is not None


def _replace(theirs: ModuleType, ours: ModuleType) -> list[str]:
    """Replaces their module and functions by ours in all modules; returns the names of the changed modules."""
    other: dict[int, Any] = {id(theirs): ours}
    for name, value in vars(theirs).items():
        if getattr(value, "__module__", None) == _NAME and hasattr(ours, name):
            other[id(value)] = getattr(ours, name)
    changed = []
    for module_name, module in list(sys.modules.items()):
        if module is theirs or not isinstance(module, ModuleType):
            continue
        held = [name for name, value in vars(module).items() if id(value) in other]
        for name in held:
            setattr(module, name, other[id(vars(module)[name])])
        if held:
            changed.append(module_name)
    return sorted(changed)
