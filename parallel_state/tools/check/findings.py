"""Findings of a report: severities, exit codes, and the format of ranks and rates. The rules are in `rules`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from device_communicators.base.errors import format_ranks

INFO, WARNING, ERROR = "info", "warning", "error"
SEVERITIES = (INFO, WARNING, ERROR)
EXIT_CODES = {"": 0, INFO: 0, WARNING: 1, ERROR: 2}


def named(ranks: Iterable[int]) -> str:
    """Returns `rank 3` or `ranks 0-3, 7`."""
    each = sorted(set(ranks))
    return f"rank {each[0]}" if len(each) == 1 else f"ranks {format_ranks(each).strip('[]')}"


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"


class Finding(msgspec.Struct):
    severity: str
    code: str
    found: str
    why: str
    fix: str
    ranks: list[int] = []
    hosts: list[str] = []

    @property
    def where(self) -> str:
        ranks = named(self.ranks) if self.ranks else ""
        return ", ".join(filter(None, (ranks, " ".join(self.hosts))))


def worst(findings: Sequence[Finding]) -> str:
    return max((each.severity for each in findings), key=SEVERITIES.index, default="")
