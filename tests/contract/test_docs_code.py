from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import parallel_state as ps
from parallel_state.__main__ import COMMANDS
from parallel_state.__main__ import main as parallel_state_main
from tests.cases import each
from tests.doc_blocks import BLOCKS, DIRECTIVES, PLAIN, PYTHON, ROOT, SHELL, Block, Ranks, ranks_of
from tests.programs import FORK_SERVERS, Program, script
from tests.workers import WorkerPool

NOT_RUN_AT_MOST = 7


def test_every_block_says_how_it_runs() -> None:
    for block in BLOCKS:
        assert block.language in ("python", "sh", *PLAIN, *DIRECTIVES), f"{block}: {block.language!r}"
    for block in PYTHON:
        known = ("run: one process", "run: program", "edit", "use")
        assert ranks_of(block.how) or block.how in known or block.how.startswith("not run: "), f"{block}: {block.how}"
    assert len([block for block in PYTHON if block.how.startswith("not run")]) <= NOT_RUN_AT_MOST


def _by_page() -> Iterator[tuple[str, Ranks | None, list[Block]]]:
    groups: dict[tuple[str, str], list[Block]] = {}
    for block in PYTHON:
        if ranks_of(block.how) or block.how == "run: one process":
            ranks = ranks_of(block.how)
            alone = ranks is None or ranks.tp is None
            groups.setdefault((block.page, f"{block.how}{block.line if alone else ''}"), []).append(block)
    for (page, _), blocks in groups.items():
        yield page, ranks_of(blocks[0].how), blocks


def _run_blocks(blocks: Sequence[Block]) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "docs"}
    try:
        for block in blocks:
            exec(compile("\n" * block.line + block.code, block.page, "exec", dont_inherit=True), names)
    finally:
        if blocks[0].how != "run: one process" and ranks_of(blocks[0].how).tp is None:
            ps.destroy_model_parallel()
            ps.destroy_distributed_environment()


@pytest.mark.parametrize(("page", "ranks", "blocks"), list(_by_page()), ids=lambda each: str(each)[:40])
def test_python_blocks_run(
    page: str, ranks: Ranks | None, blocks: list[Block], pools: Callable[[int], WorkerPool]
) -> None:
    if ranks is None:
        _run_blocks(blocks)
    else:
        pools(ranks.count).run(_run_blocks, blocks, tp=ranks.tp, pp=ranks.pp)


PROGRAMS = [block for block in PYTHON if block.how == "run: program" or block.page == "README.md"]


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_programs_print_what_they_say(block: Block, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(block.code)
    (expected,) = re.findall(r"print\((?:ps\.)?launch\(.*#\s+(\[.*\])$", block.code, flags=re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = Program(FORK_SERVERS + script(tmp_path / "program.py", []), environment)
    out, err = program.communicate(120)
    assert program.returncode == 0, err
    # gloo of torch 2.10 prints lines of its own.
    assert [line for line in out.splitlines() if not line.startswith("[Gloo]")] == [expected]


LINES = sorted(
    {re.split(r"(?:^| )#", line)[0].strip() for block in SHELL for line in block.code.replace("\\\n", " ").splitlines()}
    - {""}
)
LAUNCHERS = "".join(path.read_text() for path in sorted((ROOT / "tests" / "clusters").glob("*.py")))
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_each_command_exists(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    each(LINES, lambda line: _check_command(line, capsys, monkeypatch))


def _check_command(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    while "=" in words[0]:
        del words[0]
    program, arguments = words[0], words[1:]
    if program == "make":
        target = next(word for word in arguments if "=" not in word)
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), f"the Makefile has no {target}"
    elif program == "pip":
        _check_extras(arguments)
    elif program == "torchfrtrace":  # torch has it since 2.15
        tested = (ROOT / "tests" / "failure" / "test_flight_recorder.py").read_text()
        assert all(word in tested for word in words if word.startswith("-"))
    elif program == "torchrun":
        script = next(word for word in arguments if word.endswith(".py"))
        if script != "program.py":
            _check_script(script, arguments[arguments.index(script) + 1 :], capsys, monkeypatch)
    elif arguments[:2] == ["-m", "parallel_state"]:
        command, options = arguments[2], arguments[3:]
        assert command in COMMANDS
        if command in ("plan", "topology"):
            assert parallel_state_main([command, *options]) == 0
        else:
            _check_help(lambda: parallel_state_main([command, "--help"]), options, capsys)
    elif {"program.py", "job.sh"} & set(arguments):
        assert program in ("python", "ssh") or f'"{program}"' in LAUNCHERS, f"no test starts ranks by {program}"
    else:
        assert program == "python", f"no rule here tests {line!r}"
        _check_script(arguments[0], arguments[1:], capsys, monkeypatch)


def _check_extras(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    for extra in re.findall(r"\[(.*)\]", " ".join(arguments)):
        assert re.search(rf"^{extra} = \[", PROJECT, flags=re.MULTILINE), f"there is no extra {extra}"


def _check_script(
    name: str, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ROOT / name
    assert script.exists(), name
    if "argparse" not in script.read_text() and not arguments:
        compile(script.read_text(), name, "exec")
        return
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    _check_help(lambda: runpy.run_path(str(script), run_name="__main__"), arguments, capsys)


def _check_help(show: Callable[[], object], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        show()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for word in arguments:
        assert not word.startswith("--") or word in said, f"{word} is not among the options:\n{said}"
