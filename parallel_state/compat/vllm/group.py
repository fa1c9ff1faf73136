"""vLLM's GroupCoordinator, which calls one of this library's groups."""

# mypy: disable-error-code="override"

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_state import state
from parallel_state.compat.coordinator import GroupView
from parallel_state.compat.tables import renamed
from parallel_state.compat.vllm.message_queue import Handle as QueueHandle
from parallel_state.compat.vllm.message_queue import MessageQueue
from parallel_state.groups.coordinator import GroupCoordinator as Ours

_CHUNK_BYTES, _CHUNKS = 1 << 22, 6


class Handle(Protocol):
    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...


class GroupCoordinator(GroupView):
    """A group with vLLM's calls. `src` and `dst` are ranks in the group.

    `rank`, `first_rank`, `last_rank`, `next_rank` and `prev_rank` are global.
    """

    device_communicator: GroupCoordinator | None
    """The coordinator itself; None in a group of one rank or without `use_device_communicator`."""
    mq_broadcaster: MessageQueue | None
    """None, because the group sends objects through its own queues."""
    device_index: int
    group_ranks: list[list[int]]
    torch_distributed_backend: str
    # Only vLLM's code reads the next attributes.
    cpu_timeout: timedelta | None
    use_device_communicator: bool
    use_custom_op_call: bool
    use_cpu_custom_send_recv: bool

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        use_all2all: bool = False,
    ) -> None:
        """Creates a group for each list of global ranks.

        Every rank of the world must pass the same lists, and be in one list. `use_device_communicator=False` forbids
        this library's kernels. `use_all2all` enables `dispatch` and `combine`. `use_message_queue_broadcaster` has no
        effect.
        """
        if not dist.is_initialized():
            state.get_world_group()  # raises if there is no world
        made = self._make(
            group_ranks,
            local_rank,
            torch_distributed_backend,
            group_name,
            use_device_communicator=use_device_communicator,
            use_message_queue_broadcaster=use_message_queue_broadcaster,
        )
        self._show(made, group_ranks, use_device_communicator, use_all2all)

    def _show(
        self, made: Ours, group_ranks: list[list[int]] | None = None, has_communicator: bool = True, a2a: bool = False
    ) -> None:
        super()._show(made)
        self.group_ranks = group_ranks or [made.ranks]
        self.device_index = self.local_rank
        self.torch_distributed_backend = self.backend
        self.cpu_timeout = timedelta(seconds=self.context.timeout_s)
        self.use_device_communicator = has_communicator
        self.device_communicator = self if has_communicator and self.world_size > 1 else None
        self.mq_broadcaster = None
        self.use_custom_op_call = self.use_cpu_custom_send_recv = True
        self._all2all = a2a
        self._sizes: list[int] = []

    def make_sibling_device_group(self, group_desc: str | None = None) -> Any:
        """Creates a second process group of the same ranks. Every rank of the world must call this."""
        made = [
            (ranks, dist.new_group(ranks, backend=self.torch_distributed_backend, group_desc=group_desc))
            for ranks in self.group_ranks
        ]
        return next(group for ranks, group in made if self.rank in ranks)

    def create_mq_broadcaster(
        self, writer_rank: int = 0, external_writer_handle: QueueHandle | None = None, blocking: bool = True
    ) -> MessageQueue:
        """Creates a message queue from group rank `writer_rank` to all other ranks. Every rank of the group must call
        this.

        With `external_writer_handle`, the process of that handle writes and all ranks read. `blocking`: calls
        `wait_until_ready`.
        """
        return MessageQueue.create_from_process_group(
            self.cpu_group, _CHUNK_BYTES, _CHUNKS, writer_rank, external_writer_handle, blocking
        )

    def create_single_reader_mq_broadcasters(
        self, reader_rank_in_group: int = 0, blocking: bool = False
    ) -> tuple[MessageQueue, list[QueueHandle]]:
        """Creates a message queue from each rank to group rank `reader_rank_in_group`, the reader. Every rank of the
        group must call this.

        Returns this rank's queue and, on the reader, the handles of all queues (on other ranks []). `blocking`: calls
        `wait_until_ready`.
        """
        reader = self.ranks[reader_rank_in_group]
        return MessageQueue.create_from_process_group_single_reader(
            self.cpu_group, _CHUNK_BYTES, _CHUNKS, reader, blocking
        )

    graph_capture = renamed(
        Ours.graph_capture, "graph_capture_context", "Prepares the group for CUDA graphs that the body captures."
    )

    all_reduce = renamed(Ours.all_reduce, "input_", "Returns the sum over all ranks as a new tensor.")
    all_gather = renamed(Ours.all_gather, "input_ dim", "Concatenates the ranks' tensors along `dim`.")
    all_gatherv = renamed(
        Ours.all_gatherv,
        "input_ dim sizes",
        "Concatenates the ranks' tensors, of `sizes[r]` rows each, along `dim`. Takes one tensor or a list of tensors.",
    )
    reduce_scatter = renamed(
        Ours.reduce_scatter, "input_ dim", "Returns this rank's slice, along `dim`, of the sum over all ranks."
    )
    reduce_scatterv = renamed(
        Ours.reduce_scatterv, "input_ dim sizes", "Returns this rank's slice, of `sizes[rank]`, of the sum."
    )

    def reduce_scatterv_into_output(
        self, input_: Tensor, output: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        return output.copy_(self.reduce_scatterv(input_, dim, sizes))

    cpu_all_reduce_ = renamed(Ours.all_reduce_, "tensor", "Sums a CPU tensor over all ranks in place; returns it.")

    send_object = renamed(Ours.send_object, "obj dst!", "Sends an object to rank `dst`.")
    recv_object = renamed(Ours.recv_object, "src!", "Returns the object that rank `src` sends.")
    isend_object = renamed(Ours.isend_object, "obj dst!", "Starts send_object; returns its handle.")
    send_tensor_dict = renamed(
        Ours.send_tensor_dict,
        "tensor_dict dst all_gather_group all_gather_tensors",
        "Sends a dict to rank `dst` (default: the next). Returns the dict in a group of one rank, else None.",
    )
    recv_tensor_dict = renamed(
        Ours.recv_tensor_dict,
        "src all_gather_group all_gather_tensors",
        "Returns the dict that rank `src` (default: the previous) sends, or None in a group of one rank.",
    )
    isend_tensor_dict = renamed(
        Ours.isend_tensor_dict,
        "tensor_dict dst all_gather_group all_gather_tensors",
        "Starts send_tensor_dict; returns a list of its handles, empty in a group of one rank.",
        then=list,
    )
    irecv_tensor_dict = renamed(
        Ours.irecv_tensor_dict,
        "src all_gather_group all_gather_tensors",
        "Starts recv_tensor_dict; returns the dict that the handles' `wait()` fills, the handles, and the functions to "
        "call after them.",
        then=lambda handle: tuple(list(each) if at else each for at, each in enumerate(handle)),
    )

    # Expert parallelism without token routing: every rank gets all tokens of the group.

    def _expert_group(self, is_sequence_parallel: bool) -> GroupCoordinator:
        return self if is_sequence_parallel else GroupCoordinator.of(state.get_dp_group())

    def _dispatch(
        self, tensors: list[Tensor], extra_tensors: list[Tensor] | None, is_sequence_parallel: bool
    ) -> tuple[Any, ...]:
        gathered = [*tensors, *(extra_tensors or ())]
        if self._all2all:
            group, rows = self._expert_group(is_sequence_parallel), tensors[0].shape[0]
            self._sizes = group.all_gather(torch.tensor([rows], device="cpu"), 0).tolist()
            gathered = group.all_gatherv(gathered, 0, self._sizes)
        of_own = len(tensors)
        return (*gathered[:of_own], *([gathered[of_own:]] if extra_tensors is not None else []))

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> Any:
        """Gathers each tensor, of shape `[tokens, …]`, from all data-parallel ranks along dim 0. Returns a tuple;
        results of `extra_tensors` are a list at its end.

        With `is_sequence_parallel`, gathers from this group's ranks instead. Without `use_all2all`, returns the inputs.
        """
        return self._dispatch([hidden_states, router_logits], extra_tensors, is_sequence_parallel)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> Any:
        """Works as `dispatch_router_logits`, but for tokens whose experts are already chosen."""
        return self._dispatch([hidden_states, topk_weights, topk_ids], extra_tensors, is_sequence_parallel)

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """Sums the experts' results over the ranks from which the latest dispatch gathered. Returns the rows of the
        tokens that this rank passed to the dispatch. `is_sequence_parallel` must be that of the dispatch.
        """
        if not self._all2all:
            return hidden_states
        return self._expert_group(is_sequence_parallel).reduce_scatterv(hidden_states, 0, self._sizes)

    def allocate_combine_input(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, is_sequence_parallel: bool = False
    ) -> Tensor | None:
        """Returns None, because `combine` accepts any tensor."""
        return None

    def combine_into_output(self, hidden_states: Tensor, output: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        return output.copy_(self.combine(hidden_states, is_sequence_parallel))
