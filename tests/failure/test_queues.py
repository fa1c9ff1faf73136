"""Rows 33 to 35 of docs/failures.md: message queues in shared memory whose other end dies or is slow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.contract.attempts import Outcome, attempt
from tests.failure.ranks import KILLED, Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, kill_me, later, some, world_over
from tests.helpers.queues import RING_BYTES, SLOT_BYTES, carried_calls

pytestmark = [pytest.mark.side_by_side, pytest.mark.over("shared memory")]
T_S = 1.0


def _reader_dies(way: str, folder: str) -> tuple[Outcome, float]:
    with world_over("shared memory") as group:
        group.barrier()
        if group.rank == 1:
            time.sleep(0.3)
            Path(folder, "1").write_text(repr(time.monotonic()), encoding="utf-8")
            kill_me()
        if group.rank != 0:
            until = time.monotonic() + DEADLINE_S / 2
            while not Path(folder, "told").exists() and time.monotonic() < until:
                time.sleep(0.01)
            return Outcome("ok", "", 0.0), 0.0
        x = torch.ones(4 * RING_BYTES // 4)
        outcome = {
            "one message": lambda: attempt(group.send, x, 1),
            "many messages": lambda: attempt(lambda: [group.send(x[: SLOT_BYTES // 8], 1) for _ in range(10_000)]),
            "without waiting": lambda: attempt(lambda: group.isend(x, 1).wait()),
            "an object": lambda: attempt(group.send_object, {"x": x}, 1),
            "a broadcast": lambda: attempt(lambda: [group.broadcast_object({"x": x}, 0) for _ in range(100)]),
        }[way]()
        at_s = time.monotonic()
        Path(folder, "told").touch()
        return outcome, at_s


@pytest.mark.parametrize(
    "way", some(["one message", "many messages", "a broadcast", "without waiting", "an object"], 3)
)
def test_row_33_the_reader_dies_with_the_ring_full(ranks: Ranks, tmp_path: Path, way: str) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(_reader_dies, way, str(folder), timeout_s=DEADLINE_S)
        assert ranks.exit_code(1) == KILLED
        outcome, at_s = results[0]
        assert outcome.kind == "PeerDiedError", outcome
        assert outcome.suspect_ranks == (1,), outcome
        return at_s - float((folder / "1").read_text())

    assert_in_time(trial, tmp_path, before=ranks.kill)


def _writer_dies(broadcast: bool) -> tuple[list[Outcome], float, int]:
    with world_over("shared memory") as group:
        group.barrier()
        whole, half = torch.arange(1000), torch.ones(8 * RING_BYTES)
        if group.rank == 0:
            send = group.broadcast_object if broadcast else group.send_object
            send({"x": whole}, 0 if broadcast else 1)
            later(0.4, kill_me)
            send({"x": half}, 0 if broadcast else 1)
            time.sleep(DEADLINE_S)
        if group.rank > 1 and not broadcast:
            time.sleep(1.0)
            return [], 0.0, 0
        first = attempt(lambda: group.broadcast_object(None, 0) if broadcast else group.recv_object(0))
        time.sleep(0.8)
        second = attempt(lambda: group.broadcast_object(None, 0) if broadcast else group.recv_object(0))
        third = attempt(lambda: group.broadcast_object(None, 0) if broadcast else group.recv_object(0))
        return [first, second, third], time.monotonic(), first.text.count("tensor")


@pytest.mark.parametrize("broadcast", [False, True], ids=["to one", "to all"])
def test_row_34_the_writer_dies_in_the_middle_of_a_message(ranks: Ranks, tmp_path: Path, broadcast: bool) -> None:
    readers = (1, 2, 3) if broadcast else (1,)

    def trial(_: Path) -> float:
        results = ranks.survivors(_writer_dies, broadcast, timeout_s=DEADLINE_S)
        assert ranks.exit_code(0) == KILLED
        for rank in readers:
            (first, second, third), _, tensors = results[rank]
            assert first.kind == "ok" and tensors == 1, first
            assert second.kind == "PeerDiedError" and second.suspect_ranks == (0,), second
            assert third.kind == "GroupFailedError", third
        return max(results[rank][0][1].seconds for rank in readers)

    assert_in_time(trial, tmp_path, before=ranks.kill)


def _writer_of_tensors_dies(folder: str) -> tuple[list[Outcome], int]:
    with world_over("shared memory") as group:
        receive = ((4,), torch.float32, 0)
        for _ in range(2):
            if group.rank == 0:
                group.send(torch.ones(4), 1)
            elif group.rank == 1:
                group.recv(*receive)
        group.barrier()
        if group.rank == 0:
            time.sleep(0.4)
            Path(folder, "0").write_text(repr(time.monotonic()), encoding="utf-8")
            kill_me()
        if group.rank != 1:
            time.sleep(1.0)
            return [], 0
        past_python = carried_calls(group, "recv")
        return [attempt(group.recv, *receive) for _ in range(2)], past_python


def test_the_writer_of_tensors_dies(ranks: Ranks, tmp_path: Path) -> None:
    def trial(folder: Path) -> float:
        (first, second), past_python = ranks.survivors(_writer_of_tensors_dies, str(folder), timeout_s=DEADLINE_S)[1]
        assert past_python == 1
        assert first.kind == "PeerDiedError" and first.suspect_ranks == (0,), first
        assert second.kind == "GroupFailedError", second
        return first.seconds - 0.4

    assert_in_time(trial, tmp_path, before=ranks.kill)


def _slow_reader(size: int, pause_s: float) -> list[str]:
    with world_over("shared memory") as group:
        group.barrier()
        messages = [torch.full((size // 8,), number) for number in range(5)]
        found = []
        if group.rank == 0:
            for x in messages:
                found.append(attempt(group.send_object, {"x": x}, 1).kind)
        elif group.rank == 1:
            for x in messages:
                time.sleep(pause_s)
                outcome = attempt(lambda x=x: torch.equal(group.recv_object(0)["x"], x))
                found.append(f"{outcome.kind} {outcome.text}" if outcome.kind == "ok" else outcome.kind)
        for _ in range(50 if group.rank > 1 else 0):
            time.sleep(0.05)
        return found


@pytest.mark.parametrize("size", some([RING_BYTES + 8, SLOT_BYTES + 8, 5 * RING_BYTES], 1))
def test_row_35_a_slow_reader_gets_everything(ranks: Ranks, size: int) -> None:
    results = ranks.survivors(_slow_reader, size, 0.2, timeout_s=DEADLINE_S)
    assert results[0] == ["ok"] * 5
    assert results[1] == ["ok True"] * 5


def test_row_35_a_reader_that_is_too_slow_is_named(ranks: Ranks, tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        results = ranks.survivors(_too_slow, timeout_s=DEADLINE_S)
        sender, reader = results[0][0], results[1][0]
        assert sender.kind == "CollectiveTimeoutError" and sender.suspect_ranks == (1,), sender
        assert reader.kind != "ok", reader  # half of it was written, and must not look like a message
        return max(sender.seconds, reader.seconds)

    assert_in_time(trial, tmp_path, T_S + 1.0, before=ranks.kill)


def _too_slow() -> list[Outcome]:
    with world_over("shared memory", timeout_s=T_S) as group:
        group.barrier()
        if group.rank == 0:
            return [attempt(group.send_object, {"x": torch.ones(RING_BYTES)}, 1)]
        time.sleep(2.0)
        return [attempt(group.recv_object, 0)] if group.rank == 1 else []


def _view_holder_dies(sender_dies: bool, folder: str) -> tuple[Outcome, float, bool]:
    with world_over("shared memory") as group:
        x, held = torch.arange(1 << 20), []
        for _ in range(4):
            if group.rank == 0:
                group.send_tensor_dict({"x": x}, 1)
            elif group.rank == 1:
                found = group.recv_tensor_dict(0, views=True)
                assert found is not None
                held.append(found["x"])
            group.barrier()
        if group.rank == (0 if sender_dies else 1):
            Path(folder, "died").write_text(repr(time.monotonic()), encoding="utf-8")
            kill_me()
        outcome = Outcome("ok", "", 0.0)
        if group.rank == 0:
            outcome = attempt(lambda: [group.send_tensor_dict({"x": x}, 1) for _ in range(1000)])
        elif group.rank == 1:
            outcome = attempt(lambda: group.recv_tensor_dict(0, views=True))
        else:
            time.sleep(1.0)
        at_s = time.monotonic()
    if held:
        held[0].add_(0)
    return outcome, at_s, all(torch.equal(each, x) for each in held)


@pytest.mark.parametrize("sender_dies", [False, True], ids=["the reader", "the sender"])
def test_who_holds_or_lends_views_dies(ranks: Ranks, tmp_path: Path, sender_dies: bool) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(_view_holder_dies, sender_dies, str(folder), timeout_s=DEADLINE_S)
        dead = 0 if sender_dies else 1
        assert ranks.exit_code(dead) == KILLED
        outcome, at_s, are_whole = results[1 - dead]
        assert outcome.kind == "PeerDiedError" and outcome.suspect_ranks == (dead,), outcome
        assert are_whole
        return at_s - float((folder / "died").read_text())

    assert_in_time(trial, tmp_path, before=ranks.kill)
