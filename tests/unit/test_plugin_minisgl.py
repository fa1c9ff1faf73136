from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import parallel_state_plugins as plugins
from device_communicators.base.errors import UnsupportedError
from parallel_state.compat import minisgl

IMPL = """
class DistributedImpl: ...
class TorchDistributedImpl(DistributedImpl):
    def all_reduce(self, x): return "theirs"
class DistributedCommunicator:
    plugins = [TorchDistributedImpl()]
def destroy_distributed(): DistributedCommunicator.plugins = []
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
    minisgl.install()
    (ours,) = module.DistributedCommunicator.plugins
    assert ours.all_reduce(torch.empty(1, device="meta")) == "theirs"
    assert not hasattr(module.destroy_distributed.__wrapped__, "__wrapped__"), "theirs is wrapped once"
    module.destroy_distributed()
    assert module.DistributedCommunicator.plugins == []


def test_it_is_refused_with_cuda(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="tensors are then on the GPU and use NCCL"):
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
    assert "sglang 0.6.0 is not a tested version (at least 0.5.23, below 0.5.24)" in caplog.text


class _Hooks:
    AROUND = "around"
    registered: list[str]

    @classmethod
    def register(cls, target: str, hook: object, kind: str) -> None:
        cls.registered.append(target)


@pytest.mark.parametrize("problem", [None, "no compiler here"])
def test_sglangs_stands_back_where_the_backend_cannot_be_had(
    problem: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> None:
        if problem is not None:
            raise UnsupportedError(problem)

    for name, names in {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": _Hooks, "HookType": _Hooks},
        "sglang.srt.utils": {"is_cpu": lambda: True},
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(_Hooks, "registered", [], raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("device_communicators.c10d.creation.load", load)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.23")
    monkeypatch.setenv("_PARALLEL_STATE_PLUGIN_LOGGED", "")
    monkeypatch.setenv("PARALLEL_STATE_PLUGIN", "sglang")
    caplog.set_level("INFO", "sglang.parallel_state")
    plugins.sglang_general()
    assert len(_Hooks.registered) == (problem is None)
    assert ("SGLang runs unchanged: no compiler here" in caplog.text) == (problem is not None)
    assert ("have the backend parallel_state instead of gloo" in caplog.text) == (problem is None)
