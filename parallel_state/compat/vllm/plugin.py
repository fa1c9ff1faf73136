"""Decides if vLLM runs on this library, and installs the message queue.

vLLM has no hook for the queue, so `install` replaces the class in vLLM's modules.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from device_communicators.cpu import native
from parallel_state.compat.vllm.message_queue import MessageQueue

GROUP = "vllm.platform_plugins"
_NAME = "parallel_state"
_PLATFORM = "parallel_state.compat.vllm.platform.ParallelStateCpuPlatform"
_asking = threading.local()


class StandBackError(Exception):
    """vLLM must run without this library; the text is the reason."""


def find_platform() -> str | None:
    """Returns the class name of this library's platform for vLLM.

    Raises StandBackError if another platform is active in vLLM, or if the native library is unavailable. Calls the
    other platform plug-ins. If a plug-in calls this function, the inner call returns None.
    """
    if vars(_asking):
        return None
    _asking.now = True
    try:
        _check_alone()
    finally:
        del _asking.now
    try:
        native.load()
    except native.NativeUnavailableError as error:
        raise StandBackError(f"parallel_state's native library is unavailable: {error}") from None
    return _PLATFORM


def _check_alone() -> None:
    from importlib.metadata import entry_points

    from vllm import envs, platforms

    active = [name for name, ask in platforms.builtin_platform_plugins.items() if name != "cpu" and _answer(ask)]
    allowed = envs.VLLM_PLUGINS
    for entry in entry_points(group=GROUP):
        if entry.name != _NAME and (allowed is None or entry.name in allowed) and _answer(lambda e=entry: e.load()()):
            active.append(entry.name)
    if active:
        raise StandBackError(f"vLLM in this process uses another platform plug-in: {', '.join(active)}")
    if not _answer(platforms.builtin_platform_plugins["cpu"]):
        raise StandBackError("vLLM in this process doesn't use its CPU platform")


def _answer(ask: Any) -> Any:
    """Calls `ask`. Returns None if `ask` raises, because vLLM treats such plug-ins as inactive."""
    try:
        return ask()
    except Exception:
        return None


def install() -> str | None:
    """Replaces vLLM's message queue. Returns a text for the log, or None if nothing was replaced."""
    from vllm.platforms import current_platform

    if type(current_platform).__name__ != _PLATFORM.rpartition(".")[2]:
        return None
    import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast

    from parallel_state.compat.vllm import experts

    theirs = shm_broadcast.MessageQueue
    if issubclass(theirs, MessageQueue):
        return None
    experts.install()
    ours = queue_class(theirs)
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.startswith("vllm.") and module.__dict__.get("MessageQueue") is theirs:
            module.MessageQueue = ours  # type: ignore[attr-defined]
    return (
        "groups of CPU workers communicate over shared memory (parallel_state.compat.vllm.communicator), messages "
        "between the engine and workers on its host use parallel_state's queue, and with expert parallelism the CPU "
        "kernel gets local expert ids; unset PARALLEL_STATE_PLUGIN to undo all of this"
    )


def queue_class(theirs: Any) -> Any:
    """Returns the class that replaces `theirs`, vLLM's queue class.

    For a queue with readers on other hosts, the new class creates an object of `theirs`.
    """

    class Queue(MessageQueue):
        def __new__(cls, n_reader: int = 0, n_local_reader: int = 0, *args: Any, **kwargs: Any) -> Any:
            if n_reader != n_local_reader:
                return theirs(n_reader, n_local_reader, *args, **kwargs)
            return super().__new__(cls)

        @staticmethod
        def create_from_handle(handle: Any, rank: int) -> Any:
            if isinstance(handle, MessageQueue.HANDLE):
                return MessageQueue.create_from_handle(handle, rank)
            return theirs.create_from_handle(handle, rank)

        create_from_process_group = staticmethod(theirs.create_from_process_group)
        create_from_process_group_single_reader = staticmethod(theirs.create_from_process_group_single_reader)

    Queue.__name__ = Queue.__qualname__ = "MessageQueue"
    return Queue
