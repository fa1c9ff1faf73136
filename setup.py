"""Build script: names the two import packages; everything static is in pyproject.toml."""

from setuptools import setup

setup(
    packages=["parallel_state", "parallel_state.plan", "device_communicators"],
    package_data={"parallel_state": ["py.typed", "getters.pyi"], "device_communicators": ["py.typed", "csrc/*"]},
)
