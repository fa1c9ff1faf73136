"""A pytest plugin for tests without torch. It imports the packages without running their `__init__`, because only
the `__init__` files and some modules need torch. `parallel_state` then has the public names of layouts only.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]

for name in ("device_communicators", "parallel_state", "parallel_state.layout", "parallel_state.startup"):
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [str(ROOT / name.replace(".", "/"))]
    if "." in name:
        setattr(sys.modules[name.partition(".")[0]], name.rpartition(".")[2], package)

for name in ("axes", "ranks", "resolution"):
    vars(sys.modules["parallel_state"]).update(vars(importlib.import_module(f"parallel_state.layout.{name}")))
