"""The plug-ins of SGLang and mini-sglang do nothing until they are asked, and stand back where they should."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state_plugins as plugins

IMPL = """
class DistributedImpl: ...
class Theirs(DistributedImpl):
    def all_reduce(self, x): return "theirs"
class DistributedCommunicator:
    plugins = [Theirs()]
def destroy_distributed(): DistributedCommunicator.plugins = []
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with mini-sglang's names; nothing of it, nor of the plug-in, is left afterwards."""
    folder = tmp_path / "minisgl" / "distributed"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("from .impl import DistributedCommunicator, destroy_distributed\n")
    (folder / "impl.py").write_text(IMPL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv("_PARALLEL_STATE_PLUGIN_LOGGED", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "minisgl"]:
        del sys.modules[name]


def _imported() -> Any:
    plugins.torch_imported()
    return importlib.import_module("minisgl.distributed")


@pytest.mark.parametrize("asked", ["", "vllm,sglang"])
def test_nothing_changes_until_it_is_asked(package: None, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("PARALLEL_STATE_PLUGIN", asked)
    before = list(sys.meta_path)
    assert len(_imported().DistributedCommunicator.plugins) == 1
    assert sys.meta_path == before


def test_ours_is_the_last_and_leaves_devices_to_theirs(
    package: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PARALLEL_STATE_PLUGIN", "vllm, minisgl")
    before = list(sys.meta_path)
    with caplog.at_level(logging.INFO):
        module = _imported()
        plugins.torch_imported()
    theirs, ours = module.DistributedCommunicator.plugins
    assert isinstance(ours, type(theirs).__mro__[1])
    assert ours.all_reduce(torch.empty(1, device="meta")) == "theirs"
    assert [each.message for each in caplog.records if "mini-sglang" in each.message] == [
        "parallel_state: mini-sglang's all_reduce and all_gather of CPU tensors are ours instead of torch.distributed's"
    ]
    assert len(sys.meta_path) == len(before) + 1  # it awaits again, in vain
    module.destroy_distributed()
    assert module.DistributedCommunicator.plugins == []


@pytest.mark.parametrize("wrong", ["cuda", "other names"])
def test_it_stands_back(
    package: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, wrong: str
) -> None:
    monkeypatch.setenv("PARALLEL_STATE_PLUGIN", "minisgl")
    if wrong == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    else:
        impl = tmp_path / "minisgl" / "distributed" / "impl.py"
        impl.write_text(IMPL.replace("DistributedImpl", "Base"))
    assert len(_imported().DistributedCommunicator.plugins) == 1
    assert "stands back, mini-sglang runs as it is" in caplog.text


def test_sglangs_stands_back_without_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("_PARALLEL_STATE_PLUGIN_LOGGED", raising=False)
    monkeypatch.setenv("PARALLEL_STATE_PLUGIN", "")
    plugins.sglang_general()
    assert caplog.text == ""
    monkeypatch.setenv("PARALLEL_STATE_PLUGIN", "sglang")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.6.0")
    plugins.sglang_general()
    assert "sglang 0.6.0 is not of the tested versions, 0.5.23 up to but without 0.5.24" in caplog.text
