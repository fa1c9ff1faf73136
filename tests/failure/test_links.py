"""Rows 18 to 21 of docs/failures.md: the network between two hosts fails, in whole or in part, for good or
for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.base import errors
from tests.contract.attempts import Outcome, attempt
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, some
from tests.helpers.host_faults import when_connecting
from tests.hosts import INTERFACE, Host, HostRanks, Hosts, HostsFailedError, problem

pytestmark = pytest.mark.side_by_side
BEAT_S, LIMIT_S = 0.2, 2.0
SLOW_LIMIT_S = 4.0
"""Exceeds a beat's round trip through two full queues of 96 KiB at 1 Mbit/s."""
TWO_EACH, ONE_EACH = (0, 0, 1, 1), (0, 1)
TIMEOUT_S = "30"


def _two_hosts() -> Hosts:
    reason = problem()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    return Hosts(2)


def _ranks(
    hosts: Hosts, placement: tuple[int, ...], limit_s: float = LIMIT_S, environment: Mapping[str, str] | None = None
) -> HostRanks:
    return hosts.ranks(
        placement,
        **(environment or {}),
        PARALLEL_STATE_TIMEOUT_S=TIMEOUT_S,
        PARALLEL_STATE_HEARTBEAT_S=str(BEAT_S),
        PARALLEL_STATE_HEARTBEAT_LIMIT_S=str(limit_s),
    )


def _shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True, timeout=10)


def _cut(command: str, who: int, kind: str) -> tuple[list[Outcome], float]:
    ps.init_distributed_environment()
    group = ps.get_world_group()
    time.sleep(3 * BEAT_S)
    window, far = group.window([1 << 20]), (group.rank + group.world_size // 2) % group.world_size
    outcomes = [attempt(group.all_reduce, torch.ones(10)) for _ in range(3)]
    if group.rank == who:
        _shell(command)
    calls = {
        "all_reduce": lambda: group.all_reduce(torch.ones(10)),
        "recv": lambda: group.recv((3,), torch.float32, far),
        "wait_signal": lambda: window.wait_signal(far),
        "put": lambda: window.put(torch.ones(1 << 20), far),
        "broadcast_object": lambda: group.broadcast_object({"a": 1}, group.world_size - 1),
    }
    started = time.monotonic()
    outcome = attempt(calls[kind])
    while outcome.kind == "ok" and time.monotonic() < started + DEADLINE_S / 2:  # a sender alone doesn't wait
        outcome = attempt(calls[kind])
    outcomes.append(outcome._replace(seconds=time.monotonic() - started))
    outcomes.append(attempt(group.all_reduce, torch.ones(10)))
    left = time.monotonic()
    ps.destroy_distributed_environment()
    return outcomes, time.monotonic() - left


def _check(results: dict[int, tuple[list[Outcome], float]], placement: tuple[int, ...]) -> float:
    assert sorted(results) == list(range(len(placement)))
    for rank, (outcomes, _) in results.items():
        *good, bad, again = outcomes
        others = {each for each, host in enumerate(placement) if host != placement[rank]}
        assert [outcome.kind for outcome in good] == ["ok"] * 3
        assert issubclass(getattr(errors, bad.kind), (ps.CollectiveTimeoutError, ps.PeerDiedError)), f"{rank}: {bad}"
        assert bad.suspect_ranks and set(bad.suspect_ranks) <= others, f"rank {rank}: {bad}"
        assert again.kind == "GroupFailedError", f"rank {rank}: {again}"
    return max(max(outcomes[3].seconds, leaving_s) for outcomes, leaving_s in results.values())


@pytest.mark.parametrize(
    ("placement", "kind"),
    some(
        [
            (TWO_EACH, "all_reduce"), (ONE_EACH, "recv"), (TWO_EACH, "broadcast_object"),
            (TWO_EACH, "wait_signal"), (ONE_EACH, "all_reduce"), (TWO_EACH, "recv"), (ONE_EACH, "broadcast_object"),
            (ONE_EACH, "put"),
        ],
        4,
    ),
    ids=str,
)  # fmt: skip
def test_row_18_the_link_goes_down(tmp_path: Path, placement: tuple[int, ...], kind: str) -> None:
    def trial(_: Path) -> float:
        with _two_hosts() as two, _ranks(two, placement) as ranks:
            command = f"ip link set {INTERFACE} down"
            results = ranks.survivors(_cut, command, placement.index(1), kind, timeout_s=DEADLINE_S)
        for rank, (outcomes, _) in results.items():
            bad = outcomes[3]
            assert issubclass(getattr(errors, bad.kind), ps.CollectiveTimeoutError), f"rank {rank}: {bad}"
            if rank == placement.index(placement[rank]):
                assert f"parallel-state-host-{1 - placement[rank]}" in bad.text or "its host" in bad.text, bad
        return _check(results, placement)

    assert_in_time(trial, tmp_path, LIMIT_S + 1.0)


def _one_interface_goes_down(command: str) -> tuple[Outcome, Outcome]:
    ps.init_distributed_environment()
    group = ps.get_world_group()
    time.sleep(3 * BEAT_S)
    x = torch.ones(1 << 20)
    good = attempt(lambda: group.all_reduce(x).sum().item())
    if group.rank == 2:
        _shell(command)
    started = time.monotonic()
    told = attempt(group.all_reduce, x)
    while told.kind == "ok" and time.monotonic() < started + DEADLINE_S / 2:
        told = attempt(group.all_reduce, x)
    told = told._replace(seconds=time.monotonic() - started)
    ps.destroy_distributed_environment()
    return good, told


def test_one_of_two_interfaces_goes_down(tmp_path: Path) -> None:
    """Heartbeats continue on the other interface, the store's. TCP's acknowledgments of the data stop."""
    names = {"GLOO_SOCKET_IFNAME": "eth0,eth1", "PARALLEL_STATE_CONNECTIONS": "2"}

    def trial(_: Path) -> float:
        with _two_hosts() as two:
            for host in (0, 1):
                address = f"ip addr add 10.88.0.{host + 1}/24 dev eth1 && ip link set eth1 up"
                try:
                    two.run_on(host, f"ip link add link eth0 name eth1 type macvlan mode bridge && {address}")
                except HostsFailedError as error:
                    pytest.skip(f"no second interface can be made here: {error}")
            with _ranks(two, TWO_EACH, environment=names) as ranks:
                results = ranks.survivors(_one_interface_goes_down, "ip link set eth1 down", timeout_s=DEADLINE_S)
        assert sorted(results) == [0, 1, 2, 3]
        for rank, (good, told) in results.items():
            assert good.kind == "ok", (rank, good)
            assert told.kind == "HostUnreachableError", (rank, told)
            others = {2, 3} if rank < 2 else {0, 1}
            assert told.suspect_ranks and set(told.suspect_ranks) <= others, (rank, told)
        return max(told.seconds for _, told in results.values())

    assert_in_time(trial, tmp_path, LIMIT_S + 1.0)


@pytest.mark.parametrize(
    ("placement", "deaf"), some([(TWO_EACH, 0), (ONE_EACH, 1), (TWO_EACH, 1), (ONE_EACH, 0)], 2), ids=str
)
def test_row_21_one_direction_is_dead(tmp_path: Path, placement: tuple[int, ...], deaf: int) -> None:
    # The smallest bucket accepts no packet from the host that becomes inaudible.
    command = f"tc qdisc add dev {INTERFACE} root tbf rate 8bit burst 1 latency 1ms"

    def trial(_: Path) -> float:
        with _two_hosts() as two, _ranks(two, placement) as ranks:
            results = ranks.survivors(_cut, command, placement.index(1 - deaf), "all_reduce", timeout_s=DEADLINE_S)
        return _check(results, placement)

    assert_in_time(trial, tmp_path, LIMIT_S + 1.0)


def _vanish_while_connecting(folder: str, who: int, command: str, of_world: bool) -> tuple[Outcome, float]:
    def vanish() -> None:
        if int(os.environ["RANK"]) == who:
            Path(folder, "vanished").write_text(str(time.time()), encoding="utf-8")
            _shell(command.format(pid=os.getpid()))

    if not of_world:
        ps.init_distributed_environment()
        time.sleep(3 * BEAT_S)
    try:
        with when_connecting(vanish):
            told = attempt(ps.init_distributed_environment) if of_world else attempt(ps.initialize_model_parallel, 2, 2)
        return told, time.time() - float(Path(folder, "vanished").read_text(encoding="utf-8"))
    finally:
        ps.destroy_distributed_environment()


@pytest.mark.parametrize("who", some([0, 2, 3, 1], 2))
@pytest.mark.parametrize(
    ("command", "of_world", "bound_s"),
    [
        ("kill -9 {pid}", True, 1.0),
        ("kill -9 {pid}", False, 1.0),
        (f"ip link set {INTERFACE} down", False, LIMIT_S + 1.0),
    ],
    ids=["killed in the world's start", "killed in the groups'", "the link goes down in the groups'"],
)
def test_who_vanishes_while_a_group_is_connected(
    tmp_path: Path, who: int, command: str, of_world: bool, bound_s: float
) -> None:
    is_kill = command.startswith("kill")

    def trial(folder: Path) -> float:
        with _two_hosts() as two, _ranks(two, TWO_EACH) as ranks:
            results = ranks.survivors(
                _vanish_while_connecting, str(folder), who, command, of_world, timeout_s=DEADLINE_S
            )
        assert sorted(results) == [rank for rank in range(4) if rank != who or not is_kill]
        for rank, (told, _) in results.items():
            where = f"rank {rank}: {told}"
            if is_kill:
                assert told.kind == "PeerDiedError" and told.suspect_ranks == (who,), where
            else:
                assert issubclass(getattr(errors, told.kind), ps.CommunicationError), where
                assert told.suspect_ranks and set(told.suspect_ranks) <= ({2, 3} if rank < 2 else {0, 1}), where
        return max(told_s for _, told_s in results.values())

    assert_in_time(trial, tmp_path, bound_s)


@pytest.mark.parametrize("who", [0, 1])
def test_the_only_rank_of_a_host_is_killed_in_the_start(tmp_path: Path, who: int) -> None:
    def trial(folder: Path) -> float:
        if problem() is not None:
            pytest.skip(f"no hosts can be made here: {problem()}")
        with Hosts([Host(own_pids=True)] * 2) as two, _ranks(two, ONE_EACH) as ranks:
            results = ranks.survivors(
                _vanish_while_connecting, str(folder), who, "kill -9 {pid}", True, timeout_s=DEADLINE_S
            )
        (told, told_s) = results[1 - who]
        assert told.kind == "PeerDiedError" and told.suspect_ranks == (who,), told
        return told_s

    assert_in_time(trial, tmp_path)


def _through_a_pause(seconds: float, first_on_host_1: int) -> list[float]:
    ps.init_distributed_environment()
    group = ps.get_world_group()
    found = [group.all_reduce(torch.ones(10)).sum().item()]
    if group.rank == first_on_host_1:
        _shell(f"ip link set {INTERFACE} down; sleep {seconds}; ip link set {INTERFACE} up")
    found.append(group.all_reduce(torch.ones(10)).sum().item())
    time.sleep(LIMIT_S + 2 * BEAT_S)
    found.append(group.all_reduce(torch.ones(10)).sum().item())
    ps.destroy_distributed_environment()
    return found


@pytest.mark.parametrize("placement", some([TWO_EACH, ONE_EACH], 1), ids=str)
def test_row_19_a_partition_that_heals_in_time(placement: tuple[int, ...]) -> None:
    with _two_hosts() as two, _ranks(two, placement) as ranks:
        results = ranks.survivors(_through_a_pause, LIMIT_S / 4, placement.index(1), timeout_s=DEADLINE_S)
    assert results == dict.fromkeys(range(len(placement)), [10.0 * len(placement)] * 3)


def _slowly(count: int) -> tuple[list[float], float]:
    ps.init_distributed_environment()
    group = ps.get_world_group()
    group.barrier()
    started = time.monotonic()
    found = [group.all_reduce(torch.full((count,), float(number))).mean().item() for number in range(2)]
    took_s = time.monotonic() - started
    ps.destroy_distributed_environment()
    return found, took_s


def _leave(folder: str, call: str, who: int, pause_s: float | None, ends: bool) -> tuple[Outcome, float]:
    """Rank `who` leaves the world while its host's link is down. The link is down for `pause_s` seconds: 0 is for ever,
    and with None it stays up. `ends`: the process of `who` exits, too. No survivor leaves before all have an error.
    """
    ps.init_distributed_environment()
    group = ps.get_world_group()
    group.barrier()
    time.sleep(3 * BEAT_S)
    told, left_by = Outcome("ok", "", 0.0), time.monotonic() + DEADLINE_S / 2
    if group.rank != who:
        told = attempt(group.all_reduce, torch.ones(3)) if call == "all_reduce" else attempt(group.recv_object, who)
        Path(folder, str(group.rank)).touch()
        while len(os.listdir(folder)) < group.world_size - 1 and time.monotonic() < left_by:
            time.sleep(0.01)
    elif pause_s is not None:
        _shell(f"ip link set {INTERFACE} down")
        if pause_s:
            subprocess.Popen(f"sleep {pause_s}; ip link set {INTERFACE} up", shell=True)
    left = time.monotonic()
    ps.destroy_distributed_environment()
    if group.rank == who and ends:
        os._exit(0)
    return told, time.monotonic() - left


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it lives"])
@pytest.mark.parametrize(
    ("placement", "call", "who", "pause_s"),
    some(
        [
            (TWO_EACH, "all_reduce", 2, 0.0), (TWO_EACH, "all_reduce", 3, LIMIT_S / 4),
            (TWO_EACH, "all_reduce", 3, None), (ONE_EACH, "recv_object", 1, LIMIT_S / 4),
            (TWO_EACH, "recv_object", 2, LIMIT_S / 4),
            (ONE_EACH, "all_reduce", 1, 0.0), (TWO_EACH, "recv_object", 3, 0.0), (TWO_EACH, "all_reduce", 0, 0.0),
            (ONE_EACH, "all_reduce", 0, LIMIT_S / 4),
        ],
        4,
    ),
    ids=str,
)  # fmt: skip
def test_a_rank_leaves_while_the_link_is_down(
    tmp_path: Path, placement: tuple[int, ...], call: str, who: int, pause_s: float | None, ends: bool
) -> None:
    """Ranks of its host report at once that it left, other hosts once the link is up. If it stays down, these report
    that its host is silent."""

    def trial(folder: Path) -> float:
        with _two_hosts() as two, _ranks(two, placement) as ranks:
            results = ranks.survivors(_leave, str(folder), call, who, pause_s, ends, timeout_s=DEADLINE_S)
        assert sorted(results) == [rank for rank in range(len(placement)) if rank != who or not ends]
        for rank, (told, leaving_s) in results.items():
            where = f"rank {rank}: {told}, left in {leaving_s:.1f} s"
            if rank == who:
                continue
            if placement[rank] == placement[who] or pause_s != 0.0:
                assert told.kind == "PeerDiedError", where
                assert told.suspect_ranks == (who,) and f"lobal rank {who} has left" in told.text, where
            else:
                far = {each for each, host in enumerate(placement) if host == placement[who]}
                assert issubclass(getattr(errors, told.kind), ps.CollectiveTimeoutError), where
                assert told.suspect_ranks and set(told.suspect_ranks) <= far, where
        return max(max(told.seconds, leaving_s) for told, leaving_s in results.values())

    assert_in_time(trial, tmp_path, LIMIT_S + 1.0)


@pytest.mark.parametrize("placement", some([ONE_EACH, TWO_EACH], 1), ids=str)
def test_row_20_a_slow_link_is_no_death(placement: tuple[int, ...]) -> None:
    """1 Mbit/s, for longer than the heartbeat limit. Beats share the link."""
    with _two_hosts() as two, _ranks(two, placement, SLOW_LIMIT_S) as ranks:
        for host in (0, 1):
            two.limit(host, "1mbit", "96kb")
        results = ranks.survivors(_slowly, 100_000, timeout_s=DEADLINE_S)
    assert len(results) == len(placement)
    for found, took_s in results.values():
        assert found == [0.0, float(len(placement))]
        assert took_s > SLOW_LIMIT_S


def _in_a_joined_group(folder: str, victim: int) -> tuple[Outcome, float]:
    dist.init_process_group("gloo")
    ps.init_distributed_environment(timeout=DEADLINE_S)
    group = ps.get_world_group()
    group.barrier()
    if group.rank == victim:
        Path(folder, "killed").write_text(repr(time.time()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    told = attempt(group.barrier)
    told_s = time.time() - float(Path(folder, "killed").read_text(encoding="utf-8"))
    ps.destroy_distributed_environment()
    return told, told_s


def test_a_rank_that_joined_over_hosts_is_killed(tmp_path: Path) -> None:
    def trial(folder: Path) -> float:
        with _two_hosts() as two, _ranks(two, TWO_EACH) as ranks:
            results = ranks.survivors(_in_a_joined_group, str(folder), 3, timeout_s=DEADLINE_S)
        assert sorted(results) == [0, 1, 2]
        for rank, (told, _) in results.items():
            assert told.kind == "PeerDiedError" and told.suspect_ranks == (3,), (rank, told)
        return max(told_s for _, told_s in results.values())

    assert_in_time(trial, tmp_path)
