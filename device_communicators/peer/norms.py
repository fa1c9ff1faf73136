"""all_reduce, add and RMS norm in one launch, in peer memory: how a group's kernels for it are called.

The kernels are in csrc/add_rms_norm.cuh. What they don't take, a row too long for the device say, is composed by
the communicator. Not run on a GPU.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from device_communicators.cuda.driver import Call, norm_grid
from device_communicators.peer.group import DTYPES, PeerGroup
from device_communicators.routing.norms import FP8

PLAIN = "all_reduce_add_rms_norm"
STATIC_FP8 = "all_reduce_add_rms_norm_static_fp8"
TOKEN_FP8 = "all_reduce_add_rms_norm_token_fp8"

_MOST_PREPARED = 1024


class PeerNorms:
    """The fused kernels of one group. Tensors are contiguous, on its device, of one dtype, and begin at 16 bytes."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group
        self._prepared: dict[tuple[str, int, int], tuple[int, int, Call]] = {}
        self._lock = threading.Lock()

    def takes(self, x: Tensor, residual: Tensor, weight: Tensor) -> bool:
        """Whether there is a kernel for these; the same on all ranks."""
        if x.dim() == 0 or x.numel() == 0 or x.dtype not in DTYPES:
            return False
        if residual.shape != x.shape or weight.shape != x.shape[-1:]:
            return False
        if any(each.dtype != x.dtype or each.device != x.device for each in (residual, weight)):
            return False
        return self._grid(x)[0] > 0

    def plain(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, y = torch.empty_like(x), torch.empty_like(x)
        self._run(PLAIN, (x, residual, weight, None), (out, y, None), eps)
        return out, y

    def static_fp8(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, y = torch.empty_like(x, dtype=FP8), torch.empty_like(x)
        self._run(STATIC_FP8, (x, residual, weight, scale), (out, y, None), eps)
        return out, y

    def token_fp8(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out, y = torch.empty_like(x, dtype=FP8), torch.empty_like(x)
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        self._run(TOKEN_FP8, (x, residual, weight, None), (out, y, scales), eps)
        return out, scales, y

    def prove(self) -> None:
        """Each kind of call once: see PeerGroup.prove. Results are exact: y is 1 everywhere, the norm is the weight."""
        context = self._group.context
        rows, hidden = 3, 96
        x = torch.arange(rows * hidden, dtype=torch.float32, device=context.device).view(rows, hidden)
        residual, weight = 1 - x * context.size, (x[0] % 8 + 1) * 64  # 64 … 512, exact in float8 up to 448
        quantised = (weight - (weight == 512) * 64).expand(rows, hidden)
        one = torch.ones(1, device=context.device)
        weight_of_448 = weight.clamp(max=448)

        def plain() -> tuple[Tensor, Tensor]:
            normed, y = self.plain(x, residual, weight, 0.0)
            return torch.cat([normed, y]), torch.cat([weight.expand(rows, hidden), torch.ones_like(x)])

        def static() -> tuple[Tensor, Tensor]:
            return self.static_fp8(x, residual, weight, one, 0.0)[0].float(), quantised

        def token() -> tuple[Tensor, Tensor]:
            found, scales, _ = self.token_fp8(x, residual, weight_of_448, 0.0)
            return found.float() * scales, quantised

        with self._group.proving() as prove_one:
            for what, attempt in ((PLAIN, plain), (STATIC_FP8, static), (TOKEN_FP8, token)):
                prove_one(what, attempt)

    def _grid(self, x: Tensor) -> tuple[int, int]:
        hidden = x.shape[-1]
        return norm_grid(hidden * x.itemsize, x.numel() // hidden, self._group.max_blocks)

    def _run(
        self,
        kernel: str,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
        outputs: tuple[Tensor, Tensor, Tensor | None],
        eps: float,
    ) -> None:
        (x, residual, weight, scale), (out, y, scales) = inputs, outputs
        hidden = x.shape[-1]
        rows, name = x.numel() // hidden, f"{kernel}_{DTYPES[x.dtype]}"
        with self._lock:  # a prepared call is filled in and launched by one thread at a time
            prepared = self._prepared.get((name, rows, hidden))
            if prepared is None:
                if len(self._prepared) >= _MOST_PREPARED:
                    self._prepared.clear()
                prepared = (*self._grid(x), self._group.new_call(x.numel()))
                self._prepared[name, rows, hidden] = prepared
            blocks, threads, call = prepared
            call.input, call.residual, call.weight = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
            call.output, call.residual_out = out.data_ptr(), y.data_ptr()
            call.scale = 0 if scale is None else scale.data_ptr()
            call.scale_out = 0 if scales is None else scales.data_ptr()
            call.rows, call.hidden, call.eps = rows, hidden, eps
            self._group.start(name, blocks, threads, call)
