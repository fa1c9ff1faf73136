"""Hosts with other addresses than one IPv4 address: a job works, or all ranks' errors say what to set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.clusters.cluster import JOB, PYTHON, Cluster
from tests.clusters.launchers import PORT, logs
from tests.clusters.test_launchers import check, told

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
START_S = "20"


def _job(cluster: Cluster, address: str, *options: str, **variables: str) -> list[tuple[int, str]]:
    started = []
    for rank in range(4):
        place = ["--rank", str(rank), "--size", "4", "--local-rank", str(rank % 2), "--address", f"{address}:{PORT}"]
        words = [PYTHON, *JOB, str(cluster.folder), *place, *options]
        started.append(cluster.start(rank // 2, words, PARALLEL_STATE_START_TIMEOUT_S=START_S, **variables))
    ended = [command.end(DEADLINE_S) for command in started]
    return [(each.code, each.output) for each in ended]


def _works(cluster: Cluster, results: Sequence[tuple[int, str]]) -> dict[int, Any]:
    assert not any(code for code, _ in results), logs(cluster)
    facts = told(cluster)
    check(facts, "explicit")
    return facts


def _ipv6_only(cluster: Cluster) -> None:
    addresses = [f"fd77::{host + 1}" for host in range(2)]
    for host, address in enumerate(addresses):
        cluster.run_on(host, f"ip addr flush dev eth0 && ip -6 addr add {address}/64 dev eth0 nodad")
    lines = [f"{address} {name}\n" for address, name in zip(addresses, cluster.names, strict=True)]
    cluster.write_names("127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))


@pytest.mark.parametrize(
    ("address", "interface"), [("n1", ""), ("[fd77::1]", ""), ("n1", "eth0")], ids=["a name", "a literal", "chosen"]
)
def test_hosts_that_have_ipv6_only(cluster: Cluster, address: str, interface: str) -> None:
    _ipv6_only(cluster)
    _works(cluster, _job(cluster, address, GLOO_SOCKET_IFNAME=interface))


def test_recovery_of_hosts_that_have_ipv6_only(cluster: Cluster) -> None:
    _ipv6_only(cluster)
    _recovers(cluster, "n1")


def test_recovery_over_two_hosts(cluster: Cluster) -> None:
    _recovers(cluster, "n1")


def _recovers(cluster: Cluster, address: str, **variables: str) -> None:
    _job(cluster, address, "--kill", "0", "--again", **variables)
    facts = told(cluster)
    assert [facts[rank]["error"]["suspect_ranks"] for rank in (1, 2, 3)] == [[0]] * 3
    again = {rank: facts[rank].get("again") for rank in (1, 2, 3)}
    assert all(again.values()), logs(cluster)
    assert [each["rank"] for each in again.values()] == [0, 1, 2]
    assert [each["sums"][0] for each in again.values()] == [3.0] * 3
    assert again[3]["nodes"] == [[0], [1, 2]]


def _bridges(cluster: Cluster) -> None:
    for host in range(2):
        cluster.run_on(
            host, "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
        )


def test_a_bridge_on_every_host_does_not_matter(cluster: Cluster) -> None:
    _bridges(cluster)
    _works(cluster, _job(cluster, "n1"))


def test_a_bridge_that_the_hosts_announce(cluster: Cluster) -> None:
    _bridges(cluster)
    for code, output in _job(cluster, "n1", GLOO_SOCKET_IFNAME="docker0"):
        assert code != 0
        assert "172.17.0.1" in output and "docker0" in output and "GLOO_SOCKET_IFNAME" in output and "n2" in output


def test_a_second_network_that_does_not_lead_to_the_others(cluster: Cluster) -> None:
    for host in range(2):
        cluster.run_on(
            host,
            "ip link add mgmt0 type veth peer name mgmt1 && ip link set mgmt0 up && ip link set mgmt1 up && "
            f"ip addr add 10.{99 + host}.0.1/24 dev mgmt0",
        )
    _works(cluster, _job(cluster, "n1"))
    for code, output in _job(cluster, "n1", GLOO_SOCKET_IFNAME="mgmt0"):
        assert code != 0
        assert "mgmt0" in output and "not reached" in output and "GLOO_SOCKET_IFNAME" in output


def test_a_loopback_name(cluster: Cluster) -> None:
    """Each host resolves its own name to 127.0.1.1, as after an installation of Debian."""
    for host, name in enumerate(cluster.names):
        other = 1 - host
        names = f"127.0.0.1 localhost\n127.0.1.1 {name}\n{cluster.addresses[other]} {cluster.names[other]}\n"
        cluster.write_names(names, [host])
    for code, output in _job(cluster, cluster.addresses[0]):
        assert code != 0
        assert "127.0.1.1" in output and "/etc/hosts" in output and "GLOO_SOCKET_IFNAME" in output
    _works(cluster, _job(cluster, cluster.addresses[0], GLOO_SOCKET_IFNAME="eth0"))
    _works(cluster, _job(cluster, "n1", GLOO_SOCKET_IFNAME="eth0"))
    _recovers(cluster, "n1", GLOO_SOCKET_IFNAME="eth0")
