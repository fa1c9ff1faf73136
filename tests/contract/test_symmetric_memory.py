"""torch's symmetric memory: what is staged and carried, and when it is left out. Its kernels have a stand-in: gloo."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators import CATALOG, GroupContext, Row, build_route, register_route
from device_communicators.errors import UnsupportedError
from device_communicators.peer.symmetric_memory import SymmetricMemoryCommunicator
from device_communicators.peer.thresholds import Thresholds
from parallel_state.coordinator import GroupCoordinator
from tests import peer_stand_in
from tests.contract.carriers import twin_of
from tests.peer_stand_in import Device, FileWay
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
BYTES = "PARALLEL_STATE_SYMMETRIC_MEMORY_BYTES"
ROW = Thresholds("9.0", 4, *[0] * 8, symmetric=1000, multimem=True, measured=False, source="a test")


class TensorWay(FileWay):
    """Regions as tensors, with a handle like torch's; `multicast` is its address, 0 where there is none."""

    def __init__(self, multicast: int) -> None:
        super().__init__()
        self._multicast = multicast

    def allocate(self, context: GroupContext, size_bytes: int) -> Any:
        made: Any = super().allocate(context, size_bytes)
        plain_map = made.map

        def map_all(offers: Any) -> Any:
            addresses = plain_map(offers)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made.tensor = torch.frombuffer(made._maps[context.rank], dtype=torch.uint8)
            made.handle = SimpleNamespace(multicast_ptr=self._multicast)
            return addresses

        made.map = map_all
        return made


class OverGloo(SymmetricMemoryCommunicator):
    """As it is, but for torch's kernels; `staged` holds the lengths that they were given."""

    def __init__(self, context: GroupContext, multicast: int = 1, fails: bool = False) -> None:
        self.device = Device()
        super().__init__(context, self.device, ROW, ways=(TensorWay(multicast),))
        self.staged: list[int] = []
        self._fails = fails

    def _run(self, staged: Tensor) -> None:
        self.staged.append(staged.numel())
        if not self._fails:
            self.context.cpu_group.allreduce([staged]).wait()


def _group(folder: str, size_bytes: int, **changes: Any) -> tuple[GroupCoordinator, OverGloo | None]:
    own = {peer_stand_in.FOLDER: folder, BYTES: str(size_bytes), "PARALLEL_STATE_PEER_MEMORY_ALGORITHM": "auto"}
    os.environ.update(own)
    group = twin_of(ps.get_tp_group())

    class Here(Row):
        def load(self) -> Any:
            return lambda context: OverGloo(context, **changes)

    group.route = build_route(group.context, (Here("symmetric_memory", "", ""), CATALOG[-1]))
    register_route(group.route)
    first: Any = group.route.communicators[0]
    return group, first if isinstance(first, OverGloo) else None


def _carried_body(folder: str) -> tuple[list[int], str]:
    group, symmetric = _group(folder, 4096)
    assert symmetric is not None
    rank, size = group.rank_in_group, group.world_size
    symmetric.staged.clear()
    for count in (1, 3, 100, 248):
        x = torch.arange(count) % 5 + float(rank)
        expected = torch.arange(count) % 5 * size + float(sum(range(size)))
        assert torch.equal(group.all_reduce(x), expected)
        assert torch.equal(group.all_reduce(x.bfloat16()).float(), expected.bfloat16().float())
        y = torch.stack([x, x], 1)
        assert torch.equal(group.all_reduce_(y[:, 0]), expected)
        assert torch.equal(y[:, 1], x)
    staged = list(symmetric.staged)
    for other in (torch.ones(249), torch.ones(4, dtype=torch.float16), torch.ones(4, dtype=torch.int32)):
        assert float(group.all_reduce(other)[0]) == size
    group.all_reduce(torch.ones(4), "max")
    group.broadcast(torch.ones(4), 0)
    assert symmetric.staged == staged, "what it doesn't know was given to it"
    assert group.all_reduce(torch.ones(0)).numel() == 0
    normed, y = group.all_reduce_add_rms_norm(*(torch.ones(4, 16),) * 2, torch.ones(16))
    assert symmetric.staged[len(staged) :] == [64] and float(y[0, 0]) == size + 1 and normed.shape == (4, 16)
    with pytest.raises(UnsupportedError, match=f"set {BYTES}=1008 or more on all ranks"):
        symmetric.all_reduce(torch.ones(249), "sum")
    text = str(symmetric)
    group.route.close()
    return staged, text


def test_what_is_carried_is_staged_in_whole_vectors(pools: Pools, tmp_path: Path) -> None:
    for staged, text in pools(4).run(_carried_body, str(tmp_path), tp=4):
        assert staged == [4, 8, 4, 4, 8, 4, 100, 104, 100, 248, 248, 248]
        assert "multicast in the switches" in text and "no deadline on the device" in text
    assert list(tmp_path.iterdir()) == []


def _threads_body(folder: str) -> bool:
    """Two threads of a rank: the one's numbers aren't copied in before the other's are copied out."""
    group, symmetric = _group(folder, 4096)
    assert symmetric is not None
    inside, most, found = 0, 0, []

    def run(staged: Tensor) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    symmetric._run = run  # type: ignore[method-assign]

    def calls(value: float) -> None:
        for _ in range(5):
            found.append(symmetric.all_reduce(torch.full((8,), value), "sum").tolist() == [value] * 8)

    threads = [threading.Thread(target=calls, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group.route.close()
    return len(found) == 10 and all(found) and most == 1


def test_threads_of_a_rank_take_turns_in_the_staging_buffer(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(_threads_body, str(tmp_path), tp=2) == [True, True]


def test_torchs_ops_are_called_as_torch_declares_them() -> None:
    """Nothing here runs them: no GPU."""
    asked: list[Any] = []
    made = object.__new__(SymmetricMemoryCommunicator)
    made.context = SimpleNamespace(cpu_group=SimpleNamespace(group_name="a group"))  # type: ignore[assignment]
    for made._multimem, name in ((True, "multimem_all_reduce_"), (False, "two_shot_all_reduce_")):
        op = getattr(torch.ops.symm_mem, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.ops.symm_mem, name, lambda *arguments: asked.append(arguments))
            made._run(torch.ones(4))
        names = [(each.name, str(each.type)) for each in op.default._schema.arguments]
        assert names == [("input", "Tensor"), ("reduce_op", "str"), ("group_name", "str")]
    assert [(len(staged), *rest) for staged, *rest in asked] == [(4, "sum", "a group")] * 2


def _left_out_body(folder: str, what: str) -> tuple[str, str]:
    rank = ps.get_tp_group().rank_in_group
    size_bytes = 0 if what == "no memory" and rank == 1 else 4096
    group, symmetric = _group(folder, size_bytes, multicast=0 if what == "multicast" and rank == 1 else 1,
                              fails=what == "wrong")  # fmt: skip
    found = str(symmetric) if symmetric is not None else group.route.refusals["symmetric_memory"]
    group.route.close()
    return found, ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no memory", "no size is preferred for 2 ranks of architecture 9.0"),
        ("wrong", "rank 0: the first all_reduce gave a wrong result"),
        ("multicast", "torch's symmetric memory, two-shot"),
    ],
)
def test_what_one_rank_lacks_all_do_without(pools: Pools, tmp_path: Path, what: str, text: str) -> None:
    for found, _ in pools(2).run(_left_out_body, str(tmp_path), what, tp=2):
        assert found.startswith(text)
    assert list(tmp_path.iterdir()) == []
