"""Groups of the torch backend with `enable_reconfigure`, which torch has since 2.15."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from device_communicators.base.bounded_store import LAST_WORD_S
from device_communicators.base.errors import (
    AlreadyInitializedError,
    CollectiveTimeoutError,
    CommunicationError,
    ConfigMismatchError,
    GroupFailedError,
    GroupNotInitializedError,
    InvalidArgumentError,
    ParallelStateError,
    PeerDiedError,
    RendezvousError,
    UnsupportedError,
)
from device_communicators.c10d import creation
from parallel_state import error_of
from tests.contract.attempts import ELAPSED_WITHIN_S, check_elapsed
from tests.doc_blocks import ROOT, blocks_of
from tests.failure.changing import (
    IS_THERE,
    Member,
    add_up,
    hear,
    kill_and_replace,
    latest_by_round,
    median,
    rounds_in,
    tell,
)
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.workers import WorkerPool

pytestmark = [
    pytest.mark.skipif(not IS_THERE, reason="needs torch >= 2.15"),
    pytest.mark.over("shared memory"),
    pytest.mark.door("torch.distributed"),
]
ALL = [0, 1, 2, 3]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    creation.load()


def _error(call: Callable[[], Any]) -> ParallelStateError:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        took_s, found = time.monotonic() - began, error_of(error)
        assert found is not None, f"{error!r} is no error of the library"
        check_elapsed(found, took_s - ELAPSED_WITHIN_S, took_s + ELAPSED_WITHIN_S)
        return found
    raise AssertionError("it didn't raise")


def _wrong_calls(folder: str) -> bool:
    member = Member(Path(folder))
    early = [_error(call) for call in (add_up, dist.barrier, lambda: dist.broadcast_object_list([1], 0))]
    assert [type(error) for error in early] == [GroupNotInitializedError] * 3
    assert "reconfigure" in str(early[0]) and "all_reduce" in str(early[0])
    assert dist.get_process_group_ranks(dist.group.WORLD) == [0]
    own = c10d._get_reconfigure_handle()
    others = member.handles([name for name in ALL if name != member.name])
    for uuid, handles, hints, kind, word in (
        (1, others, {}, InvalidArgumentError, "own"),
        (1, [], {}, InvalidArgumentError, "own"),
        (1, [own, own], {}, InvalidArgumentError, "twice"),
        (1, [own, "gloo:1234"], {}, InvalidArgumentError, "get_reconfigure_handle"),
        (1, [own], {"channels": "4"}, UnsupportedError, "channels"),
    ):
        error = _error(lambda uuid=uuid, handles=handles, hints=hints: c10d._reconfigure(uuid, handles, hints=hints))  # type: ignore[misc]
        assert type(error) is kind and word in str(error), error
        assert others[0] not in str(error), "an error shows the token of a handle"
    member.become(1, ALL)
    for call in (lambda: member.become(1, ALL), lambda: c10d._reconfigure(2, others)):
        assert isinstance(_error(call), (AlreadyInitializedError, InvalidArgumentError))
        add_up()
    assert dist.get_process_group_ranks(dist.group.WORLD) == ALL
    dist.destroy_process_group()
    return True


def test_wrong_calls_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_wrong_calls, str(tmp_path)) == [True] * 4


def _by_set(folder: str) -> tuple[int, int, list[int]]:
    member = Member(Path(folder))
    handles = member.handles(ALL)
    c10d._reconfigure(1, set(handles)).wait()
    assert dist.get_rank() == sorted(handles).index(handles[member.name])
    add_up()
    default = dist.group.WORLD
    found = dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(default)
    assert (default.rank(), default.size()) == found[:2]  # type: ignore[union-attr]
    dist.destroy_process_group()
    return found


def test_a_set_has_one_order_on_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(_by_set, str(tmp_path))
    assert sorted(found) == [(rank, 4, ALL) for rank in range(4)]


def _different(folder: str) -> list[str]:
    member, texts = Member(Path(folder)), []
    handles = member.handles(ALL)
    last = max((0, 1, 3), key=handles.__getitem__)  # the first handle's process serves the store: all need it
    for uuid, other in ((1, [0, 2, 1, 3]), (2, [each for each in ALL if each != last])):
        started = time.monotonic()
        error = _error(lambda uuid=uuid, names=other if member.name == 2 else ALL: member.become(uuid, names, 20.0))
        assert type(error).__name__ == "ConfigMismatchError" and isinstance(error, ConfigMismatchError), error
        assert time.monotonic() - started < 5.0, "it took until the deadline"
        assert isinstance(_error(add_up), GroupFailedError)
        texts.append(str(error))
    member.become(3, ALL)
    add_up()
    dist.destroy_process_group()
    return texts


def test_different_handles_are_one_error_for_all(ranks: Ranks, tmp_path: Path) -> None:
    for texts in ranks.run(_different, str(tmp_path)):
        assert all("different handles" in text for text in texts)


def _without_one(folder: str) -> str:
    member = Member(Path(folder))
    if member.name != 3:
        error = _error(lambda: member.become(1, ALL, timeout_s=2.0))
        assert isinstance(error, RendezvousError) and error.suspect_ranks == (3,), error
        assert (error.elapsed_s or 0) < 4.0
        member.become(2, [0, 1, 2])
        add_up()
        text = str(error)
    else:
        text = str(os.getpid())
    member.meet("end", ALL)
    dist.destroy_process_group()
    return text


def test_a_missing_rank_is_named_with_its_process(ranks: Ranks, tmp_path: Path) -> None:
    *texts, pid = ranks.run(_without_one, str(tmp_path))
    assert all(f"rank 3 is PID {pid} on host" in text and "reconfigure()" in text for text in texts), texts


def _store_stopped(folder: str, pids: Sequence[int]) -> str:
    """A member calls reconfigure before the server of the store is stopped, another one after it."""
    member = Member(Path(folder))
    handles = member.handles(ALL)
    server = min(ALL, key=handles.__getitem__)
    early, late, _ = (name for name in ALL if name != server)
    text = ""
    if member.name == early:
        threading.Timer(0.5, tell, [member.folder, "entered", ""]).start()
    if member.name == late:
        hear(member.folder, "entered")
        os.kill(pids[server], signal.SIGSTOP)
    if member.name in (early, late):
        timeout_s = 2.5 if member.name == early else 0.5
        began = time.monotonic()
        error = _error(lambda: member.become(1, ALL, timeout_s))
        took_s = time.monotonic() - began
        assert took_s < timeout_s + LAST_WORD_S + 0.3, f"{took_s} s, with a timeout of {timeout_s} s"
        assert isinstance(error, CollectiveTimeoutError) and error.suspect_ranks == (server,), error
        text = str(error)
    if member.name == early:
        hear(member.folder, f"raised-{late}")
        os.kill(pids[server], signal.SIGCONT)
    tell(member.folder, f"raised-{member.name}", "")
    member.meet("failed", ALL)
    member.become(2, ALL)
    add_up()
    dist.destroy_process_group()
    return text


def test_a_store_stopped_in_the_meeting_is_named_by_the_deadline(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(os.getpid)
    texts = [text for text in ranks.run(_store_stopped, str(tmp_path), ranks.pids) if text]
    assert len(texts) == 2 and all("has not answered" in text and "PID" in text for text in texts), texts


def _abort(folder: str) -> tuple[float, str, str]:
    member = Member(Path(folder))
    member.become(1, ALL)
    add_up()
    member.meet("ready", ALL)
    if member.name == 1:
        time.sleep(0.2)
        (Path(folder) / "aborted").write_text(repr(time.monotonic()))
        member.backend.abort()
        error, late_s = _error(add_up), 0.0
        member.backend.abort()
    else:
        error = _error(add_up)
        late_s = time.monotonic() - float((Path(folder) / "aborted").read_text())
        assert isinstance(error, CommunicationError)
        assert isinstance(_error(add_up), GroupFailedError)
    assert member.backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS  # type: ignore[attr-defined]
    member.become(2, [3, 1, 0, 2])
    add_up()
    dist.destroy_process_group()
    return late_s, type(error).__name__, str(error)


def test_abort_ends_the_calls_of_all_and_reconfigure_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    check_abort(ranks, tmp_path)


def check_abort(ranks: WorkerPool, folder: Path) -> None:
    def trial(own: Path) -> float:
        found = ranks.run(_abort, str(own))
        assert found[1][1] == "GroupFailedError" and "aborted on this rank" in found[1][2]
        for name in (0, 2, 3):
            assert "global rank 1 aborted the group" in found[name][2], found[name]
        return max(found[name][0] for name in (0, 2, 3))

    assert_in_time(trial, folder)


def _abort_own_call(folder: str) -> bool:
    member = Member(Path(folder))
    member.become(1, ALL)
    if member.name == 0:
        errors: list[BaseException] = []
        thread = threading.Thread(target=lambda: errors.append(_raised(add_up)))
        thread.start()
        time.sleep(0.1)
        member.backend.abort()
        thread.join(1.0)
        assert len(errors) == 1 and "aborted" in str(errors[0]), errors
    member.become(2, ALL)
    add_up()
    dist.destroy_process_group()
    return True


def _raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    return AssertionError("it didn't raise")


def test_abort_ends_this_ranks_own_call(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_abort_own_call, str(tmp_path)) == [True] * 4


def _merge_and_split(folder: str) -> bool:
    member = Member(Path(folder))
    halves = [[0, 1], [3, 2]]
    own = next(each for each in halves if member.name in each)
    for round_ in range(3):
        member.become(10 * round_ + halves.index(own), own)
        add_up()
        member.become(10 * round_ + 5, ALL[::-1])
        add_up()
        group = dist.split_group(split_ranks=[[0, 1], [2, 3]]) if round_ == 2 else None
        if group is not None:
            dist.all_reduce(x := torch.ones(3), group=group)
            assert x.tolist() == [2.0] * 3
    dist.destroy_process_group()
    return True


def test_groups_merge_and_split(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_merge_and_split, str(tmp_path)) == [True] * 4


def _example(code: str, page: str) -> int:
    exec(compile(code, page, "exec"), {})
    size = dist.get_world_size()
    dist.destroy_process_group()
    return size


def test_the_example_of_the_docs(ranks: Ranks) -> None:
    page = ROOT / "docs" / "torch_distributed.md"
    (block,) = [each for each in blocks_of(page) if "enable_reconfigure" in each.code]
    assert ranks.survivors(_example, block.code, str(page), timeout_s=60.0) == {0: 3, 1: 3, 3: 3}


def check_kills(pool: Any, folder: Path, size: int, rounds: int, timeout_s: float, seed: int = 0) -> None:
    results = pool.survivors(kill_and_replace, str(folder), size, rounds, "parallel_state", seed, timeout_s=timeout_s)
    assert len(results) == size
    found = rounds_in(folder, rounds)
    assert [len(each) for each in found] == [size - 1] * rounds
    for one in itertools.chain.from_iterable(found):
        assert one.error == PeerDiedError.__name__ and one.victim in one.suspects, one
    errors, first = latest_by_round(found, "error_s"), latest_by_round(found, "right_s")
    assert max(errors) < 1.0 and median(first) < 1.0, (seed, errors, first)


def test_killed_ranks_are_replaced(tmp_path: Path) -> None:
    """4 -> 3 -> 4, with traffic going on. The rank that served a store is among the killed ones."""
    pool = Ranks(7)
    try:
        check_kills(pool, tmp_path, 4, 3, 120.0)
    finally:
        pool.kill()


@pytest.mark.long
def test_killed_ranks_are_replaced_50_times(tmp_path: Path) -> None:
    pool = Ranks(58)
    try:
        check_kills(pool, tmp_path, 8, 50, 900.0, secrets.randbits(32))
    finally:
        pool.kill()
