from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from harness.peers import DEFAULT, SETUP, Peers
from harness.rounds import NOTICED, Plan, RankRow, Row

from parallel_state.tools.bench.report import figure, p50, p99, recorded, size_name

__all__ = ["parser", "peers", "plan", "print_ranks", "print_rows", "print_table", "ratio", "recorded"]


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=30, help="rounds of each case; slow cases get fewer")
    found.add_argument("--round-ms", type=float, default=5.0, help="target duration of one candidate's round")
    found.add_argument("--case-s", type=float, default=8.0, help="approximate maximum seconds per case")
    found.add_argument("--peers", type=Path, default=DEFAULT, help="folder with the installed peers")
    found.add_argument("--no-peers", action="store_true", help="measure this library and torch.distributed only")
    found.add_argument("--no-pin", action="store_true", help="don't pin each rank to its own core")
    found.add_argument("--json", type=Path, help="raw samples, machine, commit and versions")
    return found


def plan(options: argparse.Namespace) -> Plan:
    return Plan(rounds=options.rounds, round_s=options.round_ms / 1e3, case_s=options.case_s)


def peers(options: argparse.Namespace) -> Peers:
    if options.no_peers:
        return Peers(Path("/nonexistent"), with_own_mpi=False)
    found = Peers(options.peers.resolve())
    if found.missing():
        print(f"without {', '.join(found.missing())}: {SETUP}")
    return found


def ratio(row: Row, ours: str, peer: str) -> float | None:
    if not row.us.get(ours) or not row.us.get(peer):
        return None
    return p50(row.us[ours]) / p50(row.us[peer])


def print_table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[float | None]]]) -> None:
    rows = list(rows)
    if not rows:
        return
    wide = max(len(name) for name, _ in rows) + 2
    widths = [max(9, len(column) + 2) for column in columns]
    print(
        f"\n{title}\n{'':{wide}}" + "".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True))
    )
    for name, figures in rows:
        cells = (f"{figure(each):>{width}}" for each, width in zip(figures, widths, strict=True))
        print(f"{name:{wide}}" + "".join(cells), flush=True)


def print_rows(title: str, rows: Sequence[Row], column: Callable[[Row], str], pairs: Sequence[tuple[str, str]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row.us))
    columns = [column(row) for row in rows]
    for what, of in (("p50", p50), ("p99", p99)):
        lines = [(name, [of(row.us[name]) if row.us.get(name) else None for row in rows]) for name in names]
        print_table(f"{title}: {what}, us", columns, lines)
    ratios = [(f"{ours} ÷ {peer}", [ratio(row, ours, peer) for row in rows]) for ours, peer in pairs]
    print_table(f"{title}: ratios of medians", columns, [line for line in ratios if any(line[1])])
    busy = max((row.strangers_cores or 0.0 for row in rows), default=0.0)
    if busy > NOTICED:
        print(f"{title}: others used up to {busy:.1f} cores meanwhile; these figures are of little use")
    for row in rows:
        for name, problem in row.wrong.items():
            print(f"no figures of {name}, {column(row)}: {problem.splitlines()[0]}")


def print_ranks(rows: Sequence[RankRow], left_out: dict[str, str]) -> None:
    from harness.ranks import TORCH  # imports torch's compiler, which takes a second

    for operation in dict.fromkeys(row.case["operation"] for row in rows):
        chosen = [row for row in rows if row.case["operation"] == operation]
        names = list(dict.fromkeys(name for row in chosen for name in row.us))
        columns = [size_name(row.case["bytes"]) for row in chosen]
        title = f"{operation}, {chosen[0].case['ranks']} ranks, {chosen[0].case['dtype']}"
        pairs = [(name, f"{TORCH}, {name.rpartition(', ')[2]}") for name in names if not name.startswith(TORCH)]
        print_rows(title, chosen, lambda row: size_name(row.case["bytes"]), pairs)
        for what in ("algbw", "busbw"):
            lines = [(name, [row.figures.get(name, {}).get(what) for row in chosen]) for name in names]
            print_table(f"{title}: {what}, 10⁹ B/s", columns, lines)
        eager = [name for name in names if name.endswith(", eager")]
        print_table(f"{title}: host, us", columns, [(n, [row.host_us.get(n) for row in chosen]) for n in eager])
        peer = f"{TORCH}, eager"
        shares = [(f"{n} ÷ {peer}", [_share(row.host_us, n, peer) for row in chosen]) for n in eager if n != peer]
        print_table(f"{title}: host, ratios of medians", columns, shares)
        for name, why in {name: why for row in chosen for name, why in row.refused.items()}.items():
            print(f"not measured: {name}: {why}")
    for mode, why in left_out.items():
        print(f"not measured: {mode}: {why}")


def _share(found: dict[str, float], name: str, peer: str) -> float | None:
    return found[name] / found[peer] if name in found and peer in found else None
