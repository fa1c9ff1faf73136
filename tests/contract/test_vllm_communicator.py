"""The communicator for vLLM, over stand-ins for vLLM's two base classes."""

from __future__ import annotations

import os

from tests.programs import run_in_ranks

DEADLINE_S = 120.0
PROGRAM = """
import sys, types
import torch, torch.distributed as dist


class Base:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
        self.use_all2all = use_all2all


class Cpu(Base):
    def all_reduce(self, input_):
        raise RuntimeError("vLLM's own")


def stand_in(name, **names):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(names)


stand_in("vllm")
stand_in("vllm.distributed")
stand_in("vllm.distributed.utils", get_cpu_distributed_timeout_or_none=lambda: None)
stand_in("vllm.distributed.device_communicators")
stand_in("vllm.distributed.device_communicators.base_device_communicator", DeviceCommunicatorBase=Base)
stand_in("vllm.distributed.device_communicators.cpu_communicator", CpuCommunicator=Cpu)
from parallel_state.compat.vllm.communicator import Communicator

dist.init_process_group("gloo")
rank = dist.get_rank()
communicator = Communicator(dist.group.WORLD, torch.device("cpu"), dist.group.WORLD, "tp:0")
x = torch.full((2, 4), rank + 1.0)
assert communicator.all_reduce(x).eq(3).all() and x.eq(rank + 1).all()
assert communicator.all_reduce(input_=x).eq(3).all()
assert communicator.all_gather(x).shape == (2, 8) and communicator.all_gather(x, 0).shape == (4, 4)
assert communicator.reduce_scatter(x).shape == (2, 2)
mine = x[: rank + 1]
gathered, other = communicator.all_gatherv([mine, mine.long()], 0, [1, 2])
assert gathered.shape == (3, 4) and other.dtype == torch.int64
assert communicator.reduce_scatterv(gathered, 0, sizes=[1, 2]).equal(2 * mine)
assert (communicator.gather(x, 0, 0) is None) == (rank == 1)
filled = x.clone()
assert communicator.broadcast(filled, 0) is filled and filled.eq(1).all()
if rank == 0:
    communicator.send(x, 1)
    communicator.send_tensor_dict({"x": x, "step": 3}, 1)
else:
    assert communicator.recv(x.size(), x.dtype, 0).eq(1).all()
    received = communicator.recv_tensor_dict(0)
    assert received["step"] == 3 and received["x"].eq(1).all()
assert communicator.group.traffic()["all_reduce"].calls == 2
dist.barrier()
communicator.destroy()
dist.destroy_process_group()
print("all is well")
"""


def test_calls_of_vllms_groups_are_those_of_a_coordinator() -> None:
    results = run_in_ranks(PROGRAM, dict(os.environ), 2, DEADLINE_S)
    assert all(code == 0 and "all is well" in output for code, output in results), results
