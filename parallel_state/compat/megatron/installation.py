"""`install`: replaces `megatron.core.parallel_state` by this package, for unchanged programs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys

from device_communicators.base.errors import AlreadyInitializedError, UnsupportedError

logger = logging.getLogger("parallel_state")

_CORE, _NAME = "megatron.core", "megatron.core.parallel_state"


def install() -> None:
    """Replaces `megatron.core.parallel_state` by this module for later imports of this process. Twice is fine.

    Raises UnsupportedError without megatron-core, AlreadyInitializedError if Megatron's own module is imported already:
    the modules that imported it hold its functions.
    """
    ours = sys.modules[__package__]
    if sys.modules.get(_NAME) not in (None, ours):
        raise AlreadyInitializedError(
            f"{_NAME} is imported already; call install() before the first import of Megatron"
        )
    if _NAME not in sys.modules:
        if not _has_core():
            raise UnsupportedError("megatron-core isn't installed; run: pip install megatron-core")
        sys.modules[_NAME] = ours
        logger.info("replaced %s by %s", _NAME, ours.__name__)


def _has_core() -> bool:
    """Returns True if megatron-core can be imported. Finds it without the import of `megatron.core`, which is large."""
    spec = importlib.util.find_spec("megatron")
    paths = [] if spec is None else list(spec.submodule_search_locations or [])
    return importlib.machinery.PathFinder.find_spec(_CORE, paths) is not None
