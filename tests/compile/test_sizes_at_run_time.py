"""Sizes that are a tensor's values, as in token dispatch, compile to one graph for all sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch._dynamo
from torch import Tensor

import parallel_state as ps
from tests.extent import LONG
from tests.workers import WorkerPool

ROWS = torch.tensor([[1, 2], [3, 1]])
SIZES = torch.tensor([2, 3])


def _dispatch(x: Tensor, rows: Tensor, sizes: Tensor) -> Tensor:
    tp = ps.get_tp_group()
    sent, received = rows[tp.rank_in_group].tolist(), rows[:, tp.rank_in_group].tolist()
    x = x[: sum(sent)]
    y = tp.all_to_all(x, output_split_sizes=received, input_split_sizes=sent) + 1
    out = y.new_empty(sum(sent), x.shape[1])
    if x.requires_grad:
        return tp.all_to_all(y, output_split_sizes=sent, input_split_sizes=received) * 2
    return tp.all_to_all(y, output_split_sizes=sent, input_split_sizes=received, out=out) * 2


def _uneven(x: Tensor, rows: Tensor, sizes: Tensor) -> Tensor:
    tp, lengths = ps.get_tp_group(), sizes.tolist()
    whole = tp.all_gatherv(x[: 2 + tp.rank_in_group], 0, lengths)
    return tp.reduce_scatterv(whole * 2, 0, lengths) + 1


def _found(x: Tensor, rows: Tensor, sizes: Tensor) -> Tensor:
    tp = ps.get_tp_group()
    y = torch.nonzero(sizes.repeat(2)).float() * x[:1, :1]
    z = tp.reduce_scatter(tp.all_gather(y, 0), 0) + tp.all_to_all(y) + tp.all_reduce(y) + tp.broadcast(y, 1)
    return z + tp.split(y, 0).sum() + ps.scatter_to_sequence_parallel_region(y).sum()


def _messages(x: Tensor, rows: Tensor, sizes: Tensor) -> Tensor:
    tp, (few, _) = ps.get_tp_group(), sizes.tolist()
    part = tp.scatter(x if tp.rank_in_group == 0 else None, 0, 0, size=[few, 3], dtype=x.dtype)
    tp.empty([few, 3], x.dtype).fill_(1)
    if tp.rank_in_group == 0:
        tp.send(torch.ones(2, 3), 1)
        return part
    return part + tp.recv([few, 3], torch.float32, 0)


def _body(backends: Sequence[str]) -> None:
    for function in (_dispatch, _uneven, _found, _messages):
        for backend in backends:
            for requires_grad in (False, True) if function is not _messages else (False,):
                torch._dynamo.reset()
                x = (torch.arange(12.0).view(4, 3) + ps.get_rank()).requires_grad_(requires_grad)
                expected = function(x, ROWS, SIZES)
                with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
                    found = torch.compile(function, fullgraph=True, backend=backend)(x, ROWS, SIZES)
                assert torch.equal(found, expected), function
                if requires_grad:
                    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
                    torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_sizes_known_at_run_time_only(pools: Callable[[int], WorkerPool]) -> None:
    pools(2).run(_body, ["aot_eager", "inductor"] if LONG else ["aot_eager"], tp=2, timeout_s=300)


def _wrong_body() -> list[str]:
    tp, told = ps.get_tp_group(), []
    x = torch.ones(4, 3)

    def known(x: Tensor, sizes: Tensor) -> Tensor:
        return tp.all_gatherv(x, 0, [4, -4])

    def read(x: Tensor, sizes: Tensor) -> Tensor:
        return tp.all_to_all(x, output_split_sizes=sizes.tolist(), input_split_sizes=sizes.tolist())

    for function, sizes in ((known, None), (read, torch.tensor([-1, 5])), (read, torch.tensor([1, 2]))):
        torch._dynamo.reset()
        try:
            with torch._dynamo.config.patch(capture_scalar_outputs=True):
                torch.compile(function, fullgraph=True, backend="aot_eager")(x, sizes)
            told.append("nothing")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    tp.barrier()
    return told


def test_wrong_sizes_raise_before_anything_is_sent(pools: Callable[[int], WorkerPool]) -> None:
    for known, *read in pools(2).run(_wrong_body, tp=2, timeout_s=120):
        assert "non-negative" in known
        assert all("RuntimeError" in each and "u" in each for each in read), read
