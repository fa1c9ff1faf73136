"""benchmarks/peer_kernels.py with kernels on the CPU. No test depends on a measured time."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import peer_kernels
import peer_kernels_ranks
import pytest
import torch
import torch.distributed as dist
from peer_kernels import KernelRow
from peer_kernels_ranks import EmulatedMachine, KernelTeam, Others, Regions

from device_communicators.peer.kernels import (
    MAX_BLOCKS,
    MAX_RANKS,
    OPERATIONS,
    PACKETS_OFFSET,
    STAGES_OFFSET,
    Call,
)  # fmt: skip
from tests.helpers.cuda_on_cpu import CpuKernels, build

FEW = ("--emulate", "--rounds", "1", "--round-ms", "0.1")


@pytest.fixture(autouse=True)
def _compiled() -> None:
    build()


def test_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "k.json", tmp_path / "k.svg"
    assert peer_kernels.main([*FEW, "--ranks", "3", "--json", str(file), "--svg", str(picture)]) == 0
    content = json.loads(file.read_text())
    small, large, norm = content["rows"]
    modes, hows = ("eager", "graph"), ("push", "pull", "two_shot")
    assert set(small["us"]) == {f"{how}, {mode}" for how in hows for mode in modes}
    alone = {f"{how}, {mode}" for how in hows[1:] for mode in modes}
    assert set(large["us"]) == alone | {f"{how} of all ranks at once, eager" for how in hows}
    assert "more than one epoch" in large["refused"]["push"]
    names = ("fused", "push, add, rms_norm", "pull, add, rms_norm")
    assert set(norm["us"]) == {f"{name}, {mode}" for name in names for mode in modes}
    assert set(norm["host_us"]) == {f"{name}, eager" for name in names}
    assert set(norm["share"]) == {f"fused, {mode}" for mode in modes}
    for row in content["rows"]:
        assert row["wrong"] == {}
        assert all(len(us) >= 3 and min(us) > 0 for us in row["us"].values())
        for name in ("NCCL, 1 rank", "symm_mem.one_shot_all_reduce, 1 rank"):
            assert (row["refused"].get(name) == "there is no GPU") == (row["case"]["part"] == "all_reduce")
    targets = content["settings"]["targets"]
    assert {each["ranks"] for each in targets} == {3}
    assert all(each["reached"] is None and each["found"] is None for each in targets)
    assert content["settings"]["copy_1e9_bytes_per_s"] > 0
    assert picture.read_text().count("<polyline") == 15
    told = capsys.readouterr().out
    assert "no figure above means anything" in told
    assert "reached" not in told and "missed" not in told


def test_a_crash_of_the_others_loses_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL and torch's symmetric memory may crash, so they start last."""
    file, picture = tmp_path / "k.json", tmp_path / "k.svg"

    def crash(device: torch.device) -> Others:
        raise SystemExit(139)

    monkeypatch.setattr(peer_kernels, "Others", crash)
    with pytest.raises(SystemExit):
        peer_kernels.main(
            [*FEW, "--ranks", "2", "3", "--sizes", "1024", "--json", str(file), "--svg", str(picture)]
        )  # fmt: skip
    rows = json.loads(file.read_text())["rows"]
    cases = [(row["case"]["ranks"], row["case"]["part"]) for row in rows]
    assert cases == [(2, "all_reduce"), (2, "norm"), (3, "all_reduce"), (3, "norm")]
    assert all(row["us"] and not row["wrong"] for row in rows)
    assert "<polyline" in picture.read_text()


def test_others_are_measured_once_for_all_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Copying(Others):
        asked: ClassVar[list[int]] = []

        def of(self, x: torch.Tensor, refused: dict[str, str]) -> dict[str, Any]:
            self.asked.append(x.numel())
            refused["symm_mem"] = "not here"
            return {"NCCL, 1 rank": lambda out, given: out.copy_(given)}

    file = tmp_path / "k.json"
    monkeypatch.setattr(peer_kernels, "Others", Copying)
    assert peer_kernels.main([*FEW, "--ranks", "2", "3", "--sizes", "1024", "2048", "--json", str(file)]) == 0
    assert Copying.asked == [512, 1024]
    rows = json.loads(file.read_text())["rows"]
    for row in rows:
        names = {name for name in row["us"] if name.startswith("NCCL")}
        is_sum = row["case"]["part"] == "all_reduce"
        assert names == ({"NCCL, 1 rank, eager", "NCCL, 1 rank, graph"} if is_sum else set())
        assert ("NCCL, 1 rank, eager" in row["host_us"]) == ("symm_mem" in row["refused"]) == is_sum
        assert any(name.startswith("push") for name in row["us"]), "beside the kernels'"


def test_torchs_multicast_is_off_before_cuda_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []
    monkeypatch.setattr(os, "environ", {})
    multicast = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found.append(os.environ.get(multicast))))
    assert isinstance(peer_kernels.machine_for(peer_kernels.parsed([])), str)
    assert found == ["1"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_its_check_alone(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert peer_kernels.main(["--emulate", "--check", "--ranks", "2", "8", "--dtype", dtype, "--hidden", "768"]) == 0
    assert capsys.readouterr().out.count(": right (") == 6


class Faulty(CpuKernels):
    kernel, copies = "", False

    def launch(self, name: str, blocks: int, threads: int, call: Call, stream: int = 0) -> None:
        if not name.startswith(self.kernel) or call.rank != 0:
            super().launch(name, blocks, threads, call, stream)
        elif self.copies:
            ctypes.memmove(call.output, call.input, 2 * call.numel)


@pytest.mark.parametrize("copies", [False, True], ids=["nothing", "copies"])
@pytest.mark.parametrize("how", ["push", "pull", "two_shot", "add_rms_norm"])
def test_a_kernel_that_does_too_little_is_never_timed(
    how: str, copies: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = EmulatedMachine()
    faulty = Faulty()
    faulty.kernel, faulty.copies = f"all_reduce_{how}", copies
    assert any(name.startswith(faulty.kernel) for name in OPERATIONS)
    machine.kernels = faulty
    monkeypatch.setattr(peer_kernels, "machine_for", lambda options: machine)
    file = tmp_path / "k.json"
    sizes = ("--sizes", "1024", "--together-from", "999999")
    assert peer_kernels.main([*FEW, *sizes, "--json", str(file)]) == 1
    rows = json.loads(file.read_text())["rows"]
    wrong = {name for row in rows for name in row["wrong"]}
    mine = "fused" if how == "add_rms_norm" else how
    assert wrong == {name for row in rows for name in (*row["us"], *row["wrong"]) if name.startswith(mine)} != set()
    assert not wrong & {name for row in rows for name in row["us"]}


def test_a_kernel_that_waits_ends_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If the epoch isn't reset, rank 0 waits for its peers until the deadline. On a GPU, CUDA would be lost."""
    monkeypatch.setattr(peer_kernels_ranks, "DEADLINE_S", 0.1)
    monkeypatch.setattr(Regions, "rewind", lambda self, blocks, members: None)
    assert peer_kernels.main([*FEW, "--sizes", "1024"]) == 1
    assert "peer kernels: run failed: all_reduce_" in capsys.readouterr().err


def test_blocks_that_share_a_row_tell_each_other_anew() -> None:
    """A rewind clears what the blocks sent each other, but not what other ranks sent."""
    team = KernelTeam(EmulatedMachine(), 2, ["eager"], 1 << 40, few=True)
    case = {"part": "norm", "ranks": 2, "dtype": "bfloat16", "bytes": 3072, "hidden": 1536}
    assert "fused, eager" in team.prepare(case)
    assert team.check("fused, eager") is None
    (regions,) = team._regions.values()
    packets = regions._memory[:, 0, PACKETS_OFFSET:STAGES_OFFSET].view(regions.sets, 2, MAX_BLOCKS, MAX_RANKS, -1)
    own, others = packets[:, 1, :2, 0], packets[:, 1, :2, 1].clone()
    assert own.any(-1).all() and others.any(-1).all()
    regions.rewind(2, 2)
    assert not own.any()
    assert torch.equal(packets[:, 1, :2, 1], others)


def test_without_a_gpu_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert peer_kernels.main([]) == 2
    assert "--emulate" in capsys.readouterr().err


def _row(part: str, nbytes: int, share: dict[str, float] | None = None, **us: float) -> KernelRow:
    case: dict[str, Any] = {"part": part, "ranks": 2, "bytes": nbytes}
    names = {name.replace("__", ", "): [value] for name, value in us.items()}
    return KernelRow(case, us=names, share=share or {})


def test_targets() -> None:
    rows = [
        _row("all_reduce", 8192, push__graph=2.9, pull__graph=5.0, push__eager=1.0),
        _row("all_reduce", 1 << 20, {"pull, graph": 0.9}),
        _row(
            "all_reduce",
            4 << 20,
            {"pull, graph": 0.7, "two_shot, graph": 0.79, "pull of all ranks at once, eager": 0.8},
        ),
        KernelRow(
            {"part": "norm", "ranks": 2, "bytes": 8192},
            us={"fused, graph": [4.0], "push, add, rms_norm, graph": [6.0], "pull, add, rms_norm, graph": [9.0]},
        ),
        KernelRow({"part": "norm", "ranks": 2, "bytes": 1 << 20}, us={"fused, graph": [1.0]}),
    ]
    found = {each.what: (each.bytes, each.found, each.reached) for each in peer_kernels.targets(rows)}
    assert found == {
        "kernel": (8192, 2.9, True),
        "bandwidth": (4 << 20, 0.79, False),
        "bandwidth of all ranks at once": (4 << 20, 0.8, True),
        "fused, graph": (8192, 1.5, True),
        "fused, eager": (8192, None, None),
    }
    slow = peer_kernels.targets([_row("all_reduce", 8192, push__graph=3.1)])
    assert [each.reached for each in slow] == [False]


def test_bytes_that_must_be_moved() -> None:
    moved = {
        "push, graph": 1000 + 3 * 2000 + 3 * 2000 + 1000,
        "pull, eager": 1000 + 1000 + 4 * 1000 + 1000,
        "two_shot, graph": 1000 + 1000 + 4 * 250 + 4 * 250 + 1000 + 1000,
        "two_shot of all ranks at once, eager": 4 * 6000,
        "fused, graph": 14_000 + 2000,
        "push, add, rms_norm, graph": None,
        "NCCL, 1 rank, graph": None,
    }
    assert {name: peer_kernels.moved_bytes(name, 1000, 4) for name in moved} == moved


def test_others_in_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    start = dist.init_process_group

    def over_gloo(backend: str, store: Any, rank: int, world_size: int, device_id: Any) -> None:
        start("gloo", store=store, rank=rank, world_size=world_size)

    monkeypatch.setattr(dist, "init_process_group", over_gloo)
    others = Others(torch.device("cpu"))
    others._problem = others._start()
    try:
        assert others._problem is None
        team = KernelTeam(EmulatedMachine(), 2, ["eager", "graph"], 1 << 40, few=True)
        team.others = others
        names = team.prepare({"part": "all_reduce", "ranks": 2, "dtype": "bfloat16", "bytes": 1024})
        beside = ["NCCL, 1 rank, eager", "NCCL, 1 rank, graph"]
        assert names == beside
        assert all(team.check(name) is None and team.run(name, 2).elapsed_s > 0 for name in beside)
        assert team.host_us(beside[0])
        assert team.refused["symm_mem.one_shot_all_reduce, 1 rank"]
        monkeypatch.setattr(dist, "all_reduce", lambda x: x.zero_())
        assert team.check(beside[0]) == "its answer isn't the input"
    finally:
        others.close()
    assert not dist.is_initialized()
