"""Starts and ends that fail at an internal function. The same processes then make another world."""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, attempt_in_turn, environment
from tests.contract.test_rendezvous import held_port
from tests.failure.ranks import KILLED, Ranks
from tests.failure.test_again import DEADLINE_S, Footprint, footprint
from tests.internals.faults import ENDS, OF_A_WATCHER, STARTS

TIMEOUT_S = 3.0
SLACK_S = 2.0
AGAIN_S = 10.0


def _set_aside() -> None:
    """torch's objects cost each collection 0.5 s, so they are frozen."""
    gc.collect()
    gc.freeze()


def _again(port: int, world_size: int, rank: int) -> list[Any]:
    began = time.monotonic()
    ps.init_distributed_environment(world_size, rank, f"tcp://127.0.0.1:{port}", timeout=DEADLINE_S / 4)
    ps.initialize_model_parallel(world_size)
    group = ps.get_tp_group()
    found = [group.all_reduce(torch.ones(1)).item(), group.all_gather_object(rank), group.route.communicators[0].name]
    ps.destroy_distributed_environment()
    return [*found, time.monotonic() - began]


def _clean(maps: int | None = None) -> dict[str, Any]:
    return {
        "default group": dist.is_initialized(),
        "groups": [ps.try_get_world_group(), ps.try_get_tp_group(), ps.model_parallel_is_initialized()],
        "c10d": len(dist.distributed_c10d._world.pg_map),
        "maps": footprint().maps if maps is None else maps,
    }


CLEAN = {"default group": False, "groups": [None, None, False], "c10d": 0, "maps": 0}

GLOOS = ("gloo/transport", "🔺", ".cc:")
TOLD = ("PeerDiedError", "CollectiveTimeoutError", "RendezvousError", "CommunicationError")


def _break(place: str, how: str) -> None:
    owner, name = STARTS[place]
    real = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, real)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("the reason")

    setattr(owner, name, broken)


def _half_way(place: str, how: str, port: int) -> tuple[Outcome, Outcome, dict[str, Any], list[Any]]:
    rank = int(os.environ["RANK"])
    with environment(PARALLEL_STATE_START_TIMEOUT_S=str(TIMEOUT_S), PARALLEL_STATE_BARRIER_TIMEOUT_S=str(TIMEOUT_S)):
        if rank == 3:
            _break(place, how)
        told = attempt_in_turn(
            lambda: ps.init_distributed_environment(timeout=TIMEOUT_S), lambda: ps.initialize_model_parallel(2)
        )
        after = attempt(lambda: ps.get_tp_group().all_reduce(torch.ones(1)))
        ps.destroy_distributed_environment()
    clean = _clean()
    with environment(PARALLEL_STATE_START_TIMEOUT_S="30"):
        return told, after, clean, _again(port, 3 if how == "killed" else 4, rank)


@pytest.mark.parametrize("place", STARTS)
def test_a_rank_is_killed_half_way(ranks: Ranks, place: str) -> None:
    with held_port() as port:
        results = ranks.survivors(_half_way, place, "killed", port, timeout_s=DEADLINE_S)
    assert ranks.exit_code(3) == KILLED
    assert sorted(results) == [0, 1, 2]
    for told, after, clean, again in results.values():
        # A rank that hasn't been met counts as missing at the deadline.
        assert told.kind == ("RendezvousError" if place == "in the rendezvous" else "PeerDiedError"), told
        assert told.suspect_ranks == (3,), told
        assert not any(word in told.text for word in GLOOS), told
        assert told.seconds < TIMEOUT_S + SLACK_S, told
        assert after.kind == "GroupNotInitializedError", after
        assert clean == CLEAN
        assert again[:3] == [3.0, [0, 1, 2], "shared_memory"]
        assert again[3] < AGAIN_S


@pytest.mark.parametrize("place", STARTS)
def test_an_exception_half_way(ranks: Ranks, place: str) -> None:
    with held_port() as port:
        results = ranks.run(_half_way, place, "raised", port, timeout_s=DEADLINE_S)
    for rank, (told, after, clean, again) in enumerate(results):
        if rank == 3:
            assert told.kind == "ZeroDivisionError", told
        else:
            assert told.kind in TOLD, told
        assert told.seconds < TIMEOUT_S + SLACK_S, told
        assert after.kind == "GroupNotInitializedError", after
        assert clean == CLEAN
        assert again[:3] == [4.0, [0, 1, 2, 3], "shared_memory"]
        assert again[3] < AGAIN_S


def _close_badly(owner: Any, name: str) -> None:
    real = getattr(owner, name)

    def closed(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, real)
        real(*args, **kwargs)
        raise ZeroDivisionError("the reason")

    setattr(owner, name, closed)


def _ended_badly(port: int) -> list[tuple[Outcome, Outcome, bool, dict[str, Any], Footprint]]:
    rank, found = int(os.environ["RANK"]), []
    _set_aside()
    for place in ["", *ENDS]:
        ps.init_distributed_environment(4, rank, f"tcp://127.0.0.1:{port}", timeout=DEADLINE_S / 4)
        ps.initialize_model_parallel(2, 2)
        called: list[int] = []
        watcher = ps.get_world_group().pool.watcher  # type: ignore[union-attr]
        watcher.on_close.append(functools.partial(called.append, 1))
        if place == OF_A_WATCHER:
            watcher.on_close.append(lambda: 1 // 0)
        elif place:
            _close_badly(*ENDS[place])
        ps.get_world_group().barrier()
        told, again = attempt(ps.destroy_distributed_environment), attempt(ps.destroy_distributed_environment)
        after = footprint()
        found.append((told, again, bool(called), _clean(after.maps), after))
    return found


def test_what_raises_at_the_end_leaves_nothing_open(ranks: Ranks) -> None:
    with held_port() as port:
        for found in ranks.run(_ended_badly, port, timeout_s=DEADLINE_S):
            (good, *_, settled), *bad = found
            assert good.kind == "ok"
            for place, (told, again, called, clean, after) in zip(ENDS, bad, strict=True):
                where = f"{place}: {told}"
                assert told.kind == "ZeroDivisionError", where
                assert again.kind == "ok", where
                assert called, where
                assert clean == CLEAN, where
                assert after.descriptors <= settled.descriptors + 1, where
                assert after.threads <= settled.threads, where
