"""`launch`: runs a function in several ranks on this host, and returns their results."""

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

from parallel_state.launch.config import LaunchConfig
from parallel_state.launch.launcher import launch

__all__ = ["LaunchConfig", "launch"]


class _CallablePackage(ModuleType):
    """Makes the package `parallel_state.launch` callable. A function of the same name would hide it."""

    __call__ = staticmethod(launch)

    def __reduce__(self) -> tuple[object, ...]:
        return importlib.import_module, (__name__,)


_package: Any = sys.modules[__name__]
_package.__class__ = _CallablePackage
functools.update_wrapper(_package, launch, assigned=["__doc__"])  # help, inspect.signature and torch.compile read these
