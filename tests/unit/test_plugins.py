from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import parallel_state_plugins as plugins
from device_communicators.base.errors import AlreadyInitializedError, UnsupportedError
from parallel_state.compat import sglang

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys
before = set(sys.modules)
import parallel_state_plugins as plugins
assert plugins.vllm_platform() is None and plugins.vllm_general() is None
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new == {"parallel_state_plugins"}, new
"""


@pytest.mark.parametrize("variable", [None, "", "other", "vllm_other,sglang"])
def test_nothing_is_imported_for_an_engine_that_is_not_named(variable: str | None) -> None:
    environment = {"PYTHONPATH": str(ROOT), **({} if variable is None else {plugins.VARIABLE: variable})}
    subprocess.run([sys.executable, "-c", CODE], env=environment, check=True)


@pytest.mark.parametrize("group", ["vllm.platform_plugins", "vllm.general_plugins", "sglang.srt.plugins"])
def test_the_declared_entry_points_are_there(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    project = (ROOT / "pyproject.toml").read_text()
    ((name, value),) = re.findall(rf'^\[project\.entry-points\."{group}"\].*\n(\w+) = "(.+)"$', project, re.MULTILINE)
    assert name == "parallel_state"
    assert importlib.metadata.EntryPoint(name, value, group).load()() is None


@pytest.mark.parametrize(
    ("version", "stands_back"),
    [("0.32.0", False), ("0.33.1+cpu", False), ("0.31.9", True), ("0.34.0", True), ("dev", True)],
)
def test_versions_outside_the_tested_range_are_left_alone(
    version: str, stands_back: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from parallel_state.compat.vllm import plugin

    monkeypatch.setenv(plugins.VARIABLE, "sglang, vLLM")
    monkeypatch.delenv("_PARALLEL_STATE_PLUGIN_LOGGED", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(plugin, "find_platform", lambda: "ours")
    for _ in range(2):
        assert plugins.vllm_platform() == (None if stands_back else "ours")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["parallel_state"] * stands_back


@pytest.mark.parametrize(
    ("variable", "value", "warned"),
    [
        ("PARALLEL_STATE_PLUGIN", "vlm", "ignored: 'vlm'"),
        ("PARALLEL_STATE_PLUGIN", "vllm sglang", "ignored: 'vllm sglang'"),
        ("PARALLEL_STATE_PLUGIN", "sglang, 1", "ignored: '1'"),
        ("PARALLEL_STATE_PLUGINS", "vllm", "PARALLEL_STATE_PLUGINS is ignored"),
        ("PARALLEL_STATE_PLUGIN", " sglang ,", ""),
    ],
)
def test_a_name_that_no_engine_has_is_in_the_log_once(
    variable: str, value: str, warned: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    monkeypatch.setenv("_PARALLEL_STATE_PLUGIN_LOGGED", "")
    monkeypatch.setenv(variable, value)
    for _ in range(2):
        assert plugins.vllm_platform() is None and plugins.vllm_general() is None
    assert len(caplog.records) == bool(warned) and warned in caplog.text


def test_each_reason_is_in_the_log_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("_PARALLEL_STATE_PLUGIN_LOGGED", "")
    for text in ("not used, vLLM runs unchanged: one", "not used, vLLM runs unchanged: another") * 2:
        plugins.log_once("vllm", plugins.logging.WARNING, text)
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["one", "another"]


@pytest.mark.parametrize(("version", "said"), [(None, "vllm None is not a tested"), ("", "vllm  is not a tested")])
def test_an_installation_without_a_version_is_left_alone(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "vllm")
    monkeypatch.setenv("_PARALLEL_STATE_PLUGIN_LOGGED", "")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert plugins.vllm_platform() is None
    assert said in caplog.text


def test_whatever_goes_wrong_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from parallel_state.compat.vllm import plugin

    def fail() -> None:
        raise RuntimeError("as it happens")

    monkeypatch.setenv(plugins.VARIABLE, "vllm")
    monkeypatch.delenv("_PARALLEL_STATE_PLUGIN_LOGGED", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")
    monkeypatch.setattr(plugin, "find_platform", fail)
    monkeypatch.setattr(plugin, "install", fail)
    assert plugins.vllm_platform() is None
    plugins.vllm_general()
    assert [record.getMessage().endswith("as it happens") for record in caplog.records] == [True, True]


def test_a_platform_that_was_not_asked_for_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With VLLM_TARGET_DEVICE=cpu vLLM asks no plug-in."""
    from parallel_state.compat.vllm import plugin

    monkeypatch.setenv(plugins.VARIABLE, "vllm")
    monkeypatch.setenv("_PARALLEL_STATE_PLUGIN_LOGGED", "")
    monkeypatch.setattr(plugins, "_ASKED", set())
    monkeypatch.setattr(plugin, "install", lambda: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    plugins.vllm_general()
    assert "as with VLLM_TARGET_DEVICE=cpu" in caplog.text
    caplog.clear()
    assert plugins.vllm_platform() is None
    assert "0.1 is not a tested" in caplog.text
    monkeypatch.setenv("_PARALLEL_STATE_PLUGIN_LOGGED", "")
    caplog.clear()
    plugins.vllm_general()
    assert not caplog.records


@pytest.fixture
def sglangs(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[str]]:
    """A module in place of SGLang's parallel_state, and the targets of the hooks that were applied to it."""
    theirs, registry = ModuleType("sglang.srt.distributed.parallel_state"), ModuleType("hook_registry")
    hooks: dict[str, Any] = {}
    applied: list[str] = []

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: Any, kind: str) -> None:
            assert kind == "replace" and target not in hooks
            hooks[target] = hook

        @staticmethod
        def apply_hooks() -> None:
            for target, hook in hooks.items():
                if hasattr(theirs, target.rpartition(".")[2]):
                    setattr(theirs, target.rpartition(".")[2], hook)
                    applied.append(target)

    theirs._WORLD, theirs.GroupCoordinator = None, type("GroupCoordinator", (), {})  # type: ignore[attr-defined]
    registry.HookRegistry, registry.HookType = HookRegistry, SimpleNamespace(REPLACE="replace")  # type: ignore[attr-defined]
    distributed = ModuleType("sglang.srt.distributed")
    distributed.parallel_state = theirs  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    return theirs, applied


def test_sglang_gets_this_librarys_groups_by_its_own_hooks(sglangs: tuple[ModuleType, list[str]]) -> None:
    theirs, applied = sglangs
    theirs.destroy_distributed_environment = None  # type: ignore[attr-defined]
    for _ in range(2):
        sglang.install()
    assert sorted(applied) == [
        f"{theirs.__name__}.{name}" for name in ("GroupCoordinator", "destroy_distributed_environment")
    ]
    assert theirs.GroupCoordinator is sglang.GroupCoordinator
    assert theirs.destroy_distributed_environment is sglang.destroy_distributed_environment


def test_sglangs_groups_are_not_replaced_once_they_exist(sglangs: tuple[ModuleType, list[str]]) -> None:
    theirs, applied = sglangs
    theirs._WORLD = "a group"  # type: ignore[attr-defined]
    with pytest.raises(AlreadyInitializedError, match="already created its groups"):
        sglang.install()
    assert not applied


def test_a_hook_that_sglang_does_not_apply_is_an_error(
    sglangs: tuple[ModuleType, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry: Any = sys.modules["sglang.srt.plugins.hook_registry"]
    monkeypatch.setattr(registry.HookRegistry, "apply_hooks", lambda: None)
    with pytest.raises(UnsupportedError, match="didn't apply the hooks"):
        sglang.install()


def test_two_threads_find_the_platform_and_a_plug_in_that_asks_back_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from parallel_state.compat.vllm import plugin

    both, asked_back = threading.Barrier(2), []

    def check_alone() -> None:
        both.wait(20)
        asked_back.append(plugin.find_platform())

    monkeypatch.setattr(plugin, "_check_alone", check_alone)
    monkeypatch.setattr(plugin.native, "load", lambda: None)
    with ThreadPoolExecutor(2) as threads:
        found = [each.result(30) for each in [threads.submit(plugin.find_platform) for _ in range(2)]]
    assert found == [plugin._PLATFORM] * 2 and asked_back == [None, None]


def test_experts_of_other_ranks_weigh_nothing() -> None:
    import torch

    from parallel_state.compat.vllm.experts import localized

    weights, ids = torch.tensor([[0.7, 0.3], [0.6, 0.4]]), torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    of_second_rank = torch.tensor([-1, -1, 0, 1])
    found = localized(weights, ids, of_second_rank, applied_to_input=False)
    assert torch.equal(found["topk_ids"], torch.tensor([[1, 0], [0, 0]], dtype=torch.int32))
    assert torch.equal(found["topk_weights"], torch.tensor([[0.7, 0.0], [0.0, 0.4]]))
    applied = localized(weights, ids, of_second_rank, applied_to_input=True)
    assert torch.equal(applied["topk_weights"], torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert found["apply_router_weight_on_input"] is applied["apply_router_weight_on_input"] is False
