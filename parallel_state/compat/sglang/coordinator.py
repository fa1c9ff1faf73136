"""SGLang's GroupCoordinator, which calls one of this library's groups.

Objects are pickled, as in SGLang, if their type isn't registered with this library.
"""

# mypy: disable-error-code="override"

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_communicators.base.errors import GroupDestroyedError, InvalidArgumentError, UnsupportedError
from parallel_state.collectives.capture_stream import GraphCaptureContext
from parallel_state.compat import pickles
from parallel_state.compat.coordinator import GroupView
from parallel_state.compat.sglang.context import get_parallel
from parallel_state.compat.tables import forward, renamed
from parallel_state.groups.coordinator import GroupCoordinator as Ours
from parallel_state.messages.wire import bytes_of

REDUCE_OP_SUM = int(dist.ReduceOp.SUM)  # type: ignore[call-overload]


@dataclass
class P2PWork:
    """A started transfer. `payload` (None if `work` keeps the tensors) must not change before `work.wait()` returns."""

    work: Any | None
    payload: Tensor | None


_groups: dict[str, Callable[[], GroupCoordinator | None]] = {}


def refuse_elastic(recovered_rank: bool, rank_offset: int = 0, max_world_size: int | None = None) -> None:
    if recovered_rank or rank_offset or max_world_size is not None:
        raise UnsupportedError(
            "recovered_rank, rank_offset and max_world_size are unsupported: they belong to elastic expert parallelism "
            "over Mooncake. Use parallel_state.reinitialize to make a new world"
        )


class GroupCoordinator(GroupView):
    """A group with SGLang's calls. The attribute `group` is this library's GroupCoordinator.

    `all_reduce` and `broadcast` work in place and return the tensor. `src` and `dst` are ranks in the group;
    `first_rank`, `last_rank`, `next_rank` and `prev_rank` are global.
    """

    use_pynccl = use_mscclpp = use_torch_symm_mem_all_reduce = False
    use_hpu_communicator = use_xpu_communicator = use_message_queue_broadcaster = False
    use_custom_allreduce = True
    pynccl_comm = pymscclpp_comm = ca_comm = qr_comm = pcie_ipc_comm = torch_symm_mem_comm = None
    hpu_communicator = xpu_communicator = mq_broadcaster = None
    local_size = 0

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: Any,
        use_pynccl: bool,
        use_mscclpp: bool,
        use_custom_allreduce: bool,
        use_torch_symm_mem_all_reduce: bool,
        use_hpu_communicator: bool,
        use_xpu_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        gloo_timeout: timedelta = timedelta(seconds=120 * 60),
        recovered_rank: bool = False,
        rank_offset: int = 0,
        max_world_size: int | None = None,
    ) -> None:
        refuse_elastic(recovered_rank, rank_offset, max_world_size)
        custom = use_custom_allreduce
        self._show(
            self._make(group_ranks, local_rank, torch_distributed_backend, group_name, use_custom_allreduce=custom)
        )
        self.use_custom_allreduce = use_custom_allreduce

    def _show(self, made: Ours) -> None:
        super()._show(made)
        self.active_ranks_cpu = torch.ones(made.world_size, dtype=torch.int32, device="cpu")
        self.active_ranks = self.active_ranks_cpu.to(made.device)
        self.device_module = torch.get_device_module(made.device)
        _groups[self.unique_name] = weakref.ref(self)

    @property
    def group(self) -> Ours:
        return self._made

    # SGLang stores functions of its NCCL allocator in the group.

    is_symmetric_memory_enabled = is_allocation_symmetric = staticmethod(lambda: False)
    debug_check_symmetric_mempool = staticmethod(lambda *_, **__: None)

    @staticmethod
    @contextmanager
    def use_symmetric_memory(group_coordinator: Any = None, disabled: bool = False) -> Iterator[None]:
        """Does nothing. To get tensors in shared memory, call `group.empty`."""
        yield

    @contextmanager
    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None, stream: Any = None
    ) -> Iterator[GraphCaptureContext]:
        if graph_capture_context is None and stream is not None:
            graph_capture_context = GraphCaptureContext(stream)
        with self.group.graph_capture(graph_capture_context) as context:
            yield context

    all_reduce = renamed(Ours.all_reduce_, "input_", "Sums `input_` over the ranks in place; returns it.")
    quant_all_reduce = renamed(Ours.all_reduce_, "input_", "Calls `all_reduce`, as SGLang does without an NPU.")
    fused_allreduce_rmsnorm = renamed(
        Ours.all_reduce_add_rms_norm,
        "input_ residual_inp_ weight_ eps!",
        "Returns `(rms_norm(y) * weight_, y)`, where `y = sum(input_) + residual_inp_`.",
    )

    def fused_allreduce_rmsnorm_quant_per_group(
        self,
        input_: Tensor,
        residual_inp_: Tensor,
        weight_: Tensor,
        eps: float,
        group_size: int = 128,
        emit_bf16: bool = False,
        transpose_scale: bool = False,
    ) -> tuple[Tensor, ...] | None:
        """Returns None, as SGLang does without ROCm."""
        return None

    def all_gather(
        self, input_: Tensor, dim: int = -1, output_tensor_list: list[Tensor] | None = None
    ) -> Tensor | None:
        """Concatenates the tensors of all ranks along `dim`.

        With `output_tensor_list`, copies each rank's tensor into the list's tensors, and returns None.
        """
        if output_tensor_list is None:
            return self.group.all_gather(input_, dim)
        for output, gathered in zip(output_tensor_list, self.group.all_gather_to_list(input_), strict=True):
            output.copy_(gathered)
        return None

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> None:
        rows = output.view(self.world_size, -1)
        self.group.all_gather(input.reshape(1, -1), 0, out=rows)

    def all_gatherv(
        self, input_: Tensor | list[Tensor], sizes: list[int] | None = None, output: Tensor | None = None
    ) -> list[Tensor]:
        """Concatenates the ranks' tensors along dim 0; rank r has `sizes[r]` rows (None: equal numbers).

        Returns a list with one result for each tensor in `input_`. `output` receives the result of a single tensor.
        """
        inputs = [input_] if isinstance(input_, Tensor) else input_
        if output is not None and not isinstance(input_, Tensor):
            raise InvalidArgumentError("all_gatherv with output needs a single tensor, but input_ is a list")
        gathered = [self.group.all_gatherv(each, 0, sizes) for each in inputs]
        return gathered if output is None else [output.copy_(gathered[0])]

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor) -> None:
        self._copy(output, self.group.reduce_scatter(input.reshape(self.world_size, -1), 0))

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor]) -> Tensor:
        """Does what `torch.distributed.reduce_scatter` does, with sum. Returns `output`."""
        self.reduce_scatter_tensor(output, torch.stack(list(input_list)))
        return output

    reduce_scatter_along_dim = renamed(
        Ours.reduce_scatter, "input_ dim", "Returns this rank's slice, along `dim`, of the sum over all ranks."
    )

    def reduce_scatterv(self, input_: Tensor, output: Tensor | None = None, sizes: list[int] | None = None) -> Tensor:
        """Sums `input_` over all ranks. Rank r gets `sizes[r]` rows (None: equal numbers), in `output` if given."""
        scattered = self.group.reduce_scatterv(input_, 0, sizes)
        return scattered if output is None else output.copy_(scattered)

    def all_to_all_single(self, output: Tensor, input: Tensor) -> None:
        self._copy(output, self.group.all_to_all(input.reshape(self.world_size, -1)))

    @staticmethod
    def _copy(output: Tensor, flat: Tensor) -> None:
        output.copy_(flat.reshape(output.shape))

    def send_object(self, obj: Any, dst: int, async_send: bool = False, tag: int = 0) -> list[P2PWork]:
        """Sends an object to group rank `dst`. With `async_send`, returns the started transfers without waiting."""
        if not tag and async_send:
            return [P2PWork(self.group.isend_object(obj, dst), None)]
        if not tag:
            self.group.send_object(obj, dst)
            return []
        # This library's messages have no tags, but torch's isend has.
        body = torch.frombuffer(bytearray(pickles.dumps(obj)), dtype=torch.uint8)
        started = [
            P2PWork(dist.isend(each, self.ranks[dst], self.cpu_group, tag), each)
            for each in (torch.tensor([body.numel()], device="cpu"), body)
        ]
        for each in () if async_send else started:
            each.work.wait()  # type: ignore[union-attr]
        return started if async_send else []

    def recv_object(self, src: int, tag: int = 0) -> Any:
        if not tag:
            return self.group.recv_object(src)
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        dist.recv(length, self.ranks[src], self.cpu_group, tag)
        body = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
        dist.recv(body, self.ranks[src], self.cpu_group, tag)
        return pickles.loads(bytes_of(body))

    def send_tensor_dict(
        self,
        tensor_dict: dict[str, Any],
        dst: int | None = None,
        all_gather_group: Any | None = None,
        async_send: bool = False,
    ) -> Any:
        """Sends a dict to group rank `dst` (default: the next). Each rank of `all_gather_group` sends a slice of each
        tensor.

        Returns the started transfers if `async_send`, else []. In a group of one rank, returns the dict.
        """
        if self.world_size == 1 or not async_send:
            return self.group.send_tensor_dict(tensor_dict, dst, all_gather_group) or []
        return [P2PWork(self.group.isend_tensor_dict(tensor_dict, dst, all_gather_group), None)]

    recv_tensor_dict = renamed(
        Ours.recv_tensor_dict,
        "src all_gather_group",
        "Returns the dict that rank `src` (default: the previous) sends, or None in a group of one.",
    )

    def send_recv_tensor_dict(
        self,
        send_tensor_dict: dict[str, Any],
        send_dst: int | None = None,
        recv_src: int | None = None,
        send_all_gather_group: Any | None = None,
        recv_all_gather_group: Any | None = None,
    ) -> dict[str, Any] | None:
        """Sends one dict to group rank `send_dst`, and returns the dict that group rank `recv_src` sends. Returns None
        in a group of one rank.

        The all-gather groups are those of `send_tensor_dict` and `recv_tensor_dict`.
        """
        if self.world_size == 1:
            return None
        sending = self.group.isend_tensor_dict(send_tensor_dict, send_dst, send_all_gather_group)
        received = self.recv_tensor_dict(recv_src, recv_all_gather_group)
        sending.wait()
        return received


def named(group_name: str) -> GroupCoordinator:
    group = _groups.get(group_name, lambda: None)()
    if group is None:
        raise GroupDestroyedError(f"this process has no group {group_name!r}: it was destroyed, or never created")
    return group


def inplace_all_reduce(tensor: Tensor, group_name: str) -> None:
    named(group_name).all_reduce(tensor)


def flashinfer_allreduce(tensor: Tensor, group_name: str) -> Tensor:
    """Sums the tensor over the named group, and returns a new tensor."""
    return named(group_name).group.all_reduce(tensor)


def of_groups(module: str, table: Mapping[str, str]) -> dict[str, Any]:
    """Returns functions of the compat module `module`, by name. Each calls a method of one of this rank's groups.

    `table`: function name -> group and method, such as `tp.all_reduce`.
    """

    found = {}
    for name, call in table.items():
        group, _, method = call.partition(".")
        find = functools.partial(lambda field: getattr(get_parallel(), field), f"{group}_group")
        found[name] = forward(module, name, getattr(GroupCoordinator, method), find, f"the {group} group")
    return found
