"""Options for the process groups of one parallel axis, and checks of the options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.errors import InvalidArgumentError, int_advice
from device_communicators.base.member import MOST_TIMEOUT_S
from device_communicators.base.torch_internals import set_nccl_timeout


@dataclass(frozen=True)
class GroupOptions:
    """Options for the process groups of one parallel axis. If backend or timeout is None, the value that was passed to
    initialize_model_parallel is used.

    `high_priority_stream`, `cga_cluster_size` (the size of thread-block clusters), `min_ctas` and `max_ctas` (limits of
    a communicator's thread blocks) are for NCCL only.
    """

    backend: str | None = None
    timeout: timedelta | float | None = None
    """The timeout of each operation, in seconds or as a timedelta. It also applies to the axis's gloo group."""
    high_priority_stream: bool = False
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None

    @property
    def timeout_s(self) -> float:
        return seconds(self.timeout)

    def resolve(self, backend: str, timeout_s: float, *, known: str | None = None) -> GroupOptions:
        """Returns a copy in which `backend` and `timeout_s` replace unset values. Raises InvalidArgumentError for
        invalid values.

        `known`: a backend that is accepted without a check.
        """
        if self.backend not in (None, known):
            check_backend(self.backend)
        for name, least in (("cga_cluster_size", 0), ("min_ctas", 1), ("max_ctas", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise InvalidArgumentError(
                    f"{name} must be an int of at least {least}, or None, but is {value!r}{int_advice(value)}"
                )
        if not isinstance(self.high_priority_stream, bool):
            raise InvalidArgumentError(f"high_priority_stream must be a bool, but is {self.high_priority_stream!r}")
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise InvalidArgumentError(f"min_ctas must be at most max_ctas, {self.max_ctas}, but is {self.min_ctas}")
        timeout = timeout_s if self.timeout is None else seconds(self.timeout)
        resolved = replace(self, backend=self.backend or backend, timeout=timeout)
        return resolved if resolved.is_nccl else GroupOptions(resolved.backend, timeout)

    @property
    def for_cpu(self) -> GroupOptions:
        return self if self.backend in ("gloo", "fake") else GroupOptions("gloo", self.timeout)

    @property
    def for_callers(self) -> GroupOptions:
        chosen = GroupOptions(settings.CPU_BACKEND.get(), self.timeout)
        return self.for_cpu if chosen.backend == "gloo" or self.backend == "fake" else chosen

    @property
    def meets(self) -> bool:
        """True if creating the group waits for the group's other ranks. With NCCL, only the first call waits."""
        return any(name in str(self.backend) for name in ("gloo", "parallel_state"))

    @property
    def is_nccl(self) -> bool:
        return "nccl" in str(self.backend)

    @property
    def nccl_config(self) -> dict[str, int]:
        """Returns the NCCL options that are set, by field names of NCCL's ncclConfig_t."""
        chosen = {"cgaClusterSize": self.cga_cluster_size, "minCTAs": self.min_ctas, "maxCTAs": self.max_ctas}
        return {name: value for name, value in chosen.items() if value is not None}

    def connecting(self, limit_s: float) -> GroupOptions:
        """Returns the options for creating a group. If creation waits for ranks, the timeout is at least `limit_s`.

        The caller sets the group's own timeout afterwards.
        """
        return replace(self, timeout=max(self.timeout_s, limit_s)) if self.meets else self

    def for_backend(self) -> Any:
        """Returns torch's options object for the NCCL backend, or None if no option of NCCL is set."""
        if not self.is_nccl or self == GroupOptions(self.backend, self.timeout):
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority_stream)
        set_nccl_timeout(options, timedelta(seconds=self.timeout_s))
        for name in ("cga_cluster_size", "min_ctas", "max_ctas"):
            value = getattr(self, name)
            if value is not None:
                setattr(options.config, name, value)
        return options


def check_backend(backend: object) -> None:
    if not isinstance(backend, str):
        raise InvalidArgumentError(f"backend must be a str, but is {backend!r}")
    for part in backend.split(","):  # `gloo`, or `cpu:gloo,cuda:nccl`
        name = part.rpartition(":")[2].strip().lower()
        if name not in dist.Backend.backend_list:
            raise InvalidArgumentError(
                f"backend (the argument, or {settings.BACKEND.name}) must be one of "
                f"{', '.join(dist.Backend.backend_list)}, but is {backend!r}"
            )
        if not dist.is_backend_available(name):
            raise InvalidArgumentError(f"this build of torch has no backend {name!r}; use another one, such as gloo")


def seconds(timeout: object) -> float:
    """Converts a timeout (seconds, timedelta, or None for PARALLEL_STATE_TIMEOUT_S) to seconds."""
    if timeout is None:
        return settings.TIMEOUT_S.get()
    number = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 < number < MOST_TIMEOUT_S:
        raise InvalidArgumentError(f"timeout must be a positive number of seconds or a timedelta, but is {timeout!r}")
    return float(number)
