from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators import CATALOG, Row, build_route, register_route
from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    GroupFailedError,
    InvalidArgumentError,
    PeerDiedError,
    SettingError,
    UnsupportedError,
)
from device_communicators.base.member import Timeout
from device_communicators.machine.group_topology import Vote
from device_communicators.peer import device as peer_device
from device_communicators.peer import group as peer_group
from device_communicators.peer import thresholds as peer_thresholds
from device_communicators.peer.communicator import PeerMemoryCommunicator
from device_communicators.peer.thresholds import ALGORITHMS, Thresholds
from device_communicators.routing.route import Route
from parallel_state.groups.coordinator import GroupCoordinator
from tests.contract import test_fused_norm
from tests.contract.carriers import Member, twin_of
from tests.contract.cases import Form, bytes_of, real_numbers
from tests.extent import LONG
from tests.helpers import cuda_on_cpu, peer_stand_in
from tests.helpers.peer_stand_in import Device, StandInPeerMemory
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
Env = dict[str, str]
ALGORITHM = "PARALLEL_STATE_PEER_MEMORY_ALGORITHM"
TABLE = "PARALLEL_STATE_PEER_MEMORY_TABLE"
BOUNDS = {
    "push": 256, "pull": 1024, "two_shot": 4096, "fused": 1024,
    "all_gather": 512, "all_gather_push": 128, "reduce_scatter": 512, "reduce_scatter_push": 260,
}  # fmt: skip


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Env:
    folder = tmp_path_factory.mktemp("peers")
    row = Thresholds(arch="9.0", world_size=8, source="a test", **BOUNDS)
    peer_thresholds.dump([row], folder.parent / f"{folder.name}.json", "a test")
    return {
        peer_stand_in.FOLDER: str(folder),
        peer_stand_in.LIBRARY: str(cuda_on_cpu.build()),
        TABLE: str(folder.parent / f"{folder.name}.json"),
        ALGORITHM: "auto",
    }


def _group(env: Env, change: Callable[[Device], None] | None = None, **changes: Any) -> tuple[GroupCoordinator, Device]:
    os.environ.update(env)
    device = Device()
    if change is not None:
        change(device)
    group = twin_of(ps.get_tp_group())
    context = dataclasses.replace(group.context, **changes)
    group.context = context
    group.route = _route_with(context, device)
    register_route(group.route)
    return group, device


def _route_with(context: Any, device: Device) -> Route:
    class Here(Row):
        def load(self) -> Any:
            return lambda context: StandInPeerMemory(context, device)

    return build_route(context, (Here("peer_memory", "", ""), CATALOG[-1]))


def _launched(device: Device, call: Callable[[], object]) -> list[str]:
    if device.made is None:
        return []
    device.made.launched.clear()
    call()
    return list(device.made.launched)


def _choice_body(env: Env) -> dict[str, list[str]]:
    group, device = _group(env)
    size = group.world_size

    def x(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(count, dtype=dtype)

    calls: dict[str, Callable[[], object]] = {
        "256 bytes": lambda: group.all_reduce(x(64)),
        "260 bytes": lambda: group.all_reduce(x(65)),
        "1024 bytes": lambda: group.all_reduce(x(512, torch.bfloat16)),
        "1026 bytes": lambda: group.all_reduce(x(513, torch.float16)),
        "4096 bytes in place": lambda: group.all_reduce_(x(1024)),
        "4100 bytes": lambda: group.all_reduce(x(1025)),
        "no bytes": lambda: group.all_reduce(x(0)),
        "max": lambda: group.all_reduce(x(4), "max"),
        "float64": lambda: group.all_reduce(x(4, torch.float64)),
        "started": lambda: group.all_reduce_async(x(4)).wait(),
        "all_gather of 512": lambda: group.all_gather(x(512, torch.int8)),
        "all_gather of 128": lambda: group.all_gather(x(128, torch.int8)),
        "all_gather of 129": lambda: group.all_gather(x(129, torch.int8)),
        "all_gather of 513": lambda: group.all_gather(x(513, torch.int8)),
        "reduce_scatter of 260": lambda: group.reduce_scatter(x(65 * size)),
        "reduce_scatter of 264": lambda: group.reduce_scatter(x(66 * size)),
        "reduce_scatter of 516": lambda: group.reduce_scatter(x(129 * size)),
        "broadcast": lambda: group.broadcast(x(4)),
        "fused": lambda: group.all_reduce_add_rms_norm(x(64).view(4, 16), x(64).view(4, 16), x(16), 1e-6),
        "fused, float8": lambda: group.all_reduce_add_rms_norm_static_fp8_quant(
            *(x(64, torch.bfloat16).view(4, 16),) * 2, x(16, torch.bfloat16), x(1)
        ),
        "fused, float8 by token": lambda: group.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(
            *(x(64, torch.float16).view(4, 16),) * 2, x(16, torch.float16)
        ),
        "fused, large": lambda: group.all_reduce_add_rms_norm(*(x(272).view(17, 16),) * 2, x(16)),
        "fused, a long row": lambda: _without_room(group, x(256)),
    }
    told = {name: _launched(device, call) for name, call in calls.items()}
    group.route.close()
    return told


def _without_room(group: GroupCoordinator, x: Tensor) -> None:
    group.all_reduce(x)
    made = group.route.communicators[0].group  # type: ignore[attr-defined]
    made.max_blocks, kept = 0, made.max_blocks
    group.all_reduce_add_rms_norm(x, x, x)
    made.max_blocks = kept


def test_sizes_choose_the_kernel_and_what_is_not_carried_goes_on(pools: Pools, env: Env) -> None:
    for told in pools(4).run(_choice_body, env, tp=2):
        assert told == {
            "256 bytes": ["all_reduce_push_float32"],
            "260 bytes": ["all_reduce_pull_float32"],
            "1024 bytes": ["all_reduce_pull_bfloat16"],
            "1026 bytes": ["all_reduce_two_shot_float16"],
            "4096 bytes in place": ["all_reduce_two_shot_float32"],
            "4100 bytes": [],
            "no bytes": [],
            "max": [],
            "float64": [],
            "started": [],
            "all_gather of 512": ["all_gather_pull"],
            "all_gather of 128": ["all_gather_push"],
            "all_gather of 129": ["all_gather_pull"],
            "all_gather of 513": [],
            "reduce_scatter of 260": ["reduce_scatter_push_float32"],
            "reduce_scatter of 264": ["reduce_scatter_pull_float32"],
            "reduce_scatter of 516": [],
            "broadcast": [],
            "fused": ["all_reduce_add_rms_norm_float32"],
            "fused, float8": ["all_reduce_add_rms_norm_static_fp8_bfloat16"],
            "fused, float8 by token": ["all_reduce_add_rms_norm_token_fp8_float16"],
            "fused, a long row": ["all_reduce_pull_float32"] * 2,
            "fused, large": ["all_reduce_two_shot_float32"],
        }


def _pinned_body(env: Env) -> tuple[list[str], list[bytes], bool]:
    group, device = _group(env)
    whole = real_numbers(Form((20_003,)), torch.bfloat16, group.rank_in_group)
    found: list[Tensor] = []
    launched = _launched(device, lambda: found.extend([group.all_reduce(whole), group.all_reduce(whole[64:96])]))
    alike = torch.equal(found[0][64:96], found[1])
    text = group.explain()
    group.route.close()
    assert f"{env[ALGORITHM]} for every size" in text
    return launched, [bytes(bytes_of(found[0]).tolist())], alike


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_pinned_algorithm_takes_every_size(pools: Pools, env: Env, algorithm: str) -> None:
    answers = pools(4).run(_pinned_body, {**env, ALGORITHM: algorithm}, tp=4)
    for launched, found, alike in answers:
        assert launched == [f"all_reduce_{algorithm}_bfloat16"] * 2
        assert found == answers[0][1], "ranks have other bits"
        assert alike, "an element's sum depends on the tensor it is in"


def _same_bits_body(env: Env, algorithm: str) -> bytes:
    group, _ = _group({**env, ALGORITHM: algorithm})
    found = [
        group.all_reduce(real_numbers(Form((1337,)), dtype, group.rank_in_group))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    group.route.close()
    return b"".join(bytes(bytes_of(each).tolist()) for each in found)


def test_all_algorithms_give_the_same_bits(pools: Pools, env: Env) -> None:
    found = {each for name in ALGORITHMS for each in pools(3).run(_same_bits_body, env, name, tp=3)}
    assert len(found) == 1


def _aligned_body(env: Env) -> None:
    group, _ = _group(env)
    base = torch.arange(0, 40, dtype=torch.float32)
    for offset in range(5):
        x = base.clone()[offset : offset + 30]
        y = base.clone()
        expected = x * group.world_size
        assert torch.equal(group.all_reduce(x), expected)
        assert torch.equal(group.all_reduce_(y[offset : offset + 30]), expected)
        assert torch.equal(y[:offset], base[:offset]) and torch.equal(y[offset + 30 :], base[offset + 30 :])
    with pytest.raises(InvalidArgumentError, match="must be on cpu, but one is on meta"):
        group.route.communicators[0].all_reduce(torch.ones(4, device="meta"), "sum")
    with pytest.raises(UnsupportedError, match="'peer_memory' doesn't support broadcast"):
        group.route.communicators[0].broadcast(base, 0)
    group.route.close()


def test_any_place_in_memory_will_do(pools: Pools, env: Env) -> None:
    pools(2).run(_aligned_body, env, tp=2)


def _norms_body(env: Env) -> tuple[list[bytes], set[str]]:
    group, device = _group(env)
    answers: list[bytes] = []
    launched = _launched(device, lambda: answers.extend(test_fused_norm._body(Member(group, "peer_memory"))))
    group.route.close()
    return answers, set(launched)


def test_norms_have_the_numerics_of_all_communicators(pools: Pools, env: Env) -> None:
    answers = pools(3).run(_norms_body, env, tp=3)
    for found, launched in answers:
        assert found == answers[0][0], "ranks have other bits"
        wanted = {
            f"all_reduce_add_rms_norm_{how}_fp8_{dtype}"
            for how in ("static", "token")
            for dtype in ("float32", "float16", "bfloat16")
        }
        assert wanted <= launched


def _pinned_norm_body(env: Env) -> bool:
    group, device = _group(env)
    rows = real_numbers(Form((99, 64)), torch.bfloat16, group.rank_in_group)
    weight, found = torch.full((64,), 0.7, dtype=torch.bfloat16), []
    launched = _launched(
        device,
        lambda: found.extend(group.all_reduce_add_rms_norm(x, x, weight)[0] for x in (rows, rows[5:6].clone())),
    )
    group.route.close()
    assert launched == ["all_reduce_add_rms_norm_bfloat16"] * 2
    return torch.equal(found[0][5], found[1][0])


def test_a_pinned_algorithm_has_one_norm_for_every_size(pools: Pools, env: Env) -> None:
    assert all(pools(2).run(_pinned_norm_body, {**env, ALGORITHM: "two_shot"}, tp=2))


CALLS = 1000 if LONG else 200


def _many_body(env: Env, seed: int) -> int:
    group, device = _group(env)
    rank, size = group.rank_in_group, group.world_size
    assert device.made is not None
    device.made.disturb(20, longest_us=200, seed=seed + rank)
    alike, own = random.Random(seed), random.Random(rank)
    wrong = 0
    for number in range(CALLS):
        kind = alike.choice(("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "broadcast", "max"))
        count = alike.choice((1, 3, 63, 64, 65, 250, 257, 1000, 1024, 1500))
        dtype = alike.choice((torch.float32, torch.float16, torch.bfloat16))
        x = (torch.arange(count * size) % 5 + number % 7 + rank).to(dtype)
        whole = torch.stack([(torch.arange(count * size) % 5 + number % 7 + each) for each in range(size)])
        if own.random() < 0.02:
            time.sleep(own.random() * 0.003)
        if kind == "all_gather":
            wrong += not torch.equal(group.all_gather(x), whole.view(-1).to(dtype))
        elif kind == "reduce_scatter":
            mine = whole.sum(0)[rank * count : (rank + 1) * count]
            wrong += not torch.equal(group.reduce_scatter(x), mine.to(dtype))
        elif kind == "broadcast":
            wrong += not torch.equal(group.broadcast(x, size - 1), whole[-1].to(dtype))
        elif kind == "max":
            wrong += not torch.equal(group.all_reduce(x, "max"), whole[-1].to(dtype))
        else:
            wrong += not torch.equal(getattr(group, kind)(x), whole.sum(0).to(dtype))
    group.route.close()
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_many_calls_with_delays_and_another_communicator_between(pools: Pools, env: Env, world: int) -> None:
    assert pools(world).run(_many_body, env, 7, tp=world, timeout_s=180) == [0] * world


def _blocks_body(env: Env) -> float:
    rank = ps.get_tp_group().rank_in_group
    group, _ = _group(env, lambda device: setattr(device, "max_blocks", 1 if rank == 1 else 4), timeout=Timeout(5.0))
    found = float(group.all_reduce(torch.ones(50_000))[-1])
    group.route.close()
    return found


def test_the_smallest_device_sets_the_grid(pools: Pools, env: Env) -> None:
    assert pools(2).run(_blocks_body, {**env, ALGORITHM: "push"}, tp=2) == [2.0, 2.0]


def _shared_gpu_body(env: Env) -> int:
    def change(device: Device) -> None:
        device.max_blocks, device.shared = 4, ((1, 2),)

    group, _ = _group(env, change)
    made = group.route.communicators[0].group  # type: ignore[attr-defined]
    assert float(group.all_reduce(torch.ones(50_000))[-1]) == 3
    group.route.close()
    return made.max_blocks


def test_ranks_on_one_gpu_divide_its_blocks(pools: Pools, env: Env) -> None:
    assert pools(3).run(_shared_gpu_body, {**env, ALGORITHM: "push"}, tp=3) == [2, 2, 2]


def _threads_body(env: Env) -> int:
    group, _ = _group(env)
    communicator = group.route.communicators[0]
    wrong: list[bool] = []

    def calls(value: float) -> None:
        for _ in range(50):
            x = torch.full((64,), value)
            found = communicator.all_reduce(x, "sum").tolist()
            wrong.append(found not in ([value + 1] * 64, [value + 1000] * 64))

    threads = [threading.Thread(target=calls, args=(value,)) for value in (1.0, 1000.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group.route.close()
    assert len(wrong) == 100
    return sum(wrong)


def test_threads_of_a_rank_launch_one_after_the_other(pools: Pools, env: Env) -> None:
    assert pools(2).run(_threads_body, env, tp=2) == [0, 0]


def _streams_body(env: Env) -> list[tuple[int, int]]:
    group, device = _group(env)
    x = torch.ones(8)
    for stream in (7, 8, 8, 7):
        device.streams.stream = stream
        group.all_reduce(x)
    device.streams.capturing, device.streams.stream = True, 9
    group.all_reduce(x)
    device.streams.capturing, device.streams.stream = False, 7
    group.all_reduce(x)
    group.route.close()
    return device.streams.waits


def test_calls_on_other_streams_wait_for_each_other_but_not_in_a_capture(pools: Pools, env: Env) -> None:
    assert pools(2).run(_streams_body, env, tp=2) == [[(8, 7), (7, 8)]] * 2


def _refused_body(env: Env, which: str) -> tuple[list[str], str, float]:
    rank = ps.get_tp_group().rank_in_group
    if which == "setting" and rank == 1:
        env = {**env, ALGORITHM: "push"}
    if which == "another table" and rank == 3:
        env = {**env, TABLE: env["OTHER"]}
    if which == "architecture":
        env = {**env, peer_stand_in.ARCH: "10.0" if rank == 2 else "9.0"}

    def change(device: Device) -> None:
        if which == "kernels" and rank == 2:
            device.problem = "nothing compiles here"
        device.without_words = which == "words" and rank == 1
        if which == "memory" and rank == 3:
            device.ways[0].fails = "map"  # type: ignore[attr-defined]
        if which == "peers":
            device.connected = Vote(False, "rank 0 doesn't see the GPU of rank 1")
        if which == "links":
            device.mesh = Vote(False, "from the GPU of rank 0 to that of rank 1 there is no NVLink")
        device.deaf = which == "wrong" and rank == 1
        if which == "launch" and rank == 2:
            device.fails_at = "all_reduce_pull_float32"

    os.environ.pop(peer_stand_in.ARCH, None)
    group, _ = _group(env, change, **({"timeout": Timeout(2.0)} if which == "launch" else {}))
    os.environ.pop(peer_stand_in.ARCH, None)
    total = float(group.all_reduce(torch.ones(3))[0])
    names = [each.name for each in group.route.communicators]
    text = group.route.refusals.get("peer_memory", "not refused")
    group.route.close()
    return names, text, total


REFUSALS = {
    "kernels": "rank 2: nothing compiles here",
    "words": "rank 1: no pinned memory, says the stand-in",
    "memory": "files: rank 3: can't be mapped",
    "wrong": "rank 0: the test call of all_reduce (push) returned a wrong result",
    "launch": "rank 0: the test call of all_reduce (pull) failed: all_reduce_pull_float32 of group",
    "peers": "no peer access: rank 0 doesn't see the GPU of rank 1",
    "links": "NVLink doesn't connect all GPUs, which more than 2 ranks need: from the GPU of rank 0",
    "setting": f"{ALGORITHM} is auto on rank 0, but push on rank 1",
    "architecture": "GPU architecture is 9.0 on rank 0, but 10.0 on rank 2",
    "another table": "the table of thresholds is ",
}


@pytest.mark.parametrize("which", REFUSALS)
def test_what_speaks_against_it_on_one_rank_has_all_do_without(
    pools: Pools, env: Env, which: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("tables") / "empty.json"
    peer_thresholds.dump([], other, "a test")
    env = {**env, peer_stand_in.FOLDER: str(tmp_path), "OTHER": str(other)}
    answers = pools(4).run(_refused_body, env, which, tp=4)
    for names, text, total in answers:
        assert names == [CATALOG[-1].name]
        assert text.startswith(REFUSALS[which])
        assert text == answers[0][1]
        assert total == 4
    assert list(tmp_path.iterdir()) == [], "memory was left behind"


def _start_body(env: Env) -> str | None:
    os.environ.update(env)
    group = ps.get_tp_group()

    def make(device: torch.device) -> Device:
        if group.rank_in_group == 1:
            raise RuntimeError("CUDA says no")
        return Device()

    kept, peer_device.PeerDevice = peer_device.PeerDevice, make  # type: ignore[assignment, misc]
    try:
        return PeerMemoryCommunicator(group.context).admit()
    finally:
        peer_device.PeerDevice = kept  # type: ignore[misc]


def test_a_rank_whose_cuda_does_not_start_keeps_nobody_waiting(pools: Pools, env: Env) -> None:
    assert pools(2).run(_start_body, env, tp=2) == ["rank 1: CUDA says no"] * 2


def _setting_body(env: Env) -> None:
    rank = ps.get_tp_group().rank_in_group
    try:
        with pytest.raises(SettingError, match=f"rank 1: {TABLE} must name a file"):
            _group({**env, TABLE: "/nowhere"} if rank == 1 else env)
    finally:
        os.environ.update(env)


def test_a_setting_that_is_wrong_on_one_rank_is_an_error_on_all(pools: Pools, env: Env) -> None:
    pools(2).run(_setting_body, env, tp=2)


def _asked_body(env: Env, asked: bool) -> list[str]:
    os.environ.update(env)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("parallel_state").addHandler(handler)
    device = Device()
    device.problem = "nothing compiles here"

    class Here(Row):
        def load(self) -> Any:
            return lambda context: StandInPeerMemory(context, device)

    row = Here("peer_memory", "", "", asked_for=lambda: asked)
    build_route(twin_of(ps.get_tp_group()).context, (row, CATALOG[-1])).close()
    logging.getLogger("parallel_state").removeHandler(handler)
    return [each for each in said if "requested" in each]


def test_what_was_asked_for_and_is_not_had_is_said_once(pools: Pools, env: Env) -> None:
    one, other = pools(2).run(_asked_body, env, True, tp=2)
    assert other == []
    assert len(one) == 1 and "runs without peer_memory, which was requested: rank 0: nothing compiles here" in one[0]
    assert pools(2).run(_asked_body, env, False, tp=2) == [[], []]


def _two_without_links_body(env: Env) -> list[str]:
    group, _ = _group(env, lambda device: setattr(device, "mesh", Vote(False, "PCIe only")))
    names = [each.name for each in group.route.communicators]
    group.route.close()
    return names


def test_two_ranks_need_no_nvlink(pools: Pools, env: Env) -> None:
    assert pools(2).run(_two_without_links_body, env, tp=2) == [["peer_memory", CATALOG[-1].name]] * 2


def _late_body(env: Env) -> tuple[str, tuple[int, ...], str, float, str]:
    group, _ = _group(env, timeout=Timeout(1.0))
    started = time.monotonic()
    try:
        if group.rank_in_group != 2:
            group.all_reduce(torch.ones(8))
        else:
            time.sleep(3)
        return "nothing", (), "", time.monotonic() - started, ""
    except CommunicationError as error:
        elapsed_s = time.monotonic() - started
        with pytest.raises(GroupFailedError) as again:
            group.all_reduce(torch.ones(8))
        with pytest.raises(CollectiveTimeoutError):
            group.route.communicators[0].all_reduce(torch.ones(8), "sum")
        return type(error).__name__, error.suspect_ranks, str(error), elapsed_s, str(again.value)
    finally:
        group.route.close()


def test_a_late_rank_is_named_at_the_deadline(env: Env) -> None:
    pool = WorkerPool(4)  # A failure here fails the tp group, whose shared memory the twin uses.
    try:
        answers = pool.run(_late_body, env, tp=4)
    finally:
        pool.kill()
    assert answers[2][0] == "nothing"
    for rank in (0, 1, 3):
        name, suspects, text, elapsed_s, again = answers[rank]
        assert (name, suspects) == ("CollectiveTimeoutError", (2,))
        assert "all_reduce_push_float32" in text and "waited on the device for global rank 2" in text
        assert "within 1 s" in text
        assert 0.9 < elapsed_s < 2.9
        assert "failed earlier" in again


def _unseen_body(env: Env) -> tuple[str, str]:
    group, _ = _group(env, timeout=Timeout(2.0))
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("parallel_state").addHandler(handler)
    made = group.route.communicators[0].group  # type: ignore[attr-defined]
    made._words[peer_group._REPORT] = 1 << 56 | (1 - group.rank_in_group) << 48
    deadline = time.monotonic() + 20
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(CollectiveTimeoutError) as error:
        made.all_reduce(torch.empty(8), torch.ones(8), "push")
    group.route.close()
    logging.getLogger("parallel_state").removeHandler(handler)
    return said[0], str(error.value)


def test_a_deadline_that_no_call_sees_is_in_the_log(pools: Pools, env: Env) -> None:
    for rank, (said, error) in enumerate(pools(2).run(_unseen_body, env, tp=2)):
        assert said == error
        assert f"waited on the device for global rank {1 - rank}" in said


def _dying_body(env: Env) -> tuple[str, tuple[int, ...], float]:
    ps.init_distributed_environment(backend="gloo")
    ps.initialize_model_parallel(4)
    group, _ = _group(env)
    group.all_reduce(torch.ones(8))
    group.barrier()
    started = time.monotonic()
    if group.rank_in_group == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while time.monotonic() < started + 30:
            group.all_reduce(torch.ones(8))
    except PeerDiedError as error:
        return type(error).__name__, error.suspect_ranks, time.monotonic() - started
    return "nothing", (), time.monotonic() - started


def test_a_rank_that_ends_frees_those_that_wait_for_it(env: Env) -> None:
    pool = WorkerPool(4)
    try:
        answers = pool.survivors(_dying_body, env, timeout_s=90)
    finally:
        pool.kill()
    assert sorted(answers) == [0, 1, 2]
    for name, suspects, elapsed_s in answers.values():
        assert (name, suspects) == ("PeerDiedError", (3,))
        assert elapsed_s < 10


def _stuck_body(env: Env) -> int:
    group, device = _group(env)
    group.all_reduce(torch.ones(8))
    device.streams.stuck = True
    peer_group._GOODBYE_S = 0.1
    group.route.close()
    group.route.close()
    peer_group._GOODBYE_S = 10.0
    way: Any = device.ways[0]
    return way.closed


def test_memory_that_the_device_may_still_use_stays_mapped(env: Env) -> None:
    pool = WorkerPool(2)
    try:
        assert pool.run(_stuck_body, env, tp=2) == [0, 0]
    finally:
        pool.kill()
    for left in Path(env[peer_stand_in.FOLDER]).iterdir():
        left.unlink()


def _closed_body(env: Env) -> None:
    group, _ = _group(env)
    communicator = group.route.communicators[0]
    assert isinstance(communicator, StandInPeerMemory)
    assert "push to 256 B, pull to 1 KiB, two_shot to 4 KiB" in str(communicator)
    listeners = len(group.context.watcher.on_death) if group.context.watcher else 0
    group.route.close()
    if group.context.watcher is not None:
        assert len(group.context.watcher.on_death) == listeners - 1
    with pytest.raises(UnsupportedError, match="has no GPU memory that its ranks share"):
        communicator.all_reduce(torch.ones(1), "sum")


def test_a_closed_one_is_of_no_use(pools: Pools, env: Env) -> None:
    pools(2).run(_closed_body, env, tp=2)


def _auto_body(env: Env, table: str, changes: dict[str, Any]) -> tuple[bool, str]:
    os.environ.update(env, **{TABLE: table, "PARALLEL_STATE_PEER_MEMORY": "auto"})
    try:

        def change(device: Device) -> None:
            if ps.get_tp_group().is_last_rank:
                for name, value in changes.items():
                    setattr(device, name, value)

        group, _ = _group({**env, TABLE: table}, change)
        try:
            return "peer_memory" in [each.name for each in group.route.communicators], group.explain()
        finally:
            group.route.close()
    finally:
        os.environ["PARALLEL_STATE_PEER_MEMORY"] = "on"


@pytest.mark.parametrize(
    ("row", "changes", "reason"),
    [
        ({}, {}, None),
        ({"one_gpu_each": False}, {}, "no measured row covers 2 ranks with a GPU for each"),
        ({"world_size": 4}, {}, "no measured row covers 2 ranks"),
        ({"link": "NV18"}, {}, "no measured row covers 2 ranks"),
        ({"driver": "580.2"}, {}, "driver 580.1"),
        ({}, {"torch": "2.12.0"}, "torch is 2.11.0 on rank 0, but 2.12.0 on rank 1"),
    ],
    ids=str,
)
def test_auto_takes_what_was_measured_under_the_same_conditions(
    pools: Pools, env: Env, tmp_path: Path, row: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    told = {"world_size": 2, "one_gpu_each": True, "link": "NV?", "proven_calls": 100_000}
    told |= {"driver": "580.1", "nccl": "2.28.9", "torch": "2.11.0", **row}
    measured = Thresholds(arch="9.0", source="a test", **BOUNDS, **told)
    peer_thresholds.dump([measured], tmp_path / "rows.json", "a test")
    for is_on, explained in pools(2).run(_auto_body, env, str(tmp_path / "rows.json"), changes, tp=2):
        assert is_on == (reason is None), explained
        assert reason is None or reason in explained, explained


def test_a_table_that_cant_be_read_says_so(tmp_path: Path) -> None:
    written = tmp_path / "good.json"
    row = Thresholds(arch="9.0", world_size=2, source="a test", **BOUNDS)
    peer_thresholds.dump([row], written, "a test")
    assert peer_thresholds.load(written).rows == (row,)
    good = json.loads(written.read_text())
    bad = [
        "", "[]", "{}", json.dumps({**good, "format": 2}), json.dumps({**good, "rows": [{"arch": "9.0"}]}),
        json.dumps({**good, "rows": [{**good["rows"][0], "push": -1}]}),
        json.dumps({**good, "rows": [{**good["rows"][0], "push": "1"}]}),
    ]  # fmt: skip
    for number, text in enumerate(bad):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(SettingError, match=f"{TABLE} must name a file"):
            peer_thresholds.load(path)
    with pytest.raises(SettingError, match="No such file"):
        peer_thresholds.load(tmp_path / "none.json")


def _untuned_body(env: Env) -> tuple[list[str], str]:
    group, _ = _group({**env, peer_stand_in.ARCH: "12.0"})
    os.environ.pop(peer_stand_in.ARCH)
    names, text = [each.name for each in group.route.communicators], group.explain()
    group.route.close()
    return names, text


def test_on_without_a_row_for_the_architecture_names_the_command(pools: Pools, env: Env) -> None:
    for names, text in pools(4).run(_untuned_body, env, tp=4):
        assert names == [CATALOG[-1].name]
        assert f"{env[TABLE]} has no row for 4 ranks with GPUs of architecture 12.0" in text
        assert "`python -m parallel_state tune` measures this machine" in text


def test_a_row_serves_fewer_ranks_too() -> None:
    rows = [Thresholds(arch="9.0", world_size=size, source="a test", **BOUNDS) for size in (4, 8)]
    table = peer_thresholds.Table(tuple(rows), Path("a test"), "")
    assert [table.find("9.0", size) for size in (3, 4, 5)] == [rows[0], rows[0], rows[1]]
    assert table.find("9.0", 9) is None and table.find("1.0", 2) is None
