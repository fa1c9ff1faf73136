"""Reference results for float8_e4m3fn and the fused norms, computed without torch's conversions or norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX = 448.0
MIN_SCALE = 1.0 / (448.0 * 512.0)


def _value(byte: int) -> float:
    exponent, fraction = byte >> 3 & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return float("nan")
    magnitude = (fraction / 8) * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -magnitude if byte & 128 else magnitude


VALUES = np.array([_value(byte) for byte in range(256)])
_MAGNITUDES = VALUES[:127]  # 0 … 448, ascending; byte 127 is NaN


def to_bytes(numbers: Any) -> Any:
    """Converts to bytes, rounding to nearest, ties to even. Numbers above 448 become 448, and NaN becomes byte 127."""
    wide = np.asarray(numbers, dtype=np.float64)
    absolute = np.where(np.isnan(wide), 0.0, np.minimum(np.abs(wide), MAX))
    above = np.clip(np.searchsorted(_MAGNITUDES, absolute), 1, 126)
    low, high = _MAGNITUDES[above - 1], _MAGNITUDES[above]
    up = (absolute - low > high - absolute) | ((absolute - low == high - absolute) & (above % 2 == 0))
    found = np.where(up, above, above - 1) | (np.signbit(wide) << 7)
    return np.where(np.isnan(wide), 127, found).astype(np.uint8)


def bytes_of(x: Tensor) -> Any:
    found = x.view(torch.uint8).numpy()
    return np.where((found & 127) == 127, 127, found)


def static_bytes(normed: Tensor, scale: float) -> Any:
    with np.errstate(all="ignore"):
        return to_bytes(normed.float().numpy() * (np.float32(1) / np.float32(scale)))


def per_token_bytes(normed: Tensor) -> tuple[Any, Any]:
    with np.errstate(all="ignore"):
        wide = normed.float().numpy()
        largest = np.abs(wide).max(-1, keepdims=True, initial=0)
        scales = np.float32(largest) / np.float32(448)
        scales = np.where(scales < np.float32(MIN_SCALE), np.float32(MIN_SCALE), scales)
        return to_bytes(wide / scales), scales


def norm_bounds(y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns bounds for the RMS-normalized `y`, which allow for rounding in float32 and to the dtype."""
    wide = y.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    info = torch.finfo(torch.float32 if y.dtype == torch.float64 else y.dtype)
    slack = exact.abs() * (info.eps / 2 + 2.0**-20) + info.smallest_normal * info.eps
    return exact - slack, exact + slack
