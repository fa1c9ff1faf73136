"""The names of torch.distributed that aren't public, each with why it is needed: the only file that uses them.

`_new_process_group_helper` is what `new_group` calls after it has made up a name. Members-only creation needs a name
that all members agree on and that no group of this store had before. `new_group(use_local_synchronization=True)` hashes
the ranks with the number of groups that the process has (torch before 2.15): members that are in different numbers of
groups wait for each other under different names, and a group made again after its destruction reads the addresses of
the first one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d as c10d
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy

from device_communicators.base.bounded_store import BoundedStore

_SET_ASIDE: list[torch.device] = []
"""The bound device, while a group of members is made without it."""
_RENDEZVOUS: Any = import_module("torch.distributed.rendezvous")  # whose name in the package is a function's


def default_store() -> BoundedStore:
    """Returns the store through which the default group was made, within that group's own prefix."""
    return BoundedStore(c10d._get_default_store())


def is_fake(group: Any = None) -> bool:
    """Returns True if a process group, by default the default one, is of torch's `fake` backend.

    Its peers are imagined.

    Nothing that a rank waits for can come there, unless somebody plays them in a store of his own.
    """
    return dist.is_initialized() and dist.get_backend(group) == "fake"


def store_in_words() -> str:
    """Returns which store that is, and who may come to it."""
    if not dist.is_initialized():
        return "none: torch.distributed has no default group"
    store: Any = default_store().raw
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    from parallel_state.store.client import ControlStore

    if isinstance(store, ControlStore):
        return f"launch's at {store.address[0]}:{store.address[1]}, which asks for the job's secret"
    if isinstance(store, dist.TCPStore):
        return f"TCPStore at {store.host}:{store.port}, which takes whoever reaches it"
    return type(store).__name__


def bound_device() -> torch.device | None:
    """Returns the device that the default group was bound to at init, whose communicator was then made at once."""
    return _SET_ASIDE[-1] if _SET_ASIDE else getattr(dist.group.WORLD, "bound_device_id", None)


def reset_group_count() -> None:
    """Numbers the next default group 0, as on all ranks; called where there is none.

    The number is part of its keys in the store, and an init that failed within torch has raised it on that rank only.
    """
    c10d._world.group_count = 0


def set_timeout(group: Any, timeout_s: float) -> None:
    """Sets the deadline of a process group's operations, which gloo's connecting had, too, when it was made.

    That of a send or receive whose wait is given none stays as it was.
    """
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        backend._set_default_timeout(timedelta(seconds=timeout_s))


def new_group_of_members(
    name: str,
    ranks: Sequence[int],
    backend: str,
    timeout_s: float,
    options: Any = None,
    store: BoundedStore | None = None,
) -> Any:
    """Returns a process group of `ranks` (global, ascending), which only they call, under a `name` nobody else uses.

    Registered with torch.distributed as new_group's are: by name, destroyed by destroy_process_group. `options` are
    the backend's (`ProcessGroupNCCL.Options`); `store`: another connection than the default group's. Returns when
    gloo's members have met; NCCL's meet at the first call.
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


def gloo_connects_lazily() -> bool:
    """Returns True if a new gloo group connects two ranks at their first message, as torch's variable asks for."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "y", "yes", "t", "true")


@contextmanager
def _without_split() -> Iterator[None]:
    """Keeps torch from splitting the default communicator of a bound device, a call that all its ranks must join."""
    default, device = dist.group.WORLD, bound_device()
    if device is None or default is None:
        yield
        return
    _SET_ASIDE.append(device)
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device
        _SET_ASIDE.pop()


def is_registered(group: Any) -> bool:
    """Returns True if torch.distributed still has this process group: destroy_process_group() ends them all at once."""
    return group in c10d._world.pg_map


def find_stores_by(find: Callable[[str, int], dist.Store | None] | None) -> None:
    """Has torch's `env://` and `tcp://` take the store that `find` gives for their address; None undoes that.

    `_create_c10d_store` is what both make their TCPStore with; the handlers themselves can't be registered anew. A
    torch without it can't be helped: its own `env://` is turned away then, ours (`rendezvous.meet`) isn't.
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


# autograd. A node's number, and what it hands from the thread that calls backward to those that work for it.

_KEY = "parallel_state"
_ENGINE: Any = torch.autograd.graph._engine_run_backward


def upcoming_node() -> int:
    """Returns the number that autograd's next node of this thread will have."""
    return int(torch._C._autograd._get_sequence_nr())


def node_in_backward() -> int | None:
    """Returns the number of the node whose backward runs in this thread; None outside of a backward pass."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def is_in_nested_backward() -> bool:
    """Returns True in a thread of autograd's where a backward was called within another one."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _ENGINE.__code__:
            return True
    return False


def stash_for_autograd(value: Any) -> None:
    """Keeps `value` for this thread and for the threads in which autograd works for it."""
    torch._C._stash_obj_in_tls(_KEY, value)


def stashed_for_autograd() -> Any:
    """Returns what the thread that called backward has stashed; None if nothing."""
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


# AOTAutograd. It makes each traced graph functional: a written tensor becomes a new result of the op.

_SAVES_TUPLES = TorchVersion(torch.__version__) < "2.15"


def order_in_graph(
    mode: FunctionalTensorMode, op: Any, types: Sequence[type], args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Makes an op functional. The op writes the graph's own token, which starts as the token that the call passes.

    If ops wrote the caller's token, it would be an input that the graph changes. An exported program may not change a
    constant. A partitioner without in-graph mutation takes the token after the backward for an output of the forward.

    The op's results are marked to be saved for the backward, as repeated collectives have no order with those of the
    backward. So an activation budget above 0 doesn't repeat them. A budget of 0 repeats all ops of the forward, in
    their order. A checkpoint without a policy, or with one that recomputes, repeats the ops of its region, as in eager
    code.
    """
    given, token = list(args), None
    for at, argument in enumerate(op._schema.arguments[: len(given)]):
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
    """Unmarks a token: a backward that has the token of each op would repeat those ops that have no other input."""
    proxies = get_proxy_mode()
    if proxies is not None:
        slot = get_proxy_slot(token.from_functional(), proxies.tracer, None)
        if slot is not None:
            slot.proxy.node.meta.pop("recompute", None)


def _recompute_policy() -> CheckpointPolicy:
    """Returns how a partitioner treats an op's node.

    Before 2.15 torch saves a node with several results as a tuple, and fails, if all nodes that an activation budget
    may repeat must be saved. There the budget repeats ops.
    """
    from torch._functorch import config as functorch_config  # AOTAutograd has imported it

    may_repeat = 0 < functorch_config.activation_memory_budget < 1
    return CheckpointPolicy.PREFER_SAVE if _SAVES_TUPLES and may_repeat else CheckpointPolicy.MUST_SAVE


def _token_in_graph(mode: FunctionalTensorMode, token: Tensor) -> FunctionalTensor:
    """Returns the token of the graph that is being traced: one for each device, and for each tracer of `mode`."""
    proxies = get_proxy_mode()
    key = (token.device, None if proxies is None else proxies.tracer)
    tokens: dict[Any, FunctionalTensor] = vars(mode).setdefault("_parallel_state_tokens", {})
    if key not in tokens:
        with mode:
            plain = token.from_functional() if isinstance(token, FunctionalTensor) else token
            tokens[key] = FunctionalTensor.to_functional(plain)
    return tokens[key]


# torch.func. The levels of its transforms, in which an op's kernel runs; imported by torch itself where one is entered.


SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""torch.autograd.Function without its `apply`. That one refuses transforms, since torch 2.14 in C++."""


def in_transform() -> bool:
    """Returns True inside of torch.func.grad, vmap and the like."""
    return bool(torch._C._are_functorch_transforms_active())


def apply_in_level(apply: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls `apply` of a SingleLevelFunction in an Autograd kernel, which a transform runs for one of its levels.

    torch refuses functions that don't say how they are mapped, since it doesn't know that a kernel calls them, below
    which the dispatcher goes on with the other levels.
    """
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return apply(*args)


def with_gradients(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls `function` with both kinds of gradients on: in a level of torch.func's, those of the levels outside it."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return function(*args)


def map_op(op: Any, rule: Callable[..., tuple[Any, Any]], args: Sequence[Any]) -> Any:
    """Runs a kernel of `torch.vmap`, as torch.library.register_vmap does: `rule` of the batch dims and whole tensors.

    That one imports torch._functorch at registration.
    """
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, lambda _, dims, *whole: rule(dims, *whole), op, *args)
