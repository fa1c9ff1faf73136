"""The edits of docs/extending.md, applied to a copy, add a communicator, an op and an axis. The copy's contract tests
test them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
COPIED = ("device_communicators", "parallel_state", "tests", "benchmarks", "pyproject.toml", "README.md", "docs")
NEVER = shutil.ignore_patterns("*.pyc.*", "_build", ".*")


def blocks(marker: str) -> list[str]:
    found: list[str] = re.findall(rf"<!-- {marker} -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    return found


def apply(block: str, root: Path) -> None:
    first, _, code = block.partition("\n")
    name, _, anchor = first.removeprefix("# ").partition(", before: ")
    path = root / name
    if not anchor:
        assert not path.exists(), f"{name} already exists"
        path.write_text(code)
        return
    text = path.read_text()
    places = [found.start() for found in re.finditer(rf"^[ ]*{re.escape(anchor)}", text, flags=re.MULTILINE)]
    assert len(places) == 1, f"{len(places)} lines of {name} begin with {anchor!r}"
    path.write_text(text[: places[0]] + code + text[places[0] :])


USE = """
from parallel_state import launch
from tests import stubs

if __name__ == "__main__":
    stubs.write()  # `make stubs`
    launch(check_op, nproc=2, tensor_model_parallel_size=2)
    launch(check_axis, nproc=2, tensor_model_parallel_size=1)
    print("used")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("extended")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=NEVER)
        else:
            shutil.copy(source, root / name)
    edits = blocks("edit")
    assert len(edits) == 6
    for edit in edits:
        apply(edit, root)
    (root / "use.py").write_text("".join(blocks("use")) + USE)
    return root


SELECTED = {
    "gloo_sums and (2-of-4 or own or carries_something_itself or every_row)": (
        "tests/contract/test_all_reduce.py",
        "tests/contract/test_barrier.py",
        "tests/contract/test_routes.py",
        "tests/contract/test_usage_errors.py",
    ),
    "every_op_has_a_case or (all_reduce_relu and opcheck_in_one_process)": ("tests/contract/test_ops_registration.py",),
    "new_axis or sizes_by_both_kinds or first_grid or (both_options and tile)": (
        "tests/unit/test_axes.py",
        "tests/internals/test_plan.py",
    ),
}
RUN = """
import os, runpy, sys
from multiprocessing.forkserver import ensure_running
import pytest
import tests.compile.compiler_preload  # once for both, and for their ranks: fork servers are forks, too
from tests.programs import fork_servers
from tests.workers import fork_context

fork_servers()
child = os.fork()
if child == 0:
    runpy.run_path("use.py", run_name="__main__")
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
fork_context()
ensure_running()  # before pytest takes what is printed
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def said(copy: Path) -> str:
    files = [file for each in SELECTED.values() for file in each]
    chosen = " or ".join(f"({words})" for words in SELECTED)
    done = subprocess.run(
        [sys.executable, "-c", RUN, "-v", "-x", "-p", "no:cacheprovider", *files, "-k", chosen],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_what_was_added_can_be_used(said: str) -> None:
    assert "used" in said.splitlines()


def test_the_tests_carry_what_was_added(said: str) -> None:
    for words in ("gloo_sums-2-of-4", "[gloo_sums]", "all_reduce_relu", "every_op_has_a_case", "new_axis", "[tile]"):
        assert re.search(rf"{re.escape(words)}.* PASSED", said), said
    assert "SKIPPED" not in said
