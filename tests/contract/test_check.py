from __future__ import annotations

import contextlib
import json
import os
import resource
from pathlib import Path

import pytest
import torch

from device_communicators.cpu import native
from tests.helpers.check_jobs import run_check
from tests.hosts import Hosts, problem
from tests.programs import FORK_SERVERS, Program

_SOUND = """
import sys
from parallel_state.__main__ import main
sys.exit(main(["check", "--tp", "2", "--quick", "--json", "report.json"]))
"""


def test_alone_it_starts_local_ranks(tmp_path: Path) -> None:
    code = f"import os, sys\nos.chdir({str(tmp_path)!r})\n{FORK_SERVERS}"
    names = ("PATH", "HOME", "XDG_CACHE_HOME")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    program = Program(code + _SOUND.replace("sys.exit(", "code = (") + "\nprint('exit code', code)", environment)
    output, errors = program.communicate(60.0)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] and report["world_size"] == 2 and report["sizes"] == {"tp": 2}, output + errors
    groups = {group["kind"]: group for group in report["traffic"]["1"]["groups"]}
    assert {"world", "tp"} == set(groups)
    for group in groups.values():
        assert group["checks"] >= 14 and not group["wrong"] and group["latency_us"] > 0 and group["bytes_per_s"] > 0
    assert f"exit code {report['exit_code']}" in output and "answers checked" in output and "shared_memory" in output
    assert {each["severity"] for each in report["findings"]} <= {"info", "warning"}


def _several_faults() -> None:
    with contextlib.suppress(native.NativeUnavailableError):
        native.load()  # for the installed torch; another version would compile it anew
    torch.__version__ = "2.9.1"
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (16 << 10, 16 << 10))


@pytest.mark.skipif(problem() is not None, reason=f"no hosts can be made here: {problem()}")
def test_over_hosts_it_names_what_is_wrong_and_who_is_missing(hosts: Hosts) -> None:
    ended = run_check(
        hosts, (0, 0, 1, 1), "--tp", "2", "--quick", "--timeout", "16", absent=(3,), shims={2: _several_faults},
        environments={2: {"PARALLEL_STATE_TIMOUT_S": "5", "NCCL_ALGO": "Tree"}},
    )  # fmt: skip
    codes = {each["code"] for each in ended.findings}
    wanted = {"rank-missing", "version-torch", "setting-unknown", "settings-differ"}
    assert wanted <= codes, str(ended)
    found = ended.find("rank-missing")
    assert found is not None and "parallel-state-host-1" in found["found"] and found["ranks"] == [3]
    skew = ended.find("version-torch")
    assert skew is not None and skew["ranks"] == [2] and skew["hosts"] == ["parallel-state-host-1"] and skew["fix"]
    assert [code for code in ended.codes if code is not None] == [2, 2, 2] and ended.seconds < 30
    links = [link for each in ended.report["measured"].values() for link in each["links"]]
    assert len(links) == 2 and all(not link["problem"] and link["bytes_per_s"] > 0 for link in links)
