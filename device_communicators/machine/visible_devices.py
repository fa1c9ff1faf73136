"""The GPUs, and MIG slices of GPUs, that a process's CUDA shows, from CUDA_VISIBLE_DEVICES: pure text and arithmetic.

After CUDA's programming guide (environment variables) and NVIDIA's MIG guide. What both leave open, repeated and
ambiguous entries, follows what torch.cuda does, with which a test compares this. Entries may be indices, UUIDs of GPUs
or slices, and unique beginnings of UUIDs; the list ends at the first entry that names nothing. CUDA itself, once it has
started, knows better: `Topology.find(str(torch.cuda.get_device_properties(index).uuid))`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from device_communicators.machine.topology import Gpu, Slice


@dataclass(frozen=True)
class Device:
    """A device to which CUDA gives an index: a GPU, or a slice of one."""

    gpu: Gpu
    slice: Slice | None = None

    @property
    def uuid(self) -> str:
        return self.gpu.uuid if self.slice is None else self.slice.uuid


@dataclass(frozen=True)
class Visible:
    """The devices that a process sees, in CUDA's order, and what is worth saying about that."""

    devices: tuple[Device, ...]
    remarks: tuple[str, ...] = ()


def visible_devices(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Returns what CUDA_VISIBLE_DEVICES of `environ` leaves of the machine's GPUs, which come in NVML's order."""
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
            "the GPUs differ, and CUDA numbers the fastest first: indices are as here with CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    if len(found) > 1 and any(device.slice for device in found):
        first = next(place for place, device in enumerate(found) if device.slice)
        found = found[: first or 1]
        remarks.append("CUDA shows one MIG slice per process, and none beside whole GPUs: give each process its own")
    return Visible(tuple(found), tuple(remarks))


def _whole(gpu: Gpu) -> Device | None:
    """Returns a GPU by its index; of one in MIG mode CUDA takes the first slice."""
    if not gpu.mig:
        return Device(gpu)
    return Device(gpu, gpu.slices[0]) if gpu.slices else None


def _by_index(text: str, gpus: Sequence[Gpu], remarks: list[str]) -> list[Device]:
    numbers: list[int] = []
    for entry in text.split(","):
        # CUDA reads digits as far as they go: "1gpu" is 1.
        digits = re.match(r"\+?[0-9]+", entry.strip())
        if digits is None:
            _ends(text, entry, remarks)
            break
        numbers.append(int(digits[0]))
    if len(set(numbers)) < len(numbers):
        return _repeated(text, remarks)
    by_index = {gpu.index: gpu for gpu in gpus}
    found: list[Device] = []
    for number in numbers:
        device = _whole(by_index[number]) if number in by_index else None
        if device is None:
            _ends(text, str(number), remarks)
            break
        found.append(device)
    return found


def _by_uuid(text: str, gpus: Sequence[Gpu], remarks: list[str]) -> list[Device]:
    known = [Device(gpu) for gpu in gpus] + [Device(gpu, each) for gpu in gpus for each in gpu.slices]
    entries = text.split(",")
    kind = text[:4]  # a list is of one kind
    mine = list(takewhile(lambda entry: entry.startswith(kind), entries))
    if len(set(mine)) < len(mine):
        return _repeated(text, remarks)
    found: list[Device] = []
    for entry in entries:
        matches = [device for device in known if entry.startswith(kind) and _names(entry, device)]
        device = matches[0] if len(matches) == 1 else None
        if device is not None and device.slice is None:
            device = _whole(device.gpu)
        if device is None:
            _ends(text, entry, remarks)
            break
        if device in found:
            return _repeated(text, remarks)
        found.append(device)
    return found


def _names(entry: str, device: Device) -> bool:
    if device.uuid.startswith(entry):
        return True
    # Drivers before R470 name slices by GPU and instances.
    part = device.slice
    return part is not None and entry == f"MIG-{device.gpu.uuid}/{part.gpu_instance}/{part.compute_instance}"


def _ends(text: str, entry: str, remarks: list[str]) -> None:
    if text and entry.strip() != "-1":  # both are the customary way to say: none
        remarks.append(f"CUDA_VISIBLE_DEVICES={text} ends before {entry!r}, which names no device, or several")


def _repeated(text: str, remarks: list[str]) -> list[Device]:
    remarks.append(f"CUDA_VISIBLE_DEVICES={text} names a device twice, and so shows none")
    return []
