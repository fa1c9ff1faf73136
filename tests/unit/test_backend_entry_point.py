from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

GROUP = "torch.distributed.backends"
PROJECT = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (
        ("_plugins", dict),
        ("backend_list", list),
        ("backend_capability", dict),
        ("backend_type_map", dict),
    ):
        monkeypatch.setattr(dist.Backend, name, value(getattr(dist.Backend, name)))
    dist.Backend._plugins.pop("PARALLEL_STATE")
    dist.Backend.backend_list.remove("parallel_state")
    monkeypatch.delattr(dist.Backend, "PARALLEL_STATE")
    yield


def _declared() -> EntryPoint:
    (table,) = re.findall(rf'^\[project\.entry-points\."{GROUP}"\].*\n((?:\w.*\n)+)', PROJECT, re.MULTILINE)
    ((name, value),) = re.findall(r'^(\w+) = "(.+)"$', table, re.MULTILINE)
    return EntryPoint(name, value, GROUP)


def _ensure_backend_registered(name: str, entry_points: list[EntryPoint]) -> None:
    (found,) = (each for each in entry_points if each.name.lower() == name.lower())
    registrar = found.load()
    assert callable(registrar)
    registrar()
    assert name.upper() in dist.Backend._plugins


@pytest.mark.usefixtures("unregistered")
def test_the_declared_entry_point_registers_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    registers = getattr(dist.Backend, "_ensure_backend_registered", None)
    if registers is None:
        _ensure_backend_registered("parallel_state", [_declared()])
    else:
        declared: Any = [_declared()]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **of: declared if of == {"group": GROUP} else ())
        registers("parallel_state")
    plugin = dist.Backend._plugins["PARALLEL_STATE"]
    assert plugin.extended_api
    assert dist.Backend.backend_capability["parallel_state"] == ["cpu"]
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.distributed_c10d.BackendConfig(dist.Backend("parallel_state")).get_device_backend_map() == {
        "cpu": "parallel_state"
    }


@pytest.mark.usefixtures("unregistered")
def test_it_is_registered_once() -> None:
    register = _declared().load()
    register()
    plugin = dist.Backend._plugins["PARALLEL_STATE"]
    register()
    assert dist.Backend._plugins["PARALLEL_STATE"] is plugin
    assert dist.Backend.backend_list.count("parallel_state") == 1
