"""Tries all interleavings of the C++ of the message queue, and of collectives within a host, in small cases."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from device_communicators.cpu import native_build
from tests.extent import LONG
from tests.helpers.compiled import kept

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "device_communicators" / "cpu" / "csrc"
CONTROL = "../../control/csrc/"
NATIVE = ROOT / "tests" / "native"
SOURCES = [
    CSRC / CONTROL / "end_listeners.h",
    *sorted(CSRC.glob("*.h")),
    *(CSRC / f"{name}.cpp" for name in ("queue", "wait", "host_group", "collectives")),
]
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_ASSERTIONS")
DEADLINE_S = 3600 if LONG else 300
SMALLER = {
    # Polls that follow each other find nothing that one poll can't find.
    "kProbes = 8;": "kProbes = 0;",
    "kSpinsPerLook = 32;": "kSpinsPerLook = 1;",
    "kSmallSlots = 16;": "kSmallSlots = 2;",
    "kLargeSlots = 4;": "kLargeSlots = 1;",
    "kMaxRanks = 64;": "kMaxRanks = 4;",
    "kKept = 64;": "kKept = 8;",
    "kPage = 4096;\nconstexpr": "kPage = 128;\nconstexpr",
    "constexpr std::size_t kKiB = 1024;": "constexpr std::size_t kKiB = 1;\n  return {32, 32, 32, 32, 32};",
}

THREE = "--messages 64,64,64"
FENCES = f"{THREE} --barriers fail"
POLLING = f"{THREE} --way poll"
QUEUE = {
    "one reader": "--messages 64,64,64,64,64",
    "messages of no and two chunks": "--messages 0,100,64",
    "two readers": "--readers 2 --messages 64,64",
    "two readers, one slot": "--readers 2 --slots 1 --messages 0,0",
    "no membarrier": f"{FENCES},64",
    "no membarrier, two readers": "--readers 2 --messages 64 --barriers fail",
    "membarrier fails after registration": f"{THREE} --barriers unsure",
    "written if there is room": f"{THREE},64 --way fit",
    "started calls": f"{POLLING},64",
    "started calls, no membarrier": f"{FENCES} --way poll",
    "the writer leaves": f"{THREE} --leaver writer",
    "readers leave": f"{THREE},64 --leaver reader",
    "two readers that reuse a slot": "--readers 2 --messages 64,64,64",
}
TICKS = {
    "gathers": "--calls ggg",
    "broadcasts that nobody waits for": "--calls bbbb",
    "a broadcast after a gather": "--calls gbb",
    "both ranks send": "--calls aBw",
    "a rank that is far behind": "--calls bppppppppp",
    "gathers without membarrier": "--calls gg --barriers fail",
    "a broadcast to two ranks": "--ranks 3 --calls b",
    "a mismatch of three ranks": "--ranks 3 --calls x",
    "a barrier of three ranks": "--ranks 3 --calls w",
}
LONG_CASES = {"two readers that reuse a slot", "a rank that is far behind", "a barrier of three ranks"}
RACE = r"(reads|writes) block . while"
STUCK = "nobody moves any more"
ORDERS = [
    ("value.store in publish", "relaxed", THREE, RACE),
    ("value.load in read", "relaxed", THREE, RACE),
    ("value.load in sleep_for", "acq_rel", FENCES, STUCK),
    ("value.load in begin_sleep", "acq_rel", f"{FENCES} --way poll", STUCK),
    ("sleepers.add in sleep_for", "acq_rel", FENCES, STUCK),
    ("sleepers.add in begin_sleep", "acq_rel", f"{FENCES} --way poll", STUCK),
]
LEAVING = [
    ("writer left.or in leave", "relaxed", f"{THREE} --leaver writer", "can't be received"),
    ("reader left.load in loss", "relaxed", f"{THREE} --leaver writer", "can't be received"),
    ("reader left.or in leave", "relaxed", f"{THREE},64 --leaver reader", "can't be sent"),
    ("writer left.load in loss", "relaxed", f"{THREE},64 --leaver reader", "can't be sent"),
]
NEEDLESS = {
    "sleepers.sub in sleep_for",  # a publisher that sees the sleeper for too long makes a system call in vain
    "sleepers.sub in end_sleep",
    "note.store in publish",  # a note that differs is looked up in the archive
    "note.load in note_of",
}
KNOWN = {
    f"{role} {site}" for role in ("writer", "reader", "rank") for site in (*NEEDLESS, *(each[0] for each in ORDERS))
}
FAULTS = {
    "the last reader is not awaited": (
        "for (int reader = 1; reader <= shape_.readers; ++reader) {",
        "for (int reader = 1; reader < shape_.readers; ++reader) {",
        "--readers 2 --slots 1 --messages 0,0",
        "can't be received",
    ),
    "one slot too many": (
        "await(reader, chunk - shape_.chunks);",
        "await(reader, chunk - shape_.chunks - 1);",
        THREE,
        "can't be received",
    ),
    "room for one chunk too many": (
        "return least >= last - shape_.chunks;",
        "return least + 1 >= last - shape_.chunks;",
        f"{THREE},64 --way fit",
        "can't be sent",
    ),
    "a chunk is published before it is written": (
        "    fill(slot(chunk));\n    written_ = chunk;\n    counter(0).publish(chunk, chunk);\n",
        "    counter(0).publish(chunk, chunk);\n    fill(slot(chunk));\n    written_ = chunk;\n",
        THREE,
        RACE,
    ),
    "a publisher has no fence of the compiler": (
        "  std::atomic_signal_fence(std::memory_order_seq_cst);\n",
        "",
        THREE,
        STUCK,
    ),
    "a publisher has no fence": (
        "if (fences.load(std::memory_order_relaxed) != 0) std::atomic_thread_fence(std::memory_order_seq_cst);",
        "",
        FENCES,
        STUCK,
    ),
    "a sleeper has no barrier": (
        "membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) || counter.fences",
        "true || counter.fences",
        THREE,
        STUCK,
    ),
    "a sleeper of a started call has no barrier": (
        "membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) || fences",
        "true || fences",
        POLLING,
        STUCK,
    ),
    "sleeps are long though a wake-up may be lost": (
        "kUnsureSliceNs = 1'000'000;",
        "kUnsureSliceNs = 20'000'000;",
        f"{THREE} --barriers unsure",
        STUCK,
    ),
    "the kernel compares with a newer value": (
        "FUTEX_WAIT, static_cast<std::uint32_t>(seen)",
        "FUTEX_WAIT, static_cast<std::uint32_t>(seen - seen + counter.read())",
        THREE,
        STUCK,
    ),
    "a started call sleeps though the value is reached": (
        "if (sure && *seen < target) return true;",
        "if (sure && *seen <= target) return true;",
        POLLING,
        STUCK,
    ),
    "one sleeper is woken": ("FUTEX_WAKE, 1 << 30", "FUTEX_WAKE, 1", "--readers 2 --messages 64", STUCK),
}
FAULTS_OF_TICKS = {
    "a slot is reused before its readers have continued": (
        "wait_all(tick + 1, false)",
        "wait_all(tick, false)",
        "--calls bbb",
        RACE,
    ),
    "that all wrote is taken for that all read": (
        "all_reached_ > tick ?",
        "all_reached_ >= tick ?",
        "--calls gbb",
        RACE,
    ),
    "an archive entry is overwritten": (
        "if (tick_ + 4 > kKept) tick = std::max(tick, tick_ + 4 - kKept);",
        "",
        "--calls bppppppppp",
        "a call fails",
    ),
    "a tick is published before its data": (
        "    write(place(rank_, slot), start, length);\n    const std::uint64_t tick = *slot.used = publish();\n",
        "    const std::uint64_t tick = *slot.used = publish();\n    write(place(rank_, slot), start, length);\n",
        "--calls gg",
        RACE,
    ),
    "a rank that waits for no other has no fence": (
        "  if (is_part_) return Status::kDone;\n  std::atomic_thread_fence(std::memory_order_seq_cst);\n",
        "  if (is_part_) return Status::kDone;\n",
        "--calls x",
        "nobody detects a mismatch",
    ),
}


def _program(name: str, fault: tuple[str, str] | None = None) -> Path:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    changes = SMALLER if fault is None else {**SMALLER, fault[0]: fault[1]}
    program = [NATIVE / f"{name}.cpp", NATIVE / "interleavings.h"]

    def build(made: Path) -> None:
        found = dict.fromkeys(changes, 0)
        for source in SOURCES:
            text = source.read_text().replace(f'"{CONTROL}', '"')
            for old, new in changes.items():
                found[old] += text.count(old)
                text = text.replace(old, new)
            (made.parent / source.name).write_text(text)
        assert set(found.values()) == {1}, f"the sources no longer have one of each: {found}"
        for path in program:
            shutil.copy(path, made.parent)
        command = [*compiler, *FLAGS, str(made.parent / program[0].name), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=native_build.BUILD_TIMEOUT_S)
        assert done.returncode == 0, done.stderr[:5000]

    return kept(name, [*compiler, *FLAGS, changes], [*SOURCES, *program], build)


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)


def _sites(output: str) -> set[str]:
    return set(re.findall(r"^site: (.*)$", output, re.MULTILINE))


def _cases(names: Iterable[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.long if name in LONG_CASES else ()) for name in names]


def _all_hold(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-5000:]
    states = re.search(r"^(\d+) states, all holds$", done.stdout, re.MULTILINE)
    assert states is not None and int(states[1]) > 1000, done.stdout
    assert _sites(done.stdout) <= KNOWN | {each[0] for each in LEAVING}, "an order that no test weakens"


def _breaks(done: subprocess.CompletedProcess[str], found: str) -> None:
    assert done.returncode == 1 and re.search(f"broken: .*{found}", done.stdout), done.stdout[-5000:]


@pytest.mark.parametrize("name", _cases(QUEUE))
def test_the_queue(name: str) -> None:
    _all_hold(_run(_program("queue_explorer"), *QUEUE[name].split()))


@pytest.mark.parametrize("name", _cases(TICKS))
def test_ticks(name: str) -> None:
    _all_hold(_run(_program("ticks_explorer"), *TICKS[name].split()))


@pytest.mark.parametrize(
    ("site", "order", "arguments", "found"),
    [*((f"{role} {each[0]}", *each[1:]) for role in ("writer", "reader") for each in ORDERS), *LEAVING],
)
def test_each_memory_order_is_needed(site: str, order: str, arguments: str, found: str) -> None:
    done = _run(_program("queue_explorer"), *arguments.split(), "--weaken", f"{site}={order}")
    assert site in _sites(done.stdout), done.stdout
    _breaks(done, found)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_queue_are_found(name: str) -> None:
    old, new, arguments, found = FAULTS[name]
    _breaks(_run(_program("queue_explorer", (old, new)), *arguments.split()), found)


@pytest.mark.parametrize("name", FAULTS_OF_TICKS)
def test_faults_of_ticks_are_found(name: str) -> None:
    old, new, arguments, found = FAULTS_OF_TICKS[name]
    _breaks(_run(_program("ticks_explorer", (old, new)), *arguments.split()), found)
