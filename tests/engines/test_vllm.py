"""vLLM's CPU engine as it is, and on this project by its plug-in: the same tokens, and an end that names who is gone.

`python -m tests.engines.test_vllm --report` prints tokens per second, start-up and first-token times of both, in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines import running

PROGRAM = Path(__file__).with_name("vllm_program.py")
TIMEOUT_S = float(os.environ.get("ENGINE_TIMEOUT_S", "600"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp2-compiled": {"tensor_parallel_size": 2, "enforce_eager": False},
    # Compiled alone: eagerly a later stage of vLLM 0.32's own CPU runner has no buffer for what the one before sends.
    "pp2": {"pipeline_parallel_size": 2, "enforce_eager": False},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enforce_eager": False},
}
GROUPS_OURS = "groups of CPU workers communicate over shared memory (parallel_state.compat.vllm.communicator)"
STANDS_BACK = "parallel_state: stands back, vLLM runs as it is"
Run = Callable[..., tuple[dict[str, Any], str]]


def run_engine(
    model: Path, options: dict[str, Any], plugins: Path, *arguments: str, ours: bool = True, **variables: str
) -> tuple[dict[str, Any], str]:
    """Returns the program's result and its log."""
    given = {"PARALLEL_STATE_PLUGIN": "vllm"} if ours else {"PARALLEL_STATE_PLUGIN": ""}
    # Workers aren't bound to cores: machines of a few cores have fewer than vLLM would take.
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
    """TP2 × EP2 of a mixture of experts, stock and on ours; where stock itself breaks there is nothing to compare.

    vLLM 0.32's worker ends with a segmentation fault in its kernel for experts on a CPU with AVX2, without the plug-in.
    """
    model = models("qwen3_moe", moe_intermediate_size=72)
    try:
        stock, _ = run(model, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, ours=False)
    except AssertionError as error:
        if "exit code: -11" not in str(error):
            raise
        pytest.skip("vLLM's own engine ends with a segmentation fault, without the plug-in")
    ours, log = run(model, {"tensor_parallel_size": 2, "enable_expert_parallel": True})
    assert ours["tokens"] == stock["tokens"] and GROUPS_OURS in log


def test_a_killed_worker_is_named(models: Callable[..., Path], run: Run) -> None:
    result, log = run(models("llama"), LAYOUTS["tp2"], "--kill")
    assert "EngineDead" in result["error"] and result["told_s"] < 30
    assert "died unexpectedly" in log and "VllmWorker-1" in log


@pytest.mark.parametrize("reason", ["not named", "not among VLLM_PLUGINS", "another version"])
def test_it_stands_back(reason: str, models: Callable[..., Path], run: Run, plugins: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if reason == "not named":
        more = {"ours": False}
    elif reason == "not among VLLM_PLUGINS":
        more = {"VLLM_PLUGINS": "some_other"}
    else:
        (tmp_path / "sitecustomize.py").write_text(
            "import parallel_state_plugins as plugins\nplugins.VLLM_VERSIONS = ((0, 1), (0, 2))\n"
        )
        more = {"PYTHONPATH": f"{tmp_path}:{plugins}:{running.ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    _, log = run(models("llama"), {}, **more)
    assert GROUPS_OURS not in log
    assert log.count(STANDS_BACK) == (reason == "another version")


# The figures.


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
