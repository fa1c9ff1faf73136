"""torchft's own tests, over this library and over gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.torch_suite import Outcome
from tests.torchft_suite import FOLDER, run

pytestmark = pytest.mark.skipif(
    not (FOLDER / "ready").exists(), reason=f"no {FOLDER.name}: python -m tests.torchft_suite fetch"
)
SAMPLE = (
    "ProcessGroupTest.test_gloo_apis_0_cpu",
    "ProcessGroupTest.test_gloo_timeout",
    "ManagerIntegTest.test_ddp_recovery_0_async_quorum",
    "ManagerIntegTest.test_ddp_recovery_3_native_sync_quorum",
)


def _check(found: dict[str, Outcome], log: Path) -> None:
    failed = [f"--- {each.name} ---\n{each.reason}" for each in found.values() if each.outcome == "failed"]
    assert not failed, "\n".join([f"{len(failed)} tests fail; what they printed: {log}", *failed])


def test_a_sample_of_torchfts_tests(tmp_path: Path) -> None:
    found = run("parallel_state", SAMPLE, log=tmp_path / "log")
    assert found.keys() == set(SAMPLE)
    _check(found, tmp_path / "log")


@pytest.mark.long
def test_what_passes_over_gloo(tmp_path: Path) -> None:
    over_gloo, ours = (run(backend, log=tmp_path / "log") for backend in ("gloo", "parallel_state"))
    passed = {name for name, each in over_gloo.items() if each.outcome == "passed"}
    assert len(passed) >= 25
    _check({name: ours[name] for name in passed}, tmp_path / "log")
    resilient = [name for name in passed if re.search("with_resiliency", name)]
    assert len(resilient) == 8
