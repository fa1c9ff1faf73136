"""Ours takes mini-sglang's calls on CPU tensors and leaves it those on a device; SGLang's plug-in stands back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import parallel_state_plugins as plugins
from device_communicators.errors import UnsupportedError
from parallel_state.compat import minisgl

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
    """A package with mini-sglang's names; nothing of it is left afterwards."""
    folder = tmp_path / "minisgl" / "distributed"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("from .impl import DistributedCommunicator, destroy_distributed\n")
    (folder / "impl.py").write_text(IMPL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "minisgl"]:
        del sys.modules[name]


def test_ours_is_the_last_and_leaves_devices_to_theirs(package: None) -> None:
    minisgl.install()
    minisgl.install()
    module = importlib.import_module("minisgl.distributed")
    theirs, ours = module.DistributedCommunicator.plugins
    assert isinstance(ours, type(theirs).__mro__[1])
    assert ours.all_reduce(torch.empty(1, device="meta")) == "theirs"
    module.destroy_distributed()
    assert module.DistributedCommunicator.plugins == []


def test_it_is_refused_with_cuda(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="NCCL carries its tensors"):
        minisgl.install()
    assert len(importlib.import_module("minisgl.distributed").DistributedCommunicator.plugins) == 1


def test_sglangs_stands_back_without_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("_PARALLEL_STATE_PLUGIN_LOGGED", raising=False)
    monkeypatch.setenv("PARALLEL_STATE_PLUGIN", "")
    plugins.sglang_general()
    assert caplog.text == ""
    monkeypatch.setenv("PARALLEL_STATE_PLUGIN", "sglang")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.6.0")
    plugins.sglang_general()
    assert "sglang 0.6.0 is not of the tested versions, 0.5.23 up to but without 0.5.24" in caplog.text
