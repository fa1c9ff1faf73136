"""The benchmark for GPUs and torchrun, on the CPU. No test depends on a measured time."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ranks
from harness.collectives import count_of

from parallel_state.tools.bench.collectives import answer, given
from tests.programs import Program, module, run_in_ranks, script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "collectives.py"
FEW = ("--no-peers", "--rounds", "3", "--round-ms", "0.2", "--dtype", "float32")
DEADLINE_S = 300
OURS = {"parallel_state", "shared_memory", "process_group"}


def environment() -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(launcher)}
    return {**variables, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPT.parent)])}


def in_ranks(path: Path, *arguments: str) -> tuple[int | None, str, dict[str, Any]]:
    written = path.with_name("found.json")
    code = script(path, [*arguments, *FEW, "--json", str(written)])
    (exit_code, output), _ = run_in_ranks(code, environment(), 2, DEADLINE_S)
    return exit_code, output, json.loads(written.read_text()) if written.exists() else {}


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    arguments = ("--sizes", "1024", "--operations", "all_reduce")
    written = (tmp_path / "found.json", tmp_path / "found.svg")
    words = (
        "--standalone",
        "--nproc-per-node",
        "2",
        SCRIPT,
        *arguments,
        *FEW,
        "--json",
        written[0],
        "--svg",
        written[1],
    )
    code = f"import os\nos.chdir({str(tmp_path)!r})\n" + module("torch.distributed.run", [*map(str, words)])
    program = Program(code, environment())
    out, err = program.communicate(DEADLINE_S)
    assert program.returncode == 0, out + err
    content, picture = json.loads(written[0].read_text()), written[1].read_text()
    assert [row["case"]["bytes"] for row in content["rows"]] == [1024]
    for row in content["rows"]:
        modes = {tuple(name.rsplit(", ", 1)) for name in row["us"]}
        assert {name for name, _ in modes} >= OURS | {"torch.distributed"}
        assert {mode for _, mode in modes} == {"eager", "compiled"}
        assert ("parallel_state, in place", "eager") in modes
        assert row["wrong"] == {}
        assert all(len(samples) >= 3 and min(samples) > 0 for samples in row["us"].values())
        assert row["figures"].keys() == row["us"].keys()
        assert all(name.endswith(", eager") and us > 0 for name, us in row["host_us"].items())
    assert content["settings"]["left_out"] == {"graph": "the CPU has no CUDA graphs"}
    assert content["settings"]["route"].startswith("group 'tp:0'")
    assert "not measured: graph: the CPU has no CUDA graphs" in out
    assert "busbw, 10⁹ B/s" in out
    assert picture.count("<polyline") >= 8


@pytest.mark.slow
def test_graphs_and_all_operations_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "graphs.py"
    path.write_text(
        "import sys, collectives\n"
        "from harness import ranks\n"
        "ranks.usable_modes = lambda asked, device: (list(asked), {})\n"
        "sys.exit(collectives.main())\n"
    )
    exit_code, output, content = in_ranks(path, "--sizes", "4096", "--modes", "eager", "graph")
    assert exit_code == 0, output
    assert {row["case"]["operation"] for row in content["rows"]} == set(ranks.OPERATIONS)
    for row in content["rows"]:
        assert {f"{name}, graph" for name in OURS | {"torch.distributed"}} <= row["us"].keys(), row["refused"]
        assert min(row["us"]["parallel_state, graph"]) > 0 and "parallel_state, graph" not in row["host_us"]


@pytest.mark.slow
def test_a_wrong_answer_has_no_figures(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(
        "import sys, collectives\n"
        "from harness import ranks\n"
        "ranks.collectives.torch_by_call = lambda *_: lambda x: x\n"
        "sys.exit(collectives.main())\n"
    )
    arguments = ("--sizes", "1024", "65536", "--modes", "eager", "--operations", "all_reduce")
    exit_code, output, content = in_ranks(path, *arguments)
    assert exit_code == 1, output
    assert [row["case"]["bytes"] for row in content["rows"]] == [1024, 65536]
    for row in content["rows"]:
        assert list(row["wrong"]) == ["torch.distributed, eager"]
        assert row["wrong"]["torch.distributed, eager"].endswith("on rank 0 of 2 is wrong")
        assert "torch.distributed, eager" not in row["us"]
        assert "parallel_state, eager" in row["us"]
    assert "no figures of torch.distributed, eager, 1 KiB" in output


@pytest.mark.slow
def test_own_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import collectives

    file = tmp_path / "found.json"
    arguments = ["--sizes", "1024", "--operations", "broadcast", "--modes", "eager", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["collectives.py", *FEW, *arguments])
    monkeypatch.setattr(collectives, "in_ranks", lambda options: True)
    assert collectives.main() == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["case"]["ranks"] == 2
    assert "parallel_state, eager" in row["us"]


NO_WARNING = """
import warnings
import torch, torch.distributed as dist
from device_communicators.base.torch_internals import register_fake_backend
from harness.ranks import OPERATIONS, compilable_of_torch

register_fake_backend()
dist.init_process_group("fake", rank=0, world_size=2)
warnings.simplefilter("error", FutureWarning)
for operation in OPERATIONS:
    compilable_of_torch(operation, dist.group.WORLD)(torch.ones(8))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchs_functional_collectives_do_not_warn() -> None:
    program = Program(NO_WARNING, environment())
    out, err = program.communicate(DEADLINE_S)
    assert program.returncode == 0, out + err


@pytest.mark.parametrize("operation", ranks.OPERATIONS)
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_answers_are_what_the_inputs_come_to(operation: str, size: int) -> None:
    dtype, device = torch.bfloat16, torch.device("cpu")
    count = count_of(operation, 1000, dtype, size)
    xs = [given(count, rank, dtype, device) for rank in range(size)]
    assert all(x.shape == (count,) and x.dtype == dtype for x in xs)
    part = count // size
    for rank in range(size):
        rows = slice(rank * part, (rank + 1) * part)
        total = torch.stack([x.double() for x in xs]).sum(0).to(dtype)
        expected = {
            "all_reduce": total,
            "reduce_scatter": total[rows],
            "all_gather": torch.cat(xs),
            "broadcast": xs[0],
            "all_to_all": torch.cat([x[rows] for x in xs]),
        }[operation]
        assert torch.equal(answer(operation, count, rank, size, dtype, device), expected)


@pytest.mark.parametrize(
    ("operation", "busbw"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("broadcast", 1.0), ("all_to_all", 0.875)],
)
def test_bandwidths_are_counted_as_in_nccl_tests(operation: str, busbw: float) -> None:
    """1 MiB in 1048.576 us on 8 ranks. The size of an all_gather is its output's."""
    found = ranks.figures(operation, 1 << 20, [1000.0, 1048.576, 2000.0], 8)
    assert found["p50_us"] == 1048.576
    assert found["p99_us"] == 2000.0
    assert found["algbw"] == pytest.approx(1.0)
    assert found["busbw"] == pytest.approx(busbw)
    gathers = operation == "all_gather"
    assert count_of(operation, 1 << 20, torch.bfloat16, 8) == (1 << 16 if gathers else 1 << 19)
