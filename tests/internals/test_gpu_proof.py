from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_machine
import gpu_proof
import pytest
import torch
from gpu_proof import Proof, Step

pytestmark = pytest.mark.slow
SCRIPT = Path(gpu_proof.__file__)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_proof, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(gpu_proof, "CARRIED", tmp_path / ".gpu")
    monkeypatch.setattr(gpu_proof, "missing_packages", list)
    return tmp_path


def step(folder: Path, name: str, code: str, limit_s: float = 30.0) -> Step:
    (folder / f"{name}.py").write_text(code)
    return Step(name, limit_s, f"{name}.py")


def call(folder: Path, *steps: Step, limit_s: float = 100.0) -> list[str]:
    proof = Proof(folder / "out", "first", dry=False, limit_s=limit_s)
    try:
        return [proof.run(each) for each in steps]
    finally:
        proof.close()


def steps_in(folder: Path, call: str = "first") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "out" / "proof.json").read_text())
    steps: dict[str, Any] = content["calls"][call]
    return steps


def log_of(folder: Path, name: str, call: str = "first") -> str:
    with tarfile.open(folder / "out" / "logs.tgz") as tar:
        file = tar.extractfile(f"logs/{call}-{name}.log")
        assert file is not None
        return file.read().decode()


def has_ended(pid: int) -> bool:
    """Orphans that no process reaps remain as zombies."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


HANGING = """
import os, subprocess, sys, time
print("begun", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open("CHILD", "w").write(str(child.pid))
time.sleep(60)
"""


def test_after_a_failure_and_a_deadline_it_goes_on_and_all_evidence_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = folder / "child"
    steps = (
        step(folder, "fails", "print('halfway', flush=True); raise SystemExit(3)"),
        step(folder, "hangs", HANGING.replace("CHILD", str(child)), limit_s=1.0),
        step(folder, "works", "print('{\"seconds\": 1.5}'); print('{\"more\": 2}')"),
    )
    monkeypatch.setattr(gpu_proof, "FIRST", steps)
    assert gpu_proof.main(["first", str(folder / "out")]) == 1
    found = steps_in(folder)
    assert (found["fails"]["outcome"], found["fails"]["reason"]) == ("failed", "exit code 3")
    assert found["fails"]["last"] == ["halfway"]
    assert found["hangs"]["outcome"] == "timed out"
    assert found["hangs"]["last"][0] == "begun"
    assert "KeyboardInterrupt" in log_of(folder, "hangs"), "an interrupt first, which says where it was"
    assert found["works"]["outcome"] == "passed"
    assert found["works"]["found"] == {"seconds": 1.5, "more": 2}
    assert "halfway\n" in log_of(folder, "fails")
    assert has_ended(int(child.read_text())), "what a step started ends with it"
    said = capsys.readouterr().out
    assert "== fails: failed (exit code 3): " in said and "\nhalfway\n" in said
    assert "1 failed; 1 timed out; 1 passed" in said
    assert {each.name for each in (folder / "out").iterdir()} == {"proof.json", "logs.tgz"}


def test_a_step_that_ignores_an_interrupt_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_proof, "GRACE_S", 0.2)
    pid = folder / "pid"
    code = f"import os, signal, time; signal.signal(2, signal.SIG_IGN); open({str(pid)!r}, 'w').write(str(os.getpid()))"
    assert call(folder, step(folder, "stuck", f"{code}; time.sleep(60)", 1.0)) == ["timed out"]
    assert has_ended(int(pid.read_text()))


def test_what_a_step_leaves_behind_is_ended(folder: Path) -> None:
    child = folder / "child"
    code = HANGING.replace("CHILD", str(child)).replace("time.sleep(60)\n", "")
    assert call(folder, step(folder, "leaves", code)) == ["passed"]
    assert has_ended(int(child.read_text()))


def test_what_the_limit_doesnt_hold_is_left_out_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_proof, "LEAST_S", 0.5)
    slow = "import time; time.sleep(60)"
    limit_s = gpu_proof.END_S + 1.0
    started = time.monotonic()
    assert call(folder, step(folder, "a", slow, 100), step(folder, "b", "pass", 100), limit_s=limit_s) == [
        "timed out", "left out"
    ]  # fmt: skip
    assert time.monotonic() - started < limit_s
    assert steps_in(folder)["b"]["reason"] == "there was no time left"


def test_the_second_call_has_the_firsts_evidence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = folder / ".gpu" / "earlier"
    earlier.mkdir(parents=True)
    (earlier / "proof.json").write_text(json.dumps({"calls": {"first": {"check": {"outcome": "passed"}}}}))
    for name in ("h100-2026-11-27.json", "h100-2026-11-27.md", "kernels.json", "kernels.svg", "logs.tgz"):
        (earlier / name).write_text("{}")
    monkeypatch.setattr(gpu_proof, "SECOND", (step(folder, "one", "pass"), step(folder, "two", "pass")))
    assert gpu_proof.main(["second", str(folder / "out")]) in (0, 1)
    assert steps_in(folder)["check"]["outcome"] == "passed"
    assert list(steps_in(folder, "second")) == ["one", "two"]
    written = {"proof.json", "logs.tgz", "h100-2026-11-27.json", "h100-2026-11-27.md"}
    assert {each.name for each in (folder / "out").iterdir()} == written


def test_a_script_that_is_killed_leaves_what_it_had(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("print('evidence')")
    pid = tmp_path / "pid"
    slow = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    (tmp_path / "second.py").write_text(slow)
    code = f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu_proof
from pathlib import Path
gpu_proof.BENCHMARKS, gpu_proof.CARRIED = Path({str(tmp_path)!r}), Path({str(tmp_path / "none")!r})
gpu_proof.missing_packages = list
gpu_proof.FIRST = tuple(gpu_proof.Step(name, 60, f"{{name}}.py", ["x"]) for name in ("first", "second"))
sys.exit(gpu_proof.main(["first", {str(tmp_path / "out")!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    found = steps_in(tmp_path)
    assert (found["first"]["outcome"], found["second"]["outcome"]) == ("passed", "running")
    assert "evidence\n" in log_of(tmp_path, "first")
    assert has_ended(int(pid.read_text()))


def test_a_flood_of_output_is_cut_in_its_middle(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flood = step(folder, "flood", "print('begin'); print('x' * 3_000_000); print('end')")
    assert call(folder, flood) == ["passed"]
    text = log_of(folder, "flood")
    assert len(text) < gpu_proof.KEPT_BYTES + 1000
    assert text.index("begin") < text.index("... left out ...") < text.index("end\n")
    assert len(capsys.readouterr().out) < flood.shown + 200


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, "..\n2 passed in 1s", ("passed", "2 passed")),
        (0, "ss\n2 skipped in 1s", ("skipped", "no test ran: {'skipped': 2}")),
        (1, "F.\n1 failed, 1 passed in 1s", ("failed", "1 failed, 1 passed")),
        (4, "ERROR: not found", ("failed", "exit code 4")),
        (None, "..", ("timed out", "it was killed at its deadline")),
        (None, "!!! KeyboardInterrupt !!!\n3 passed in 60s", ("timed out", "it was killed at its deadline; 3 passed")),
    ],
)
def test_the_outcome_of_tests(code: int | None, said: str, expected: tuple[str, str]) -> None:
    assert gpu_proof.outcome_of(code, said, is_tests=True) == expected


@pytest.fixture
def tree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_proof, "ROOT", folder)
    (folder / "tests" / "gpu").mkdir(parents=True)
    (folder / "tests" / "gpu" / "test_x.py").write_text(
        "import os\nimport pytest\n@pytest.mark.parametrize('n', [2])\ndef test_one(n):\n"
        "    assert os.environ['GPU_TESTS_LIMIT_S'] == '60'\n"
        "    assert os.environ['GPU_TESTS_REPORT'].endswith('out')\n"
        "def test_two():\n    assert 'CUDA_MODULE_LOADING' not in os.environ\n"
    )
    return folder


def test_a_name_that_isnt_there_costs_no_other_test(tree: Path) -> None:
    names = ("test_x.py::test_gone[2]", "test_x.py::test_one[2]", "test_y.py::test_one", "test_x.py::test_one[3]",
             "test_x.py::test_two")  # fmt: skip
    assert call(tree, Step("tests", 60, tests=names)) == ["failed"]
    found = steps_in(tree)["tests"]
    assert found["reason"] == f"2 passed; there is no test {[names[0], *names[2:4]]}"
    assert "2 passed" in log_of(tree, "tests")


def test_tests_under_mps_have_a_daemon_of_their_own(
    tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gpu_proof.py").write_text(SCRIPT.read_text(encoding="utf-8"))
    control, said = tmp_path / "bin" / gpu_machine.MPS, tmp_path / "said"
    control.parent.mkdir()
    control.write_text(
        f'#!/bin/sh\nif [ "$1" = -f ]; then echo $$ > {said}; : > "$CUDA_MPS_PIPE_DIRECTORY/control"\n'
        f"exec sleep 60; fi\ncat >> {said}\n"
    )
    (tree / "tests" / "gpu" / "test_z.py").write_text(
        "import os\ndef test_z():\n    assert os.path.exists(os.environ['CUDA_MPS_PIPE_DIRECTORY'] + '/control')\n"
    )
    under_mps = Step("mps", 60, tests=("test_z.py::test_z",), under_mps=True)
    assert call(tree, under_mps) == ["skipped"]
    assert steps_in(tree)["mps"]["reason"] == "there is no nvidia-cuda-mps-control"
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(control.parent), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent))
    assert call(tree, under_mps) == ["passed"], log_of(tree, "mps")
    pid, told = said.read_text().split("\n", 1)
    assert told == "quit -t 2\n"
    assert has_ended(int(pid))


def test_a_step_finds_the_files_of_earlier_ones(folder: Path) -> None:
    table = step(folder, "table", "import os\nprint(open(os.environ['TABLE']).read())")
    (folder / "out").mkdir()
    (folder / "out" / "tune.json").write_text("rows")
    assert call(folder, replace(table, environment={"TABLE": "OUT/tune.json"})) == ["passed"]
    assert "rows" in log_of(folder, "table")


def test_what_failed_comes_first() -> None:
    (first, *rest) = gpu_proof.steps_of("second", ["tests/gpu/test_nccl.py::test_one_rank", "", "test_x.py::test_x"])
    assert first.tests == ("test_nccl.py::test_one_rank", "test_x.py::test_x")
    assert rest == list(gpu_proof.SECOND)
    assert gpu_proof.steps_of("second", ["", ""]) == list(gpu_proof.SECOND)
    assert gpu_proof.steps_of("first", ["test_x.py::test_x"]) == list(gpu_proof.FIRST)


def test_a_carried_cache_is_this_users_alone(folder: Path) -> None:
    """A cache that others can write to isn't used, and a copied tree may have any mode."""
    cached = folder / ".gpu" / "cache" / "parallel_state" / "kernels.cubin"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"compiled")
    cached.parent.chmod(0o777)
    cached.chmod(0o666)
    look = step(
        folder,
        "look",
        "import json, os, pathlib\nfolder = pathlib.Path(os.environ['XDG_CACHE_HOME'])\n"
        "modes = [oct(each.stat().st_mode & 0o022) for each in (folder, *folder.rglob('*'))]\n"
        "print(json.dumps({'modes': modes, 'path': os.environ['PYTHONPATH'].split(':')[0], 'folder': str(folder)}))",
    )
    assert call(folder, look) == ["passed"]
    found = steps_in(folder)["look"]["found"]
    assert found["modes"] == ["0o0"] * 3
    assert found["path"] == str(folder / ".gpu" / "site")
    assert not Path(found["folder"]).exists(), "a copy, which goes with the call"


def test_where_there_is_no_git_the_commit_is_the_carried_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_proof._commit.cache_clear()
    (folder / ".gpu").mkdir()
    (folder / ".gpu" / "commit").write_text("abc123+\n")
    monkeypatch.setenv("PATH", str(folder))
    try:
        assert call(folder, step(folder, "one", "import os; print('{\"c\": \"%s\"}' % os.environ['BENCHMARK_COMMIT'])"))
        assert steps_in(folder)["one"]["found"] == {"c": "abc123+"}
    finally:
        gpu_proof._commit.cache_clear()


def test_what_must_be_brought_along_is_named_before_anything_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_proof.NEEDED, "no_such_module", "no-such-package")
    assert gpu_proof.main(["first", str(tmp_path / "out"), "--dry"]) == 2
    assert "no-such-package can't be imported: run `gpu_proof.py prepare` where there is a network" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["third", "OUT"], ["first"], ["all", "OUT"]])
def test_calls_that_arent_there(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_proof.main(arguments)


@pytest.mark.parametrize("steps", [gpu_proof.FIRST, gpu_proof.SECOND], ids=["first", "second"])
def test_a_call_shows_all_verdicts_and_each_step_can_begin(steps: tuple[Step, ...]) -> None:
    assert len({each.name for each in steps}) == len(steps)
    assert sum(each.shown + 200 for each in steps) < 12_000, "the caller sees only the last 12,000 characters"
    assert all(each.limit_s >= gpu_proof.LEAST_S for each in steps)
    assert all(bool(each.arguments) != bool(each.tests) for each in steps)


def test_ways_that_one_gpu_cant_prove_are_listed() -> None:
    one = " ".join(gpu_machine.unproven(1))
    for what in ("peer access", "NVLink", "push without a fence over a link", "multicast", "InfiniBand"):
        assert what in one
    assert gpu_machine.unproven(2) == []


def test_the_machine_is_asked_for_what_the_day_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_machine.machine(dry=True) == 0
    found = {name: each for line in capsys.readouterr().out.splitlines() for name, each in json.loads(line).items()}
    assert {"/dev/shm", "lo", "MPS", "time slice", "tools", "torch", "CUDA", "not provable here"} <= set(found)
    assert found["lo"].startswith("up; interfaces: ")
    assert int(found["/dev/shm"].split(" MiB")[0]) > 0
    assert set(found["tools"]) >= {"nvcc", "g++", "git", "compute-sanitizer", "nvidia-cuda-mps-control"}
    assert found["torch"].startswith(torch.__version__)
    assert found["packages"]["msgspec"] != "none"


def test_a_question_that_fails_leaves_the_others_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> str:
        raise OSError("no such thing")

    monkeypatch.setattr(gpu_machine, "QUESTIONS", {"a": fails, "CUDA": fails, "b": lambda: 1})
    assert gpu_machine.machine(dry=False) == 1
    assert capsys.readouterr().out.splitlines()[::2] == ['{"a": "unknown: OSError: no such thing"}', '{"b": 1}']
    assert gpu_machine.machine(dry=True) == 0


def test_a_dry_run_fails_where_the_kernels_cant_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from device_communicators.peer import kernels

    def refuse(*_: Any) -> Any:
        raise kernels.KernelError("no generic lambdas")

    monkeypatch.setattr(kernels, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(kernels, "cubin", refuse)
    with pytest.raises(kernels.KernelError):
        gpu_machine.compiled("sm_90")
    monkeypatch.setattr(kernels, "nvrtc_version", refuse)
    with pytest.raises(kernels.KernelError):
        gpu_machine.compiled("sm_90")


def test_a_carried_model_has_half_the_bytes(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    own = tmp_path / "own" / "model"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    weights = {"weight": torch.linspace(-1, 1, 5000), "ids": torch.arange(5)}
    safetensors.save_file(weights, own / "model.safetensors")
    gpu_proof.copy_in_half_precision(own.parent, tmp_path / "carried")
    found = safetensors.load_file(tmp_path / "carried" / "model" / "model.safetensors")
    assert torch.equal(found["weight"], weights["weight"].half())
    assert torch.equal(found["ids"], weights["ids"])
    assert (tmp_path / "carried" / "model" / "config.json").exists()
    assert torch.equal(safetensors.load_file(own / "model.safetensors")["weight"], weights["weight"]), "left as it was"
