"""`python -m parallel_state debug --live PID|JOB`: prints the state of each rank of a running job."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from device_communicators.base.errors import format_ranks
from device_communicators.base.host import parent_of
from device_communicators.control.client import ask
from device_communicators.control.plane import Endpoint, find_endpoints
from device_communicators.cpu import native
from device_communicators.liveness.condition import condition_of
from device_communicators.routing.states import SILENT, State

_ANSWER_S = 0.7
_STATES_S = 1.0
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_ID_JOB")
MOST_SHOWN = 256


class Wait(NamedTuple):
    ranks: list[int]
    call: str
    group: str
    missing: list[int]
    """Ranks that haven't entered the call."""

    def __str__(self) -> str:
        whom = f"for ranks {format_ranks(self.missing)}" if self.missing else "though all ranks are in it"
        return f"ranks {format_ranks(self.ranks)} wait in {self.call} of group {self.group!r} {whom}"


class Job(NamedTuple):
    world: list[int]
    states: dict[int, State]
    answers: dict[int, Any]
    """PID of a rank on this host -> its answer."""
    processes: dict[int, tuple[str, int]]
    """Rank -> (host, PID)."""
    others: list[int]
    """PIDs of ranks of the same job in other worlds."""


def show(target: str, *, stacks: bool = False, as_json: bool = False) -> int:
    """Prints the state of a job's ranks. Returns exit code 0, or 2 if no job is found.

    `target`: a job id, or the PID of a rank or launcher on this host. `stacks`: also prints the threads' stacks.
    """
    try:
        job = find(target)
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    if as_json:
        shown = {rank: state._asdict() for rank, state in sorted(job.states.items())}
        content = {"world": job.world, "ranks": shown, "answers": list(job.answers.values()), "others": job.others}
        print(json.dumps(content, indent=1))
        return 0
    print("\n".join(describe(job, stacks=stacks)))
    if job.others:
        print(
            f"{target!r} has {len(job.others)} more ranks in other worlds; ask them by PID: "
            f"{', '.join(map(str, job.others))}"
        )
    return 0


def find(target: str) -> Job:
    """Finds a job by its id, or by the PID of a rank or launcher on this host. Raises LookupError if none fits."""
    endpoints = find_endpoints()
    pids = sorted(endpoints)
    try:
        described = _describe_all(endpoints)
    except native.NativeUnavailableError as error:
        raise LookupError(f"can't ask any rank, because the compiled library is missing: {error}") from error
    answers = {pid: answer for pid, (answer, _) in described.items()}
    chosen = _pids_of(target, pids)
    job = {pid: each for pid, each in answers.items() if chosen & {pid, *each["pids"].values()}}
    if not job and (silent := sorted(chosen & set(pids))):
        raise LookupError(
            f"no rank of {target!r} answered within {_ANSWER_S:g} s; repeat the command. Its processes: "
            + "; ".join(f"pid {pid}: {condition_of(pid) or 'running'}" for pid in silent[:MOST_SHOWN])
        )
    if not job:
        names = f"; PIDs of ranks here: {', '.join(map(str, pids))}" if pids else ""
        raise LookupError(
            f"{target!r} isn't the PID of a rank or launcher on this host, nor the id of a job with ranks on this "
            f"host{names}"
        )
    first, answer = next(iter(job.items()))
    at_start = {pid for pid, each in answers.items() if each.get("start") and each["start"] == answer.get("start")}
    ranks = {first, *answer["pids"].values(), *at_start}  # ranks don't know each other's PIDs during start-up
    others = sorted(set(job) - ranks)
    job = {pid: each for pid, each in answers.items() if pid in ranks}
    processes = {int(rank): (host, pid) for rank, (host, pid) in answer["processes"].items()}
    processes |= {each["rank"]: (each["host"], pid) for pid, each in job.items()}
    return Job(*_states_of(job, described[first][1]), job, processes, others)


def _pids_of(target: str, listening: list[int]) -> set[int]:
    found = {int(target)} if target.isdigit() else set()
    for pid in listening:
        if target.isdigit() and int(target) in _ancestors(pid):
            found.add(pid)
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(f"{name}={target}".encode() in variables for name in _JOB_VARIABLES):
            found.add(pid)
    return found


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        pid = parent_of(pid)
    return found


def _ask(endpoints: list[Endpoint], topic: str, limit_s: float) -> dict[Endpoint, Any]:
    library = native.load_for_tools() if endpoints else None
    servers, answers = {}, {}
    for each in endpoints:
        with contextlib.suppress(OSError):  # no name server knows its host
            servers[each] = each.server()
    for endpoint, (code, reply) in ask(library, servers, -1, f"{topic}\0".encode(), limit_s).items():
        if code == errno.EPROTONOSUPPORT:
            print(f"the process at port {endpoint.port} can't be asked: {reply.decode()}", file=sys.stderr)
        with contextlib.suppress(ValueError):  # another version's
            if code == 0 and reply:
                answers[endpoint] = json.loads(reply)
    return answers


def _describe_all(endpoints: dict[int, list[Endpoint]]) -> dict[int, tuple[Any, Endpoint]]:
    pids = {each: pid for pid, worlds in sorted(endpoints.items()) for each in worlds}
    found: dict[int, tuple[Any, Endpoint]] = {}
    for endpoint, answer in _ask(list(pids), "describe", _ANSWER_S).items():
        pid = pids[endpoint]
        if pid not in found or answer["began_s"] > found[pid][0]["began_s"]:
            found[pid] = answer, endpoint
    return found


def _states_of(job: dict[int, Any], endpoint: Endpoint) -> tuple[list[int], dict[int, State]]:
    world = max((each["world"] for each in job.values()), key=len)
    pids = {int(rank): pid for each in job.values() for rank, pid in each["pids"].items()}
    pids |= {each["rank"]: pid for pid, each in job.items()}
    states: dict[int, State] = {}
    if set(world) - set(pids):
        told = _ask([endpoint], "elsewhere", _STATES_S).get(endpoint, {})
        states = {int(rank): State(*state) for rank, state in told.items() if int(rank) not in pids}
    for rank, pid in pids.items():
        obstacle = condition_of(pid)
        if pid in job:
            states[rank] = State(*job[pid]["state"])
        elif not os.path.exists(f"/proc/{pid}"):
            states[rank] = State(obstacle=f"not running (pid {pid} has exited)")
        else:
            states[rank] = State(obstacle=obstacle or SILENT)
    return world, states


def describe(job: Job, *, stacks: bool = False) -> list[str]:
    lines = [f"{len(job.world)} ranks, {len(job.answers)} of them answered on this host"]
    lines += map(str, waits(job))
    here = {each["rank"]: each for each in job.answers.values()}
    names = {name for name, _ in job.processes.values()}
    for rank in job.world[:MOST_SHOWN]:
        host, pid = job.processes.get(rank, ("", 0))
        process = f" ({host}, pid {pid})" if len(names) > 1 else f" (pid {pid})"
        lines.append(f"  rank {rank}{process * (pid > 0)} {state_in_words(job, rank)}")
        for thread in here[rank]["threads"] if stacks and rank in here else []:
            lines.append(f"    thread {thread['name']}{', waits for ' + thread['waits'] if thread['waits'] else ''}")
            lines += [f"      {path}:{line} in {function}" for path, line, function in thread["frames"]]
    return lines


def state_in_words(job: Job, rank: int) -> str:
    if (state := job.states.get(rank)) is not None:
        return f"is {state.in_words()}"
    is_starting = any(each.get("start") for each in job.answers.values())
    return "has not arrived, or is on another host" if is_starting else "is on another host and doesn't answer"


def waits(job: Job) -> list[Wait]:
    states = job.states
    calls: dict[tuple[str, str], list[int]] = {}
    for rank, state in sorted(states.items()):
        if state.key:
            calls.setdefault((state.key, state.call), []).append(rank)
    found = []
    for (_, call), waiting in calls.items():
        first = states[waiting[0]]
        peers = {states[rank].peer for rank in waiting} - {-1}
        missing = [rank for rank in sorted(peers) or first.ranks or job.world if rank not in waiting]
        found.append(Wait(waiting, call, first.group, missing))
    return found
