"""Rows 22, 23, 24, 49 of docs/failures.md: addresses at which the ranks can't meet or connect."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import parallel_state as ps
from tests import hosts
from tests.contract.attempts import LAUNCHER, Outcome, attempt, environment
from tests.contract.test_rendezvous import free_ports, held_port
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time

ROOT = Path(__file__).parents[2]
START_S = 3.0
DEADLINE_S = 60.0


def _name_is_loopback(entry: str, interface: str | None) -> tuple[Outcome, str]:
    names = Path("/dev/shm/hosts")
    if os.environ["LOCAL_RANK"] == "0" and not names.exists():
        names.write_text(f"127.0.0.1 localhost\n{entry}\n", encoding="utf-8")
        subprocess.run(["mount", "--bind", str(names), "/etc/hosts"], check=True, timeout=10)
    until = time.monotonic() + DEADLINE_S
    while entry not in Path("/etc/hosts").read_text(encoding="utf-8") and time.monotonic() < until:
        time.sleep(0.01)
    with environment(GLOO_SOCKET_IFNAME=interface, PARALLEL_STATE_START_TIMEOUT_S=str(DEADLINE_S / 2)):
        met = attempt(ps.init_distributed_environment, timeout=DEADLINE_S / 2)
        ps.destroy_distributed_environment()
    return met, socket.gethostname()


@pytest.mark.side_by_side
@pytest.mark.parametrize("placement", [[0, 0, 1, 1], [0, 1]])
def test_row_22_the_hosts_name_resolves_to_loopback(tmp_path: Path, placement: list[int]) -> None:
    problem = hosts.problem()
    if problem is not None:
        pytest.skip(f"two hosts can't be made: {problem}")
    with hosts.Hosts(2) as made, made.ranks(placement) as ranks:

        def trial(_: Path) -> float:
            results = ranks.run(_name_is_loopback, "127.0.1.1 parallel-state-host-0", None, timeout_s=DEADLINE_S)
            for told, _ in results:
                assert told.kind == "RendezvousError", told
                assert "parallel-state-host-0" in told.text
                assert "127.0.1.1" in told.text
                assert "announce a loopback address" in told.text
                assert "GLOO_SOCKET_IFNAME" in told.text
                assert told.suspect_ranks[0] == 0
            return max(told.seconds for told, _ in results)

        assert_in_time(trial, tmp_path)
        named = ranks.run(_name_is_loopback, "127.0.1.1 parallel-state-host-0", hosts.INTERFACE, timeout_s=DEADLINE_S)
        assert [met.kind for met, _ in named] == ["ok"] * len(placement), named


def _meet_at(address: str) -> Outcome:
    with environment(PARALLEL_STATE_START_TIMEOUT_S=str(START_S)):
        return attempt(ps.init_distributed_environment, 4, int(os.environ["RANK"]) or 1, f"tcp://{address}")


@pytest.mark.side_by_side
@pytest.mark.parametrize(
    ("address", "resolved", "why"),
    [
        ("localhost:{port}", "127.0.0.1", "refused"),
        ("192.0.2.1:{port}", "192.0.2.1", ""),  # nobody's, by RFC 5737: no answer, or no route
        ("no-such-host.invalid:{port}", "does not resolve", ""),
    ],
    ids=["dead", "unroutable", "unresolvable"],
)
def test_row_23_a_master_address_that_leads_nowhere(
    ranks: Ranks, tmp_path: Path, address: str, resolved: str, why: str
) -> None:
    def trial(_: Path) -> float:
        with held_port() as port:
            results = ranks.run(_meet_at, address.format(port=port), timeout_s=DEADLINE_S)
        for told in results:
            assert told.kind == "RendezvousError", told
            assert address.format(port=port) in told.text
            assert resolved in told.text
            assert why in told.text
            assert "MASTER_ADDR" in told.text
        return max(told.seconds for told in results)

    assert_in_time(trial, tmp_path, START_S + 1.0)


RANK_ZERO = """
import atexit, json, os, sys, time
import torch
import parallel_state as ps
from parallel_state.groups import world

def note(began_s):
    with open(f"{sys.argv[2]}/{number}.s", "w") as file:
        file.write(str(time.monotonic() - began_s))

places, outputs = json.loads(sys.argv[1]), []
for number, (address, port) in enumerate(places):  # forks: torch is imported once
    output = os.open(f"{sys.argv[2]}/{number}", os.O_RDWR | os.O_CREAT)
    pid = os.fork()
    if pid == 0:
        os.dup2(output, 2)
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        atexit.register(note, time.monotonic())
        ps.init_distributed_environment(backend="gloo")
        sys.exit()
    outputs.append(pid)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in outputs]))
"""


@contextmanager
def _silent_listener(made: hosts.Hosts, port: int) -> Iterator[None]:
    program = f"import socket; s = socket.create_server(('', {port})); print(flush=True); s.accept(); input()"
    enter = ["nsenter", "-t", str(made.pid(0)), "--net"]
    with subprocess.Popen(
        [*enter, sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as listener:  # fmt: skip
        try:
            assert listener.stdout is not None and listener.stdout.readline()
            yield
        finally:
            listener.kill()


@pytest.mark.side_by_side
def test_row_23_rank_zero_is_not_at_the_master_address(tmp_path: Path) -> None:
    problem = hosts.problem()
    if problem is not None:
        pytest.skip(f"two hosts can't be made: {problem}")
    port, taken = 20_000, 20_004
    variables = {
        **{name: value for name, value in os.environ.items() if name not in LAUNCHER},
        "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1",
        "PARALLEL_STATE_START_TIMEOUT_S": str(START_S),
    }  # fmt: skip

    def trial(folder: Path) -> float:
        with hosts.Hosts(2) as made, _silent_listener(made, taken):
            other = made.addresses[0]
            made.run_on(1, f"echo '{other} other-host' > /dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts")
            addresses = ["192.0.2.1", other, "other-host", other, "other-host"]
            places = list(zip(addresses, range(port, taken + 1), strict=True))
            enter = ["nsenter", "-t", str(made.pid(1)), "--net", "--uts", "--mount"]
            command = [*enter, sys.executable, "-c", RANK_ZERO, json.dumps(places), str(folder)]
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=2 * DEADLINE_S)
        codes = json.loads(done.stdout) if done.returncode == 0 else [done.stderr]
        took_s = [float(path.read_text()) for path in folder.glob("*.s")]
        for number, ((address, at), code) in enumerate(zip(places, codes, strict=True)):
            output = (folder / str(number)).read_text()
            told = f"{address}:{at}: {code}\n{output}"
            assert code == 1, told
            assert "terminate called" not in output, told
            last = output.strip().splitlines()[-1]
            assert "RendezvousError" in last, told
            assert f"{address}:{at}" in last, told
            assert "that address doesn't lead to its own host, parallel-state-host-1" in last, told
            assert "Set MASTER_ADDR" in last, told
            assert "MASTER_PORT" not in last, told
        assert len(took_s) == len(places)
        return statistics.median(took_s)

    assert_in_time(trial, tmp_path, START_S + 1.0)


def _nothing() -> None: ...


def test_row_24_the_launchers_port_is_in_use(tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        with held_port(listen=True) as port:
            began = time.monotonic()
            with pytest.raises(ps.RendezvousError, match=rf"can't listen on 127.0.0.1 port {port}: .*in use") as caught:
                ps.launch(_nothing, 4, master_port=port, timeout=DEADLINE_S)
        assert "a free port as master_port (0 for any)" in str(caught.value)
        return time.monotonic() - began

    assert_in_time(trial, tmp_path)


def _serve_at(port: int, start_s: float) -> tuple[Outcome, Outcome]:
    rank = int(os.environ["RANK"])
    with environment(PARALLEL_STATE_START_TIMEOUT_S=str(start_s)):
        met = attempt(ps.init_distributed_environment, 4, rank, f"tcp://127.0.0.1:{port}")
        works = attempt(lambda: ps.get_world_group().all_gather_object(rank))
        ps.destroy_distributed_environment()
    return met, works


@pytest.mark.side_by_side
def test_row_24_rank_zeros_port_is_in_use(ranks: Ranks, tmp_path: Path) -> None:
    with held_port(listen=True) as port:

        def trial(_: Path) -> float:
            results = ranks.run(_serve_at, port, START_S, timeout_s=DEADLINE_S)
            for rank, (told, _) in enumerate(results):
                assert told.kind == "RendezvousError", told
                assert f"127.0.0.1:{port}" in told.text
                assert rank > 0 or "that address is in use by another process; choose another MASTER_PORT" in told.text
            return max(told.seconds for told, _ in results)

        assert_in_time(trial, tmp_path, START_S + 1.0)
    for met, works in ranks.run(_serve_at, port, DEADLINE_S, timeout_s=DEADLINE_S):
        assert met.kind == "ok", met
        assert works.text == "[0, 1, 2, 3]"


CONNECT_S = 10.0


def _meet_with(started: str, ports: str | None, absent: int) -> Outcome | None:
    rank = int(os.environ["RANK"])
    if rank == absent:
        return None
    with environment(PARALLEL_STATE_PORTS=ports, PARALLEL_STATE_START_TIMEOUT_S=str(START_S)):
        Path(started, str(rank)).touch()
        met = attempt(ps.init_distributed_environment)
        ps.destroy_distributed_environment()
    return met


def test_a_rank_without_a_free_port_ends_the_start(ranks: Ranks, tmp_path: Path) -> None:
    with free_ports(3) as ports:
        results = ranks.survivors(_meet_with, str(tmp_path), ports, -1, timeout_s=DEADLINE_S)
    (suspect,) = {told.suspect_ranks for told in results.values()}
    assert len(results) == 4 and len(suspect) == 1
    for told in results.values():
        assert told.kind == "RendezvousError" and told.seconds < START_S, told
        assert f"control plane of rank {suspect[0]} on host {socket.gethostname()} " in told.text, told
        assert f"ports {ports} (PARALLEL_STATE_PORTS)" in told.text and "Give a larger range" in told.text, told


def test_rank_0_is_stopped_while_others_are_awaited(ranks: Ranks, tmp_path: Path) -> None:
    ranks.begin(_meet_with, str(tmp_path), None, 3)
    until = time.monotonic() + DEADLINE_S
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(1.0)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    try:
        time.sleep(START_S + 2.0)
    finally:
        os.kill(ranks.pids[0], signal.SIGCONT)
    results = ranks.finish(DEADLINE_S)
    for told in (results[1], results[2]):
        assert told.kind == "RendezvousError" and told.suspect_ranks == (0,), told
        assert "rank 0 serves the world's store, but does not answer" in told.text, told
        assert "stopped by a signal (SIGSTOP" in told.text and told.seconds < START_S + 2.5, told


def _start(interface: str | None) -> Outcome:
    with environment(GLOO_SOCKET_IFNAME=interface, PARALLEL_STATE_START_TIMEOUT_S=str(CONNECT_S)):
        told = attempt(ps.init_distributed_environment)
        ps.destroy_distributed_environment()
    return told


def _own_name(address: str, host: int) -> str:
    return (
        f"ip link add docker0 type bridge && ip addr add {address}/24 dev docker0 && ip link set docker0 up && "
        f"printf '127.0.0.1 localhost\\n{address} parallel-state-host-{host}\\n' > /dev/shm/hosts && "
        "mount --bind /dev/shm/hosts /etc/hosts"
    )


def _firewall(port: str) -> str:
    """Returns a command that drops TCP of all ports except `port`, by routing rules. Some kernels have no filters."""
    return " && ".join(
        f"ip rule {rule}"
        for rule in (
            "add pref 100 lookup local", "add pref 1 iif lo lookup local", "del pref 0",
            f"add pref 2 iif {hosts.INTERFACE} ipproto tcp dport {port} lookup local",
            f"add pref 3 iif {hosts.INTERFACE} ipproto tcp sport {port} lookup local",
            f"add pref 4 iif {hosts.INTERFACE} ipproto tcp blackhole",
        )
    )  # fmt: skip


@pytest.mark.side_by_side
@pytest.mark.parametrize("obstacle", ["one address", "unconnected networks", "refused", "firewall"])
def test_row_49_hosts_that_gloo_can_not_connect(obstacle: str) -> None:
    problem = hosts.problem()
    if problem is not None:
        pytest.skip(f"two hosts can't be made: {problem}")
    with hosts.Hosts(2) as made, made.ranks([0, 0, 1, 1]) as ranks:
        interface, addresses = None, ["172.17.0.1", "172.17.0.1"]
        if obstacle == "unconnected networks":
            addresses = ["192.168.0.1", "192.168.1.1"]
        if obstacle == "refused":
            addresses = ["172.17.0.1", "172.17.0.2"]
        if obstacle == "firewall":
            interface, addresses = hosts.INTERFACE, made.addresses
        for host in range(2):
            port = ranks._environment(0)["MASTER_PORT"]
            made.run_on(host, _firewall(port) if interface else _own_name(addresses[host], host))
            if obstacle == "refused":
                made.run_on(host, f"ip addr add {addresses[1 - host]}/24 dev docker0")
        for told in ranks.run(_start, interface, timeout_s=DEADLINE_S):
            assert told.kind == "RendezvousError", told
            assert told.seconds < CONNECT_S, told
            assert set(told.suspect_ranks) in ({0, 1}, {2, 3}, {0, 1, 2, 3}), told
            assert "GLOO_SOCKET_IFNAME" in told.text
            assert "gloo/transport" not in told.text
            for host in range(2):
                assert f"host parallel-state-host-{host}" in told.text, told
                assert addresses[host] in told.text, told
            assert f"interface {interface or 'docker0'}" in told.text, told
            if obstacle == "firewall":
                assert f":{port} " in told.text and "allow that store's port, but not" in told.text, told
                assert "PARALLEL_STATE_PORTS (unset: any port)" in told.text, told
