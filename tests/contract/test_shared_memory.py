from __future__ import annotations

import functools
import hashlib
import itertools
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
from device_communicators.base import settings
from device_communicators.base.errors import SettingError
from device_communicators.cpu import native
from tests.contract.attempts import attempt, environment, world
from tests.extent import LONG
from tests.helpers.doors import call_op, op_arguments
from tests.helpers.slot_pages import touched_slots
from tests.workers import WorkerPool, WorkersFailedError

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
SOON_S = 10.0

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no shared-memory library: {error}", allow_module_level=True)


def _carried_by(group: ps.GroupCoordinator) -> str:
    return group.route.communicators[0].name


def _numbers(seed: int, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    return torch.randint(0, 4, (count,), generator=generator).to(dtype)


SIZES = (1, 7, 1000, 16384, 16385, 32768, 32769, 65536, 65537, 131072, 200_001, 524_288, 1_000_003)


def _one(group: ps.GroupCoordinator, kind: str, seed: int, count: int, dtype: torch.dtype) -> None:
    size, rank = group.world_size, group.rank_in_group
    inputs = [_numbers(seed, each, count, dtype) for each in range(size)]
    x = inputs[rank]
    if kind == "all_reduce":
        assert torch.equal(group.all_reduce(x), torch.stack(inputs).sum(0).to(dtype))
    elif kind == "all_reduce_":
        assert torch.equal(group.all_reduce_(x.clone(), "max"), torch.stack(inputs).amax(0))
    elif kind == "all_gather":
        assert torch.equal(group.all_gather(x), torch.cat(inputs))
    elif kind == "reduce_scatter":
        rows = count // size
        whole = torch.stack(inputs)[:, : rows * size].sum(0).to(dtype)
        assert torch.equal(group.reduce_scatter(x[: rows * size]), whole[rank * rows : (rank + 1) * rows])
    elif kind == "broadcast":
        src = seed % size
        assert torch.equal(group.broadcast(x, src), inputs[src])
    elif kind == "gather":
        dst = seed % size
        gathered = group.gather(x, dst)
        assert (gathered is None) == (rank != dst)
        assert gathered is None or torch.equal(gathered, torch.cat(inputs))
    elif kind == "scatter":
        src, rows = seed % size, count // size
        if rows:
            given = inputs[src][: rows * size] if rank == src else None
            got = group.scatter(given, src, 0)
            assert torch.equal(got, inputs[src][rank * rows : (rank + 1) * rows])
    elif kind == "all_to_all":
        rows = count // size
        got = group.all_to_all(x[: rows * size])
        assert torch.equal(got, torch.cat([each[rank * rows : (rank + 1) * rows] for each in inputs]))
    else:
        group.barrier()


KINDS = ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "broadcast", "gather", "scatter", "all_to_all",
         "barrier")  # fmt: skip


def _mixed(seed: int, calls: int, pauses: bool) -> str:
    with world(int(os.environ["WORLD_SIZE"])):
        group = ps.get_tp_group()
        draw, own = random.Random(seed), random.Random(seed * 64 + group.rank)
        for number in range(calls):
            kind, count = draw.choice(KINDS), draw.choice(SIZES)
            dtype = draw.choice((torch.float32, torch.bfloat16, torch.int64, torch.uint8))
            if draw.random() < 0.5:
                count = min(count, 1000)
            if pauses and own.random() < 0.1:
                time.sleep(own.random() * 0.004)
            try:
                _one(group, kind, seed * 1000 + number, count, dtype)
            except AssertionError as error:
                raise AssertionError(f"call {number}: {kind} of {count} {dtype}") from error
        return _carried_by(group)


@pytest.mark.parametrize(("ranks", "pauses"), [(2, True), (3, False), (4, True), (8, True)])
def test_long_mixed_runs(pools: Pools, ranks: int, pauses: bool) -> None:
    for seed in range(3 if LONG else 1):
        found = pools(ranks).run(_mixed, seed, 120 if ranks < 8 else 60, pauses, timeout_s=DEADLINE_S)
        assert found == ["shared_memory"] * ranks


def _every_kind() -> str:
    with world(int(os.environ["WORLD_SIZE"])):
        group = ps.get_tp_group()
        size, rank = group.world_size, group.rank_in_group
        for number, (kind, count) in enumerate(itertools.product(KINDS, (7, 5_000, 70_001))):
            for dtype in (torch.float32, torch.bfloat16):
                try:
                    _one(group, kind, number, count, dtype)
                except AssertionError as error:
                    raise AssertionError(f"{kind} of {count} {dtype}") from error
        sent = group.isend(torch.full((70_001,), rank), (rank + 1) % size)
        got = group.recv((70_001,), torch.int64, (rank - 1) % size)
        sent.wait()
        assert torch.equal(got, torch.full((70_001,), (rank - 1) % size))
        assert group.broadcast_object({"from": size - 1} if rank == size - 1 else None, size - 1) == {"from": size - 1}
        return _carried_by(group)


@pytest.mark.parametrize("ranks", [16, *([32] if LONG else [])])
def test_many_more_ranks_than_cores(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(_every_kind, timeout_s=DEADLINE_S) == ["shared_memory"] * ranks


def _huge_bytes() -> tuple[int, int, bool]:
    """Returns an error code (0 if this kernel has huge pages), the bytes mapped in them, and if sums are right."""
    with world(2):
        group = ps.get_tp_group()
        small, x = group.empty((1000,), torch.float32), group.empty((4 << 20,), torch.float32)
        small.fill_(1.0)
        x.fill_(1.0)
        right = bool((group.all_reduce_(x) == 2).all()) and bool((group.all_reduce_(small) == 2).all())
        rollup = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
        return native.load().ps_want_huge_pages(), int(rollup.split("ShmemPmdMapped:")[1].split()[0]) << 10, right


def test_huge_pages_where_asked_for() -> None:
    """Each rank has 16 MiB, and maps these and the 8 MiB of its peer's that it adds."""
    for _ in range(4):  # on a busy machine the kernel may have none at the moment
        asked = ps.launch(_huge_bytes, 2, env={"PARALLEL_STATE_HUGE_PAGES": "on"}, timeout=DEADLINE_S)
        assert all(right for *_, right in asked)
        if any(problem for problem, *_ in asked):
            pytest.skip("this kernel makes no huge pages of shared memory")
        if enough := all(huge_bytes >= 24 << 20 for _, huge_bytes, _ in asked):
            break
    assert enough, asked
    assert all(right and huge_bytes == 0 for _, huge_bytes, right in ps.launch(_huge_bytes, 2, timeout=DEADLINE_S))


INSTRUCTION_SETS = ("plain", "avx2", "avx512")


def _bits_of(instruction_sets: tuple[str, ...]) -> tuple[str, list[bytes]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    library = native.load()
    in_use = library.ps_instruction_set()
    if instruction_sets:
        library.ps_use_instruction_set(instruction_sets[rank % len(instruction_sets)].encode())
    found = []
    with world(size):
        group = ps.get_tp_group()
        used = library.ps_instruction_set().decode()
        assert used in group.explain()
        for dtype, count in itertools.product((torch.float32, torch.float16, torch.bfloat16), (1003, 40_000, 500_000)):
            x = torch.randn(4, count // 4, generator=torch.Generator().manual_seed(rank)).to(dtype)
            residual, weight = torch.full_like(x, 0.3), torch.linspace(-1, 1, count // 4).to(dtype)
            results = [group.all_reduce(x, op) for op in ("sum", "avg", "product")]
            results += [group.all_gather(group.reduce_scatter(x.repeat(size, 1), 0), 0), group.all_reduce_(x.clone())]
            results += group.all_reduce_add_rms_norm(x, residual, weight)
            found += [hashlib.sha256(bytes(each.view(torch.uint8).numpy())).digest() for each in results]
    library.ps_use_instruction_set(in_use)
    return used, found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_other_instruction_sets_have_the_same_bits(pools: Pools, ranks: int) -> None:
    asked = ((), *((each,) for each in INSTRUCTION_SETS), INSTRUCTION_SETS)
    results = [pools(ranks).run(_bits_of, each, timeout_s=DEADLINE_S) for each in asked]
    expected = results[0][0][1]
    assert all(bits == expected for result in results for _, bits in result)
    assert [used for used, _ in results[1]] == ["plain"] * ranks
    if results[0][0][0] != "plain":
        assert len({used for used, _ in results[-1]}) > 1


def test_a_variable_chooses_the_instruction_set() -> None:
    used = ps.launch(_bits_of, 2, args=((),), env={"PARALLEL_STATE_INSTRUCTIONS": "plain"}, timeout=DEADLINE_S)
    assert [name for name, _ in used] == ["plain", "plain"]


def test_an_instruction_set_that_the_processor_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.load()
    assert library.ps_use_instruction_set(b"another") == 1
    monkeypatch.setattr(settings.Setting, "get", lambda setting: "neon" if setting is settings.INSTRUCTIONS else None)
    with pytest.raises(
        SettingError, match=r"INSTRUCTIONS must be an instruction set of this processor, such as .*, but is neon"
    ):
        native.NativeLibrary(library.path, library.has_ops)


def _by_either_way() -> dict[str, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with world(size), torch._C._AutoDispatchBelowAutograd():  # above autograd, both registrations have the same kernels
        group = ps.get_tp_group()
        (token, key), cpu = op_arguments(group), torch.device("cpu")
        sizes = [each + 1 for each in range(size)]
        before = group.route.communicators[0].op_server.traffic(key)
        for turn, dim in itertools.product(range(size + 1), (0, 1)):
            shape = (size * 2, size * 2)
            xs = [torch.randn(shape, generator=torch.Generator().manual_seed(each)) for each in range(size)]
            uneven = [x.narrow(dim, 0, n).contiguous() for x, n in zip(xs, sizes, strict=True)]
            ops = torch.ops.parallel_state if turn in (rank, size) else torch.ops.parallel_state_python
            gathered = ops.gather(xs[rank], token, dim, 1, key)
            assert torch.equal(gathered, torch.cat(xs, dim) if rank == 1 else torch.empty(0))
            slices = xs[1].chunk(size, dim)
            given = xs[1] if rank == 1 else None
            mine = ops.scatter(given, token, list(slices[0].shape), torch.float32, cpu, dim, 1, key)
            assert torch.equal(mine, slices[rank])
            assert torch.equal(ops.all_gatherv(uneven[rank], token, dim, sizes, key), torch.cat(uneven, dim))
            whole = [torch.cat([x] * size, dim).narrow(dim, 0, sum(sizes)) for x in xs]
            total = functools.reduce(torch.add, whole).split(sizes, dim)[rank]
            assert torch.equal(ops.reduce_scatterv(whole[rank], token, dim, sizes, "sum", key), total)
            rows = [2] * size if turn % 2 == rank % 2 else None
            exchanged = ops.all_to_all(xs[rank], token, rows, rows, key)
            assert torch.equal(exchanged, torch.cat([x.split(2)[rank] for x in xs]))
        after = group.route.communicators[0].op_server.traffic(key)
        return {name: calls - before.get(name, (0, 0))[0] for name, (calls, _) in after.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_kernels_of_ops_and_their_twins_meet_each_other(pools: Pools, ranks: int) -> None:
    names = ("gather", "scatter", "all_gatherv", "reduce_scatterv", "all_to_all")
    for counts in pools(ranks).run(_by_either_way, timeout_s=DEADLINE_S):
        assert {name: counts.get(name, 0) for name in names} == dict.fromkeys(names, 4)


def _touched() -> list[list[float]]:
    size = int(os.environ["WORLD_SIZE"])
    with world(size):
        shares = touched_slots("parallel_state-", size)
        ps.get_world_group().barrier()
        return shares


def test_no_rank_touches_the_slots_of_another_at_the_start(pools: Pools) -> None:
    for rank, segments in enumerate(pools(4).run(_touched, timeout_s=DEADLINE_S)):
        assert segments
        for shares in segments:
            assert all(share < 0.1 for other, share in enumerate(shares) if other != rank), (rank, shares)


def _anywhere() -> list[tuple[int, int]]:
    with world(2):
        group = ps.get_tp_group()
        wrong = []
        for behind in (*range(0, 70, 3), 1, 31, 32, 4095):
            for count in (2047, 2048, 2049, 4113, 70_001):
                room = torch.zeros(count + 3 * 4096, dtype=torch.uint8)
                at = (behind - room.data_ptr()) % 4096 + 4096
                x, expected = room[at : at + count], _numbers(count, 1, count, torch.uint8)
                if group.rank == 1:
                    x.copy_(expected)
                group.broadcast_(x, 1)
                x += 1
                group.all_reduce_(x, "max")
                x -= 1
                if not torch.equal(x, expected) or room[:at].any() or room[at + count :].any():
                    wrong.append((behind, count))
        return wrong


def test_tensors_lie_anywhere_in_a_page(pools: Pools) -> None:
    assert pools(2).run(_anywhere, timeout_s=DEADLINE_S) == [[], []]


def _bits() -> list[int]:
    with world(4):
        group = ps.get_tp_group()
        found = []
        for count in (1000, 300_001):
            for dtype in (torch.float32, torch.bfloat16):
                torch.manual_seed(group.rank)
                x = torch.randn(count).mul(torch.logspace(-4, 4, count)).to(dtype)
                y = group.all_reduce(x)
                found.append(hash(y.view(torch.uint8).numpy().tobytes()))
        return found


def test_every_rank_has_the_same_bits(pools: Pools) -> None:
    with environment(PYTHONHASHSEED="0"):
        pool = WorkerPool(4)
        try:
            first, *others = pool.run(_bits, timeout_s=DEADLINE_S)
        finally:
            pool.kill()
    assert all(other == first for other in others)


def _late() -> tuple[str, list[int], float, str]:
    with world(4):
        group = ps.get_tp_group()
        narrow = ps.create_parallel_groups(ps.get_world_group(), {"tp": 4}, timeout=1.0).tp
        narrow.barrier()
        if group.rank == 2:
            time.sleep(2.5)
            told = attempt(narrow.all_reduce, torch.ones(10))
        else:
            told = attempt(narrow.all_reduce, torch.ones(10))
        after = attempt(narrow.all_reduce, torch.ones(10))
        group.barrier()
        return told.kind, list(told.suspect_ranks), told.seconds, after.kind


def test_a_rank_that_does_not_come_is_named(pools: Pools) -> None:
    outcomes = pools(4).run(_late, timeout_s=DEADLINE_S)
    for rank, (kind, suspects, seconds, after) in enumerate(outcomes):
        if rank != 2:
            assert kind == "CollectiveTimeoutError"
            assert suspects == [2]
            assert 0.9 < seconds < 1 + SOON_S
            assert after == "GroupFailedError"


def _dies(moment: str, count: int, outcomes: str) -> tuple[str, list[int], float]:
    with world(4):
        group = ps.get_tp_group()
        group.all_reduce(torch.ones(count))
        if group.rank == 3:
            if moment == "amid":
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                while True:
                    group.all_reduce(torch.ones(count))
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            told = attempt(group.all_reduce, torch.ones(count))
            if told.kind != "ok":
                Path(outcomes, str(group.rank)).write_text(repr(told), encoding="utf-8")
                return told.kind, list(told.suspect_ranks), told.seconds


@pytest.mark.parametrize(("moment", "count"), [("before", 10), ("amid", 10), ("amid", 300_000)])
def test_a_rank_that_dies_is_named_at_once(tmp_path: Path, moment: str, count: int) -> None:
    pool = WorkerPool(4)
    try:
        with pytest.raises(WorkersFailedError):
            pool.run(_dies, moment, count, str(tmp_path), timeout_s=DEADLINE_S)
    finally:
        pool.kill()
    outcomes = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert outcomes.keys() == {"0", "1", "2"}
    for text in outcomes.values():
        assert "kind='PeerDiedError'" in text
        assert "suspect_ranks=(3,)" in text


def _mismatch(first: str) -> tuple[str, str]:
    with world(2):
        group = ps.get_tp_group()
        group.barrier()
        calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "sizes": (lambda: group.all_reduce(torch.ones(10)), lambda: group.all_reduce(torch.ones(20))),
            "dtypes": (lambda: group.all_reduce(torch.ones(10)), lambda: group.all_reduce(torch.ones(10).int())),
            "ops": (lambda: group.all_reduce(torch.ones(10)), lambda: group.all_reduce(torch.ones(10), "max")),
            "kinds": (lambda: group.all_reduce(torch.ones(10)), group.barrier),
            "large": (lambda: group.all_reduce(torch.ones(100_000)), lambda: group.all_gather(torch.ones(100_000))),
            "sources": (lambda: group.broadcast(torch.ones(3), 0), lambda: group.broadcast(torch.ones(3), 1)),
        }
        told = attempt(calls[first][group.rank])
        return told.kind, told.text


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("sizes", ("all_reduce(sum) of 10 × float32", "all_reduce(sum) of 20 × float32")),
        ("dtypes", ("all_reduce(sum) of 10 × float32", "all_reduce(sum) of 10 × int32")),
        ("ops", ("all_reduce(sum) of 10 × float32", "all_reduce(max) of 10 × float32")),
        ("kinds", ("all_reduce(sum) of 10 × float32", "barrier")),
        ("large", ("all_reduce(sum) of 100000 × float32", "all_gather(dim 0) of 100000 × float32")),
    ],
)
def test_calls_that_differ_are_told_with_both_sides(pools: Pools, which: str, words: tuple[str, str]) -> None:
    outcomes = pools(2).run(_mismatch, which, timeout_s=DEADLINE_S)
    for kind, text in outcomes:
        assert kind == "CollectiveMismatchError", text
        assert all(word in text for word in words), text


def _routes() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with environment(PARALLEL_STATE_SHARED_MEMORY="off"), world(2):
        group = ps.get_tp_group()
        total = group.all_reduce(torch.ones(1)).item()
        facts["off"] = (total, "shared_memory: not used, PARALLEL_STATE_SHARED_MEMORY is off" in group.explain())
    before = _mapped_segments()
    with world(2):
        group = ps.get_tp_group()
        group.all_reduce(torch.ones(3))
        facts["on"] = "over a shared segment" in group.explain()
        group.barrier()
        own = {path.resolve().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
        facts["named"] = sorted(name for name in own if "parallel_state" in name and not name.endswith("(deleted)"))
        mapped = _mapped_segments() - before
        group.destroy()
        facts["mapped"] = (len(mapped), len(mapped & _mapped_segments()))
    return facts


def _mapped_segments() -> set[str]:
    """Returns inodes: the kernel can show adjacent mappings of one segment as one."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[4] for line in maps if "parallel_state-" in line}


def test_routes_and_what_is_left(pools: Pools) -> None:
    for facts in pools(2).run(_routes, timeout_s=DEADLINE_S):
        assert facts == {"off": (2.0, True), "on": True, "named": [], "mapped": (4, 2)}, (
            "only the world's segments may stay mapped"
        )


def _off_on_one() -> tuple[float, bool]:
    own = "off" if os.environ["RANK"] == "1" else "on"
    with environment(PARALLEL_STATE_SHARED_MEMORY=own), world(4):
        group = ps.get_tp_group()
        return group.all_reduce(torch.ones(1)).item(), "shared_memory: not used" in group.explain()


def test_a_rank_that_has_it_off_is_heard_by_all(pools: Pools) -> None:
    assert pools(4).run(_off_on_one, timeout_s=DEADLINE_S) == [(4.0, True)] * 4


def _destroyed_amid() -> str:
    with world(2) as everyone:
        group = ps.create_parallel_groups(everyone, {"tp": 2}, timeout=2.0).tp
        group.barrier()
        told: list[str] = []
        waiting = threading.Thread(target=lambda: told.append(attempt(group.all_reduce, torch.ones(3)).kind))
        if group.rank == 0:
            waiting.start()
            time.sleep(0.3)
            group.destroy()
            waiting.join(DEADLINE_S)
        everyone.barrier()
        if group.rank == 1:
            group.destroy()  # later, because the waiting thread's error would name an earlier exit
        return told[0] if told else ""


def test_a_group_that_is_destroyed_amid_a_call_keeps_its_memory(pools: Pools) -> None:
    assert pools(2).run(_destroyed_amid, timeout_s=DEADLINE_S) == ["GroupDestroyedError", ""]


def _interrupted() -> tuple[str, float, str]:
    with world(2) as everyone:
        group = ps.create_parallel_groups(everyone, {"tp": 2}, timeout=30.0).tp
        group.barrier()
        told, seconds, after = "", 0.0, ""
        if group.rank == 0:
            timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            started = time.monotonic()
            try:
                group.all_reduce(torch.ones(3))
            except KeyboardInterrupt as error:
                told, seconds = type(error).__name__, time.monotonic() - started
            after = attempt(group.all_reduce, torch.ones(3)).kind
        everyone.barrier()
        return told, seconds, after


def test_ctrl_c_ends_a_call_that_waits(pools: Pools) -> None:
    handler = pools(2).run(_default_sigint, timeout_s=DEADLINE_S)
    assert handler == [True] * 2
    (told, seconds, after), _ = pools(2).run(_interrupted, timeout_s=DEADLINE_S)
    assert told == "KeyboardInterrupt"
    assert seconds < 5
    assert after == "CommunicationError"


def _default_sigint() -> bool:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True


def _interrupted_amid_threads() -> tuple[str, str]:
    with world(2) as everyone:
        group = ps.create_parallel_groups(everyone, {"tp": 2}, timeout=30.0).tp
        group.barrier()
        told, other = "", []
        if group.rank == 0:
            begun = len(group.route.operations())

            def come_second() -> None:
                while len(group.route.operations()) == begun:
                    time.sleep(0.01)
                time.sleep(0.3)
                threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                other.append(attempt(group.all_reduce, torch.ones(3)).kind)

            second = threading.Thread(target=come_second)
            second.start()
            try:
                group.barrier()
            except BaseException as error:
                told = type(error).__name__
            second.join(DEADLINE_S)
        everyone.barrier()
        return told, "".join(other)


def test_ctrl_c_reaches_the_main_thread(pools: Pools) -> None:
    assert pools(2).run(_default_sigint, timeout_s=DEADLINE_S) == [True] * 2
    (told, other), _ = pools(2).run(_interrupted_amid_threads, timeout_s=DEADLINE_S)
    assert told == "KeyboardInterrupt"
    assert other == "UsageError"


def _wrong_splits() -> tuple[str, str, str]:
    with world(2):
        group = ps.get_tp_group()
        rows = 2 if group.rank == 0 else 3
        x = torch.ones(4, 2)
        direct = attempt(call_op, group, "all_to_all", x, [2, 2], [-1, 5])
        told = attempt(group.all_to_all, x, output_split_sizes=[rows, 4 - rows], input_split_sizes=[2, 2])
        return told.kind, told.text, direct.kind


def test_splits_that_differ_between_ranks(pools: Pools) -> None:
    for kind, text, direct in pools(2).run(_wrong_splits, timeout_s=DEADLINE_S):
        assert kind == "CollectiveMismatchError", text
        assert "all_to_all" in text
        assert direct == "ValueError"
