from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests import compat_names
from tests.engines import install, running

HERE = Path(__file__).parent
CASES = (
    "layers", "layers with sequence parallelism", "GPT", "GPT with sequence parallelism", "data parallelism",
    "distributed optimizer", "pipeline", "collection",
)  # fmt: skip


Outcomes = list[dict[str, tuple[str, str]]]


def outcomes(source: Path, which: str, folder: Path) -> Outcomes:
    folder.mkdir()
    program = ["nice", *running.python(HERE / "megatron_suite.py", source, which, folder)]
    # Gloo's groups of eight ranks have thousands of connections, mostly unused. Ours make none of those.
    lazily = {"TORCH_GLOO_LAZY_INIT": "1"} if which == "stock" else {}
    running.run(program, running.environment(**lazily), timeout_s=1800)
    return [
        {name: (outcome, text) for name, outcome, text in json.loads((folder / f"{rank}.json").read_text())}
        for rank in range(8)
    ]


def outcomes_over_its_own_state(source: Path, folder: Path) -> Outcomes:
    """Cached: they take minutes, and depend only on Megatron's source and torch."""
    digest = hashlib.sha256(f"gloo {torch.__version__}".encode())
    test = source / "tests" / "unit_tests" / "test_parallel_state.py"
    for path in (HERE / "megatron_suite.py", test, *sorted((source / "megatron" / "core").glob("*.py"))):
        digest.update(path.read_bytes())
    kept = install.CACHE / f"megatron-{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = folder / "found.json"
        found.write_text(json.dumps(outcomes(source, "stock", folder / "stock")))
        shutil.move(found, kept)
    return [{name: (outcome, text) for name, (outcome, text) in each.items()} for each in json.loads(kept.read_text())]


def test_its_own_test_passes_as_far_as_over_its_own_state(tmp_path: Path) -> None:
    source = running.source("megatron")
    expected, found = outcomes_over_its_own_state(source, tmp_path), outcomes(source, "ours", tmp_path / "ours")
    worse = [
        (rank, name, ours.get(name, ("missing", "")))
        for rank, (stock, ours) in enumerate(zip(expected, found, strict=True))
        for name, (outcome, _) in stock.items()
        if outcome == "passed" and ours.get(name, ("missing", ""))[0] != "passed"
    ]
    assert not worse
    passed = [sum(outcome == "passed" for outcome, _ in each.values()) for each in found]
    assert min(passed) >= 70  # of 82, in 22 functions; main of August 2026 itself refuses three


def test_nothing_that_its_own_tree_imports_is_missing() -> None:
    from parallel_state.compat import megatron

    specification = find_spec("megatron.core")
    assert specification is not None and specification.origin is not None
    tree, state = Path(specification.origin).parent, "megatron.core.parallel_state"
    missing = compat_names.missing_names(megatron, tree, state, "megatron.core.mpu")
    assert missing.keys() <= {"get_data_and_context_parallel_group"}, "Megatron's own module lacks that name too"
    assert len(compat_names.imported_names(tree, state)) > 40


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Path]]:
    folders = {which: tmp_path_factory.mktemp(which) for which in ("stock", "ours")}
    for which, folder in folders.items():
        running.run(running.python(HERE / "megatron_layers.py", which, folder), running.environment(), timeout_s=600)
    return lambda which, case: [folders[which] / f"{case}.{rank}.pt" for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_gives_what_it_gives_over_its_own_state_and_gloo(case: str, results: Callable[[str, str], list[Path]]) -> None:
    for stock, ours in zip(results("stock", case), results("ours", case), strict=True):
        for path in (stock, ours):
            assert path.exists(), path.with_suffix(".txt").read_text()
        expected, found = torch.load(stock), torch.load(ours)
        assert expected.keys() == found.keys() and expected
        for what, tensor in expected.items():
            assert torch.equal(found[what], tensor), (what, (found[what] - tensor).abs().max())
