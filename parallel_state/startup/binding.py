"""Binds this process to CPU cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from device_communicators.base import cores, settings
from device_communicators.base.errors import SettingError, format_ranks
from parallel_state.startup import environment
from parallel_state.startup.interfaces import Address


def bind_to_cores(
    lists: Sequence[Sequence[int]] = (), *, local_rank: int = -1, local_world_size: int | None = None
) -> list[int]:
    """Binds all threads of this process to CPU cores, and returns the numbers of these cores.

    Call this on each rank before creating groups. `lists`: the core numbers of each local rank. Without `lists`, the
    ranks divide the cores that the process is allowed to use; all ranks of the host must be allowed the same cores.
    Each rank gets whole, adjacent physical cores of one NUMA node. `local_rank` and `local_world_size`: by default the
    launcher's. Raises InvalidArgumentError if there are fewer cores than ranks. Raises SettingError if the number of
    ranks on this host is unknown, or `lists` is too short.
    """
    if local_rank < 0:
        place = environment.detect(rendezvous=False)
        local_rank, local_world_size = place.local_rank, local_world_size or place.local_world_size
    found = _cores_of(lists, local_rank, local_world_size or environment.find_local_world_size())
    cores.bind(found)
    return found


def bind_as_set(local_rank: int, local_world_size: int | None) -> set[int] | None:
    found = cores_as_set(local_rank, local_world_size)
    if found is None:
        return None
    before = cores.usable_cores()
    cores.bind(found)
    return before


def cores_as_set(local_rank: int, local_world_size: int | None) -> list[int] | None:
    lists = settings.CORES.get()
    if lists is None:
        return None
    return _cores_of(lists, local_rank, local_world_size or environment.find_local_world_size())


def cores_to_share() -> str:
    return cores.spans(cores.usable_cores()) if settings.CORES.get() == () else ""


def different_cores(places: Mapping[int, Address]) -> list[str]:
    """Finds a host whose ranks may use different cores: [host, cores, ranks, other cores, their ranks]; [] if none."""
    hosts: dict[tuple[str, str], dict[str, list[str]]] = {}
    for rank, place in sorted(places.items()):
        if place.cores and place.network:
            hosts.setdefault((place.network, place.name), {}).setdefault(place.cores, []).append(str(rank))
    for (_, name), lists in hosts.items():
        if len(lists) > 1:
            return [name, *(word for found, ranks in list(lists.items())[:2] for word in (found, ",".join(ranks)))]
    return []


def describe_different_cores(name: str, *lists: str) -> str:
    sides = (
        f"ranks {format_ranks([int(rank) for rank in ranks.split(',')])} may use {found}"
        for found, ranks in zip(lists[::2], lists[1::2], strict=True)
    )
    return (
        f"with {settings.CORES.name}=share all ranks of a host must be allowed the same cores, but on host {name} "
        f"{' and '.join(sides)}; unset the variable if the launcher already binds ranks, or stop it from binding "
        "(srun --cpu-bind=none), or set a list of cores for each rank, as 0-3|4-7"
    )


def _cores_of(lists: Sequence[Sequence[int]], local_rank: int, local_world_size: int | None) -> list[int]:
    ranks = local_world_size or local_rank + 1
    if lists and len(lists) < max(ranks, local_rank + 1):
        raise SettingError(
            f"each rank of this host must have a list of cores, but the number of lists is {len(lists)} for {ranks} "
            f"ranks; give {settings.CORES.name} one list for each rank, separated by |"
        )
    if lists:
        return sorted(lists[local_rank])
    if local_world_size is None or local_rank >= local_world_size:
        raise SettingError(
            f"{settings.CORES.name}=share needs the number of ranks on this host, but the launcher set "
            f"LOCAL_WORLD_SIZE={local_world_size} for local rank {local_rank}; set LOCAL_WORLD_SIZE to that number, or "
            f"{settings.CORES.name} to a list of cores for each rank, such as 0-3|4-7"
        )
    return cores.shares(cores.read_cores(cores.usable_cores()), local_world_size)[local_rank]
