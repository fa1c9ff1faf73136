"""`group.empty` in memory that is registered with NCCL; the stand-in logs offsets."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import parallel_state as ps
from device_communicators import CATALOG, Row, build_route, register_route
from device_communicators.base import settings
from device_communicators.base.member import Timeout
from device_communicators.cuda.nccl_library import INVALID_USAGE, UNHANDLED_CUDA_ERROR
from device_communicators.nccl import windows
from tests.contract.attempts import attempt, environment
from tests.contract.carriers import twin_of
from tests.helpers import nccl_stand_in
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
_ROW = Row("nccl", "tests.helpers.nccl_stand_in", "StandInNccl")
MIB = 1 << 20


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    if nccl_stand_in.compiler() is None:
        pytest.skip("there is no C compiler")
    return str(nccl_stand_in.build(tmp_path_factory.mktemp("nccl")))


@contextmanager
def _group(library: str, **changes: Any) -> Iterator[tuple[Any, Any]]:
    os.environ.update({nccl_stand_in.LIBRARY: library, nccl_stand_in.FOLDER: str(Path(library).parent)})
    group: Any = twin_of(ps.get_tp_group())
    group.route = build_route(dataclasses.replace(group.context, **changes), (_ROW, CATALOG[-1]))
    register_route(group.route)
    nccl: Any = group.route.communicators[0]
    nccl.library.clear()
    try:
        yield group, nccl
    finally:
        group.route.close()


def _lines(nccl: Any, *names: str) -> list[str]:
    return [line for line in nccl.library.log() if line.startswith(names)]


def _sum(group: Any, x: torch.Tensor) -> list[str]:
    (nccl, *_) = group.route.communicators
    nccl.library.clear()
    x.fill_(1)
    group.all_reduce_(x)
    assert x.flatten().tolist() == [float(group.world_size)] * x.numel()
    return _lines(nccl, "AllReduce")


def _is_registered(group: Any, x: torch.Tensor) -> bool:
    return any("symmetric" in line for line in _sum(group, x))


def _window_body(library: str) -> tuple[list[str], list[str], str, str]:
    with _group(library) as (group, nccl):
        before = group.explain()
        x = group.empty([3, 4])
        made = _lines(nccl, "Mem", "CommWindow", "AllReduce")
        y = group.empty((5,), torch.bfloat16, device=torch.device("cpu"))
        assert (x.shape, x.dtype, x.is_contiguous(), x.requires_grad) == ((3, 4), torch.float32, True, False)
        assert (y.shape, y.dtype, y.data_ptr() - x.data_ptr()) == ((5,), torch.bfloat16, 512)
        assert x.untyped_storage().nbytes() == 48
        assert group.empty([0, 3]).shape == (0, 3)
        assert made == _lines(nccl, "Mem", "CommWindow", "AllReduce"), "the second has room in the window of the first"
        said = [*_sum(group, x), *_sum(group, y), *_sum(group, x[1]), *_sum(group, torch.empty(4))]
        return made, said, before, group.explain()


def test_tensors_of_empty_lie_in_a_registered_window(pools: Pools, stand_in: str) -> None:
    for made, said, before, after in pools(2).run(_window_body, stand_in, tp=2):
        assert made == [
            "AllReduce count=1 dtype=7 op=0 inplace=1 stream=7",
            f"MemAlloc {16 * MIB}",
            f"CommWindowRegister size={16 * MIB} flags=1",
            "AllReduce count=1 dtype=7 op=0 inplace=1 stream=7 symmetric at 0",
        ], "the communicator is proven, then the window"
        assert said == [
            "AllReduce count=12 dtype=7 op=0 inplace=1 stream=7 symmetric at 0",
            "AllReduce count=5 dtype=9 op=0 inplace=1 stream=7 symmetric at 512",
            "AllReduce count=4 dtype=7 op=0 inplace=1 stream=7 symmetric at 16",
            "AllReduce count=4 dtype=7 op=0 inplace=1 stream=7",
        ]
        assert "tensors of empty in registered memory, 0 MiB in 0 windows" in before
        assert "tensors of empty in registered memory, 16 MiB in 1 windows" in after


def _reuse_body(library: str) -> list[int]:
    with _group(library) as (group, nccl):
        keeps = group.rank_in_group == 1
        first = group.empty([100])
        base = first.data_ptr()
        view, first = first[50:], None
        second = group.empty([100])
        del view
        third = group.empty([100])
        at = [second.data_ptr() - base, third.data_ptr() - base]
        kept = third if keeps else None
        del third
        fourth = group.empty([100])
        at.append(fourth.data_ptr() - base)
        del kept
        at.append(group.empty([100]).data_ptr() - base)
        assert nccl.streams.ordered == []
        nccl.streams.number = 8
        group.empty([100])
        nccl.streams.number = 7
        group.empty([100])
        assert nccl.streams.ordered == [(8, 7), (7, 8)]
        return at


def test_memory_is_used_again_once_all_ranks_have_let_go_of_it(pools: Pools, stand_in: str) -> None:
    assert pools(2).run(_reuse_body, stand_in, tp=2) == [[512, 0, 1024, 0]] * 2


def _large_body(library: str) -> tuple[list[str], list[bool], str]:
    with environment(**{settings.SYMMETRIC_BYTES.name: str(24 * MIB)}), _group(library) as (group, nccl):
        kept = [group.empty([n * MIB], torch.uint8) for n in (17, 1, 4, 3)]
        return _lines(nccl, "MemAlloc"), [_is_registered(group, x[:7]) for x in kept], group.explain()


def test_a_setting_limits_the_memory(pools: Pools, stand_in: str) -> None:
    for made, registered, said in pools(2).run(_large_body, stand_in, tp=2):
        assert made == [f"MemAlloc {18 * MIB}", f"MemAlloc {6 * MIB}"]
        assert registered == [True, True, True, False]
        assert "24 MiB in 2 windows" in said


def _close_body(library: str) -> list[Any]:
    found: list[Any] = []
    windows.free_closed()
    with _group(library) as (group, nccl):
        x = group.empty([4])
        group.empty([20 * MIB], torch.uint8)
        nccl.library.clear()
    found.append(nccl.library.log())
    found.append(nccl.library.tell("memory"))
    x.fill_(3)
    assert x.tolist() == [3.0] * 4
    del x
    windows.free_closed()
    found.append(nccl.library.tell("memory"))
    found.append(len(windows._CLOSED))
    return found


def test_the_end_deregisters_and_frees_what_no_tensor_uses(pools: Pools, stand_in: str) -> None:
    for log, left, at_last, listed in pools(2).run(_close_body, stand_in, tp=2):
        assert log == [*["CommWindowDeregister"] * 2, "CommFinalize", "CommDestroy", "MemFree"]
        assert (left, at_last, listed) == (1, 0, 0)


def _refused_body(library: str, how: str, on_ranks: tuple[int, ...]) -> tuple[bool, list[str], str, int]:
    with _group(library) as (group, nccl):
        if group.rank_in_group in on_ranks:
            nccl.library.tell(how, UNHANDLED_CUDA_ERROR)
        try:
            x = group.empty([8])
        finally:
            nccl.library.tell(how, 0)
        registered = _is_registered(group, x)
        nccl.library.clear()
        y = group.empty([8])
        again = _lines(nccl, "Mem", "CommWindow")
        assert _is_registered(group, y) == (how == "refuse_memory")
        said = group.explain()
        del x, y
    return registered, again, said, nccl.library.tell("live") + nccl.library.tell("memory")


@pytest.mark.parametrize(
    ("how", "ranks", "why"),
    [
        ("refuse_window", (1,), "global rank 1: ncclCommWindowRegister failed: ncclUnhandledCudaError"),
        ("refuse_window", (0, 1, 2), "global rank 0: ncclCommWindowRegister failed"),
        ("no_window", (0, 1, 2), "gave no window: is NCCL_CUMEM_ENABLE"),
    ],
)
def test_where_a_rank_cant_register_all_have_ordinary_memory(
    pools: Pools, stand_in: str, how: str, ranks: tuple[int, ...], why: str
) -> None:
    for registered, again, said, live in pools(3).run(_refused_body, stand_in, how, ranks, tp=3):
        assert not registered
        assert again == [], "they know"
        assert "tensors of empty in ordinary memory" in said
        assert why in said
        assert live == 0


def test_a_rank_without_memory_is_asked_again(pools: Pools, stand_in: str) -> None:
    for registered, again, said, live in pools(2).run(_refused_body, stand_in, "refuse_memory", (1,), tp=2):
        assert not registered
        assert again == [f"MemAlloc {16 * MIB}", f"CommWindowRegister size={16 * MIB} flags=1"]
        assert "tensors of empty in registered memory" in said
        assert live == 0


def _full_body(library: str) -> bool:
    with _group(library) as (group, nccl):
        if group.rank_in_group == 1:
            nccl.library.tell("refuse_memory", UNHANDLED_CUDA_ERROR)
            nccl.streams.on_release = lambda: nccl.library.tell("refuse_memory", 0)
        return _is_registered(group, group.empty([8]))


def test_a_full_device_gets_what_torch_keeps(pools: Pools, stand_in: str) -> None:
    assert pools(2).run(_full_body, stand_in, tp=2) == [True, True]


def _late_body(library: str, how: str) -> tuple[str, str, float]:
    # A failed group gives up host memory, which later tests use.
    with _group(library, timeout=Timeout(1.0), host_memory=None) as (group, nccl):
        nccl.set_up()
        started = time.monotonic()
        if group.rank_in_group == 1 and how == "empty":
            time.sleep(2.5)
            return "", "", 0.0
        if group.rank_in_group == 1:
            nccl.library.tell("leave_window", INVALID_USAGE)
        found = attempt(group.empty, [8])
        elapsed_s = time.monotonic() - started
        nccl.library.tell("leave_window", 0)
        assert attempt(group.empty, [8]).kind == "GroupFailedError"
        return found.kind, found.text, elapsed_s


@pytest.mark.slow
def test_a_rank_that_never_comes_ends_the_wait(stand_in: str) -> None:
    pool = WorkerPool(2)
    try:
        (kind, text, elapsed_s), _ = pool.run(_late_body, stand_in, "empty", tp=2)
    finally:
        pool.kill()
    assert kind == "CollectiveTimeoutError", text
    assert "empty" in text
    assert 0.9 < elapsed_s < 8


@pytest.mark.slow
def test_a_rank_that_leaves_the_registration_ends_the_others_wait(stand_in: str) -> None:
    pool = WorkerPool(2)
    try:
        answers = pool.run(_late_body, stand_in, "register", tp=2)
    finally:
        pool.kill()
    assert answers[0][0] == "CollectiveTimeoutError", answers
    assert "empty of group" in answers[0][1]
    for kind, text, elapsed_s in answers:
        assert kind.endswith("Error"), text
        assert 0.9 < elapsed_s < 8


def _wrong_body(library: str) -> tuple[str, str]:
    with _group(library, host_memory=None) as (group, nccl):
        nccl.set_up()
        nccl.library.tell("wrong_window", 1)
        found = attempt(group.empty, [8])
        nccl.library.tell("wrong_window", 0)
        return found.kind, found.text


def test_a_window_is_proven_by_its_first_sum(stand_in: str) -> None:
    pool = WorkerPool(2)
    try:
        answers = pool.run(_wrong_body, stand_in, tp=2)
    finally:
        pool.kill()
    for kind, text in answers:
        assert kind == "CommunicationError"
        assert "returned 1 instead of 2" in text
        assert "PARALLEL_STATE_SYMMETRIC_BYTES=0 turns off registered memory" in text


def _ordinary_body(library: str) -> tuple[list[str], str, str]:
    with _group(library) as (group, nccl):
        nccl.set_up()
        nccl.library.clear()
        nccl.streams.capturing = True
        captured = group.empty([4])
        nccl.streams.capturing = False
        compiled = torch.compile(lambda: group.empty([4]), backend="eager", fullgraph=True)()
        with FakeTensorMode():
            fake = group.empty([4])
        meta = group.empty([4], device=torch.device("meta"))
        assert captured.shape == compiled.shape == fake.shape == meta.shape == (4,)
        quiet = nccl.library.log()
        assert not _is_registered(group, captured)
        assert not _is_registered(group, compiled)
        x = group.empty([4 + group.rank_in_group])
        assert not _is_registered(group, x[:4]), "different sizes"
        assert _is_registered(group, group.empty([4]))
        nccl._windows._ledger.digest += group.rank_in_group
        assert not _is_registered(group, group.empty([4]))
        return quiet, group.explain(), type(fake).__name__


def test_where_memory_is_ordinary(pools: Pools, stand_in: str) -> None:
    for quiet, said, fake in pools(2).run(_ordinary_body, stand_in, tp=2):
        assert quiet == []
        assert "ordinary memory: a rank was interrupted in an earlier call" in said
        assert fake == "FakeTensor"


def _lacking_body(library: str, limits: tuple[str, str]) -> tuple[str, str]:
    rank = ps.get_tp_group().rank_in_group
    with environment(**{settings.SYMMETRIC_BYTES.name: limits[rank]}), _group(library) as (group, _):
        before = group.explain()
        assert not _is_registered(group, group.empty([4]))
        return before, group.explain()


def test_what_a_version_lacks_is_in_explain(pools: Pools, tmp_path: Path) -> None:
    if nccl_stand_in.compiler() is None:
        pytest.skip("there is no C compiler")
    library = str(nccl_stand_in.build(tmp_path, "-DWITHOUT_WINDOWS"))
    why = "NCCL 2.28.9 has no ncclMemAlloc"
    for before, after in pools(2).run(_lacking_body, library, ("1000000000", "1000000000"), tp=2):
        assert f"ordinary memory: {why}" in before
        assert f"ordinary memory: global rank 0: {why}" in after


def test_a_rank_that_turned_it_off_turns_it_off_for_all(pools: Pools, stand_in: str) -> None:
    for _, after in pools(2).run(_lacking_body, stand_in, ("1000000000", "0"), tp=2):
        assert "ordinary memory: global rank 1: PARALLEL_STATE_SYMMETRIC_BYTES is 0" in after


def _error_of(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(ps.CommunicationError) as raised:
        call()
    return type(raised.value).__name__, str(raised.value)


def _debug_body(library: str) -> list[tuple[str, str]]:
    with _group(library) as (group, nccl):
        memory = nccl.context.host_memory
        memory.debug = True
        try:
            rank = group.rank_in_group
            x, out = group.empty([8]).zero_(), group.empty([16]).zero_()
            nccl.flat_all_reduce_(x, "sum")
            nccl.flat_all_gather(out.view(2, 8), out.view(2, 8)[rank])
            nccl.flat_reduce_scatter(out.view(2, 8)[rank], out, "sum")
            mine = x[4 * rank : 4 * rank + 4]
            plain = torch.zeros(16)
            calls = (
                lambda: nccl.flat_all_reduce_(mine, "sum"),
                lambda: nccl.flat_all_gather(out if rank else plain, x),
                lambda: nccl.flat_reduce_scatter(mine[:1] if rank else plain[:1], mine[:2], "sum"),
            )
            return [_error_of(call) for call in calls]
        finally:
            memory.debug = False


def test_debug_mode_finds_ranks_that_pass_different_parts(pools: Pools, stand_in: str) -> None:
    for reduced, gathered, scattered in pools(2).run(_debug_body, stand_in, tp=2):
        for kind, _ in (reduced, gathered, scattered):
            assert kind == "CollectiveMismatchError"
        assert "window 0 at byte 16" in reduced[1]
        assert "All ranks must pass the same part of a tensor that the same call of group.empty()" in reduced[1]
        assert "ordinary memory" in gathered[1]
