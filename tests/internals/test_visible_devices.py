from __future__ import annotations

import random

import pytest
import torch

from device_communicators.machine.topology import Gpu
from device_communicators.machine.visible_devices import visible_devices

UUIDS = ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932aaaa-0000-4106-c12f-20bd9faed9f6",
         "GPU-12345678-d72c-4106-c12f-20bd9faed9f6", "GPU-b0b0b0b0-d72c-4106-c12f-20bd9faed9f6"]  # fmt: skip
GPUS = [Gpu(index, uuid, name="H100") for index, uuid in enumerate(UUIDS)]


def indices(text: str | None, gpus: list[Gpu] = GPUS) -> list[int]:
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    return [gpu.index for gpu in visible_devices(gpus, environ).gpus]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,1", [2, 1]),
        ("0,2,-1,1", [0, 2]),  # both from CUDA's programming guide
        ("-1", []),
        ("3", [3]),
        (" 1 , 0 ", [1, 0]),
        ("0,9,1", [0]),
        ("0,x,1", [0]),
        ("1gpu,2", [1, 2]),
        ("0,1,0", []),
        ("NoDevFiles", []),
        (UUIDS[3], [3]),
        (f"{UUIDS[2]},{UUIDS[0]}", [2, 0]),
        ("GPU-8932f937", [0]),  # also from the guide: enough digits to be unique
        ("GPU-1,GPU-b", [2, 3]),
        ("GPU-b,GPU-8932", [3]),
        ("GPU-b,GPU-ffff,GPU-1", [3]),
        ("GPU-b,0", [3]),
        ("0,GPU-b", [0]),
        ("GPU-b,GPU-b0", []),
        ("gpu-b", []),
    ],
)
def test_lists(text: str | None, seen: list[int]) -> None:
    assert indices(text) == seen


@pytest.mark.parametrize("text", ["0,9,1", "0,x", "GPU-b,GPU-8932", "0,1,0"])
def test_what_is_left_out_is_said(text: str) -> None:
    (remark,) = visible_devices(GPUS, {"CUDA_VISIBLE_DEVICES": text}).remarks
    assert text in remark


@pytest.mark.parametrize("text", ["", "-1", "0,-1", "2,1"])
def test_what_is_meant_needs_no_remark(text: str) -> None:
    assert visible_devices(GPUS, {"CUDA_VISIBLE_DEVICES": text}).remarks == ()


def test_as_torch_does() -> None:
    if not hasattr(torch.cuda, "_parse_visible_devices"):
        pytest.skip("this torch has no _parse_visible_devices")
    dice = random.Random(5)
    entries = ["0", "1", "2", "3", "7", "-1", " 2", "1a", "a1", "", *UUIDS, "GPU-8932", "GPU-1", "GPU-b0", "GPU-x"]
    seen = set()
    for _ in range(3000):
        text = ",".join(dice.choice(entries) for _ in range(dice.randint(1, 4)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", text)
            theirs = torch.cuda._parse_visible_devices()
        if theirs and isinstance(theirs[0], str):
            theirs = torch.cuda._transform_uuid_to_ordinals(theirs, UUIDS)
        known = [index for place, index in enumerate(theirs) if all(each < len(GPUS) for each in theirs[: place + 1])]
        assert indices(text) == known, text
        seen.add(tuple(known))
    assert len(seen) > 20


def test_a_gpu_in_mig_mode_is_not_listed() -> None:
    assert indices("0", [Gpu(0, UUIDS[0], mig=True)]) == []
    assert indices(None, [Gpu(0, UUIDS[0], mig=True), GPUS[1]]) == [1]


def test_different_gpus_are_numbered_by_speed() -> None:
    mixed = [GPUS[0], Gpu(1, UUIDS[1], name="T4")]
    (remark,) = visible_devices(mixed, {}).remarks
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in remark
    assert visible_devices(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).remarks == ()
