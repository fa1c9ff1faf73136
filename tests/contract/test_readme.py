"""The README's example, pasted into a file and run, prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    (expected,) = re.findall(r"# (\[\[.*\]\])", example)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # gloo of torch 2.10 prints lines of its own.
    assert [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")] == [expected]
