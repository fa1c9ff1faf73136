"""What torch.distributed's words for a failure mean: it raises RuntimeError for all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from device_communicators.errors import CollectiveTimeoutError, CommunicationError, PeerDiedError

ADVICE: dict[type[CommunicationError], str] = {
    CollectiveTimeoutError: "look at the ranks that are not in this call (their logs, `py-spy dump`), or raise the "
    "timeout",
    PeerDiedError: "look for the first rank that ended",
    CommunicationError: "look for the first rank that failed",
}


def kind_of_failure(text: str) -> type[CommunicationError]:
    """The error's type, by c10d's text."""
    lowered = text.lower()
    if "timed out" in lowered or "timeout" in lowered:
        return CollectiveTimeoutError
    if "closed by peer" in lowered or "reset by peer" in lowered or "broken pipe" in lowered:
        return PeerDiedError
    return CommunicationError


def is_communication_error(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, torch.OutOfMemoryError))


_TRANSPORTS = ("gloo", "nccl", "timed out", "timeout", "connection", "connect", "socket", "peer", "broken pipe", "rank")


def is_of_transport(error: Exception) -> bool:
    """Whether torch.distributed raised it, by its type or its words; else it is a mistake of this rank."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _TRANSPORTS)
