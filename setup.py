"""Build script: names the two import packages; everything static is in pyproject.toml."""

from setuptools import setup

setup(
    packages=["parallel_state", "device_communicators"],
    package_data={"parallel_state": ["py.typed"], "device_communicators": ["py.typed"]},
)
