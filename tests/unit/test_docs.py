from __future__ import annotations

import ast
import os
import re
import sys
import zlib
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest

import parallel_state
from device_communicators.base import settings
from tests.cases import each
from tests.doc_blocks import PAGES, ROOT
from tests.programs import Program, module

sys.path.insert(0, str(ROOT / "docs"))
import generate

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()


def test_the_front_page_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert README.count("not run yet") == 1, "the state of GPUs is said once"


def _slugs(path: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    others = [
        ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "THIRD_PARTY.md", "tests/topologies/README.md")
    ]
    each([*PAGES, *others], _check_links)


def _check_links(page: Path) -> None:
    for target in re.findall(r"\]\((?!https:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        assert path.exists(), f"{page.name} links {target}"
        assert not anchor or anchor in _slugs(path), f"{page.name} links {target}"


def test_texts_of_the_troubleshooting_table_are_in_the_source() -> None:
    table = (DOCS / "troubleshooting.md").read_text().partition("## Exit codes")[0]
    texts = [
        text
        for line in table.splitlines()
        if line.startswith("| `")
        for text in re.findall("`([^`]+)`", line.split("|")[1])
    ]
    assert len(texts) > 15
    source = " ".join(
        re.sub(r'"\s*f?"', "", path.read_text())
        for package in ("parallel_state", "device_communicators") for path in (ROOT / package).rglob("*.py")
    )  # fmt: skip
    each(texts, lambda text: _require(text in source, text))


def _require(holds: bool, text: str) -> None:
    assert holds, text


def test_files_that_are_named_exist() -> None:
    each(PAGES, _check_files)


def _check_files(page: Path) -> None:
    for name in re.findall(
        r"`((?:device_communicators|parallel_state|tests|benchmarks|docs)/[^`\s<]*)", page.read_text(encoding="utf-8")
    ):
        pattern = name.partition("::")[0].rstrip("/")
        assert any(ROOT.glob(pattern)) or name.startswith("docs/_build"), f"{page.name} names {name}"


ROWS = {
    int(cells[0]): cells[-1]
    for line in (DOCS / "failures.md").read_text().partition("## The matrix")[2].partition("## Limits")[0].splitlines()
    if re.match(r"\| \d+ \|", line)
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def named_tests(folder: str) -> set[str]:
    found = set()
    for path in (ROOT / "tests" / folder).rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return found


def test_the_matrix_is_whole() -> None:
    assert list(ROWS) == list(range(1, len(ROWS) + 1)) and len(ROWS) >= 50
    held = [row for row in ROWS.values() if "::" in row]
    assert f"{len(held)} of {len(ROWS)} fault rows have a test" in README


def test_each_row_names_tests_that_exist() -> None:
    present = named_tests("failure") | named_tests("contract") | named_tests("internals")

    def check(number: int, proof: str) -> None:
        named = re.findall(r"`([^`]+::[^`]+)`", proof)
        assert named or proof.startswith("no test yet: ") or proof == "no test yet"
        for pattern in named:
            assert any(fnmatch(test, pattern) for test in present), pattern

    each(ROWS.items(), check)


def test_a_test_of_a_row_is_named_by_it() -> None:
    for test in named_tests("failure") | named_tests("internals"):
        found = re.search(r"::test_rows?_((?:\d+_(?:to_|and_)?)+)", test)
        numbers = [int(number) for number in re.findall(r"\d+", found[1])] if found else []
        for number in range(numbers[0], numbers[-1] + 1) if found and "_to_" in found[1] else numbers:
            patterns = re.findall(r"`([^`]+)`", ROWS[number])
            assert any(fnmatch(test, pattern) for pattern in patterns), f"row {number} does not name {test}"


def test_the_pictures_are_those_of_the_source() -> None:
    for name, svg in generate.pictures().items():
        assert (DOCS / "pictures" / name).read_text() == svg, "run: python docs/generate.py"
        assert "var(" not in svg and 'fill="#ffffff"' in svg


def test_the_tables_are_those_of_the_source() -> None:
    for name, text in generate.pages().items():
        assert (DOCS / name).read_text() == text, "run: python docs/generate.py"


def test_the_settings_page_has_each_setting() -> None:
    table = generate.settings_table()
    assert table.count("\n") == len(settings.ALL) + 2
    for setting in settings.ALL:
        assert f"`{setting.name}`" in table and setting.help[:30] in table


@pytest.mark.slow
def test_the_docs_build_without_a_warning(tmp_path: Path) -> None:
    missing = [name for name in ("sphinx", "myst_parser", "furo") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install .[docs]")
    words = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "html")]
    program = Program(module("sphinx", words), os.environ)
    said = "".join(program.communicate(600))
    assert program.returncode == 0, said
    inventory = (tmp_path / "html" / "objects.inv").read_bytes()
    listed = zlib.decompress(inventory.split(b"\n", 4)[4]).decode()
    from_table = set(parallel_state.functions.getters.__all__) - set(vars(parallel_state.state))
    public = set(parallel_state.__all__) - from_table - {"AXES", "PRESETS"}
    missing = [name for name in sorted(public) if f"\nparallel_state.{name} py:" not in f"\n{listed}"]
    assert not missing, "the API reference lacks these"
    assert "GroupCoordinator.all_reduce py:method" in listed
