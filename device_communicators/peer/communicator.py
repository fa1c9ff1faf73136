"""Runs collectives of small GPU tensors within one host, by kernels on *peer memory*: GPU memory that all ranks have
mapped.

All kernels sum in float32 in rank order, and round once. An element's bits don't depend on the rank, kernel, size or
position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError, UnsupportedError
from device_communicators.calls.reductions import REDUCING
from device_communicators.peer.device import PeerDevice, start
from device_communicators.peer.group import DTYPES, PeerGroup
from device_communicators.peer.memory import NotSharedError
from device_communicators.peer.thresholds import ALGORITHMS, Thresholds
from device_communicators.routing.communicator import COMPOSED, GroupContext, PartialCommunicator, Request

ALIGNMENT = 16
"""Of tensors' addresses, in bytes."""

_FUSED = tuple(name for name in REDUCING if name.startswith("all_reduce_add_rms_norm"))
_SUMS = ("all_reduce", "all_reduce_", "reduce_scatter", *_FUSED)


def _fused_norm(operation: str, kind: str) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        self: PeerMemoryCommunicator, x: Tensor, residual: Tensor, weight: Tensor, *scale_and_eps: Any
    ) -> tuple[Tensor, ...]:
        *scale, eps = scale_and_eps
        if not self._fuses(x, residual, weight) or any(s.numel() != 1 or s.dtype != torch.float32 for s in scale):
            return COMPOSED[operation](self, x, residual, weight, *scale_and_eps)
        x, residual, weight, *scale = map(self._placed, (x, residual, weight, *scale))
        return self.group.norm(kind, x, residual, weight, eps, *scale)

    return run


class PeerMemoryCommunicator(PartialCommunicator):
    """Runs each collective of a group of up to 8 ranks as one kernel launch on the current stream. Fused norms that the
    kernels don't support run as several calls.
    """

    name = "peer_memory"
    picks_by_size = True

    def __init__(
        self, context: GroupContext, device: PeerDevice | None = None, thresholds: Thresholds | None = None
    ) -> None:
        super().__init__(context)
        self._thresholds = thresholds
        self._at = context.device
        self._device = device
        self._made: PeerGroup | None = None

    def admit(self) -> str | None:
        try:
            device = start(self.context, self._device)
            self._made = PeerGroup.set_up(self.context, device, self._thresholds)
        except NotSharedError as error:
            return str(error)
        return None

    @property
    def group(self) -> PeerGroup:
        if self._made is None:
            raise UnsupportedError(
                f"{self.context} has no GPU memory that its ranks share: the group was made without such memory "
                "(explain() gives the reason), or was destroyed"
            )
        return self._made

    def __str__(self) -> str:
        return f"kernels in peer memory, small {self.context.device.type} tensors on the current stream: {self._made}"

    def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.close()

    def refusal(self, request: Request) -> str | None:
        if request.device_type != self.context.device.type:
            return f"a tensor on {request.device_type}"
        if request.operation == "all_gather":
            return self._too_large(request, self.group.admission.thresholds.all_gather)
        if request.operation not in _SUMS:
            return f"it has no {request.operation}"
        if request.reduce_op not in (None, "sum"):
            return f"its kernels support only sum, not {request.reduce_op}"
        if request.dtype not in DTYPES:
            return f"its kernels support {', '.join(DTYPES.values())}, not {request.dtype}"
        if self.group.admission.pinned is not None:
            return None
        thresholds = self.group.admission.thresholds
        if request.operation == "reduce_scatter":
            return self._too_large(request, thresholds.reduce_scatter * self.context.size)
        return self._too_large(request, thresholds.most())

    def _too_large(self, request: Request, limit: int) -> str | None:
        size_bytes = request.numel * (1 if request.dtype is None else request.dtype.itemsize)
        if size_bytes <= limit:
            return None
        return f"{size_bytes} bytes exceed its limit of {limit} for {request.operation}"

    def algorithm(self, size_bytes: int) -> str:
        admission = self.group.admission
        return admission.pinned or admission.thresholds.algorithm(size_bytes) or ALGORITHMS[-1]

    def _placed(self, x: Tensor) -> Tensor:
        if x.device != self._at:
            raise InvalidArgumentError(
                f"tensors of {self.context} must be on {self._at}, but one is on {x.device}; move that tensor"
            )
        if not x.is_contiguous():
            return x.contiguous()
        return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()

    def all_reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        x = self._placed(x)
        out = torch.empty_like(x)
        if x.numel():
            self.group.all_reduce(out, x, self.algorithm(x.nbytes))
        return out

    all_reduce_add_rms_norm = _fused_norm("all_reduce_add_rms_norm", "")
    all_reduce_add_rms_norm_static_fp8_quant = _fused_norm("all_reduce_add_rms_norm_static_fp8_quant", "_static_fp8")
    all_reduce_add_rms_norm_dynamic_per_token_fp8_quant = _fused_norm(
        "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant", "_token_fp8"
    )

    def _fuses(self, x: Tensor, residual: Tensor, weight: Tensor) -> bool:
        admission = self.group.admission
        is_small = admission.pinned is not None or x.nbytes <= admission.thresholds.fused
        return is_small and self.group.has_norm(x, residual, weight)

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        if x.numel():
            placed = self._placed(x)
            self.group.all_reduce(placed, placed, self.algorithm(x.nbytes))
            if placed is not x:
                x.copy_(placed)

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        if x.numel():
            limit = self.group.admission.thresholds.all_gather_push
            self.group.all_gather(out, self._placed(x), "push" if x.nbytes <= limit else "pull")

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        if x.numel():
            limit = self.group.admission.thresholds.reduce_scatter_push
            self.group.reduce_scatter(out, self._placed(x), "push" if out.nbytes <= limit else "pull")
