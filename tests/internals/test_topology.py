"""Machines recorded from public descriptions, and this one if it has a GPU."""

from __future__ import annotations

import json
import os
import sys
from itertools import permutations
from pathlib import Path

import pytest

from device_communicators.base.cores import spans
from device_communicators.machine.topology import Topology, read_topology, short_pci_id
from device_communicators.machine.visible_devices import visible_devices
from parallel_state.__main__ import main
from parallel_state.tools.topology import topology_text
from tests.internals.machines import NAMES, Recording, machine, record, stand_in
from tests.programs import Program

NVML = "libnvidia-ml.so.1"
REFUSAL = {"no answer": "Not Supported"}


def text_of(topology: Topology) -> str:
    return topology_text(topology, visible_devices(topology.gpus, {}))


def matrix(topology: Topology) -> list[list[str]]:
    size = len(topology.gpus)
    return [["X" if a == b else topology.paths[a, b].label for b in range(size)] for a in range(size)]


def islands(size: int, inside: str, between: str, of: int = 8) -> list[list[str]]:
    return [
        ["X" if a == b else inside if a // size == b // size else between for b in range(of)] for a in range(of)
    ]  # fmt: skip


def test_switches_connect_all() -> None:
    found = machine("dgx-h100")
    assert matrix(found) == islands(8, "NV18", "")
    assert all(path.switched and path.peer_problem is None is path.nvlink_problem for path in found.paths.values())
    assert found.gpus[4].pci_id == "0000:9d:00.0"
    assert spans(found.gpus[4].cores or ()) == "56-111,168-223"
    assert (found.driver_version, found.cuda_version, found.problem) == ("550.90.07", "12.4", None)


def test_bridges_connect_islands() -> None:
    found = machine("h200-nvl-2x4")
    assert matrix(found) == islands(4, "NV6", "SYS")
    assert not any(path.switched for path in found.paths.values())
    assert found.paths[0, 1].pcie == "PIX"
    assert found.paths[0, 4].nvlink_problem == "there is no NVLink"
    assert found.paths[0, 4].peer_problem is None


def test_links_that_are_down_do_not_count() -> None:
    down = machine("dgx-h100", link_is_active={"3 0": False, "3 1": False})
    assert [path.nvlinks for (one, _), path in down.paths.items() if one == 3] == [16] * 7
    assert down.paths[0, 1].nvlinks == 18
    one_way = machine("h200-nvl-2x4", link_is_active={"1 0": False, "1 5": False})
    assert one_way.paths[0, 1].nvlinks == one_way.paths[1, 0].nvlinks == 4


def test_links_that_are_up_but_of_no_use() -> None:
    found = machine("dgx-h100", p2p_status={f"{a} {b} 2": 5 for a, b in permutations(range(8), 2)})
    assert found.paths[0, 1].nvlinks == 18
    assert found.paths[0, 1].nvlink_problem == "P2P nvlink is not supported"


def test_pcie_only() -> None:
    found = machine("l40s-pcie")
    assert matrix(found) == islands(2, "NODE", "SYS", of=4)
    assert [gpu.links for gpu in found.gpus] == [()] * 4
    assert found.paths[0, 1].peer_problem is None
    assert found.paths[1, 2].peer_problem == "P2P read is chipset not supported"


def test_one_gpu_behind_hidden_switches() -> None:
    (gpu,) = machine("one-h200").gpus
    assert gpu.switch_links == 18


def test_a_gpu_is_found_by_its_uuid_and_its_slices_are_not_listed() -> None:
    found = machine("a100-mig")
    (gpu,) = found.gpus
    assert gpu.mig and found.find(gpu.uuid) is found.find(gpu.uuid.removeprefix("GPU-")) is gpu
    assert found.find("GPU-") is None
    assert "MIG mode" in text_of(found) and "CUDA shows one slice" in text_of(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_driver_that_says_nothing_but_uuids(name: str) -> None:
    told = {key: answers for key, answers in record(name).items() if key in ("gpu_count", "uuid")}
    found = read_topology(Recording(told))
    assert [gpu.uuid for gpu in found.gpus] == list(told["uuid"].values())
    for gpu in found.gpus:
        for fact in ("pci_id", "name", "memory_bytes", "cores", "links", "mig"):
            assert getattr(gpu, fact) is None
            assert "not recorded" in gpu.unknown[fact]
    for path in found.paths.values():
        assert path.label == "?"
        assert "not recorded" in str(path.peer_problem)
        assert "not recorded" in str(path.nvlink_problem)
    assert "NVLinks unknown: not recorded" in text_of(found)


@pytest.mark.parametrize("name", NAMES)
def test_no_refused_question_matters_beyond_itself(name: str) -> None:
    whole = record(name)
    for question in whole:
        found = read_topology(Recording({**whole, question: {"*": REFUSAL}}))
        assert text_of(found)
        assert (found.problem is None) == (question not in ("gpu_count", "uuid"))


def test_a_gpu_that_is_lost() -> None:
    found = machine("l40s-pcie", uuid={"2": {"no answer": "GPU is lost"}})
    assert [gpu.index for gpu in found.gpus] == [0, 1, 3]
    assert found.remarks == ("GPU 2 doesn't answer: GPU is lost",)
    assert "GPU 2 doesn't answer: GPU is lost" in text_of(found)


def test_unknown_numbers_of_newer_drivers() -> None:
    found = machine("l40s-pcie", common_ancestor={"0 1": 99}, p2p_status={"0 1 0": 77}, link_is_active={"0 0": True})
    assert found.paths[0, 1].label == "?"
    assert found.paths[0, 1].peer_problem == "P2P read is state 77"
    assert text_of(found)


def test_the_matrix_is_drawn() -> None:
    lines = text_of(machine("h200-nvl-2x4")).splitlines()
    start = next(number for number, line in enumerate(lines) if line.split() == [f"GPU{gpu}" for gpu in range(8)])
    drawn = [line.split() for line in lines[start + 1 : start + 9]]
    assert [row[1:] for row in drawn] == islands(4, "NV6", "SYS")
    assert lines[0] == "GPUs: 8 × NVIDIA H200 NVL"
    assert "  NV#   # NVLinks" in lines
    assert "  SYS   PCIe, between NUMA nodes" in lines
    assert not [line for line in lines if line.startswith("  PIX")], "only what is in the matrix is explained"
    assert sum(line.startswith("GPU") and ", cores " in line for line in lines) == 8


def test_peer_access_is_drawn() -> None:
    text = text_of(machine("l40s-pcie"))
    assert "peer access from row to column, as the driver reports it:" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("  GPU") and "X" in line][4:]
    assert rows == [
        ["GPU0", "X", "OK", "CNS", "CNS"],
        ["GPU1", "OK", "X", "CNS", "CNS"],
        ["GPU2", "CNS", "CNS", "X", "OK"],
        ["GPU3", "CNS", "CNS", "OK", "X"],
    ]
    assert "chipset not supported" in text
    assert "peer access, as the driver reports it: OK between all" in text_of(machine("dgx-h100"))


def run_command(library: Path, *commands: list[str], **environment: str) -> str:
    code = (
        f"import ctypes, sys; ctypes.CDLL({str(library / NVML)!r})\n"
        "from parallel_state.__main__ import main\n"
        f"sys.exit(max(main(command) for command in {commands!r}))"
    )
    program = Program(code, {**os.environ, **environment})
    out, err = program.communicate(120)
    assert (program.returncode, err) == (0, "")
    return out


@pytest.fixture(scope="module")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    return stand_in("stand_in_nvml.cpp", folder, NVML, f"-Wl,-soname,{NVML}").parent


@pytest.mark.slow
def test_through_pynvml(nvml_folder: Path) -> None:
    told = json.loads(run_command(nvml_folder, ["topology", "--json"], CUDA_VISIBLE_DEVICES="1,0"))
    one, two = told["gpus"]
    assert (told["driver_version"], told["cuda_version"]) == ("580.65.06", "13.0")
    assert (one["uuid"], one["pci_id"], one["name"]) == (
        "GPU-00000000-1111-2222-3333-444444444444", "0000:3b:00.0", "Test GPU",
    )  # fmt: skip
    assert one["memory_bytes"] == 80 << 30
    assert [gpu["cores"] for gpu in (one, two)] == [[0, 1], [2, 3]]
    assert len(one["links"]) == 11, "the sixth is down"
    assert {path["label"] for path in told["paths"]} == {"NV11"}
    assert [path["p2p"]["write"] for path in told["paths"]] == ["OK", "disabled by registry key"]
    assert told["visible"] == [two["uuid"], one["uuid"]]
    assert one["unknown"] == {"mig": "Not Supported"}


@pytest.mark.slow
def test_without_a_driver_the_command_says_none(nvml_folder: Path) -> None:
    out = run_command(nvml_folder, ["topology"], ["topology", "--json"], STAND_IN="no-driver")
    text, _, as_json = out.partition("\n")
    assert text == "GPUs: none. NVML failed to start: Driver Not Loaded"
    assert json.loads(as_json)["problem"] == "NVML failed to start: Driver Not Loaded"


def test_without_the_library_or_pynvml(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import pynvml

    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert main(["topology"]) == 0
    assert capsys.readouterr().out == (
        "GPUs: none. there is no libnvidia-ml.so.1, so no NVIDIA driver is installed here\n"
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert main(["topology"]) == 0
    assert capsys.readouterr().out == "GPUs: none. pynvml can't be imported; install nvidia-ml-py\n"


@pytest.mark.parametrize(
    ("told", "short"),
    [("00000000:1B:00.0", "0000:1b:00.0"), ("0000:1B:00.0", "0000:1b:00.0"), ("00010000:01:00.0", "00010000:01:00.0")],
)
def test_pci_ids_as_the_kernel_writes_them(told: str, short: str) -> None:
    assert short_pci_id(told) == short


def test_this_machine() -> None:
    import torch

    found = read_topology()
    if found.problem is not None:
        pytest.skip(f"needs a GPU: {found.problem}")
    assert all(gpu.uuid.startswith("GPU-") and gpu.pci_id and gpu.name for gpu in found.gpus)
    assert set(found.paths) == set(permutations([gpu.index for gpu in found.gpus], 2))
    assert text_of(found)
    if torch.cuda.is_available():
        seen = visible_devices(found.gpus, os.environ).gpus
        torchs = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        assert [device.uuid.partition("-")[2] for device in seen] == torchs
