"""vLLM's CPU engine, stock and with our plug-in. `python -m tests.engines.test_vllm --report` prints tokens
per second, start-up and first-token times of both, in turns."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import compat_names
from tests.engines import running

PROGRAM = Path(__file__).with_name("vllm_program.py")
TIMEOUT_S = float(os.environ.get("ENGINE_TIMEOUT_S", "600"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp2-compiled": {"tensor_parallel_size": 2, "enforce_eager": False},
    # Only compiled: eagerly, the second stage of vLLM 0.32's CPU runner lacks a receive buffer.
    "pp2": {"pipeline_parallel_size": 2, "enforce_eager": False},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enforce_eager": False},
}
GROUPS_OURS = "groups of CPU workers communicate over shared memory (parallel_state.compat.vllm.communicator)"
STANDS_BACK = "parallel_state: not used, vLLM runs unchanged"
Run = Callable[..., tuple[dict[str, Any], str]]


def run_engine(
    model: Path, options: dict[str, Any], plugins: Path, *arguments: str, ours: bool = True, **variables: str
) -> tuple[dict[str, Any], str]:
    given = {"PARALLEL_STATE_PLUGIN": "vllm"} if ours else {"PARALLEL_STATE_PLUGIN": ""}
    # Workers aren't bound to cores: vLLM would take more than small machines have.
    given["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    environment = running.environment(plugins, VLLM_CPU_OMP_THREADS_BIND="nobind", **given, **variables)
    command = running.python(PROGRAM, model, json.dumps(options), *arguments)
    output = running.run(command, environment, TIMEOUT_S)
    found = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[0].removeprefix("RESULT ")), output


@pytest.fixture
def run(plugins: Path) -> Run:
    def of(model: Path, options: dict[str, Any], *arguments: str, **more: Any) -> tuple[dict[str, Any], str]:
        return run_engine(model, options, plugins, *arguments, **more)

    return of


def test_nothing_that_its_own_tree_imports_is_missing() -> None:
    from parallel_state.compat import vllm

    specification = find_spec("vllm")
    assert specification is not None and specification.origin is not None
    tree = Path(specification.origin).parent
    state = "vllm.distributed.parallel_state"
    queue = "vllm.distributed.device_communicators.shm_broadcast"
    others = ("vllm.distributed", "vllm.distributed.communication_op", "vllm.distributed.utils")
    assert compat_names.missing_names(vllm, tree, state, queue, *others) == {}
    assert len(compat_names.imported_names(tree, state)) > 30


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_tokens(layout: str, models: Callable[..., Path], run: Run) -> None:
    model = models("llama")
    stock, log_of_stock = run(model, LAYOUTS[layout], ours=False)
    ours, log = run(model, LAYOUTS[layout])
    assert ours["tokens"] == stock["tokens"]
    assert len({token for row in ours["tokens"] for token in row}) > 8
    assert log.count(GROUPS_OURS) == 1 and STANDS_BACK not in log
    assert "parallel_state:" not in log_of_stock


def test_experts_on_two_ranks(models: Callable[..., Path], run: Run) -> None:
    """TP2 × EP2 gives the tokens of vLLM's TP2, which cuts each expert. vLLM 0.32's own EP2 crashes: its CPU
    kernel reads past a rank's experts."""
    model, split = models("qwen3_moe"), {"tensor_parallel_size": 2}
    stock, _ = run(model, split, ours=False)
    assert len({token for row in stock["tokens"] for token in row}) > 8
    ours, log = run(model, {**split, "enable_expert_parallel": True})
    assert ours["tokens"] == stock["tokens"] and GROUPS_OURS in log
    assert all(each["tp"]["all_reduce"] > 32 for each in ours["traffic"]), ours["traffic"]


def test_experts_of_two_replicas(models: Callable[..., Path], run: Run) -> None:
    model = models("qwen3_moe")
    stock, _ = run(model, {"tensor_parallel_size": 2}, ours=False)
    ours, _ = run(model, {"enable_expert_parallel": True}, "--replicas", "2")
    assert ours["tokens"] == stock["tokens"]
    for replica in ours["traffic"]:
        calls = replica[0]["dp"]
        assert calls["all_gatherv"] > 32 and calls["reduce_scatterv"] > 32, calls


def test_a_killed_worker_is_named(models: Callable[..., Path], run: Run) -> None:
    result, log = run(models("llama"), LAYOUTS["tp2"], "--kill")
    assert "EngineDead" in result["error"] and result["told_s"] < 30
    assert "died unexpectedly" in log and "VllmWorker-1" in log


def test_each_survivor_of_another_stage_says_who_died(models: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    result, _ = run(models("llama"), LAYOUTS["tp2pp2"], "--survivors", str(tmp_path))
    (died, _), *found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (3, 0, 1, 2)]
    for at, error in found:
        assert error.startswith("PeerDiedError") and "global rank 3" in error, error
        assert at - died < 2
    assert re.search("EngineDead|exited", result["error"]), result["error"]


@pytest.mark.parametrize(
    "reason", ["not named", "not among VLLM_PLUGINS", "another version", "another platform's plug-in"]
)
def test_it_stands_back(reason: str, models: Callable[..., Path], run: Run, plugins: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if reason == "not named":
        more = {"ours": False}
    elif reason == "not among VLLM_PLUGINS":
        more = {"VLLM_PLUGINS": "some_other"}
    elif reason == "another platform's plug-in":
        installed(tmp_path)
        more = {"PYTHONPATH": f"{tmp_path}:{plugins}:{running.ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    else:
        (tmp_path / "sitecustomize.py").write_text(
            "import parallel_state_plugins as plugins\nplugins.VLLM_VERSIONS = ((0, 1), (0, 2))\n"
        )
        more = {"PYTHONPATH": f"{tmp_path}:{plugins}:{running.ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    _, log = run(models("llama"), {}, **more)
    assert GROUPS_OURS not in log
    assert log.count(STANDS_BACK) == reason.startswith("another")
    if reason == "another platform's plug-in":
        assert f"{STANDS_BACK}: vLLM in this process uses another platform plug-in: some_accelerator" in log


def installed(folder: Path) -> None:
    (folder / "some_accelerator.py").write_text("def register():\n    return 'some_platform.SomePlatform'\n")
    (folder / "some_platform.py").write_text(
        "from vllm.platforms.cpu import CpuPlatform\n\n\nclass SomePlatform(CpuPlatform):\n    pass\n"
    )
    facts = folder / "some_accelerator-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: some-accelerator\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[vllm.platform_plugins]\nsome_accelerator = some_accelerator:register\n")


RESOLVE = """
from vllm import platforms
if {cuda}:
    platforms.builtin_platform_plugins.update(cuda=lambda: "some_platform.SomePlatform", cpu=lambda: None)
print("PLATFORM", type(platforms.current_platform).__name__)
"""


@pytest.mark.parametrize("other", ["none", "CUDA", "a plug-in"])
def test_vllm_chooses_the_other_platform(other: str, plugins: Path, tmp_path: Path) -> None:
    """vLLM prefers CUDA or another plug-in's platform to ours. Its builtin plug-ins answer as in a build for CUDA."""
    installed(tmp_path)
    more = {"VLLM_PLUGINS": "parallel_state" if other != "a plug-in" else "parallel_state,some_accelerator"}
    variables = running.environment(tmp_path, plugins, PARALLEL_STATE_PLUGIN="vllm", **more)
    log = running.run(running.python("-c", RESOLVE.format(cuda=other == "CUDA")), variables, 200)
    expected = "ParallelStateCpuPlatform" if other == "none" else "SomePlatform"
    assert f"PLATFORM {expected}" in log
    assert log.count(STANDS_BACK) == (other != "none")


def report(layouts: list[str], turns: int) -> None:
    from tests.engines import models as kinds

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "points").mkdir()
        plugins = running.entry_points(folder / "points")
        model = kinds.make("llama", folder / "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8)
        print("layout, stock -> ours: tokens/s, start-up s, first token ms; medians of runs in turns")
        for layout in layouts:
            found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for _ in range(turns):
                for ours in (False, True):
                    found[ours].append(run_engine(model, LAYOUTS[layout], plugins, "--rounds", "5", ours=ours)[0])
            cells = []
            for key in ("tokens_per_s", "start_s", "first_token_ms"):
                stock, mine = (statistics.median(each[key] for each in found[ours]) for ours in (False, True))
                cells.append(f"{key} {stock:.1f} -> {mine:.1f} ({mine / stock:.2f})")
            print(f"{layout}: {'; '.join(cells)}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__" and "--report" in sys.argv:
    report([each for each in sys.argv[1:] if each in LAYOUTS] or list(LAYOUTS), turns=2)
