"""vLLM's PyNcclCommunicator over torch's process groups. Trainers use it to send weights to an engine.

NCCL's own calls (`group_start`, windows, the wrapper of its library) are missing; only vLLM's own class has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.base.torch_internals import all_gather_base, is_registered, reduce_scatter_base, store_of
from parallel_state.compat.vllm.stateless import StatelessProcessGroup
from parallel_state.compat.vllm.utils import init_gloo_process_group

_TIMEOUT = timedelta(minutes=30)


def _options(kind: Any, **fields: Any) -> Any:
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


class PyNcclCommunicator:
    """Runs collectives of tensors on one device, among the ranks of a StatelessProcessGroup or a process group.

    It makes its own group, of NCCL for a GPU or of gloo for the CPU, so every rank must make the communicator. Calls on
    a GPU run on the current stream or on `stream`. A communicator of one rank is `disabled` and does nothing, as in
    vLLM.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | StatelessProcessGroup,
        device: int | str | torch.device,
        library_path: str | None = None,
    ) -> None:
        """Ignores `library_path` and uses torch's NCCL. Raises InvalidArgumentError for other types of groups."""
        self.group = group
        self.device = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
        if isinstance(group, StatelessProcessGroup):
            self.rank, self.world_size, store = group.rank, group.world_size, group.store
        elif isinstance(group, dist.ProcessGroup) and is_registered(group):
            self.rank, self.world_size, store = group.rank(), group.size(), store_of(group)
        else:
            raise InvalidArgumentError(
                f"group must be a StatelessProcessGroup or a process group of torch.distributed, but is {group!r}"
            )
        self.available = self.world_size > 1
        self.disabled = not self.available
        self._group = self._make(store) if self.available else None

    def _make(self, store: Any) -> Any:
        store = dist.PrefixStore("parallel_state/pynccl", store)
        if self.device.type == "cpu":
            return init_gloo_process_group(store, self.rank, self.world_size, _TIMEOUT)
        torch.cuda.set_device(self.device)
        return dist.ProcessGroupNCCL(store, self.rank, self.world_size, dist.ProcessGroupNCCL.Options())

    def _run(self, tensor: Tensor, stream: Any, start: Callable[[Any], Any]) -> None:
        """Calls `start` with the group, if there is one, and waits for the call that it starts."""
        if self._group is None:
            return
        if tensor.device != self.device:
            raise InvalidArgumentError(f"the tensor must be on {self.device}, but is on {tensor.device}")
        with contextlib.nullcontext() if stream is None or self.device.type == "cpu" else torch.cuda.stream(stream):
            start(self._group).wait()

    def all_reduce(
        self, in_tensor: Tensor, out_tensor: Tensor | None = None, op: Any = dist.ReduceOp.SUM, stream: Any = None
    ) -> Tensor | None:
        """Returns the reduction of the ranks' `in_tensor`, in `out_tensor` if given; None if disabled."""
        if self._group is None:
            return None
        out = in_tensor.clone() if out_tensor is None else out_tensor.copy_(in_tensor)
        options = _options(dist.AllreduceOptions, reduceOp=op)
        self._run(in_tensor, stream, lambda group: group.allreduce([out], options))
        return out

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor, stream: Any = None) -> None:
        """Concatenates the ranks' `input_tensor` along dim 0 into `output_tensor`, which must be contiguous."""
        self._run(input_tensor, stream, lambda group: all_gather_base(group, output_tensor, input_tensor))

    def reduce_scatter(
        self, output_tensor: Tensor, input_tensor: Tensor, op: Any = dist.ReduceOp.SUM, stream: Any = None
    ) -> None:
        """Writes this rank's slice, along dim 0, of the reduction of `input_tensor` into `output_tensor`."""
        given = output_tensor, input_tensor, _options(dist.ReduceScatterOptions, reduceOp=op)
        self._run(input_tensor, stream, lambda group: reduce_scatter_base(group, *given))

    def send(self, tensor: Tensor, dst: int, stream: Any = None) -> None:
        """Sends a contiguous tensor to rank `dst`."""
        self._run(tensor, stream, lambda group: group.send([tensor], dst, 0))

    def recv(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Receives into a contiguous tensor from rank `src`."""
        self._run(tensor, stream, lambda group: group.recv([tensor], src, 0))

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Copies the tensor of rank `src` into every rank's tensor, in place. Tensors must be contiguous."""
        options = _options(dist.BroadcastOptions, rootRank=src)
        self._run(tensor, stream, lambda group: group.broadcast([tensor], options))

    def destroy(self) -> None:
        """Destroys the communicator on this rank. Twice is fine."""
        group, self._group = self._group, None
        self.disabled = True
        if group is not None:
            group.shutdown()
