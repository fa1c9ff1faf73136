"""Reads facts from NCCL's header and library; tests/nccl_versions holds them by version. `python -m
tests.internals.nccl_facts 2.32.3 ...` records versions from wheels of nvidia-nccl-cu13. It needs pip, a C
compiler and 600 MB of disk, but no GPU."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from device_communicators.cuda.nccl_library import FUNCTIONS

RECORDS = Path(__file__).parents[1] / "nccl_versions"
_ENUMS = {"results": "ncclResult_t", "dtypes": "ncclDataType_t", "ops": "ncclRedOp_t"}
_CONSTANTS = ("NCCL_UNIQUE_ID_BYTES", "NCCL_CONFIG_UNDEF_INT", "NCCL_WIN_COLL_SYMMETRIC", "NCCL_SUSPEND_MEM")


def fetch(version: str, folder: Path) -> tuple[Path, Path]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", str(folder)]
    subprocess.run([*command, f"nvidia-nccl-cu13=={version}"], check=True, capture_output=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = ("nvidia/nccl/include/nccl.h", "nvidia/nccl/lib/libnccl.so.2")
        header, library = (Path(archive.extract(name, folder)) for name in names)
    wheel.unlink()
    return header, library


def facts_of(header: Path, library: Path, folder: Path) -> dict[str, Any]:
    return {**header_facts(header, folder), "symbols": symbols_of(library)}


def symbols_of(library: Path) -> list[str]:
    loaded = ctypes.CDLL(str(library))
    return [name for name in FUNCTIONS if hasattr(loaded, name)]


def header_facts(header: Path, folder: Path) -> dict[str, Any]:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
    fields = _config_fields(text)
    numbers = {key: _enumerators(text, name) for key, name in _ENUMS.items()}
    names = ["sizeof(ncclConfig_t)", "sizeof(ncclUniqueId)", "NCCL_VERSION_CODE"]
    names += [name for name in _CONSTANTS if f"define {name}" in text]
    names += [f"offsetof(ncclConfig_t, {field})" for field, _ in fields]
    names += [each for enumerators in numbers.values() for each in enumerators]
    values = dict(zip(names, _printed(header, names, folder), strict=True))
    return {
        "version": values["NCCL_VERSION_CODE"],
        "functions": {name: prototype for name in FUNCTIONS if (prototype := _prototype(text, name)) is not None},
        "config": {
            "size": values["sizeof(ncclConfig_t)"],
            "fields": [[field, kind, values[f"offsetof(ncclConfig_t, {field})"]] for field, kind in fields],
        },
        "unique_id": values["sizeof(ncclUniqueId)"],
        "constants": {name: values[name] for name in _CONSTANTS if name in values},
        **{key: {name: values[name] for name in enumerators} for key, enumerators in numbers.items()},
    }


def _prototype(text: str, name: str) -> list[str] | None:
    found = re.search(rf"^\s*([\w \*]+?)\s*\b{name}\s*\(([^)]*)\)\s*;", text, flags=re.MULTILINE)
    if found is None:
        return None
    arguments = [_type(argument) for argument in found[2].split(",") if argument.strip() not in ("", "void")]
    return [" ".join(found[1].split()), *arguments]


def _type(argument: str) -> str:
    """Returns `const void*` for `const void* sendbuff`."""
    words = argument.replace("*", " * ").split()
    return " ".join(words[:-1]).replace(" *", "*")


def _config_fields(text: str) -> list[tuple[str, str]]:
    (body,) = re.findall(r"typedef struct ncclConfig_v\d+ \{(.*?)\} ncclConfig_t;", text, flags=re.DOTALL)
    lines = [" ".join(line.replace("*", " * ").split()) for line in body.split(";") if line.strip()]
    return [(line.split()[-1], " ".join(line.split()[:-1]).replace(" *", "*")) for line in lines]


def _enumerators(text: str, name: str) -> list[str]:
    (body,) = re.findall(rf"typedef enum \{{([^{{}}]*)\}}\s*{name};", text, flags=re.DOTALL)
    return re.findall(r"\b(nccl\w+)\s*=", body)


def _printed(header: Path, names: list[str], folder: Path) -> list[int]:
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        (folder / name).write_text("")
    (folder / "cuda_runtime.h").write_text("#define CUDART_VERSION 13000\ntypedef void *cudaStream_t, *cudaEvent_t;\n")
    lines = "".join(f'  printf("%lld\\n", (long long)({name}));\n' for name in names)
    source, program = folder / "facts.c", folder / "facts"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\nint main(void) {{\n{lines}  return 0;\n}}\n'
    )
    compiler = shutil.which("gcc") or shutil.which("clang") or "cc"
    subprocess.run([compiler, "-w", f"-I{folder}", str(source), "-o", str(program)], check=True, timeout=120)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout
    return [int(line) for line in output.split()]


def record(version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        facts = facts_of(*fetch(version, Path(folder)), Path(folder))
    text = json.dumps(facts, indent=1)
    text = re.sub(r"\[\s+([^\[\]]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    (RECORDS / f"{version}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        record(wanted)
