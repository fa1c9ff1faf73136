"""Selects the ranks to which a rule of `check` applies, and fills in the rule's text."""

from __future__ import annotations

import string
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from device_communicators.base.cores import spans
from parallel_state.tools.check.evidence import Evidence, grouped, ranks_of
from parallel_state.tools.check.facts import Facts, named, rate

Group = Sequence[Facts]
Words = Mapping[str, Any]


class Match:
    def __init__(
        self,
        group: Group = (),
        *,
        ranks: Iterable[int] | None = None,
        hosts: Iterable[str] | None = None,
        severity: str = "",
        fix: str = "",
        **words: Any,
    ) -> None:
        """A group of ranks to which a rule applies.

        `ranks` and `hosts`, which the report names, default to those of `group`; `severity` and `fix` to those of the
        rule. `words`: values for the fields of the rule's text.
        """
        self.group, self.words, self.severity, self.fix = group, words, severity, fix
        self.ranks, self.hosts = ranks, hosts


Predicate = Callable[[Evidence], Iterable[Match]]
Test = Callable[[Evidence, Group], Words | bool | None]
"""Tests if a rule applies to a group. Returns words for the rule's text, or True if no words are needed."""


def hosts(test: Test) -> Predicate:
    return lambda evidence: _tested(evidence, evidence.hosts.values(), test)


def groups(key: Callable[[Facts], Hashable], test: Test = lambda evidence, group: True) -> Predicate:
    """Returns a function that groups each host's ranks by `key(facts)` (None: in no group), and yields the groups for
    which `test` is true.
    """

    def find(evidence: Evidence) -> Iterator[Match]:
        for ranks in evidence.hosts.values():
            alike = grouped((facts for facts in ranks if key(facts) is not None), key)
            yield from _tested(evidence, alike.values(), test)

    return find


def alike(keys: Callable[[Facts], Iterable[Hashable]], test: Test = lambda evidence, group: True) -> Predicate:
    """Returns a function that groups all ranks by each key in `keys(facts)`, and yields the groups for which `test` is
    true.
    """

    def find(evidence: Evidence) -> Iterator[Match]:
        pairs = [(key, facts) for facts in evidence.arrivals for key in keys(facts)]
        for key, each in grouped(pairs, lambda pair: pair[0]).items():
            yield from _tested(evidence, [[facts for _, facts in each]], test, key=key)

    return find


def differing(read: Callable[[Facts], str], what: str = "") -> Predicate:

    def find(evidence: Evidence) -> Iterator[Match]:
        alike = grouped(filter(read, evidence.arrivals), read)
        if len(alike) > 1:
            ordered = sorted(alike.items(), key=lambda item: -len(item[1]))
            values = "; ".join(f"{value} on {_ranks_and_hosts(evidence, group)}" for value, group in ordered)
            odd = [facts for _, group in ordered[1:] for facts in group]
            yield Match(odd, what=what, values=values)

    return find


def _tested(evidence: Evidence, each: Iterable[Group], test: Test, **words: Any) -> Iterator[Match]:
    for group in each:
        found = test(evidence, group)
        if found:
            yield Match(group, **words, **({} if found is True else found))


def _ranks_and_hosts(evidence: Evidence, group: Group) -> str:
    names = list(dict.fromkeys(map(evidence.host, group)))
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{named(ranks_of(group))} ({shown})"


def text_of(found: str, evidence: Evidence, match: Match) -> str:
    return _Formatter(evidence, match.group).vformat(found, (), match.words)


class _Formatter(string.Formatter):
    def __init__(self, evidence: Evidence, group: Group) -> None:
        self._evidence, self._group = evidence, group

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = str(key)
        if name in kwargs:
            return kwargs[name]
        return _WORDS[name](self._evidence, self._group) if name in _WORDS else getattr(self._group[0], name)

    def format_field(self, value: Any, format_spec: str) -> str:
        form = _FORMS.get(format_spec)
        return form(value) if form is not None else str(super().format_field(value, format_spec))


def _interfaces(facts: Facts) -> str:
    usable = (each for each in facts.network.interfaces if each.kind != "loopback" and each.addresses)
    return ", ".join(f"{each.name} ({', '.join(each.addresses)})" for each in usable) or "none"


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def _cores(each: Sequence[int]) -> str:
    return f"core {each[0]}" if len(each) == 1 else f"cores {spans(each)}"


_WORDS: dict[str, Callable[[Evidence, Group], Any]] = {
    "world_size": lambda evidence, _: evidence.world_size,
    "count": lambda _, group: len(group),
    "host": lambda evidence, group: evidence.host(group[0]),
    "ranks": lambda _, group: named(ranks_of(group)),
    "hosts": lambda evidence, group: list(dict.fromkeys(map(evidence.host, group))),
    "ranks_and_hosts": _ranks_and_hosts,
    "hosts_and_pids": lambda evidence, group: " and ".join(f"{evidence.host(each)} (pid {each.pid})" for each in group),
    "interfaces": lambda _, group: _interfaces(group[0]),
    "ranks_of_host": lambda evidence, group: len(evidence.hosts[evidence.host(group[0])]),
}
_FORMS: dict[str, Callable[[Any], str]] = {
    "size": _size,
    "rate": rate,
    "cores": _cores,
    "ranks": named,
    "list": ", ".join,
    "number": lambda items: str(len(items)),
    "on_ranks": lambda values: "; ".join(f"{value} on {named(ranks)}" for value, ranks in values.items()),
    "on_hosts": lambda values: "; ".join(f"{value} on {', '.join(names)}" for value, names in values.items()),
}
