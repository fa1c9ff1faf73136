"""Decides whether vLLM runs on this library, and puts the message queue in place; imports vLLM.

The platform class and its communicator are found by vLLM itself. The queue has no such hook: modules of vLLM's that
have imported the class get ours instead. `experts` mends what would end expert parallelism.
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
_QUEUE_MODULE = "vllm.distributed.device_communicators.shm_broadcast"
_asking = threading.local()


class StandBackError(Exception):
    """vLLM is left as it is; the text says why."""


def find_platform() -> str | None:
    """Returns the name of the platform class. Raises StandBackError where vLLM wouldn't run on the CPU's own class."""
    if vars(_asking):  # by another plug-in that looks whether it is alone, as this one does
        return None
    _asking.now = True
    try:
        _check_alone()
    finally:
        del _asking.now
    try:
        native.load()
    except native.NativeUnavailableError as error:
        raise StandBackError(f"its compiled part can't be had: {error}") from None
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
        raise StandBackError(f"the platform {', '.join(active)} is active")
    if not _answer(platforms.builtin_platform_plugins["cpu"]):
        raise StandBackError("vLLM wouldn't run on the CPU")


def _answer(ask: Any) -> Any:
    """Returns the answer of another platform's plug-in; what fails is not active, for vLLM as well."""
    try:
        return ask()
    except Exception:
        return None


def install() -> str | None:
    """Replaces vLLM's queue, and mends its experts, if the platform is ours; returns what changed, for the log."""
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
        "groups of CPU workers communicate over shared memory (parallel_state.compat.vllm.communicator), the engine's "
        "messages to and from workers of its host take its queue, and with expert parallelism the kernel for CPUs gets "
        "the ids of a rank's own experts; unset PARALLEL_STATE_PLUGIN to undo all of it"
    )


def queue_class(theirs: Any) -> Any:
    """Returns our queue as a class that makes vLLM's own where readers are on other hosts."""

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
