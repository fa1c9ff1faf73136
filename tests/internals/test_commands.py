from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_state import __main__ as commands
from parallel_state.__main__ import main
from parallel_state.tools.arguments import require_writable
from parallel_state.tools.check import command as check

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
MODULES = """
import atexit, sys
atexit.register(lambda: print("imported", *(name for name in ("torch", "numpy", "msgspec") if name in sys.modules)))
sys.argv[:] = {argv!r}
sys.orig_argv[:] = {orig!r}
import runpy
runpy.run_module("parallel_state", run_name="__main__", alter_sys=True)
"""
WITHOUT_TORCH = (
    ["--help"], ["--version"], ["plan", "--world-size", "8", "--tp", "2"], ["plan", "--help"], ["plan", "--tp", "x"],
    ["topology"], ["debug", "--help"], ["debug", "/nowhere"], ["trace", "/nowhere"], ["nothing"],
    ["check", "--help"], ["check", "--ranks", "0"], ["check", "--timeout", "1"], ["check", "--json", "/nowhere/x"],
    ["bench", "--help"], ["bench", "--ranks", "1"], ["bench", "--sizes", "0"], ["bench", "--json", "/nowhere/x"],
    ["tune", "--help"], ["tune", "--ranks", "0"], ["tune", "--out", "/nowhere/x"],
)  # fmt: skip


def run(command: list[str], program: str) -> subprocess.CompletedProcess[str]:
    by_module = program == "-m"
    code = MODULES.format(
        argv=["-m" if by_module else f"/usr/bin/{program}", *command],
        orig=["python", "-m", "parallel_state", *command] if by_module else ["python", f"/usr/bin/{program}", *command],
    )
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip


@pytest.mark.parametrize("program", ["-m", "parallel-state"])
def test_commands_that_need_no_torch_do_not_import_it(program: str) -> None:
    for command in WITHOUT_TORCH:
        ended = run(command, program)
        assert ended.stdout.splitlines()[-1:] == ["imported"], (command, ended)
        if ended.returncode:
            assert "Traceback" not in ended.stderr
            assert ended.returncode == 2 and ended.stderr.strip(), (command, ended)


def test_live_debug_asks_without_torch() -> None:
    code = (
        "import sys; sys.argv[:] = ['parallel-state']\n"
        "from parallel_state.tools import debug, live\n"
        "from device_communicators.cpu import native\n"
        "native._find = lambda recipe: (native._PACKAGED / recipe.packaged_name, '')\n"
        "native.NativeLibrary = lambda path, has_ops: (path.name, has_ops)\n"
        "print(native.load_for_tools(), 'torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.stdout.strip() == "('_native.so', False) False", ended


def test_a_program_registers_the_ops_at_import() -> None:
    """Only our commands don't import torch. These programs have arguments or a name like a command's."""
    code = "import sys; sys.argv[:], sys.orig_argv[:] = {}; import parallel_state; print('torch' in sys.modules)"
    for words in ((["-m"], ["python", "-m", "program"]), (["-m", "a"], ["python", "-m", "parallel_state.compat", "a"])):
        ended = subprocess.run(
            [sys.executable, "-c", code.format(words)], env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert ended.stdout.strip() == "True", ended


@pytest.mark.parametrize(
    "command",
    [["plan"], ["plan", "--world-size", "0"], ["check", "--ranks", "0"], ["check", "--quic"], ["debug"], ["trace"],
     ["topology", "extra"], ["bench", "--ranks", "0"], ["tune", "--ranks", "0"], ["tune", "--round", "3"]],
)  # fmt: skip
def test_an_error_is_one_line_of_usage_and_one_of_cause(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    usage, cause = err.splitlines()
    assert not out
    assert usage.startswith("usage: ") and f" {command[0]} " in usage
    assert ": error: " in cause


def test_text_of_a_plan_has_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["plan", "--world-size", "4", "--tp", "2"]) == 0
    paragraphs = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("nodes:", "one rank"))]
    assert paragraphs and all(len(line) <= 60 for line in paragraphs)


@pytest.mark.parametrize("command", [[], *([name] for name in commands.COMMANDS)], ids=str)
def test_help_has_the_width_of_the_terminal(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    _, *lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > 60 and not line.startswith(" ")]
    assert not [line for line in lines if len(line) > 60 and line.startswith(" " * 8)]


def test_ctrl_c_ends_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "main", interrupted)
    assert commands.run() == 130
    assert capsys.readouterr() == ("", "python -m parallel_state: interrupted\n")


@pytest.mark.slow
def test_ctrl_c_ends_check_and_its_ranks() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "parallel_state", "check", "--ranks", "2", "--timeout", "60"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until = time.monotonic() + DEADLINE_S
    while not children.read_text(encoding="utf-8").strip() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert not out and err.splitlines()[-1:] == ["python -m parallel_state: interrupted"]
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [["check", "--json"], ["bench", "--json"]])
def test_a_path_is_tested_before_the_work(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "/nowhere/file"])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.endswith("error: cannot write /nowhere/file: No such file or directory\n")


def test_a_tested_path_stays_as_it_was(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("old")
    require_writable(argparse.ArgumentParser(), kept, new, None, "-")
    assert kept.read_text() == "old" and not new.exists()


def test_check_prints_its_report_where_the_file_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "require_writable", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        main(["check", "--ranks", "1", "--quick", "--json", "/nowhere/file"])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out.startswith("1 rank on 1 host") and "cannot write /nowhere/file" in err
