"""The names and signatures of `megatron.core.parallel_state` (0.16 and main), over this library's groups.

    from parallel_state.compat import megatron as mpu

    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    mpu.get_tensor_model_parallel_group()                  # a torch ProcessGroup

Groups have the backend "parallel_state" on the CPU, NCCL on GPUs. docs/compat.md lists the differences.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
from typing import Any

from device_communicators.base.errors import AlreadyInitializedError, UnsupportedError
from parallel_state.compat.megatron import buffers, division, getters, lookup, process_groups, ranks
from parallel_state.compat.tables import absent, collect

logger = logging.getLogger("parallel_state")

_CORE, _NAME = "megatron.core", "megatron.core.parallel_state"
_NAMES = {
    **dict.fromkeys((division, getters, buffers), "*"),
    process_groups: (
        "coordinators_of create_group create_hierarchical_groups create_hybrid_dp_cp_groups get_nccl_options "
        "overwrite_nccl_comm_cfgs process_group_collection"
    ),
    ranks: (
        "RankGenerator default_embedding_ranks default_position_embedding_ranks generate_masked_orthogonal_rank_groups"
    ),
}
globals().update(collect(_NAMES))
lookup.variables = globals()
_set_global_memory_buffer = buffers.set_global_memory_buffer
_set_global_symmetric_memory_buffer = buffers.set_global_symmetric_memory_buffer


def __getattr__(name: str) -> Any:
    """Returns the value of Megatron's variable `name` (`_TENSOR_MODEL_PARALLEL_GROUP`, …): a group or None."""
    if name in lookup.VARIABLES:
        return lookup.group_of(lookup.VARIABLES[name])
    raise absent(__name__, name, MISSING)


def install() -> None:
    """Makes later imports of `megatron.core.parallel_state` in this process return this module. Idempotent.

    Raises UnsupportedError if megatron-core isn't installed. Raises AlreadyInitializedError if Megatron's own module is
    imported already.
    """
    ours = sys.modules[__name__]
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
    spec = importlib.util.find_spec("megatron")
    paths = [] if spec is None else list(spec.submodule_search_locations or [])
    return importlib.machinery.PathFinder.find_spec(_CORE, paths) is not None


MISSING = {"HAVE_EINOPS": "this library doesn't use einops"}
