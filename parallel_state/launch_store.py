"""Where the ranks meet: the store that `launch` hosts on the node of rank offset 0, and the variables that lead to it.

Belongs here: its address and port, and who may leave when. What does not: the processes (`launch_processes`), and how
a rank finds the store (torch's `env://`).
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from device_communicators import settings
from device_communicators.errors import RendezvousError
from parallel_state.rendezvous import listen_on

if TYPE_CHECKING:
    from parallel_state.launch import LaunchConfig

logger = logging.getLogger(__name__)

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # tells torch's env:// that rank 0 need not host the store


@contextmanager
def meeting_point(config: LaunchConfig, deadline: float) -> Iterator[dict[str, str]]:
    """Yield the variables that lead torch's env:// to a store, which the node of rank_offset 0 hosts.

    It binds the port itself: nobody can take it between a probe and its use, nothing but the given address listens
    (a TCPStore that binds listens on all of them), and the store outlives rank 0.
    """
    if not config.hosts_store:
        yield {AGENT_STORE: "False"}
        return
    start_s = min(settings.START_TIMEOUT_S.get(), max(1.0, deadline - time.monotonic()))
    store, port = _store(config, timedelta(seconds=start_s))
    try:
        yield {"MASTER_ADDR": config.master_addr, "MASTER_PORT": str(port), AGENT_STORE: "True"}
        if config.nproc != config.world_size:
            _leave_together(store, config, min(deadline, time.monotonic() + start_s))
    finally:
        del store  # closes the port, also where an error's traceback keeps this frame


def _store(config: LaunchConfig, timeout: timedelta) -> tuple[Any, int]:
    hosts, listen_fd, port = config.rank_offset == 0, None, config.master_port
    if hosts:
        listener = _listen(config)
        port = listener.getsockname()[1]
        listen_fd = listener.detach()
    try:
        store = dist.TCPStore(
            config.master_addr, port, None, hosts, timeout, wait_for_workers=False, master_listen_fd=listen_fd
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"the node of rank {config.rank_offset} must reach rank 0's store at {config.master_addr}:{port} "
            f"within {timeout.total_seconds():.0f} s, but: {str(error).splitlines()[0]}"
        ) from error
    return store, port


def _leave_together(store: Any, config: LaunchConfig, deadline: float) -> None:
    """The node that hosts the store stays until the ranks of all nodes are done with it."""
    done, world = 0, config.world_size or 1
    try:
        done = store.add("parallel_state/launch/done", config.nproc)
        while config.rank_offset == 0 and done < world and time.monotonic() < deadline:
            time.sleep(0.02)
            done = store.add("parallel_state/launch/done", 0)
    except RuntimeError:  # the store's node failed, but the ranks here have their results
        logger.warning("the node of rank 0 left before the ranks of this one were done")
    if config.rank_offset == 0 and done < world:
        logger.warning("this node leaves with the store, but only %d of %d ranks are done", done, world)


def _listen(config: LaunchConfig) -> socket.socket:
    address, port = config.master_addr, config.preferred_port or config.master_port
    backlog = (config.world_size or 1) + 16
    try:
        try:
            return listen_on(address, port, backlog)
        except OSError as error:
            if not config.preferred_port or error.errno != errno.EADDRINUSE:
                raise
            return listen_on(address, 0, backlog)
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise RendezvousError(f"master_addr must be an address of this node, but {address!r}: {error}") from error
        raise RendezvousError(
            f"can't listen on {address} port {port}: {error.strerror}; rank 0's node needs an address of "
            "its own and a free port: give another one, 0 for any, or preferred_port"
        ) from error
