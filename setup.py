"""Build script: the import packages, and what can be compiled here; everything static is in pyproject.toml.

A wheel brings the compiled library where there is a C++ compiler, and the registered ops' kernels where torch can be
imported as well (`pip install --no-build-isolation .`, since a build of its own would download a second torch). What is
missing is no error: it is compiled at its first use (see device_communicators/cpu/native.py).
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def _native_build():
    """Loads the recipes, which need nothing of the package that they lie in."""
    path = ROOT / "device_communicators" / "cpu" / "native_build.py"
    specification = importlib.util.spec_from_file_location("native_build", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["native_build"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


native_build = _native_build()


class BuildWithLibrary(build_py):
    """Adds the compiled libraries beside the copied sources; not to an editable install, whose sources change."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        compiler = native_build.find_compiler()
        if compiler is None:
            print("parallel_state: no C++ compiler; the library is compiled at its first use where there is one")
            return
        folder = Path(self.build_lib) / "device_communicators" / "cpu"
        try:
            objects = native_build.package(native_build.objects_recipe(), folder, compiler)
            native_build.package(native_build.plain_recipe(), folder, compiler, lambda: objects)
        except native_build.BuildError as error:
            print(f"parallel_state: the library can't be compiled here: {error}")
            return
        try:
            native_build.package(native_build.full_recipe(), folder, compiler, lambda: objects)
        except ImportError:
            print("parallel_state: torch isn't importable here; the ops' kernels are compiled at their first use")
        except native_build.BuildError as error:
            print(f"parallel_state: the ops' kernels can't be compiled here: {error}")


class PlatformWheel(bdist_wheel):
    """Tags the wheel for this platform if a library was compiled, and for every Python: the library knows none."""

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class WithLibrary(Distribution):
    def has_ext_modules(self):
        return native_build.find_compiler() is not None


setup(
    packages=find_packages(include=["parallel_state*", "device_communicators*"]),
    py_modules=["parallel_state_plugins"],
    package_data={"": ["py.typed", "*.pyi", "*.json", "*.css", "*.html", "*.js", "csrc/*", "csrc/lean/ATen/*"]},
    distclass=WithLibrary,
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
)
