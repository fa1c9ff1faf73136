"""Groups over several hosts, which are namespaces of this machine."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallel_state as ps
from device_communicators.cpu import native
from tests.contract.attempts import Outcome, attempt, world
from tests.contract.test_objects import own_group
from tests.extent import LONG
from tests.helpers.host_faults import (
    as_without_descriptors,
    connections_of,
    is_meshed,
    moved_bytes,
    sent_bytes,
    when_moved,
)
from tests.hosts import Host, HostRanks, Hosts, HostsFailedError, problem
from tests.programs import FORK_SERVERS, Program

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no shared-memory library: {error}", allow_module_level=True)

OnHosts = Callable[[Sequence[int]], HostRanks]
PLACEMENTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 1, 2, 1), (0, 1), (0, 1, 2), (0, 1, 2, 0, 1, 2)]
TIMEOUT_S = 3.0
SOON_S = 3.0
DEADLINE_S = 60.0


def _world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def _carrier(group: ps.GroupCoordinator) -> str:
    return group.route.communicators[0].name if group.route.communicators else ""


def _inputs(count: int, dtype: torch.dtype, size: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + count)
    return [torch.randn(count, generator=generator).to(dtype) for _ in range(size)]


def _total(inputs: Sequence[Tensor], placement: Sequence[int]) -> Tensor:
    """Adds within each host in rank order, then across hosts in order of their first ranks; rounds once."""
    wide = torch.float32 if inputs[0].itemsize < 4 else inputs[0].dtype
    hosts: dict[int, Tensor] = {}
    for x, host in zip(inputs, placement, strict=True):
        hosts[host] = hosts[host] + x.to(wide) if host in hosts else x.to(wide)
    first, *others = hosts.values()
    return sum(others, first).to(inputs[0].dtype)


SUMMED = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1000, 100_000, 2_300_001)


def _bits(placement: Sequence[int], cases: Sequence[tuple[torch.dtype, int]]) -> str:
    group = ps.get_tp_group()
    size, rank = group.world_size, group.rank_in_group
    for dtype, count in cases:
        inputs = _inputs(count, dtype, size)
        total = _total(inputs, placement)
        assert torch.equal(group.all_reduce(inputs[rank]), total), (dtype, count)
        assert torch.equal(group.all_reduce_(inputs[rank].clone()), total), (dtype, count)
        rows = count // size
        found = group.reduce_scatter(inputs[rank][: rows * size])
        assert torch.equal(found, total[rank * rows : (rank + 1) * rows]), (dtype, count)
    return _carrier(group)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_sums_go_over_hosts_in_order_and_are_rounded_once(on_hosts: OnHosts, placement: tuple[int, ...]) -> None:
    turn = PLACEMENTS.index(placement)
    of_short_runs = [(SUMMED[(at + turn) % len(SUMMED)], count) for at, count in enumerate(COUNTS)]
    cases = list(itertools.product(SUMMED, COUNTS)) if LONG else of_short_runs
    found = on_hosts(placement).run(_bits, placement, cases, tp=len(placement))
    assert found == ["hierarchical"] * len(placement)


def _mixed(seed: int, calls: int) -> None:
    group = ps.get_tp_group()
    size, rank = group.world_size, group.rank_in_group
    draw, own = random.Random(seed), random.Random(seed * 64 + rank)
    for number in range(calls):
        kind = draw.choice(("all_reduce", "all_gather", "broadcast", "reduce_scatter", "barrier", "all_to_all"))
        count = draw.choice((1, 7, 1000, 20_000, 70_000)) * size
        inputs = [torch.arange(count) * (number % 5) + each for each in range(size)]
        x, src, rows = inputs[rank], draw.randrange(size), count // size
        if own.random() < 0.1:
            time.sleep(own.random() * 0.004)
        if kind == "all_reduce":
            assert torch.equal(group.all_reduce(x, "max"), inputs[-1]), number
        elif kind == "all_gather":
            assert torch.equal(group.all_gather(x), torch.cat(inputs)), number
        elif kind == "broadcast":
            assert torch.equal(group.broadcast(x, src), inputs[src]), number
        elif kind == "reduce_scatter":
            assert torch.equal(group.reduce_scatter(x), sum(inputs)[rank * rows : (rank + 1) * rows]), number
        elif kind == "all_to_all":
            expected = torch.cat([each[rank * rows : (rank + 1) * rows] for each in inputs])
            assert torch.equal(group.all_to_all(x), expected), number
        else:
            group.barrier()


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 0, 1, 2, 1), (0, 1, 2)], ids=str)
def test_mixed_runs(on_hosts: OnHosts, placement: tuple[int, ...]) -> None:
    for seed in range(4 if LONG else 1):
        on_hosts(placement).run(_mixed, seed, 60, tp=len(placement))


def _messages(placement: Sequence[int]) -> None:
    group = ps.get_tp_group()
    for src in range(group.world_size):
        for text, count in itertools.product(("", "a" * 10_000), (0, 1, 1000, 400_000)):
            tensors = {
                "text": text, "x": torch.arange(count, dtype=torch.float32) + src, "none": torch.empty(0, 3),
                "row": torch.arange(2 * count).view(count, 2).T, "src": src,
            }  # fmt: skip
            found = group.broadcast_tensor_dict(tensors if group.rank_in_group == src else None, src)
            assert found.keys() == tensors.keys() and (found["text"], found["src"]) == (text, src)
            for key in ("x", "none", "row"):
                assert torch.equal(found[key], tensors[key]) and found[key].dtype == tensors[key].dtype, (key, count)
            obj = [text, count, {"x": tensors["x"]}]
            found = group.broadcast_object(obj if group.rank_in_group == src else None, src)
            assert found[:2] == [text, count] and torch.equal(found[2]["x"], tensors["x"])
        refused = attempt(group.broadcast_object, object() if group.rank_in_group == src else None, src)
        assert refused.kind == ("MessageEncodeError" if group.rank_in_group == src else "RemoteError"), refused
    spec = ps.TensorDictSpec.of({"x": torch.zeros(5), "y": torch.zeros(3, dtype=torch.bfloat16)})
    x = {"x": torch.arange(5.0), "y": torch.ones(3, dtype=torch.bfloat16)}
    found = group.broadcast_tensor_dict(x if group.is_first_rank else None, 0, spec=spec)
    assert all(torch.equal(found[key], x[key]) for key in x)
    group.barrier()


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1), (0, 1, 2, 1)], ids=str)
def test_messages_to_all(on_hosts: OnHosts, placement: tuple[int, ...]) -> None:
    on_hosts(placement).run(_messages, placement, tp=len(placement))


class _Foreign:
    pass


def _refused(kind: str, large: bool) -> tuple[Outcome, Outcome]:
    tensors = torch.ones(1 << 20 if large else 10)
    with pytest.MonkeyPatch.context() as patch, own_group(allow_pickle=ps.get_world_group().rank == 0) as group:
        sends = group.is_first_rank
        obj: Any = [_Foreign(), tensors]
        if kind == "head":
            obj = ["a" * 300_000 if large else "a" * 3000, tensors]
            if not sends:
                patch.setenv("PARALLEL_STATE_MAX_METADATA_BYTES", "1000")
        return attempt(group.broadcast_object, obj if sends else None, 0), attempt(group.barrier)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", ["pickle", "head"])
def test_messages_that_receivers_refuse(on_hosts: OnHosts, kind: str, large: bool) -> None:
    told = on_hosts((0, 0, 1, 1)).run(_refused, kind, large, tp=4)
    for rank, (sent, following) in enumerate(told):
        # A receiver that is told of another's refusal first raises that.
        expected = {"MessageDecodeError", "CommunicationError"} if rank else {"ok", "CommunicationError"}
        assert sent.kind in expected and sent.seconds < SOON_S, told
        assert following.kind in ("GroupFailedError", "CommunicationError") and following.seconds < SOON_S, told
    words = "more than" if kind == "head" else "pickled value"
    assert any(words in sent.text for sent, _ in told[1:]), told


def _dict_of_another_root(rank_of_host_1: int) -> Outcome:
    with own_group() as group:
        odd = group.rank_in_group == rank_of_host_1
        root = 1 if odd else 0
        outcome = attempt(group.broadcast_object, 1 if group.rank_in_group == root else None, root)
        return outcome if outcome.kind != "ok" else attempt(group.barrier)


@pytest.mark.parametrize("odd", [2, 3])
def test_messages_of_another_root(on_hosts: OnHosts, odd: int) -> None:
    told = on_hosts((0, 0, 1, 1)).run(_dict_of_another_root, odd, tp=4)
    for rank, outcome in enumerate(told):
        assert outcome.kind == "CollectiveMismatchError" and outcome.seconds < SOON_S, f"rank {rank}: {outcome}"


def _under_a_default_device(size: int) -> None:
    with torch.device("meta"):
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(size)
        group = ps.get_tp_group()
        rank = group.rank_in_group
        assert group.broadcast_object([1, "a" * 10_000] if rank == 0 else None, 0) == [1, "a" * 10_000]
        assert group.all_gather_object(rank) == list(range(size))
        assert group.broadcast_flag(rank == 0, 0) is True
        if rank == 0:
            group.send_object("sent", size - 1)
        elif rank == size - 1:
            assert group.recv_object(0) == "sent"
        mine = torch.full((4,), float(rank), device="cpu")
        gathered = group.all_gather(mine, 0)
        swapped = group.all_to_all(torch.arange(size, device="cpu") + 10 * rank)
    assert gathered.view(size, 4)[:, 0].tolist() == list(range(size))
    assert swapped.tolist() == [10 * other + rank for other in range(size)]
    found = group.broadcast_tensor_dict({"x": mine, "y": 1} if rank == 0 else None, 0)
    assert (found["x"].tolist(), found["y"]) == ([0.0] * 4, 1)


@pytest.mark.parametrize("placement", [(0, 0), (0, 0, 1), (0, 1, 0), (0, 1)], ids=str)
def test_a_default_device_is_that_of_the_programs_tensors(on_hosts: OnHosts, placement: tuple[int, ...]) -> None:
    on_hosts(placement).run(_under_a_default_device, len(placement), tp=len(placement))


CALLS: dict[str, Callable[[ps.GroupCoordinator, Tensor], object]] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "all_gather": lambda group, x: group.all_gather(x),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "broadcast": lambda group, x: group.broadcast(x, 0),
}
COUNT = 1 << 20
SENT = {"all_reduce": 1.0, "all_gather": 2.0, "reduce_scatter": 0.5, "broadcast": 1.0}
"""Bytes from host 0 to host 1, relative to the tensor; two ranks per host."""
SPARED = {"all_reduce": 0.6, "all_gather": 0.6, "reduce_scatter": 0.4, "broadcast": 0.6}
"""Upper bounds relative to gloo's bytes. With alternating hosts each step of gloo's ring crosses."""


def _twice(operation: str, flat: bool) -> None:
    group = ps.get_tp_group()
    all_of_it = group.route.communicators
    if flat:
        group.route.communicators = all_of_it[-1:]
    CALLS[operation](group, torch.ones(COUNT))
    CALLS[operation](group, torch.ones(COUNT))
    group.barrier()
    group.route.communicators = all_of_it


@pytest.mark.parametrize("operation", CALLS)
def test_a_host_sends_once_what_another_needs(hosts: Hosts, on_hosts: OnHosts, operation: str) -> None:
    sent = []
    ranks = on_hosts((0, 0, 1, 1) if operation == "broadcast" else (0, 1, 0, 1))
    for flat in (False, True):
        ranks.run(_twice, operation, flat, tp=4)
        least = math.inf  # of three, because TCP retransmits on a busy machine
        for _ in range(3):
            before = hosts.sent_bytes(0)
            ranks.run(_twice, operation, flat, tp=4)
            least = min(least, (hosts.sent_bytes(0) - before) / 2 / (4 * COUNT))
        sent.append(least)
    ours, flat_sent = sent
    assert ours == pytest.approx(SENT[operation], rel=0.1)
    assert ours <= SPARED[operation] * flat_sent


def _sent_by(count: int) -> dict[int, int]:
    group = ps.get_tp_group()
    before = sent_bytes(group)
    group.all_reduce(torch.ones(count, dtype=torch.bfloat16))
    after = sent_bytes(group)
    return {rank: after[rank] - sent for rank, sent in before.items()}


def test_each_rank_of_a_host_sends_its_share_of_a_large_sum(on_hosts: OnHosts) -> None:
    count = 1 << 20
    sent = on_hosts((0, 0, 1, 1)).run(_sent_by, count, tp=4)
    for rank, found in enumerate(sent):
        other = (rank + 2) % 4
        assert found.pop(other) == pytest.approx(count // 4 * 6, rel=0.01)
        assert list(found.values()) == [0]


def _large_sums(count: int, placement: Sequence[int]) -> None:
    group = ps.get_tp_group()
    inputs = _inputs(count, torch.float32, group.world_size)
    for _ in range(2):
        assert torch.equal(group.all_reduce(inputs[group.rank_in_group]), _total(inputs, placement))


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 2, 0, 1, 2)], ids=str)
def test_ranks_that_wait_for_their_host_and_for_others_never_wait_in_a_ring(placement: tuple[int, ...]) -> None:
    """Small socket buffers leave most bytes unsent while a host's ranks wait for each other."""
    with Hosts(max(placement) + 1) as narrow:
        for host in range(max(placement) + 1):
            narrow.run_on(host, "sysctl -qw net.ipv4.tcp_wmem='4096 65536 65536' net.ipv4.tcp_rmem='4096 65536 65536'")
        with narrow.ranks(placement) as ranks:
            ranks.run(_large_sums, 8_000_000, placement, tp=len(placement), timeout_s=40.0)


def _over_connections(count: int, placement: Sequence[int]) -> list[int]:
    group = ps.get_tp_group()
    size, rank = group.world_size, group.rank_in_group
    inputs = _inputs(count, torch.float32, size)
    x, rows = inputs[rank], count // size
    assert torch.equal(group.all_reduce(x), _total(inputs, placement))
    assert torch.equal(group.all_gather(x), torch.cat(inputs))
    assert torch.equal(group.broadcast(x.clone(), 1), inputs[1])
    blocks = torch.cat([each[rank * rows : (rank + 1) * rows] for each in inputs])
    assert torch.equal(group.all_to_all(x[: rows * size]), blocks)
    sending = group.isend_tensor_dict({"x": x, "small": x[:10]}, (rank + 1) % size)
    found = group.recv_tensor_dict((rank - 1) % size)
    sending.wait()
    assert torch.equal(found["x"], inputs[rank - 1]) and torch.equal(found["small"], inputs[rank - 1][:10])
    handle = group.isend(x, (rank + 1) % size)
    assert torch.equal(group.recv(x.shape, x.dtype, (rank - 1) % size), inputs[rank - 1])
    handle.wait()
    return [len(each) for each in connections_of(group).values()]


@pytest.mark.parametrize("placement", [(0, 1), (0, 0, 1, 1)], ids=str)
def test_what_is_large_goes_over_several_connections(hosts: Hosts, placement: tuple[int, ...]) -> None:
    with hosts.ranks(placement, PARALLEL_STATE_CONNECTIONS="3") as ranks:
        for found in ranks.run(_over_connections, 300_004, placement, tp=len(placement)):
            assert found == [3] * (len(placement) // 2)


def _connected_as_each_wants(wanted: Sequence[int]) -> dict[int, int]:
    everyone = ps.get_tp_group()
    os.environ["PARALLEL_STATE_CONNECTIONS"] = str(wanted[everyone.rank_in_group])
    group = everyone.make_sub_group(range(len(wanted)))
    assert group is not None
    x = torch.ones(1 << 20)
    assert torch.equal(group.all_reduce(x), x * len(wanted))
    return {rank: len(connections) for rank, connections in connections_of(group).items()}


def test_two_ranks_have_as_many_connections_as_both_want(hosts: Hosts) -> None:
    wanted = (1, 4, 3)
    with hosts.ranks((0, 1, 2)) as ranks:
        found = ranks.run(_connected_as_each_wants, wanted, tp=3)
    for rank, connections in enumerate(found):
        assert connections == {other: min(wanted[rank], wanted[other]) for other in range(3) if other != rank}


def _other_ends(count: int) -> list[list[str]]:
    group = ps.get_tp_group()
    assert torch.equal(group.all_reduce(torch.ones(count)), torch.full((count,), float(group.world_size)))
    return [[each.getpeername()[0] for each in to_one] for to_one in connections_of(group).values()]


def test_connections_go_to_all_interfaces_that_are_named() -> None:
    with Hosts(2) as linked:
        for host in range(2):
            address = f"ip addr add 10.88.0.{host + 1}/24 dev eth1 && ip link set eth1 up"
            try:
                linked.run_on(host, f"ip link add link eth0 name eth1 type macvlan mode bridge && {address}")
            except HostsFailedError as error:
                pytest.skip(f"no second interface can be made here: {error}")
        names = {"GLOO_SOCKET_IFNAME": "eth0,eth1", "PARALLEL_STATE_CONNECTIONS": "3"}
        with linked.ranks((0, 1), **names) as ranks:
            for found in ranks.run(_other_ends, 1 << 20, tp=2):
                (ends,) = found
                assert [end.split(".")[1] for end in ends] == ["77", "88", "77"]


def _rounded(count: int, calls: int) -> Tensor:
    inputs = _inputs(count, torch.bfloat16, _world_size())
    group = ps.get_tp_group()
    for _ in range(calls):
        total = group.all_reduce(inputs[group.rank_in_group])
    rows = count // group.world_size
    own = group.reduce_scatter(inputs[group.rank_in_group][: rows * group.world_size])
    exact = sum(x.double() for x in inputs)[group.rank_in_group * rows :][:rows]
    bound = 2.0**-8 * (own.double().abs() + sum(x.double().abs() for x in inputs)[group.rank_in_group * rows :][:rows])
    assert ((own.double() - exact).abs() <= bound).all()
    return total


def test_sums_of_bfloat16_may_be_rounded_before_they_travel(hosts: Hosts) -> None:
    count, name = 1 << 20, "PARALLEL_STATE_ROUND_BETWEEN_HOSTS"
    inputs = [x.double() for x in _inputs(count, torch.bfloat16, 4)]
    exact, half_step = sum(inputs), 2.0**-8
    travelled = (inputs[0] + inputs[1]).abs().maximum((inputs[2] + inputs[3]).abs())
    with hosts.ranks((0, 0, 1, 1), **{name: "on"}) as ranks:
        ranks.run(_rounded, count, 1, tp=4)
        sent, totals = [], []
        for calls in (1, 3):
            before = hosts.sent_bytes(0)
            totals += ranks.run(_rounded, count, calls, tp=4)
            sent.append(hosts.sent_bytes(0) - before)
    assert all(torch.equal(total, totals[0]) for total in totals)
    found = totals[0].double()
    assert ((found - exact).abs() <= half_step * (travelled + found.abs()) * 1.01).all()
    assert not torch.equal(totals[0], exact.float().bfloat16()), (
        "the test needs sums that are rounded between the hosts"
    )
    assert (sent[1] - sent[0]) / 2 == pytest.approx(2 * count, rel=0.1)


def _set_on_rank_0() -> Outcome:
    if os.environ["RANK"] == "0":
        os.environ["PARALLEL_STATE_ROUND_BETWEEN_HOSTS"] = "on"
    return attempt(ps.init_distributed_environment)


def test_a_setting_of_one_rank_is_refused_on_all(hosts: Hosts) -> None:
    with hosts.ranks((0, 0, 1, 1)) as ranks:
        for outcome in ranks.run(_set_on_rank_0):
            assert outcome.kind == "ConfigMismatchError", outcome
            assert "is on for global ranks [0] and off for [1, 2, 3]" in outcome.text, outcome


def _without_descriptors(victim: int) -> tuple[bool, list[float]]:
    with as_without_descriptors(int(os.environ["RANK"]) == victim), world(_world_size()):
        group = ps.get_tp_group()
        sent = group.isend(torch.full((3,), float(group.rank)), group.next_rank_in_group)
        received = group.recv((3,), torch.float32, group.prev_rank_in_group)
        sent.wait()
        gathered = group.all_to_all(torch.full((group.world_size,), float(group.rank)))
        return is_meshed(group), [received.sum().item(), gathered.sum().item()]


@pytest.mark.parametrize("victim", [-1, 2])
def test_a_large_group_has_all_connections_where_each_rank_has_descriptors(hosts: Hosts, victim: int) -> None:
    with hosts.ranks((0, 0, 1, 1)) as ranks:
        found = ranks.run(_without_descriptors, victim, timeout_s=60.0)
    assert found == [(victim < 0, [3.0 * ((rank - 1) % 4), 6.0]) for rank in range(4)]


MANY = (0,) * 17 + (1,) * 18


def _among_many() -> str:
    group = ps.get_tp_group()
    size, rank = group.world_size, group.rank_in_group
    x = torch.arange(size * 100) + rank
    assert torch.equal(group.all_to_all(x), torch.cat([torch.arange(100) + 100 * rank + each for each in range(size)]))
    found = group.gather(x, 3, 0)
    assert found is None or torch.equal(found.view(size, -1)[:, 0], torch.arange(size))
    sent = group.isend(x, (rank + 18) % size)
    assert torch.equal(group.recv(x.shape, x.dtype, (rank - 18) % size), x - rank + (rank - 18) % size)
    sent.wait()
    return str(group.route.communicators[0])


@pytest.mark.skipif(not LONG, reason="35 ranks: in long runs")
def test_blocks_and_sends_of_many_ranks(hosts: Hosts) -> None:
    with hosts.ranks(MANY, PARALLEL_STATE_TIMEOUT_S="60") as ranks:
        for text in ranks.run(_among_many, tp=len(MANY), timeout_s=240.0):
            assert "TCP between ranks of different hosts" in text


def _routes() -> list[str]:
    return [_carrier(group) for group in (ps.get_world_group(), ps.get_tp_group(), ps.get_pp_group())]


def test_groups_are_carried_by_what_their_hosts_allow(on_hosts: OnHosts) -> None:
    ranks = on_hosts((0, 0, 1, 1))
    for found in ranks.run(_routes, tp=2, pp=2):
        assert found == ["hierarchical", "shared_memory", "hierarchical"]


def _explain() -> str:
    return ps.get_tp_group().explain()


def test_explain_says_who_is_where(on_hosts: OnHosts) -> None:
    *_, text = on_hosts((0, 1, 0, 1)).run(_explain, tp=4)
    assert "1. hierarchical: " in text
    assert "host 0: ranks [0, 2], host 1: ranks [1, 3] (this one)" in text
    assert "shared_memory: not used, its ranks are on 2 hosts" in text


@pytest.fixture(scope="module")
def odd_hosts() -> Iterator[Hosts]:
    """Host 1 shares host 0's network, host 2 its memory. Host 3 has its own PID namespace."""
    reason = problem()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    with Hosts([Host(), Host(network_of=0), Host(memory_of=0), Host(own_pids=True)]) as made:
        yield made


def _where() -> tuple[str, int, Any]:
    group = ps.get_tp_group()
    assert int(group.all_reduce(torch.ones(1)).item()) == group.world_size
    memory = group.context.host_memory
    return _carrier(group), os.stat("/proc/self/ns/pid").st_ino, memory.hosts if memory is not None else None


@pytest.mark.parametrize(
    ("placement", "carrier", "found"),
    [
        ((0, 0, 1, 1), "hierarchical", ((0, 1), (2, 3))),
        ((0, 0, 2), "shared_memory", ((0, 1, 2),)),
        ((0, 2, 1, 3, 3), "hierarchical", ((0, 1), (2,), (3, 4))),
    ],
    ids=["one network", "one memory", "all of it"],
)
def test_a_host_is_where_memory_is_shared(
    odd_hosts: Hosts, placement: tuple[int, ...], carrier: str, found: tuple[tuple[int, ...], ...]
) -> None:
    with odd_hosts.ranks(placement) as ranks:
        for each in ranks.run(_where, tp=len(placement)):
            assert (each[0], each[2]) == (carrier, found)


def test_process_ids_of_another_namespace(odd_hosts: Hosts) -> None:
    with odd_hosts.ranks((0, 0, 3, 3)) as ranks:
        spaces = [space for _, space, _ in ranks.run(_where, tp=4)]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]


class _Stage(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rank, size = ps.get_tp_group().rank_in_group, ps.get_tp_group().world_size
        self.up, self.down = (part.chunk(size, dim=dim)[rank] for part, dim in zip(_weights(seed), (0, 1), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + ps.get_tp_group().all_reduce(torch.relu(x @ self.up.T) @ self.down.T)


def _weights(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 16, generator=generator), torch.randn(16, 64, generator=generator)


def _pipeline() -> list[float] | None:
    stages, tp = ps.get_pp_group(), ps.get_tp_group()
    stage = _Stage(stages.rank_in_group)
    x = torch.linspace(-1, 1, 8 * 16).view(8, 16)
    with torch.inference_mode():
        if stages.rank_in_group == 1:
            x = stages.recv_tensor_dict(all_gather_group=tp)["hidden"]
        x = stage(x)
        if stages.rank_in_group == 0:
            stages.send_tensor_dict({"hidden": x}, all_gather_group=tp)
            return None
        return x.flatten().tolist()


def test_a_model_with_tensor_parallel_hosts_and_a_pipeline_between(on_hosts: OnHosts) -> None:
    x = torch.linspace(-1, 1, 8 * 16).view(8, 16)
    for seed in (0, 1):
        up, down = _weights(seed)
        x = x + torch.relu(x @ up.T) @ down.T
    for found in on_hosts((0, 0, 1, 1)).run(_pipeline, tp=2, pp=2)[2:]:
        assert torch.allclose(torch.tensor(found), x.flatten(), rtol=1e-4, atol=1e-3)


def _until_it_fails(victim: int, count: int) -> Outcome:
    with world(_world_size()):
        group = ps.get_tp_group()
        x = torch.ones(count)
        for number in range(50):
            if group.rank == victim and number == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            outcome = attempt(group.all_reduce, x)
            if outcome.kind != "ok":
                assert attempt(group.all_reduce, x).kind == "GroupFailedError"
                return outcome
        return outcome


@pytest.mark.parametrize(
    ("placement", "victim", "count"),
    [((0, 0, 1, 1), 0, 10), ((0, 0, 1, 1), 1, 10), ((0, 0, 1, 1), 2, 1_000_000), ((0, 0, 1, 1), 3, 10),
     ((0, 1, 2), 1, 10), ((0, 1, 2), 0, 1_000_000)],
    ids=["first leader", "its neighbour", "second leader, large", "its neighbour", "alone", "alone, large"],
)  # fmt: skip
def test_a_rank_that_dies_fails_all_ranks_of_all_hosts(
    hosts: Hosts, placement: tuple[int, ...], victim: int, count: int
) -> None:
    with hosts.ranks(placement, PARALLEL_STATE_TIMEOUT_S="20") as ranks:
        outcomes = ranks.survivors(_until_it_fails, victim, count, timeout_s=60.0)
    assert outcomes.keys() == {*range(len(placement))} - {victim}
    for rank, outcome in outcomes.items():
        assert outcome.kind == "PeerDiedError", f"rank {rank}: {outcome}"
        # Another host first detects that the victim's lead gave up.
        same_host = placement[rank] == placement[victim]
        known = {(victim,)} if same_host else {(victim,), (placement.index(placement[victim]),)}
        assert outcome.suspect_ranks in known, f"rank {rank}: {outcome}"
        assert outcome.seconds < SOON_S, f"rank {rank}: {outcome}"


LARGE_COUNT = 1 << 21


def _dying_in(share: float, victim: int) -> Outcome:
    with world(_world_size()):
        group = ps.get_tp_group()
        before = moved_bytes(group)
        group.all_reduce(torch.ones(LARGE_COUNT))
        if group.rank == victim:
            each = moved_bytes(group) - before
            when_moved(group, before + (2 + share) * each, lambda: os.kill(os.getpid(), signal.SIGKILL))
        for _ in range(50):
            outcome = attempt(group.all_reduce, torch.ones(LARGE_COUNT))
            if outcome.kind != "ok":
                break
        return outcome


@pytest.mark.parametrize(("share", "victim"), [(0.1, 1), (0.3, 0), (0.6, 3), (0.9, 2)])
def test_a_rank_that_dies_within_a_large_sum_fails_all_ranks(hosts: Hosts, share: float, victim: int) -> None:
    with hosts.ranks((0, 0, 1, 1), PARALLEL_STATE_TIMEOUT_S="20") as ranks:
        outcomes = ranks.survivors(_dying_in, share, victim, timeout_s=60.0)
    assert outcomes.keys() == {0, 1, 2, 3} - {victim}
    for rank, outcome in outcomes.items():
        assert outcome.kind == "PeerDiedError" and outcome.seconds < SOON_S, f"rank {rank}: {outcome}"
        assert set(outcome.suspect_ranks) <= {victim, victim // 2 * 2}, f"rank {rank}: {outcome}"


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_in_another_pid_namespace(hosts: Hosts, victim: int) -> None:
    """The containers share memory but can't see each other's processes, so they detect exits as hosts do."""
    del hosts  # this fixture skips if no hosts can be made
    settings = {"PARALLEL_STATE_TIMEOUT_S": "30", "PARALLEL_STATE_HEARTBEAT_LIMIT_S": "3"}
    with Hosts([Host(), Host(memory_of=0, own_pids=True)]) as two, two.ranks((0, 0, 1, 1), **settings) as ranks:
        outcomes = ranks.survivors(_until_it_fails, victim, 10, timeout_s=60.0)
    assert outcomes.keys() == {0, 1, 2, 3} - {victim}
    for rank, outcome in outcomes.items():
        assert outcome.kind in ("PeerDiedError", "CollectiveTimeoutError"), f"rank {rank}: {outcome}"
        assert victim in outcome.suspect_ranks, f"rank {rank}: {outcome}"
        assert outcome.seconds < 3.0 + SOON_S, f"rank {rank}: {outcome}"


def _dying_in_a_dict(share: float, victim: int) -> Outcome:
    with world(_world_size()):
        group = ps.get_tp_group()
        dicts = {"x": torch.ones(2 * LARGE_COUNT), "y": 1} if group.is_first_rank else None
        before = moved_bytes(group)
        group.broadcast_tensor_dict(dicts, 0)
        group.barrier()
        if group.rank == victim:
            each = moved_bytes(group) - before
            when_moved(group, before + (2 + share) * each, lambda: os.kill(os.getpid(), signal.SIGKILL))
        for _ in range(50):
            outcome = attempt(group.broadcast_tensor_dict, dicts, 0)
            if outcome.kind != "ok":
                break
        return outcome


@pytest.mark.parametrize(("share", "victim"), [(0.4, 0), (0.6, 2)])
def test_a_rank_that_dies_within_a_large_dict_fails_all_ranks(hosts: Hosts, share: float, victim: int) -> None:
    with hosts.ranks((0, 0, 1, 1), PARALLEL_STATE_TIMEOUT_S="20") as ranks:
        outcomes = ranks.survivors(_dying_in_a_dict, share, victim, timeout_s=60.0)
    assert outcomes.keys() == {0, 1, 2, 3} - {victim}
    for rank, outcome in outcomes.items():
        assert outcome.kind == "PeerDiedError" and outcome.seconds < SOON_S, f"rank {rank}: {outcome}"
        assert victim in outcome.suspect_ranks, f"rank {rank}: {outcome}"


def _cut_off(cut: str) -> tuple[Outcome, Outcome]:
    """Host 0's bytes may arrive before the link is cut. Host 1 then has its sum, and its next call fails."""
    ps.init_distributed_environment()
    ps.initialize_model_parallel(_world_size())
    group = ps.get_tp_group()
    good = attempt(group.all_reduce, torch.ones(10))
    on_host_1 = group.rank >= 2
    if cut == "link" and group.rank == 2:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True, timeout=10)
    bad = attempt(group.all_reduce, torch.ones(11 if cut == "call" and on_host_1 else 10))
    if cut == "link" and on_host_1 and bad.kind == "ok":
        assert bad.text == good.text
        bad = attempt(group.all_reduce, torch.ones(10))
    return good, bad


@pytest.mark.parametrize("cut", ["link", "call"])
def test_hosts_that_do_not_meet_fail_together(hosts: Hosts, cut: str) -> None:
    del hosts
    with Hosts(2) as two, two.ranks((0, 0, 1, 1), PARALLEL_STATE_TIMEOUT_S=str(TIMEOUT_S)) as ranks:
        outcomes = ranks.survivors(_cut_off, cut, timeout_s=60.0)
    assert len(outcomes) == 4
    for rank, (good, bad) in outcomes.items():
        assert good.kind == "ok"
        # The earlier deadline closes the connection on the other host, which asks the store for the cause.
        expected = ("CollectiveTimeoutError", "CollectiveMismatchError", "PeerDiedError", "CommunicationError")
        assert bad.kind in expected, f"rank {rank}: {bad}"
        assert set(bad.suspect_ranks) & ({2, 3} if rank < 2 else {0, 1}), f"rank {rank}: {bad}"
        assert bad.seconds < TIMEOUT_S + 5.0, f"rank {rank}: {bad}"
    kinds = {bad.kind for _, bad in outcomes.values()}
    assert kinds & {"CollectiveTimeoutError", "CollectiveMismatchError"}


def _interrupted(what: str) -> list[Outcome]:
    ps.init_distributed_environment()
    ps.initialize_model_parallel(_world_size())
    group = ps.get_tp_group()
    group.barrier()
    calls: list[Callable[[], object]] = [lambda: group.all_reduce(torch.ones(3))] * 2
    if what == "recv":
        calls = [lambda: group.recv((3,), torch.float32, 2)] * 2
    if what == "broadcast_object":
        calls = [lambda: group.broadcast_object("x" if group.rank == 2 else None, 2)] * 2
    if group.rank:
        if what != "all_reduce" or group.rank == 1:
            time.sleep(1.0)
        # One more sum can succeed with what rank 0 sent before the interrupt.
        return [attempt(call) for call in calls][1:] if what == "all_reduce" else []

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        with pytest.raises(KeyboardInterrupt):
            calls[0]()
    finally:
        signal.signal(signal.SIGALRM, before)
    return [attempt(calls[1])]


@pytest.mark.parametrize("what", ["recv", "all_reduce", "broadcast_object"])
def test_ctrl_c_ends_the_group_over_hosts(hosts: Hosts, what: str) -> None:
    """The group ends, because the next receive would get the message of the interrupted receive."""
    with hosts.ranks((0, 1, 1) if what == "all_reduce" else (0, 0, 1, 1), PARALLEL_STATE_TIMEOUT_S="30") as ranks:
        told = ranks.run(_interrupted, what, timeout_s=60.0)
    assert told[0][0].kind in ("GroupFailedError", "CommunicationError"), told
    for outcomes in told:
        for outcome in outcomes:
            assert outcome.kind != "ok" and outcome.seconds < 15.0, told


CALLS_OF_HANDLERS: dict[str, tuple[Callable[..., object], Callable[..., object], Callable[..., object]]] = {
    "barrier": (lambda g: g.barrier(), lambda g: g.all_reduce(torch.ones(1)), lambda g: g.barrier()),
    "broadcast_object": (
        lambda g: g.broadcast_object(None, 2), lambda g: g.barrier(),
        lambda g: g.broadcast_object("x" if g.rank == 2 else None, 2)),
    "recv": (
        lambda g: g.recv((3,), torch.float32, 2), lambda g: g.send(torch.ones(3), 2),
        lambda g: g.send(torch.ones(3), 0) if g.rank == 2 else None),
    "irecv": (
        lambda g: g.irecv((3,), torch.float32, 2).wait(), lambda g: g.irecv((3,), torch.float32, 2),
        lambda g: g.isend(torch.ones(3), 0).wait() if g.rank == 2 else None),
}  # fmt: skip


def _in_a_handler(what: str) -> tuple[list[Outcome], float]:
    group, told = ps.get_world_group(), list[Outcome]()
    under_way, in_handler, of_others = CALLS_OF_HANDLERS[what]
    group.barrier()
    if group.rank:
        time.sleep(1.0)
        of_others(group)
    else:
        before = signal.signal(signal.SIGALRM, lambda *_: told.append(attempt(in_handler, group)))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            under_way(group)
        finally:
            signal.signal(signal.SIGALRM, before)
    return told, group.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("what", CALLS_OF_HANDLERS)
def test_a_signal_handler_in_the_middle_of_a_call(hosts: Hosts, what: str) -> None:
    with hosts.ranks((0, 0, 1, 1), PARALLEL_STATE_TIMEOUT_S="10") as ranks:
        (told, total), *others = ranks.run(_in_a_handler, what, tp=4, timeout_s=60.0)
    assert [outcome.kind for outcome in told] == ["UsageError"], told
    assert "Nothing was sent" in told[0].text and told[0].seconds < 1.0, told
    assert [total, *(total for _, total in others)] == [4.0] * 4


OWNER = """
import time
from tests.contract.test_hosts import _routes
from tests.extent import LONG
from tests.hosts import Host, Hosts
if __name__ == "__main__":
    with Hosts([Host(), Host(own_pids=True)]) as hosts, hosts.ranks([0, 1]) as ranks:
        ranks.run(_routes, tp=2)
        print(*(hosts.pid(host) for host in (0, 1)), *(process.pid for process in ranks._processes), flush=True)
        time.sleep(60)
"""


def test_nothing_is_left_of_hosts_whose_owner_was_killed(hosts: Hosts) -> None:
    owner = Program(FORK_SERVERS + OWNER, os.environ)
    try:
        (line,) = owner.lines(1, DEADLINE_S)
    finally:
        owner.kill()
    pids = [int(pid) for pid in line.split()]
    assert len(pids) == 4
    deadline = time.monotonic() + SOON_S
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _send_once(count: int) -> float:
    started = time.monotonic()
    ps.get_world_group().broadcast(torch.ones(count), 0)
    ps.get_world_group().barrier()
    return time.monotonic() - started


def test_links_can_be_slow(hosts: Hosts) -> None:
    with hosts.ranks((0, 0, 1)) as ranks:
        ranks.run(_send_once, 10, tp=3)
        hosts.limit(0, "40mbit")
        try:
            slow = min(min(ranks.run(_send_once, 250_000, tp=3)) for _ in range(2))
        finally:
            hosts.limit(0, None)
        assert 0.15 < slow < 2.0
        assert min(max(ranks.run(_send_once, 250_000, tp=3)) for _ in range(5)) < slow


def _send_while_another_thread_sends() -> None:
    group, world_group = ps.get_tp_group(), ps.get_world_group()
    if group.is_first_rank:

        def send_small() -> None:
            time.sleep(0.3)
            world_group.send(torch.ones(1), 1)

        other = threading.Thread(target=send_small)
        other.start()
        group.send(torch.ones(1 << 18), 1)
        other.join()
    else:
        assert world_group.recv((1,), torch.float32, 0).item() == 1
        assert group.recv((1 << 18,), torch.float32, 0).sum() == 1 << 18


def test_a_send_that_waits_lets_other_threads_run(hosts: Hosts) -> None:
    with hosts.ranks((0, 1)) as ranks:
        ranks.run(_send_while_another_thread_sends, tp=2, timeout_s=20.0)


def _send_and_receive(x: Tensor) -> None:
    group = ps.get_tp_group()
    if group.is_first_rank:
        group.send(x, 1)
    received = group.recv(x.shape, x.dtype, 1 - group.rank_in_group)
    assert torch.equal(received, x)
    if not group.is_first_rank:
        group.send(x, 0)


FRAMED_CALLS: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": lambda x: ps.get_tp_group().all_reduce(x),
    "send and recv": _send_and_receive,
}


def _frames_of(operation: str) -> list[str]:
    x, found = torch.ones(2048), list[str]()
    for _ in range(3):
        FRAMED_CALLS[operation](x)
    sys.setprofile(lambda frame, event, _: found.append(frame.f_globals["__name__"]) if event == "call" else None)
    try:
        FRAMED_CALLS[operation](x)
    finally:
        sys.setprofile(None)
    return [module for module in found if module != __name__]


@pytest.mark.parametrize("operation", FRAMED_CALLS)
def test_a_call_over_hosts_passes_the_same_stops_as_on_one(hosts: Hosts, on_hosts: OnHosts, operation: str) -> None:
    (near, *_), (far, *_) = (on_hosts(placement).run(_frames_of, operation, tp=2) for placement in ((0, 0), (0, 1)))
    assert 0 < len(far) <= 8 * (2 if operation == "send and recv" else 1), far
    assert far == near
