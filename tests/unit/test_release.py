from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import parallel_state

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def parsed(path: str) -> Any:
    return pytest.importorskip("yaml").safe_load((ROOT / path).read_text())


def test_the_changelog_begins_with_the_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', PROJECT, re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == version == parallel_state.__version__
    assert changelog.count("semver.org") == 1


def test_ci_runs_targets_of_make_with_pinned_actions() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    jobs = parsed(".github/workflows/ci.yml")["jobs"]
    assert set(jobs) == {"lint", "test", "imports", "docs", "wheels"}
    steps = [step for job in jobs.values() for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action) for action in actions), actions
    targets = re.findall(r"run: make (\S+)", text)
    assert {"lint", "test", "demo", "docs", "dist"} == set(targets)
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)
    paths = re.findall(r"tests/\S+\.py", text)
    assert paths and all((ROOT / path).exists() for path in paths)
    assert not re.search(r"publish|twine|id-token", text.replace("Nothing is published", "")), "nothing is published"


def test_ci_covers_the_versions_that_are_promised() -> None:
    rows = parsed(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == set(re.findall(r"Python :: (3\.\d+)", PROJECT))
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', PROJECT)
    (developed,) = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    tried = {row["torch"] for row in rows}
    assert f"{oldest}.0" in tried and developed in tried


def test_hooks_are_local_and_their_tools_come_with_the_extra_dev() -> None:
    repositories = parsed(".pre-commit-config.yaml")["repos"]
    assert [each["repo"] for each in repositories] == ["local"]
    tools = {word for hook in repositories[0]["hooks"] for word in re.findall(r"\.venv/bin/(\S+)", hook["entry"])}
    (dev,) = re.findall(r"^dev = \[(.+)\]$", PROJECT, re.MULTILINE)
    assert tools == {"ruff", "clang-format"}
    assert all(f'"{tool}>=' in dev for tool in tools)


def test_what_is_installed_has_a_notice() -> None:
    notices = (ROOT / "THIRD_PARTY.md").read_text().lower().replace("pytorch", "torch")
    for field in ("dependencies", "demo", "bench", "cuda"):
        (line,) = re.findall(rf"^{field} = \[(.+?)\]", PROJECT, re.MULTILINE)
        for name in re.findall(r'"([A-Za-z0-9-]+)', line):
            assert name.replace("nvidia-cuda-", "") in notices, name
