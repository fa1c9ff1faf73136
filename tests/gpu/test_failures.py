from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators.base.errors import CommunicationError, PeerDiedError
from device_communicators.base.member import Timeout
from parallel_state.tools.bench.devices import captured
from tests.gpu.ranks import DRY, GpuRanks, device, nccl_of, needs_a_gpu, synchronize, world

Gpus = Callable[[int], GpuRanks]
VICTIM = 3
LIMIT_S = 15.0
"""A rank's exit is detected within 1 s, but four ranks on one GPU take turns."""
TIMEOUT_S = 1.0 if DRY else 5.0


def _call_of(kind: str, group: ps.GroupCoordinator, x: torch.Tensor) -> Callable[[], Any]:
    if kind == "eager":
        return lambda: group.all_reduce(x)
    with group.graph_capture() as capture:
        group.all_reduce(x)
        synchronize()
        graph = captured(lambda: group.all_reduce(x), capture.stream)

    def replay_and_look() -> None:
        graph.replay()
        group.all_gather(x[:1], 0)  # only a call reports the failure

    return replay_and_look


def _dying_body(kind: str) -> tuple[str, tuple[int, ...], float, str]:
    with world(4):
        group = ps.get_world_group()
        x = torch.ones(1 << 16, device=device())
        call = _call_of(kind, group, x)
        call()
        synchronize()
        group.barrier()
        if group.rank_in_group == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            while time.monotonic() < started + 2 * LIMIT_S:
                call()
                synchronize()
        except PeerDiedError as error:
            elapsed_s = time.monotonic() - started
            with pytest.raises(ps.GroupFailedError):
                group.all_reduce(x)
            return "PeerDiedError", error.suspect_ranks, elapsed_s, str(error)
        except Exception as error:
            return type(error).__name__, (), time.monotonic() - started, str(error)
        return "nothing", (), time.monotonic() - started, ""


@pytest.mark.parametrize("kind", ["eager", "captured"])
def test_a_rank_that_ends_is_named_and_frees_those_that_wait(
    new_ranks: Callable[[int], GpuRanks], record_property: Callable[[str, object], None], kind: str
) -> None:
    pool = new_ranks(4)
    try:
        answers = pool.survivors(_dying_body, kind, timeout_s=180)
    finally:
        pool.kill()
    assert sorted(answers) == [0, 1, 2]
    record_property("seconds", [round(elapsed_s, 2) for _, _, elapsed_s, _ in answers.values()])
    for name, suspects, elapsed_s, text in answers.values():
        assert (name, suspects) == ("PeerDiedError", (VICTIM,)), text
        assert elapsed_s < LIMIT_S


def _late_body() -> tuple[str, float]:
    group = ps.get_tp_group()
    own = nccl_of(group)
    assert own is not None
    nccl = type(own)(dataclasses.replace(group.context, timeout=Timeout(TIMEOUT_S)))
    nccl.set_up()
    started = time.monotonic()
    try:
        if group.rank_in_group == 0:
            nccl.all_reduce(torch.ones(1, device=device()), "sum")
            synchronize()
            nccl.all_reduce(torch.ones(1, device=device()), "sum")
        return "nothing", time.monotonic() - started
    except CommunicationError as error:
        return type(error).__name__, time.monotonic() - started
    finally:
        group.barrier()
        nccl.close()


def test_what_the_device_doesnt_get_done_ends_at_the_deadline(gpus: Gpus) -> None:
    one, other = gpus(2).run(_late_body, tp=2)
    assert one[0] == "CollectiveTimeoutError"
    assert TIMEOUT_S <= one[1] < TIMEOUT_S + LIMIT_S
    assert other[0] == "nothing"


def _unmet_body() -> tuple[str, float]:
    with world(2, timeout=TIMEOUT_S):
        group, started = ps.get_tp_group(), time.monotonic()
        try:
            if group.rank_in_group == 0:
                group.all_reduce(torch.ones(1, device=device()))
            return "nothing", time.monotonic() - started
        except CommunicationError as error:
            return type(error).__name__, time.monotonic() - started
        finally:  # the peer must not exit earlier, because its exit would be detected first
            time.sleep(max(0.0, started + TIMEOUT_S + 2 - time.monotonic()))


def test_a_communicator_that_not_all_make_ends_at_the_deadline(new_ranks: Callable[[int], GpuRanks]) -> None:
    pool = new_ranks(2)
    try:
        one, other = pool.run(_unmet_body)
    finally:
        pool.kill()
    assert one[0] == "CollectiveTimeoutError"
    assert one[1] < TIMEOUT_S + LIMIT_S
    assert other[0] == "nothing"


def _wrong_body() -> list[str]:
    group, found = ps.get_tp_group(), []
    x = torch.ones(4, device=device())
    for call in (
        lambda: group.all_reduce(x, "median"),
        lambda: group.broadcast(x, 9),
        lambda: group.all_reduce(x.to(torch.bool), "avg"),
    ):
        with pytest.raises(ps.UsageError) as raised:
            call()
        found.append(str(raised.value))
    assert group.all_reduce(x).tolist() == [float(group.world_size)] * 4
    return found


def test_wrong_calls_leave_the_group_usable(gpus: Gpus) -> None:
    for found in gpus(2).run(_wrong_body, tp=2):
        assert all("tp:" in text for text in found)


def _on_another_device_body() -> str:
    from device_communicators.base.errors import InvalidArgumentError

    group = ps.get_tp_group()
    with pytest.raises(InvalidArgumentError) as raised:
        nccl = nccl_of(group)
        assert nccl is not None
        nccl.all_reduce(torch.ones(3), "sum")
    return str(raised.value)


def test_a_tensor_on_another_device(gpus: Gpus) -> None:
    needs_a_gpu("all tensors are on the CPU")
    for text in gpus(2).run(_on_another_device_body, tp=2):
        assert "must be on cuda:0" in text
