"""Rows 1 to 4, 16 and 17 of docs/failures.md: after a death all others get an error that names the rank, in
any call."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import parallel_state as ps
from parallel_state.__main__ import main
from parallel_state.compat import vllm
from tests.contract.attempts import Outcome, attempt, environment
from tests.contract.test_rendezvous import held_port
from tests.failure.calls import calls_on
from tests.failure.ranks import KILLED, Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import (
    DEADLINE_S,
    LONG_TIMEOUT_S,
    OPERATIONS,
    ROUTES,
    Told,
    calls_of_all,
    kill_me,
    later,
    on_routes,
    some,
    until_it_fails,
    world_over,
)
from tests.helpers.doors import call_op

POISONED_WITHIN_S = 0.010
LOOPS_S = 0.05
WAITED_S = 1.6


DOORS = ("op", "compiled", "compat")


def _through(door: str, group: ps.GroupCoordinator) -> Callable[[], object]:
    ones = torch.ones(8)
    if door == "op":
        return lambda: call_op(group, "all_reduce", ones, "sum")
    if door == "compat":
        return lambda: vllm.tensor_model_parallel_all_reduce(ones)
    compiled = torch.compile(group.all_reduce, backend="aot_eager", fullgraph=True)
    return lambda: compiled(ones)


def killed_in(
    operation: str, route: str, victims: list[int], folder: str, port: int | None = None
) -> tuple[Told, float]:
    with world_over(route, port, LONG_TIMEOUT_S) as group:
        call = _through(operation, group) if operation in DOORS else calls_of_all(group)[operation]
        if group.rank in victims:  # the others may still be in their first call when it dies
            call()
            later(
                LOOPS_S,
                lambda: (Path(folder, f"{group.rank}").write_text(repr(time.monotonic()), encoding="utf-8"), kill_me()),
            )
        told = until_it_fails(group, call)
        left = time.monotonic()
    return told, time.monotonic() - left


def latest(
    ranks: Ranks, results: dict[int, tuple[Told, float]], victims: list[int], folder: Path, group: str = "tp:0"
) -> float:
    latest_s = 0.0
    assert sorted(results) == [rank for rank in range(4) if rank not in victims]
    for victim in victims:
        assert ranks.exit_code(victim) == KILLED
    killed_s = max(float((folder / str(victim)).read_text()) for victim in victims)
    for rank, (told, leaving_s) in results.items():
        outcome = told.outcome
        assert outcome.kind == "PeerDiedError", f"rank {rank}: {outcome}"
        assert set(outcome.suspect_ranks) <= set(victims), f"rank {rank}: {outcome}"
        assert outcome.suspect_ranks, f"rank {rank}: {outcome}"
        assert "\n" not in outcome.text
        latest_s = max(latest_s, told.at_s - killed_s, leaving_s)
        assert told.facts["group"] == group and told.facts["rank"] == rank, told.facts
        assert told.facts["operation"], told.facts
        assert told.facts["sequence"] is not None or group != "tp:0", told.facts
        assert told.facts["elapsed_s"] is not None and told.facts["timeout_s"] == LONG_TIMEOUT_S, told.facts
        assert told.again.kind == "GroupFailedError", f"rank {rank}: {told.again}"
    return latest_s


@pytest.mark.parametrize("route", ROUTES)
def test_row_01_rank_3_is_killed(ranks: Ranks, tmp_path: Path, route: str) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(killed_in, "all_reduce", route, [3], str(folder), timeout_s=DEADLINE_S)
        return latest(ranks, results, [3], folder)

    assert_in_time(trial, tmp_path, before=ranks.kill)


@pytest.mark.parametrize("route", ROUTES)
def test_row_02_rank_0_which_serves_the_store_is_killed(ranks: Ranks, tmp_path: Path, route: str) -> None:
    def trial(folder: Path) -> float:
        with held_port() as port:
            results = ranks.survivors(killed_in, "all_reduce", route, [0], str(folder), port, timeout_s=DEADLINE_S)
        return latest(ranks, results, [0], folder)

    assert_in_time(trial, tmp_path, before=ranks.kill)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("door", [pytest.param(door, marks=pytest.mark.door(door)) for door in DOORS])
def test_row_03_through_each_door(ranks: Ranks, tmp_path: Path, door: str, route: str) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(killed_in, door, route, [3], str(folder), timeout_s=DEADLINE_S)
        return latest(ranks, results, [3], folder)

    assert_in_time(trial, tmp_path, before=ranks.kill)


@pytest.mark.parametrize(("operation", "route"), on_routes(OPERATIONS))
def test_row_03_in_every_operation(ranks: Ranks, tmp_path: Path, operation: str, route: str) -> None:
    victim = OPERATIONS.index(operation) % 4

    def trial(folder: Path) -> float:
        results = ranks.survivors(killed_in, operation, route, [victim], str(folder), timeout_s=DEADLINE_S)
        return latest(ranks, results, [victim], folder)

    assert_in_time(trial, tmp_path, before=ranks.kill)


def wait_in_every_call(operations: tuple[str, ...], route: str, folder: str) -> dict[str, Outcome]:
    with world_over(route, timeout_s=LONG_TIMEOUT_S) as world:
        groups = {name: world.make_sub_group(range(world.world_size)) for name in operations}
        for group in groups.values():
            assert group is not None
            group.barrier()
        if world.rank == 1:
            time.sleep(WAITED_S)
            kill_me()
        calls = {name: calls_of_all(group)[name] for name, group in groups.items() if group is not None}
        with ThreadPoolExecutor(len(calls)) as threads:
            outcomes = {name: threads.submit(attempt, call) for name, call in calls.items()}
        return {name: outcome.result() for name, outcome in outcomes.items()}


@pytest.mark.over("shared memory")
def test_row_03_errors_count_from_the_begin_of_their_calls(ranks: Ranks, tmp_path: Path) -> None:
    check_elapsed_in(ranks, OPERATIONS, "shared memory", tmp_path)


def check_elapsed_in(ranks: Ranks, operations: tuple[str, ...], route: str, folder: Path) -> None:
    results = ranks.survivors(wait_in_every_call, operations, route, str(folder), timeout_s=DEADLINE_S)
    assert sorted(results) == [0, 2, 3]
    for name in set(operations) - {"scatter"}:
        outcomes = [found[name] for found in results.values()]
        assert {outcome.kind for outcome in outcomes} <= {"ok", "PeerDiedError"}, (name, outcomes)
        assert max(outcome.seconds for outcome in outcomes) > WAITED_S / 2, (name, outcomes)


WAITS = (
    "recv", "recv of an object", "irecv", "irecv of a tensor dict", "broadcast of an object", "send, ring full",
    "recv of a dict with a spec", "broadcast of a dict with a spec", "all_reduce", "all_reduce_async", "barrier",
    "all_gather of an object",
)  # fmt: skip
DICT = {"x": torch.ones(4)}
SPEC = ps.TensorDictSpec.of(DICT)


def wait_for_a_live_rank(waits: str, route: str, folder: str) -> tuple[Told, float] | None:
    with world_over(route, timeout_s=LONG_TIMEOUT_S) as group:
        rank = group.rank
        if "spec" in waits:
            group.broadcast_tensor_dict(DICT if rank == 1 else None, 1, spec=SPEC)
            if rank == 1:
                group.send_tensor_dict(DICT, 0, spec=SPEC)
            elif rank == 0:
                group.recv_tensor_dict(1, spec=SPEC)
        if waits == "recv past Python" and rank < 2:
            group.send(torch.ones(4), 0) if rank else group.recv((4,), torch.float32, 1)
        group.barrier()
        if rank == 3:
            time.sleep(WAITED_S)
            Path(folder, "3").write_text(repr(time.monotonic()), encoding="utf-8")
            kill_me()
        told = None
        if rank == 0:
            call = {
                "recv past Python": lambda: group.recv((4,), torch.float32, 1),
                "recv": lambda: group.recv((4,), torch.float32, 1),
                "recv of an object": lambda: group.recv_object(1),
                "irecv": lambda: group.irecv((4,), torch.float32, 1).wait(),
                "irecv of a tensor dict": lambda: group.irecv_tensor_dict(1).wait(),
                "broadcast of an object": lambda: group.broadcast_object(None, 1),
                "recv of a dict with a spec": lambda: group.recv_tensor_dict(1, spec=SPEC),
                "broadcast of a dict with a spec": lambda: group.broadcast_tensor_dict(None, 1, spec=SPEC),
                "send, ring full": lambda: group.send(torch.ones(1 << 22), 1),
                "all_reduce": lambda: group.all_reduce(torch.ones(4)),
                "all_reduce_async": lambda: group.all_reduce_async(torch.ones(4)).wait(),
                "barrier": group.barrier,
                "all_gather of an object": lambda: group.all_gather_object(0),
            }[waits]
            told = until_it_fails(group, call)
        else:
            time.sleep(WAITED_S + 1.5)
        left = time.monotonic()
    return None if told is None else (told, time.monotonic() - left)


@pytest.mark.side_by_side
@pytest.mark.parametrize(("waits", "route"), [*on_routes(WAITS), ("recv past Python", "shared memory")])
def test_row_04_while_waiting_for_a_live_rank(ranks: Ranks, tmp_path: Path, waits: str, route: str) -> None:
    check_row_04(ranks, tmp_path, waits, route)


def check_row_04(ranks: Ranks, tmp_path: Path, waits: str, route: str) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(wait_for_a_live_rank, waits, route, str(folder), timeout_s=DEADLINE_S)
        assert sorted(results) == [0, 1, 2]
        told, leaving_s = results[0]
        assert told.outcome.kind == "PeerDiedError", told
        assert told.outcome.suspect_ranks == (3,), told
        assert told.again.kind == "GroupFailedError", told
        return max(told.at_s - float((folder / "3").read_text()), leaving_s)

    assert_in_time(trial, tmp_path, before=ranks.kill)


def until_two_are_gone(operation: str, route: str, folder: str) -> Told:
    """Ranks 1 and 3 are a process group, so that one signal kills both."""
    with world_over(route, timeout_s=LONG_TIMEOUT_S) as group:
        leader = group.all_gather_object(os.getpid())[1]
        for member in (1, 3):
            if group.rank == member:
                os.setpgid(0, leader)
            group.barrier()
        Path(folder, str(group.rank)).touch()
        return until_it_fails(group, calls_of_all(group)[operation])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("operation", some(["all_reduce", "broadcast_object", "send_object"], 1))
def test_row_16_two_ranks_die_together(ranks: Ranks, tmp_path: Path, operation: str, route: str) -> None:
    check_row_16(ranks, tmp_path, operation, route)


def check_row_16(ranks: Ranks, tmp_path: Path, operation: str, route: str) -> None:
    def trial(folder: Path) -> float:
        ranks.begin(until_two_are_gone, operation, route, str(folder))
        until = time.monotonic() + DEADLINE_S / 2
        while len(list(folder.iterdir())) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(LOOPS_S)
        os.killpg(ranks.pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        results = ranks.finish(DEADLINE_S)
        assert sorted(results) == [0, 2]
        for told in results.values():
            text = told.outcome.text
            assert told.outcome.kind == "PeerDiedError", text
            assert set(told.outcome.suspect_ranks) == {1, 3}, text
            assert "rank 1 has ended" in text and "rank 3 has ended" in text
        return max(told.at_s - killed_s for told in results.values())

    assert_in_time(trial, tmp_path, before=ranks.kill)


def _after_a_failure(route: str, path: str) -> dict[str, float]:
    """Returns the seconds that each later call takes: the fastest of five, because the machine may be busy. Ranks 0 and
    1 write to the folder `path` if their other group works."""
    with world_over(route) as group:
        other = ps.get_world_group().make_sub_group([0, 1])
        call = calls_of_all(group)["all_reduce"]
        call()
        if group.rank == 3:
            kill_me()
        told = until_it_fails(group, call)
        assert told.outcome.kind == "PeerDiedError", told
        found = {}
        for name, again in calls_on(group).items():
            outcomes = [attempt(again) for _ in range(5)]
            assert {outcome.kind for outcome in outcomes} <= {"GroupFailedError", "ok"}, (name, outcomes)
            assert outcomes[0].kind == "GroupFailedError" or name.endswith("_group"), (name, outcomes)
            found[name] = min(outcome.seconds for outcome in outcomes)
            if outcomes[0].kind == "GroupFailedError":
                assert "has ended" in outcomes[0].text
        cause = cause_of(group)
        assert cause is group.route.first_failure
        if other is not None:
            assert other.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
            Path(path, str(group.rank)).touch()
    return found


def cause_of(group: ps.GroupCoordinator) -> BaseException | None:
    try:
        group.barrier()
    except ps.GroupFailedError as error:
        return error.__cause__
    return None


@pytest.mark.parametrize("route", ROUTES)
def test_row_17_later_calls_fail_at_once_and_other_groups_go_on(ranks: Ranks, tmp_path: Path, route: str) -> None:
    results = ranks.survivors(_after_a_failure, route, str(tmp_path), timeout_s=DEADLINE_S)
    assert sorted(results) == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    for found in results.values():
        assert max(found.values()) < POISONED_WITHIN_S, found


def records_after_a_kill(folder: str) -> list[str]:
    with environment(PARALLEL_STATE_DEBUG_DIR=folder), world_over("shared memory", None, LONG_TIMEOUT_S) as group:
        group.barrier()
        if group.rank == 3:
            kill_me()
        assert until_it_fails(group, group.barrier).outcome.kind == "PeerDiedError"
        return [str(path) for path in Path(folder).glob(f"rank-{group.rank}-*.control")]


def test_the_record_of_a_survivor_replays(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = ranks.survivors(records_after_a_kill, str(tmp_path), timeout_s=DEADLINE_S)
    assert sorted(results) == [0, 1, 2]
    for (path,) in results.values():
        assert Path(path).stat().st_mode & 0o077 == 0
        assert main(["debug", "--replay", path]) == 0
        text = capsys.readouterr().out
        assert re.search(r"^\d+\.\d+ ended: rank 3$", text, re.MULTILINE), text
        assert "    tell dead rank 3, flags 2" in text
        assert "\nrank 3 ended, flags 2: \n" in text and text.endswith("\nthe replay has the same digest\n")
    assert main(["debug", "--replay", str(tmp_path)]) == 2
    assert "can't be replayed" in capsys.readouterr().err
