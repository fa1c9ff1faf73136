"""Wraps private names of torch; only this file uses them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d as c10d
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.torch_version import TorchVersion
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.helper_threads import HelperThread

logger = logging.getLogger("parallel_state")

REMIND_S = 10.0
_WAITING_FOR_GRAPHS = (
    "destroy_process_group has taken %g s. If a CUDA graph still uses the group, NCCL waits for it: delete the graph "
    "before the group is destroyed"
)

_UNBOUND: list[torch.device] = []
_RENDEZVOUS: Any = sys.modules["torch.distributed.rendezvous"]  # as an attribute, this name is a function


def default_store() -> BoundedStore:
    return BoundedStore(c10d._get_default_store())


def abort_process_groups() -> None:
    """Ends the calls under way in all process groups, and destroys the groups without contacting other ranks."""
    c10d._abort_process_group()


def is_fake(group: Any = None) -> bool:
    """Returns True if the backend of `group`, or of the default group, is torch's "fake", which doesn't communicate."""
    return dist.is_initialized() and dist.get_backend(group) == "fake"


def bound_device() -> torch.device | None:
    """Returns the device to which the program bound the default group at init, or None."""
    return _UNBOUND[-1] if _UNBOUND else getattr(dist.group.WORLD, "bound_device_id", None)


def reset_group_count() -> None:
    """Makes torch give the next default group the number 0, which is part of its store keys. Call this while there is
    no default group. Otherwise ranks whose earlier init failed would use other keys than their peers.
    """
    c10d._world.group_count = 0


def set_timeout(group: Any, timeout_s: float) -> None:
    """Sets the group's timeout. A send or receive whose `wait` gets no timeout isn't affected."""
    for device in device_types_of(group):
        set_backend_timeout(backend_of(group, device), timedelta(seconds=timeout_s))


def set_backend_timeout(backend: Any, timeout: timedelta) -> None:
    backend._set_default_timeout(timeout)


def device_types_of(group: Any) -> Sequence[torch.device]:
    return group._device_types


def backend_of(group: Any, device: torch.device) -> Any:
    if device not in device_types_of(group):
        return None
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def all_gather_base(group: Any, out: Tensor, x: Tensor, *options: Any) -> Any:
    return group._allgather_base(out, x, *options)


def reduce_scatter_base(group: Any, out: Tensor, x: Tensor, options: Any) -> Any:
    return group._reduce_scatter_base(out, x, options)


def has_plugin(backend: str) -> bool:
    return backend.upper() in dist.Backend._plugins


def wrap_set_pg_timeout(wrap: Callable[[Any], Any]) -> None:
    c10d._set_pg_timeout = wrap(c10d._set_pg_timeout)


def wrap_backend_name(wrap: Callable[[Any], Any]) -> None:
    dist.ProcessGroup._get_backend_name = wrap(dist.ProcessGroup._get_backend_name)  # type: ignore[method-assign]


def backend_options(store: Any, rank: int, size: int, timeout: timedelta, name: str) -> Any:
    options = c10d._DistributedBackendOptions()
    options.store, options.timeout, options.group_id = store, timeout, name
    options.group_rank, options.group_size = rank, size
    return options


def set_members(group_name: str, size: int) -> None:
    for group in c10d._world.pg_map:
        if group.group_name == group_name:
            c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}


def set_store(group_name: str, store: Any) -> None:
    for group, (backend, _) in list(c10d._world.pg_map.items()):
        if group.group_name == group_name:
            c10d._world.pg_map[group] = backend, store


def gloo_backend(store: BoundedStore, rank: int, size: int, timeout: timedelta, device: Any) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [device]
    gloo = dist.ProcessGroupGloo(store.raw, rank, size, options)
    gloo._set_sequence_number_for_group()
    return gloo


def group_over_gloo(store: Any, rank: int, size: int, gloo: Any) -> Any:
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def group_over(store: Any, rank: int, size: int, backend: Any) -> Any:
    """Returns a torch process group that runs calls of CPU tensors on `backend`."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group


def register_named(group: Any, name: Any) -> None:
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)


def unregister_named(group: Any) -> None:
    torch._C._distributed_c10d._unregister_process_group(group.group_name)


def set_nccl_timeout(options: Any, timeout: timedelta) -> None:
    options._timeout = timeout


def register_fake_backend() -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def new_group_of_members(
    name: str,
    ranks: Sequence[int],
    backend: str,
    timeout_s: float,
    options: Any = None,
    store: BoundedStore | None = None,
) -> Any:
    """Creates a process group; only its members, `ranks` (global, ascending), call this. `name` must be unique in the
    store.

    Replaces `new_group(use_local_synchronization=True)`. Before torch 2.15, that function puts a hash of the process's
    number of groups into the name, so members with different numbers never connect.
    """
    rank = dist.get_rank()
    with _without_split():
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(rank),
            list(ranks),
            dist.Backend(backend),
            (store or default_store()).raw,
            name,  # type: ignore[arg-type]
            backend_options=options,
            timeout=timedelta(seconds=timeout_s),
            group_desc=name,
        )
    c10d._world.pg_group_ranks[group] = {global_rank: position for position, global_rank in enumerate(ranks)}
    return group


@contextmanager
def _without_split() -> Iterator[None]:
    """Unbinds the default group's device in the block. Otherwise torch would split that device's NCCL communicator to
    create a group, and every rank would have to take part.
    """
    default, device = dist.group.WORLD, bound_device()
    if device is None or default is None:
        yield
        return
    _UNBOUND.append(device)
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device
        _UNBOUND.pop()


def is_registered(group: Any) -> bool:
    return group in c10d._world.pg_map


def name_ranks(group: Any) -> None:
    """Sets the list of ranks in the options of the NCCL process group `group`, as torch does only for a process's first
    NCCL group. Without this list, splitting the group crashes (pytorch #192109; seen with 2.11). Not tested on a GPU.
    """
    options = backend_of(group, torch.device("cuda")).options
    if not getattr(options, "global_ranks_in_group", True):
        options.global_ranks_in_group = list(range(group.size()))


def mark_written(x: Tensor) -> None:
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def end_process_groups(group: Any = None) -> None:
    """Destroys torch's process group `group`, or all groups if None. Logs a reminder after 10 s: NCCL waits without a
    limit while a CUDA graph uses the group.
    """
    ended = threading.Event()

    def remind() -> None:
        if not ended.wait(REMIND_S):
            logger.warning(_WAITING_FOR_GRAPHS, REMIND_S)

    if torch.cuda.is_initialized():
        HelperThread("reminder", remind).start()
    try:
        dist.destroy_process_group(group)
    finally:
        ended.set()


def find_stores_by(find: Callable[[str, int], dist.Store | None] | None) -> None:
    """Makes torch's `env://` and `tcp://` use the store that `find(host, port)` returns. If `find` is None or returns
    None, torch uses its own. Does nothing if torch lacks `_create_c10d_store`.
    """
    make = getattr(_RENDEZVOUS, "_create_c10d_store", None)
    if make is None:
        return
    make = getattr(make, "replaced", make)

    if find is None:
        _RENDEZVOUS._create_c10d_store = make
        return

    def create(hostname: str, port: int, *args: Any, **options: Any) -> dist.Store:
        found = find(hostname, port)
        made: dist.Store = make(hostname, port, *args, **options) if found is None else found
        return made

    create.replaced = make  # type: ignore[attr-defined]
    _RENDEZVOUS._create_c10d_store = create


is_zero_tensor: Callable[[Tensor], bool] = torch.Tensor._is_zerotensor
disable_current_modes: Any = _python_dispatch._disable_current_modes
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
check_symbolic: Callable[..., None] = torch._check
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


FUSED_RMS_NORM: Any = torch.ops.aten._fused_rms_norm.default
TO_COPY: Any = torch.ops.aten._to_copy.default


def base_of(x: Tensor) -> Tensor | None:
    return x._base


def is_view(x: Tensor) -> bool:
    return x._is_view()


def schema_of(op: Any) -> Any:
    return getattr(op, "_schema", None)


def current_raw_stream() -> Callable[[int], int]:
    return torch._C._cuda_getCurrentRawStream


def current_cuda_device() -> int:
    return torch._C._cuda_getDevice()


def keep_cuda_busy(cycles: int) -> None:
    torch.cuda._sleep(cycles)


def symmetric_bytes(size_bytes: int, device: torch.device) -> Tensor:
    """Allocates GPU memory for `meet_over_symmetric_memory` to map. Torch's `_symmetric_memory.empty` would never free
    it.
    """
    kind: Any = torch._C._distributed_c10d._SymmetricMemory
    return kind.empty_strided_p2p((size_bytes,), (1,), torch.uint8, device)


def meet_over_symmetric_memory(tensor: Tensor, group: Any) -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(tensor, group)


def ipc_handle(storage: Any) -> tuple[Any, ...]:
    return storage._share_cuda_()


def open_ipc(device_index: int, *handle: Any) -> Any:
    kind: Any = torch.UntypedStorage
    return kind._new_shared_cuda(device_index, *handle)


try:
    from torch._C._dynamo import eval_frame as _frames

    _SKIP: Any = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
except (ImportError, AttributeError):
    _SKIP = None


def disable_dynamo(function: Callable[..., Any], reason: str) -> Any:
    """Excludes the function from torch.compile. torch.compiler.disable would import torch._dynamo (1 s). `reason`: for
    torch's errors.
    """
    if _SKIP is None:
        return torch.compiler.disable(function, reason=reason)
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    marked._torchdynamo_disable_recursive = True
    leave_to_interpreter(function)
    return function


def leave_to_interpreter(function: Callable[..., Any]) -> None:
    """Prevents torch.compile from tracing `function`, such as an op's kernel, when code outside of a compiled graph
    calls it.
    """
    if _SKIP is not None:
        _frames.set_code_exec_strategy(function.__code__, _SKIP)


def mark_constant(function: Any) -> None:
    function._dynamo_marked_constant = True


def mark_static_address(tensor: Any) -> None:
    """Marks a graph's input `tensor` whose address doesn't change, so that a graph that writes to this input can become
    a CUDA graph.
    """
    tensor._dynamo_static_input_type = "unguarded"


def dynamo() -> Any:
    from torch import _dynamo

    return _dynamo


def register_graph_pass(kind: type) -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    CustomGraphPass.register(kind)


def aot_eager(module: Any, inputs: Sequence[Any], run_pass: Callable[[Any], None]) -> Callable[..., Any]:
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop

    def compiled(module: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        run_pass(module.graph)
        module.recompile()
        return boxed_nop(module, list(inputs))

    return aot_eager(module, list(inputs), fw_compiler=compiled)


_KEY = "parallel_state"
_ENGINE: Any = torch.autograd.graph._engine_run_backward


def upcoming_node() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def node_in_backward() -> int | None:
    if torch._C._current_graph_task_id() == -1:
        return None
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def is_in_nested_backward() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _ENGINE.__code__:
            return True
    return False


def stash_for_autograd(value: Any) -> None:
    """Stores a value that `stashed_for_autograd` returns, in this thread and in threads that run this thread's
    backward.
    """
    torch._C._stash_obj_in_tls(_KEY, value)


def stashed_for_autograd() -> Any:
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


# AOTAutograd makes each traced graph functional: an op that writes a tensor returns a new one instead.

_SAVES_TUPLES = TorchVersion(torch.__version__) < "2.15"


def order_in_graph(
    mode: FunctionalTensorMode, op: Any, types: Sequence[type], args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Adds `op` to the graph that AOTAutograd traces. Other arguments: as in `FunctionalTensorMode.__torch_dispatch__`.

    A group's ops keep their order in the graph, because each writes the same tensor, the op's argument `token`. In the
    graph a copy replaces the token: a write to the token itself would mutate an input of the graph.

    Also marks the op's results to be saved for the backward. Otherwise the backward could repeat the op in any order
    relative to its own collectives.
    """
    given, token = list(args), None
    for at, argument in enumerate(schema_of(op).arguments[: len(given)]):
        if argument.name == "token":
            given[at] = token = _token_in_graph(mode, given[at])
    if token is None or not fx_traceback.has_preserved_node_meta():
        return mode.__torch_dispatch__(op, types, tuple(given), kwargs or {})
    meta = fx_traceback.current_meta
    former = meta.get("recompute")
    meta["recompute"] = _recompute_policy()
    try:
        return mode.__torch_dispatch__(op, types, tuple(given), kwargs or {})
    finally:
        meta.pop("recompute")
        if former is not None:
            meta["recompute"] = former
        _leave_to_partitioner(token)


def _leave_to_partitioner(token: FunctionalTensor) -> None:
    proxies = get_proxy_mode()
    if proxies is not None:
        slot = get_proxy_slot(token.from_functional(), proxies.tracer, None)
        if slot is not None:
            # With a policy, the backward would recompute ops whose only input is the token.
            slot.proxy.node.meta.pop("recompute", None)


def _recompute_policy() -> CheckpointPolicy:
    """Returns the policy that makes torch save an op's results instead of recomputing the op.

    Before torch 2.15, torch fails if all nodes must be saved and the activation budget is between 0 and 1. The policy
    then only prefers saving.
    """
    from torch._functorch import config as functorch_config  # already imported

    may_repeat = 0 < functorch_config.activation_memory_budget < 1
    return CheckpointPolicy.PREFER_SAVE if _SAVES_TUPLES and may_repeat else CheckpointPolicy.MUST_SAVE


def _token_in_graph(mode: FunctionalTensorMode, token: Tensor) -> FunctionalTensor:
    proxies = get_proxy_mode()
    key = (token.device, None if proxies is None else proxies.tracer)
    tokens: dict[Any, FunctionalTensor] = vars(mode).setdefault("_parallel_state_tokens", {})
    if key not in tokens:
        with mode:
            plain = token.from_functional() if isinstance(token, FunctionalTensor) else token
            tokens[key] = FunctionalTensor.to_functional(plain)
    return tokens[key]


SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""Base class of autograd functions whose `apply` accepts torch.func transforms."""


in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_wrapped_tensor: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def apply_in_level(apply: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls `apply` of a `SingleLevelFunction` for the innermost torch.func transform only. Otherwise torch would
    reject functions without a vmap rule.
    """
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return apply(*args)


def with_gradients(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return function(*args)


def map_op(op: Any, rule: Callable[..., tuple[Any, Any]], args: Sequence[Any]) -> Any:
    """Runs `rule`, the vmap rule of `op`, on `args` as register_vmap does. register_vmap would import torch._functorch
    early.
    """
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, lambda _, dims, *whole: rule(dims, *whole), op, *args)
