"""Megatron-core over our parallel state in place of its own: its own test, layers, DDP, optimizer, schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines import running

HERE = Path(__file__).parent
CASES = (
    "layers", "layers with sequence parallelism", "GPT", "GPT with sequence parallelism", "data parallelism",
    "distributed optimizer", "pipeline", "collection",
)  # fmt: skip


def test_its_own_test_passes_as_far_as_over_its_own_state(tmp_path: Path) -> None:
    source = running.source("megatron")
    outcomes: dict[str, list[dict[str, tuple[str, str]]]] = {}
    for which in ("stock", "ours"):
        folder = tmp_path / which
        folder.mkdir()
        program = running.python(HERE / "megatron_suite.py", source, which, folder)
        running.run(program, running.environment(), timeout_s=1800)
        outcomes[which] = [
            {name: (outcome, text) for name, outcome, text in json.loads((folder / f"{rank}.json").read_text())}
            for rank in range(8)
        ]
    worse = [
        (rank, name, ours.get(name, ("missing", "")))
        for rank, (stock, ours) in enumerate(zip(outcomes["stock"], outcomes["ours"], strict=True))
        for name, (outcome, _) in stock.items()
        if outcome == "passed" and ours.get(name, ("missing", ""))[0] != "passed"
    ]
    assert not worse
    passed = [sum(outcome == "passed" for outcome, _ in each.values()) for each in outcomes["ours"]]
    assert min(passed) >= 70  # of 82, in 22 functions; main of August 2026 refuses three of them itself


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Path]]:
    """Runs both programs once; gives the files of a case's ranks."""
    folders = {which: tmp_path_factory.mktemp(which) for which in ("stock", "ours")}
    for which, folder in folders.items():
        running.run(running.python(HERE / "megatron_layers.py", which, folder), running.environment(), timeout_s=600)
    return lambda which, case: [folders[which] / f"{case}.{rank}.pt" for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_gives_what_it_gives_over_its_own_state_and_gloo(case: str, results: Callable[[str, str], list[Path]]) -> None:
    import torch

    for stock, ours in zip(results("stock", case), results("ours", case), strict=True):
        for path in (stock, ours):
            assert path.exists(), path.with_suffix(".txt").read_text()
        expected, found = torch.load(stock), torch.load(ours)
        assert expected.keys() == found.keys() and expected
        for what, tensor in expected.items():  # two ranks: a sum of two is the same in any order
            assert torch.equal(found[what], tensor), (what, (found[what] - tensor).abs().max())
