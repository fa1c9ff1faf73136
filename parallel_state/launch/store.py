"""Serves the store through which ranks find each other, on the node that has rank 0.

The compiled library serves the store (class `World`) to clients with the job's secret. Without the compiled library, or
on several nodes without a secret, torch's TCPStore serves every client.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import (
    InvalidArgumentError,
    LaunchError,
    RendezvousError,
    ResourceLimitError,
    UnsupportedError,
)
from device_communicators.base.limits import need_descriptors, shortage
from device_communicators.control.plane import ControlError, World
from device_communicators.control.store import ControlStore
from device_communicators.cpu import native
from parallel_state.launch.config import LaunchConfig
from parallel_state.launch.worker import STORE_NAME
from parallel_state.startup.stores import listen_on

logger = logging.getLogger(__name__)

_TORCH_DESCRIPTORS = 16
_OPEN = "any process that reaches this job's store can change it:"
SECRET_BYTES, _MOST_SECRET_BYTES = 32, 4096
Listener = TypeVar("Listener", socket.socket, World)
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # if True, torch's env:// doesn't host the store on rank 0


@contextmanager
def meeting_point(config: LaunchConfig, secret: bytes, library: Any, deadline: float) -> Iterator[dict[str, str]]:
    """Yields the environment variables by which ranks find the job's store. The first node serves this store within the
    block.

    `secret` and `library` are from `secret_and_library`. `deadline` is the launch's, in monotonic time.
    """
    if not config.hosts_store:
        yield {AGENT_STORE: "False"}
        return
    several = config.nproc != config.world_size
    start_s = min(settings.START_TIMEOUT_S.get(), max(1.0, deadline - time.monotonic()))
    world = None
    try:
        if not secret:
            store, port = _torch_store(config, timedelta(seconds=start_s))
        elif config.rank_offset == 0:
            world = _listening(config, lambda port: _open_world(library, config.master_addr, port, secret))
            port = world.endpoint.port
            store = ControlStore(library, (config.master_addr, port), secret.hex(), start_s, STORE_NAME)
        else:
            port = config.master_port
            store = ControlStore(library, (config.master_addr, port), secret.hex(), start_s, STORE_NAME)
            try:
                store.reach(time.monotonic() + start_s)
            except dist.DistNetworkError as error:
                raise _not_reached(config, start_s, error) from error
        address = {"MASTER_ADDR": config.master_addr, "MASTER_PORT": str(port)}
        yield {**address, AGENT_STORE: str(not secret)}  # with a secret, ranks use `JOB_STORE`
        if several:
            _leave_together(store, config, min(deadline, time.monotonic() + start_s))
    finally:
        store = None  # closes the port, even if an error's traceback keeps this frame
        if world is not None:
            world.leave()


def secret_and_library(config: LaunchConfig) -> tuple[bytes, Any]:
    """Returns the job's secret and the compiled library, which is compiled if needed.

    Returns b"" and None if the job's store has no secret.
    """
    if not config.hosts_store:
        return b"", None
    secret = b"" if config.secret_file is None else read_secret(config.secret_file)
    if not secret and config.nproc != config.world_size:
        logger.warning("%s several nodes have no secret_file. Pass launch(secret_file=...) on each node", _OPEN)
        return b"", None
    try:
        return secret or secrets.token_bytes(SECRET_BYTES), native.load()
    except native.NativeUnavailableError as error:
        if secret:
            raise UnsupportedError(
                f"secret_file needs this library's C++ part, which isn't available: {error}. Install a C++ compiler, "
                "or a wheel of this library with its C++ part"
            ) from error
        logger.warning("%s no compiled library is available (%s)", _OPEN, error)
        return b"", None


def _open_world(library: Any, address: str, port: int, secret: bytes) -> World:
    limit_s, beat_s = settings.HEARTBEAT_LIMIT_S.get(), settings.HEARTBEAT_S.get()
    try:
        world = World(library, address, limit_s=limit_s, beat_s=beat_s, port=port, token=secret.hex())
    except ResourceLimitError as error:
        raise LaunchError(f"launch can't serve the store through which its ranks meet: {error}", rank=0) from error
    except ControlError as error:
        raise error.__cause__ or error from None
    world.start_thread()
    return world


def read_secret(path: str) -> bytes:
    """Returns the SHA-256 digest of the job's secret, the content of file `path`.

    Raises InvalidArgumentError if other users can access the file.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            facts = os.fstat(file.fileno())
            secret = file.read(_MOST_SECRET_BYTES + 1) if stat.S_ISREG(facts.st_mode) else b""
    except OSError as error:
        raise InvalidArgumentError(f"secret_file {path!r} can't be read: {error}") from error
    for fits, must in (
        (stat.S_ISREG(facts.st_mode), "a regular file"),
        (facts.st_uid == os.geteuid(), f"owned by this user (uid {os.geteuid()}), but its owner is uid {facts.st_uid}"),
        (not facts.st_mode & 0o077, f"closed to others (chmod 600), but has mode {facts.st_mode & 0o777:o}"),
        (SECRET_BYTES <= len(secret) <= _MOST_SECRET_BYTES,
         f"of {SECRET_BYTES} to {_MOST_SECRET_BYTES} bytes (head -c 32 /dev/urandom), but has {len(secret)}"),
    ):  # fmt: skip
        if not fits:
            raise InvalidArgumentError(f"secret_file must be {must} (the file is {path!r})")
    return hashlib.sha256(secret).digest()  # HMAC pads keys with zeros: keys with different trailing zeros are equal


def _not_reached(config: LaunchConfig, start_s: float, error: Exception) -> RendezvousError:
    return RendezvousError(
        f"the node of rank {config.rank_offset} must reach rank 0's store at {config.master_addr}:{config.master_port} "
        f"within {start_s:.0f} s, but: {str(error).splitlines()[0]}"
    )


def _torch_store(config: LaunchConfig, timeout: timedelta) -> tuple[Any, int]:
    hosts, listen_fd, port = config.rank_offset == 0, None, config.master_port
    try:
        need_descriptors(_TORCH_DESCRIPTORS, "serving the job's store")  # without them torch aborts the process
    except ResourceLimitError as error:
        raise LaunchError(
            f"launch can't serve the store through which its ranks meet: {error}", rank=config.rank_offset
        ) from error
    if hosts:
        backlog = (config.world_size or 1) + 128
        listener = _listening(config, lambda port: listen_on(config.master_addr, port, backlog))
        port = listener.getsockname()[1]
        listen_fd = listener.detach()
    try:
        store = dist.TCPStore(
            config.master_addr, port, None, hosts, timeout, wait_for_workers=False, master_listen_fd=listen_fd
        )
    except RuntimeError as error:
        if found := shortage(error):
            raise LaunchError(
                f"launch can't serve the store through which its ranks meet: {found}", rank=config.rank_offset
            ) from error
        raise _not_reached(config, timeout.total_seconds(), error) from error
    return store, port


def _leave_together(store: Any, config: LaunchConfig, deadline: float) -> None:
    """Reports that this node's ranks are done. On the node that serves the store, waits at most until `deadline` for
    the ranks of all nodes.
    """
    done, world = 0, config.world_size or 1
    try:
        bounded = BoundedStore(store)
        done = bounded.add("parallel_state/launch/done", config.nproc or 0)
        while config.rank_offset == 0 and done < world and time.monotonic() < deadline:
            time.sleep(0.02)
            done = bounded.add("parallel_state/launch/done", 0)
    except RuntimeError:  # the store's node failed, but this node's ranks have returned their results
        logger.warning("the node of rank 0 closed the job's store before this node's ranks were done")
    if config.rank_offset == 0 and done < world:
        logger.warning("this node closes the job's store, but only %d of %d ranks are done", done, world)


def _listening(config: LaunchConfig, listen: Callable[[int], Listener]) -> Listener:
    address, port = config.master_addr, config.preferred_port or config.master_port
    try:
        try:
            return listen(port)
        except OSError as error:
            if not config.preferred_port or error.errno != errno.EADDRINUSE:
                raise
            return listen(0)
    except OSError as error:
        if found := shortage(error):
            raise LaunchError(f"launch can't serve the store through which its ranks meet: {found}", rank=0) from error
        if isinstance(error, socket.gaierror):
            raise RendezvousError(
                f"master_addr must be an address of this node, but {address!r} is unusable: {error}"
            ) from error
        raise RendezvousError(
            f"can't listen on {address} port {port}: {error.strerror}; pass an address of rank 0's node as "
            "master_addr, and a free port as master_port (0 for any)"
        ) from error
