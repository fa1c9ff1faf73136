"""Rules about names, addresses, interfaces, ports, and the ways between hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from device_communicators.base.host import is_loopback
from parallel_state.tools.check.evidence import Evidence, by_value, grouped, interface_of, networks_of, outliers
from parallel_state.tools.check.facts import Facts, Link
from parallel_state.tools.check.findings import INFO, Finding, finding, named, rate

_CLOCK_S = 1.0
_LATE_PLAN_S = 5.0
_SLOW = 4.0
_LATENCY = 5.0
_LATENCY_US = 300.0
"""Below that, differences are of the hosts' load."""
_NOMINAL = 0.1
_GIGABIT = 0.9e9 / 8
_LOSS = 0.012
"""In each of two runs: a queue that overflows for a moment loses less."""
_FEW_SEGMENTS = 200


def meeting_place(evidence: Evidence) -> Iterator[Finding]:
    places = {each.place.rank: each.place for each in evidence.arrivals if each.place.world_size > 1}
    addresses = by_value({rank: f"{each.master_addr}:{each.master_port}" for rank, each in places.items()})
    addresses = {where: ranks for where, ranks in addresses.items() if not where.startswith(":")}
    if len(addresses) > 1:
        words = "; ".join(f"{where} on {named(ranks)}" for where, ranks in addresses.items())
        odd = list(addresses.values())[1]
        yield finding("master-differs", f"the ranks should meet at {words}", odd)
    master = next(iter(places.values()), None)
    if master is None:
        return
    resolved = {each.place.rank: each.network.master_resolves_to for each in evidence.arrivals}
    if _spans(evidence) and len(addresses) == 1 and not master.agent_store:
        if is_loopback(master.master_addr):
            hosts = ", ".join(evidence.hosts) + ("" if evidence.several_hosts else " and others")
            text = f"MASTER_ADDR is {master.master_addr}, and ranks are on {hosts}"
            yield finding("master-loopback", text, hosts=evidence.hosts)
        else:
            answers = by_value({rank: " ".join(found) for rank, found in resolved.items() if found})
            if len(answers) > 1:
                words = "; ".join(f"{found} on {named(ranks)}" for found, ranks in answers.items())
                yield finding("master-resolves-differently", f"{master.master_addr} is {words}")
    server = min(evidence.arrivals, key=lambda facts: facts.place.rank)
    first, last = server.network.ephemeral_ports
    if first <= master.master_port <= last and not master.agent_store:
        yield finding("port-ephemeral", f"MASTER_PORT is {master.master_port}")


def unresolved(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.met:
        return
    for name, ranks in evidence.hosts.items():
        why = ranks[0].late.get("master", "")
        if why:
            yield evidence.about("master-unresolved", f"{ranks[0].place.master_addr} on {name}: {why}", ranks)


def addresses(evidence: Evidence) -> Iterator[Finding]:
    """Loopback, none, or the same on two hosts."""
    if not _spans(evidence):
        return
    at: dict[str, list[str]] = {}
    for name, ranks in evidence.hosts.items():
        network = ranks[0].network
        if not network.gloo_address:
            if network.gloo_interface != "?" and not _given(ranks[0]):
                yield evidence.about("address-unknown", f"gloo finds no address on {name}", ranks)
        elif is_loopback(network.gloo_address):
            own = ", ".join(network.name_resolves_to) or "nothing"
            text = (
                f"gloo on {name} announces {network.gloo_address}: its own name {network.hostname} resolves to {own}; "
                f"interfaces there: {_interfaces(ranks[0])}"
            )
            yield evidence.about("address-loopback", text, ranks)
        else:
            at.setdefault(network.gloo_address, []).append(name)
    for address, names in at.items():
        if len(names) > 1:
            chosen = ", ".join(f"{evidence.hosts[name][0].network.gloo_interface} on {name}" for name in names)
            yield evidence.about("address-shared", f"{address} is announced by {chosen}", evidence.on(names))


def _spans(evidence: Evidence) -> bool:
    """Returns True if the job is on several hosts, as far as this rank can know."""
    place = evidence.arrivals[0].place
    return evidence.several_hosts or (not evidence.met and 0 < (place.local_world_size or 0) < place.world_size)


def _given(facts: Facts) -> str:
    return facts.place.variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()


def _interfaces(facts: Facts) -> str:
    return ", ".join(
        f"{each.name} ({', '.join(each.addresses)})"
        for each in facts.network.interfaces
        if each.kind != "loopback" and each.addresses
    ) or "none"  # fmt: skip


def interfaces(evidence: Evidence) -> Iterator[Finding]:
    for name, ranks in evidence.hosts.items():
        facts = ranks[0]
        given = _given(facts)
        chosen = interface_of(facts, given)
        if given and (chosen is None or not chosen.addresses or not (chosen.up or chosen.kind == "loopback")):
            state = "isn't there" if chosen is None else "has no address" if chosen.up else "is down"
            text = f"GLOO_SOCKET_IFNAME={given} on {name}, but that interface {state}; there are {_interfaces(facts)}"
            yield evidence.about("interface-missing", text, ranks)
        nccl = facts.place.variables.get("NCCL_SOCKET_IFNAME", "").strip()
        if nccl and not facts.network.nccl_interface:
            text = f"NCCL_SOCKET_IFNAME={nccl} on {name} fits no interface that is up; there are {_interfaces(facts)}"
            yield evidence.about("interface-missing", text, ranks)
        if not _spans(evidence):
            continue
        for who, taken in (("gloo", facts.network.gloo_interface), ("NCCL", facts.network.nccl_interface)):
            each = interface_of(facts, taken)
            if who == "NCCL" and not facts.gpus.visible:
                continue
            if each is not None and each.kind in ("bridge", "container") and not _reached(evidence, facts):
                text = f"{who} on {name} takes {taken}, a {each.kind}; there are {_interfaces(facts)}"
                yield evidence.about("interface-bridge", text, ranks)


def _reached(evidence: Evidence, facts: Facts) -> bool:
    """Returns True if another host got through to this one."""
    return any(not link.problem and evidence.of(link.target) is facts for link in evidence.links)


def networks(evidence: Evidence) -> Iterator[Finding]:
    """One network on all hosts, the fastest, with one MTU."""
    if not evidence.several_hosts:
        return
    chosen = {
        name: each
        for name, ranks in evidence.hosts.items()
        if (each := interface_of(ranks[0], ranks[0].network.gloo_interface)) is not None
    }
    nets = {name: networks_of(each) for name, each in chosen.items() if each.kind != "loopback"}
    if len(nets) > 1 and not set.intersection(*nets.values()):
        everywhere = [
            set().union(*(networks_of(each) for each in ranks[0].network.interfaces if each.kind != "loopback"))
            for ranks in evidence.hosts.values()
        ]
        common = set.intersection(*everywhere)
        words = "; ".join(
            f"{', '.join(sorted(each)) or 'none'} ({chosen[name].name}) on {name}" for name, each in nets.items()
        )
        hint = f"; the network that all hosts are in is {', '.join(sorted(common))}" if common else ""
        usual = by_value({name: " ".join(sorted(each)) for name, each in nets.items()})
        odd = list(usual.values())[-1] if len(usual) < len(nets) else list(nets)
        # Routed networks are as good, where each rack has its own and nothing in common.
        severity = "" if common else INFO
        text = f"gloo's interfaces are in {words}{hint}"
        yield evidence.about("networks-differ", text, evidence.on(odd), severity=severity)
    mtus = by_value({name: str(each.mtu) for name, each in chosen.items() if each.mtu and each.kind != "loopback"})
    if len(mtus) > 1:
        words = "; ".join(f"{mtu} on {', '.join(names)}" for mtu, names in mtus.items())
        rarest = list(mtus.values())[-1]
        yield evidence.about("mtu-differs", f"the MTU of gloo's interface is {words}", evidence.on(rarest))
    for name, each in chosen.items():
        faster = [
            other
            for other in evidence.hosts[name][0].network.interfaces
            if other.up and other.addresses and each.speed_mbit and other.speed_mbit > 2 * each.speed_mbit
        ]
        if faster:
            best = max(faster, key=lambda other: other.speed_mbit)
            text = (
                f"gloo on {name} takes {each.name} ({each.speed_mbit / 1000:g} Gb/s), and {best.name} has "
                f"{best.speed_mbit / 1000:g} Gb/s"
            )
            yield evidence.about("interface-slower", text, evidence.hosts[name])


def hostnames(evidence: Evidence) -> Iterator[Finding]:
    for name, hosts in grouped(evidence.hosts, lambda unique: evidence.hosts[unique][0].network.hostname).items():
        if len(hosts) > 1:
            yield evidence.about("hostname-twice", f"{len(hosts)} hosts are called {name}", evidence.on(hosts))


def infiniband(evidence: Evidence) -> Iterator[Finding]:
    counts = {}
    for name, ranks in evidence.hosts.items():
        ports = ranks[0].network.infiniband
        counts[name] = f"{sum(state.startswith('ACTIVE') for state in ports.values())} active ports"
        down = [port for port, state in ports.items() if not state.startswith("ACTIVE")]
        if down and len(down) < len(ports):
            words = ", ".join(f"{port} is {ports[port]}" for port in down)
            yield evidence.about("infiniband-down", f"on {name} {words}", ranks)
    found = by_value(counts)
    if len(found) > 1:
        words = "; ".join(f"{count} on {', '.join(names)}" for count, names in found.items())
        yield finding("infiniband-differs", words, hosts=list(found.values())[-1])


# What was measured.


def link_problems(evidence: Evidence) -> Iterator[Finding]:
    blocked = {
        (evidence.host_of(link.source), evidence.host_of(link.target)): link for link in evidence.links if link.problem
    }
    for (source, target), link in blocked.items():
        works_back = any(
            not other.problem and (evidence.host_of(other.source), evidence.host_of(other.target)) == (target, source)
            for other in evidence.links
        )
        code = {"stranger": "link-stranger", "broken": "link-broken"}.get(link.kind, "link-blocked")
        way = f"from {source} to {target} ({'the other direction works' if works_back else 'nor back'})"
        if (target, source) not in blocked and not works_back:
            way = f"from {source} to {target}"
        if (target, source) in blocked and source > target and code == "link-blocked":
            continue  # one finding for both directions
        yield _about(evidence, code, link.source, link.target, f"{way}: {link.problem}; {_ways(evidence, link)}")


def _ways(evidence: Evidence, link: Link) -> str:
    ends = [evidence.of(number).network for number in (link.source, link.target)]
    return " and ".join(f"{end.gloo_interface} {end.gloo_address} on {end.hostname}" for end in ends)


def link_speed(evidence: Evidence) -> Iterator[Finding]:
    good = [link for link in evidence.links if not link.problem and link.bytes_per_s]
    speeds = {(link.source, link.target): link.bytes_per_s for link in good}
    reported = set()
    for (source, target), speed, middle in outliers(speeds, _SLOW, high=False):
        text = f"{_way(evidence, source, target)} carries {rate(speed)}, the median of all links is {rate(middle)}"
        reported.add((source, target))
        yield _about(evidence, "link-slow", source, target, text)
    for link in good:
        if (link.source, link.target) in reported:
            continue
        facts = evidence.of(link.source)
        chosen = interface_of(facts, facts.network.gloo_interface)
        nominal = (chosen.speed_mbit if chosen else 0) * 1e6 / 8
        if nominal and link.bytes_per_s < _NOMINAL * nominal:
            text = (
                f"{_way(evidence, link.source, link.target)} carries {rate(link.bytes_per_s)}, and its interface "
                f"{facts.network.gloo_interface} should carry {rate(nominal)}"
            )
            reported.add((link.source, link.target))
            yield _about(evidence, "link-slow", link.source, link.target, text)
    slow = {pair: speed for pair, speed in speeds.items() if speed < _GIGABIT and pair not in reported}
    if slow and len(slow) == len(speeds) - len(reported):
        source, target = min(slow, key=lambda pair: slow[pair])
        text = (
            f"the best of {len(slow)} links carries {rate(max(slow.values()))}; the slowest is "
            f"{_way(evidence, source, target)} with {rate(slow[source, target])}"
        )
        yield _about(evidence, "network-slow", source, target, text)


def link_latency(evidence: Evidence) -> Iterator[Finding]:
    trips = {(link.source, link.target): link.rtt_us for link in evidence.links if not link.problem}
    for (source, target), rtt_us, middle in outliers(trips, _LATENCY):
        if rtt_us - middle > _LATENCY_US:
            text = (
                f"a round trip on {_way(evidence, source, target)} takes {rtt_us:.0f} µs, the median of all links is "
                f"{middle:.0f} µs"
            )
            yield _about(evidence, "link-latency", source, target, text)


def link_loss(evidence: Evidence) -> Iterator[Finding]:
    for link in evidence.links:
        share = link.retransmitted / link.segments if link.segments else 0.0
        if not link.problem and link.segments >= _FEW_SEGMENTS and share > _LOSS:
            text = (
                f"of {link.segments} packets on {_way(evidence, link.source, link.target)} {link.retransmitted} "
                f"({share:.1%}) were sent again"
            )
            yield _about(evidence, "link-loss", link.source, link.target, text)


def _about(evidence: Evidence, code: str, source: int, target: int, text: str) -> Finding:
    return evidence.about(code, text, [evidence.of(source), evidence.of(target)])


def _way(evidence: Evidence, source: int, target: int) -> str:
    return f"the link from {evidence.host_of(source)} to {evidence.host_of(target)}"


def clocks(evidence: Evidence) -> Iterator[Finding]:
    """By the round trips between hosts; else by the moment at which the leader's plan came, which may be late."""
    reported: set[str] = set()
    offsets: dict[str, list[tuple[float, str]]] = {}
    for link in evidence.links:
        if not link.problem and abs(link.clock_offset_s) > _CLOCK_S + link.clock_error_s:
            source, target = evidence.host_of(link.source), evidence.host_of(link.target)
            offsets.setdefault(target, []).append((link.clock_offset_s, source))
            offsets.setdefault(source, []).append((-link.clock_offset_s, target))
    while offsets:  # the host that differs from most others is the one that is wrong
        host = max(offsets, key=lambda name: len(offsets[name]))
        offset, other = offsets.pop(host)[0]
        reported.add(host)
        offsets = {name: left for name, each in offsets.items() if (left := [one for one in each if one[1] != host])}
        way = "ahead of" if offset > 0 else "behind"
        text = f"the clock of {host} is {_duration(offset)} {way} that of {other}"
        yield evidence.about("clock-offset", text, evidence.hosts[host])
    for number, measured in evidence.measured.items():
        facts = evidence.of(number)
        offset_s = measured.clock_offset_s
        if offset_s is not None and not -_CLOCK_S < offset_s < _LATE_PLAN_S and not reported:
            way = "ahead of" if offset_s > 0 else "behind"
            text = f"the clock of rank {facts.place.rank} is {_duration(offset_s)} {way} that of the rank that leads"
            yield evidence.about("clock-offset", text, [facts])


def _duration(seconds: float) -> str:
    seconds = abs(seconds)
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def private_master(evidence: Evidence) -> Iterator[Finding]:
    """A link-local MASTER_ADDR without its zone can't be connected to."""
    address = evidence.arrivals[0].place.master_addr
    try:
        local = ipaddress.ip_address(address).is_link_local and "%" not in address
    except ValueError:
        return
    if local and ":" in address:
        text = f"MASTER_ADDR is {address}, an address of one link, without its interface"
        yield finding("master-unresolved", text, fix=f"Write {address}%INTERFACE, or take a global address.")


START = (meeting_place, unresolved, addresses, interfaces, networks, hostnames, infiniband, private_master)
MEASURED = (link_problems, link_speed, link_latency, link_loss, clocks)
