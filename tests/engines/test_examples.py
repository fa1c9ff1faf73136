from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.running import environment, python, run, source
from tests.examples import WITH_ENGINES, check

DEADLINE_S = 600.0
SOURCES = {"nano_vllm": "nano-vllm"}


@pytest.mark.parametrize("example", WITH_ENGINES, ids=lambda path: path.stem)
def test_it_prints_what_it_says(example: Path, plugins: Path, tmp_path: Path) -> None:
    paths = [source(SOURCES[example.stem])] if example.stem in SOURCES else []
    check(example, run(python(example), environment(plugins, *paths), DEADLINE_S, cwd=tmp_path))
