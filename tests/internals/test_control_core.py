"""The core of the control plane under any fault in any order: seeded simulation and exhaustive exploration.
Faults patched into the core prove that the checks can fail."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from device_communicators.cpu import native_build
from tests.extent import LONG
from tests.helpers.compiled import kept

ROOT = Path(__file__).parents[2]
CORE = ROOT / "device_communicators" / "control" / "csrc"
PROGRAMS = ROOT / "tests" / "native"
DEADLINE_S = 3600 if LONG else 300
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS")


def _program(name: str, patch: tuple[str, str, str] | None = None) -> Path:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = PROGRAMS / f"control_{name}.cpp"
    flags = (*FLAGS, *SANITIZED) if name == "fuzzer" else FLAGS
    sources = [CORE / f"{unit}.cpp" for unit in ("core", "agreement", "frame", "store", "hmac", "record")]
    if patch is not None:
        text = (CORE / patch[0]).read_text()
        assert text.count(patch[1]) == 1, f"{patch[0]} has no longer one {patch[1]!r}"

    def build(made: Path) -> None:
        units = list(sources)
        if patch is not None:
            changed = made.with_name(patch[0])
            changed.write_text((CORE / patch[0]).read_text().replace(patch[1], patch[2]))
            units = [changed if unit.name == patch[0] else unit for unit in units]
        command = [*compiler, *flags, f"-I{CORE}", *map(str, units), str(program), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=native_build.BUILD_TIMEOUT_S)
        assert done.returncode == 0, done.stderr[:5000]

    read = [*sources, *(CORE / f"{unit}.h" for unit in ("core", "frame", "store", "hmac", "record")), program]
    return kept(f"control_{name}", [*compiler, *flags, patch], read, build)


def _run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=DEADLINE_S)


def _check(name: str, *runs: Sequence[object]) -> None:
    """Runs a program once for each list of arguments, at once. Caches success: it depends on nothing else."""
    program = _program(name)

    def run(made: Path) -> None:
        with ThreadPoolExecutor() as threads:
            done = list(threads.map(lambda arguments: _run(program, *arguments), runs))
        for each in done:
            assert each.returncode == 0, each.stdout
        made.write_text("".join(each.stdout for each in done), encoding="utf-8")

    kept(f"control_{name}_run", runs, [program], run)


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    # 0.13 s a seed with 1,000 ranks
    [(5, 3000), (16, 1000), (96, 100), (1000, 200)]
    if not LONG
    else [(5, 30_000), (16, 10_000), (96, 1000), (1000, 10_000)],
)
def test_any_fault_at_any_moment(ranks: int, seeds: int) -> None:
    half = seeds // 2
    _check("simulator", *(("--ranks", ranks, "--seed", seed, "--seeds", half) for seed in (1, 1 + half)))


def test_single_cases() -> None:
    _check("cases", ())


@pytest.mark.slow
def test_mutated_bytes_and_any_events_under_sanitizers() -> None:
    done = _run(_program("fuzzer"), "--seconds", 600 if LONG else 15)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert "all holds" in done.stdout


@pytest.mark.parametrize(("ranks", "hosts", "seed"), [(1024, 128, 1), (1024, 128, 4), (64, 8, 81), (64, 16, 332)])
def test_a_job_ends_with_one_farewell_a_connection(ranks: int, hosts: int, seed: int) -> None:
    drawn = () if ranks == 64 else ("--hosts", hosts)
    _check("simulator", ("--ranks", ranks, *drawn, "--fault", "storm", "--seed", seed))


@pytest.mark.parametrize(("ranks", "hosts"), [(5, 2), (16, 4), (24, 6)])
def test_ranks_that_leave_one_by_one_are_not_taken_for_dead(ranks: int, hosts: int) -> None:
    """In seed 166 of 16 ranks, a lead leaves, then its successor, and the last rank of the host is killed at once."""
    seeds = 2000 if LONG else 200
    _check("simulator", ("--ranks", ranks, "--hosts", hosts, "--fault", "leave", "--seeds", seeds))


@pytest.mark.parametrize(("ranks", "seeds"), [(5, 1000), (16, 300)])
def test_ranks_that_leave_right_after_a_verdict_got_the_same(ranks: int, seeds: int) -> None:
    _check("simulator", ("--ranks", ranks, "--fault", "depart", "--seeds", 10 * seeds if LONG else seeds))


def test_the_heartbeat_limit_does_not_restart_with_a_new_lead() -> None:
    """A host is powered off, then the lead of the other host dies."""
    _check("simulator", ("--ranks", 16, "--hosts", 2, "--fault", "new_lead", "--seeds", 3000 if LONG else 300))


def test_a_seed_replays() -> None:
    first, second = (_run(_program("simulator"), "--seed", 7, "--ranks", 8, "--trace") for _ in range(2))
    assert first.stdout == second.stdout
    assert first.stdout.count("\n") > 100


def test_the_events_of_a_core_replay(tmp_path: Path) -> None:
    for seed, ranks, begins in ((1, 5, True), (2, 5, True), (10, 96, False), (12, 96, False)):
        record = tmp_path / str(seed)
        _run(_program("simulator"), "--ranks", ranks, "--seed", seed, "--record", record)
        assert b"token" not in record.read_bytes()
        done = _run(_program("simulator"), "--replay", record)
        assert done.stdout.endswith("the replay has the same digest\n")
        assert ("meets the world" in done.stdout) == begins
    whole = record.read_bytes()
    record.write_bytes(whole[:-1])
    assert "malformed" in _run(_program("simulator"), "--replay", record).stdout
    record.write_bytes(whole[:12] + bytes([whole[12] ^ 1]) + whole[13:])
    assert "ANOTHER digest" in _run(_program("simulator"), "--replay", record).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "crashes", "drops", "first"),
    [
        ("1,1,1", 1, 0, 0),
        ("1,1,1", 2, 0, 0),
        ("1,1,1", 0, 1, 0),
        ("2,1", 1, 0, 0),
        ("2,2", 1, 0, 1),
        # Not "2,1" with two crashes: a crash within 0.5 s of the deadline leaves its call undecided.
        *([("1,1,1", 1, 1, 0), ("2,1", 1, 1, 0), ("2,2", 1, 0, 0), ("3,1", 1, 0, 1)] if LONG else []),
    ],
)
def test_all_orders(hosts: str, crashes: int, drops: int, first: int) -> None:
    done = _run(_program("explorer"), "--hosts", hosts, "--crashes", crashes, "--drops", drops, "--first", first)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split(" states")[0]) > 1000, "the exploration ended early"


EXPLORED = [
    ("explorer", ("--crashes", "1")),
    ("explorer", ("--crashes", "2")),
    ("explorer", ("--hosts", "2,2", "--first", "1")),
]


def _simulated(fault: str, ranks: int, hosts: int, seeds: int = 60) -> list[tuple[str, Sequence[object]]]:
    return [("simulator", ("--fault", fault, "--ranks", ranks, "--hosts", hosts, "--seeds", seeds))]


FAULTS = [
    pytest.param(
        "agreement.cpp", "else if (ask_all(entry)) conclude", "else if (ask_all(entry) || true) conclude", EXPLORED,
        "two verdicts", id="a new decider doesn't ask",
    ),
    pytest.param(
        "agreement.cpp", "if (index < round.promised) return;",
        "if (index < round.promised && kind == FrameKind::kAsk) return;", EXPLORED[2:], "two verdicts",
        id="an answer is no promise",
    ),
    pytest.param(
        "agreement.cpp", "return tell_verdict(key, round.verdict);",
        "return tell_verdict(key, std::exchange(round.verdict, nullptr));",
        EXPLORED, "two verdicts|decid", id="a verdict is dropped once it was delivered",
    ),
    pytest.param(
        "core.cpp", "FrameKind::kState, packed(ends_)", "FrameKind::kState, packed(Ends{*ends_.rbegin()})",
        _simulated("relay", 32, 4), "know|learns", id="a state is sent in part",
    ),
    pytest.param(
        "core.cpp", "now_ > alarm_ + config_.pause) excuse(", "now_ > kNever - 1) excuse(",
        _simulated("pause", 16, 8), "takes rank", id="judges right after its own pause",
    ),
    pytest.param(
        "core.cpp", "  peer.refused = std::min(peer.refused, now_);\n", "", _simulated("kill_host", 32, 4),
        "know|undecided",
        id="refused dials are ignored",
    ),
    pytest.param(
        "core.cpp", "!is_gone(proc_at(index)) && !is_stale(index)", "!is_gone(proc_at(index))",
        _simulated("pause_lead", 32, 4), "know", id="nobody acts for a lead that is stopped",
    ),
    pytest.param(
        "core.cpp", "|| (is_alert() && now_ -", "|| (false && now_ -", _simulated("pause_two", 32, 4, 400), "know",
        id="a death is told at the usual pace",
    ),
    pytest.param(
        "core.cpp", "leads || may_not_yield()", "leads", [("simulator", ("--ranks", 5, "--seed", 9573))],
        "know", id="a lead that acted yields at once",
    ),
    pytest.param(
        "core.cpp", "if (!peer.for_watch) peer.next_dial", "if (false) peer.next_dial",
        [("cases", ())], "a_refused_call_does_not_delay_the_watch\n  line", id="a refused call delays the watch",
    ),
    pytest.param(
        "core.cpp", "hunt + config_.settle >= waits_until_) return;", "hunt >= 0 && leaving_ != kNever) return;",
        [("simulator", ("--ranks", 64, "--seed", 1706))], "know", id="a lead that leaves judges nothing",
    ),
    pytest.param(
        "core.cpp", "owes_farewell() || owes_verdict()", "owes_verdict()", _simulated("leave", 16, 4, 400),
        "which left", id="nobody waits for a domain that leaves",
    ),
    pytest.param(
        "core.cpp", "if (now_ - peer->second.refused >= config_.settle)", "if (true)",
        [("cases", ())], "comes_over_another\n  line", id="a refused dial is judged at once",
    ),
    pytest.param(
        "core.cpp", "has_left(event.proc) && has_left(self_)", "has_left(event.proc)", [("cases", ())],
        "farewell_reports_dials_nobody\n  line", id="a farewell that doesn't report a leaver counts for it",
    ),
    pytest.param(
        "agreement.cpp", "if (!sits(members) || !contains(members, self_)) return false;",
        "if ((sits(members), false) || !contains(members, self_)) return false;",
        [("cases", ())], "a_seat_of_another_opens_nothing\n  line", id="the seat of a frame is not checked",
    ),
    pytest.param(
        "core.cpp", "  if (peer.out == connection) peer.out = -1;\n", "",
        [("fuzzer", ("--seconds", 5))], "out_of_range",
        id="a peer keeps a connection that is gone",
    ),
    pytest.param(
        "core.cpp", "  bool owes = false;\n", "  if (now_ >= waits_until_) return false;\n  bool owes = false;\n",
        [("cases", ())], "leaves_first_connects_to_those_that_never_heard_of_it\n  line",
        id="a lead that leaves before its domain connects to nobody",
    ),
    pytest.param(
        "core.cpp", "owes_farewell() || owes_verdict()", "owes_farewell()",
        [("simulator", ("--ranks", 16, "--fault", "depart", "--seeds", 300))], "two verdicts",
        id="a decider leaves before its verdict arrived",
    ),
    pytest.param(
        "core.cpp", "  publish();  // a farewell", "  // a farewell", [("cases", ())],
        "farewell_that_arrives_meanwhile\n  line", id="a leaver keeps to itself who left meanwhile",
    ),
    pytest.param(
        "core.cpp", "    silences_[domain] = std::max(silences_[domain], silences[domain]);\n", "",
        _simulated("new_lead", 16, 2, 300), "know", id="the heartbeat limit restarts with a new lead",
    ),
    pytest.param(
        "core.cpp",
        "? std::min(now_, watch.dial_at - unheard()) : now_",
        "? now_ : now_",
        _simulated("new_lead", 16, 2, 300),
        "know",
        id="the heartbeat limit restarts with a new lead until a silence is published",
    ),
    pytest.param(
        "core.cpp", "if (silence.silent == known.silent", "if (!silence.silent || known.silent", [("cases", ())],
        "a_silence_that_ended_does_not_shorten_the_next_leads_limit\n  line", id="a published silence never ends",
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text", "instead", "runs", "match"), FAULTS if LONG else FAULTS[::4])
def test_a_fault_of_the_core_is_noticed(
    file: str, text: str, instead: str, runs: Sequence[tuple[str, Sequence[object]]], match: str
) -> None:
    found = ""
    for name, arguments in runs:
        done = _run(_program(name, (file, text, instead)), *arguments)
        found += done.stdout + done.stderr if done.returncode != 0 else ""
        assert done.returncode in (0, 1, -signal.SIGABRT), done
    assert any(word in found for word in match.split("|")), found or "no invariant failed"
