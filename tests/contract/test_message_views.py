from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators.base.errors import InvalidArgumentError
from parallel_state import GroupCoordinator
from tests.contract.test_objects import DEADLINE_S, Pools, own_group, same

ROWS = 64 << 10


def _lies_in_shared_memory(x: Tensor) -> bool:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            if start <= x.data_ptr() < end:
                return "deleted" in line
    return False


def _backing_of(x: Tensor) -> str:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return next(
            line.split()[4]
            for line in maps
            if int(line.split("-")[0], 16) <= x.data_ptr() < int(line.split()[0].split("-")[1], 16)
        )


def _is_lent(group: GroupCoordinator, x: Tensor) -> bool:
    return _lies_in_shared_memory(x) and _backing_of(x) != _backing_of(group.empty([ROWS], torch.float32))


def _dict_of(step: int) -> dict[str, Any]:
    hidden = torch.arange(ROWS, dtype=torch.int32) + step
    return {"hidden": hidden, "small": torch.tensor([step]), "none": torch.empty(0, 3), "step": step}


def _exchange(group: GroupCoordinator, step: int, way: str, spec: Any, views: bool = True) -> dict[str, Any] | None:
    value, sends = _dict_of(step), group.rank_in_group == 0
    if way == "broadcast":
        if sends:
            group.broadcast_tensor_dict(value, 0, spec=spec)
            return None
        return group.broadcast_tensor_dict(None, 0, spec=spec, views=views)
    if sends:
        for dst in range(1, group.world_size):
            group.isend_tensor_dict(value, dst).wait() if way == "handle" else group.send_tensor_dict(
                value, dst, spec=spec
            )
        return None
    return (
        group.irecv_tensor_dict(0, views=views).wait()
        if way == "handle"
        else group.recv_tensor_dict(0, spec=spec, views=views)
    )


def _every_way() -> None:
    with own_group() as group:
        spec_of_step = lambda step: ps.TensorDictSpec.of(_dict_of(step))  # noqa: E731
        for way, has_spec in (
            ("send", False),
            ("send", True),
            ("handle", False),
            ("broadcast", False),
            ("broadcast", True),
        ):
            held, addresses, lent = [], set(), []
            for step in range(40):
                views = step % 8 != 7
                found = _exchange(group, step, way, spec_of_step(step) if has_spec else None, views)
                group.barrier()
                if found is None:
                    continue
                assert same(found, _dict_of(step)), (way, has_spec, step)
                held = [*held[-2:], (step, found)]
                assert all(same(each, _dict_of(earlier)) for earlier, each in held)
                lent.append(_is_lent(group, found["hidden"]))
                assert not lent[-1] or views
                if lent[-1]:
                    addresses.add(found["hidden"].data_ptr())
                    if way != "broadcast" or group.world_size == 2:
                        found["hidden"] += 0
            if group.rank_in_group:
                assert sum(lent) > 20, (way, has_spec, lent)
                assert len(addresses) < 12, (way, has_spec)
            del held


@pytest.mark.parametrize("ranks", [2, 3])
def test_views_in_every_way(pools: Pools, ranks: int) -> None:
    pools(ranks).run(_every_way, tp=1, timeout_s=DEADLINE_S)


def _held_by_the_reader() -> None:
    rows = 48 << 20 >> 2
    with own_group() as group:
        held: list[Tensor] = []
        for step in range(9):
            if group.rank_in_group == 0:
                group.send_tensor_dict({"x": torch.full((rows,), step, dtype=torch.int32)}, 1)
            else:
                found = group.recv_tensor_dict(0, views=True)
                assert found is not None
                held.append(found["x"])
                del found
            group.barrier()
        if group.rank_in_group == 1:
            assert [int(x[0]) for x in held] == [int(x[-1]) for x in held] == list(range(9))
            assert 3 <= sum(_is_lent(group, x) for x in held) <= 5
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
            gc.collect()
        group.barrier()
        if group.rank_in_group == 0:
            group.send_tensor_dict({"x": torch.ones(rows, dtype=torch.int32)}, 1)
        else:
            again = group.recv_tensor_dict(0, views=True)
            assert again is not None and _is_lent(group, again["x"])


def test_who_holds_many_gets_copies(pools: Pools) -> None:
    pools(2).run(_held_by_the_reader, tp=1, timeout_s=DEADLINE_S)


def _resident_shared_bytes() -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem"))


def _many() -> None:
    with own_group() as group:
        sent = {"x": torch.ones(128 << 8, dtype=torch.int32)}
        spec = ps.TensorDictSpec.of(sent)
        sizes = []
        for _ in range(2):
            found = None
            for _ in range(10_000):
                if group.rank_in_group == 0:
                    group.send_tensor_dict(sent, 1, spec=spec)
                else:
                    found = group.recv_tensor_dict(0, spec=spec, views=True)
            assert found is None or _is_lent(group, found["x"])
            del found
            group.barrier()
            sizes.append(_resident_shared_bytes())
        assert sizes[1] <= sizes[0] + (8 << 20), sizes


def test_many_messages_take_no_more_memory(pools: Pools) -> None:
    pools(2).run(_many, tp=1, timeout_s=DEADLINE_S)


def _outliving() -> None:
    with own_group() as group:
        for step in range(3):
            found = _exchange(group, step, "send", None)
            group.barrier()
        if found is not None:
            assert _is_lent(group, found["hidden"])
            child = os.fork()
            if child == 0:
                del found
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        group.barrier()
        later = [_exchange(group, step, "send", None) for step in range(10, 14)]
        assert found is None or (same(found, _dict_of(2)) and all(later))
        group.barrier()
    if found is not None:
        assert same(found, _dict_of(2)) and same(later[3], _dict_of(13))
        found["hidden"].zero_()


def test_views_outlive_their_group(pools: Pools) -> None:
    pools(2).run(_outliving, tp=1, timeout_s=DEADLINE_S)


def _out_and_views() -> None:
    with own_group() as group:
        if group.rank_in_group == 1:
            with pytest.raises(InvalidArgumentError, match="takes out= or views=True, not both"):
                group.recv_tensor_dict(0, out={"x": torch.empty(3)}, views=True)
        group.barrier()
    with own_group("route") as group:
        found = _exchange(group, 1, "send", None)
        assert found is None or same(found, _dict_of(1))


def test_out_with_views_is_refused(pools: Pools) -> None:
    pools(2).run(_out_and_views, tp=1, timeout_s=DEADLINE_S)


def _compiled() -> None:
    sent = {"x": torch.arange(ROWS, dtype=torch.int32)}
    spec = ps.TensorDictSpec.of(sent)
    with own_group() as group:

        def receive() -> Tensor:
            found = group.recv_tensor_dict(0, spec=spec, views=True)
            return found["x"]  # type: ignore[index]

        compiled = torch.compile(receive, fullgraph=True, backend="eager")
        for step in range(3):
            if group.rank_in_group == 0:
                group.send_tensor_dict(sent, 1, spec=spec)
                group.send_tensor_dict(sent, 1, spec=spec)
            else:
                assert torch.equal(receive(), sent["x"])
                found = compiled()
                assert torch.equal(found, sent["x"]) and not _is_lent(group, found), step
            group.barrier()


def test_compiled_code_gets_copies(pools: Pools) -> None:
    pools(2).run(_compiled, tp=1, timeout_s=DEADLINE_S)


def _opting_out() -> None:
    with own_group() as group:
        held: list[tuple[int, Any]] = []
        lent = 0
        for step in range(24):
            found = _exchange(group, step, "broadcast", None, views=group.rank_in_group != 1 or step % 6 != 0)
            group.barrier()
            held = [*held[-2:], (step, found)]
            assert found is None or all(same(each, _dict_of(earlier)) for earlier, each in held)
            lent += found is not None and _is_lent(group, found["hidden"])
        assert lent > 10 or group.rank_in_group == 0, lent


def test_one_of_two_readers_opts_out(pools: Pools) -> None:
    pools(3).run(_opting_out, tp=1, timeout_s=DEADLINE_S)


def _full_of_loans() -> None:
    with own_group() as group:
        held: list[Tensor] = []
        for step in range(5):
            if group.rank_in_group == 0:
                group.send_tensor_dict({"x": torch.full((16 << 20,), float(step))}, 1)
            else:
                found = group.recv_tensor_dict(0, views=True)
                assert found is not None
                held.append(found["x"])
            group.barrier()
        reduced = group.all_reduce(group.empty([1 << 20], torch.float32).fill_(1))
        assert float(reduced[0]) == float(reduced[-1]) == 2.0
        assert [float(x[-1]) for x in held] == [float(step) for step in range(len(held))]
        held.clear()
        for way in ("send", "broadcast"):
            with torch.inference_mode():
                in_inference = _exchange(group, 1, way, None)
            group.barrier()
            assert in_inference is None or in_inference["hidden"].is_inference(), (
                "under inference_mode, a view must be an inference tensor"
            )
        if group.rank_in_group == 0:
            group.send_tensor_dict(_dict_of(2), 1)


def test_loans_leave_room_and_may_stay_unread(pools: Pools) -> None:
    pools(2).run(_full_of_loans, tp=1, timeout_s=DEADLINE_S)


_ENDING = """
import sys
import torch
import parallel_state as ps
rank = int(sys.argv[1])
ps.init_distributed_environment(2, rank, sys.argv[2], timeout=20)
ps.initialize_model_parallel(2)
held = []
for group in ps.get_tp_group(), ps.get_tp_group().make_sub_group(range(2)):
    for step in range(3):
        if rank == 0:
            group.send_tensor_dict({"x": torch.full((1 << 16,), step)}, 1)
        else:
            held.append(group.recv_tensor_dict(0, views=True)["x"])
        group.barrier()
group.destroy()
sys.held = held  # until the interpreter takes its modules apart
ps.get_world_group().barrier()
print([int(x[-1]) for x in held])
"""


def test_views_at_the_end_of_the_interpreter() -> None:
    """Fresh interpreters, because forks end differently."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([sys.executable, "-c", _ENDING, str(rank), method], **pipes) for rank in range(2)]
    try:
        for rank, run in enumerate(runs):
            said, complained = run.communicate(timeout=DEADLINE_S)
            assert (run.returncode, complained) == (0, ""), (rank, complained)
            assert said == ("[0, 1, 2, 0, 1, 2]\n" if rank else "[]\n")
    finally:
        for run in runs:
            run.kill()
            run.wait()
