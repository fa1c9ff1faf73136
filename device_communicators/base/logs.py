"""The library's log in a program that has configured none, and the rank that reports a fault of its host."""

from __future__ import annotations

import logging
import os

from device_communicators.base import settings

LOGGER = logging.getLogger("parallel_state")


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    def filter(self, record: logging.LogRecord) -> bool:
        """Drops records for which the program has handlers by now."""
        return not logging.getLogger().handlers


def configure(rank: int | None) -> None:
    """Writes the log to stderr with time and rank, from PARALLEL_STATE_LOG_LEVEL on. Twice is fine.

    Does nothing if the program has handlers: its configuration stands. Without any, Python's last resort would print
    warnings alone, without time and rank.
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
    """Returns True on the rank that reports the faults of its host, by LOCAL_RANK; True if a launcher set none."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
