"""Finds the ranks to which a rule of `check` applies."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from device_communicators.base.cores import spans
from device_communicators.base.errors import LayoutError, format_ranks
from device_communicators.base.host import is_loopback
from parallel_state.tools.check import matches
from parallel_state.tools.check.evidence import (
    Evidence,
    by_value,
    core_times,
    grouped,
    groups_of_kind,
    hostlist,
    interface_of,
    networks_of,
    outliers,
    ranks_of,
)
from parallel_state.tools.check.facts import INFO, WARNING, Facts, Interface, Limits, Place, named, rate
from parallel_state.tools.check.matches import Group, Match, Predicate, Words, differing

_FAMILIES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE"),
}
_SIZES = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def contradictions(evidence: Evidence) -> Iterator[Match]:
    group = [facts for facts in evidence.arrivals if _contradiction(facts)]
    if group:
        more = f" (likewise on {len(group) - 1} more)" if len(group) > 1 else ""
        yield Match(group, description=_contradiction(group[0]), more=more)


def _contradiction(facts: Facts) -> str:
    env = facts.place.variables
    present = {name: (env[rank], env[size]) for name, (rank, size) in _FAMILIES.items() if rank in env and size in env}
    # torchrun below srun renumbers its processes; so do MPIs whose proxies srun starts.
    if "TORCHELASTIC_RUN_ID" in env or "OMPI_COMM_WORLD_RANK" in env or "MPI_LOCALRANKID" in env:
        present.pop("SLURM", None)
    if ("TORCHELASTIC_RUN_ID" in env and facts.place.agent_store) or len(set(present.values())) < 2:
        return ""
    return "; ".join(f"{name} says rank {rank} of {size}" for name, (rank, size) in present.items())


def outside_the_job(evidence: Evidence, ranks: Group) -> Words | None:
    place, network = ranks[0].place, ranks[0].network
    nodes = place.variables.get("SLURM_STEP_NODELIST") or place.variables.get("SLURM_JOB_NODELIST", "")
    names = {network.hostname.split(".")[0], place.variables.get("SLURMD_NODENAME", "")}
    return {"nodes": nodes} if place.source == "slurm" and nodes and not names & set(hostlist(nodes)) else None


def one_of_many(evidence: Evidence) -> Iterator[Match]:
    if len(evidence.arrivals) == evidence.world_size == 1:
        env = evidence.arrivals[0].place.variables
        sizes = [(name, env[name]) for name in _SIZES if env.get(name, "").isdecimal() and int(env[name]) > 1]
        yield from (Match(name=name, size=size, ranks=[0]) for name, size in sizes[:1])


def world_sizes(evidence: Evidence) -> Iterator[Match]:
    # A rank with a wrong environment may have no world size.
    known = [each for each in evidence.arrivals if not each.place.problem or each.place.rank >= evidence.world_size]
    sizes = grouped(known, lambda facts: facts.place.world_size)
    if len(sizes) > 1:
        words = "; ".join(
            f"{size} on {named(ranks_of(group))} ({', '.join(dict.fromkeys(map(evidence.host, group)))})"
            for size, group in sizes.items()
        )
        yield Match(min(sizes.values(), key=len), sizes=words)


def missing(evidence: Evidence) -> Iterator[Match]:
    smallest = min((each.place.world_size for each in evidence.arrivals), default=0)
    absent = [rank for rank in evidence.missing if rank < smallest] if evidence.met else []
    for where, ranks in grouped(absent, evidence.expected_host).items():
        yield Match(absent=ranks, where=where, ranks=ranks)


def wrong_local_size(evidence: Evidence, ranks: Group) -> Words | None:
    sizes = {each.place.local_world_size for each in ranks if each.place.local_world_size is not None}
    count = len(ranks_of(ranks))
    if evidence.missing or not sizes or sizes == {count}:
        return None
    return {"number": count, "sizes": ", ".join(map(str, sorted(sizes)))}


def across_hosts(evidence: Evidence) -> Iterator[Match]:
    layout = evidence.layout
    if evidence.missing or not evidence.several_hosts or isinstance(layout, LayoutError) or "tp" not in layout.names:
        return
    facts = {each.place.rank: each for each in evidence.arrivals}
    groups = [[facts[rank] for rank in ranks] for ranks in layout.groups("tp")]
    spanning = [group for group in groups if len(set(map(evidence.host, group))) > 1]
    if spanning:
        most = max(len(ranks) for ranks in evidence.hosts.values())
        # A tp group larger than any host is intended.
        severity = "" if layout.size("tp") <= most else INFO
        yield Match(spanning[0], spanning=len(spanning), groups=len(groups), severity=severity)


def masters_differ(evidence: Evidence) -> Iterator[Match]:
    places = evidence.meeting_places
    if len(places) > 1:
        yield Match(places=places, ranks=list(places.values())[1])


def _master(evidence: Evidence) -> str:
    place = next((each.place for each in evidence.arrivals if each.place.world_size > 1), Place())
    one = evidence.spans_hosts and len(evidence.meeting_places) == 1 and not place.agent_store
    return place.master_addr if one else ""


def master_is_loopback(evidence: Evidence) -> Iterator[Match]:
    master = _master(evidence)
    if is_loopback(master):
        names = ", ".join(evidence.hosts) + ("" if evidence.several_hosts else " and others")
        yield Match(master=master, names=names, hosts=evidence.hosts)


def master_resolves_differently(evidence: Evidence) -> Iterator[Match]:
    master = _master(evidence)
    resolved = {each.place.rank: " ".join(each.network.master_resolves_to) for each in evidence.arrivals}
    answers = by_value({rank: found for rank, found in resolved.items() if found})
    if master and not is_loopback(master) and len(answers) > 1:
        yield Match(master=master, answers=answers)


def unresolved_master(evidence: Evidence) -> Iterator[Match]:
    for name, ranks in evidence.hosts.items():
        why = ranks[0].late.get("master", "") if evidence.met else ""
        if why:
            yield Match(ranks, problem=f"{ranks[0].place.master_addr} on {name}: {why}")
    address = evidence.arrivals[0].place.master_addr
    try:  # connecting to a link-local address needs its interface
        local = ":" in address and "%" not in address and ipaddress.ip_address(address).is_link_local
    except ValueError:
        return
    if local:
        text = f"MASTER_ADDR is {address}, a link-local address without its interface"
        yield Match(problem=text, fix=f"Set it to {address}%INTERFACE, or to a global address.")


def _given(facts: Facts) -> str:
    return facts.place.variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()


def announces_loopback(evidence: Evidence, ranks: Group) -> Words | None:
    network = ranks[0].network
    if not evidence.spans_hosts or not network.gloo_address or not is_loopback(network.gloo_address):
        return None
    return {"own": ", ".join(network.name_resolves_to) or "nothing"}


def announces_nothing(evidence: Evidence, ranks: Group) -> bool:
    network = ranks[0].network
    none = not network.gloo_address and network.gloo_interface != "?"
    return evidence.spans_hosts and none and not _given(ranks[0])


def shared_addresses(evidence: Evidence) -> Iterator[Match]:
    networks = {name: ranks[0].network for name, ranks in evidence.hosts.items()}
    usable = [name for name, each in networks.items() if each.gloo_address and not is_loopback(each.gloo_address)]
    for address, names in grouped(usable, lambda name: networks[name].gloo_address).items():
        if len(names) > 1 and evidence.spans_hosts:
            chosen = ", ".join(f"{networks[name].gloo_interface} on {name}" for name in names)
            yield Match(evidence.facts_on(names), address=address, chosen=chosen)


def missing_interfaces(evidence: Evidence) -> Iterator[Match]:
    for ranks in evidence.hosts.values():
        facts = ranks[0]
        given = _given(facts)
        chosen = interface_of(facts, given)
        if given and (chosen is None or not chosen.addresses or not (chosen.up or chosen.kind == "loopback")):
            state = "doesn't exist" if chosen is None else "has no address" if chosen.up else "is down"
            yield Match(ranks, setting=f"GLOO_SOCKET_IFNAME={given}", problem=f", but that interface {state}")
        nccl = facts.place.variables.get("NCCL_SOCKET_IFNAME", "").strip()
        if nccl and not facts.network.nccl_interface:
            yield Match(ranks, setting=f"NCCL_SOCKET_IFNAME={nccl}", problem=" matches no interface that is up")


def bridges(evidence: Evidence) -> Iterator[Match]:
    reached = [evidence.facts_of(link.target) for link in evidence.links if not link.problem]
    for ranks in evidence.hosts.values():
        facts = ranks[0]
        if not evidence.spans_hosts or any(facts is other for other in reached):
            continue
        taken = {"gloo": facts.network.gloo_interface}
        if facts.gpus.visible:
            taken["NCCL"] = facts.network.nccl_interface
        for library, name in taken.items():
            each = interface_of(facts, name)
            if each is not None and each.kind in ("bridge", "container"):
                yield Match(ranks, library=library, taken=each)


def _chosen(evidence: Evidence) -> dict[str, Interface]:
    if not evidence.several_hosts:
        return {}
    found = {name: interface_of(each[0], each[0].network.gloo_interface) for name, each in evidence.hosts.items()}
    return {name: each for name, each in found.items() if each is not None}


def different_networks(evidence: Evidence) -> Iterator[Match]:
    chosen = {name: each for name, each in _chosen(evidence).items() if each.kind != "loopback"}
    nets = {name: networks_of(each) for name, each in chosen.items()}
    if len(nets) < 2 or set.intersection(*nets.values()):
        return
    common = set.intersection(*(
        set().union(*(networks_of(each) for each in ranks[0].network.interfaces if each.kind != "loopback"))
        for ranks in evidence.hosts.values()
    ))  # fmt: skip
    words = "; ".join(
        f"{', '.join(sorted(each)) or 'none'} ({chosen[name].name}) on {name}" for name, each in nets.items()
    )
    hint = f"; all hosts have an interface in {', '.join(sorted(common))}" if common else ""
    usual = by_value({name: " ".join(sorted(each)) for name, each in nets.items()})
    odd = list(usual.values())[-1] if len(usual) < len(nets) else list(nets)
    # Without a common network this is usually one routed network per rack.
    yield Match(evidence.facts_on(odd), networks=words + hint, severity="" if common else INFO)


def different_mtus(evidence: Evidence) -> Iterator[Match]:
    chosen = {name: str(each.mtu) for name, each in _chosen(evidence).items() if each.mtu and each.kind != "loopback"}
    mtus = by_value(chosen)
    if len(mtus) > 1:
        yield Match(evidence.facts_on(list(mtus.values())[-1]), mtus=mtus)


def slower_interfaces(evidence: Evidence) -> Iterator[Match]:
    for name, each in _chosen(evidence).items():
        ranks = evidence.hosts[name]
        usable = [other for other in ranks[0].network.interfaces if other.up and other.addresses]
        best = max(usable, key=lambda other: other.speed_mbit, default=each)
        if each.speed_mbit and best.speed_mbit > 2 * each.speed_mbit:
            yield Match(ranks, taken=each, taken_gbit=each.speed_mbit / 1000, best=best, gbit=best.speed_mbit / 1000)


def ports_down(evidence: Evidence, ranks: Group) -> Words | None:
    ports = ranks[0].network.infiniband
    down = [port for port, state in ports.items() if not state.startswith("ACTIVE")]
    return {"down": ", ".join(f"{port} is {ports[port]}" for port in down)} if 0 < len(down) < len(ports) else None


_CLOCK_S = 1.0
_SLOW = 4.0
_LATENCY = 5.0
_LATENCY_US = 300.0
"""Smaller differences between latencies aren't reported, because load on the hosts causes them."""
_NOMINAL = 0.1
_GIGABIT = 0.9e9 / 8
_LOSS = 0.012
"""Smaller shares of lost packets aren't reported: a queue that overflows for a moment loses less."""
_FEW_SEGMENTS = 200


def _about(evidence: Evidence, source: int, target: int, **words: Any) -> Match:
    way = f"the link from {evidence.host_of(source)} to {evidence.host_of(target)}"
    return Match([evidence.facts_of(source), evidence.facts_of(target)], **{"way": way, **words})


def failed_links(evidence: Evidence, kind: str) -> Iterator[Match]:
    """Finds links between hosts whose problem is of `kind`: `stranger` (another machine answers), `broken` (the
    connection was lost) or `blocked` (all other problems).
    """
    working, failed = set(), {}
    for link in evidence.links:
        pair = evidence.host_of(link.source), evidence.host_of(link.target)
        if link.problem:
            failed[pair] = link
        else:
            working.add(pair)
    for (source, target), link in failed.items():
        back = (target, source)
        if (link.kind if link.kind in ("stranger", "broken") else "blocked") != kind:
            continue
        if back in failed and failed[back].kind == link.kind and source > target and kind == "blocked":
            continue  # both directions are one finding
        state = "works" if back in working else "fails, too" if back in failed else ""
        works = f" (the other direction {state})" if state else ""
        ends = [evidence.facts_of(number).network for number in (link.source, link.target)]
        words = " and ".join(f"{end.gloo_interface} {end.gloo_address} on {end.hostname}" for end in ends)
        way = f"from {source} to {target}{works}"
        yield _about(evidence, link.source, link.target, way=way, problem=link.problem, ends=words)


def _speeds(evidence: Evidence) -> dict[tuple[int, int], float]:
    good = [link for link in evidence.links if not link.problem and link.bytes_per_s]
    return {(link.source, link.target): link.bytes_per_s for link in good}


def _expected_speeds(evidence: Evidence) -> dict[tuple[int, int], str]:
    speeds = _speeds(evidence)
    odd = outliers(speeds, _SLOW, high=False)
    found = {pair: f"the median of all links is {rate(middle)}" for pair, _, middle in odd}
    for pair, speed in speeds.items():
        facts = evidence.facts_of(pair[0])
        chosen = interface_of(facts, facts.network.gloo_interface)
        nominal = (chosen.speed_mbit if chosen else 0) * 1e6 / 8
        if pair not in found and nominal and speed < _NOMINAL * nominal:
            found[pair] = f"but its interface {facts.network.gloo_interface} should carry {rate(nominal)}"
    return found


def slow_links(evidence: Evidence) -> Iterator[Match]:
    speeds = _speeds(evidence)
    for pair, expected in _expected_speeds(evidence).items():
        yield _about(evidence, *pair, speed=speeds[pair], expected=expected)


def slow_network(evidence: Evidence) -> Iterator[Match]:
    reported = _expected_speeds(evidence)
    speeds = {pair: speed for pair, speed in _speeds(evidence).items() if pair not in reported}
    if speeds and max(speeds.values()) < _GIGABIT:
        pair = min(speeds, key=lambda each: speeds[each])
        yield _about(evidence, *pair, number=len(speeds), best=max(speeds.values()), worst=speeds[pair])


def late_links(evidence: Evidence) -> Iterator[Match]:
    trips = {(link.source, link.target): link.rtt_us for link in evidence.links if not link.problem}
    for pair, rtt_us, middle_us in outliers(trips, _LATENCY):
        if rtt_us - middle_us > _LATENCY_US:
            yield _about(evidence, *pair, rtt_us=rtt_us, middle_us=middle_us)


def lossy_links(evidence: Evidence) -> Iterator[Match]:
    for link in evidence.links:
        share = link.retransmitted / link.segments if link.segments else 0.0
        if not link.problem and link.segments >= _FEW_SEGMENTS and share > _LOSS:
            yield _about(evidence, link.source, link.target, link=link, share=share)


def clocks(evidence: Evidence) -> Iterator[Match]:
    offsets: dict[str, list[tuple[float, str]]] = {}
    for link in evidence.links:
        if not link.problem and abs(link.clock_offset_s) > _CLOCK_S + link.clock_error_s:
            source, target = evidence.host_of(link.source), evidence.host_of(link.target)
            offsets.setdefault(target, []).append((link.clock_offset_s, source))
            offsets.setdefault(source, []).append((-link.clock_offset_s, target))
    while offsets:  # the host that differs from most others has the wrong clock
        host = max(offsets, key=lambda name: len(offsets[name]))
        offset, other = offsets.pop(host)[0]
        offsets = {name: left for name, each in offsets.items() if (left := [one for one in each if one[1] != host])}
        yield Match(evidence.hosts[host], clock=host, offset=_offset(offset), other=other)


def _offset(offset_s: float) -> str:
    seconds = abs(offset_s)
    minutes = f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    return f"{f'{seconds:.1f} s' if seconds < 120 else minutes} {'ahead of' if offset_s > 0 else 'behind'}"


_OF_EACH_RANK = re.compile(
    r"(NCCL|GLOO)_SOCKET_IFNAME|NCCL_IB_HCA|NCCL_(DEBUG_FILE|TOPO_FILE|TOPO_DUMP_FILE|GRAPH_FILE|HOSTID|NODE_RANK)"
)
"""Environment variables that are allowed to differ between ranks or hosts."""
_COMPARED = re.compile(r"(NCCL|GLOO|TORCH_NCCL|PARALLEL_STATE)_\w+|OMP_NUM_THREADS")
_CRIPPLING = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0",
    "CUDA_LAUNCH_BLOCKING": "1", "NCCL_NET_GDR_LEVEL": "LOC",
}  # fmt: skip


def compiled_parts(evidence: Evidence, none: bool) -> Iterable[Match]:
    looked = [facts for facts in evidence.arrivals if "compiled" not in facts.late]
    if any(facts.versions.compiled for facts in looked) or not looked:
        return [] if none else differing(_compiled)(evidence)
    return [Match(looked)] if none else []


def _compiled(facts: Facts) -> str:
    if "compiled" in facts.late:
        return ""
    return facts.versions.compiled or f"missing ({facts.versions.compiled_problem})"


def settings_differ(evidence: Evidence) -> Iterator[Match]:
    every = {name for facts in evidence.arrivals for name in facts.place.variables}
    for name in sorted(each for each in every if _COMPARED.fullmatch(each) and not _OF_EACH_RANK.fullmatch(each)):
        yield from differing(partial(_variable, name), name)(evidence)


def _variable(name: str, facts: Facts) -> str:
    return facts.place.variables.get(name) or "unset"


def crippled(facts: Facts) -> list[str]:
    return [f"{name}={value}" for name, value in _CRIPPLING.items() if facts.place.variables.get(name) == value]


_SHM_BYTES = 512 << 20
_SHM_FREE_BYTES = 128 << 20
_MEMLOCK_BYTES = 1 << 30
_MEMLOCK_LEAST_BYTES = 64 << 10
"""Limit below which a host without RDMA is reported: the default of Linux before 5.16."""
_FILES = 1024


def shm(state: str) -> Predicate:
    return matches.groups(
        lambda facts: (facts.limits.shm_problem, facts.limits.shm_device),
        lambda _, group: _shm_state(group[0].limits) == state,
    )


def _shm_state(limits: Limits) -> str:
    if limits.shm_problem and not (limits.shm_bytes >= 0 and "No space" in limits.shm_problem):
        return "missing"
    if 0 <= limits.shm_bytes < _SHM_BYTES:
        return "small"
    return "full" if 0 <= limits.shm_free_bytes < _SHM_FREE_BYTES else ""


def several_shm(evidence: Evidence, ranks: Group) -> Words | None:
    devices = grouped(ranks, lambda facts: facts.limits.shm_device)
    parts = "; ".join(named(ranks_of(group)) for group in devices.values())
    return {"number": len(devices), "parts": parts} if len(devices) > 1 else None


def few_files(evidence: Evidence, group: Group) -> Words | None:
    limit, needed = group[0].limits.files_hard, group[0].limits.files_open + 64 + 8 * (evidence.world_size + 16)
    # Below 1024, the usual limit, the program's own files may exceed it.
    words = {"needed": max(needed, _FILES), "severity": "" if limit < needed else WARNING}
    return words if 0 <= limit < max(needed, _FILES) else None


def little_memlock(evidence: Evidence, group: Group) -> Words | None:
    rdma = bool(group[0].network.infiniband)
    words = {"rdma": "", "severity": ""} if rdma else {"rdma": "; the host has no RDMA device", "severity": INFO}
    return words if 0 <= group[0].limits.memlock_bytes < (_MEMLOCK_BYTES if rdma else _MEMLOCK_LEAST_BYTES) else None


_SLOW_CPU = 2.0


def is_bound(facts: Facts) -> bool:
    return 0 < len(facts.cpu.affinity) < facts.cpu.online


def _crowded(ranks: Group) -> Match | None:
    for allowed in sorted({tuple(each.cpu.affinity) for each in ranks if each.cpu.affinity}, key=len):
        inside = [each for each in ranks if each.cpu.affinity and set(each.cpu.affinity) <= set(allowed)]
        if len(inside) > len(allowed):
            return Match(inside, cores=allowed)
    return None


def crowded(evidence: Evidence, bound: bool) -> Iterator[Match]:
    for ranks in evidence.hosts.values():
        match = _crowded(ranks)
        if match is not None and any(map(is_bound, match.group)) == bound:
            yield match


def same_physical_core(evidence: Evidence) -> Iterator[Match]:
    for ranks in evidence.hosts.values():
        alone = [each for each in ranks if is_bound(each) and len(each.cpu.affinity) == 1]
        single = {each.cpu.affinity[0]: each for each in alone if _crowded(ranks) is None}
        siblings = {core: tuple(single[core].cpu.siblings.get(str(core), [core])) for core in sorted(single)}
        for cores in grouped(siblings, siblings.__getitem__).values():
            if len(cores) > 1:
                yield Match([single[core] for core in cores], cores=spans(cores))


def many_threads(evidence: Evidence, ranks: Group) -> Words | None:
    total = sum(each.cpu.threads for each in ranks)
    usable = len(set().union(*(each.cpu.affinity for each in ranks)))
    many = len(ranks) > 1 and usable and total > 2 * usable and total > len(ranks)
    return {"total": total, "usable": usable} if many else None


def any_numa_node(evidence: Evidence, ranks: Group) -> Words | None:
    numbers = [sum(bool(set(node) & set(each.cpu.affinity)) for node in each.cpu.numa_nodes.values()) for each in ranks]
    return {"nodes": numbers[0]} if len(ranks) > 1 and min(numbers) > 1 else None


def slow_cores(evidence: Evidence) -> Iterator[Match]:
    """Finds ranks whose core is slow. Compares each rank's shortest time of a loop, which load hardly changes."""
    runs = {number: core_times(evidence, number) for number in range(1, len(evidence.arrivals) + 1)}
    best = {number: min(each) for number, each in runs.items() if each}
    for number, took_ms, middle_ms in outliers(best, _SLOW_CPU):
        yield Match([evidence.facts_of(number)], took_ms=took_ms, middle_ms=middle_ms)


def no_driver(evidence: Evidence, ranks: Group) -> Words | None:
    gpus = ranks[0].gpus
    devices = max(len(gpus.devices), gpus.device_files)
    reason = gpus.problem or f"torch {ranks[0].versions.torch} was built without CUDA"
    return {"devices": devices, "reason": reason} if devices and (gpus.problem or not gpus.torch_cuda) else None


def shared_gpu(evidence: Evidence, group: Group) -> Words | None:
    allowed = group[0].place.variables.get("PARALLEL_STATE_SHARE_GPUS", "").lower() in ("on", "1", "true")
    return {"severity": INFO if allowed else ""} if len(group) > 1 else None


def model_of(facts: Facts) -> str:
    return next((each.name for each in facts.gpus.devices if each.uuid == facts.gpus.own), "")


def no_peer_access(evidence: Evidence, ranks: Group) -> Words | None:
    paths = ranks[0].gpus.paths
    refused = [f"{path}: {path.peer_problem}" for path in paths if path.peer_problem]
    return {"refused": len(refused), "pairs": len(paths), "first": refused[0]} if refused else None


def far_from_gpu(evidence: Evidence) -> Iterator[Match]:
    for facts in evidence.arrivals:
        own = next((each for each in facts.gpus.devices if each.uuid == facts.gpus.own), None)
        if own is not None and own.cores and facts.cpu.affinity and not set(own.cores) & set(facts.cpu.affinity):
            yield Match([facts], gpu=own)


_SLOW_GROUP = 5.0
_SLOW_GROUP_US = 2_000.0
"""Smaller differences between groups aren't reported, because the kernel's time slices cause them."""


def failures(evidence: Evidence, starting: bool) -> Iterator[Match]:
    failed = {number: each for number, each in evidence.traffic.items() if each.problem}
    for stage, numbers in grouped(failed, lambda number: failed[number].stage).items():
        first = min(numbers, key=lambda number: evidence.facts_of(number).place.rank)
        more = f" (other ranks with errors: {len(numbers) - 1})" if len(numbers) > 1 else ""
        rank, problem = evidence.facts_of(first).place.rank, failed[first].problem
        if (stage in ("init_distributed_environment", "initialize_model_parallel")) == starting:
            yield Match(
                [evidence.facts_of(each) for each in numbers], stage=stage, rank=rank, problem=problem, more=more
            )


def wrong_answers(evidence: Evidence) -> Iterator[Match]:
    for number, traffic in evidence.traffic.items():
        for group in traffic.groups:
            if group.wrong:
                yield Match([evidence.facts_of(number)], within=group)


def slow_groups(evidence: Evidence) -> Iterator[Match]:
    facts = {each.place.rank: each for each in evidence.arrivals}
    for kind, groups in groups_of_kind(evidence).items():
        for some in grouped(groups, lambda ranks: len({evidence.host(facts[rank]) for rank in ranks}) > 1).values():
            if len(some) < 3:  # of two groups either may be the outlier
                continue
            latency = {ranks: groups[ranks].latency_us for ranks in some}
            for ranks, took_us, middle_us in outliers(latency, _SLOW_GROUP):
                if took_us - middle_us > _SLOW_GROUP_US:
                    what = f"an all_reduce of 64 bytes in {kind} {format_ranks(ranks)} takes {took_us:.0f} µs"
                    yield Match([facts[rank] for rank in ranks], what=what, usual=f"{middle_us:.0f} µs")
            speeds = {ranks: groups[ranks].bytes_per_s for ranks in some if groups[ranks].bytes_per_s}
            for ranks, speed, middle in outliers(speeds, _SLOW_GROUP, high=False):
                what = f"{kind} {format_ranks(ranks)} moves {rate(speed)}"
                yield Match([facts[rank] for rank in ranks], what=what, usual=rate(middle))
