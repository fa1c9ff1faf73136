"""The rules: each looks at the evidence and yields findings. None asks the system or waits; the table is `RULES`.

A rule says what was found, of whom; severity, why it matters and what to do come from its row in `findings`. A rule of
the start runs before any group is made: one of its errors means that the traffic isn't tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from device_communicators.base.errors import LayoutError
from parallel_state.layout.resolution import resolve_layout
from parallel_state.tools.check import rules_machine, rules_network, rules_speed
from parallel_state.tools.check.evidence import Evidence, grouped, hostlist, ranks_of
from parallel_state.tools.check.facts import Facts
from parallel_state.tools.check.findings import INFO, Finding, finding, named

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
    wrong = [facts for facts in evidence.arrivals if facts.place.problem]
    for text, group in grouped(wrong, lambda facts: facts.place.problem).items():
        if any(facts.place.rank < evidence.world_size for facts in group):  # the others have a code of their own
            yield evidence.about("environment", text, group)


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
        yield evidence.about(code, text, group)


def host_not_in_job(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        place = ranks[0].place
        nodes = place.variables.get("SLURM_STEP_NODELIST") or place.variables.get("SLURM_JOB_NODELIST", "")
        here = {ranks[0].network.hostname.split(".")[0], place.variables.get("SLURMD_NODENAME", "")}
        if place.source == "slurm" and nodes and not here & set(hostlist(nodes)):
            yield evidence.about("host-not-in-job", f"{name} isn't in {nodes}", ranks)


def single_rank(evidence: Evidence) -> Iterator[Finding]:
    if len(evidence.arrivals) != 1 or evidence.world_size != 1:
        return
    env = evidence.arrivals[0].place.variables
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if env.get(name, "1").isdecimal() and int(env.get(name, "1")) > 1:
            yield finding("single-rank", f"{name} is {env[name]}, but this process is rank 0 of 1", [0])
            return


def world_size_differs(evidence: Evidence) -> Iterator[Finding]:
    # Of a rank whose environment can't be read the size isn't known, but where it is beyond the world.
    known = [each for each in evidence.arrivals if not each.place.problem or each.place.rank >= evidence.world_size]
    sizes = grouped(known, lambda facts: facts.place.world_size)
    if len(sizes) > 1:
        words = "; ".join(
            f"{size} on {named(ranks_of(group))} ({', '.join(dict.fromkeys(map(evidence.host, group)))})"
            for size, group in sizes.items()
        )
        _, fewest = min(sizes.items(), key=lambda item: len(item[1]))
        yield evidence.about("world-size-differs", f"the world size is {words}", fewest)


def ranks_of_the_world(evidence: Evidence) -> Iterator[Finding]:
    """Missing, twice, and beyond the world."""
    if not evidence.met:
        return
    hosts: dict[str, list[int]] = {}
    smallest = min((each.place.world_size for each in evidence.arrivals), default=0)
    for rank in (each for each in evidence.missing if each < smallest):
        hosts.setdefault(evidence.expected_host(rank), []).append(rank)
    for where, ranks in hosts.items():
        text = f"{named(ranks)} of {evidence.world_size} never came; should have been started on {where}"
        yield finding("rank-missing", text, ranks)
    for rank, each in sorted(grouped(evidence.arrivals, lambda facts: facts.place.rank).items()):
        places = " and ".join(f"{evidence.host(facts)} (pid {facts.pid})" for facts in each)
        if len(each) > 1:
            yield evidence.about("rank-twice", f"rank {rank} came {len(each)} times: {places}", each)
        if rank >= evidence.world_size:
            text = f"rank {rank} came from {places}, but the world has {evidence.world_size} ranks"
            yield evidence.about("rank-extra", text, each)


def local_ranks(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        for number, group in grouped(ranks, lambda facts: facts.place.local_rank).items():
            if len(ranks_of(group)) > 1:
                text = f"{named(ranks_of(group))} on {name} all have local rank {number}"
                yield evidence.about("local-rank-twice", text, group)
        sizes = {each.place.local_world_size for each in ranks if each.place.local_world_size is not None}
        count = len(ranks_of(ranks))
        if not evidence.missing and sizes and sizes != {count}:
            text = f"{name} has {count} ranks, but LOCAL_WORLD_SIZE there is {', '.join(map(str, sorted(sizes)))}"
            yield evidence.about("local-size-wrong", text, ranks)


def layout(evidence: Evidence) -> Iterator[Finding]:
    try:
        resolved = resolve_layout(evidence.world_size, evidence.sizes, *filter(None, (evidence.order,)))
    except LayoutError as error:
        yield finding("layout", str(error))
        return
    if evidence.missing or not evidence.several_hosts or "tp" not in resolved.names or resolved.size("tp") == 1:
        return
    facts = {each.place.rank: each for each in evidence.arrivals}
    groups = resolved.groups("tp")
    spanning = [ranks for ranks in groups if len({evidence.host(facts[rank]) for rank in ranks}) > 1]
    if spanning:
        most = max(len(ranks) for ranks in evidence.hosts.values())
        text = f"{len(spanning)} of {len(groups)} tp groups span hosts: {named(spanning[0])}"
        # A tp group that no host could hold was meant so.
        severity = "" if resolved.size("tp") <= most else INFO
        yield evidence.about("axis-across-hosts", text, map(facts.__getitem__, spanning[0]), severity=severity)


def lost(evidence: Evidence) -> Iterator[Finding]:
    for number, stage in evidence.lost.items():
        facts = evidence.of(number)
        text = f"rank {facts.place.rank} (pid {facts.pid}) gave no answer any more; its last news: {stage}"
        yield evidence.about("rank-lost", text, [facts])


def late_facts(evidence: Evidence) -> Iterator[Finding]:
    late = [facts for facts in evidence.arrivals if facts.late]
    for said, group in grouped(late, lambda facts: tuple(facts.late.items())).items():
        yield evidence.about("check-late", "; ".join(f"{name}: {why}" for name, why in said), group)


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
