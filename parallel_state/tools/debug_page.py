"""Adds a page to torch's debug server (2.15 and later): the calls in which ranks wait, and the ranks that are missing
in them.

from torch.distributed.debug import start_debug_server
start_debug_server(handlers=[DebugPage()])      # every rank; http://HOST-OF-RANK-0:25999/parallel_state
"""

from __future__ import annotations

import os
from html import escape
from types import SimpleNamespace

from device_communicators.base.errors import format_ranks
from parallel_state.tools.live import MOST_SHOWN, Job, describe, find, state_in_words, waits

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } small, td.soft { color: light-dark(#596273, #9aa4b2); }
p.wait { border-left: 4px solid #d97706; background: light-dark(#fff7ed, #2b2013); padding: .6rem .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; min-width: 40rem; }
td, th { text-align: left; padding: .35rem .6rem; vertical-align: top; }
tr { border-bottom: 1px solid light-dark(#e2e6ec, #333b46); } tr.late { background: light-dark(#fef2f2, #2f1a1a); }
tr.late td:first-child { box-shadow: inset 4px 0 #dc2626; } td:first-child { font-variant-numeric: tabular-nums; }
td.soft { white-space: nowrap; } p, td:last-child { overflow-wrap: anywhere; }
"""


class DebugPage:
    fetch_timeout = 0.0
    """Set by torch, and unused: requests to ranks have their own time limits."""

    def __init__(self) -> None:
        self._pid = str(os.getpid())

    def routes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(path="/parallel_state", handler=lambda request: self.html().encode())]

    def nav_links(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(path="/parallel_state", label="parallel_state")]

    def templates(self) -> dict[str, str]:
        return {}

    def dump_filename(self) -> str:
        return "parallel_state"

    def dump(self) -> str:
        try:
            return "\n".join(describe(find(self._pid)))
        except LookupError as error:
            return str(error.args[0])

    def html(self) -> str:
        try:
            body = _body(find(self._pid))
        except LookupError as error:
            body = f"<h1>No rank answers</h1><p>{escape(error.args[0])}</p>"
        return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="2">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>parallel_state</title><style>{_STYLE}</style></head>
<body>{body}</body></html>
"""


def _body(job: Job) -> str:
    found = waits(job)
    late = {rank for wait in found for rank in wait.missing}
    processes = {rank: escape(f"{host}, pid {pid}") for rank, (host, pid) in job.processes.items()}
    order = sorted(job.world, key=lambda rank: rank not in late)  # awaited ranks first
    rows = "".join(
        f'<tr{" class=late" * (rank in late)}><td>{rank}</td><td class="soft">{processes.get(rank, "another host")}'
        f"</td><td>{escape(state_in_words(job, rank))}</td></tr>\n"
        for rank in order[:MOST_SHOWN]
    )
    hosts, more = len({host for host, _ in job.processes.values()}), len(order) - MOST_SHOWN
    size = f"{len(order)} ranks" + (f" on {hosts} hosts" if hosts > 1 and more <= 0 else "")
    heading = f"Ranks {format_ranks(sorted(late))} are awaited" if late else "No rank is awaited"
    cards = "".join(f'<p class="wait">{escape(str(wait))}</p>\n' for wait in found)
    return f"""<h1>{heading} <small>{size}</small></h1>
{cards}<div class="wide"><table><thead><tr><th>Rank</th><th>Process</th><th>State</th></tr></thead><tbody>
{rows}</tbody></table></div>
{f"<p>{more} more ranks are not shown.</p>" if more > 0 else ""}<p><small><a href="/">torch's pages</a></small></p>"""
