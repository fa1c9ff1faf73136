"""`launch`: starts ranks on this host, and returns what each of them returned.

The package can be called: `parallel_state.launch(…)` calls its function `parallel_state.launch.launch`.
May import `store`, `startup` and the package's root.
"""

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

from parallel_state.launch.config import LaunchConfig
from parallel_state.launch.launcher import launch

__all__ = ["LaunchConfig", "launch"]


class _CallablePackage(ModuleType):
    """Lets one public name be both the package and its function. A function of that name would hide the package."""

    __call__ = staticmethod(launch)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles by name, as a function is: `Process(target=parallel_state.launch)` may need it."""
        return importlib.import_module, (__name__,)


_package: Any = sys.modules[__name__]
_package.__class__ = _CallablePackage
functools.update_wrapper(_package, launch, assigned=["__doc__"])  # help, inspect.signature and torch.compile read these
