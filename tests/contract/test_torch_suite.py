from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

from tests.hosts import Hosts, problem
from tests.references import FAULT_TOLERANCE
from tests.torch_suite import ROOT, Outcome, run

PAGE = ROOT / "docs" / "torch_distributed.md"
SAMPLE = (
    "test_DistributedDataParallelCPU", "test_all_reduce_sum_async", "test_monitored_barrier_gloo",
    "test_scatter_object_list", "test_send_recv_any_source_torch_profiler", "test_sparse_all_reduce_sum",
)  # fmt: skip
needs_reconfigure = pytest.mark.skipif(not hasattr(distributed_c10d, "_reconfigure"), reason="needs torch >= 2.15")


def _known() -> set[str]:
    return set(re.findall(r"^\| `(test_\w+)` \|", PAGE.read_text(), re.MULTILINE))


def _report(failed: Mapping[str, Outcome], log: Path) -> str:
    texts = (f"--- {name}: {outcome.outcome} ---\n{outcome.reason}" for name, outcome in failed.items())
    return "\n".join([f"{len(failed)} tests pass over gloo only; what they printed: {log}", *texts])


def _compare(size: int, log: Path, *, part: str = "", debug: Sequence[str] = ("OFF",)) -> None:
    over_gloo = run("gloo", size, part=part, log=log)
    wanted = [name for name, found in over_gloo.items() if found.outcome == "passed"]
    assert len(wanted) > (50 if part else 90)
    listed = {name for name in wanted if name.rpartition(".")[2] in _known()}
    for level in debug:
        ours = run("parallel_state", size, wanted, part=part, debug=level, log=log)
        failed = {name: found for name, found in ours.items() if found.outcome != "passed"}
        assert failed.keys() <= listed, _report({name: failed[name] for name in failed.keys() - listed}, log)
        assert listed <= failed.keys(), f"the documentation lists tests that pass: {sorted(listed - failed.keys())}"


def test_a_sample_of_torchs_tests(tmp_path: Path) -> None:
    names = [f"DistributedTests.{name}" for name in SAMPLE]
    found = run("parallel_state", 3, names, log=tmp_path / "log")
    failed = {name: outcome for name, outcome in found.items() if outcome.outcome != "passed"}
    assert not failed, _report(failed, tmp_path / "log")


@pytest.mark.long
@pytest.mark.parametrize(("size", "debug"), [(2, ("OFF", "DETAIL")), (3, ("OFF",)), (4, ("OFF",))])
def test_what_passes_over_gloo(tmp_path: Path, size: int, debug: Sequence[str]) -> None:
    _compare(size, tmp_path / "log", debug=debug)


@pytest.mark.long
def test_what_passes_over_gloo_beside_rpc(tmp_path: Path) -> None:
    _compare(4, tmp_path / "log", part="rpc")


@needs_reconfigure
def test_groups_whose_members_change(tmp_path: Path) -> None:
    _check_fault_tolerance(tmp_path / "log")


@needs_reconfigure
@pytest.mark.skipif(problem() is not None, reason=f"no hosts can be made here: {problem()}")
def test_groups_whose_members_change_over_two_hosts(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        _check_fault_tolerance(tmp_path / "log", [hosts.pid(0), hosts.pid(1)])


def _check_fault_tolerance(log: Path, hosts: Sequence[int] = ()) -> None:
    FAULT_TOLERANCE.path_in_cache()  # skips the test without it
    found = run("parallel_state", 3, part="fault_tolerance", log=log, hosts=hosts)
    failed = {name: outcome for name, outcome in found.items() if outcome.outcome == "failed"}
    assert not failed, _report(failed, log)
    passed = [name for name, outcome in found.items() if outcome.outcome == "passed"]
    skipped = [name.rpartition(".")[2] for name in found.keys() - set(passed)]
    assert len(passed) >= 12 and skipped == ["test_reconfigure_after_timeout"], skipped  # that one is NCCL's
