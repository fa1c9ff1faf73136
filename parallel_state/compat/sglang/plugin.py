"""Makes ours the backend of groups in SGLang's CPU engine, where PARALLEL_STATE_PLUGIN names it.

It makes the groups itself, and calls torch.distributed on them as ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from device_communicators.c10d import creation

_TARGET = "sglang.srt.distributed.parallel_state.get_default_distributed_backend"


def backend_of(original: Callable[[str], str], device: str) -> str:
    """Returns our backend for the CPU, and what SGLang says for any other device."""
    return "parallel_state" if device == "cpu" else original(device)


def install() -> str:
    """Registers the hook, and returns what it changes.

    Raises RuntimeError where SGLang doesn't run on the CPU, UnsupportedError where the backend can't be compiled.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    if torch.cuda.is_available() or not is_cpu():
        raise RuntimeError("SGLang doesn't run on the CPU (SGLANG_USE_CPU_ENGINE=1)")
    creation.load()  # else the engine would end at its first group, where now it stays on gloo
    HookRegistry.register(_TARGET, backend_of, HookType.AROUND)
    return "SGLang's groups of CPU tensors have the backend parallel_state instead of gloo"
