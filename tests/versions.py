"""Checks the Python versions that pyproject.toml promises, and the newest torch: `make versions`.

For each Python version, runs mypy. If the interpreter is found, also compiles every file and runs the unit tests
without torch. With the newest torch, runs the tests of `make check`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".versions"
NEEDED = ("pytest", "numpy", "hypothesis", "msgspec")
WITHOUT_TORCH = ("tests/unit/test_layout.py", "tests/unit/test_settings.py", "tests/unit/test_environment.py")
COMPILE = """
import pathlib, sys
for path in sys.stdin.read().split("\\n"):
    compile(pathlib.Path(path).read_bytes(), path, "exec")
"""


def promised() -> list[str]:
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def interpreters(version: str) -> Iterator[str]:
    yield from filter(None, [shutil.which(f"python{version}")])
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from (str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python")))


def find_interpreter(version: str) -> str | None:
    """Returns an interpreter's path, or None. Runs each candidate, because pyenv's shims can lack the version."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    for command in interpreters(version):
        if subprocess.run([command, "-c", code], capture_output=True, text=True).stdout.strip() == version:
            return command
    return None


def sources() -> list[str]:
    folders = ("parallel_state", "device_communicators", "tests", "benchmarks", "docs", "examples")
    return ["setup.py", *(str(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))]


def run(*command: str | Path, stdin: str = "") -> bool:
    done = subprocess.run([*map(str, command)], cwd=ROOT, input=stdin, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr)
    return done.returncode == 0


def environment(name: str, interpreter: str, *needed: str) -> Path | None:
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        install = (python, "-m", "pip", "install", "--quiet", *needed)
        if not (run(interpreter, "-m", "venv", "--clear", folder) and run(*install)):
            return None
        (folder / "ready").touch()
    return python


def check(version: str) -> dict[str, bool | None]:
    found: dict[str, bool | None] = {"mypy": run(sys.executable, "-m", "mypy", "--python-version", version)}
    interpreter = find_interpreter(version)
    found["compiled"] = None if interpreter is None else run(interpreter, "-c", COMPILE, stdin="\n".join(sources()))
    python = (
        None if interpreter is None else environment(version, interpreter, "-c", str(ROOT / "constraints.txt"), *NEEDED)
    )
    options = ("-q", "--noconftest", "-p", "tests.without_torch", "-p", "no:cacheprovider")
    found["tests"] = None if python is None else run(python, "-m", "pytest", *options, *WITHOUT_TORCH)
    return found


def newest_torch() -> tuple[str, str | None]:
    done = subprocess.run([sys.executable, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True)
    (known,) = re.findall(r"^Available versions: (.*)$", done.stdout, re.MULTILINE) or [""]
    versions = [version for version in known.split(", ") if version]
    return (versions or ["unknown"])[0], next((version for version in versions if version.endswith("+cpu")), None)


def check_torch(newest: str, for_cpus: str | None) -> bool | None:
    if for_cpus is None or not for_cpus.startswith(newest):
        return None
    python = environment(f"torch-{newest}", sys.executable, f"torch=={for_cpus}", *NEEDED, "nvidia-ml-py", "setuptools")
    return None if python is None else run(python, "-m", "tests.lanes", "check")


def main() -> int:
    words = {True: "passed", False: "FAILED", None: "not there"}
    good = True
    for version in promised():
        found = check(version)
        good = good and False not in found.values()
        parts = (f"{name} {words[outcome]}" for name, outcome in found.items())
        print(f"Python {version}: {', '.join(parts)}", flush=True)
    newest, for_cpus = newest_torch()
    outcome = check_torch(newest, for_cpus)
    print(f"torch {newest}: tests {words[outcome]} (the newest build for CPUs alone is {for_cpus})", flush=True)
    return 0 if good and outcome is not False else 1


if __name__ == "__main__":
    sys.exit(main())
