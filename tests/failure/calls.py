from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import parallel_state as ps


def calls_on(group: ps.GroupCoordinator) -> dict[str, Callable[[], Any]]:
    x, peer = torch.ones(4), (group.rank_in_group + 1) % group.world_size
    return {
        "all_reduce": lambda: group.all_reduce(x),
        "all_gather": lambda: group.all_gather(x),
        "reduce_scatter": lambda: group.reduce_scatter(x),
        "broadcast": lambda: group.broadcast(x),
        "all_to_all": lambda: group.all_to_all(x),
        "barrier": group.barrier,
        "send": lambda: group.send(x, peer),
        "recv": lambda: group.recv(x.shape, x.dtype, peer),
        "isend": lambda: group.isend(x, peer),
        "all_reduce_async": lambda: group.all_reduce_async(x),
        "broadcast_object": lambda: group.broadcast_object({"a": 1}),
        "send_object": lambda: group.send_object(1, peer),
        "recv_object": lambda: group.recv_object(peer),
        "send_tensor_dict": lambda: group.send_tensor_dict({"x": x}, peer),
        "make_sub_group": lambda: group.make_sub_group([0]),
        "device_group": lambda: group.device_group,
        "cpu_group": lambda: group.cpu_group,
    }
