"""The functions of `sglang.srt.layers.dp_attention`, in the current and in earlier releases."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError
from parallel_state.compat.sglang.context import field_getter, get_parallel
from parallel_state.compat.sglang.coordinator import GroupCoordinator, of_groups


def compute_dp_attention_world_info(
    tp_rank: int, tp_size: int, attn_dp_size: int, attn_cp_size: int = 1
) -> tuple[int, int, int, int]:
    attn_tp_size = tp_size // attn_dp_size // attn_cp_size
    return tp_rank % attn_tp_size, attn_tp_size, tp_rank // (attn_tp_size * attn_cp_size), attn_dp_size


def initialize_dp_attention_flags(server_args: Any) -> None:
    """Has no effect, because `get_parallel()` already has these flags."""


def initialize_dp_attention(server_args: Any) -> None:
    at = get_parallel()
    place = compute_dp_attention_world_info(at.tp_rank, at.tp_size, at.attn_dp_size, at.attn_cp_size)
    at.override_permanently(attn_dp_size=place[3], attn_dp_rank=place[2])


def deployment_attn_dp_size() -> int:
    return int(get_parallel().num_dp_ranks) if get_parallel().attn_dp_enabled else 1


def dp_slot_in(per_rank: Any) -> int:
    width = get_parallel().attn_dp_size
    if len(per_rank) not in (1, width):
        raise InvalidArgumentError(
            f"per_rank must have one entry for each of {width} data-parallel ranks, or a single entry, but has "
            f"{len(per_rank)} entries"
        )
    return 0 if len(per_rank) == 1 else int(get_parallel().attn_dp_rank)


def world_dp_gather_enabled() -> bool:
    """Returns False. SGLang gathers over the world only with elastic ranks, which are unsupported here."""
    return False


def is_allocation_symmetric() -> bool:
    """Returns False, because no tensor needs memory that NCCL allocated."""
    return False


def get_dp_tp_group() -> GroupCoordinator:
    return get_parallel().attn_tp_group if get_parallel().attn_dp_enabled else get_parallel().tp_group


def is_enable_moe_cp_allgather() -> bool:
    return bool(get_parallel().attn_cp_size > get_parallel().moe_dp_size)


def attn_tp_all_reduce(input: Tensor) -> Tensor:
    """Sums `input` over attention's tp group in place, and returns `input`."""
    return get_parallel().attn_tp_group.all_reduce(input)


def attn_tp_all_gather(output_list: list[Tensor], input: Tensor) -> None:
    return get_parallel().attn_tp_group.all_gather(input, output_tensor_list=output_list)


_CALLS = {
    "attn_tp_all_gather_into_tensor": "attn_tp.all_gather_into_tensor",
    "attn_cp_all_gather_into_tensor": "attn_cp.all_gather_into_tensor",
    "moe_cp_all_gather_into_tensor": "moe_dp.all_gather_into_tensor",
    "attn_tp_reduce_scatter_tensor": "attn_tp.reduce_scatter_tensor",
    "attn_cp_reduce_scatter_tensor": "attn_cp.reduce_scatter_tensor",
}
_GETTERS = {
    "is_dp_attention_enabled": ("attn_dp_enabled",),
    "dp_gather_width": ("attn_dp_size",),
    "dp_gather_slot": ("attn_dp_rank",),
    "get_moe_cp_group": ("moe_dp_group",),
    "get_moe_cp_rank": ("moe_dp_group", "rank_in_group"),
    "get_moe_cp_size": ("moe_dp_group", "world_size"),
    **{f"get_attention_{axis}_{fact}": (f"attn_{axis}_{fact}",) for axis in ("tp", "cp", "dp")
       for fact in ("group", "rank", "size") if (axis, fact) != ("dp", "group")},
}  # fmt: skip
"""Name of a getter -> field of `get_parallel()`.

In SGLang, "moe_cp" is the experts' dp group, or attention's cp group if the latter is larger.
"""
globals().update(of_groups(__name__, _CALLS))
globals().update({name: field_getter(__name__, name, *field) for name, field in _GETTERS.items()})
