from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import lanes
from tests.lanes import LANES, ROOT, Lane

pytestmark = pytest.mark.slow

PASSES = "def test_one():\n    pass\n\n\ndef test_two():\n    pass\n"
FAILS = "import pytest\n\n\ndef test_no():\n    assert 1 == 2\n\n\n@pytest.mark.skip\ndef test_left():\n    pass\n"
BUSY = """
import pathlib, pytest

@pytest.mark.parametrize("ranks", ["3 ranks", "4 ranks"])
def test_late(ranks):
    seen = pathlib.Path(__file__).with_name(ranks)
    was_there = seen.exists()
    seen.touch()
    assert ranks == "4 ranks" or was_there
"""


def test_each_file_of_the_suite_is_in_one_lane() -> None:
    def of(paths: tuple[str, ...]) -> list[Path]:
        places = [ROOT / path for path in paths]
        return [file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])]

    found = Counter(file for lane in LANES for file in set(of(lane.paths)) - set(of(lane.but)))
    others = set(of(("tests/engines", "tests/clusters"))) - set(found)
    assert found == Counter(set((ROOT / "tests").rglob("test_*.py")) - others)


def test_a_missing_file_of_a_lane_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "ROOT", tmp_path)
    (tmp_path / "test_one.py").touch()
    internal = f"{lanes.INTERNALS}/test_two.py"
    assert lanes.present("test_one.py", internal) == ("test_one.py",), "without the folder"
    (tmp_path / lanes.INTERNALS).mkdir(parents=True)
    for missing in ("test_three.py", internal):
        with pytest.raises(FileNotFoundError, match=f"a lane names {missing}, which does not exist"):
            lanes.present("test_one.py", missing)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LOGS", tmp_path)
    monkeypatch.setattr(lanes, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.usefixtures("bare")
def test_a_lane_that_fails_is_printed_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in {"passes": PASSES, "fails": FAILS, "empty": ""}.items():
        (tmp_path / f"test_{name}.py").write_text(content)
    passes, fails, empty = (Lane(name, (f"test_{name}.py",)) for name in ("passes", "fails", "empty"))
    options = ["-p", "no:doctest"]
    assert lanes.main(options, [passes, fails]) == 1
    said = capsys.readouterr().out
    for name in ("fails", "again"):
        assert "assert 1 == 2" in said.partition(f"== lane {name} ==")[2].partition("== lane ")[0]
    last = said.splitlines()[-1]
    assert last.startswith("2 passed, 1 failed, 1 skipped in ")
    assert last.endswith("s; failed twice: test_fails.py::test_no")
    assert lanes.main(options, [passes, empty]) == 0, "a lane in which the options leave nothing over"
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 passed, 0 failed, 0 skipped in ")
    assert lanes.main([], [empty]) == 1, "all were asked for"
    assert lanes.names_paths(["-x", "test_passes.py::test_one"]) and not lanes.names_paths(["-k", "test_one", ""])


@pytest.mark.usefixtures("bare")
def test_what_passes_when_run_again_is_named_and_few_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    lane = Lane("busy", ("test_busy.py",))
    assert lanes.main([], [lane]) == 0
    said = capsys.readouterr().out
    last = said.splitlines()[-1]
    assert last.startswith("2 passed, 0 failed, 0 skipped in ")
    assert last.endswith("; passed only when run again: test_busy.py::test_late[3 ranks]")
    (tmp_path / "3 ranks").unlink()
    (tmp_path / "test_fails.py").write_text(FAILS)
    assert lanes.main([], [lane, Lane("fails", ("test_fails.py",))]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("2 passed, 1 failed, 1 skipped in ")
    named = "passed only when run again: test_busy.py::test_late[3 ranks]; failed twice: test_fails.py::test_no"
    assert last.endswith(f"s; {named}")
    (tmp_path / "3 ranks").unlink()
    monkeypatch.setattr(lanes, "MOST_FLAKES", 0)
    assert lanes.main([], [lane]) == 1, "more than may hide"
    said = capsys.readouterr().out
    assert "1 tests passed only when run again, more than 0: the run has failed" in said
    assert said.splitlines()[-1].endswith("; passed only when run again: test_busy.py::test_late[3 ranks]")
    (tmp_path / "3 ranks").unlink()
    monkeypatch.setattr(lanes, "MOST_AGAIN", 0)
    assert lanes.main([], [lane]) == 1, "too many to come from the machine"
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 passed, 1 failed, 0 skipped in ")


@pytest.mark.usefixtures("bare")
def test_a_lane_of_another_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_passes.py").write_text(PASSES)
    passes = Lane("passes", ("test_passes.py",))
    well, ill = (
        Lane("lint", (), command=("sh", "-c", f"echo first; echo {code} left; exit {code}")) for code in (0, 2)
    )
    assert lanes.main(["-q"], [well, passes]) == 0
    assert "== lane lint ==\n0 left\nlane lint: exit code 0" in capsys.readouterr().out
    assert lanes.main(["-q"], [ill, passes]) == 1
    said = capsys.readouterr().out
    assert "== lane lint ==\nfirst\n2 left\n" in said
    assert said.splitlines()[-1].startswith("2 passed, 0 failed")
    paths = ["-q", "test_passes.py"]
    assert [lanes.main(paths, [passes]), lanes.main(paths, [well]), lanes.main(paths, [ill])] == [0, 0, 1]


TOGETHER = """
import pathlib, time
def test_meet():
    here = pathlib.Path(__file__)
    here.with_suffix(".here").touch()
    until = time.monotonic() + 60
    while len(list(here.parent.glob("*.here"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(list(here.parent.glob("*.here"))) == 2
"""
ALONE = """
import pathlib, time
def test_alone():
    held = pathlib.Path(__file__).with_name("held")
    held.touch(exist_ok=False)
    time.sleep(0.5)
    held.unlink()
"""


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("at_once", "text"), [(2, TOGETHER), (1, ALONE)])
def test_only_so_many_lanes_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, text: str
) -> None:
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(text)
    monkeypatch.setattr(lanes, "MOST_AGAIN", 0)
    monkeypatch.setattr(lanes, "AT_ONCE", at_once)
    assert lanes.main([], [Lane(name, (f"test_{name}.py",)) for name in "ab"]) == 0


def test_a_room_has_the_unit_tests_that_import_it_most() -> None:
    options, chosen = lanes.chosen(["room", "layout", "-x"])
    assert options == ["-m", "not slow", "-x"] and len(chosen) == 2
    files = {path for lane in chosen for path in lane.paths}
    assert all(lanes.room_of(ROOT / path) == "layout" for path in files)
    assert {Path(path).name for path in files} >= {"test_layout.py", "test_axes.py"}
    with pytest.raises(SystemExit, match=r"no unit test is of the room 'attic'; rooms with tests: .*layout"):
        lanes.lanes_of_room("attic")
