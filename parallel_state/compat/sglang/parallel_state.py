"""`sglang.srt.distributed.parallel_state`: SGLang's init, groups and getters.

SGLang divides the `tp_size` ranks of a stage twice: for attention into tp, cp and dp, and for experts into tp, ep and
dp. `get_tp_group()` returns this library's group `tp_dp_cp`, and `get_attn_tp_group()` returns `tp`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.errors import AlreadyInitializedError, GroupNotInitializedError, LayoutError
from device_communicators.base.torch_internals import abort_process_groups, default_store
from parallel_state import state
from parallel_state.collectives.capture_stream import GraphCaptureContext
from parallel_state.compat.sglang import coordinator, utils
from parallel_state.compat.sglang.context import GROUPS, field_getter, get_parallel
from parallel_state.compat.sglang.coordinator import GroupCoordinator, refuse_elastic
from parallel_state.compat.tables import collect
from parallel_state.functions import aliases
from parallel_state.groups.same_node import in_the_same_node_as as in_the_same_node_as

logger = logging.getLogger("parallel_state")

globals().update(collect({coordinator: "REDUCE_OP_SUM P2PWork _groups flashinfer_allreduce inplace_all_reduce"}))
_made: dict[str, GroupCoordinator] = {}
"""Name in `get_parallel()` -> group. If several groups have all ranks of a stage, their names share one object."""
_patched: set[str] = set()
_vllms: dict[str, Any] = {}
_GLOBALS = {
    **{f"_{name.upper()}": group for name, group in GROUPS.items()},
    "_SELF_PP": "self_pp_group",
    "_PDMUX_PREFILL_TP_GROUP": "pdmux_prefill_tp_group",
}


def __getattr__(name: str) -> Any:
    if name == "_WORLD":
        world = state.try_get_world_group()
        return None if world is None else GroupCoordinator.of(world)
    if name in _GLOBALS:
        return _made.get(_GLOBALS[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "nccl",
    timeout: int | None = None,
    moe_a2a_backend: str | None = None,
    recovered_rank: bool = False,
    max_world_size: int | None = None,
) -> None:
    """Creates the world group over torch's default group, which is created if needed. Every rank must call this.

    `timeout` is in seconds. A second call only compares `world_size`. `moe_a2a_backend="nixl"` shares the group's store
    with nixl. Raises an error for `recovered_rank` and `max_world_size`, which are unsupported.
    """
    refuse_elastic(recovered_rank, 0, max_world_size)
    if state.try_get_world_group() is None:
        if dist.is_initialized():
            state.init_distributed_environment(local_rank=local_rank, timeout=timeout, allow_pickle=True)
        else:
            state.init_distributed_environment(
                world_size,
                rank,
                distributed_init_method,
                local_rank if local_rank >= 0 or distributed_init_method == "env://" else rank,
                backend,
                timeout,
                allow_pickle=True,
            )
        if not dist.is_initialized():  # our world of one rank doesn't need it, but SGLang's code does
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world = state.get_world_group()
    if dist.get_world_size() != world.world_size:
        raise AlreadyInitializedError(
            f"parallel_state's world has {world.world_size} ranks, but torch's default group has "
            f"{dist.get_world_size()}; destroy one of them first"
        )
    if moe_a2a_backend == "nixl":
        utils.set_global_tcp_store(default_store().raw)
    get_parallel().override_permanently(world_group=GroupCoordinator.of(world))


def init_world_group(
    ranks: list[int], local_rank: int, backend: str, recovered_rank: bool = False, max_world_size: int | None = None
) -> GroupCoordinator:
    """Creates the world group. Every rank must call this and pass all ranks. The last two arguments are unsupported."""
    refuse_elastic(recovered_rank, 0, max_world_size)
    return GroupCoordinator.of(state.init_world_group(ranks, local_rank, backend, allow_pickle=True))


def init_model_parallel_group(
    group_ranks: list[list[int]],
    local_rank: int,
    backend: str,
    use_pynccl: bool | None = None,
    use_custom_allreduce: bool | None = None,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    use_mscclpp: bool | None = None,
    use_torch_symm_mem_allreduce: bool | None = None,
    recovered_rank: bool = False,
    rank_offset: int = 0,
    max_world_size: int | None = None,
) -> GroupCoordinator:
    """Creates a group for each list of global ranks, and returns this rank's group.

    Every rank of the world must pass the same lists, and be in one list. `use_custom_allreduce=False` forbids this
    library's kernels; the other `use_…` arguments have no effect. The last three arguments are unsupported.
    """
    custom = state._CUSTOM_ALL_REDUCE if use_custom_allreduce is None else use_custom_allreduce
    return GroupCoordinator(
        group_ranks, local_rank, backend, False, False, custom, False, False, False,
        group_name=group_name, recovered_rank=recovered_rank, rank_offset=rank_offset, max_world_size=max_world_size,
    )  # fmt: skip


def initialize_model_parallel(
    backend: str | None = None,
    duplicate_tp_group: bool = False,
    enable_symm_mem: bool = False,
    recovered_rank: bool = False,
    rank_offset: int = 0,
    max_world_size: int | None = None,
) -> None:
    """Creates the groups from the sizes in `get_parallel()`, and stores the groups there. Every rank must call this.

    `duplicate_tp_group` also creates `pdmux_prefill_tp_group`. `enable_symm_mem` has no effect. The last three
    arguments are unsupported.
    """
    refuse_elastic(recovered_rank, rank_offset, max_world_size)
    asked, world = get_parallel(), state.get_world_group()
    if asked.tp_size * asked.pp_size != world.world_size:
        raise LayoutError(
            f"tp_size {asked.tp_size} × pp_size {asked.pp_size} must be the world size, {world.world_size}"
        )
    attn_tp = asked.tp_size // asked.attn_cp_size // asked.attn_dp_size
    dcp, shared = asked.attn_dcp_size, asked.shared_experts_tp_size or 1
    for whole, part, name in ((asked.tp_size, dcp, "attn_dcp_size"), (attn_tp, shared, "shared_experts_tp_size")):
        if part < 1 or whole % part:
            raise LayoutError(f"{name} must divide the number of tensor-parallel ranks, {whole}, but is {part}")
    state.initialize_model_parallel(
        attn_tp,
        asked.pp_size,
        data_parallel_size=asked.attn_dp_size,
        context_parallel_size=asked.attn_cp_size,
        expert_model_parallel_size=asked.moe_ep_size,
        expert_tensor_parallel_size=asked.tp_size // asked.moe_ep_size // asked.moe_dp_size,
        decode_context_model_parallel_size=dcp if attn_tp % dcp == 0 else None,
        backend=backend,
        allow_pickle=True,
    )
    tp = _made["tp_group"] = GroupCoordinator.of(state.get_group("tp_dp_cp"))

    def view(name: str) -> GroupCoordinator:
        is_same = state.get_group_ranks(name) == tp.ranks
        return tp if is_same else GroupCoordinator.of(state.get_group(name))

    _made.update(attn_tp_group=view("tp"), attn_cp_group=view("cp"), moe_ep_group=view("ep"), moe_tp_group=view("etp"))
    _made["moe_dp_group"] = _made["attn_cp_group"] if asked.attn_cp_size > asked.moe_dp_size else view("edp")
    _made["pp_group"] = GroupCoordinator.of(state.get_pp_group())
    options = world.local_rank, backend or world.backend

    def of_neighbours(size: int, name: str) -> GroupCoordinator:
        lists = [list(range(start, start + size)) for start in range(0, world.world_size, size)]
        return init_model_parallel_group(lists, *options, group_name=name)

    if dcp > 1:
        _made["dcp_group"] = view("dcp") if attn_tp % dcp == 0 else of_neighbours(dcp, "dcp")
    if shared > 1:
        of_attention = _made["attn_tp_group"] if shared == attn_tp else None
        _made["shared_experts_tp_group"] = of_attention or of_neighbours(shared, "shared_experts_tp")
    _made["self_pp_group"] = of_neighbours(1, "self_pp")
    if duplicate_tp_group:
        duplicate = tp.group.make_sub_group(range(tp.world_size), name="pdmux_prefill_tp")
        _made["pdmux_prefill_tp_group"] = GroupCoordinator.of(duplicate)
    get_parallel().override_permanently(**{name: group for name, group in _made.items() if name in GROUPS.values()})


def create_custom_parallel_group(group_ranks: list[int], backend: str = "gloo") -> Any | None:
    """Creates a process group of the global ranks `group_ranks`, which include this rank.

    Every rank of the world must call this. Members of a group must pass the same ranks.
    """
    mine = sorted(set(group_ranks))
    asked = state.get_world_group().all_gather_object(mine)
    made = {each: dist.new_group(list(each), backend=backend) for each in sorted({tuple(each) for each in asked})}
    return made[tuple(mine)]


def model_parallel_is_initialized() -> bool:
    return {"tp_group", "pp_group"} <= _made.keys()


def destroy_model_parallel() -> None:
    """Destroys the parallel groups. Keeps the world group. Every rank must call this. Idempotent."""
    get_parallel().clear_stamp()
    made = {id(group): group for group in _made.values()}
    _made.clear()
    with contextlib.ExitStack() as stack:
        stack.callback(state.destroy_model_parallel)
        for group in made.values():
            stack.callback(group.destroy)


def destroy_distributed_environment() -> None:
    """Destroys all groups and torch's default group, even if the program created that.

    Every rank must call this. Idempotent.
    """
    destroy_model_parallel()
    state.destroy_distributed_environment()
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_distributed_environment() -> None:
    """Destroys all groups without contacting other ranks. Logs errors instead of raising them."""
    if not dist.is_initialized():
        return
    world = state.try_get_world_group()
    try:
        if world is not None and world.pool is not None:
            world.pool.abandon()
        abort_process_groups()
    except Exception as error:  # callers are about to exit
        logger.warning("aborting the process groups failed: %s: %s", type(error).__name__, error)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    destroy_distributed_environment()
    aliases.cleanup_dist_env_and_memory(shutdown_ray)


@contextmanager
def pdmux_prefill_tp_group() -> Iterator[None]:
    with get_parallel().override(tp_group=_of("pdmux_prefill_tp_group")):
        yield


@contextmanager
def patch_pipeline_parallel_group(pp_group: GroupCoordinator) -> Iterator[None]:
    """Replaces the pipeline group by `pp_group` within the `with` block, for a draft model without stages. Can't be
    nested.
    """
    values = {"pp_size": pp_group.world_size, "pp_rank": pp_group.rank_in_group, "pp_group": pp_group}
    with _replaced("pp_group", pp_group), get_parallel().override(**values):
        yield


@contextmanager
def patch_tensor_parallel_group(tp_group: GroupCoordinator, *, owns_attention: bool) -> Iterator[None]:
    """Replaces the tensor-parallel group by `tp_group` within the `with` block, for a draft model. Can't be nested.

    With `owns_attention`, `tp_group` is also attention's tp group, and all other axes have size 1.
    """
    size, rank = tp_group.world_size, tp_group.rank_in_group
    values: dict[str, Any] = {"tp_size": size, "tp_rank": rank, "tp_group": tp_group}
    if owns_attention:
        for whole in ("attn_tp", "moe_tp"):
            values |= {f"{whole}_size": size, f"{whole}_rank": rank}
        for single in ("attn_dp", "attn_cp", "moe_ep"):
            values |= {f"{single}_size": 1, f"{single}_rank": 0}
        values |= {"attn_tp_group": tp_group, "attn_cp_group": None, "moe_ep_group": None, "moe_dp_size": 1}
    with _replaced("tp_group", tp_group), get_parallel().override(**values):
        yield


@contextmanager
def _replaced(name: str, group: GroupCoordinator) -> Iterator[None]:
    if name in _patched:
        raise AlreadyInitializedError(
            f"{name} is already patched, and patches can't be nested; leave the outer `with` block first"
        )
    _patched.add(name)
    before = _made.get(name)
    _made[name] = group
    try:
        yield
    finally:
        _patched.discard(name)
        _made.pop(name)
        if before is not None:
            _made[name] = before


@contextmanager
def graph_capture(stream: Any = None) -> Iterator[GraphCaptureContext]:
    names = ("tp", "pp", "dcp", "attn_tp", "shared_experts_tp", "moe_ep", "moe_tp")
    groups = {id(group): group for name in names if (group := _made.get(f"{name}_group")) is not None}
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(get_tp_group().graph_capture(stream=stream))
        for group in groups.values():
            if group is not get_tp_group():
                stack.enter_context(group.graph_capture(context))
        yield context


# Flags of SGLang's kernels. Only the first has an effect.


set_custom_all_reduce = state.set_custom_all_reduce


def _no_such_kernel(enable: bool) -> None:
    """Has no effect, because this library chooses the kernel."""


set_mscclpp = set_torch_symm_mem_all_reduce = set_flashinfer_allreduce_only = _no_such_kernel


def _tag_groups_for_flashinfer_allreduce_only() -> None:
    """Has no effect, because groups have no FlashInfer workspace."""


def get_default_distributed_backend(device: str) -> str:
    return settings.BACKEND.get() or ("nccl" if device == "cuda" else "gloo")


def get_mooncake_transfer_engine() -> Any | None:
    theirs = sys.modules.get("sglang.srt.distributed.device_communicators.mooncake_transfer_engine")
    return None if theirs is None else theirs.get_mooncake_transfer_engine()


def monkey_patch_vllm_parallel_state(reverse: bool = False) -> None:
    """Replaces vLLM's group getters by SGLang's, if vLLM is installed. `reverse` restores vLLM's own getters."""
    with contextlib.suppress(ImportError):
        import vllm.distributed.parallel_state as theirs

        for getter in (get_world_group, get_tp_group, get_pp_group):
            own = _vllms.setdefault(getter.__name__, getattr(theirs, getter.__name__))
            setattr(theirs, getter.__name__, own if reverse else getter)


def _of(name: str) -> GroupCoordinator:
    if name not in _made:
        raise GroupNotInitializedError(f"{name} has not been made; call initialize_model_parallel() first")
    return _made[name]


_LONG = {
    "tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "attn_tp": "attn_tensor_model_parallel",
    "attn_cp": "attn_context_model_parallel", "moe_dp": "moe_data_parallel", "moe_ep": "moe_expert_parallel",
    "moe_tp": "moe_tensor_parallel", "dcp": "dcp",
}  # fmt: skip
_GETTERS = {
    **{f"get_{short}_group": (group,) for short, group in GROUPS.items()},
    **{f"get_{long}_world_size": (GROUPS[short], "world_size") for short, long in _LONG.items()},
    **{f"get_{long}_rank": (GROUPS[short], "rank_in_group") for short, long in _LONG.items()},
    "get_world_size": ("world_group", "world_size"),
    "get_world_rank": ("world_group", "rank_in_group"),
}
globals().update({name: field_getter(__name__, name, *field) for name, field in _GETTERS.items()})
get_world_group, get_tp_group, get_pp_group = (globals()[f"get_{name}_group"] for name in ("world", "tp", "pp"))
get_tensor_model_parallel_group, get_pipeline_model_parallel_group = get_tp_group, get_pp_group


def get_self_pp_group() -> GroupCoordinator:
    return _of("self_pp_group")


def get_dcp_group_no_assert() -> GroupCoordinator | None:
    return _made.get("dcp_group")
