"""Rules about one host, and about what must be alike on all: versions, settings, limits, cores, GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter

from device_communicators.base.cores import spans
from parallel_state.tools.check.evidence import Evidence, by_value, grouped, ranks_of
from parallel_state.tools.check.facts import Facts
from parallel_state.tools.check.findings import INFO, WARNING, Finding, named

_MIB, _GIB = 1 << 20, 1 << 30
_SHM_BYTES = 512 * _MIB
_SHM_FREE_BYTES = 128 * _MIB
_TMP_BYTES = 64 * _MIB
_MEMLOCK_BYTES = _GIB
_MEMLOCK_LEAST_BYTES = 64 << 10
"""The kernel's default before 5.16."""
_FILES = 1024
_PROCESSES_PER_RANK = 64
_ADDRESS_SPACE_BYTES = 64 * _GIB
_FILE_BYTES = _GIB
_MEMORY_BYTES = _GIB
_OF_EACH_RANK = re.compile(
    r"(NCCL|GLOO)_SOCKET_IFNAME|NCCL_IB_HCA|NCCL_(DEBUG_FILE|TOPO_FILE|TOPO_DUMP_FILE|GRAPH_FILE|HOSTID|NODE_RANK)"
)
"""May rightly differ between hosts."""
_COMPARED = re.compile(r"(NCCL|GLOO|TORCH_NCCL|PARALLEL_STATE)_\w+|OMP_NUM_THREADS")
_CRIPPLING = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0",
    "CUDA_LAUNCH_BLOCKING": "1", "NCCL_NET_GDR_LEVEL": "LOC",
}  # fmt: skip


def _differing(evidence: Evidence, code: str, what: str, read: Callable[[Facts], str]) -> Iterator[Finding]:
    """Yields one finding where the values that are known differ, about those who have the rarer ones."""
    groups = grouped(filter(read, evidence.arrivals), read)
    if len(groups) > 1:
        ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
        words = "; ".join(f"{value} on {_words(evidence, group)}" for value, group in ordered)
        odd = [facts for _, group in ordered[1:] for facts in group]
        yield evidence.about(code, f"{what} is {words}", odd)


def _words(evidence: Evidence, group: Sequence[Facts]) -> str:
    hosts = list(dict.fromkeys(map(evidence.host, group)))
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"{named(ranks_of(group))} ({shown})"


# Versions and settings.


def versions(evidence: Evidence) -> Iterator[Finding]:
    yield from _differing(evidence, "version-torch", "torch", lambda facts: facts.versions.torch)
    yield from _differing(evidence, "version-package", "parallel_state", lambda facts: facts.versions.package)
    yield from _differing(evidence, "version-nccl", "NCCL", lambda facts: facts.versions.nccl)
    yield from _differing(evidence, "version-driver", "the GPU driver", lambda facts: facts.versions.driver)
    yield from _differing(
        evidence, "version-python", "Python", lambda facts: ".".join(facts.versions.python.split(".")[:2])
    )
    there = [facts for facts in evidence.arrivals if "compiled" not in facts.late]
    without = [facts for facts in there if not facts.versions.compiled]
    if without and len(without) == len(there):
        yield evidence.about("compiled-missing", without[0].versions.compiled_problem, without)
        return
    yield from _differing(
        evidence, "version-compiled", "the compiled part",
        lambda facts: "" if "compiled" in facts.late else facts.versions.compiled or "missing "
        f"({facts.versions.compiled_problem})",
    )  # fmt: skip


def settings(evidence: Evidence) -> Iterator[Finding]:
    for code, read in (
        ("setting-wrong", lambda facts: facts.settings_wrong),
        ("setting-unknown", lambda facts: facts.settings_unknown),
    ):
        said = [(text, facts) for facts in evidence.arrivals for text in read(facts)]
        for text, pairs in grouped(said, itemgetter(0)).items():
            yield evidence.about(code, text, [facts for _, facts in pairs])


def settings_alike(evidence: Evidence) -> Iterator[Finding]:
    names = sorted({
        name
        for facts in evidence.arrivals
        for name in facts.place.variables
        if _COMPARED.fullmatch(name) and not _OF_EACH_RANK.fullmatch(name)
    })  # fmt: skip
    for name in names:
        yield from _differing(evidence, "settings-differ", name, partial(_variable, name))
    for name, value in _CRIPPLING.items():
        group = [facts for facts in evidence.arrivals if facts.place.variables.get(name) == value]
        if group and any(facts.gpus.visible for facts in evidence.arrivals):
            yield evidence.about("nccl-crippled", f"{name}={value}", group)


# Limits.


def shared_memory(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        devices = grouped(ranks, lambda facts: facts.limits.shm_device)
        if len(devices) > 1:
            parts = "; ".join(named(ranks_of(group)) for group in devices.values())
            yield evidence.about("shm-split", f"{name} has {len(devices)}: of {parts}", ranks)
        for group in grouped(ranks, lambda facts: (facts.limits.shm_problem, facts.limits.shm_device)).values():
            limits = group[0].limits
            if limits.shm_problem and not (limits.shm_bytes >= 0 and "No space" in limits.shm_problem):
                yield evidence.about("shm-missing", f"/dev/shm of {name}: {limits.shm_problem}", group)
            elif 0 <= limits.shm_bytes < _SHM_BYTES:
                text = f"/dev/shm of {name} has {_bytes(limits.shm_bytes)}, and {_bytes(limits.shm_free_bytes)} free"
                yield evidence.about("shm-small", text, group)
            elif 0 <= limits.shm_free_bytes < _SHM_FREE_BYTES:
                text = f"/dev/shm of {name} has {_bytes(limits.shm_free_bytes)} of {_bytes(limits.shm_bytes)} free"
                yield evidence.about("shm-full", text, group)


def temporary_files(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        bad = [each for each in ranks if each.limits.tmp_problem or 0 <= each.limits.tmp_free_bytes < _TMP_BYTES]
        if bad:
            limits = bad[0].limits
            why = limits.tmp_problem or f"{_bytes(limits.tmp_free_bytes)} free"
            yield evidence.about("tmp-full", f"{limits.tmp_folder} on {name}: {why}", bad)


def open_files(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        for limit, group in grouped(ranks, lambda facts: facts.limits.files_hard).items():
            needed = group[0].limits.files_open + 64 + 8 * (evidence.world_size + 16)
            if 0 <= limit < max(needed, _FILES):
                text = (
                    f"ranks on {name} may open {limit} files (hard limit), have {group[0].limits.files_open} open, and "
                    f"need {max(needed, _FILES)}"
                )
                # Below what is needed it fails; below the usual least limit it may, with the program's own files.
                severity = "" if limit < needed else WARNING
                yield evidence.about("files-low", text, group, severity=severity)


def locked_memory(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        for limit, group in grouped(ranks, lambda facts: facts.limits.memlock_bytes).items():
            rdma = bool(group[0].network.infiniband)
            if 0 <= limit < (_MEMLOCK_BYTES if rdma else _MEMLOCK_LEAST_BYTES):
                text = f"ranks on {name} may lock {_bytes(limit)}" + ("" if rdma else "; no RDMA device is there")
                yield evidence.about("memlock-low", text, group, severity="" if rdma else INFO)


def limits_alike(evidence: Evidence) -> Iterator[Finding]:
    for what, name in (
        ("the hard limit of open files", "files_hard"),
        ("the limit of locked memory", "memlock_bytes"),
        ("the limit of processes", "processes"),
        ("the limit of address space", "address_space_bytes"),
    ):
        yield from _differing(evidence, "limits-differ", what, partial(_limit, name))


def _variable(name: str, facts: Facts) -> str:
    return facts.place.variables.get(name) or "unset"


def _limit(name: str, facts: Facts) -> str:
    limit = getattr(facts.limits, name)
    return "unlimited" if limit < 0 else str(limit)


def processes(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        limits = ranks[0].limits
        needed = _PROCESSES_PER_RANK * len(ranks)
        by_user = limits.processes - limits.processes_taken if limits.processes >= 0 and limits.uid != 0 else None
        by_cgroup = limits.cgroup_pids_left if limits.cgroup_pids_left >= 0 else None
        for what, left in (("the user", by_user), ("the cgroup", by_cgroup)):
            if left is not None and left < needed:
                text = f"{what} on {name} may start {max(left, 0)} more, and {len(ranks)} ranks need about {needed}"
                yield evidence.about("processes-low", text, ranks)


def memory(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        limited = [each for each in ranks if 0 <= each.limits.address_space_bytes < _ADDRESS_SPACE_BYTES]
        if limited:
            text = f"ranks on {name} may map {_bytes(limited[0].limits.address_space_bytes)}"
            yield evidence.about("address-space-limited", text, limited)
        small = [each for each in ranks if 0 <= each.limits.file_size_bytes < _FILE_BYTES]
        if small:
            text = f"ranks on {name} may write files of {_bytes(small[0].limits.file_size_bytes)}"
            yield evidence.about("file-size-limited", text, small)
        limits = ranks[0].limits
        for what, left in (
            ("the machine has", limits.memory_available_bytes),
            ("the cgroup leaves", limits.cgroup_memory_left_bytes),
        ):
            if 0 <= left < _MEMORY_BYTES * len(ranks) // 2:
                text = f"{what} {_bytes(left)} for {len(ranks)} ranks on {name}"
                yield evidence.about("memory-low", text, ranks)
                break
        users = by_value({each.place.rank: str(each.limits.uid) for each in ranks})
        if len(users) > 1:
            words = "; ".join(f"uid {uid}: {named(each)}" for uid, each in users.items())
            yield evidence.about("users-differ", f"on {name} {words}", ranks)


# Cores.


def cores(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        bound = [each for each in ranks if 0 < len(each.cpu.affinity) < each.cpu.online]
        crowded = _crowded(ranks)
        if crowded:
            cores_, group = crowded
            text = f"{len(group)} ranks on {name} may only use {_core_words(cores_)}"
            yield evidence.about("cores-shared" if any(each in bound for each in group) else "cores-few", text, group)
        elif bound:
            yield from _siblings(evidence, name, bound)
        yield from _threads(evidence, name, ranks)
        cpu = ranks[0].cpu
        if len(ranks) > 1 and all(_nodes(each) > 1 for each in ranks):
            text = f"ranks on {name} may run on any of {_nodes(ranks[0])} NUMA nodes"
            yield evidence.about("numa-unbound", text, ranks)
        if cpu.governor in ("powersave", "ondemand", "conservative") and "Intel" not in cpu.model:
            yield evidence.about("governor", f"the governor on {name} is {cpu.governor}", ranks)


def _crowded(ranks: Sequence[Facts]) -> tuple[list[int], list[Facts]] | None:
    """Returns cores on which more ranks are than there are cores, and these ranks: the fewest cores of all such."""
    for allowed in sorted({tuple(each.cpu.affinity) for each in ranks if each.cpu.affinity}, key=len):
        inside = [each for each in ranks if each.cpu.affinity and set(each.cpu.affinity) <= set(allowed)]
        if len(inside) > len(allowed):
            return list(allowed), inside
    return None


def _core_words(cores_: Sequence[int]) -> str:
    return f"core {cores_[0]}" if len(cores_) == 1 else f"cores {spans(cores_)}"


def _siblings(evidence: Evidence, name: str, bound: Sequence[Facts]) -> Iterator[Finding]:
    """Ranks bound to single threads whose physical core is one."""
    single = {each.cpu.affinity[0]: each for each in bound if len(each.cpu.affinity) == 1}
    for taken in grouped(sorted(single), lambda core: tuple(single[core].cpu.siblings.get(str(core), [core]))).values():
        if len(taken) > 1:
            group = [single[core] for core in taken]
            text = f"{named(ranks_of(group))} on {name} are on cores {spans(taken)}, of one physical core"
            yield evidence.about("smt-shared", text, group)


def _threads(evidence: Evidence, name: str, ranks: Sequence[Facts]) -> Iterator[Finding]:
    total = sum(each.cpu.threads for each in ranks)
    usable = len(set().union(*(each.cpu.affinity for each in ranks)))
    if len(ranks) > 1 and usable and total > 2 * usable and total > len(ranks):
        text = f"torch has {total} threads in {len(ranks)} ranks on {name}, for {usable} cores"
        yield evidence.about("threads-many", text, ranks)


def _nodes(facts: Facts) -> int:
    return sum(bool(set(node) & set(facts.cpu.affinity)) for node in facts.cpu.numa_nodes.values())


def cpu_quota(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        limited = [each for each in ranks if each.cpu.quota_cores >= 0]
        for group in grouped(limited, lambda facts: facts.cpu.cgroup).values():
            quota = group[0].cpu.quota_cores
            if quota < len(group):
                text = f"{len(group)} ranks on {name} have {quota:g} cores together, by {group[0].cpu.cgroup}"
                yield evidence.about("cpu-quota", text, group)


# GPUs.


def gpus(evidence: Evidence) -> Iterator[Finding]:
    with_gpus = [each for each in evidence.arrivals if each.gpus.visible]
    for name, ranks in evidence.hosts.items():
        found = ranks[0].gpus
        devices = max(len(found.devices), found.device_files)
        if devices and (found.problem or not found.torch_cuda):
            why = found.problem or f"torch {ranks[0].versions.torch} was built without CUDA"
            yield evidence.about("gpu-driver", f"{name} has {devices} GPUs, but {why}", ranks)
        without = [each for each in ranks if each.gpus.visible and not each.gpus.own]
        if without:
            text = f"{name} has {len(without[0].gpus.visible)} visible GPUs for {len(ranks)} ranks"
            yield evidence.about("gpu-few", text, without)
        for uuid, group in grouped((each for each in ranks if each.gpus.own), lambda facts: facts.gpus.own).items():
            if len(group) > 1:
                text = f"{named(ranks_of(group))} on {name} all take {uuid}"
                allowed = group[0].place.variables.get("PARALLEL_STATE_SHARE_GPUS", "").lower() in ("on", "1", "true")
                yield evidence.about("gpu-shared", text, group, severity=INFO if allowed else "")
        yield from _paths(evidence, name, ranks)
        yield from _far(evidence, name, ranks)
    if with_gpus and len(with_gpus) < len(evidence.arrivals):
        without = [each for each in evidence.arrivals if not each.gpus.visible]
        text = f"{_words(evidence, without)} see no GPU, the others do"
        yield evidence.about("gpu-somewhere", text, without)
    yield from _differing(evidence, "gpu-models", "the GPU", _model)


def _model(facts: Facts) -> str:
    return next((each.name for each in facts.gpus.devices if each.uuid == facts.gpus.own), "")


def _paths(evidence: Evidence, name: str, ranks: Sequence[Facts]) -> Iterator[Finding]:
    found = ranks[0].gpus
    numbers = [path.nvlinks for path in found.paths if path.nvlinks >= 0]
    fewer = [path for path in found.paths if 0 <= path.nvlinks < max(numbers, default=0)]
    if fewer:
        words = ", ".join(f"GPU{path.one}–GPU{path.two}: {path.nvlinks}" for path in fewer[:4])
        yield evidence.about("nvlink-uneven", f"on {name} others have {max(numbers)} NVLinks: {words}", ranks)
    refused = [path for path in found.paths if path.peer_problem]
    if refused:
        first = refused[0]
        text = (
            f"on {name} {len(refused)} of {len(found.paths)} pairs, such as GPU{first.one}–GPU{first.two}: "
            f"{first.peer_problem}"
        )
        yield evidence.about("peer-access", text, ranks)
    if found.acs_redirect and not max(numbers, default=0):
        bridges = ", ".join(found.acs_redirect[:4]) + (" …" if len(found.acs_redirect) > 4 else "")
        mode = "with an IOMMU" if found.iommu else "without an IOMMU"
        text = f"{len(found.acs_redirect)} bridges of {name} ({mode}): {bridges}"
        yield evidence.about("acs-redirect", text, ranks)


def _far(evidence: Evidence, name: str, ranks: Sequence[Facts]) -> Iterator[Finding]:
    for facts in ranks:
        own = next((each for each in facts.gpus.devices if each.uuid == facts.gpus.own), None)
        if own is not None and own.cores and facts.cpu.affinity and not set(own.cores) & set(facts.cpu.affinity):
            text = (
                f"rank {facts.place.rank} on {name} is bound to {_core_words(facts.cpu.affinity)}; next to its "
                f"GPU{own.index} are {_core_words(own.cores)}"
            )
            yield evidence.about("gpu-far", text, [facts])


def _bytes(count: int) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


RULES: Sequence[Callable[[Evidence], Iterator[Finding]]] = (
    versions,
    settings,
    settings_alike,
    shared_memory,
    temporary_files,
    open_files,
    locked_memory,
    limits_alike,
    processes,
    memory,
    cores,
    cpu_quota,
    gpus,
)
