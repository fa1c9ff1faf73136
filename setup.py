"""Build script: the import packages, and what can be compiled here; everything static is in pyproject.toml.

A wheel brings the compiled library where there is a C++ compiler. Where torch can be imported as well, it also brings
the registered ops' kernels and the backend of torch.distributed for this minor version of torch (`pip install
--no-build-isolation .`, since a build of its own would download a second torch). Builds for several torches into one
`--build-lib` make a wheel for all of them (`make wheel`). What is missing is no error: it is compiled at its first use
(see device_communicators/cpu/native.py).
"""

import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from device_communicators.cpu import native_build  # imports neither torch nor another dependency


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
            from device_communicators.c10d import extension

            native_build.package(native_build.full_recipe(), folder, compiler, lambda: objects)
            native_build.package(extension.recipe(), folder, compiler)
        except ImportError:
            print("parallel_state: torch isn't importable here; ops and backend are compiled at their first use")
        except native_build.BuildError as error:
            print(f"parallel_state: the ops or the backend can't be compiled here: {error}")


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
