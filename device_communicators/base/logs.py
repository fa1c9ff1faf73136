"""Configures the library's log, and chooses the rank that logs a host's problems."""

from __future__ import annotations

import logging
import os

from device_communicators.base import settings

LOGGER = logging.getLogger("parallel_state")


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers


def configure(rank: int | None) -> None:
    """Adds a handler to the library's log, unless the program has log handlers. Its lines show `rank`, if that isn't
    None.
    """
    own = [each for each in LOGGER.handlers if isinstance(each, _OwnHandler)]
    if not own and not LOGGER.hasHandlers():
        own = [_OwnHandler()]
        LOGGER.addHandler(own[0])
        LOGGER.setLevel(settings.LOG_LEVEL.get())
    for handler in own:
        who = "" if rank is None else f"rank {rank} "
        handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(levelname)s %(name)s: %(message)s"))


def is_first_of_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
