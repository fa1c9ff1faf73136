from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators import CATALOG, Route, Row, build_route, register_route
from device_communicators.base.errors import (
    CommunicationError,
    ConfigMismatchError,
    GroupFailedError,
    GroupNotInitializedError,
    InvalidArgumentError,
    ParallelStateError,
    PeerDiedError,
    UnsupportedError,
)
from device_communicators.base.member import Timeout
from tests.contract.attempts import attempt
from tests.contract.carriers import twin_of
from tests.helpers import nccl_stand_in
from tests.helpers.nccl_stand_in import StandInNccl
from tests.internals.divisions import INTERNAL_ERROR, INVALID_USAGE, REMOTE_ERROR, dividing
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
_ROW = Row("nccl", "tests.helpers.nccl_stand_in", "StandInNccl")
_TOLD = "the stand-in says so"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    if nccl_stand_in.compiler() is None:
        pytest.skip("there is no C compiler")
    return str(nccl_stand_in.build(tmp_path_factory.mktemp("nccl")))


def _communicator(library: str, **changes: Any) -> StandInNccl:
    os.environ.update({nccl_stand_in.LIBRARY: library, nccl_stand_in.FOLDER: str(Path(library).parent)})
    made = StandInNccl(dataclasses.replace(twin_of(ps.get_tp_group()).context, **changes))
    made.library.clear()  # type: ignore[attr-defined]
    return made


def _told(nccl: Any, call: Callable[[], object]) -> list[str]:
    nccl.library.clear()
    call()
    return nccl.library.log()


def _set_up_body(library: str) -> tuple[list[str], list[str], int]:
    nccl: Any = _communicator(library)
    assert "made at the first call" in str(nccl)
    assert nccl.all_reduce(torch.ones(3), "sum").tolist() == [2.0] * 3
    made = [line for line in nccl.library.log() if not line.startswith("GroupE")]
    assert "1 of NCCL's communicators" in str(nccl)
    assert f"NCCL 2.28.9 ({library})" in str(nccl)
    ended = _told(nccl, nccl.close)
    nccl.close()
    return made, ended, nccl.library.tell("live")


def test_the_ranks_meet_in_the_background_and_work_in_a_blocking_communicator(pools: Pools, stand_in: str) -> None:
    for rank, (made, ended, live) in enumerate(pools(2).run(_set_up_body, stand_in, tp=2)):
        assert made[: 1 - rank] == ["GetUniqueId"][: 1 - rank]
        begin, split, finalize, destroy, proof, call = made[1 - rank :]
        assert begin.startswith(f"CommInitRankConfig size=2 rank={rank} blocking=0 name=contract:")
        assert split == f"CommSplit color=0 key={rank} blocking=1"
        assert (finalize, destroy) == ("CommFinalize", "CommDestroy")
        assert proof == f"AllReduce count=1 dtype=7 op=0 inplace=1 stream={nccl_stand_in.CURRENT}"
        assert call == f"AllReduce count=3 dtype=7 op=0 inplace=0 stream={nccl_stand_in.CURRENT}"
        assert ended == ["CommFinalize", "CommDestroy"]
        assert live == 0


def _busy_body(library: str) -> list[str]:
    nccl: Any = _communicator(library)
    nccl.all_reduce(torch.ones(3), "sum")
    nccl.streams.stuck = True
    threading.Timer(0.7, setattr, (nccl.streams, "stuck", False)).start()
    return _told(nccl, nccl.close)


def test_the_end_waits_for_what_the_device_has_to_do(pools: Pools, stand_in: str) -> None:
    assert pools(2).run(_busy_body, stand_in, tp=2) == [["CommFinalize", "CommDestroy"]] * 2


def _calls_body(library: str) -> dict[str, list[str]]:
    nccl: Any = _communicator(library)
    nccl.set_up()
    rank = nccl.context.rank

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype)

    calls: dict[str, Callable[[], object]] = {
        "bf16": lambda: nccl.all_reduce(ones(4, 2, dtype=torch.bfloat16), "max"),
        "not contiguous": lambda: nccl.all_reduce_(ones(4, 2).t(), "sum"),
        "empty": lambda: nccl.all_reduce(ones(0, 3), "sum"),
        "float8": lambda: nccl.all_reduce(ones(4, dtype=torch.float8_e5m2), "sum"),
        "bool": lambda: nccl.all_reduce(ones(4, dtype=torch.bool), "sum"),
        "complex": lambda: nccl.all_reduce(ones(4, dtype=torch.complex64), "sum"),
        "int16": lambda: nccl.all_reduce(ones(4, dtype=torch.int16), "min"),
        "uint32": lambda: nccl.all_reduce_(torch.zeros(4, dtype=torch.uint32), "max"),
        "uint64": lambda: nccl.flat_reduce_scatter(*(torch.zeros(n, dtype=torch.uint64) for n in (2, 4)), "sum"),
        "average": lambda: nccl.all_reduce(ones(4), "avg"),
        "average of halves": lambda: nccl.all_reduce(ones(4, dtype=torch.float16), "avg"),
        "average of integers": lambda: nccl.all_reduce(ones(4, dtype=torch.int64), "avg"),
        "average of int16": lambda: nccl.all_reduce(ones(4, dtype=torch.int16), "avg"),
        "average of uint64": lambda: nccl.iall_reduce_(torch.zeros(4, dtype=torch.uint64), "avg").wait(),
        "product": lambda: nccl.all_reduce(ones(4, dtype=torch.int64), "product"),
        "started": lambda: nccl.iall_reduce_(ones(4), "sum").wait(),
        "reduce_scatter": lambda: nccl.reduce_scatter(ones(3, 4), 1, "sum"),
        "reduce_scatterv": lambda: nccl.reduce_scatterv(ones(4, 3), 0, [1, 3], "sum"),
        "all_gather": lambda: nccl.all_gather(ones(3, 2, dtype=torch.float16), 1),
        "all_gatherv": lambda: nccl.all_gatherv(ones(1 + 2 * rank, 2), 0, [1, 3]),
        "broadcast": lambda: nccl.broadcast(ones(3, dtype=torch.int16), 1),
        "all_to_all": lambda: nccl.all_to_all(ones(3, 2), [rank + 1] * 2, [1, 2]),
        "gather": lambda: nccl.gather(ones(3), 0, 1),
        "scatter": lambda: nccl.scatter(ones(4) if rank == 0 else None, ones(2), 0, 0),
    }
    told = {name: _told(nccl, call) for name, call in calls.items()}
    nccl.connect(1 - rank)
    nccl.wait_for_links()
    sent, out = (
        [ones(4, 2).t(), ones(0), ones(3, dtype=torch.int16)],
        [torch.zeros(2, 4), ones(0), torch.zeros(3).short()],
    )
    transfer = (lambda: nccl.run_list("send", sent, 1)) if rank == 0 else (lambda: nccl.run_list("recv", out, 0))
    told["pair of lists"] = _told(nccl, transfer)
    told["broadcast of a list"] = _told(
        nccl, lambda: nccl.run_list("broadcast_", out if rank else [x.contiguous() for x in sent], 0)
    )
    told["empty list"] = _told(nccl, lambda: nccl.run_list("broadcast_", [ones(0)], 0))
    assert rank == 0 or (out[0].eq(1).all() and out[2].eq(1).all())
    nccl.close()
    return told


def test_what_a_call_tells_nccl(pools: Pools, stand_in: str) -> None:
    def group(*calls: str) -> list[str]:
        return ["GroupStart", *(f"{call} stream=7" for call in calls), "GroupEnd"]

    one, other = pools(2).run(_calls_body, stand_in, tp=2)
    alike = {
        "bf16": ["AllReduce count=8 dtype=9 op=2 inplace=0 stream=7"],
        "not contiguous": ["AllReduce count=8 dtype=7 op=0 inplace=1 stream=7"],
        "empty": [],
        "float8": ["AllReduce count=4 dtype=7 op=0 inplace=1 stream=7"],
        "bool": ["AllReduce count=4 dtype=1 op=2 inplace=1 stream=7"],
        "complex": ["AllReduce count=8 dtype=7 op=0 inplace=1 stream=7"],
        "int16": ["AllReduce count=4 dtype=2 op=3 inplace=1 stream=7"],
        "uint32": ["AllReduce count=4 dtype=3 op=2 inplace=1 stream=7"],
        "uint64": ["ReduceScatter count=2 dtype=5 op=0 stream=7"],
        "average": ["AllReduce count=4 dtype=7 op=0 inplace=1 stream=7"],
        "average of halves": ["AllReduce count=4 dtype=7 op=0 inplace=1 stream=7"],
        "average of integers": ["AllReduce count=4 dtype=4 op=4 inplace=1 stream=7"],
        "average of int16": ["AllReduce count=4 dtype=2 op=0 inplace=1 stream=7"],
        "average of uint64": ["AllReduce count=4 dtype=5 op=4 inplace=1 stream=100"],
        "product": ["AllReduce count=4 dtype=4 op=1 inplace=0 stream=7"],
        "started": ["AllReduce count=4 dtype=7 op=0 inplace=1 stream=100"],
        "reduce_scatter": ["ReduceScatter count=6 dtype=7 op=0 stream=7"],
        "reduce_scatterv": group("Reduce count=3 dtype=7 op=0 root=0", "Reduce count=9 dtype=7 op=0 root=1"),
        "all_gather": ["AllGather count=12 dtype=1 stream=7"],
        "all_gatherv": group("Broadcast count=8 dtype=1 root=0", "Broadcast count=24 dtype=1 root=1"),
        "broadcast": ["Broadcast count=6 dtype=1 root=1 stream=7"],
    }
    assert {name: one[name] for name in alike} == alike
    assert {name: other[name] for name in alike} == alike
    assert one["all_to_all"] == group("Send count=16 dtype=1 peer=1", "Recv count=8 dtype=1 peer=1")
    assert other["all_to_all"] == group("Send count=8 dtype=1 peer=0", "Recv count=16 dtype=1 peer=0")
    assert (one["gather"], other["gather"]) == (
        group("Send count=12 dtype=1 peer=1"),
        group("Recv count=12 dtype=1 peer=0"),
    )
    assert (one["scatter"], other["scatter"]) == (
        group("Send count=8 dtype=1 peer=1"),
        group("Recv count=8 dtype=1 peer=0"),
    )
    assert one["pair of lists"] == group("Send count=32 dtype=1 peer=1", "Send count=6 dtype=1 peer=1")
    assert other["pair of lists"] == group("Recv count=32 dtype=1 peer=0", "Recv count=6 dtype=1 peer=0")
    whole = group("Broadcast count=32 dtype=1 root=0", "Broadcast count=6 dtype=1 root=0")
    assert one["broadcast of a list"] == other["broadcast of a list"] == whole
    assert one["empty list"] == other["empty list"] == []


def _pairs_body(library: str) -> tuple[list[float], list[str], int]:
    nccl: Any = _communicator(library)
    rank, size = nccl.context.rank, nccl.context.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    for peer in (following, previous):
        nccl.isend(torch.ones(1), peer, 0)
    for peer in (following, previous):
        nccl.recv(torch.ones(1), peer)
    nccl.wait_for_links()
    nccl.library.clear()
    got = [torch.empty(1000), torch.empty(3), torch.empty(2)]
    works = [nccl.isend(torch.full((1000,), float(rank)), following, 0), nccl.irecv_(got[0], previous, 0)]
    nccl.send(torch.full((6,), rank + 0.5)[::2], following)
    nccl.recv(got[1], previous)
    nccl.send(torch.full((2,), rank + 0.25), previous)
    nccl.recv(got[2], following)
    nccl.isend(torch.empty(0), following, 0).wait()
    for work in works:
        work.wait()
    told = nccl.library.log()
    assert all(bool((x == x[0]).all()) for x in got)
    nccl.close()
    return [float(x[0]) for x in got], told, nccl.library.tell("live")


def test_transfers_between_two_ranks_have_communicators_of_their_own(pools: Pools, stand_in: str) -> None:
    for rank, (got, told, live) in enumerate(pools(4).run(_pairs_body, stand_in, tp=4)):
        assert got == [(rank - 1) % 4, (rank - 1) % 4 + 0.5, (rank + 1) % 4 + 0.25]
        assert [line.split()[0] for line in told] == ["Send", "Recv", "Send", "Recv", "Send", "Recv"]
        streams = [int(line.rpartition("=")[2]) for line in told]
        assert streams[0] != streams[1] and min(streams[:2]) >= 100, (
            "started transfers need a separate stream per direction"
        )
        assert streams[2:] == [7] * 4
        following, previous = int(rank == 3), int(rank != 0)
        assert [int(line.split("peer=")[1].split()[0]) for line in told[:2]] == [1 - following, 1 - previous]
        assert live == 0


def _ring_body(library: str, ahead: bool) -> list[float]:
    os.environ.update({nccl_stand_in.LIBRARY: library, nccl_stand_in.FOLDER: str(Path(library).parent)})
    group = twin_of(ps.get_tp_group())
    group.route = build_route(dataclasses.replace(group.context, timeout=Timeout(20.0)), (_ROW, CATALOG[-1]))
    register_route(group.route)
    rank, size = group.rank_in_group, group.world_size
    following, previous = (rank + 1) % size, (rank - 1) % size
    sending = [group.isend(torch.full((4,), rank + 10.0 * number), following) for number in range(3)]
    if ahead:
        group.barrier()
    receiving = [group.irecv([4], torch.float32, previous) for _ in range(2)]
    got = [float(each.wait()[0]) for each in receiving]
    got.append(float(group.recv([4], torch.float32, previous)[0]))
    for each in sending:
        each.wait()
    assert all(each.is_completed() for each in sending)
    group.route.close()
    return [value - previous for value in got]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_ring_in_which_all_send_first_goes_on(pools: Pools, stand_in: str, ahead: bool) -> None:
    assert pools(3).run(_ring_body, stand_in, ahead, tp=3) == [[0.0, 10.0, 20.0]] * 3


def _unmet_peer_body(library: str) -> list[str]:
    os.environ.update({nccl_stand_in.LIBRARY: library, nccl_stand_in.FOLDER: str(Path(library).parent)})
    group = twin_of(ps.get_tp_group())
    group.route = build_route(dataclasses.replace(group.context, timeout=Timeout(2.0), host_memory=None), (_ROW,))
    register_route(group.route)
    kinds = []
    if group.rank_in_group == 0:
        sending = group.isend(torch.ones(2), 1)
        assert not sending.is_completed()
        kinds = [attempt(sending.wait).kind, attempt(group.all_reduce, torch.ones(1)).kind]
    else:
        time.sleep(4)
    group.route.close()
    return kinds


def test_a_peer_that_never_comes_is_told_at_the_wait(stand_in: str) -> None:
    pool = WorkerPool(2)
    try:
        first, _ = pool.run(_unmet_peer_body, stand_in, tp=2)
    finally:
        pool.kill()
    assert first == ["CollectiveTimeoutError", "GroupFailedError"]


def _late_body(library: str, what: str) -> tuple[str, str, float, list[str], int]:
    nccl: Any = _communicator(library, timeout=Timeout(1.0))
    if what == "never_ready":
        nccl.library.tell("never_ready", 1)
    else:
        nccl.library.tell("refuse_init", INVALID_USAGE)
    started = time.monotonic()
    try:
        nccl.all_reduce(torch.ones(3), "sum")
        raise AssertionError("the failing call returned")
    except ParallelStateError as error:
        return (
            type(error).__name__, str(error), time.monotonic() - started, nccl.library.log(), nccl.library.tell("live")
        )  # fmt: skip
    finally:
        nccl.library.tell("never_ready", 0)
        nccl.library.tell("refuse_init", 0)
        nccl.close()


def test_set_up_has_a_deadline(pools: Pools, stand_in: str) -> None:
    for name, text, elapsed_s, log, live in pools(2).run(_late_body, stand_in, "never_ready", tp=2):
        assert name == "CollectiveTimeoutError"
        assert "ncclCommInitRankConfig of group 'contract:" in text
        assert "within 1 s" in text
        assert 1.0 <= elapsed_s < 8.0
        assert log[-1] == "CommAbort"
        assert live == 0


def test_what_nccl_says_of_a_failure_is_told(pools: Pools, stand_in: str) -> None:
    for name, text, _, _, live in pools(2).run(_late_body, stand_in, "refuse_init", tp=2):
        assert name == "CommunicationError"
        for part in ("ncclInvalidUsage, invalid usage", _TOLD, "NCCL_MULTI_RANK_GPU_ENABLE=1", "rank"):
            assert part in text
        assert live == 0


def _failing_body(library: str, how: str) -> list[tuple[str, str]]:
    os.environ.update({nccl_stand_in.LIBRARY: library, nccl_stand_in.FOLDER: str(Path(library).parent)})
    group = twin_of(ps.get_tp_group())
    # No shared memory: a failed group would give up memory that later tests use.
    timeout_s = 5.0 if how == "stuck" else 30.0
    context = dataclasses.replace(group.context, timeout=Timeout(timeout_s), host_memory=None)
    group.route = build_route(context, (_ROW,))
    register_route(group.route)
    (nccl,) = group.route.communicators
    assert isinstance(nccl, StandInNccl)
    library_: Any = nccl.library
    assert group.all_reduce(torch.ones(1)).item() == 2
    watch: Any = nccl._watch
    if how == "call":
        library_.tell("fail_next", REMOTE_ERROR)
    elif how == "behind":
        handle: Any = nccl._handle
        library_.tell("async_error", handle.comm, INTERNAL_ERROR)
    else:
        nccl.streams.stuck = True
    until = time.monotonic() + 20
    while how != "call" and watch.failure is None and time.monotonic() < until:
        time.sleep(0.02)
    raised = []
    for _ in range(2):
        try:
            group.all_reduce(torch.ones(1))
            raised.append(("nothing", ""))
        except CommunicationError as error:
            raised.append((type(error).__name__, str(error)))
    library_.clear()
    group.route.close()
    return [*raised, ("ended", " ".join(library_.log())), ("live", str(library_.tell("live")))]


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("call", "CommunicationError", "all_reduce of group 'contract:"),
        ("behind", "CommunicationError", "ncclInternalError, internal error: the stand-in says so"),
        ("stuck", "CollectiveTimeoutError", "was not done on the device within 5 s"),
    ],
)
def test_a_failure_ends_the_group(pools: Pools, stand_in: str, how: str, kind: str, says: str) -> None:
    for first, second, ended, live in pools(2).run(_failing_body, stand_in, how, tp=2):
        assert first[0] == kind
        assert says in first[1]
        assert second[0] == GroupFailedError.__name__
        assert "CommDestroy" not in ended[1] or how == "call"
        assert live[1] == "0"


def _dying_body(library: str, operation: str) -> tuple[str, list[int], float]:
    ps.init_distributed_environment(backend="gloo")
    ps.initialize_model_parallel(4)
    nccl: Any = _communicator(library)
    nccl.set_up()
    if operation == "recv":
        for peer in range(3):
            if nccl.context.rank == 3:
                nccl.connect(peer)
        if nccl.context.rank != 3:
            nccl.connect(3)
    ps.get_tp_group().barrier()
    if nccl.context.rank == 3:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        if operation == "recv":
            nccl.recv(torch.ones(3), 3)
        else:
            nccl.all_reduce_(torch.ones(3), "sum")
    except PeerDiedError as error:
        return type(error).__name__, list(error.suspect_ranks), time.monotonic() - started
    finally:
        nccl.close()
    return "nothing", [], time.monotonic() - started


@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_a_rank_that_ends_is_named_and_nobody_waits_for_it(stand_in: str, operation: str) -> None:
    pool = WorkerPool(4)
    try:
        answers = pool.survivors(_dying_body, stand_in, operation, timeout_s=60)
    finally:
        pool.kill()
    assert sorted(answers) == [0, 1, 2]
    for name, suspects, elapsed_s in answers.values():
        assert (name, suspects) == ("PeerDiedError", [3])
        assert elapsed_s < 10


def _meeting_body(library: str) -> tuple[str, str]:
    rank = ps.get_tp_group().rank_in_group
    os.environ["STAND_IN_NCCL_VERSION"] = str(22809 + 94 * rank)
    nccl: Any = None
    try:
        nccl = _communicator(library)
        nccl.set_up()
    except ConfigMismatchError as error:
        return type(error).__name__, str(error)
    finally:
        del os.environ["STAND_IN_NCCL_VERSION"]
        nccl.close()
    return "", ""


def test_ranks_with_different_versions_are_told(pools: Pools, stand_in: str) -> None:
    for name, text in pools(2).run(_meeting_body, stand_in, tp=2):
        assert name == "ConfigMismatchError"
        assert "global rank 0 has 2.28.9 and global rank 1 has 2.29.3" in text


def _capture_body(library: str) -> list[str]:
    nccl: Any = _communicator(library)
    said = []
    nccl.streams.capturing = True
    for call in (lambda: nccl.all_reduce(torch.ones(1), "sum"), lambda: nccl.send(torch.ones(1), 1)):
        try:
            call()
        except GroupNotInitializedError as error:
            said.append(str(error))
    nccl.streams.capturing = False
    with nccl.capture():
        nccl.streams.capturing = True
        recorded = nccl.streams.recorded
        assert nccl.all_reduce(torch.ones(1), "sum").item() == 2
        assert nccl.streams.recorded == recorded
    nccl.close()
    return said


def _warm_body(library: str) -> tuple[list[str], list[str]]:
    os.environ.update({nccl_stand_in.LIBRARY: library, nccl_stand_in.FOLDER: str(Path(library).parent)})
    group = twin_of(ps.get_tp_group())
    group.route = build_route(group.context, (_ROW,))
    register_route(group.route)
    (nccl,) = group.route.communicators
    assert isinstance(nccl, StandInNccl)
    rank, size = group.rank_in_group, group.world_size
    told = []
    for _ in range(2):
        nccl.library.clear()  # type: ignore[attr-defined]
        with group.route.capture([(rank + 1) % size, (rank - 1) % size, rank]):
            told.append(list(dict.fromkeys(line.split()[0] for line in nccl.library.log())))  # type: ignore[attr-defined]
            nccl.streams.capturing = True
            sending = group.isend(torch.full((2,), float(rank)), (rank + 1) % size)
            assert group.recv([2], torch.float32, (rank - 1) % size).tolist() == [float((rank - 1) % size)] * 2
            sending.wait()
            group.broadcast(group.all_gather(group.all_reduce(torch.ones(1))), 1)
        nccl.streams.capturing = False
    group.route.close()
    return told[0], told[1]


def test_a_capture_finds_every_kind_of_call_and_every_peer_connected(pools: Pools, stand_in: str) -> None:
    for first, second in pools(4).run(_warm_body, stand_in, tp=4):
        assert {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "Send", "Recv"} <= set(first)
        assert second == [], "a second capture must prepare nothing"


def test_nothing_is_made_within_a_capture(pools: Pools, stand_in: str) -> None:
    for collective, transfer in pools(2).run(_capture_body, stand_in, tp=2):
        assert "was not used before the capture" in collective
        assert "was not used before the capture" in transfer


def _divided_body(library: str) -> tuple[list[float], list[str], int]:
    world = twin_of(ps.get_world_group()).context
    os.environ.update({nccl_stand_in.LIBRARY: library, nccl_stand_in.FOLDER: str(Path(library).parent)})
    whole = Route(world, [StandInNccl(world)], {})
    nccl: Any = whole.communicators[0]
    whole.set_up(divisible=True)
    assert whole.run("all_reduce", torch.ones(1), torch.ones(1), "sum", reduce_op="sum").item() == 4
    nccl.library.clear()
    ranks, color = {0: ((0, 2), 0), 1: ((1,), 1), 2: ((0, 2), 0), 3: ((), -1)}[world.rank]
    sums, part = [], None
    if len(ranks) > 1:
        config = {"maxCTAs": 3, "cgaClusterSize": 1}
        context = dataclasses.replace(
            world, name=f"{world.name}-part", ranks=ranks, rank=ranks.index(world.rank), nccl_config=config
        )
        part = Route(context, [StandInNccl(context)], {})
    whole.divide(part, color)
    told = nccl.library.log()
    for route in (part, whole):
        if route is not None:
            x = torch.ones(1)
            sums.append(route.run("all_reduce", x, x, "sum", reduce_op="sum").item())
            if route is part:
                told += route.communicators[0].library.log()  # type: ignore[attr-defined]
    if part is not None:
        part.close()
    whole.close()
    return sums, told, nccl.library.tell("live")


def test_parts_are_split_from_the_communicator_of_the_whole(pools: Pools, stand_in: str) -> None:
    answers = pools(4).run(_divided_body, stand_in, tp=4)
    assert [sums for sums, _, _ in answers] == [[2, 4], [4], [2, 4], [4]]
    for rank, (_, told, live) in enumerate(answers):
        assert not [line for line in told if line.startswith("CommInit")], "no part may make a communicator of its own"
        color, key = ((0, 0), (-1, 0), (0, 1), (-1, 0))[rank]
        assert told[0] == f"CommSplit color={color} key={key} blocking=1"
        assert ("Config cga=1 min=-2147483648 max=3" in told) == (rank in (0, 2))
        assert live == 0


def _not_divisible_body(library: str) -> bool:
    nccl: Any = _communicator(library)
    nccl.set_up()
    nccl.library.clear()
    nccl.divide(None, 0)
    quiet = nccl.library.log() == []
    nccl.close()
    return quiet


def test_what_was_made_at_a_first_call_is_not_divided(pools: Pools, stand_in: str) -> None:
    assert pools(2).run(_not_divisible_body, stand_in, tp=2) == [True, True]


def _newer_body(library: str) -> tuple[list[str], str]:
    nccl: Any = _communicator(library)
    nccl.set_up()
    said = ""
    nccl.library.clear()
    if "ncclCommSuspend" in nccl.library.missing:
        try:
            nccl.suspend()
        except UnsupportedError as error:
            said = str(error)
    else:
        nccl.suspend()
        try:
            nccl.all_reduce(torch.ones(1), "sum")
        except UnsupportedError as error:
            said = str(error)
        nccl.resume()
        nccl.resume()
        assert nccl.all_reduce(torch.ones(1), "sum").item() == 2
    suspended = nccl.library.log()
    nccl.close()
    return suspended, said


def test_suspended_communicators_say_so(pools: Pools, stand_in: str) -> None:
    for suspended, said in pools(2).run(_newer_body, stand_in, tp=2):
        assert suspended[:2] == ["CommSuspend flags=1", "CommResume"]
        assert len(suspended) == 3
        assert "is suspended; call resume()" in said


def test_what_a_version_lacks_is_refused_with_the_reason(pools: Pools, tmp_path: Path) -> None:
    if nccl_stand_in.compiler() is None:
        pytest.skip("there is no C compiler")
    library = str(nccl_stand_in.build(tmp_path, "-DWITHOUT_SUSPEND"))
    for _, said in pools(2).run(_newer_body, library, tp=2):
        assert "NCCL 2.28.9 has no ncclCommSuspend, which needs 2.29.7" in said


def _misuse_body(library: str) -> str:
    nccl: Any = _communicator(library)
    try:
        nccl.all_reduce(torch.ones(1, device="meta"), "sum")
    except InvalidArgumentError as error:
        return str(error)
    finally:
        nccl.close()
    return ""


def test_a_tensor_elsewhere_is_refused_before_anything_is_sent(pools: Pools, stand_in: str) -> None:
    for said in pools(2).run(_misuse_body, stand_in, tp=2):
        assert "must be on cpu, but one is on meta" in said


def _asked_to_divide_body(library: str) -> dict[str, tuple[int | None, int]]:
    os.environ.update({nccl_stand_in.LIBRARY: library, nccl_stand_in.FOLDER: str(Path(library).parent)})
    asked: dict[str, tuple[int | None, int]] = {}

    class Asked(Route):
        def divide(self, part: Route | None, color: int) -> None:
            name = "nothing" if part is None else part.context.name.partition(":")[0]
            asked[name] = (None if part is None else part.context.rank, color)

    ps.init_distributed_environment(backend="gloo")
    try:
        world = ps.get_world_group()
        world.route = Asked(world.context, world.route.communicators, {})
        with dividing():
            ps.initialize_model_parallel(2, 2, context_parallel_size=1)
        return asked
    finally:
        ps.destroy_distributed_environment()


def test_groups_that_are_made_at_start_are_divided_from_the_world(stand_in: str) -> None:
    pool = WorkerPool(4)
    try:
        answers = pool.run(_asked_to_divide_body, stand_in)
    finally:
        pool.kill()
    for rank, asked in enumerate(answers):  # order tp-dp-pp: tp groups are 0 1 and 2 3, pp groups 0 2 and 1 3
        assert asked["tp"] == (rank % 2, rank // 2)
        assert asked["pp"] == (rank // 2, rank % 2)
        assert asked["dp"] == (0, rank), "a group of one rank needs no communicator"


def _order_of_making_body() -> list[str]:
    log: list[str] = []

    class Asked(Route):
        def divide(self, part: Route | None, color: int) -> None:
            log.append("division")

    ps.init_distributed_environment(backend="gloo")
    try:
        world = ps.get_world_group()
        world.route = Asked(world.context, world.route.communicators, {})
        with dividing(lambda: log.append("process group")):
            ps.initialize_model_parallel(1, 3, eager=True)
        return log
    finally:
        ps.destroy_distributed_environment()


def test_ranks_in_no_group_of_a_kind_make_things_in_the_others_order() -> None:
    """The second of three stages is in no embedding group."""
    pool = WorkerPool(3)
    try:
        logs = pool.run(_order_of_making_body)
    finally:
        pool.kill()
    for log in logs:
        assert log.count("division") > 3
        assert all(log[at - 1] == "process group" for at, what in enumerate(log) if what == "division"), log
