"""Queries NVML through pynvml."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class NoAnswerError(Exception):
    pass


class Reader(Protocol):
    def ask(self, question: str, *where: int) -> Any:
        """Returns NVML's answer to `question`, such as "uuid", or raises NoAnswerError. `where`: a GPU's number, a
        GPU's and a link's numbers, or two GPUs' numbers.
        """


@contextlib.contextmanager
def open_nvml() -> Iterator[Nvml]:
    """Opens NVML for the with-block. Raises NoAnswerError if NVML is unavailable."""
    try:
        import pynvml
    except ImportError as error:
        raise NoAnswerError("pynvml can't be imported; install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise NoAnswerError("there is no libnvidia-ml.so.1, so no NVIDIA driver is installed here") from error
    except pynvml.NVMLError as error:
        raise NoAnswerError(f"NVML failed to start: {error}") from error
    try:
        yield Nvml(pynvml)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


_CALLS: dict[str, tuple[str, int, Callable[[Any], Any]]] = {
    "driver_version": ("nvmlSystemGetDriverVersion", 0, _text),
    "cuda_version": ("nvmlSystemGetCudaDriverVersion_v2", 0, int),
    "gpu_count": ("nvmlDeviceGetCount", 0, int),
    "uuid": ("nvmlDeviceGetUUID", 1, _text),
    "pci_id": ("nvmlDeviceGetPciInfo", 1, lambda info: _text(info.busId)),
    "name": ("nvmlDeviceGetName", 1, _text),
    "memory_bytes": ("nvmlDeviceGetMemoryInfo", 1, lambda info: int(info.total)),
    "link_is_active": ("nvmlDeviceGetNvLinkState", 1, bool),
    "link_remote_type": ("nvmlDeviceGetNvLinkRemoteDeviceType", 1, int),
    "link_remote_pci_id": ("nvmlDeviceGetNvLinkRemotePciInfo", 1, lambda info: _text(info.busId)),
    "common_ancestor": ("nvmlDeviceGetTopologyCommonAncestor", 2, int),
    "p2p_status": ("nvmlDeviceGetP2PStatus", 2, int),
}
"""Maps a question to NVML's function, the number of leading arguments that are GPUs, and the
conversion of the result.
"""


class Nvml:
    """Reads facts about GPUs. `ask` calls the NVML function that `_CALLS` lists, or the method `_<question>`."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        self._handles: dict[int, Any] = {}

    def ask(self, question: str, *where: int) -> Any:
        try:
            if question not in _CALLS:
                return getattr(self, f"_{question}")(*where)
            function, gpus, form = _CALLS[question]
            return form(getattr(self._pynvml, function)(*map(self._handle, where[:gpus]), *where[gpus:]))
        except self._pynvml.NVMLError as error:
            raise NoAnswerError(str(error)) from error
        except (AttributeError, ctypes.ArgumentError, OSError, ValueError) as error:
            raise NoAnswerError(f"{type(error).__name__}: {error}") from error

    def _max_links(self) -> int:
        return int(self._pynvml.NVML_NVLINK_MAX_LINKS)

    def _handle(self, gpu: int) -> Any:
        if gpu not in self._handles:
            self._handles[gpu] = self._pynvml.nvmlDeviceGetHandleByIndex(gpu)
        return self._handles[gpu]

    def _cores(self, gpu: int) -> list[int]:
        words = self._pynvml.nvmlDeviceGetCpuAffinity(self._handle(gpu), -(-(os.cpu_count() or 1) // 64))
        return [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]

    def _mig_enabled(self, gpu: int) -> bool:
        current, _ = self._pynvml.nvmlDeviceGetMigMode(self._handle(gpu))
        return bool(current == self._pynvml.NVML_DEVICE_MIG_ENABLE)
