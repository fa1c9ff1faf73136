"""The binding matches NCCL's headers as recorded in tests/nccl_versions. NCCL_WHEELS=2.28.9,2.32.3 (or `all`)
also downloads these wheels and compares them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from device_communicators.base import settings
from device_communicators.cuda import nccl_library
from device_communicators.cuda.nccl_library import NcclLibrary, NcclUnavailableError, UniqueId
from tests.cases import each
from tests.helpers import nccl_stand_in
from tests.internals import nccl_facts

RECORDED = sorted(path.stem for path in nccl_facts.RECORDS.glob("*.json"))
_SIZES = {"int": 4, "size_t": 8, "unsigned int": 4, "ncclResult_t": 4, "ncclDataType_t": 4, "ncclRedOp_t": 4}
INVALID_ARGUMENT = 4
_NEW = "as it came with a later version"


def facts(version: str) -> dict[str, Any]:
    return json.loads((nccl_facts.RECORDS / f"{version}.json").read_text())


def test_versions_from_2_27_to_2_32_are_recorded() -> None:
    assert {version.rpartition(".")[0] for version in RECORDED} >= {f"2.{minor}" for minor in range(27, 33)}


def _kind_of(told: str) -> Any:
    if told.endswith("*") or told in ("ncclComm_t", "cudaStream_t", "ncclWindow_t"):
        return "char*" if told == "const char*" else "pointer"
    return {"size_t": ctypes.c_size_t, "ncclUniqueId": UniqueId}.get(told, ctypes.c_int)


def _kind_in_binding(kind: Any) -> Any:
    if kind is None:
        return ctypes.c_int
    if kind is ctypes.c_char_p:
        return "char*"
    return "pointer" if kind is ctypes.c_void_p or hasattr(kind, "contents") else kind


def test_signatures() -> None:
    each(RECORDED, _check_signatures)


def _check_signatures(version: str) -> None:
    told = facts(version)
    compared = 0
    for name, (result, arguments, since) in nccl_library._FUNCTIONS.items():
        assert (name in told["functions"]) == (since <= told["version"]), f"{name}: {_NEW}"
        if name not in told["functions"]:
            continue
        expected = [_kind_of(kind) for kind in told["functions"][name]]
        assert [_kind_in_binding(kind) for kind in (result, *arguments)] == expected, name
        compared += 1
    assert compared >= 19


def test_the_library_has_the_functions_of_its_header() -> None:
    each(RECORDED, _check_the_library_has_the_functions_of_its_header)


def _check_the_library_has_the_functions_of_its_header(version: str) -> None:
    told = facts(version)
    assert set(told["symbols"]) == set(told["functions"])


def test_the_layout_of_the_configuration() -> None:
    each(RECORDED, _check_the_layout_of_the_configuration)


def _check_the_layout_of_the_configuration(version: str) -> None:
    told = facts(version)
    config = nccl_library.config_type(told["version"])
    found = [[name, getattr(config, name).offset] for name, _ in config._fields_]  # type: ignore[attr-defined]
    assert found == [[name, offset] for name, _, offset in told["config"]["fields"]]
    assert ctypes.sizeof(config) == told["config"]["size"]
    for (name, kind), (_, said, _) in zip(config._fields_, told["config"]["fields"], strict=True):  # type: ignore[misc,arg-type]
        assert ctypes.sizeof(kind) == _SIZES.get(said, 8), name
    assert ctypes.sizeof(UniqueId) == told["unique_id"] == told["constants"]["NCCL_UNIQUE_ID_BYTES"]


def test_a_version_between_two_that_are_known_gets_what_both_have() -> None:
    """NCCL takes fields beyond the configuration's size as undefined."""
    known = {told["version"]: told["config"]["size"] for told in map(facts, RECORDED)}
    assert ctypes.sizeof(nccl_library.config_type(23005)) == known[23004]
    assert ctypes.sizeof(nccl_library.config_type(29999)) == known[max(known)]


def test_numbers() -> None:
    each(RECORDED, _check_numbers)


def _check_numbers(version: str) -> None:
    told = facts(version)
    names = {
        torch.int8: "Int8", torch.uint8: "Uint8", torch.int32: "Int32", torch.uint32: "Uint32", torch.int64: "Int64",
        torch.uint64: "Uint64", torch.float16: "Float16", torch.float32: "Float32", torch.float64: "Float64",
        torch.bfloat16: "Bfloat16", torch.float8_e4m3fn: "Float8e4m3", torch.float8_e5m2: "Float8e5m2",
    }  # fmt: skip
    assert {dtype: told["dtypes"][f"nccl{name}"] for dtype, name in names.items()} == nccl_library.DTYPES
    assert told["dtypes"]["ncclNumTypes"] == len(names), "NCCL has a dtype that the table lacks"
    ops = {"sum": "Sum", "product": "Prod", "max": "Max", "min": "Min", "avg": "Avg"}
    assert {op: told["ops"][f"nccl{name}"] for op, name in ops.items()} == nccl_library.REDUCE_OPS
    results = {name: number for name, number in told["results"].items() if name != "ncclNumResults"}
    assert {name: nccl_library.RESULTS.index(name) for name in results} == results
    assert told["constants"]["NCCL_CONFIG_UNDEF_INT"] == nccl_library.UNDEFINED
    assert told["constants"].get("NCCL_SUSPEND_MEM", 1) == nccl_library.SUSPEND_MEMORY
    assert told["constants"]["NCCL_WIN_COLL_SYMMETRIC"] == nccl_library.COLL_SYMMETRIC


def _wanted() -> list[str]:
    asked = os.environ.get("NCCL_WHEELS", "")
    return RECORDED if asked == "all" else [version for version in asked.split(",") if version]


@pytest.mark.parametrize("version", _wanted() or [pytest.param("", marks=pytest.mark.skip("NCCL_WHEELS isn't set"))])
def test_the_real_library(version: str, tmp_path: Path) -> None:
    try:
        header, path = nccl_facts.fetch(version, tmp_path)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the wheel of {version} can't be had: {error}")
    try:
        _check_real(header, path, tmp_path, facts(version))
    finally:
        path.unlink()


def test_the_installed_library(tmp_path: Path) -> None:
    header = Path(torch.__file__).parents[1] / "nvidia" / "nccl" / "include" / "nccl.h"
    if not header.exists():
        pytest.skip("there is no NCCL beside this torch")
    path = header.parents[1] / "lib" / "libnccl.so.2"
    _check_real(header, path, tmp_path, None)


def _check_real(header: Path, path: Path, folder: Path, recorded: dict[str, Any] | None) -> None:
    told = nccl_facts.facts_of(header, path, folder)
    assert recorded is None or told == recorded
    library = NcclLibrary(str(path))
    assert library.version == told["version"]
    assert set(library.missing) == set(nccl_library.FUNCTIONS) - set(told["functions"])
    assert ctypes.sizeof(library.config()) == told["config"]["size"]
    assert library.text_of(nccl_library.REMOTE_ERROR).startswith("ncclRemoteError, ")
    # NCCL checks arguments before it looks for a GPU, so these calls work anywhere.
    state = ctypes.c_int()
    assert library.ncclCommGetAsyncError(None, ctypes.byref(state)) == INVALID_ARGUMENT
    assert library.ncclGroupStart() == library.ncclGroupEnd() == nccl_library.SUCCESS


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if nccl_stand_in.compiler() is None:
        pytest.skip("there is no C compiler")
    return tmp_path_factory.mktemp("nccl")


def test_what_an_old_version_lacks_has_a_reason(stand_in: Path) -> None:
    library = NcclLibrary(str(nccl_stand_in.build(stand_in, "-DWITHOUT_SUSPEND")))
    assert library.missing.keys() == {"ncclCommSuspend", "ncclCommResume"}
    assert library.missing["ncclCommSuspend"] == "NCCL 2.28.9 has no ncclCommSuspend, which needs 2.29.7"
    assert str(library).startswith("NCCL 2.28.9 (")
    with pytest.raises(AttributeError, match=r"NCCL 2\.28\.9"):
        _ = library.ncclCommSuspend


def test_a_configuration_is_undefined_but_for_what_it_is_told(stand_in: Path) -> None:
    config: Any = NcclLibrary(str(nccl_stand_in.build(stand_in))).config(blocking=0, commName=b"tp:0")
    assert (config.size, config.magic, config.version) == (ctypes.sizeof(config), 0xCAFEBEEF, 22809)
    assert (config.blocking, config.commName, config.netName) == (0, b"tp:0", None)
    rest = {name for name, kind in config._fields_ if kind is ctypes.c_int} - {"blocking"}
    assert {getattr(config, name) for name in rest} == {nccl_library.UNDEFINED}


def test_a_library_that_is_too_old_or_no_nccl_is_told(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(nccl_stand_in.build(stand_in))
    monkeypatch.setenv("STAND_IN_NCCL_VERSION", "22605")
    with pytest.raises(NcclUnavailableError, match=r"NCCL 2\.26\.5 .* is too old: 2\.27\.0 or newer is needed"):
        NcclLibrary(path)
    with pytest.raises(NcclUnavailableError, match=r"nowhere\.so can't be loaded as NCCL"):
        NcclLibrary("/nowhere.so")
    with pytest.raises(NcclUnavailableError, match="can't be loaded as NCCL"):
        NcclLibrary("libc.so.6")


def test_the_setting_overrides(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(nccl_stand_in.build(stand_in))
    monkeypatch.setenv(settings.NCCL_LIBRARY.name, path)
    assert nccl_library.load().path == path
    monkeypatch.setenv(settings.NCCL_LIBRARY.name, "/nowhere.so")
    with pytest.raises(NcclUnavailableError, match=r"nowhere\.so .*\(PARALLEL_STATE_NCCL_LIBRARY\)"):
        nccl_library.load()


def test_what_the_process_has_loaded_comes_first(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = stand_in / "libnccl.so.2"
    nccl_stand_in.build(stand_in).rename(loaded)
    beside = stand_in / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    beside.parent.mkdir(parents=True)
    beside.touch()
    monkeypatch.setattr(torch, "__file__", str(stand_in / "torch" / "__init__.py"))
    assert nccl_library.candidates()[-2:] == [str(beside), "libnccl.so.2"]
    kept = ctypes.CDLL(str(loaded))
    assert nccl_library.candidates()[0] == str(loaded)
    assert kept is not None
