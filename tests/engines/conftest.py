from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines import models as kinds
from tests.engines import running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips these tests without the engines, which only test bodies import."""
    if find_spec("vllm") is None:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="make test-engines has the engines that this needs"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[object, ...], Path] = {}

    def model(kind: str, **sizes: object) -> Path:
        key = (kind, *sorted(sizes.items()))
        if key not in made:
            made[key] = kinds.make(kind, tmp_path_factory.mktemp(kind), **sizes)
        return made[key]

    return model


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.entry_points(tmp_path_factory.mktemp("entry_points"))
