"""Simulates hosts on one machine, for tests and benchmarks. Ranks on different hosts communicate over a network.

    with Hosts(2) as hosts:                                       # or Hosts([Host(), Host(own_pids=True)])
        with hosts.ranks([0, 0, 1, 1]) as ranks:                  # rank r is on host placement[r]
            results = ranks.run(function, argument, tp=2, pp=2)   # each rank's return value, as of any pool
            hosts.link(1, up=False)
            ...

A host is a network namespace with one interface, a UTS namespace with its own name, and a mount namespace with an empty
/dev/shm. It can also have its own PID namespace and monotonic clock. A bridge in another namespace connects the hosts,
separately for each test run. Each namespace lives as long as a process that reads a pipe of this process, so the kernel
removes all namespaces even after SIGKILL. Needs root, `ip` and `tc` (Debian: iproute2), `unshare` and `nsenter`
(util-linux); `problem()` returns what is missing.

Ranks are forks of the tests' fork server that enter a host's namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.workers import WorkerPool, serve

_FIRST_PORT = 20_000
"""Port of the first pool's store on rank 0's host. Each pool adds 1; outgoing connections use higher ports."""

INTERFACE = "eth0"
_DEADLINE_S = 20.0
_NAMESPACES = ("net", "uts", "ipc", "pid_for_children", "time_for_children", "mnt")
"""Namespaces in the order of entering. The mount namespace is last, because it hides the files of the others."""
CLOCK_STEP_S = 1000 if os.path.exists("/proc/self/ns/time") else 0
"""Each host with its own PIDs has a monotonic clock this many seconds ahead of the previous such host's."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Host:
    network_of: int | None = None
    """Index of a host to share the network with. The two hosts have the same address, but separate memory."""
    memory_of: int | None = None
    """Index of a host to share /dev/shm and files with. The two hosts have different addresses and names."""
    own_pids: bool = False
    shared_memory: str = "1g"
    cpus: tuple[int, ...] = ()


@functools.cache
def problem() -> str | None:
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts(1):
            return None
    except HostsFailedError as error:
        return str(error)


def cores_of_each(hosts: int) -> list[tuple[int, ...]]:
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // hosts
    return [tuple(cores[host * share : (host + 1) * share] if share else cores) for host in range(hosts)]


class HostsFailedError(RuntimeError):
    pass


class Hosts:
    def __init__(self, hosts: int | Sequence[Host]) -> None:
        self.hosts = [Host()] * hosts if isinstance(hosts, int) else list(hosts)
        self.addresses: list[str] = []
        self._pools: list[HostRanks] = []
        self._ports = itertools.count(_FIRST_PORT)
        self._holders: list[subprocess.Popen[bytes]] = []
        self._switch = 0

    def __enter__(self) -> Hosts:
        try:
            self._switch = self._hold(
                "--net", script="ip link add br0 type bridge forward_delay 0 && ip link set br0 up"
            )
            for index, host in enumerate(self.hosts):
                self._add(index, host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for pool in self._pools:
            pool.kill()
        for holder in self._holders:
            if holder.stdin is not None:
                holder.stdin.close()
        for holder in self._holders:
            try:
                holder.wait(_DEADLINE_S)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()
        self._pools, self._holders = [], []

    def _add(self, index: int, host: Host) -> None:
        options, steps = ["--uts", "--ipc"], [f"hostname parallel-state-host-{index}"]
        if CLOCK_STEP_S and host.own_pids:
            ahead_s = str(index * CLOCK_STEP_S)
            options += ["--time", "--monotonic", ahead_s, "--boottime", ahead_s]
        enter: list[str] = []
        if host.network_of is None:
            options.append("--net")
        else:
            enter += [f"--net=/proc/{self.pid(host.network_of)}/ns/net"]
        if host.memory_of is None:
            options.append("--mount")
            steps.append(f"mount -t tmpfs -o mode=1777,size={host.shared_memory} tmpfs /dev/shm")
        else:
            enter += [f"--mount=/proc/{self.pid(host.memory_of)}/ns/mnt"]
        if host.own_pids:
            options += ["--pid", "--fork", "--kill-child", *(["--mount-proc"] if host.memory_of is None else [])]
        pid = self._hold(*options, script=" && ".join(steps), enter=enter)
        if host.network_of is not None:
            self.addresses.append(self.addresses[host.network_of])
            return
        address = f"10.77.{index // 250}.{index % 250 + 1}"
        self._in_network(self._switch, f"ip link add h{index} type veth peer name {INTERFACE} netns {pid}")
        self._in_network(self._switch, f"ip link set h{index} master br0 up")
        # Without an IPv6 address, a transport has exactly one address to choose.
        self._in_network(pid, f"ip link set {INTERFACE} addrgenmode none && ip addr add {address}/16 dev {INTERFACE}")
        self._in_network(pid, f"ip link set {INTERFACE} up && ip link set lo up")
        self.addresses.append(address)

    def _hold(self, *options: str, script: str, enter: Sequence[str] = ()) -> int:
        """Makes namespaces. Returns the PID of the process that holds them until the pipe to this process closes."""
        command = ["nsenter", *enter] if enter else []
        command += ["unshare", *options, "sh", "-c", f"{script} && echo ready && exec cat"]
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
        )  # fmt: skip
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        answered, _, _ = select.select([holder.stdout], [], [], _DEADLINE_S)
        if not answered or holder.stdout.readline() != b"ready\n":
            holder.kill()
            raise HostsFailedError(f"{' '.join(command)}: {holder.stderr.read().decode().strip() or 'no answer'}")
        return holder.pid

    def _in_network(self, pid: int, script: str) -> str:
        return _run(["nsenter", "-t", str(pid), "--net", "sh", "-c", script])

    def pid(self, host: int) -> int:
        return self._holders[1 + host].pid

    def run_on(self, host: int, command: str) -> str:
        return _run(["nsenter", "-t", str(self.pid(host)), "--net", "--uts", "--mount", "sh", "-c", command])

    def link(self, host: int, up: bool) -> None:
        """Connects or disconnects a host at the switch. The host's own interface stays up."""
        state = "up" if up else "down"
        self._in_network(self._switch, f"ip link set h{self._port(host)} {state}")

    def limit(self, host: int, rate: str | None, queue: str = "256kb") -> None:
        """Limits a host's sending rate (`1gbit`, `1mbit`), with a send queue of this size. None removes the limit."""
        script = f"tc qdisc del dev {INTERFACE} root 2>/dev/null || true"
        if rate is not None:
            # A burst holds the kernel's largest packet, 64 KiB.
            script = f"tc qdisc replace dev {INTERFACE} root tbf rate {rate} burst 128kb limit {queue}"
        self.run_on(host, script)

    def lose(self, host: int, percent: int) -> None:
        """Drops this percentage of the packets that the host sends. Needs nftables."""
        script = "nft delete table bridge loss 2>/dev/null || true"
        if percent:
            rule = f"iifname h{self._port(host)} numgen random mod 100 < {percent} drop"
            hook = "'{ type filter hook forward priority 0; }'"
            script = f"nft add table bridge loss && nft add chain bridge loss forward {hook}"
            script += f" && nft add rule bridge loss forward '{rule}'"
        self._in_network(self._switch, script)

    def sent_bytes(self, host: int) -> int:
        return self.sent(host)[0]

    def sent(self, host: int) -> tuple[int, int]:
        (link,) = json.loads(self._in_network(self._switch, f"ip -s -j link show dev h{self._port(host)}"))
        return int(link["stats64"]["rx"]["bytes"]), int(link["stats64"]["rx"]["packets"])

    def _port(self, host: int) -> int:
        shared = self.hosts[host].network_of
        return host if shared is None else self._port(shared)

    def ranks(self, placement: Sequence[int], **environment: str) -> HostRanks:
        pool = HostRanks(self, placement, {"MASTER_PORT": str(next(self._ports)), **environment})
        self._pools.append(pool)
        return pool


class HostRanks(WorkerPool):
    def __init__(self, hosts: Hosts, placement: Sequence[int], environment: dict[str, str]) -> None:
        super().__init__(len(placement))
        self.placement = tuple(placement)
        self._hosts = hosts
        self._variables = environment

    def __enter__(self) -> HostRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kills the ranks, then, in a PID namespace, the outer process that waits for them. So no zombies remain."""
        for process, host in zip(self._processes, self.placement, strict=False):
            if self._hosts.hosts[host].own_pids:
                for child in _children(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                    process.join(_DEADLINE_S)
        super().kill()

    def _serve_store(self) -> None:
        pass

    def _environment(self, rank: int) -> dict[str, str]:
        host = self.placement[rank]
        return {
            **super()._environment(rank),
            "LOCAL_RANK": str(self.placement[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(self.placement.count(host)),
            "MASTER_ADDR": self._hosts.addresses[self.placement[0]],
            "TORCHELASTIC_USE_AGENT_STORE": "",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            **self._variables,
        }

    def _target(self, rank: int) -> tuple[Any, tuple[Any, ...]]:
        host = self.placement[rank]
        return _serve_on_host, (self._hosts.pid(host), self._hosts.hosts[host])


def _serve_on_host(host_pid: int, host: Host, connection: Connection, environment: dict[str, str]) -> None:
    _end_with_parent()
    enter(host_pid)
    if host.cpus:
        os.sched_setaffinity(0, host.cpus)
    if host.own_pids:
        # Only children are in the PID namespace. This process stays outside and exits like its child.
        child = os.fork()
        if child:
            connection.close()
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        _end_with_parent()
    serve(connection, environment)
    os._exit(0)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def enter(pid: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    with contextlib.ExitStack() as stack:
        there = (path for name in _NAMESPACES if os.path.exists(path := f"/proc/{pid}/ns/{name}"))
        files = [stack.enter_context(open(path, encoding="utf-8")) for path in there]
        for file in files:
            if library.setns(file.fileno(), 0) != 0:
                error = ctypes.get_errno()
                raise OSError(error, f"{file.name}: {os.strerror(error)}")
    os.chdir(folder)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise HostsFailedError(f"{' '.join(command)}: not done within {_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        raise HostsFailedError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
