"""Hangs that users of engines and trainers reported: some ranks take another branch. Every error names rank,
call and line."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import parallel_state as ps
from parallel_state.__main__ import main
from tests.contract.attempts import Outcome, attempt, environment
from tests.extent import LONG
from tests.failure.ranks import Ranks
from tests.failure.worlds import DEADLINE_S, ROUTES, settings_of
from tests.helpers.queues import live_states

T_S = 2.0
AWAY_S = T_S + 2.0
SMALL = torch.ones(6)

Group = ps.GroupCoordinator


class Parts(NamedTuple):
    tp: Group
    pp: Group


class Report(NamedTuple):
    run: Callable[[Group, Parts], Outcome | None]
    says: tuple[str, ...]
    raising: tuple[int, ...] = (0, 1, 2, 3)


def compile_model(wait: Callable[[float], None]) -> None:
    names: dict[str, Any] = {}
    exec(compile("def load(wait, seconds):\n    wait(seconds)\n", "torch/_inductor/codecache.py", "exec"), names)
    names["load"](wait, AWAY_S)


def save_checkpoint() -> None:
    time.sleep(AWAY_S)


def next_batch() -> None:
    time.sleep(AWAY_S)


def handle_request() -> None:
    time.sleep(AWAY_S)


def evaluate(group: Group) -> Outcome:
    return attempt(group.barrier)


def migrate(group: Group) -> Outcome:
    return attempt(group.broadcast, SMALL.clone(), src=0)


def read_loss(group: Group) -> Outcome:
    return attempt(group.all_gather, SMALL)


def receive_activations(group: Group) -> Outcome:
    return attempt(group.recv, (6,), torch.float32, 0)


def step(group: Group) -> Outcome:
    return attempt(group.all_reduce, SMALL)


def unshard(group: Group) -> Outcome:
    return attempt(group.all_reduce, SMALL)


def _away(rank: int, do: Callable[[], object]) -> Callable[[Group, Parts], Outcome | None]:
    def run(world: Group, parts: Parts) -> Outcome | None:
        if world.rank != rank:
            return step(world)
        do()
        return None

    return run


def _instead(rank: int, do: Callable[[Group], Outcome]) -> Callable[[Group, Parts], Outcome | None]:
    return lambda world, parts: (do if world.rank == rank else step)(world)


def _fewer_steps(world: Group, parts: Parts) -> Outcome | None:
    if world.rank != 3:
        told = migrate(world)
        return told if told.kind != "ok" else evaluate(world)
    return evaluate(world)


def _order_of_groups(world: Group, parts: Parts) -> Outcome | None:
    return unshard(parts.tp) if world.rank in (0, 3) else step(parts.pp)


def _gathered_later(world: Group, parts: Parts) -> Outcome | None:
    if world.rank == 0:
        handle_request()
        return None
    told = attempt(world.gather, SMALL)
    return told if told.kind != "ok" else evaluate(world)


def _stopped(world: Group, parts: Parts) -> Outcome | None:
    pids = world.all_gather_object(os.getpid())
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    told = step(world)
    if world.rank == 3:
        time.sleep(1.0)
        os.kill(pids[2], signal.SIGCONT)
    return told


def _here(function: str) -> str:
    return rf"test_divergence\.py:\d+ in {function}\b"


def _elsewhere(rank: int, function: str, state: str = "") -> tuple[str, ...]:
    return ("all_reduce", rf"global rank {rank} is in no call of a group{state}, at .*{_here(function)}")


REPORTS = {
    "vllm#27313, a worker compiles": Report(
        _away(2, lambda: compile_model(time.sleep)), _elsewhere(2, "compile_model", ", compiling"), (0, 1, 3)),
    "bergson#444, rank 0 saves alone": Report(_away(0, save_checkpoint), _elsewhere(0, "save_checkpoint"), (1, 2, 3)),
    "jax#38503, one lives and enters no more": Report(_away(1, next_batch), _elsewhere(1, "next_batch"), (0, 2, 3)),
    "pytorch#20630, one has fewer batches": Report(
        _instead(3, evaluate), ("all_reduce", "barrier", "global rank", _here("evaluate"))),
    "underworld3#630, a branch around a collective": Report(
        _instead(2, migrate), ("all_reduce", "broadcast", "global rank", _here("migrate"))),
    "marin#7344, one reads a value": Report(
        _instead(1, read_loss), ("all_reduce", "all_gather", "global rank", _here("read_loss"))),
    "vllm#23448, one has made a step less": Report(
        _fewer_steps, ("broadcast", "barrier", "global rank", _here("evaluate"))),
    "rccl#2191, two groups in another order": Report(
        _order_of_groups, (r"global rank \d is in all_reduce.* of group '(tp|pp)", _here("(step|unshard)"))),
    "nccl#783, a receive that nobody sends": Report(
        _instead(1, receive_activations),
        (r"global rank 1 is in recv\(src global rank 0\)", "all_reduce", _here("receive_activations"))),
    "vllm#5484, the root of a gather is busy": Report(
        _gathered_later, (rf"global rank 0 is in no call of a group, at {_here('handle_request')}",), (1, 2, 3)),
    "sglang#20287, a rank is stopped": Report(
        _stopped, ("all_reduce", r"global rank 2 is stopped by a signal", _here("step")), (0, 1, 3)),
    "pytorch#135352, native code holds the interpreter's lock": Report(
        _away(3, lambda: ctypes.PyDLL(None).usleep(int(AWAY_S * 1e6))),
        ("all_reduce", r"global rank 3 is running, but no Python thread answers", _here("step")), (0, 1, 2)),
}  # fmt: skip


@contextmanager
def _world(route: str) -> Iterator[Group]:
    with environment(PARALLEL_STATE_SLOW_S="1.2", **settings_of(route)):
        ps.init_distributed_environment(timeout=T_S)
        ps.initialize_model_parallel(2, 2)
        try:
            world = ps.get_world_group()
            world.barrier()
            yield world
        finally:
            ps.destroy_distributed_environment()


def play(route: str, folder: str, names: list[str]) -> dict[str, Outcome | None]:
    found = {}
    for at, name in enumerate(names):
        with _world(route) as world:
            found[name] = REPORTS[name].run(world, Parts(ps.get_tp_group(), ps.get_pp_group()))
            Path(folder, f"{at}-{world.rank}").touch()
            for rank in range(4):
                _read_until(Path(folder, f"{at}-{rank}"))
    return found


def _read_until(path: Path) -> None:
    until = time.monotonic() + DEADLINE_S / 2
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def _names_of(route: str) -> list[str]:
    return [name for at, name in enumerate(REPORTS) if LONG or ROUTES[at % 2] == route]


@pytest.mark.parametrize("route", ROUTES)
def test_every_error_says_who_is_where(ranks: Ranks, tmp_path: Path, route: str) -> None:
    names = _names_of(route)
    played = ranks.run(play, route, str(tmp_path), names, timeout_s=DEADLINE_S + 20.0 * len(names))
    check(played, names)


def check(played: list[dict[str, Outcome | None]], names: list[str]) -> None:
    wrong = [
        (name, rank, words, outcomes[name])
        for name in names
        for rank, outcomes in enumerate(played)
        for words in REPORTS[name].says
        if rank in REPORTS[name].raising and not _has_raised(outcomes[name], words)
    ]
    assert not wrong, "\n".join(map(str, wrong))


def _has_raised(outcome: Outcome | None, words: str) -> bool:
    return outcome is not None and outcome.kind != "ok" and re.search(words, outcome.text) is not None


def _one_reads(folder: str) -> str:
    with _world("shared memory") as everyone:
        group = ps.create_parallel_groups(everyone, {"tp": 4}, timeout=DEADLINE_S).tp
        group.barrier()
        Path(folder, str(group.rank)).write_text(str(os.getpid()), encoding="utf-8")
        if group.rank == 3:
            _read_until(Path(folder, "goes on"))
        return attempt(group.all_reduce, SMALL).kind


def test_live_asks_a_job_that_hangs_and_goes_on(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.begin(_one_reads, str(tmp_path))
    try:
        until = time.monotonic() + DEADLINE_S
        while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        pid = (tmp_path / "1").read_text()
        found: dict[str, Any] = {}
        while found.get("3", {}).get("idle_s", -1) < 0 and time.monotonic() < until:
            found = live_states(int(pid))
        assert main(["debug", "--live", pid, "--stacks"]) == 0
        text = capsys.readouterr().out
    finally:
        (tmp_path / "goes on").touch()
        told = ranks.finish(DEADLINE_S)
    assert told == dict.fromkeys(range(4), "ok")
    assert not found["3"]["key"] and found["3"]["place"].startswith("test_divergence.py")
    assert "_read_until" in found["3"]["place"]
    assert all("all_reduce" in found[rank]["call"] and "_one_reads" in found[rank]["place"] for rank in "012")
    assert "4 ranks, 4 of them answered on this host" in text
    assert "ranks [0, 1, 2] wait in all_reduce" in text and "for ranks [3]" in text
    assert f"rank 1 (pid {pid})" in text and "thread MainThread" in text


def test_live_says_what_it_does_not_find(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "--live", "no-such-job"]) == 2
    assert "'no-such-job' isn't the PID of a rank or launcher" in capsys.readouterr().err
