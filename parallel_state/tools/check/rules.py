"""The rules: each looks at the evidence and yields findings. None asks the system or waits; the table is `RULES`.

A rule says what was found, of whom; severity, why it matters and what to do come from its row in `findings`. A rule of
the start runs before any group is made: one of its errors means that the traffic isn't tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from device_communicators.errors import LayoutError, format_ranks
from parallel_state.layout.resolution import resolve_layout
from parallel_state.tools.check import rules_machine, rules_network, rules_speed
from parallel_state.tools.check.evidence import Evidence, by_value
from parallel_state.tools.check.facts import Facts
from parallel_state.tools.check.findings import INFO, Finding, finding

Rule = Callable[[Evidence], Iterator[Finding]]

_FAMILIES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE"),
}
_LAUNCHERS = {
    "TORCHELASTIC_RUN_ID": ("torchrun", "torch.distributed.run", "torch.distributed.launch", "torchx", "accelerate"),
    "SLURM_STEP_ID": ("slurmstepd", "srun", "slurm"),
    "OMPI_COMM_WORLD_RANK": ("mpirun", "mpiexec", "orted", "prted", "prterun", "orterun", "srun", "slurmstepd"),
    "MPI_LOCALRANKID": ("mpirun", "mpiexec", "hydra", "srun", "slurmstepd"),
}
"""What must be among the processes above one that has the variable; a container's start hides them."""
_INITS = ("systemd", "init")


def environment(evidence: Evidence) -> Iterator[Finding]:
    for text, ranks in _texts({each.place.rank: each.place.problem for each in evidence.arrivals}):
        extra = [rank for rank in ranks if rank >= evidence.world_size]
        if len(extra) < len(ranks):  # the others have a code of their own
            yield finding("environment", text, ranks)


def launchers_contradict(evidence: Evidence) -> Iterator[Finding]:
    yield from _of_many(evidence, "launchers-contradict", _contradiction)


def _contradiction(facts: Facts) -> str:
    env = facts.place.variables
    present = {name: (env[rank], env[size]) for name, (rank, size) in _FAMILIES.items() if rank in env and size in env}
    # torchrun, once per node below srun, numbers its processes anew; so do MPIs whose proxies srun starts.
    if "TORCHELASTIC_RUN_ID" in env or "OMPI_COMM_WORLD_RANK" in env or "MPI_LOCALRANKID" in env:
        present.pop("SLURM", None)
    if ("TORCHELASTIC_RUN_ID" in env and facts.place.agent_store) or len(set(present.values())) < 2:
        return ""
    return "; ".join(f"{name} says rank {rank} of {size}" for name, (rank, size) in present.items())


def launcher_stale(evidence: Evidence) -> Iterator[Finding]:
    yield from _of_many(evidence, "launcher-stale", _stale)


def _stale(facts: Facts) -> str:
    above = facts.place.started_by
    if not above or above[-1] not in _INITS:  # the way up is cut off, as in a container: nothing can be said
        return ""
    for variable, names in _LAUNCHERS.items():
        if variable in facts.place.variables and not any(name in each for name in names for each in above):
            value = facts.place.variables[variable]
            return f"{variable}={value} is set, but above this process is {', '.join(above[:4])}"
    return ""


def _of_many(evidence: Evidence, code: str, read: Callable[[Facts], str]) -> Iterator[Finding]:
    """Yields one finding for all ranks of which `read` says something, in the words of the first."""
    group = [facts for facts in evidence.arrivals if read(facts)]
    if group:
        more = f" (and alike on {len(group) - 1} more)" if len(group) > 1 else ""
        text = f"rank {group[0].place.rank}: {read(group[0])}{more}"
        yield finding(code, text, [each.place.rank for each in group], map(evidence.host, group))


def host_not_in_job(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        place = ranks[0].place
        nodes = place.variables.get("SLURM_STEP_NODELIST") or place.variables.get("SLURM_JOB_NODELIST", "")
        here = {ranks[0].network.hostname.split(".")[0], place.variables.get("SLURMD_NODENAME", "")}
        if place.source == "slurm" and nodes and not here & set(rules_network.hostlist(nodes)):
            yield finding("host-not-in-job", f"{name} isn't in {nodes}", [each.place.rank for each in ranks], [name])


def single_rank(evidence: Evidence) -> Iterator[Finding]:
    if len(evidence.arrivals) != 1 or evidence.world_size != 1:
        return
    env = evidence.arrivals[0].place.variables
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if env.get(name, "1").isdecimal() and int(env.get(name, "1")) > 1:
            yield finding("single-rank", f"{name} is {env[name]}, but this process is rank 0 of 1", [0])
            return


def world_size_differs(evidence: Evidence) -> Iterator[Finding]:
    sizes: dict[str, list[Facts]] = {}
    for facts in evidence.arrivals:
        if not facts.place.problem or facts.place.rank >= evidence.world_size:  # else its size isn't known
            sizes.setdefault(str(facts.place.world_size), []).append(facts)
    if len(sizes) > 1:
        words = "; ".join(
            f"{size} on ranks {format_ranks(sorted({each.place.rank for each in group}))} "
            f"({', '.join(dict.fromkeys(map(evidence.host, group)))})"
            for size, group in sizes.items()
        )
        fewest = min(sizes.values(), key=len)
        yield finding("world-size-differs", f"the world size is {words}", [each.place.rank for each in fewest],
                      map(evidence.host, fewest))  # fmt: skip


def ranks_of_the_world(evidence: Evidence) -> Iterator[Finding]:
    """Missing, twice, and beyond the world."""
    if not evidence.met:
        return
    hosts: dict[str, list[int]] = {}
    smallest = min((each.place.world_size for each in evidence.arrivals), default=0)
    for rank in (each for each in evidence.missing if each < smallest):
        hosts.setdefault(evidence.expected_host(rank), []).append(rank)
    for where, ranks in hosts.items():
        text = f"{_ranks(ranks)} of {evidence.world_size} never came; should have been started on {where}"
        yield finding("rank-missing", text, ranks)
    by_rank: dict[int, list[Facts]] = {}
    for facts in evidence.arrivals:
        by_rank.setdefault(facts.place.rank, []).append(facts)
    for rank, each in sorted(by_rank.items()):
        places = " and ".join(f"{evidence.host(facts)} (pid {facts.pid})" for facts in each)
        if len(each) > 1:
            yield finding("rank-twice", f"rank {rank} came {len(each)} times: {places}", [rank],
                          map(evidence.host, each))  # fmt: skip
        if rank >= evidence.world_size:
            text = f"rank {rank} came from {places}, but the world has {evidence.world_size} ranks"
            yield finding("rank-extra", text, [rank], map(evidence.host, each))


def local_ranks(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        local: dict[int, set[int]] = {}
        for facts in ranks:
            local.setdefault(facts.place.local_rank, set()).add(facts.place.rank)
        for number, each in local.items():
            if len(each) > 1:
                text = f"{_ranks(each)} on {name} all have local rank {number}"
                yield finding("local-rank-twice", text, each, [name])
        sizes = {each.place.local_world_size for each in ranks if each.place.local_world_size is not None}
        count = len({each.place.rank for each in ranks})
        if not evidence.missing and sizes and sizes != {count}:
            text = f"{name} has {count} ranks, but LOCAL_WORLD_SIZE there is {', '.join(map(str, sorted(sizes)))}"
            yield finding("local-size-wrong", text, [each.place.rank for each in ranks], [name])


def layout(evidence: Evidence) -> Iterator[Finding]:
    try:
        resolved = resolve_layout(evidence.world_size, evidence.sizes, *filter(None, (evidence.order,)))
    except LayoutError as error:
        yield finding("layout", str(error))
        return
    if evidence.missing or not evidence.several_hosts or "tp" not in resolved.names or resolved.size("tp") == 1:
        return
    host = {facts.place.rank: evidence.host(facts) for facts in evidence.arrivals}
    groups = resolved.groups("tp")
    spanning = [ranks for ranks in groups if len({host.get(rank) for rank in ranks}) > 1]
    if spanning:
        most = max(len(ranks) for ranks in evidence.hosts.values())
        text = f"{len(spanning)} of {len(groups)} tp groups span hosts: ranks {format_ranks(spanning[0])}"
        # A tp group that no host could hold was meant so.
        severity = "" if resolved.size("tp") <= most else INFO
        yield finding("axis-across-hosts", text, spanning[0], {host[rank]: 0 for rank in spanning[0] if rank in host},
                      severity=severity)  # fmt: skip


def lost(evidence: Evidence) -> Iterator[Finding]:
    for number, stage in evidence.lost.items():
        facts = evidence.arrivals[number - 1]
        text = f"rank {facts.place.rank} (pid {facts.pid}) gave no answer any more; its last news: {stage}"
        yield finding("rank-lost", text, [facts.place.rank], [evidence.host(facts)])


def late_facts(evidence: Evidence) -> Iterator[Finding]:
    late = {
        (facts.place.rank, evidence.host(facts)): "; ".join(f"{name}: {why}" for name, why in facts.late.items())
        for facts in evidence.arrivals
        if facts.late
    }
    for text, who in by_value(late).items():
        yield finding("check-late", text, [rank for rank, _ in who], [name for _, name in who])


START: tuple[Rule, ...] = (
    environment,
    launchers_contradict,
    launcher_stale,
    host_not_in_job,
    single_rank,
    world_size_differs,
    ranks_of_the_world,
    local_ranks,
    layout,
    *rules_network.START,
    *rules_machine.RULES,
    late_facts,
)
"""Over what ranks know of themselves."""
MEASURED: tuple[Rule, ...] = (*rules_network.MEASURED, *rules_speed.MEASURED)
TRAFFIC: tuple[Rule, ...] = (*rules_speed.TRAFFIC, lost)
RULES = (*START, *MEASURED, *TRAFFIC)


def judge(evidence: Evidence, rules: Sequence[Rule] = RULES) -> list[Finding]:
    return [found for rule in rules for found in rule(evidence)]


def _ranks(ranks: Sequence[int] | set[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(sorted(ranks))}"


def _texts(texts: dict[int, str]) -> Iterator[tuple[str, list[int]]]:
    for text, ranks in by_value(texts).items():
        if text:
            yield text, ranks
