from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from tests.contract.cases import MOVABLE, Form, any_bytes, bytes_of
from tests.gpu.ranks import CARRIERS, GpuRanks, device, synchronize

Gpus = Callable[[int], GpuRanks]


def batch(seed: int) -> dict[str, Any]:
    where = device()
    found: dict[str, Any] = {
        str(dtype): any_bytes(Form((3, 5)), dtype, seed).to(where) for dtype in MOVABLE if dtype.itemsize < 16
    }
    hidden = torch.arange(24, dtype=torch.float32, device=where).view(4, 6) + seed
    return {
        **found,
        "hidden": hidden,
        "transposed": hidden.t(),
        "empty": torch.empty(0, 3, device=where),
        "on the host": torch.arange(5) + seed,
        "number": seed,
        "names": ["a", "b"],
        "nothing": None,
    }


def plain(seed: int) -> dict[str, Any]:
    shape = {"dtype": torch.bfloat16, "device": device()}
    return {"hidden": torch.full((8, 16), seed, **shape), "residual": torch.full((8, 16), -seed, **shape), "steps": 7}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].device == value.device, name
            assert found[name].shape == value.shape, name
            assert found[name].dtype == value.dtype, name
            assert torch.equal(bytes_of(found[name].cpu()), bytes_of(value.cpu())), name
        else:
            assert found[name] == value, name


def _broadcast_body() -> None:
    group = ps.get_tp_group()
    for src in range(group.world_size):
        mine = group.rank_in_group == src
        same(group.broadcast_tensor_dict(batch(src) if mine else None, src), batch(src))
        spec = ps.TensorDictSpec.of(plain(src))
        same(group.broadcast_tensor_dict(plain(src) if mine else None, src, spec=spec), plain(src))
        assert group.broadcast_object({"step": src} if mine else None, src) == {"step": src}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("world", "tp", "pp"), [(2, 2, 1), (4, 2, 2)])
def test_broadcast(gpus: Gpus, carrier: str, world: int, tp: int, pp: int) -> None:
    gpus(world).run_over(carrier, _broadcast_body, tp=tp, pp=pp)


def _pipeline_body() -> None:
    tp, pp = ps.get_tp_group(), ps.get_pp_group()
    between = tp if tp.world_size > 1 else None
    spec = ps.TensorDictSpec.of(plain(0))
    for seed in range(3):
        if pp.is_first_rank:
            pp.send_tensor_dict(batch(seed))
            pp.send_tensor_dict(plain(seed), all_gather_group=between)
            pp.send_tensor_dict(plain(seed), spec=spec)
            pp.send_tensor_dict(plain(seed), all_gather_group=between, spec=spec)
            sending = pp.isend_tensor_dict(batch(seed))
            sending.wait()
            pp.send_object(["done", seed])
        else:
            same(pp.recv_tensor_dict(), batch(seed))
            same(pp.recv_tensor_dict(all_gather_group=between), plain(seed))
            same(pp.recv_tensor_dict(spec=spec), plain(seed))
            same(pp.recv_tensor_dict(all_gather_group=between, spec=spec), plain(seed))
            same(pp.irecv_tensor_dict().wait(), batch(seed))
            assert pp.recv_object() == ["done", seed]
    synchronize()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("world", "tp", "pp"), [(2, 1, 2), (4, 2, 2)])
def test_send_and_receive(gpus: Gpus, carrier: str, world: int, tp: int, pp: int) -> None:
    gpus(world).run_over(carrier, _pipeline_body, tp=tp, pp=pp)
