"""Predicts the GPUs and MIG slices that CUDA shows to a process, from CUDA_VISIBLE_DEVICES. Doesn't start CUDA.

Follows CUDA's programming guide (environment variables) and NVIDIA's MIG guide. They don't define repeated and
ambiguous entries; these follow torch.cuda, which a test compares. Entries are indices, UUIDs of GPUs or slices, or
unique prefixes of UUIDs. The list ends at the first invalid entry. After CUDA has started, prefer
`Topology.find(str(torch.cuda.get_device_properties(index).uuid))`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from device_communicators.machine.topology import Gpu, Slice


@dataclass(frozen=True)
class Device:
    """A device with an index in CUDA: a GPU, or a slice of one."""

    gpu: Gpu
    slice: Slice | None = None

    @property
    def uuid(self) -> str:
        return self.gpu.uuid if self.slice is None else self.slice.uuid


@dataclass(frozen=True)
class Visible:
    """The devices that a process sees, in CUDA's order, and remarks."""

    devices: tuple[Device, ...]
    remarks: tuple[str, ...] = ()


def visible_devices(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Returns the devices visible with CUDA_VISIBLE_DEVICES of `environ`. `gpus`: the machine's, in NVML's order."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    remarks: list[str] = []
    if text is None:
        found = [device for gpu in gpus if (device := _whole(gpu)) is not None]
    elif text.startswith(("GPU-", "MIG-")):
        found = _by_uuid(text, gpus, remarks)
    else:
        found = _by_index(text, gpus, remarks)
    if len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        remarks.append(
            "the GPUs differ, and CUDA numbers the fastest first: set CUDA_DEVICE_ORDER=PCI_BUS_ID for the indices here"
        )
    if len(found) > 1 and any(device.slice for device in found):
        first = next(place for place, device in enumerate(found) if device.slice)
        found = found[: first or 1]
        remarks.append(
            "CUDA shows one MIG slice per process, and no slice together with whole GPUs: give each process its own"
        )
    return Visible(tuple(found), tuple(remarks))


def _whole(gpu: Gpu) -> Device | None:
    """Returns the device that CUDA shows for a GPU's index: in MIG mode its first slice, or None."""
    if not gpu.mig:
        return Device(gpu)
    return Device(gpu, gpu.slices[0]) if gpu.slices else None


def _by_index(text: str, gpus: Sequence[Gpu], remarks: list[str]) -> list[Device]:
    numbers: list[int] = []
    for entry in text.split(","):
        # CUDA ignores text after digits: "1gpu" is 1.
        digits = re.match(r"\+?[0-9]+", entry.strip())
        if digits is None:
            _add_end_remark(text, entry, remarks)
            break
        numbers.append(int(digits[0]))
    if len(set(numbers)) < len(numbers):
        return _repeated(text, remarks)
    by_index = {gpu.index: gpu for gpu in gpus}
    found: list[Device] = []
    for number in numbers:
        device = _whole(by_index[number]) if number in by_index else None
        if device is None:
            _add_end_remark(text, str(number), remarks)
            break
        found.append(device)
    return found


def _by_uuid(text: str, gpus: Sequence[Gpu], remarks: list[str]) -> list[Device]:
    known = [Device(gpu) for gpu in gpus] + [Device(gpu, each) for gpu in gpus for each in gpu.slices]
    entries = text.split(",")
    kind = text[:4]  # all entries must have the same kind
    mine = list(takewhile(lambda entry: entry.startswith(kind), entries))
    if len(set(mine)) < len(mine):
        return _repeated(text, remarks)
    found: list[Device] = []
    for entry in entries:
        matches = [device for device in known if entry.startswith(kind) and _is_named(entry, device)]
        device = matches[0] if len(matches) == 1 else None
        if device is not None and device.slice is None:
            device = _whole(device.gpu)
        if device is None:
            _add_end_remark(text, entry, remarks)
            break
        if device in found:
            return _repeated(text, remarks)
        found.append(device)
    return found


def _is_named(entry: str, device: Device) -> bool:
    if device.uuid.startswith(entry):
        return True
    # Drivers before R470 name slices by GPU and instance ids.
    part = device.slice
    return part is not None and entry == f"MIG-{device.gpu.uuid}/{part.gpu_instance}/{part.compute_instance}"


def _add_end_remark(text: str, entry: str, remarks: list[str]) -> None:
    if text and entry.strip() != "-1":  # "" and "-1" are the usual ways to hide all devices
        remarks.append(f"CUDA_VISIBLE_DEVICES={text} ends before {entry!r}, which names no device, or several")


def _repeated(text: str, remarks: list[str]) -> list[Device]:
    remarks.append(f"CUDA_VISIBLE_DEVICES={text} names a device twice, so CUDA shows none")
    return []
