"""SGLang's GroupCoordinator over ours: tensors in place and into outputs, neighbours as global ranks, lists of handles.

Objects of types that aren't registered travel by pickle, as in SGLang: `allow_pickle=True`.
"""

from __future__ import annotations

import logging
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_communicators.base.errors import GroupDestroyedError, InvalidArgumentError, UnsupportedError
from device_communicators.calls.memory import dense
from parallel_state import state
from parallel_state.collectives.capture_stream import GraphCaptureContext
from parallel_state.groups import coordinator as ours
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.wire import bytes_of

logger = logging.getLogger("parallel_state")

TensorMetadata = namedtuple("TensorMetadata", ["device", "dtype", "size"])
REDUCE_OP_SUM = int(dist.ReduceOp.SUM)  # type: ignore[call-overload]


@dataclass
class P2PWork:
    """A started transfer: `work` has `wait()`, `payload` is the tensor that must stay as it is until then."""

    work: Any | None
    payload: Tensor | None


_groups: dict[str, Callable[[], GroupCoordinator | None]] = {}
"""The coordinators by `unique_name`, weakly."""


def refuse_elastic(recovered_rank: bool, rank_offset: int = 0, max_world_size: int | None = None) -> None:
    """Raises UnsupportedError for ranks that join or return: SGLang does that over Mooncake's process groups."""
    if recovered_rank or rank_offset or max_world_size is not None:
        raise UnsupportedError(
            "recovered_rank, rank_offset and max_world_size are those of elastic expert parallelism over Mooncake; "
            "here ranks start again with parallel_state.reinitialize"
        )


class GroupCoordinator:
    """One group as SGLang's code sees it; `group` is our GroupCoordinator.

    In place, and returned: `all_reduce`, `broadcast`. Inputs of one group are on one device and of one dtype; `src` and
    `dst` are ranks in the group; `first_rank`, `last_rank`, `next_rank`, `prev_rank` are global ones. Every rank of the
    group makes a call on tensors. Errors as those of ours.
    """

    rank: int
    ranks: list[int]
    world_size: int
    local_rank: int
    rank_in_group: int
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
        if state.try_get_world_group() is None:
            state.init_distributed_environment(allow_pickle=True)
        self._hold(
            state.init_model_parallel_group(
                group_ranks,
                local_rank,
                str(torch_distributed_backend),
                group_name=group_name or "anonymous",
                use_custom_allreduce=use_custom_allreduce,
                allow_pickle=True,
            )
        )
        self.use_custom_allreduce = use_custom_allreduce

    @classmethod
    def over(cls, group: ours.GroupCoordinator) -> GroupCoordinator:
        """Returns SGLang's view of a group that is made."""
        view = cls.__new__(cls)
        view._hold(group)
        return view

    def _hold(self, group: ours.GroupCoordinator) -> None:
        self.group = group
        self.unique_name, self.device = group.unique_name, group.device
        self.rank, self.ranks, self.world_size = group.rank, group.ranks, group.world_size
        self.local_rank, self.rank_in_group = group.local_rank, group.rank_in_group
        self.active_ranks_cpu = torch.ones(group.world_size, dtype=torch.int32, device="cpu")
        self.active_ranks = self.active_ranks_cpu.to(group.device)
        self.device_module = torch.get_device_module(group.device)
        _groups[self.unique_name] = weakref.ref(self)

    def __repr__(self) -> str:
        return f"sglang.{self.group!r}"

    @property
    def device_group(self) -> Any:
        """Returns the ProcessGroup for tensors of `device`."""
        return self.group.device_group

    @property
    def cpu_group(self) -> Any:
        """Returns the ProcessGroup for CPU tensors."""
        return self.group.cpu_group

    first_rank = property(lambda self: self.group.first_global_rank)
    last_rank = property(lambda self: self.group.last_global_rank)
    next_rank = property(lambda self: self.group.next_global_rank)
    prev_rank = property(lambda self: self.group.prev_global_rank)
    is_first_rank = property(lambda self: self.group.is_first_rank)
    is_last_rank = property(lambda self: self.group.is_last_rank)

    # SGLang has these as functions that a communicator's file gave it; where no memory is NCCL's, they do nothing.

    @staticmethod
    def is_symmetric_memory_enabled() -> bool:
        return False

    @staticmethod
    def is_allocation_symmetric() -> bool:
        return False

    @staticmethod
    def debug_check_symmetric_mempool(*_: Any, **__: Any) -> None:
        return None

    @staticmethod
    @contextmanager
    def use_symmetric_memory(group_coordinator: Any = None, disabled: bool = False) -> Iterator[None]:
        """Runs the body; tensors in shared memory are those of `group.empty`."""
        yield

    @contextmanager
    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None, stream: Any = None
    ) -> Iterator[GraphCaptureContext]:
        """Prepares the group for a CUDA graph, on the stream of the context, on `stream`, or on a new one."""
        if graph_capture_context is None and stream is not None:
            graph_capture_context = GraphCaptureContext(stream)
        with self.group.graph_capture(graph_capture_context) as context:
            yield context

    # Tensors.

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Adds up `input_` over the ranks in place; returns it."""
        return self.group.all_reduce_(input_)

    def quant_all_reduce(self, input_: Tensor) -> Tensor:
        """Calls `all_reduce`, as SGLang does where there is no NPU."""
        return self.all_reduce(input_)

    def fused_allreduce_rmsnorm(
        self, input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Returns `(rms_norm(y) * weight_, y)` of `y = sum(input_) + residual_inp_`, of our all_reduce_add_rms_norm."""
        return self.group.all_reduce_add_rms_norm(input_, residual_inp_, weight_, eps)

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
        """Returns None: there is no kernel for it, as off ROCm in SGLang, and callers quantise by themselves."""
        return None

    def all_gather(
        self, input_: Tensor, dim: int = -1, output_tensor_list: list[Tensor] | None = None
    ) -> Tensor | None:
        """Concatenates along `dim`; with `output_tensor_list` copies each rank's tensor there, and returns None."""
        if output_tensor_list is None:
            return self.group.all_gather(input_, dim)
        for output, gathered in zip(output_tensor_list, self.group.all_gather_to_list(input_), strict=True):
            output.copy_(gathered)
        return None

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> None:
        """Fills `output`, of `world_size` times the elements, with the ranks' `input`, one behind the other."""
        rows = output.view(self.world_size, -1)
        self.group.all_gather(input.reshape(1, -1), 0, out=rows)

    def all_gatherv(
        self, input_: Tensor | list[Tensor], sizes: list[int] | None = None, output: Tensor | None = None
    ) -> list[Tensor]:
        """Gathers each tensor along dim 0, of `sizes[r]` rows on rank r; returns a list, of one for one tensor."""
        inputs = [input_] if isinstance(input_, Tensor) else input_
        if output is not None and not isinstance(input_, Tensor):
            raise InvalidArgumentError("output of all_gatherv takes a single tensor, but input_ is a list")
        gathered = [self.group.all_gatherv(each, 0, sizes) for each in inputs]
        return gathered if output is None else [output.copy_(gathered[0])]

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor) -> None:
        """Adds up `input`, of `world_size` times the elements, and fills `output` with this rank's share."""
        self._copy(output, self.group.reduce_scatter(input.reshape(self.world_size, -1), 0))

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor]) -> Tensor:
        """Adds up the r-th tensors of the ranks' lists, and fills `output` on rank r; returns it."""
        self.reduce_scatter_tensor(output, torch.stack(list(input_list)))
        return output

    def reduce_scatter_along_dim(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Returns this rank's slice of the sum along `dim`."""
        return self.group.reduce_scatter(input_, dim)

    def reduce_scatterv(self, input_: Tensor, output: Tensor | None = None, sizes: list[int] | None = None) -> Tensor:
        """Returns this rank's `sizes[rank]` rows of the sum, in `output` if there is one."""
        scattered = self.group.reduce_scatterv(input_, 0, sizes)
        return scattered if output is None else output.copy_(scattered)

    def all_to_all_single(self, output: Tensor, input: Tensor) -> None:
        """Sends the r-th of `world_size` equal parts of `input` to rank r, and fills `output` with what came."""
        self._copy(output, self.group.all_to_all(input.reshape(self.world_size, -1)))

    @staticmethod
    def _copy(output: Tensor, flat: Tensor) -> None:
        output.copy_(flat.reshape(output.shape))

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Concatenates on rank `dst`; None on the others."""
        return self.group.gather(input_, dst, dim)

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        """Fills `input_` with rank `src`'s, in place; returns it."""
        return self.group.broadcast_(input_, src)

    def barrier(self) -> None:
        """Returns once every rank of the group has called it."""
        self.group.barrier()

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Sends to rank `dst` (default: the next)."""
        self.group.send(tensor, dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Returns the tensor from rank `src` (default: the previous)."""
        return self.group.recv(size, dtype, src)

    # Objects and dicts.

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any:
        """Returns rank `src`'s object."""
        return self.group.broadcast_object(obj, src)

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0, group: Any | None = None) -> list[Any]:
        """Fills the list with rank `src`'s objects; returns it. `group` is not looked at, as in SGLang."""
        return self.group.broadcast_object_list(obj_list, src)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Returns every rank's object, in rank order."""
        return self.group.all_gather_object(obj)

    def send_object(self, obj: Any, dst: int, async_send: bool = False, tag: int = 0) -> list[P2PWork]:
        """Sends an object, which recv_object of the same `tag` gets; with `async_send` the started transfers."""
        if tag:
            return self._send_tagged(obj, dst, async_send, tag)
        if async_send:
            return [P2PWork(self.group.isend_object(obj, dst), None)]
        self.group.send_object(obj, dst)
        return []

    def recv_object(self, src: int, tag: int = 0) -> Any:
        """Returns the object that rank `src` sends with this `tag`."""
        return self._recv_tagged(src, tag) if tag else self.group.recv_object(src)

    def _send_tagged(self, obj: Any, dst: int, async_send: bool, tag: int) -> list[P2PWork]:
        """Sends past the messenger, which has no tags: the lengths, the object, each of its tensors."""
        metadata, tensors = codec.encode(obj, allow_pickle=True)
        body = torch.frombuffer(bytearray(metadata), dtype=torch.uint8)
        started = [
            P2PWork(dist.isend(each, self.ranks[dst], self.cpu_group, tag), each)
            for each in (
                torch.tensor([len(metadata)], device="cpu"),
                body,
                *(dense(each.cpu()) for each in tensors),
            )
        ]
        for each in () if async_send else started:
            each.work.wait()  # type: ignore[union-attr]
        return started if async_send else []

    def _recv_tagged(self, src: int, tag: int) -> Any:
        def received(size: Any, dtype: torch.dtype) -> Tensor:
            buffer = torch.empty(size, dtype=dtype, device="cpu")
            dist.recv(buffer, self.ranks[src], self.cpu_group, tag)
            return buffer

        length = int(received(1, torch.int64).item())
        message = codec.read(bytes_of(received(length, torch.uint8)), allow_pickle=True)
        return message.build([received(each.shape, each.dtype) for each in message.tensors])

    def broadcast_tensor_dict(
        self,
        tensor_dict: dict[str, Any] | None = None,
        src: int = 0,
        group: Any | None = None,
        metadata_group: Any | None = None,
    ) -> dict[str, Any] | None:
        """Returns rank `src`'s dict. The two groups are not looked at, as in SGLang."""
        return tensor_dict if self.world_size == 1 else self.group.broadcast_tensor_dict(tensor_dict, src)

    def send_tensor_dict(
        self,
        tensor_dict: dict[str, Any],
        dst: int | None = None,
        all_gather_group: Any | None = None,
        async_send: bool = False,
    ) -> Any:
        """Sends a dict; returns the started transfers, none without `async_send`, the dict itself in a group of one."""
        inner = _unwrapped(all_gather_group)
        if self.world_size == 1 or not async_send:
            return self.group.send_tensor_dict(tensor_dict, dst, inner) or []
        return [P2PWork(self.group.isend_tensor_dict(tensor_dict, dst, inner), None)]

    def recv_tensor_dict(self, src: int | None = None, all_gather_group: Any | None = None) -> dict[str, Any] | None:
        """Returns the dict that rank `src` (default: the previous) sends; None in a group of one."""
        return self.group.recv_tensor_dict(src, _unwrapped(all_gather_group))

    def send_recv_tensor_dict(
        self,
        send_tensor_dict: dict[str, Any],
        send_dst: int | None = None,
        recv_src: int | None = None,
        send_all_gather_group: Any | None = None,
        recv_all_gather_group: Any | None = None,
    ) -> dict[str, Any] | None:
        """Sends a dict and receives one at the same time; None in a group of one."""
        if self.world_size == 1:
            return None
        sending = self.group.isend_tensor_dict(send_tensor_dict, send_dst, _unwrapped(send_all_gather_group))
        received = self.recv_tensor_dict(recv_src, recv_all_gather_group)
        sending.wait()
        return received

    def destroy(self) -> None:
        """Ends the group on this rank; every rank of it calls it. Twice is fine."""
        self.group.destroy()


def _unwrapped(group: Any | None) -> Any | None:
    return group.group if isinstance(group, GroupCoordinator) else group


def named(group_name: str) -> GroupCoordinator:
    """Returns the coordinator of a `unique_name`; GroupDestroyedError where it is gone."""
    group = _groups.get(group_name, lambda: None)()
    if group is None:
        raise GroupDestroyedError(f"there is no group {group_name!r}")
    return group


def inplace_all_reduce(tensor: Tensor, group_name: str) -> None:
    """Calls the named group's `all_reduce`, in place."""
    named(group_name).all_reduce(tensor)


def outplace_all_reduce(tensor: Tensor, group_name: str, outplace_all_reduce_method: str) -> Tensor:
    """Returns the sum as a new tensor; the method is SGLang's choice of a kernel, and the route chooses here."""
    return named(group_name).group.all_reduce(tensor)


def flashinfer_allreduce(tensor: Tensor, group_name: str) -> Tensor:
    """Returns the sum as a new tensor."""
    return named(group_name).group.all_reduce(tensor)


def reg_all_gather_into_tensor(output: Tensor, input: Tensor, group_name: str) -> None:
    """Calls the named group's `all_gather_into_tensor`."""
    named(group_name).all_gather_into_tensor(output, input)


def reg_reduce_scatter_tensor(output: Tensor, input: Tensor, group_name: str) -> None:
    """Calls the named group's `reduce_scatter_tensor`."""
    named(group_name).reduce_scatter_tensor(output, input)


def reg_all_to_all_single(output: Tensor, input: Tensor, group_name: str) -> None:
    """Calls the named group's `all_to_all_single`."""
    named(group_name).all_to_all_single(output, input)
