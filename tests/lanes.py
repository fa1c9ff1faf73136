"""Runs the test suite in lanes, which are concurrent runs of pytest. Each lane has one kind of tests.

    python -m tests.lanes [options of pytest]          # all lanes
    python -m tests.lanes check [options of pytest]    # for the inner loop: tests that aren't slow, few with ranks
    python -m tests.lanes room layout [options]        # unit tests of sub-package layout that aren't slow
    python -m tests.lanes lint [check] [options]       # also runs `make lint` as a lane
    python -m tests.lanes tests/unit -k axes -x        # paths: as pytest, in one process

Each lane logs to `.lanes/NAME.log`. At the end, the output of failed lanes and the summaries of the others are printed.
At most one more lane runs than there are cores, because many ranks must detect something in time. Up to MOST_AGAIN
failed tests run again, alone on the machine. The last line counts all tests as pytest does, and names the repeated
ones with their result. The exit code is 1 if a test failed again, or a lane ran no test, or if more than MOST_FLAKES
tests passed only in the second run, or if the lanes lack a line of `tests/promises.txt`. Ctrl-C ends all lanes with
their descendants.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests import promises
from tests.failure.leftovers import descendants
from tests.rooms import LOWER_ROOMS, UPPER_ROOMS

ROOT = Path(__file__).resolve().parents[1]
INTERNALS = "tests/internals"
SHARED_MEMORY = "/dev/shm"
LOGS = ROOT / ".lanes"
SOME_FAILED, NO_TESTS = 1, 5
"""Exit codes of pytest. With NO_TESTS in one of several lanes, the run can still pass."""
MOST_AGAIN = 10
"""If more tests than this fail, they don't run again: the machine's load isn't the cause."""
MOST_FLAKES = 2
"""If more tests than this pass only in a second run, the run fails."""
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
"""Environment of the lanes. Inductor generates scalar code: its test of instruction sets takes 6 s per process."""
ORDER = ("passed", "failed", "error", "skipped", "deselected", "xfailed", "xpassed")
AT_ONCE = (os.cpu_count() or 1) + 1
"""Number of lanes at once. Tests of ranks mostly wait, but more lanes could make them miss their deadlines."""
_STEP_S = 0.2
_LOOK_S = 2.0


class Lane(NamedTuple):
    name: str
    paths: tuple[str, ...]
    but: tuple[str, ...] = ()
    niceness: int = 0
    command: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def _files(folder: str, *stems: str) -> tuple[str, ...]:
    return present(*(f"{folder}/{stem}.py" for stem in stems))


def present(*paths: str) -> tuple[str, ...]:
    """Returns the paths without those in INTERNALS if that folder was deleted. Raises if another one is missing."""
    has_internals = (ROOT / INTERNALS).exists()
    present = tuple(path for path in paths if has_internals or not path.startswith(INTERNALS))
    for path in present:
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"a lane names {path}, which does not exist")
    return present


NATIVE = _files(
    INTERNALS, "test_control_core", "test_control_driver", "test_cpu_sanitizers", "test_cuda_build",
    "test_cuda_kernels", "test_cuda_races", "test_interleavings", "test_native",
)  # fmt: skip
COMPILERS = _files(
    "tests/contract", "test_c10d_programs", "test_device_mesh", "test_examples",
    "test_gpu_suite", "test_hybrid_sharding", "test_ops_registration", "test_seed_rows",
    "test_symmetric_tensors", "test_tensor_dicts", "test_torch_parallelism", "test_transformers",
) + _files(INTERNALS, "test_collectives_ranks", "test_messages_past_python")  # fmt: skip
"""Tests whose ranks need torch's compiler or FSDP. They share a lane, in which one fork server imports these."""
PROGRAMS = _files(
    "tests/contract", "test_c10d_launchers", "test_docs_code", "test_other_systems", "test_package", "test_torch_suite",
)  # fmt: skip
RANKS = _files(
    INTERNALS, "test_areas", "test_control_plane", "test_direct_calls", "test_group_topology_ranks",
    "test_hostile_messages", "test_kernels", "test_message_queue", "test_nccl_calls", "test_nccl_windows_ranks",
    "test_peer_calls",
    "test_peer_communicator", "test_peer_kernels", "test_peer_memory_ranks", "test_thread_names",
    "test_trace", "test_tune", "test_world_store",
)  # fmt: skip
FAULTS = f"{INTERNALS}/failure"
FUZZING = _files(INTERNALS, "test_fuzzed")
"""Tests that measure the memory of their own process. They run in a lane whose other tests work in other processes."""
DISAGREEMENTS = _files(
    "tests/failure", "test_deadlock", "test_divergence", "test_divergence_on_hosts", "test_mismatches",
    "test_other_calls", "test_other_calls_on_hosts", "test_transfers_and_collectives",
)  # fmt: skip
_ALL = (
    Lane("failures", ("tests/failure", FAULTS, *FUZZING), but=DISAGREEMENTS),
    Lane("ranks", ("tests/contract", *RANKS), but=(*PROGRAMS, *COMPILERS), niceness=3),
    Lane(
        "programs",
        ("tests/unit", INTERNALS, "tests/gpu", *PROGRAMS),
        but=(*NATIVE, FAULTS, *FUZZING, *RANKS, *COMPILERS),
        niceness=3,
    ),
    Lane("compiles", ("tests/compile", *COMPILERS), niceness=2),
    Lane("native", NATIVE, niceness=3),
    Lane("disagreements", DISAGREEMENTS),
)
_FOUND = (lane._replace(paths=present(*lane.paths)) for lane in _ALL)
LANES = tuple(lane for lane in _FOUND if lane.paths)
"""Lanes in the order of their start, the longest first. Lanes with `niceness` get less CPU time than the failure
tests, which must detect failures in time.
"""

LINT = Lane("lint", (), niceness=3, command=("make", "--no-print-directory", "lint"))
COMPUTING = _files(
    "tests/unit", "test_docs", "test_engine_layouts", "test_faces",
) + _files(
    INTERNALS, "test_bounded_store", "test_codec", "test_codec_hostile", "test_matcher", "test_plan",
    "test_plan_picture", "test_wire",
)  # fmt: skip
UNITS = present("tests/unit", INTERNALS)
WITHOUT_TORCH = ("layout",)
"""Sub-packages whose unit tests run without torch, whose import takes seconds."""
WITH_RANKS = (
    FAULTS,
    *FUZZING,
    *RANKS,
    *_files(
        INTERNALS, "test_agreement", "test_bench_command", "test_benchmarks", "test_collectives_ranks",
        "test_commands", "test_domains", "test_host_names", "test_meeting", "test_messages_past_python",
        "test_nccl_deadlines", "test_progress", "test_reports", "test_roll", "test_signals", "test_store_answers",
        "test_streams", "test_waiting",
    ),
)  # fmt: skip
CHECK = (
    *(Lane(folder.rpartition("/")[2], (folder,), but=(*COMPUTING, *WITH_RANKS)) for folder in UNITS),
    Lane(
        "some",
        (
            "tests/contract/test_send_recv.py",
            "tests/contract/test_all_reduce.py::test_all_reduce",
            "tests/failure/test_mismatches.py::test_rows_06_to_10_calls_that_differ",
        ),
    ),
)
_SLOW = re.compile(r"^pytestmark = pytest\.mark\.slow", re.MULTILINE)
_IMPORTED = re.compile(r"^from (?:parallel_state|device_communicators)\.(\w+)", re.MULTILINE)


def room_of(test: Path) -> str:
    """Returns the room that the test is named after, or else imports most."""
    rooms = Counter(_IMPORTED.findall(test.read_text(encoding="utf-8")))
    del rooms["base"]
    if (named := test.stem.removeprefix("test_")) in (*LOWER_ROOMS, *UPPER_ROOMS):
        return named
    return rooms.most_common(1)[0][0] if rooms else ""


def lanes_of_room(room: str) -> list[Lane]:
    left_out = {ROOT / path for path in WITH_RANKS}
    files = sorted({path for folder in UNITS for path in (ROOT / folder).glob("test_*.py")} - left_out)
    rooms = {path: room_of(path) for path in files}
    found = [path for path in files if rooms[path] == room and not _SLOW.search(path.read_text(encoding="utf-8"))]
    if not found:
        known = sorted({*rooms.values()} - {""})
        raise SystemExit(f"no unit test is of the room {room!r}; rooms with tests: {', '.join(known)}")
    names = [str(path.relative_to(ROOT)) for path in sorted(found, key=lambda path: -path.stat().st_size)]
    plugin = ("-p", "tests.without_torch") if room in WITHOUT_TORCH else ()
    return [Lane(f"{room}-{part}", tuple(names[part::2]), options=plugin) for part in range(2) if names[part::2]]


def _be_nice(niceness: int) -> None:
    """Lowers the priority of this process, and of its session if the kernel groups processes by session (autogroup)."""
    os.nice(niceness)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="utf-8")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Returns a lane's environment. Allows bytecode files: otherwise each process would compile all modules."""
    return {**VARIABLES, **{name: value for name, value in given.items() if name != "PYTHONDONTWRITEBYTECODE"}}


class Run:
    def __init__(self, lane: Lane, options: Sequence[str]) -> None:
        self.lane = lane
        self.log = LOGS / f"{lane.name}.log"
        self._options = options
        self.cpu_s = 0.0
        self._cache = LOGS / f"{lane.name}.cache"
        command = list(lane.command)
        if not command:
            command = [
                *apart(),
                sys.executable,
                "-m",
                "pytest",
                *lane.paths,
                *(f"--ignore={path}" for path in lane.but),
                *lane.options,
            ]
            command += ["-o", f"cache_dir={self._cache}", "--cache-clear", *options]
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.log, "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the lanes
                preexec_fn=lambda: _be_nice(self.lane.niceness),
                env=environment(os.environ),
            )  # fmt: skip

    @property
    def failed(self) -> bool:
        return self.code not in (0, NO_TESTS if self._options and not self.lane.command else 0)

    @property
    def code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def failures(self) -> list[str]:
        found = self._cache / "v/cache/lastfailed"
        return list(json.loads(found.read_text())) if self.code == SOME_FAILED and found.exists() else []

    def kill(self) -> None:
        if self._process is not None and self.code is None:
            for pid in [self._process.pid, *descendants(self._process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def counts(self) -> Counter[str]:
        return counts_of(self.log.read_text(errors="replace"))

    def summary(self) -> str:
        text = self.log.read_text(errors="replace").rstrip()
        heading = text.rfind("\n", 0, text.rfind("short test summary info") + 1)
        return text[heading if heading >= 0 else text.rfind("\n") :].strip()

    def report(self) -> None:
        text = self.log.read_text(errors="replace") if self.failed else self.summary()
        print(f"== lane {self.lane.name} ==\n{text}", flush=True)


@functools.cache
def apart() -> tuple[str, ...]:
    """Returns a command prefix that gives a lane its own /dev/shm, or () if that is impossible.

    The failure tests look for leftover files in /dev/shm.
    """
    if not os.path.isdir(SHARED_MEMORY):
        return ()
    found = os.statvfs(SHARED_MEMORY)
    mount = f"mount -t tmpfs -o mode=1777,size={found.f_blocks * found.f_frsize} tmpfs {SHARED_MEMORY}"
    before = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "lane")
    try:
        return before if subprocess.run([*before, "true"], capture_output=True).returncode == 0 else ()
    except OSError:
        return ()


def _note_cpu_s(runs: Sequence[Run]) -> None:
    used_s, children = dict[int, float](), dict[int, list[int]]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, *fields = stat.read_text("utf-8", "replace").rpartition(") ")[2].split()
            pid = int(stat.parent.name)
            children.setdefault(int(parent), []).append(pid)
            used_s[pid] = sum(map(int, fields[9:13])) / os.sysconf("SC_CLK_TCK")
    for run in runs:
        total_s, waiting = 0.0, [run.pid]
        while waiting:
            pid = waiting.pop()
            total_s += used_s.get(pid, 0.0)
            waiting += children.get(pid, [])
        run.cpu_s = max(run.cpu_s, total_s)


def counts_of(text: str) -> Counter[str]:
    for line in reversed(text.splitlines()):
        found = re.findall(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed)\b", line)
        if found and re.search(r" in [\d.]+s", line):
            return Counter({word.removesuffix("s"): int(number) for number, word in found})
    return Counter()


def last_line(total: Counter[str], seconds: float, flakes: Sequence[str] = (), failed: Sequence[str] = ()) -> str:
    words = [f"{total[word]} {word}" for word in ORDER if total[word] or word in ("passed", "failed", "skipped")]
    line = f"{', '.join(words)} in {seconds:.2f}s"
    for what, names in (("passed only when run again", flakes), ("failed twice", failed)):
        if names:
            line += f"; {what}: {', '.join(names)}"
    return line


def ended(runs: Sequence[Run]) -> Iterator[Run]:
    waiting, running, next_look_s = list(runs), list[Run](), 0.0
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(waiting.pop(0))
            running[-1].start()
        if time.monotonic() >= next_look_s:
            _note_cpu_s(running)
            next_look_s = time.monotonic() + _LOOK_S
        for run in [run for run in running if run.code is not None]:
            running.remove(run)
            yield run
        time.sleep(_STEP_S)


def names_paths(options: Sequence[str]) -> bool:
    return any(option[:1] not in ("", "-") and (ROOT / option.partition("::")[0]).exists() for option in options)


def main(options: Sequence[str], lanes: Sequence[Lane] = LANES) -> int:
    if names_paths(options):
        others = [lane for lane in lanes if lane.command]
        return subprocess.call([sys.executable, "-m", "pytest", *options], cwd=ROOT) or (
            main((), others) if others else 0
        )
    LOGS.mkdir(exist_ok=True)
    collected = LOGS / "collected.txt"
    collected.unlink(missing_ok=True)
    os.environ[promises.COLLECTED] = str(collected)
    started_s = time.monotonic()
    total: Counter[str] = Counter()
    runs = [Run(lane, options) for lane in lanes]
    print("lanes: " + ", ".join(str(run.log.relative_to(ROOT)) for run in runs), flush=True)
    try:
        for run in ended(runs):
            total += run.counts()
            if not run.failed:
                run.report()
            took_s = time.monotonic() - started_s
            print(f"lane {run.lane.name}: exit code {run.code} after {took_s:.0f} s, {run.cpu_s:.0f} CPU s", flush=True)
    finally:
        for run in runs:
            run.kill()
    failed = [run for run in runs if run.failed]
    for run in failed:
        run.report()
    names = [run.failures() for run in failed]
    again = sorted(name for each in names for name in each)
    flakes, twice = list[str](), list[str]()
    if all(names) and 0 < len(again) <= MOST_AGAIN:
        second = _run_again(again)
        twice = second.failures() or (again if second.failed else [])
        flakes = [name for name in again if name not in twice]
        failed = failed if twice else []
    if flakes:
        counts = second.counts()
        total.update({word: counts[word] - total[word] for word in ("failed", "error")})
        total["passed"] += counts["passed"]
    lost = [] if options or not set(LANES) <= set(lanes) else _lost_promises(collected)
    if lost:
        print(f"tests/promises.txt isn't what the tests hold, in {len(lost)} lines:", *lost[:20], sep="\n    ")
    if len(flakes) > MOST_FLAKES:
        print(
            f"{len(flakes)} tests passed only when run again, more than {MOST_FLAKES}: the run has failed", flush=True
        )
    print(last_line(total, time.monotonic() - started_s, flakes, twice), flush=True)
    ran = total["passed"] > 0 or not any(lane.paths for lane in lanes)
    return 0 if ran and not failed and not lost and len(flakes) <= MOST_FLAKES else 1


def _lost_promises(collected: Path) -> list[str]:
    return promises.problems(promises.promises_of(promises.collected(collected)), promises.stored_in_git())


def _run_again(names: Sequence[str]) -> Run:
    run = Run(Lane("again", tuple(names)), ())
    print(f"again, alone: {len(names)} tests in {run.log.relative_to(ROOT)}", flush=True)
    try:
        list(ended([run]))
    finally:
        run.kill()
    run.report()
    return run


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def chosen(words: Sequence[str]) -> tuple[Sequence[str], Sequence[Lane]]:
    lint, words = ([LINT], words[1:]) if words[:1] == ["lint"] else ([], words)
    if words[:1] == ["room"] and len(words) > 1:
        return ["-m", "not slow", *words[2:]], [*lint, *lanes_of_room(words[1])]
    checks = words[:1] == ["check"]
    return ["-m", "not slow", *words[1:]] if checks else words, [*lint, *(CHECK if checks else LANES)]


if __name__ == "__main__":
    # In the background, or under nohup, a process ignores signals that tests send to ranks. Handlers aren't inherited.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        sys.exit(main(*chosen(sys.argv[1:])))
    except KeyboardInterrupt:
        sys.exit(130)
