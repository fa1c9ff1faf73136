from __future__ import annotations

import os

from tests.programs import run_in_ranks

DEADLINE_S = 120.0
PROGRAM = """
import logging, warnings
from datetime import timedelta
from types import SimpleNamespace
import pytest, torch, torch.distributed as dist
import parallel_state
from parallel_state.compat import megatron as mpu

warnings.simplefilter("ignore", DeprecationWarning)
dist.init_process_group("gloo")
rank = dist.get_rank()
said = []
keep = logging.Handler(logging.INFO)
keep.emit = lambda record: said.append(record.getMessage())
logging.getLogger("parallel_state").addHandler(keep)
logging.getLogger("parallel_state").setLevel(logging.INFO)


def ranks(group):
    return dist.get_process_group_ranks(group)


def check(group, members):
    assert ranks(group) == members and group.rank() == members.index(rank), (ranks(group), members)
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [sum(members) + len(members)] * 3


# Refused before any group is made; the next initialisation is none the worse.
for sizes in ({"tensor_model_parallel_size": 8}, {"virtual_pipeline_model_parallel_size": 2}):
    with pytest.raises(RuntimeError):
        mpu.initialize_model_parallel(**sizes)

torch.manual_seed(5)
expected = torch.rand(1)
torch.manual_seed(5)
mpu.initialize_model_parallel(2, 2, 2, use_sharp=True, create_gloo_process_groups=False)
assert torch.equal(torch.rand(1), expected)  # the program's weights are the same with us and without
pair, stage = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
check(mpu.get_tensor_model_parallel_group(), pair)
check(mpu.get_pipeline_model_parallel_group(), stage)
check(mpu.get_model_parallel_group(), [0, 1, 2, 3])
assert dist.get_backend(mpu.get_tensor_model_parallel_group()) == "parallel_state"
assert mpu.get_tensor_model_parallel_group() is parallel_state.get_tp_group().device_group  # one state
assert mpu.get_data_parallel_group().size() == mpu.get_data_parallel_world_size() == 1
assert mpu.get_tensor_model_parallel_src_rank() == pair[0] and mpu.get_model_parallel_src_rank() == 0
assert mpu.get_pipeline_model_parallel_next_rank() == stage[1 - rank // 2]
assert mpu.get_pipeline_model_parallel_last_rank() == stage[1]
assert (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()) == (rank < 2, rank >= 2)
assert mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=1) is False
with pytest.raises(AssertionError):
    mpu.is_pipeline_first_stage(ignore_virtual=False)
assert mpu.get_virtual_pipeline_model_parallel_world_size() == 2
mpu.set_virtual_pipeline_model_parallel_rank(1)
assert parallel_state.get_virtual_pipeline_model_parallel_rank() == mpu.get_virtual_pipeline_model_parallel_rank() == 1
check(mpu.get_embedding_group(), stage)
assert mpu.is_rank_in_embedding_group() and mpu.is_rank_in_position_embedding_group() == (rank < 2)
assert (mpu.get_position_embedding_group(check_initialized=False) is not None) == (rank < 2)
assert mpu.get_all_ranks() == f"{rank % 2}_0_0_{rank // 2}_0"
assert mpu.get_gtp_weight_remat_group().size() == mpu.get_gtp_weight_remat_world_size() == 1
assert mpu.get_gtp_weight_remat_global_ranks() == [rank]
assert mpu.get_inter_distributed_optimizer_instance_group(check_initialized=False) is None
for asked in (mpu.get_data_parallel_group_gloo, mpu.get_inter_distributed_optimizer_instance_group,
              mpu.get_hierarchical_context_parallel_groups, lambda: mpu.initialize_model_parallel(2)):
    with pytest.raises(AssertionError):
        asked()
collection = SimpleNamespace(tp=mpu.get_tensor_model_parallel_group(), pos_embd=None)
(made,) = mpu.coordinators_of(collection, "tp", "pos_embd").values()
assert made.ranks == pair and made.all_reduce(torch.ones(2)).tolist() == [2, 2]
made.destroy()
mpu.set_tensor_model_parallel_rank(7)
assert mpu.get_tensor_model_parallel_rank() == 7
mpu.set_tensor_model_parallel_rank(None)
assert mpu.get_tensor_model_parallel_rank() == rank % 2
buffer = mpu.get_global_memory_buffer()
first = buffer.get_tensor([2, 3], torch.float32, "mpu")
assert buffer.get_tensor((3, 1), torch.float32, "mpu").data_ptr() == first.data_ptr() and first.device.type == "cpu"
mpu._TENSOR_MODEL_PARALLEL_GROUP = dist.group.WORLD  # as Megatron's tools do
assert mpu.get_tensor_model_parallel_world_size() == 4
mpu.update_pg_timeout(timedelta(seconds=60))
mpu.destroy_model_parallel()
assert mpu._TENSOR_MODEL_PARALLEL_GROUP is None and not parallel_state.model_parallel_is_initialized()
assert mpu.get_virtual_pipeline_model_parallel_world_size() is None

mpu.initialize_model_parallel(
    context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2], hybrid_context_parallel=True,
    create_all_gather_group=True, expert_model_parallel_size=2, num_distributed_optimizer_instances=2,
    use_sharp=True, high_priority_stream_groups=["dp"],
)
unused = [each for each in said if "has no effect here" in each]
assert ["use_sharp" in each for each in unused] == [True, False] and "high_priority_stream_groups" in unused[1], unused
inner, outer = mpu.get_hierarchical_context_parallel_groups()
check(inner, pair)
check(outer, stage)
check(mpu.get_hybrid_data_context_parallel_groups(group_size=2), pair)
assert mpu.get_hybrid_data_context_parallel_groups(group_size=4) is mpu.get_data_parallel_group(True)
apart = mpu.get_data_parallel_group(True, independent_all_gather=True)
check(apart, [0, 1, 2, 3])
assert mpu.has_separate_all_gather_group() and apart is not mpu.get_data_parallel_group(True)
dense, expert = mpu.create_all_gather_groups(for_expert_parallelism=True)
check(dense, [0, 1, 2, 3])
check(expert, stage)
check(mpu.get_data_parallel_group(True, True), pair)
check(mpu.get_inter_distributed_optimizer_instance_group(), stage)
assert dist.get_backend(mpu.get_data_parallel_group_gloo(True)) == "gloo"
assert mpu.get_expert_data_parallel_group().size() == 2
check(mpu.get_expert_model_parallel_group(), pair)
group = mpu.get_data_parallel_group(True)
module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
module(torch.full((1, 2), rank + 1.0)).sum().backward()
assert module.module.weight.grad.tolist() == [[2.5, 2.5]]
mpu.destroy_model_parallel()

# Arguments of main, which must have their defaults.
for given in ({"gtp_remat_size": 2}, {"expert_gtp_remat_size": 2}, {"rank_offset": 2}, {"local_world_size": 2}):
    with pytest.raises(AssertionError, match="must keep their defaults"):
        mpu.initialize_model_parallel(**given)
mpu.initialize_model_parallel(gtp_remat_size=1, rank_offset=0)
check(mpu.get_data_parallel_group(with_gtp_remat=False), [0, 1, 2, 3])
assert mpu.get_data_parallel_group() is mpu._DATA_PARALLEL_GROUP is mpu._DATA_PARALLEL_GROUP_WITH_GTP_REMAT
mpu.destroy_model_parallel()

# Another default group: the world is made anew over it.
dist.destroy_process_group()
dist.init_process_group("parallel_state", rank=rank, world_size=4, store=dist.PrefixStore("2", dist.TCPStore(
    "127.0.0.1", int(__import__("os").environ["MASTER_PORT"]), 4, False)))
mpu.initialize_model_parallel(4)
check(mpu.get_tensor_model_parallel_group(), [0, 1, 2, 3])
mpu.destroy_model_parallel()
dist.destroy_process_group()
print("all is well")
"""


def test_megatrons_names_over_our_groups() -> None:
    results = run_in_ranks(PROGRAM, dict(os.environ), 4, DEADLINE_S)
    assert all(code == 0 and "all is well" in output for code, output in results), results
