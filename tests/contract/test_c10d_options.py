from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from device_communicators.base.errors import UnsupportedError
from device_communicators.c10d import creation


def _options(**more: Any) -> Any:
    return SimpleNamespace(
        store=dist.HashStore(),
        group_rank=0,
        group_size=1,
        global_ranks_in_group=[],
        group_id="options",
        timeout=timedelta(seconds=5),
        **more,
    )


def test_options_of_another_backend_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="_Options"):
        creation.create(_options(), dist.ProcessGroupGloo._Options())  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="SimpleNamespace"):
        creation.create(_options(), SimpleNamespace(channels=3))


def test_options_of_a_group_of_this_backend_make_another() -> None:
    first = creation.create(_options())
    second = creation.create(_options(), first.options)
    assert second.options._timeout == timedelta(seconds=5)
    for each in (second, first):
        each.shutdown()


def test_enable_reconfigure_needs_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "load", lambda: SimpleNamespace(make=None))
    with pytest.raises(UnsupportedError, match=r"enable_reconfigure needs torch >= 2\.15"):
        creation.create(_options(enable_reconfigure=True))


def test_enable_reconfigure_refuses_torchs_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "load", lambda: SimpleNamespace(make_reconfigurable=None))
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    with pytest.raises(UnsupportedError, match="TORCH_DISTRIBUTED_DEBUG=DETAIL"):
        creation.create(_options(enable_reconfigure=True))
