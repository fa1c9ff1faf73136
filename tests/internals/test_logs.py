from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from device_communicators.base import logs

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300
STARTS = """
import logging, sys
import parallel_state as ps
{before}
ps.init_distributed_environment()
{after}
logging.getLogger("parallel_state").warning("a warning")
ps.destroy_distributed_environment()
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def _stderr(before: str = "", after: str = "", **variables: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **ALONE, **variables}
    environment = {name: value for name, value in environment.items() if value}
    ended = subprocess.run(
        [sys.executable, "-c", STARTS.format(before=before, after=after)],
        env=environment, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stderr.splitlines()


@pytest.mark.slow
def test_under_torchruns_variables_the_log_has_time_rank_and_level() -> None:
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ rank 0 "
    (warning,) = _stderr()
    assert re.fullmatch(f"{line}WARNING parallel_state: a warning", warning)
    found = _stderr(PARALLEL_STATE_LOG_LEVEL="INFO")
    assert all(re.match(line, each) for each in found)
    assert [each for each in found if re.search("INFO parallel_state: .* is ready on cpu: one rank$", each)]
    assert not _stderr(PARALLEL_STATE_LOG_LEVEL="ERROR")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before", "after"])
def test_the_programs_own_configuration_stands(place: str) -> None:
    (warning,) = _stderr(**{place: "logging.basicConfig(format='own: %(message)s')"})
    assert warning == "own: a warning"


@pytest.mark.parametrize(("local_rank", "reports"), [("0", True), ("3", False), (None, True)])
def test_the_first_rank_reports_the_faults_of_its_host(
    local_rank: str | None, reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert logs.is_first_of_host() == reports
