"""Makes the environment of `make test-engines` in the user's cache, and prints its Python. Packages are pinned
with digests, torch only by version: its build depends on the machine. Sources (requirements-built.txt) are
built after the wheels, which their set-up imports."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = [Path(__file__).with_name(name) for name in ("requirements.txt", "requirements-built.txt")]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallel_state" / "engines"
TORCH = "torch==2.13.0"
OLDEST_PYTHON = (3, 11)


def place() -> Path:
    content = b"".join(path.read_bytes() for path in LOCKS) + f"{TORCH} {sys.version_info[:2]}".encode()
    return CACHE / hashlib.sha256(content).hexdigest()[:16]


def make() -> Path:
    folder = place()
    python = folder / "bin" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "making", "w", encoding="utf-8") as making:
        fcntl.flock(making, fcntl.LOCK_EX)  # two runs at once make one environment
        if not (folder / "ready").exists():
            print(f"the engines' environment is made in {folder}: 1.5 GB are fetched", file=sys.stderr)
            venv.create(folder, with_pip=True, symlinks=True)
            wheels, built = LOCKS
            install(python, "setuptools", TORCH, "-c", str(ROOT / "constraints.txt"))
            install(python, "--no-deps", "--require-hashes", "-r", str(wheels))
            install(python, "--no-deps", "--require-hashes", "--no-build-isolation", "-r", str(built))
            (folder / "ready").touch()
        install(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    return python


def install(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    environment = {**os.environ, "DS_BUILD_OPS": "0"}  # skips DeepSpeed's own ops, which are for GPUs
    subprocess.run(command, env=environment, stdout=sys.stderr, check=True)


if __name__ == "__main__":
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"the engines need Python {'.'.join(map(str, OLDEST_PYTHON))}: make test-engines PYTHON=python3.12")
    print(make())
