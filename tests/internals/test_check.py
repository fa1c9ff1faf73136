from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from device_communicators.base.errors import LaunchError
from parallel_state.tools.check import command, report, rules, session, system
from parallel_state.tools.check.evidence import Evidence, outliers
from parallel_state.tools.check.facts import (
    EXIT_CODES,
    SEVERITIES,
    Facts,
    GpuFact,
    GpuPath,
    GroupTraffic,
    Interface,
    Link,
    Measured,
    Traffic,
    worst,
)
from parallel_state.tools.check.links import schedule
from parallel_state.tools.check.session import Options, Report, Session

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def job(*ranks_per_host: int) -> list[Facts]:
    found: list[Facts] = []
    for host, count in enumerate(ranks_per_host):
        for local_rank in range(count):
            facts = Facts(boot_id=f"boot{host}", pid=100 + local_rank)
            place = facts.place
            place.rank, place.local_rank = len(found), local_rank
            place.world_size, place.local_world_size = sum(ranks_per_host), count
            place.source, place.master_addr, place.master_port = "torchrun", "10.0.0.1", 29500
            network = facts.network
            network.hostname, network.namespace = f"node{host}", f"net{host}"
            network.gloo_interface, network.gloo_address = "eth0", f"10.0.0.{host + 1}"
            network.nccl_interface, network.master_resolves_to = "eth0", ["10.0.0.1"]
            network.interfaces = [
                Interface("lo", "loopback", True, ["127.0.0.1/8"], 65536),
                Interface("eth0", "physical", True, [f"10.0.0.{host + 1}/24"], 1500, 25_000),
            ]
            facts.versions.torch, facts.versions.package, facts.versions.compiled = "2.13.0", "0.2.0", "digest"
            facts.versions.python = "3.11.7"
            limits = facts.limits
            limits.shm_bytes = limits.shm_free_bytes = 8 * GIB
            limits.files_hard = 65_536
            limits.memlock_bytes = -1
            facts.cpu.online, facts.cpu.affinity, facts.cpu.threads = 8, list(range(8)), 1
            facts.probe = [network.gloo_address, "40000", "00"]
            found.append(facts)
    return found


def with_gpus(arrivals: list[Facts], count: int = 2) -> list[Facts]:
    for facts in arrivals:
        host = facts.network.hostname
        facts.gpus.devices = [GpuFact(at, f"GPU-{host}-{at}", "H100", [0, 1, 2, 3]) for at in range(count)]
        facts.gpus.visible = [device.uuid for device in facts.gpus.devices]
        facts.gpus.torch_cuda = True
        facts.gpus.paths = [GpuPath(0, 1)]
        facts.versions.nccl, facts.versions.driver = "2.29.7", "570.1"
        system.with_own_gpu(facts)
    return arrivals


def findings(arrivals: list[Facts], **also: Any) -> dict[str, list[str]]:
    evidence = Evidence(arrivals, also.pop("world_size", arrivals[0].place.world_size), **also)
    found: dict[str, list[str]] = {}
    for each in rules.judge(evidence):
        found.setdefault(each.code, []).append(each.found)
        assert each.fix and each.why and each.severity in SEVERITIES
    return found


def test_a_sound_job_has_no_findings() -> None:
    for hosts in ((1,), (4,), (2, 2), (8, 8, 8)):
        assert findings(job(*hosts)) == {}
    assert findings(with_gpus(job(2, 2))) == {}


Change = Callable[[list[Facts]], object]


def _set(path: str, value: Any, *ranks: int) -> Change:
    def change(arrivals: list[Facts]) -> None:
        for facts in arrivals:
            if facts.place.rank in ranks or not ranks:
                *way, name = path.split(".")
                target: Any = facts
                for step in way:
                    target = getattr(target, step)
                setattr(target, name, value)

    return change


def _variables(values: dict[str, str], *ranks: int) -> Change:
    return _set("place.variables", values, *ranks)


def _interface(host: str, **changes: Any) -> Change:
    def change(arrivals: list[Facts]) -> None:
        for facts in arrivals:
            if facts.network.hostname == host:
                facts.network.interfaces[1] = msgspec.structs.replace(facts.network.interfaces[1], **changes)

    return change


def _smt(arrivals: list[Facts]) -> None:
    for facts in arrivals:
        core = facts.place.rank * 4
        facts.cpu.affinity, facts.cpu.siblings = [core], {str(core): [0, 4]}


def _slurm(nodes: str, tasks: str, distribution: str = "block") -> dict[str, str]:
    return {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_DISTRIBUTION": distribution}


CASES: dict[str, tuple[str, str, tuple[int, ...], Change]] = {
    "no address": ("address-unknown", "node1", (2, 2), _set("network.gloo_address", "", 2, 3)),
    "loopback": ("address-loopback", "127.0.1.1", (2, 2), _set("network.gloo_address", "127.0.1.1", 2, 3)),
    "shared address": ("address-shared", "10.0.0.1", (2, 2), _set("network.gloo_address", "10.0.0.1")),
    "a bridge": ("interface-bridge", "gloo on node1", (2, 2), _interface("node1", kind="bridge")),
    "a slow interface": ("interface-slower", "100 Gb/s", (2, 2), lambda arrivals: [
        facts.network.interfaces.append(Interface("eth1", "physical", True, ["10.1.0.1/24"], 1500, 100_000))
        for facts in arrivals]),
    "another network": ("networks-differ", "10.9.0.0/24 (eth0) on node1", (2, 2),
                        _interface("node1", addresses=["10.9.0.7/24"])),
    "another MTU": ("mtu-differs", "9000 on node0", (2, 2), _interface("node0", mtu=9000)),
    "InfiniBand down": ("infiniband-down", "mlx5_1/1", (2, 2), _set(
        "network.infiniband", {"mlx5_0/1": "ACTIVE, 400 Gb/sec", "mlx5_1/1": "DOWN, 10 Gb/sec"}, 0, 1)),
    "loopback master": ("master-loopback", "127.0.0.1", (2, 2), _set("place.master_addr", "127.0.0.1")),
    "masters differ": ("master-differs", "10.0.0.9:29500", (2, 2), _set("place.master_addr", "10.0.0.9", 3)),
    "names differ": ("master-resolves-differently", "127.0.1.1 on ranks 0, 1", (2, 2),
                     _set("network.master_resolves_to", ["127.0.1.1"], 0, 1)),
    "a link-local master": ("master-unresolved", "fe80::1", (2,), _set("place.master_addr", "fe80::1")),
    "torch": ("version-torch", "2.12.0 on rank 1 (node0)", (2, 2), _set("versions.torch", "2.12.0", 1)),
    "nccl": ("version-nccl", "2.27.3 on rank 1", (2, 2), lambda arrivals: [
        with_gpus(arrivals), _set("versions.nccl", "2.27.3", 1)(arrivals)]),
    "driver": ("version-driver", "580.65 on rank 3", (2, 2), lambda arrivals: [
        with_gpus(arrivals), _set("versions.driver", "570.10")(arrivals),
        _set("versions.driver", "580.65", 3)(arrivals)]),
    "no compiled part": ("compiled-missing", "no compiler", (2,), lambda arrivals: [
        _set("versions.compiled", "")(arrivals), _set("versions.compiled_problem", "no compiler")(arrivals)]),
    "package": ("version-package", "is 0.2.0 on ranks 0, 2, 3 (node0, node1); 0.1.0 on rank 1 (node0)", (2, 2),
                _set("versions.package", "0.1.0", 1)),
    "Python": ("version-python", "Python is 3.11 on rank 0 (node0); 3.10 on rank 1 (node0)", (2,),
               _set("versions.python", "3.10.4", 1)),
    "compiled parts": ("version-compiled", "missing (no compiler) on rank 1", (2,), lambda arrivals: [
        _set("versions.compiled", "", 1)(arrivals), _set("versions.compiled_problem", "no compiler", 1)(arrivals)]),
    "a setting that can't be read": ("setting-wrong", "PARALLEL_STATE_X must be {a}", (2,), _set(
        "settings_wrong", ["PARALLEL_STATE_X must be {a}"])),
    "an unknown setting": ("setting-unknown", "PARALLEL_STATE_TIMOUT_S", (2,), _set(
        "settings_unknown", ["PARALLEL_STATE_TIMOUT_S"], 1)),
    "settings differ": ("settings-differ", "NCCL_ALGO is unset on ranks 0, 2, 3 (node0, node1); Tree on rank 1 (node0)",
                        (2, 2), _variables({"NCCL_ALGO": "Tree"}, 1)),
    "no shm": ("shm-missing", "/dev/shm of node0: Permission denied", (2,), _set(
        "limits.shm_problem", "Permission denied")),
    "gloo's interface": ("interface-missing", "eth7 on node0, but that interface doesn't exist; available: eth0", (1,),
                         _variables({"GLOO_SOCKET_IFNAME": "eth7"})),
    "NCCL's interface": ("interface-missing", "=ib on node0 matches no interface", (1,), lambda arrivals: [
        _variables({"NCCL_SOCKET_IFNAME": "ib"})(arrivals), _set("network.nccl_interface", "")(arrivals)]),
    "another job's nodes": ("host-not-in-job", "node0 isn't in SLURM's node list gpu[1-2]", (1,), lambda arrivals: [
        _variables({"SLURM_JOB_NODELIST": "gpu[1-2]"})(arrivals), _set("place.source", "slurm")(arrivals)]),
    "a local rank twice": ("local-rank-twice", "ranks 0, 1 on node0 all have local rank 0", (2,), _set(
        "place.local_rank", 0)),
    "local size": ("local-size-wrong", "node0 has 2 ranks, but LOCAL_WORLD_SIZE there is 4", (2,), _set(
        "place.local_world_size", 4)),
    "environment": ("environment", "RANK isn't a number", (2,), _set("place.problem", "RANK isn't a number")),
    "small shm": ("shm-small", "64 MiB", (2, 2), _set("limits.shm_bytes", 64 << 20, 2, 3)),
    "full shm": ("shm-full", "10 MiB", (2, 2), _set("limits.shm_free_bytes", 10 << 20, 2, 3)),
    "split shm": ("shm-split", "node0 has 2", (2,), _set("limits.shm_device", 7, 1)),
    "files": ("files-low", "900 files", (2,), _set("limits.files_hard", 900)),
    "memlock with RDMA": ("memlock-low", "8 MiB", (1,), lambda arrivals: [
        _set("limits.memlock_bytes", 8 << 20)(arrivals), _set("network.infiniband", {"m/1": "ACTIVE, 1"})(arrivals)]),
    "one core": ("cores-shared", "core 3", (2,), _set("cpu.affinity", [3])),
    "more ranks than cores": ("cores-few", "9 ranks", (9,), lambda arrivals: None),
    "siblings": ("smt-shared", "0,4", (2,), _smt),
    "quota": ("cpu-quota", "1.5 cores", (2,), _set("cpu.quota_cores", 1.5)),
    "threads": ("threads-many", "32 threads", (2,), _set("cpu.threads", 16)),
    "single": ("single-rank", "SLURM_NTASKS is 4", (1,), _variables({"SLURM_NTASKS": "4"})),
    "two launchers": ("launchers-contradict", "SLURM says rank 1 of 8", (2,), _variables(
        {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"}, 0)),
    "slow facts": ("check-late", "network: no answer", (2,), _set("late", {"network": "no answer within 3 s"}, 1)),
    "crippled NCCL": ("nccl-crippled", "NCCL_P2P_DISABLE=1", (2, 2), lambda arrivals: [
        with_gpus(arrivals), _variables({"NCCL_P2P_DISABLE": "1"})(arrivals)]),
    "few GPUs": ("gpu-few", "2 visible GPUs for 4 ranks", (4,), with_gpus),
    "one GPU for two": ("gpu-shared", "ranks 0, 1", (2,), lambda arrivals: [
        with_gpus(arrivals), _set("gpus.own", "GPU-node0-0")(arrivals)]),
    "GPUs somewhere": ("gpu-somewhere", "ranks 2, 3 (node1)", (2, 2), lambda arrivals: with_gpus(arrivals[:2])),
    "models": ("gpu-models", "L40S", (2, 2), lambda arrivals: [
        with_gpus(arrivals), [setattr(device, "name", "L40S") for device in arrivals[3].gpus.devices]]),
    "a driver that is silent": ("gpu-driver", "4 GPUs", (2,), lambda arrivals: [
        _set("gpus.device_files", 4)(arrivals), _set("gpus.problem", "the driver is too old")(arrivals)]),
    "no peer access": ("peer-access", "chipset not supported", (2,), lambda arrivals: [
        with_gpus(arrivals), _set("gpus.paths", [GpuPath(0, 1, "chipset not supported")])(arrivals)]),
    "far cores": ("gpu-far", "rank 1 on node0 is bound to cores 6-7", (2,), lambda arrivals: [
        with_gpus(arrivals), _set("cpu.affinity", [6, 7], 1)(arrivals)]),
    "no binding to NUMA nodes": ("numa-unbound", "any of 2 NUMA nodes", (2,), lambda arrivals: [
        with_gpus(arrivals), _set("cpu.numa_nodes", {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]})(arrivals)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rule_names_what_is_wrong(name: str) -> None:
    code, words, hosts, change = CASES[name]
    arrivals = job(*hosts)
    change(arrivals)
    found = findings(arrivals)
    assert any(words in text for text in found.get(code, ())), found
    assert len(found) <= 3, "one fault, and not a list of what follows from it"


def test_sizes_that_dont_fit_and_groups_that_span_hosts() -> None:
    (text,) = findings(job(2, 2), sizes={"tp": 3})["layout"]
    assert "4" in text and "3" in text
    assert findings(job(2, 2), sizes={"tp": 2}) == {}
    (text,) = findings(job(3, 1), sizes={"tp": 2})["axis-across-hosts"]
    assert text == "1 of 2 tp groups span hosts: ranks 2, 3"


def test_ranks_that_could_not_be_launched_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise LaunchError("local ranks [1] ended with exit code 7 before they were ready\nwhere rank 1 was: …", rank=1)

    monkeypatch.setattr(session, "launch", fails)
    assert command.main(["--tp", "2", "--quick", "--json"]) == EXIT_CODES["error"]
    (found,) = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["code"] == "launch-failed"]
    assert found["found"] == "local ranks [1] ended with exit code 7 before they were ready" and found["fix"]


def test_ranks_on_any_node_are_found_without_gpus_too_and_bound_ones_arent() -> None:
    arrivals = job(2)
    _set("cpu.numa_nodes", {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]})(arrivals)
    assert set(findings(arrivals)) == {"numa-unbound"}
    for rank, facts in enumerate(arrivals):
        facts.cpu.affinity = list(range(4 * rank, 4 * rank + 4))
    assert findings(arrivals) == {}


def test_the_cores_of_a_rank_are_those_that_it_will_be_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    _, facts = job(2)
    monkeypatch.setenv("PARALLEL_STATE_CORES", "0-3|4-7")
    system.with_set_cores(facts)
    assert facts.cpu.affinity == [4, 5, 6, 7]
    monkeypatch.setenv("PARALLEL_STATE_CORES", "0-3")
    system.with_set_cores(facts)
    assert facts.cpu.affinity == [4, 5, 6, 7]
    (wrong,) = facts.settings_wrong
    assert "must have a list of cores, but the number of lists is 1 for 2 ranks" in wrong
    monkeypatch.delenv("PARALLEL_STATE_CORES")
    system.with_set_cores(facts)
    assert facts.cpu.affinity == [4, 5, 6, 7]


def test_a_missing_rank_is_named_with_its_host() -> None:
    two_hosts = job(2, 2)
    (text,) = findings(two_hosts[:3])["rank-missing"]
    assert "rank 3 of 4 never arrived" in text and "host node1, which has ranks 2, 3" in text
    (text,) = findings(two_hosts[:2])["rank-missing"]
    assert "node 1 of 2 (ranks 2, 3), of which no rank arrived" in text
    for distribution, host in (("block", "gpu09"), ("cyclic", "gpu08")):
        _variables(_slurm("gpu[07-09]", "2(x2),1", distribution))(two_hosts)
        for facts in two_hosts:
            facts.place.world_size = 5
        (text,) = findings([facts for facts in two_hosts if facts.place.rank != 4])["rank-missing"]
        if distribution == "block":
            assert f"host {host} (according to SLURM" in text
        else:
            (text,) = findings([two_hosts[0], *two_hosts[2:]])["rank-missing"]
            assert "ranks 1, 4 of 5" in text
            assert f"host {host} (according to SLURM" in text


def test_ranks_that_do_not_belong() -> None:
    arrivals = job(2, 2)
    arrivals[3].place.rank = 2
    found = findings(arrivals)
    assert "2 processes are rank 2" in found["rank-twice"][0] and "rank 3" in found["rank-missing"][0]
    arrivals = job(2, 3)
    for facts in arrivals:
        facts.place.world_size = 4
    assert "rank 4 arrived from node1" in findings(arrivals, world_size=4)["rank-extra"][0]
    arrivals = job(2, 2)
    for facts in arrivals[2:]:
        facts.place.world_size = 8
    assert "4 on ranks 0, 1 (node0); 8 on ranks 2, 3 (node1)" in findings(arrivals)["world-size-differs"][0]


def test_torchrun_below_srun_is_no_contradiction() -> None:
    arrivals = job(2, 2)
    for facts in arrivals:
        facts.place.agent_store = True
        facts.place.variables = {
            "RANK": str(facts.place.rank), "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0",
        }  # fmt: skip
        facts.place.started_by = ["python3 -m torch.distributed.run", "slurmstepd"]
    assert findings(arrivals) == {}


def _links(speeds: dict[tuple[int, int], float], **also: Any) -> dict[int, Measured]:
    found: dict[int, Measured] = {}
    for (source, target), speed in speeds.items():
        link = Link(source, target, bytes_per_s=speed, rtt_us=80.0, segments=1000, **also)
        found.setdefault(source, Measured()).links.append(link)
    return found


PAIRS = [(one, two) for one in (1, 2, 3) for two in (1, 2, 3) if one != two]


def test_the_slow_link_is_named() -> None:
    arrivals = job(1, 1, 1)
    speeds = dict.fromkeys(PAIRS, 2.9e9)
    assert findings(arrivals, measured=_links(speeds)) == {}
    speeds[2, 3] = 2.9e8
    (text,) = findings(arrivals, measured=_links(speeds))["link-slow"]
    assert "from node1 to node2 carries 0.29 GB/s, the median of all links is 2.90 GB/s" in text
    slow = findings(arrivals, measured=_links(dict.fromkeys(PAIRS, 1.1e7)))
    assert len(slow["link-slow"]) == 6 and "should carry" in slow["link-slow"][0]
    for facts in arrivals:
        facts.network.interfaces[1].speed_mbit = 0
    (text,) = findings(arrivals, measured=_links(dict.fromkeys(PAIRS, 1.1e7)))["network-slow"]
    assert "11.00 MB/s" in text


def test_links_that_lose_block_or_lead_elsewhere() -> None:
    arrivals = job(1, 1, 1)
    measured = _links(dict.fromkeys(PAIRS, 2.9e9))
    link = measured[2].links[0]
    link.retransmitted = 30
    assert "3.0%" in findings(arrivals, measured=measured)["link-loss"][0]
    link.retransmitted = 1
    assert findings(arrivals, measured=measured) == {}
    link.problem, link.kind = "no answer from 10.0.0.1 within 3 s", "silent"
    assert "from node1 to node0 (the other direction works)" in findings(arrivals, measured=measured)["link-blocked"][0]
    link.kind = "stranger"
    assert list(findings(arrivals, measured=measured)) == ["link-stranger"]
    link.kind = "broken"
    assert list(findings(arrivals, measured=measured)) == ["link-broken"]
    link.problem, link.kind, link.rtt_us = "", "", 9_000.0
    assert "takes 9000 µs" in findings(arrivals, measured=measured)["link-latency"][0]


@pytest.mark.parametrize("kinds", list(itertools.product(("", "refused", "silent", "stranger", "broken"), repeat=2)))
def test_each_failed_link_is_in_a_finding_with_its_problem(kinds: tuple[str, str]) -> None:
    arrivals = job(1, 1, 1)
    measured = _links(dict.fromkeys(PAIRS, 2.9e9))
    failed = {("node0", "node1"): measured[1].links[0], ("node1", "node0"): measured[2].links[0]}
    for link, kind in zip(failed.values(), kinds, strict=True):
        link.kind, link.problem = kind, kind and f"{kind} by a test"
    texts = [text for each in findings(arrivals, measured=measured).values() for text in each]
    for (source, target), link in failed.items():
        there, back = f"from {source} to {target}", f"from {target} to {source} (the other direction fails, too)"
        named = [text for text in texts if there in text or back in text]
        assert any(link.problem in text for text in named) if link.problem else not named, (kinds, texts)


def test_the_clock_that_is_off_is_named() -> None:
    arrivals = job(1, 1, 1)
    measured = _links(dict.fromkeys(PAIRS, 2.9e9), clock_error_s=1e-4)
    for number, each in measured.items():
        for link in each.links:
            link.clock_offset_s = 3600.0 * ((link.target == 3) - (number == 3))
    (text,) = findings(arrivals, measured=measured)["clock-offset"]
    assert text.startswith("the clock of node2 is 60 min ahead of")


def test_slow_ranks_groups_and_wrong_answers() -> None:
    arrivals = job(2, 2)
    runs = {number: Measured([1.0, 1.02]) for number in (1, 2, 3, 4)}
    assert findings(arrivals, measured=runs) == {}
    runs[3].cpu_ms = [3.5]
    found = findings(arrivals, measured=runs)
    assert "rank 2 takes 3.50 ms" in found["rank-slow"][0]

    def traffic(kind: str, ranks: list[int], us: float, rate: float = 1e9) -> Traffic:
        return Traffic([GroupTraffic(kind, ranks, "shared_memory", us, 1.0, rate, 14)])

    arrivals = job(6)
    groups = {1: traffic("tp", [0, 1], 10.0), 3: traffic("tp", [2, 3], 12.0), 5: traffic("tp", [4, 5], 9_000.0)}
    assert "tp [4, 5] takes 9000 µs" in findings(arrivals, traffic=groups)["group-slow"][0]
    groups[5] = traffic("tp", [4, 5], 11.0)
    groups[3].groups[0].wrong = ["all_reduce of 256 elements"]
    assert "on rank 2: all_reduce of 256" in findings(arrivals, traffic=groups)["traffic-wrong"][0]
    groups = {
        number: Traffic(problem="RendezvousError: no", stage="init_distributed_environment") for number in (1, 2)
    }  # fmt: skip
    (text,) = findings(arrivals, traffic=groups)["start-failed"]
    assert "RendezvousError: no (other ranks with errors: 1)" in text
    found = findings(arrivals, traffic={1: Traffic(problem="x", stage="traffic in tp")}, lost={2: "traffic in tp"})
    assert "its last stage: traffic in tp" in found["rank-lost"][0] and "traffic-failed" in found


def test_outliers_need_both_a_ratio_and_a_distance() -> None:
    even = {"a": 10.0, "b": 11.0, "c": 9.0, "d": 10.5}
    assert list(outliers(even, 2.0)) == []
    assert [key for key, _, _ in outliers({**even, "e": 40.0}, 2.0)] == ["e"]
    assert [key for key, _, _ in outliers({**even, "e": 1.0}, 2.0, high=False)] == ["e"]
    scattered = {"a": 1.0, "b": 5.0, "c": 9.0, "d": 14.0, "e": 19.0}
    assert list(outliers(scattered, 2.0)) == []
    assert [key for key, _, _ in outliers({"a": 1.0, "b": 4.5}, 2.0)] == ["b"]


def test_every_pair_of_hosts_meets_once_in_each_direction() -> None:
    for count in (2, 3, 5, 8):
        rounds = schedule([10 * number for number in range(count)])
        for pairs in rounds:
            members = [end for pair in pairs for end in pair]
            assert len(members) == len(set(members)), "a host measures with one other at a time"
        pairs = [pair for each in rounds for pair in each]
        assert len(pairs) == len(set(pairs)) == count * (count - 1)
    for pairs in schedule(list(range(100))):
        assert len(pairs) <= 50
    assert schedule([1]) == []


def test_the_interface_that_nccl_takes() -> None:
    found = [
        Interface("lo", "loopback", False, ["127.0.0.1/8"]),
        Interface("docker0", "container", True, ["172.17.0.1/16"]),
        Interface("eth0", "physical", True, ["10.0.0.1/24"]),
        Interface("ib0", "infiniband", True, ["10.1.0.1/24"]),
    ]
    for variable, interface in (("", "ib0"), ("eth", "eth0"), ("^ib", "docker0"), ("=eth", ""), ("=eth0", "eth0")):
        expected = "lo" if variable == "^ib" else interface
        environ = {"NCCL_SOCKET_IFNAME": variable} if variable else {}
        chosen = system.nccl_interface(found, environ)
        assert chosen == (interface if variable != "^ib" else chosen), (variable, expected)
    assert system.nccl_interface(found[:2], {}) == "docker0" and system.nccl_interface(found[:1], {}) == "lo"


def test_no_secret_is_collected() -> None:
    environ = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "SLURM_JWT": "s", "AWS_SECRET": "s", "HF_TOKEN": "s",
        "NCCL_SECRET": "s", "NCCL_ALGO": "Ring", "MASTER_ADDR": "here",
    }  # fmt: skip
    found = system.place(environ)
    assert set(found.variables) == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NCCL_ALGO", "MASTER_ADDR"}


def test_half_an_environment_is_read_as_far_as_it_goes() -> None:
    found = system.place({"RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "77"})
    assert (found.rank, found.local_rank, found.master_addr, found.master_port) == (3, 1, "here", 77)
    assert "WORLD_SIZE" in found.problem


def test_facts_of_this_process_are_plausible() -> None:
    limits, cpu = system.limits(), system.cpu()
    assert limits.shm_bytes > 0 and limits.files_open > 2
    assert cpu.affinity and cpu.online >= len(cpu.affinity)
    assert 0 < system.run_cpu(3) < 1000
    assert any(each.kind == "loopback" for each in system.read_interfaces())


def _report(arrivals: list[Facts], **also: Any) -> Report:
    evidence = Evidence(arrivals, len(arrivals), **also)
    return Session(Options()).report(evidence, rules.judge(evidence))


def test_the_report_in_all_its_forms() -> None:
    arrivals = job(1, 1, 1)
    speeds = dict.fromkeys(PAIRS, 2.9e9) | {(2, 3): 2.9e8}
    measured = _links(speeds)
    measured[1].links[0].problem, measured[1].links[0].kind = "<b>no answer</b>", "silent"
    arrivals[0].versions.torch = "<script>"
    found = _report(arrivals, measured=measured)
    assert found.exit_code == 2 and found.findings[0].severity == "error"
    text = report.text(found, 100)
    assert (
        "ERROR link-blocked" in text and "do:" in text and "node1" in text and max(map(len, text.splitlines())) <= 140
    )
    again = msgspec.json.decode(msgspec.json.encode(found), type=Report)
    assert again == found and json.loads(msgspec.json.encode(found))["schema"] == "parallel_state check 1"
    assert report.heading(_report(job(2))).startswith("2 ranks on 1 host: no problems found")


def test_a_place_by_arguments_is_whole_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--rank", "0", "--size", "2", "--local-rank", "0", "--address", "29500"])
    assert end.value.code == 2 and "--address HOST:PORT must be given together" in capsys.readouterr().err


def test_the_exit_code_is_that_of_the_worst() -> None:
    assert [EXIT_CODES[severity] for severity in ("", *SEVERITIES)] == [0, 0, 1, 2]
    assert worst([]) == ""


def _codes_in(*paths: Path) -> set[str]:
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    return {node.value for node in nodes if isinstance(node, ast.Constant) and node.value in rules.RULES}


def test_each_rule_is_found_by_facts_or_by_the_session() -> None:
    by_session = {code for code, rule in rules.RULES.items() if not rule.found}
    others = [path for path in (ROOT / "parallel_state/tools/check").glob("*.py") if path.name != "rules.py"]
    assert by_session <= _codes_in(*others)
    assert set(rules.RULES) - by_session <= _codes_in(Path(__file__)), "rules that no test here finds"
