"""Reads this process's rank, the world size and rank 0's address from the environment variables of a launcher."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal
from urllib.parse import urlsplit

from device_communicators.base.errors import SettingError

Source = Literal["torchrun", "slurm", "open_mpi", "pmi", "single", "explicit"]

LOOPBACK = "127.0.0.1"

# Below ephemeral ports, above those of cluster services. Jobs whose ids differ by less than 10,000 never share a port.
DERIVED_PORTS = range(20_000, 30_000)
_STEP_STRIDE = 7_919  # a prime, so that steps of one job don't get the ports of the next jobs


@dataclass(frozen=True)
class ProcessEnvironment:
    """This process's rank, local rank, and numbers of ranks in the world and on the host; the address of rank 0 (None
    if not requested); and `source`, the launcher.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    master_addr: str | None
    master_port: int | None
    source: Source

    @property
    def master(self) -> tuple[str, int] | None:
        return (self.master_addr, self.master_port) if self.master_addr and self.master_port else None


@dataclass(frozen=True)
class _Family:
    source: Source
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()


_TORCHRUN = _Family("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
# For `srun -n 2` inside an allocation of 8, only the step's count is certain to be 2.
_SLURM = _Family(
    "slurm", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",)
)
_OPEN_MPI = _Family(
    "open_mpi", *((f"OMPI_COMM_WORLD_{name}",) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
_PMI = _Family(
    "pmi",
    ("PMI_RANK", "PMIX_RANK"),
    ("PMI_SIZE", "PMIX_SIZE"),
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "PMIX_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "PMIX_LOCAL_SIZE"),
)


def detect(environ: Mapping[str, str] | None = None, *, rendezvous: bool = True) -> ProcessEnvironment:
    """Reads the variables of the launcher that started this process. Without a launcher, returns rank 0 of 1.

    `environ`: by default os.environ. `rendezvous`: also determines the address of rank 0. Raises SettingError for
    incomplete or invalid variables. In a SLURM batch script that srun didn't start, SLURM's variables are ignored.
    """
    env = os.environ if environ is None else environ
    family = _started_by(env)
    place = _place(family, env) if family else ProcessEnvironment(0, 0, 1, 1, None, None, "single")
    return _with_address(place, env) if rendezvous else place


def explicit(
    rank: int,
    world_size: int,
    local_rank: int = -1,
    *,
    rendezvous: bool = True,
    environ: Mapping[str, str] | None = None,
) -> ProcessEnvironment:
    """Returns the environment of the given rank. If `local_rank` is -1, uses the launcher's variable, or else `rank`.

    `environ`, `rendezvous`: as in `detect`.
    """
    env = os.environ if environ is None else environ
    if local_rank < 0:
        family = _started_by(env)
        name = _first(env, family.local_rank) if family else None
        local_rank = _int(env, name) if name else rank
    place = ProcessEnvironment(rank, local_rank, world_size, 1 if world_size == 1 else None, None, None, "explicit")
    return _with_address(place, env) if rendezvous else place


def find_local_world_size(environ: Mapping[str, str] | None = None) -> int | None:
    env = os.environ if environ is None else environ
    family = _started_by(env)
    return None if family is None else _place(family, env).local_world_size


def is_rank_zero(environ: Mapping[str, str] | None = None) -> bool:
    """Returns True if a launcher started this process as global rank 0, or no launcher did. Works before
    initialization. Raises SettingError for invalid variables.
    """
    return detect(environ, rendezvous=False).rank == 0


def export(environment: ProcessEnvironment, environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Sets the variables that torch's `env://` reads, except those that are set already. Returns the new ones."""
    env = os.environ if environ is None else environ
    values = {
        "RANK": environment.rank,
        "LOCAL_RANK": environment.local_rank,
        "WORLD_SIZE": environment.world_size,
        "LOCAL_WORLD_SIZE": environment.local_world_size,
        "MASTER_ADDR": environment.master_addr,
        "MASTER_PORT": environment.master_port,
    }
    new = {name: str(value) for name, value in values.items() if value is not None and not _get(env, name)}
    env.update(new)
    return new


def with_address_of(init_method: str, environment: ProcessEnvironment) -> ProcessEnvironment:
    if not init_method.startswith("tcp://"):
        return environment
    with contextlib.suppress(ValueError):  # `find_store` raises it
        parts = urlsplit(init_method)
        return replace(environment, master_addr=parts.hostname, master_port=parts.port)
    return environment


def store_server(init_method: str, place: ProcessEnvironment) -> tuple[str, int] | None:
    if place.world_size == 1:
        return None
    if init_method.startswith("tcp://"):
        parts = urlsplit(init_method)
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    return None if init_method != "env://" or launcher_serves_store(place.master) else place.master


def launcher_serves_store(address: tuple[str, int] | None) -> bool:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return True
    client = sys.modules.get("parallel_state.startup.stores")  # workers of `launch` import it
    return client is not None and address is not None and client.JOB_STORE.try_get(*address) is not None


def expand_hostlist(text: str) -> Iterator[str]:
    """Yields the host names in a SLURM list such as `a1,node[01-03,07],r[1-2]-n[3,5]`."""
    if not _HOSTLIST.fullmatch(text):
        raise SettingError(
            f"a SLURM host list must look like `a1,node[01-03,07]`, but is {text!r}; set MASTER_ADDR to rank 0's host"
        )
    return (host for item in _ITEM.findall(text) for host in _expand(item))


_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = rf"(?:[\w.-]|{_RANGES})+"
_ITEM = re.compile(_HOST, re.ASCII)
_HOSTLIST = re.compile(rf"{_HOST}(?:,{_HOST})*", re.ASCII)


def expand_counts(text: str) -> Iterator[int]:
    return (int(count) for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(repeat or 1)))


def _expand(item: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield head
        return
    ranges, _, tail = rest.partition("]")
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        for number in range(int(low), int(high or low) + 1):
            for end in _expand(tail):
                yield f"{head}{number:0{len(low)}}{end}"


def _started_by(env: Mapping[str, str]) -> _Family | None:
    if any(_get(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _TORCHRUN
    if _first(env, _OPEN_MPI.rank + _OPEN_MPI.world_size):
        return _OPEN_MPI
    # MPICH's and Intel MPI's `mpirun` starts one proxy per host with srun, whose SLURM_PROCID the ranks inherit. `srun
    # --mpi=pmi2` sets no MPI_LOCALRANKID.
    if _get(env, "MPI_LOCALRANKID"):
        return _PMI
    if _first(env, ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")):
        return _SLURM
    if _first(env, _PMI.rank + _PMI.world_size):
        return _PMI
    if _get(env, "SLURM_PROCID") not in ("", "0"):
        raise SettingError(
            f"SLURM_PROCID is {env['SLURM_PROCID']!r}, but SLURM_STEP_ID is not set, so srun did not start this "
            "process; start it with srun, or set RANK, LOCAL_RANK and WORLD_SIZE"
        )
    return None


def _place(family: _Family, env: Mapping[str, str]) -> ProcessEnvironment:
    rank = _required(family, family.rank, env)
    world_size = _required(family, family.world_size, env, at_least=1)
    if family is _SLURM:
        local_world_size = _slurm_local_world_size(env)
    else:
        name = _first(env, family.local_world_size)
        local_world_size = _int(env, name, at_least=1) if name else None
    if 1 in (world_size, local_world_size) and not _first(env, family.local_rank):
        local_rank = 0
    else:
        local_rank = _required(family, family.local_rank, env)
    place = ProcessEnvironment(rank, local_rank, world_size, local_world_size, None, None, family.source)
    _check(place, family)
    return place


def _check(place: ProcessEnvironment, family: _Family) -> None:
    local_world_size = place.world_size if place.local_world_size is None else place.local_world_size
    for what, value, names, limit in (
        ("rank", place.rank, family.rank, place.world_size),
        ("local rank", place.local_rank, family.local_rank, local_world_size),
        ("local world size", local_world_size - 1, family.local_world_size, place.world_size),
    ):
        if value >= limit:
            raise SettingError(
                f"the {what} ({' or '.join(names) or 'SLURM_STEP_TASKS_PER_NODE'}) does not fit the other values: rank "
                f"{place.rank} of {place.world_size}, local rank {place.local_rank} of {local_world_size}; "
                f"a rank must be less than its world size, and a host can't hold more ranks than the world"
            )


def _slurm_local_world_size(env: Mapping[str, str]) -> int | None:
    text, node = _get(env, "SLURM_STEP_TASKS_PER_NODE"), _get(env, "SLURM_NODEID")
    if not text or not node:
        return None
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise SettingError(f"SLURM_STEP_TASKS_PER_NODE must look like `4(x2),3`, but is {text!r}; unset the variable")
    count = next(islice(expand_counts(text), _int(env, "SLURM_NODEID"), None), None)
    if count is None:
        raise SettingError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE={text!r} lists fewer nodes; unset both variables, "
            "or start the program by srun"
        )
    return count


def _with_address(place: ProcessEnvironment, env: Mapping[str, str]) -> ProcessEnvironment:
    return replace(place, master_addr=_master_addr(place, env), master_port=_master_port(place, env))


def _master_addr(place: ProcessEnvironment, env: Mapping[str, str]) -> str:
    given = _get(env, "MASTER_ADDR")
    if given:
        return given
    by_mpi = place.source in ("open_mpi", "pmi")
    one_host = place.world_size in (1, place.local_world_size)
    if place.world_size == 1 or (by_mpi and one_host):
        return LOOPBACK
    # MPI proxies run in a step that may omit mpirun's host; only the job's list is the same on all hosts.
    if place.source == "slurm" and not one_host and _get(env, "SLURM_DISTRIBUTION") == "arbitrary":
        _no_address(place, "with srun's --distribution=arbitrary rank 0 may be on any of the nodes")
    nodelist = _first(env, ("SLURM_JOB_NODELIST",) if by_mpi else ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    if nodelist:
        return next(expand_hostlist(_get(env, nodelist)), "") or _no_address(place, f"{nodelist} names no host")
    return LOOPBACK if one_host else _no_address(place, "no variable names the host of rank 0")


def _no_address(place: ProcessEnvironment, why: str) -> str:
    raise SettingError(
        f"MASTER_ADDR is not set, and {why} (world size {place.world_size}, "
        f"{place.local_world_size or 'an unknown number'} on this host); set MASTER_ADDR to rank 0's host on all ranks"
    )


def _master_port(place: ProcessEnvironment, env: Mapping[str, str]) -> int | None:
    if _get(env, "MASTER_PORT"):
        port = _int(env, "MASTER_PORT", at_least=1)
        if port > 65_535:
            raise SettingError(f"MASTER_PORT must be a port from 1 to 65535, but is {port}")
        return port
    if place.source != "single" and _get(env, "SLURM_JOB_ID"):
        offset = _int(env, "SLURM_JOB_ID")
        step = _first(env, ("SLURM_STEP_ID", "SLURM_STEPID"))
        if place.source == "slurm" and step:  # under mpirun only some ranks have a step, that of the proxies
            offset += _STEP_STRIDE * _int(env, step)
        return DERIVED_PORTS[offset % len(DERIVED_PORTS)]
    if place.world_size == 1:
        return None
    raise SettingError(
        f"MASTER_PORT is not set, and there is no SLURM_JOB_ID to derive it from (world size {place.world_size}); "
        "set MASTER_PORT to the same free port on all ranks, for example `mpirun -x MASTER_PORT=29500`"
    )


def _get(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip()  # empty counts as unset


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if _get(env, name)), None)


def _required(family: _Family, names: tuple[str, ...], env: Mapping[str, str], at_least: int = 0) -> int:
    name = _first(env, names)
    if name is not None:
        return _int(env, name, at_least)
    every = family.rank + family.world_size + family.local_rank
    present = [other for other in every if _get(env, other)]
    others = " and ".join(f"{other}={_get(env, other)}" for other in present) or "SLURM_STEP_ID"
    fix = "RANK, LOCAL_RANK and WORLD_SIZE" if family is not _TORCHRUN else names[0]
    raise SettingError(
        f"{others} is set, but {' or '.join(names)} is not: set {fix}, or unset {', '.join(present) or 'it'} "
        "to start without the launcher that set it"
    )


def _int(env: Mapping[str, str], name: str, at_least: int = 0) -> int:
    text = _get(env, name)
    # int() also accepts "1_0" and Arabic digits
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or int(text) < at_least:
        raise SettingError(f"{name} must be an integer of at least {at_least}, but is {text!r}")
    return int(text)
