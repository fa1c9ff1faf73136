"""SGLang's engine can't run here: its models import sgl_kernel, which has no build for CPUs."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.compat_notes import INTERNAL
from tests.engines import running

PROGRAM = Path(__file__).with_name("sglang_program.py")
IMPORTED = re.compile(
    r"^\s*from sglang\.srt\.(?:distributed(?:\.parallel_state|\.communication_op|\.utils)?|layers\.dp_attention)"
    r" import (\([^)]*\)|[^\n(]*)",
    re.MULTILINE,
)
SIZE = 4
DEADLINE_S = 240.0

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="make test-engines has SGLang")


@pytest.fixture(scope="module")
def found(plugins: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    import torch

    folder = tmp_path_factory.mktemp("sglang")
    ranks = {}
    for mode in ("stock", "compat", "plugin"):
        command = running.python(PROGRAM, mode, folder)
        running.run(command, running.environment(plugins), DEADLINE_S)
        ranks[mode] = [torch.load(folder / f"{mode}-{rank}.pt", weights_only=False) for rank in range(SIZE)]
    return ranks


def differences(ours: Any, theirs: Any, at: str) -> list[str]:
    import torch

    if isinstance(theirs, torch.Tensor):
        same = isinstance(ours, torch.Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return [] if same else [f"{at}: {ours}, not {theirs}"]
    if isinstance(theirs, dict | list | tuple):
        if type(ours) is not type(theirs) or len(ours) != len(theirs):
            return [f"{at}: {ours}, not {theirs}"]
        keys = theirs if isinstance(theirs, dict) else range(len(theirs))
        return [each for key in keys for each in differences(ours[key], theirs[key], f"{at}[{key!r}]")]
    return [] if ours == theirs else [f"{at}: {ours!r}, not {theirs!r}"]


@pytest.mark.parametrize("mode", ["compat", "plugin"])
def test_equal_results_of_calls_and_layers(found: dict[str, list[dict[str, Any]]], mode: str) -> None:
    for rank in range(SIZE):
        theirs, ours = found["stock"][rank], found[mode][rank]
        compared = [each for each in theirs if each not in ("backend", "times")]
        assert len(compared) == 4 * 8
        for key in compared:
            assert differences(ours[key], theirs[key], f"rank {rank}, {key}") == []


def test_the_plug_in_changes_the_backend(
    found: dict[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    backends = {mode: {rank["backend"] for rank in ranks} for mode, ranks in found.items()}
    assert backends == {"stock": {"gloo"}, "compat": {"gloo"}, "plugin": {"parallel_state"}}
    with capsys.disabled():
        for what in found["stock"][0]["times"]:
            row = {mode: round(ranks[0]["times"][what], 1) for mode, ranks in found.items()}
            print(f"\n{what}: {row} us", end="")


def test_nothing_that_its_own_tree_imports_is_missing() -> None:
    from parallel_state.compat import sglang

    specification = find_spec("sglang")
    assert specification is not None and specification.origin is not None
    wanted: set[str] = set()
    for path in (Path(specification.origin).parent / "srt").rglob("*.py"):
        for names in IMPORTED.findall(path.read_text()):
            wanted |= {each.split(" as ")[0].strip() for each in re.sub(r"#.*", "", names).strip("()").split(",")}
    wanted -= {"", "*", "bootstrap", "parallel_state", "utils", "communication_op"}
    assert len(wanted) > 90
    known = {*dir(sglang), *sglang.MISSING, *INTERNAL["sglang"]}
    missing = [name for name in sorted(wanted - known) if not hasattr(sglang, name)]
    assert missing == []


def test_the_entry_point_stands_back(plugins: Path) -> None:
    code = (
        "import sys, os; os.environ['SGLANG_PLUGINS'] = 'parallel_state'\n"
        "from sglang.srt.plugins import load_plugins\n"
        "import importlib.metadata as m; found = m.version\n"
        "if len(sys.argv) > 1: m.version = lambda name: sys.argv[1] if name == 'sglang' else found(name)\n"
        "load_plugins()\n"
        "from sglang.srt.distributed.parallel_state import get_default_distributed_backend as of\n"
        "print('backend', of('cpu'), 'parallel_state' in sys.modules)\n"
    )
    on = {"PARALLEL_STATE_PLUGIN": "sglang", "SGLANG_USE_CPU_ENGINE": "1"}
    for variables, arguments, expected, said in (
        ({"SGLANG_USE_CPU_ENGINE": "1"}, (), "backend gloo False", ""),
        ({"PARALLEL_STATE_PLUGIN": "sglang"}, (), "backend gloo", "doesn't run its CPU engine"),
        (on, ("0.6.1",), "backend gloo False", "not a tested version"),
        (on, (), "backend parallel_state True", ""),
    ):
        command = [sys.executable, "-c", code, *arguments]
        logged = running.run(command, running.environment(plugins, **variables), 120)
        assert expected in logged, logged
        assert said in logged
