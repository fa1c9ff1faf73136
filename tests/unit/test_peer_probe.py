"""The trial of peer access, with a libcuda that works, lies, crashes or hangs. No GPU has run it."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from device_communicators.machine import peer_probe
from device_communicators.machine.nvml import NoAnswerError, open_nvml
from device_communicators.machine.peer_probe import Pair, Probe, forget_probes, probe_peers
from tests.cases import each
from tests.machines import stand_in

pytestmark = pytest.mark.slow

A, B, C = (f"GPU-{digit * 8}-0000-1111-2222-333333333333" for digit in "abc")
PAIRS = [(A, B), (B, A)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(stand_in("stand_in_cuda.cpp", tmp_path_factory.mktemp("cuda"), "libcuda.so.1"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_probes()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # the process's own view must not matter


def probe(
    library: str, cache: Path, behaviour: str, monkeypatch: pytest.MonkeyPatch, pairs: list[Pair] = PAIRS,
    timeout_s: float = 60.0,
) -> dict[Pair, Probe]:  # fmt: skip
    monkeypatch.setenv("STAND_IN", behaviour)
    return probe_peers(pairs, "550.90", library=library, cache=cache, timeout_s=timeout_s)


def test_what_works(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    found = probe(library, tmp_path, "works", monkeypatch, [(A, B), (B, A), (A, C), (C, C)])
    assert found == dict.fromkeys(found, Probe(True, "stores, copies, loads came back right"))
    lines = log.read_text().split()
    assert lines.count("start") == 1, "one process for all"
    assert lines.count("released") == 3 * 2 + 1, "a pair's contexts end with it"


@pytest.mark.parametrize(
    ("behaviour", "works", "words"),
    [
        ("drops stores", False, "of stores to the peer 262144 of 262144 words are wrong"),
        ("mirrors", False, "of stores to the peer 262144 of 262144 words are wrong"),
        ("spoils one word", False, "of stores to the peer 1 of 262144 words are wrong, the first at 1000"),
        ("spoils loads", False, "of loads from the peer 262144 of 262144 words are wrong"),
        ("spoils copies", False, "of copies to the peer"),
        ("refuses the kernel", False, "cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
        ("can't access", False, "cuDeviceCanAccessPeer says no"),
        ("can't compile", True, "copies came back right; loads and stores weren't tried: cuModuleLoadData"),
        ("is busy", None, "cuDevicePrimaryCtxRetain"),
        ("has no device", None, "cuInit: CUDA_ERROR (100)"),
        ("shows another device", None, "has the UUID"),
    ],
)
def test_what_does_not(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, works: bool | None, words: str
) -> None:
    for result in probe(library, tmp_path, behaviour, monkeypatch).values():
        assert result.works is works
        assert words in result.reason


def test_a_crash_is_an_answer_and_the_others_are_tried(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = probe(library, tmp_path, "crashes for the first pair", monkeypatch)
    assert found[A, B] == Probe(False, "the probe was ended by SIGABRT")
    assert found[B, A].works
    forget_probes()
    assert probe(library, tmp_path, "works", monkeypatch)[A, B].works, "a mishap isn't kept"
    words = probe(library, tmp_path / "other", "crashes", monkeypatch, [(A, C)])[A, C].reason
    assert words == "the probe was ended by SIGABRT: the driver is about to crash"


def test_a_hang_ends_with_its_deadline_and_the_others_are_not_tried(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    found = probe(library, tmp_path, "hangs", monkeypatch, timeout_s=5.0)
    assert time.monotonic() - started < 30.0
    assert found[A, B] == Probe(False, "probe hung: no answer within 5 s")
    assert found[B, A] == Probe(None, "not tried, since another probe hung: no answer within 5 s")
    assert not list(tmp_path.glob("*.json"))


def test_answers_are_kept_per_pair_and_driver(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    first = probe(library, folder, "drops stores", monkeypatch)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert probe(library, folder, "works", monkeypatch) == first  # from memory
    forget_probes()
    assert probe(library, folder, "works", monkeypatch) == first  # from the cache
    assert log.read_text().split().count("start") == 1
    newer = probe_peers(PAIRS, "560.00", library=library, cache=folder)
    assert all(result.works for result in newer.values())
    monkeypatch.setattr(peer_probe, "boot_id", lambda: "another")
    assert probe(library, folder, "works", monkeypatch)[A, B].works


SPOILT = ("", "{", "[]", '{"works": null, "reason": ""}', '{"works": 1, "reason": ""}', "{}")


def test_a_spoilt_cache_is_as_none(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe(library, tmp_path, "drops stores", monkeypatch, [(A, B)])
    (path,) = tmp_path.glob("*.json")

    def check(text: str) -> None:
        path.write_text(text)
        forget_probes()
        assert probe(library, tmp_path, "works", monkeypatch, [(A, B)])[A, B].works
        assert json.loads(path.read_text())["works"]

    each(SPOILT, check)


def test_without_a_cache_folder(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert probe(library, tmp_path / "file" / "cache", "works", monkeypatch)[A, B].works


def test_without_a_driver(tmp_path: Path) -> None:
    result = probe_peers(PAIRS, None, library="libno_such_driver.so", cache=tmp_path)[A, B]
    assert result.works is None
    assert "libno_such_driver.so" in result.reason


def test_without_an_interpreter(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    result = probe(library, tmp_path, "works", monkeypatch)[A, B]
    assert result.works is None
    assert "can't be started" in result.reason


def test_a_real_gpu_with_itself(tmp_path: Path) -> None:
    """Loads, stores and copies within one GPU: as much as one can show."""
    try:
        with open_nvml() as nvml:
            count, uuids = nvml.ask("gpu_count"), []
            uuids = [nvml.ask("uuid", gpu) for gpu in range(count) if not _is_divided(nvml, gpu)]
    except NoAnswerError as error:
        pytest.skip(f"needs a GPU: {error}")
    if not uuids:
        pytest.skip("needs a GPU that isn't divided into slices")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    pair = (uuids[0], uuids[0])
    assert probe_peers([pair], "test", cache=tmp_path)[pair] == Probe(True, "stores, copies, loads came back right")


def _is_divided(nvml: object, gpu: int) -> bool:
    try:
        return bool(nvml.ask("mig_enabled", gpu))  # type: ignore[attr-defined]
    except NoAnswerError:
        return False
