"""The table of rooms: which may import which. The direction test asserts it, and the docs draw it.

A room is a sub-package, or a file at a package's root. It may import what its row names, and whatever the rooms named
there may import in turn. The files of `GROUND` are the ground that every room stands on.
"""

from __future__ import annotations

LOWER = "device_communicators"
UPPER = "parallel_state"

GROUND = (
    "errors", "settings", "cores", "floating_point", "exits", "forks", "host", "host_calls", "limits", "member",
    "build_cache", "helper_threads", "bounded_store", "public_names",
)  # fmt: skip
"""Files at the root of `device_communicators` that every room of both packages may import."""

LOWER_ROOMS: dict[str, tuple[str, ...]] = {
    "liveness": (),
    "routing": ("liveness",),
    "cuda": ("routing",),
    "cpu": ("routing",),
    "machine": ("cuda",),
    "process_group": ("routing",),
    "simulated": ("routing",),
    "hierarchical": ("cpu",),
    "nccl": ("cuda",),
    "peer": ("machine",),
    "c10d": ("hierarchical",),
    "catalog": ("peer", "nccl", "hierarchical", "process_group", "simulated", "cpu", "machine"),
}

UPPER_ROOMS: dict[str, tuple[str, ...]] = {
    "layout": (),
    "store": (),
    "torch_internals": ("store",),
    "startup": ("torch_internals",),
    "process_groups": ("startup",),
    "collectives": ("torch_internals",),
    "messages": ("collectives",),
    "coordinator": ("messages", "process_groups"),
    "groups": ("coordinator", "layout"),
    "world": ("groups",),
    "state": ("world",),
    "simulated": ("groups",),
    "getters": ("state",),
    "aliases": ("state",),
    "regions": ("state",),
    "capture": ("state",),
    "metrics": (),
    "tracing": ("state",),
    "utilities": ("state",),
    "recovery": ("state",),
    "launch": ("state",),
    "compile": ("collectives",),
    "compat": ("recovery", "getters", "aliases", "regions", "capture", "utilities", "simulated"),
    "tools": ("launch", "simulated"),
}
"""Rooms of `parallel_state` may import whatever of `device_communicators` they need.

Its root imports all but tools and compat.
"""

TYPES_ONLY = {("routing", "cpu"): "a group's context carries the host's memory to the communicators above, unseen"}
"""Arrows against the table that only type checkers follow, each with its reason."""


def reachable(room: str, rooms: dict[str, tuple[str, ...]]) -> set[str]:
    """Returns every room that `room` may import. Raises RecursionError where the table has a cycle."""
    return {below for each in rooms[room] for below in (each, *reachable(each, rooms))}
