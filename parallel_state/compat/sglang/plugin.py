"""Makes this library the backend of groups in SGLang's CPU engine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from device_communicators.c10d import creation

_TARGET = "sglang.srt.distributed.parallel_state.get_default_distributed_backend"


def backend_of(original: Callable[[str], str], device: str) -> str:
    return "parallel_state" if device == "cpu" else original(device)


def install() -> str:
    """Makes SGLang's CPU groups use this library. Returns a text for the log."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    if torch.cuda.is_available() or not is_cpu():
        raise RuntimeError(
            "SGLang doesn't run its CPU engine in this process; set SGLANG_USE_CPU_ENGINE=1 on a machine without GPU"
        )
    creation.load()  # fails here, where SGLang still stays on gloo
    HookRegistry.register(_TARGET, backend_of, HookType.AROUND)
    return "SGLang's CPU groups have the backend parallel_state instead of gloo"
