"""`check` names each fault of a job with its remedy, and finds nothing in a sound job."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.clusters.install import missing
from tests.extent import LONG
from tests.helpers.check_jobs import Ended, Shim, run_check
from tests.hosts import INTERFACE, Host, Hosts, problem

_PORTS = itertools.count(22_000)
CLEAN_RUNS = 100 if LONG else 2
ROOT = Path(__file__).resolve().parents[2]
CGROUP = Path("/sys/fs/cgroup/cpu/parallel_state_test")

if problem() is not None:
    pytest.skip(f"no hosts can be made here: {problem()}", allow_module_level=True)


def other_torch() -> None:
    torch.__version__ = "2.9.1"


def other_package() -> None:
    find = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.1.0" if name == "parallel-state" else find(name)


def other_compiled_part() -> None:
    from device_communicators.cpu import native, native_build

    native.load()
    native_build.sources_digest = lambda *folders: "0123456789abcdef"


def other_python() -> None:
    platform.python_version = lambda: "3.10.4"


def clock_an_hour_ahead() -> None:
    now = time.time
    time.time = lambda: now() + 3600


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (180, 180))


def little_locked_memory() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (16 << 10, 16 << 10))


def first_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def another_user() -> None:
    from importlib import import_module  # the function's text alone is run

    for name in ("command", "session"):
        import_module(f"parallel_state.tools.check.{name}")

    os.setuid(65_534)


def slow_core() -> None:
    from parallel_state.tools.check import system

    run = system.run_cpu
    system.run_cpu = lambda: run() * 10


def hangs_after_arrival() -> None:
    from parallel_state.tools.check import system

    system.run_cpu = lambda: time.sleep(60)


def limited_by_cgroup() -> None:
    (CGROUP / "cgroup.procs").write_text(str(os.getpid()))


def _add_interface(hosts: Hosts, host: int, name: str, address: str) -> None:
    hosts.run_on(host, f"ip link add {name} type veth peer name {name}p && ip addr add {address} dev {name} && "
                       f"ip link set {name} up && ip link set {name}p up")  # fmt: skip


@contextlib.contextmanager
def other_network(hosts: Hosts) -> Iterator[None]:
    _add_interface(hosts, 1, "eth9", "192.168.77.1/24")
    try:
        yield
    finally:
        hosts.run_on(1, "ip link del eth9")


@contextlib.contextmanager
def container_bridge(hosts: Hosts) -> Iterator[None]:
    for host in (0, 1):
        hosts.run_on(host, "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && "
                           "ip link set docker0 up")  # fmt: skip
    try:
        yield
    finally:
        for host in (0, 1):
            hosts.run_on(host, "ip link del docker0")


@contextlib.contextmanager
def on_host(hosts: Hosts, host: int, do: str, undo: str) -> Iterator[None]:
    hosts.run_on(host, do)
    try:
        yield
    finally:
        hosts.run_on(host, undo)


@contextlib.contextmanager
def filtered(hosts: Hosts, host: int, rule: str) -> Iterator[None]:
    if problem := missing("nftables"):
        pytest.skip(problem)
    hook = "nft add table inet test && nft add chain inet test out '{ type filter hook output priority 0; }'"
    with on_host(hosts, host, f"{hook} && nft add rule inet test out '{rule}'", "nft delete table inet test"):
        yield


@contextlib.contextmanager
def slow_links(hosts: Hosts, *which: int, rate: str) -> Iterator[None]:
    for host in which:
        hosts.limit(host, rate)
    try:
        yield
    finally:
        for host in which:
            hosts.limit(host, None)


@contextlib.contextmanager
def quota(hosts: Hosts) -> Iterator[None]:
    try:
        CGROUP.mkdir(exist_ok=True)
        # Shorter than the scheduler's slices, so that even on a busy machine a rank meets its limit.
        (CGROUP / "cpu.cfs_period_us").write_text("5000")
        (CGROUP / "cpu.cfs_quota_us").write_text("2000")
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            CGROUP.rmdir()


PORT = -1


@contextlib.contextmanager
def stranger(hosts: Hosts, port: int) -> Iterator[None]:
    code = f"import socket,time; s=socket.create_server(('0.0.0.0',{port})); print('up',flush=True); time.sleep(90)"
    command = ["nsenter", "-t", str(hosts.pid(0)), "--net", "python3", "-S", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == b"up\n"
            yield
        finally:
            server.kill()


@dataclass(frozen=True)
class Fault:
    code: str
    named: str = ""
    placement: tuple[int, ...] = (0, 0, 1, 1)
    arguments: tuple[str, ...] = ()
    environments: Mapping[int, Mapping[str, str | None]] = field(default_factory=dict)
    everywhere: Mapping[str, str | None] = field(default_factory=dict)
    shims: Mapping[int, Shim] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    around: Callable[..., contextlib.AbstractContextManager[None]] | None = None
    with_port: bool = False
    port: int = 0
    """0: the next free one."""
    shared_memory: str = ""


def _both(values: Mapping[str, str | None], ranks: Sequence[int] = (2, 3)) -> dict[int, Mapping[str, str | None]]:
    return {rank: dict(values) for rank in ranks}


def _all(shim: Shim, ranks: Sequence[int] = (0, 1, 2, 3)) -> dict[int, Shim]:
    return dict.fromkeys(ranks, shim)


SHORT = ("--timeout", "9")
FAULTS: dict[str, Fault] = {
    "another network's interface": Fault(
        "networks-differ", "eth9", environments=_both({"GLOO_SOCKET_IFNAME": "eth9"}), around=other_network),
    "a name on loopback": Fault(
        "address-loopback", "parallel-state-host-1", environments=_both({"GLOO_SOCKET_IFNAME": None})),
    "a bridge that each host has": Fault(
        "address-shared", "docker0", everywhere={"GLOO_SOCKET_IFNAME": "docker0"}, around=container_bridge),
    "an interface that isn't there": Fault(
        "interface-missing", "ib7", environments=_both({"GLOO_SOCKET_IFNAME": "ib7"})),
    "a taken port": Fault("port-taken", "another program", arguments=SHORT, around=stranger, with_port=True),
    "a stranger at the port": Fault("master-stranger", "isn't the store", arguments=SHORT, around=stranger,
                                    with_port=True),
    "the store's port is closed to one host": Fault(
        "rank-missing", "node 1 of 2", arguments=SHORT, around=lambda hosts, port: on_host(
            hosts, 1, f"ip rule add pref 5 to {hosts.addresses[0]} ipproto tcp dport {port} blackhole",
            "ip rule del pref 5"), with_port=True),
    "and that host says why": Fault(
        "master-unreachable", "can't connect to", arguments=SHORT, around=lambda hosts, port: on_host(
            hosts, 1, f"ip rule add pref 5 to {hosts.addresses[0]} ipproto tcp dport {port} prohibit",
            "ip rule del pref 5"), with_port=True),
    "the store's port is dropped": Fault(
        "master-silent", "no answer", arguments=SHORT, around=lambda hosts, port: filtered(
            hosts, 1, f"tcp dport {port} drop"), with_port=True),
    "a port that only root may have": Fault(
        "port-unusable", "Permission denied", arguments=SHORT, shims={0: another_user}, port=99),
    "high ports are closed": Fault(
        "link-blocked", "parallel-state-host-1", around=lambda hosts: on_host(
            hosts, 1, f"ip rule add pref 5 to {hosts.addresses[0]} ipproto tcp dport 30000-65000 blackhole",
            "ip rule del pref 5")),
    "high ports are closed one way": Fault(
        "link-blocked", "the other direction works",
        around=lambda hosts: filtered(hosts, 1, "tcp flags & (syn | ack) == syn tcp dport > 30000 drop")),
    "64 MB of shared memory": Fault("shm-small", "64 MiB", shared_memory="64m"),
    "no shared memory": Fault("shm-missing", "Read-only", around=lambda hosts: on_host(
        hosts, 1, "mount -o remount,ro /dev/shm", "mount -o remount,rw /dev/shm")),
    "full shared memory": Fault("shm-full", "parallel-state-host-1", around=lambda hosts: on_host(
        hosts, 1, "fallocate -l 950m /dev/shm/left_over", "rm /dev/shm/left_over")),
    "a link of a tenth": Fault(
        "link-slow", "parallel-state-host-1", placement=(0, 1, 2),
        around=lambda hosts: slow_links(hosts, 1, rate="60mbit")),
    "slow links everywhere": Fault(
        "network-slow", "parallel-state-host", around=lambda hosts: slow_links(hosts, 0, 1, rate="60mbit")),
    "a cgroup with 0.4 cores": Fault("cpu-quota", "0.4 cores", shims=_all(limited_by_cgroup, (2, 3)), around=quota),
    "a slow core": Fault("rank-slow", "rank 3", shims={3: slow_core}),
    "two ranks on one core": Fault("cores-shared", "core 0", shims=_all(first_core, (2, 3))),
    "another torch": Fault("version-torch", "2.9.1 on rank 3", shims={3: other_torch}),
    "another parallel_state": Fault("version-package", "0.1.0 on rank", shims={2: other_package}),
    "another compiled part": Fault("version-compiled", "0123456789abcdef", shims={2: other_compiled_part}),
    "no compiled part on one rank": Fault(
        "version-compiled", "missing",
        environments={3: {"PARALLEL_STATE_BUILD": "never", "XDG_CACHE_HOME": "/nowhere"}}),
    "another Python": Fault("version-python", "3.10", shims=_all(other_python, (2, 3))),
    "a clock an hour ahead": Fault(
        "clock-offset", "parallel-state-host-1 is 60 min", shims=_all(clock_an_hour_ahead, (2, 3))),
    "a missing rank": Fault("rank-missing", "parallel-state-host-1", arguments=SHORT, absent=(3,)),
    "a missing host": Fault("rank-missing", "node 1 of 2", arguments=SHORT, absent=(2, 3)),
    "rank 0 is missing": Fault("master-refused", "nobody listens", arguments=SHORT, absent=(0,)),
    "an extra rank": Fault(
        "rank-extra", "the world has 4 ranks", placement=(0, 0, 1, 1, 1), everywhere={"WORLD_SIZE": "4"}),
    "a rank twice": Fault("rank-twice", "2 processes are rank 2", arguments=SHORT, environments={3: {"RANK": "2"}}),
    "another world size on one host": Fault(
        "world-size-differs", "8 on ranks 2, 3", environments=_both({"WORLD_SIZE": "8"})),
    "few open files": Fault("files-low", "180 files", shims=_all(few_files)),
    "little locked memory": Fault("memlock-low", "16 KiB", shims=_all(little_locked_memory)),
    "another launcher's variables": Fault(
        "launchers-contradict", "Open MPI says rank 0 of 1",
        everywhere={"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}),
    "an agent that is gone": Fault(
        "master-refused", "agent", arguments=SHORT, everywhere={"TORCHELASTIC_USE_AGENT_STORE": "True"}),
    "half a launcher": Fault("environment", "WORLD_SIZE", arguments=SHORT, environments={1: {"WORLD_SIZE": None}}),
    "another job's SLURM variables": Fault(
        "host-not-in-job", "node[07-08]", everywhere={
            "RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[07-08]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, placement=(0, 1),
        environments={0: {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
                      1: {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}}),
    "MASTER_ADDR on loopback": Fault(
        "master-loopback", "127.0.0.1", arguments=SHORT, everywhere={"MASTER_ADDR": "127.0.0.1"}),
    "MASTER_ADDR of another host": Fault(
        "master-elsewhere", "doesn't lead to", arguments=SHORT, everywhere={"MASTER_ADDR": "10.77.0.2"}),
    "MASTER_ADDR without an address": Fault(
        "master-unresolved", "nobody.invalid", arguments=SHORT, everywhere={"MASTER_ADDR": "nobody.invalid"}),
    "a local rank twice": Fault("local-rank-twice", "local rank 0", environments={3: {"LOCAL_RANK": "0"}}),
    "a wrong LOCAL_WORLD_SIZE": Fault("local-size-wrong", "LOCAL_WORLD_SIZE there is 4",
                                      environments=_both({"LOCAL_WORLD_SIZE": "4"})),
    "another MTU": Fault("mtu-differs", "1400 on parallel-state-host-1", around=lambda hosts: on_host(
        hosts, 1, f"ip link set {INTERFACE} mtu 1400", f"ip link set {INTERFACE} mtu 1500")),
    "variables that differ": Fault("settings-differ", "NCCL_ALGO", environments=_both({"NCCL_ALGO": "Tree"})),
    "a setting that can't be read": Fault(
        "setting-wrong", "PARALLEL_STATE_HEARTBEAT_S", everywhere={"PARALLEL_STATE_HEARTBEAT_S": "soon"}),
    "a setting that nobody knows": Fault(
        "setting-unknown", "PARALLEL_STATE_TIMEOUT", everywhere={"PARALLEL_STATE_TIMEOUT": "60"}),
    "more threads than cores": Fault("threads-many", "torch has", everywhere={"OMP_NUM_THREADS": "16"}),
    "sizes that don't fit": Fault("layout", "3", arguments=("--tp", "3")),
    "a tensor-parallel group over hosts": Fault(
        "axis-across-hosts", "tp groups span hosts", placement=(0, 1, 0, 1), arguments=("--tp", "2")),
    "a rank that hangs": Fault("rank-lost", "rank 3", shims={3: hangs_after_arrival}, arguments=SHORT),
}  # fmt: skip


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with Hosts([Host(shared_memory="1g")] * 3) as hosts:
        yield hosts


def run_fault(fault: Fault, hosts: Hosts) -> Ended:
    port = fault.port or next(_PORTS)
    around = contextlib.nullcontext() if fault.around is None else fault.around(hosts, *[port] * fault.with_port)
    with around:
        return run_check(
            hosts, fault.placement, *fault.arguments, environments=fault.environments, everywhere=fault.everywhere,
            shims=fault.shims, absent=fault.absent, port=port,
        )  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_with_its_remedy(three: Hosts, name: str) -> None:
    fault = FAULTS[name]
    with contextlib.ExitStack() as stack:
        hosts = three
        if fault.shared_memory:
            hosts = stack.enter_context(Hosts([Host(), Host(shared_memory=fault.shared_memory)]))
        ended = run_fault(fault, hosts)
    found = ended.find(fault.code)
    assert found is not None and fault.named in " ".join(found["found"].split()), str(ended)
    assert len(found["fix"]) > 10
    worst = {"info": 0, "warning": 1, "error": 2}[found["severity"]]
    present = [code for code in ended.codes if code is not None]
    assert all(code >= 0 for code in present) and max(present) >= worst, str(ended)
    assert ended.seconds < 30


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 30
    assert f"makes {len(FAULTS) + 1} faults" in (ROOT / "docs" / "check.md").read_text(), (
        "docs/check.md must count all faults, lost packets included"
    )


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 2)])
def test_loss_is_named(three: Hosts, placement: tuple[int, ...]) -> None:
    if problem := missing("nftables"):
        pytest.skip(problem)
    three.lose(1, percent=2)
    try:
        ended = run_check(three, placement, port=next(_PORTS))
    finally:
        three.lose(1, percent=0)
    assert ended.find("link-loss") is not None, str(ended)


def test_no_false_alarm(three: Hosts) -> None:
    for _ in range(CLEAN_RUNS):
        ended = run_check(three, (0, 0, 1, 1), "--tp", "2", "--pp", "2", "--timeout", "30", port=next(_PORTS))
        assert ended.codes == [0, 0, 0, 0] and not ended.findings, str(ended)
        assert ended.seconds < 30
        kinds = {group["kind"]: group for group in ended.report["traffic"]["1"]["groups"]}
        assert {"world", "tp", "pp"} <= set(kinds) and all(
            group["checks"] and not group["wrong"] for group in kinds.values()
        )
