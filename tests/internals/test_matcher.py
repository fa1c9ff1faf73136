from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from device_communicators.cpu import native_build
from tests.extent import LONG
from tests.helpers.compiled import kept

ROOT = Path(__file__).parents[2]
MATCHER = ROOT / "device_communicators" / "cpu" / "csrc" / "matcher.h"
PROGRAM = ROOT / "tests" / "native" / "matcher_explorer.cpp"
DEADLINE_S = 1800 if LONG else 120
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_ASSERTIONS")
NEWEST = """
  template <typename Items>
  static auto find_newest(Items& items, Tag tag) {
    return items.size() > 1 && items.back().tag == tag ? --items.end() : find(items, tag);
  }

"""
FAULTS = {
    "the newest receive of a source first": (
        "const auto own = find(from.receives, tag),",
        "const auto own = find_newest(from.receives, tag),",
        "receives are matched in order",
    ),
    "a receive of one source before an older one of any": (
        "const bool is_own = has_own && (!has_any || own->order < any->order);",
        "const bool is_own = has_own;",
        "receives are matched in order",
    ),
    "the newest message first": (
        "from.messages.push_back({++order_, tag, make()});",
        "from.messages.push_front({++order_, tag, make()});",
        "messages are matched in order",
    ),
    "a receive of any source looks at one source": (
        "if (at == each.messages.end() || at->order >= oldest) continue;",
        "if (at == each.messages.end() || at->order >= oldest || &each != &by_source_[0]) continue;",
        "nothing that fits is left apart",
    ),
    "a message stays behind its match": (
        "        from->messages.erase(at);\n",
        "",
        "held messages are known",
    ),
    "tags are not compared": (
        "return item.tag == tag;",
        "return item.tag == tag || true;",
        "a match is of one source and tag",
    ),
    "a cancel forgets receives of any source": (
        "return remove(any_source_) ||\n",
        "return (false && remove(any_source_)) ||\n",
        "a cancel finds a receive that is posted",
    ),
}


def _program(fault: tuple[str, str, str] | None = None) -> Path:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    text = MATCHER.read_text().replace("  Side& side(int source) {", f"{NEWEST}  Side& side(int source) {{")
    if fault is not None:
        assert text.count(fault[0]) == 1, f"matcher.h no longer has one {fault[0]!r}"
        text = text.replace(*fault[:2])

    def build(made: Path) -> None:
        (made.parent / "matcher.h").write_text(text)
        command = [*compiler, *FLAGS, f"-I{made.parent}", str(PROGRAM), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=native_build.BUILD_TIMEOUT_S)
        assert done.returncode == 0, done.stderr[:5000]

    return kept("matcher_explorer", [*compiler, *FLAGS, fault], [MATCHER, PROGRAM], build)


def _run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=DEADLINE_S)


def test_all_orders() -> None:
    done = _run(_program(), "--messages", 2, "--receives", 4 if LONG else 3)
    assert done.returncode == 0, done.stdout
    assert "orders, all holds" in done.stdout and int(done.stdout.split()[0]) > 1_000_000


@pytest.mark.parametrize("name", FAULTS)
def test_the_explorer_finds_faults(name: str) -> None:
    fault = FAULTS[name]
    done = _run(_program(fault))
    assert done.returncode == 1 and f"broken: {fault[2]}" in done.stdout, done.stdout
