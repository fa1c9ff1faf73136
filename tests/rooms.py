"""Tables of allowed imports. A room is a sub-package, or a file at a package's root.

A room can import the rooms in its row and, transitively, the rooms in their rows. The docs draw these tables.
"""

from __future__ import annotations

LOWER = "device_communicators"
UPPER = "parallel_state"

LOWER_ROOMS: dict[str, tuple[str, ...]] = {
    "base": (),
    "control": ("base",),
    "liveness": ("control",),
    "calls": ("base",),
    "cpu": ("liveness", "calls"),
    "routing": ("cpu",),
    "cuda": ("routing",),
    "machine": ("cuda",),
    "process_group": ("routing",),
    "simulated": ("routing",),
    "nccl": ("cuda",),
    "peer": ("machine",),
    "cpu_communicator": ("routing",),
    "c10d": ("routing",),
    "catalog": ("peer", "nccl", "cpu_communicator", "process_group", "simulated", "machine"),
}

UPPER_ROOMS: dict[str, tuple[str, ...]] = {
    "layout": (),
    "startup": (),
    "process_groups": ("startup",),
    "collectives": (),
    "messages": ("collectives",),
    "keywords": ("process_groups", "layout"),
    "groups": ("messages", "keywords"),
    "state": ("groups",),
    "functions": ("state",),
    "regions": ("state",),
    "metrics": (),
    "launch": ("state",),
    "compile": ("collectives",),
    "compat": ("functions", "regions"),
    "tools": ("launch",),
}
"""Rooms of `parallel_state` can also import anything from `device_communicators`. The root of `parallel_state` loads
all rooms except tools and compat; `__main__` imports tools.
"""


def reachable(room: str, rooms: dict[str, tuple[str, ...]]) -> set[str]:
    """Returns all rooms that a room can import. Raises RecursionError if the table has a cycle."""
    return {below for each in rooms[room] for below in (each, *reachable(each, rooms))}
