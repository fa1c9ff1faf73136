"""What NCCL and torch read from the environment when NCCL's groups are made: set where it helps, and told in the log.

What somebody has set stays as it is. Nothing is set for a world on one node: NCCL finds its way there by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import NamedTuple

from device_communicators import settings
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.interfaces import VARIABLE as GLOO_INTERFACE
from parallel_state.startup.interfaces import first_infiniband

logger = logging.getLogger("parallel_state")

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Choice(NamedTuple):
    """A variable, the value that it gets where it has none, and why."""

    name: str
    value: str
    why: str


def choices(
    place: ProcessEnvironment,
    find_interface: Callable[[], str | None] = first_infiniband,
    *,
    uses_nccl: bool = True,
) -> list[Choice]:
    """Returns what NCCL and gloo should be told about this world; gloo alone where NCCL isn't used."""
    if not settings.NCCL_ENVIRONMENT.get() or place.world_size in (1, place.local_world_size):
        return []
    if place.local_world_size is None:
        logger.info(
            "no network interface is chosen for NCCL and gloo: the launcher doesn't tell how many ranks are on this "
            "host, so the world of %d may be on one; set LOCAL_WORLD_SIZE, or %s and NCCL_SOCKET_IFNAME",
            place.world_size,
            GLOO_INTERFACE,
        )
        return []
    interface = find_interface()
    if interface is None:
        return []
    why = f"the world has several nodes, and {interface} is this node's first InfiniBand interface that is up"
    of_gloo = Choice(GLOO_INTERFACE, interface, why)  # gloo knows names only
    if not uses_nccl:
        return [of_gloo]
    return [
        Choice("NCCL_SOCKET_IFNAME", f"={interface}", why),  # `=`: this one, not all that begin so
        of_gloo,
        Choice("NCCL_IB_DISABLE", "0", why),
        Choice("NCCL_NET_GDR_LEVEL", "PXB", "GPUs and network cards below one PCIe switch or several talk directly"),
    ]


def settle(
    place: ProcessEnvironment,
    environ: MutableMapping[str, str] | None = None,
    find_interface: Callable[[], str | None] = first_infiniband,
    *,
    uses_nccl: bool = True,
) -> dict[str, str]:
    """Sets what nobody has set, logs what and why, and returns it."""
    env = os.environ if environ is None else environ
    if uses_nccl:
        _warn_of_silence(env)
    written: dict[str, str] = {}
    for choice in choices(place, find_interface, uses_nccl=uses_nccl):
        if env.get(choice.name, "") != "":
            logger.info("%s stays %s, as it was set", choice.name, env[choice.name])
            continue
        env[choice.name] = written[choice.name] = choice.value
        logger.info("%s=%s: %s", *choice)
    return written


def _warn_of_silence(env: Mapping[str, str]) -> None:
    """torch handles errors of its NCCL groups unless it is told not to; then a rank's end hangs the others."""
    if env.get(_ERROR_HANDLING, "").strip() == "0":
        logger.warning(
            "%s=0 stays as it was set: where a rank ends or NCCL fails, torch's NCCL groups wait for ever; unset it",
            _ERROR_HANDLING,
        )
