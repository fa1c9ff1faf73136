"""Predicts which GPUs CUDA shows to a process, without starting CUDA."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from device_communicators.machine.topology import Gpu


@dataclass(frozen=True)
class Visible:
    """The GPUs that CUDA shows to a process, in CUDA's order. `remarks`: doubts, as text."""

    gpus: tuple[Gpu, ...]
    remarks: tuple[str, ...] = ()


def visible_devices(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Returns which of `gpus` (in NVML's order) a process with the environment `environ` sees. An invalid entry of
    CUDA_VISIBLE_DEVICES ends the list.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    remarks: list[str] = []
    if text is None:
        found = list(gpus)
    elif text.startswith(("GPU-", "MIG-")):
        found = _by_uuid(text, gpus, remarks)
    else:
        found = _by_index(text, gpus, remarks)
    if len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        remarks.append(
            "the GPUs differ, and CUDA numbers the fastest first: set CUDA_DEVICE_ORDER=PCI_BUS_ID for the indices here"
        )
    if any(gpu.mig for gpu in found):
        found = [gpu for gpu in found if not gpu.mig]
        remarks.append("CUDA shows one slice of a GPU in MIG mode; slices have no links, and aren't listed here")
    return Visible(tuple(found), tuple(remarks))


def _by_index(text: str, gpus: Sequence[Gpu], remarks: list[str]) -> list[Gpu]:
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
    known = list(takewhile(by_index.__contains__, numbers))
    if len(known) < len(numbers):
        _add_end_remark(text, str(numbers[len(known)]), remarks)
    return [by_index[number] for number in known]


def _by_uuid(text: str, gpus: Sequence[Gpu], remarks: list[str]) -> list[Gpu]:
    entries = text.split(",")
    mine = list(takewhile(lambda entry: entry.startswith("GPU-"), entries))
    if len(set(mine)) < len(mine):
        return _repeated(text, remarks)
    found: list[Gpu] = []
    for entry in entries:
        matches = [gpu for gpu in gpus if entry in mine and gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            _add_end_remark(text, entry, remarks)
            break
        if matches[0] in found:
            return _repeated(text, remarks)
        found.append(matches[0])
    return found


def _add_end_remark(text: str, entry: str, remarks: list[str]) -> None:
    if text and entry.strip() != "-1":  # the usual ways to hide all devices
        remarks.append(f"CUDA_VISIBLE_DEVICES={text} ends before {entry!r}, which names no device, or several")


def _repeated(text: str, remarks: list[str]) -> list[Gpu]:
    remarks.append(f"CUDA_VISIBLE_DEVICES={text} names a device twice, so CUDA shows none")
    return []
