"""The GPU day's script: deadlines, evidence on the way, and what follows a failure; steps are small programs here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_proof
import pytest
import torch
from gpu_proof import STAGES, Proof, Step

SCRIPT = Path(gpu_proof.__file__)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the steps' programs are; its `out` is the evidence's."""
    monkeypatch.setattr(gpu_proof, "BENCHMARKS", tmp_path)
    return tmp_path


def step(folder: Path, name: str, code: str, limit_s: float = 30.0) -> Step:
    (folder / f"{name}.py").write_text(code)
    return Step(name, limit_s, f"{name}.py", dry=["x"])


def proof_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "out" / "proof.json").read_text())
    return content["stages"]


def has_ended(pid: int) -> bool:
    """Within some seconds; where nobody waits for orphans they stay as zombies."""
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
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("CHILD", "w").write(str(child.pid))
time.sleep(60)
"""


def test_after_a_failure_and_a_deadline_it_goes_on_and_all_evidence_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = folder / "child"
    steps = [
        step(folder, "fails", "print('halfway', flush=True); raise SystemExit(3)"),
        step(folder, "hangs", HANGING.replace("CHILD", str(child)), limit_s=1.0),
        step(folder, "works", "print('{\"seconds\": 1.5}')"),
    ]
    monkeypatch.setattr(gpu_proof, "STAGES", (("one", (steps[0],)), ("two", tuple(steps[1:]))))
    assert gpu_proof.main(["all", str(folder / "out"), "--dry"]) == 1
    found = proof_of(folder)
    assert found["0 one"]["fails"]["outcome"] == "failed"
    assert found["0 one"]["fails"]["reason"] == "exit code 3"
    assert found["0 one"]["fails"]["last"] == ["halfway"]
    assert found["1 two"]["hangs"]["outcome"] == "timed out"
    assert found["1 two"]["hangs"]["last"] == ["begun"]
    assert found["1 two"]["works"]["outcome"] == "passed"
    assert found["1 two"]["works"]["found"] == {"seconds": 1.5}
    assert {"halfway", "begun"} < set((folder / "out" / "log.txt").read_text().splitlines())
    assert has_ended(int(child.read_text())), "what a step started ends with it"
    assert "1 failed; 1 timed out; 1 passed" in capsys.readouterr().out


def test_stages_add_to_the_evidence_of_an_earlier_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = tuple((name, (step(folder, name, "pass"),)) for name in ("one", "two", "three"))
    monkeypatch.setattr(gpu_proof, "STAGES", stages)
    assert gpu_proof.main(["0", str(folder / "out"), "--dry"]) == 0
    assert gpu_proof.main(["1,2", str(folder / "out"), "--dry"]) == 0
    assert list(proof_of(folder)) == ["0 one", "1 two", "2 three"]


def test_what_the_budget_doesnt_hold_is_left_out_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_proof, "LEAST_S", 0.5)
    proof = Proof(folder / "out", dry=True)
    assert proof.run("0 one", step(folder, "long", "pass", limit_s=100), left_s=0.4) == "left out"
    assert proof_of(folder)["0 one"]["long"]["reason"] == "there was no time left"
    assert proof.run("0 one", step(folder, "short", "import time; time.sleep(60)", 100), left_s=0.6) == "timed out"


def test_a_script_that_is_killed_leaves_what_it_had(tmp_path: Path) -> None:
    """And a step's program ends with the script that is told to end."""
    (tmp_path / "first.py").write_text("print('evidence')")
    pid = tmp_path / "pid"
    slow = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); print('half of it', flush=True)"
    (tmp_path / "second.py").write_text(f"{slow}; time.sleep(60)")
    code = f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu_proof
from pathlib import Path
gpu_proof.BENCHMARKS = Path({str(tmp_path)!r})
steps = tuple(gpu_proof.Step(name, 60, f"{{name}}.py", dry=["x"]) for name in ("first", "second"))
gpu_proof.STAGES = (("one", steps),)
sys.exit(gpu_proof.main(["all", {str(tmp_path / "out")!r}, "--dry"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while "half of it" not in _text(tmp_path / "out" / "log.txt") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    found = proof_of(tmp_path)["0 one"]
    assert (found["first"]["outcome"], found["second"]["outcome"]) == ("passed", "running")
    assert found["second"]["command"].endswith("second.py x")
    while not has_ended(int(pid.read_text())):  # killed, which takes the kernel a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_a_flood_of_output_is_cut_in_its_middle(folder: Path) -> None:
    flood = step(folder, "flood", "print('begin'); print('x' * 2_000_000); print('end')")
    assert Proof(folder / "out", dry=True).run("0 one", flood, 60.0) == "passed"
    text = (folder / "out" / "log.txt").read_text()
    assert len(text) < gpu_proof.KEPT_BYTES + 1000
    assert text.index("begin") < text.index("... left out ...") < text.index("end\n")


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, "..\n2 passed in 1s", ("passed", "2 passed")),
        (0, "ss\n2 skipped in 1s", ("skipped", "no test ran: {'skipped': 2}")),
        (1, "F.\n1 failed, 1 passed in 1s", ("failed", "1 failed, 1 passed")),
        (4, "ERROR: not found", ("failed", "exit code 4")),
        (None, "..", ("timed out", "it was ended at its limit")),
    ],
)
def test_the_outcome_of_tests(code: int | None, said: str, expected: tuple[str, str]) -> None:
    assert gpu_proof._outcome(code, said, is_tests=True) == expected


def test_what_must_be_brought_along_is_named_before_anything_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_proof.NEEDED, "no_such_module", "no-such-package")
    assert gpu_proof.main(["all", str(tmp_path / "out"), "--dry"]) == 2
    assert "no-such-package can't be imported: bring it along, in a folder that `gpu_proof.py carry" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["10", "x", "0,-1", ""])
def test_stages_that_arent_there(text: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        gpu_proof.main([text, str(tmp_path)])


def test_the_ten_stages_fit_their_minutes() -> None:
    assert [name for name, _ in STAGES] == [
        "preflight", "kernels", "sanitizer", "topology", "peer memory", "NCCL", "capture", "failures", "demo",
        "collectives",
    ]  # fmt: skip
    for name, steps in STAGES:
        assert sum(each.limit_s for each in steps) <= 570, f"{name}: a command ends after ten minutes"
        assert len({each.name for each in steps}) == len(steps)


def test_ways_that_one_gpu_cant_prove_are_listed() -> None:
    one = " ".join(gpu_proof.unproven(1))
    for what in ("peer access", "NVLink", "multicast", "InfiniBand"):
        assert what in one
    assert gpu_proof.unproven(2) == []


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
