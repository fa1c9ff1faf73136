"""Behaviours of vLLM, Megatron and other engines that no other file tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

import parallel_state as ps
from parallel_state.groups import world as startup
from tests.contract.attempts import attempt, environment, no_launcher, world
from tests.contract.test_objects import DEADLINE_S, Pools
from tests.references import VLLM


@contextmanager
def default_group(name: str) -> Iterator[None]:
    """Creates torch's default group as a program without this library: no environment variable announces it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    with no_launcher():
        store = dist.PrefixStore(name, agent)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        try:
            yield
        finally:
            dist.destroy_process_group()


def _utilities(path: str, missing: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with default_group("utilities"):
        rank = dist.get_rank()
        store = dist.distributed_c10d._get_default_store()
        facts["who"] = (ps.get_process_environment().rank, ps.get_process_environment().world_size)
        facts["first"] = (ps.is_global_first_rank(), ps.is_local_first_rank())
        for first in (ps.master_first, ps.local_master_first):
            order = f"order/{first.__name__}"
            with first():
                facts[first.__name__] = store.add(order, 1) == 1
                if rank == 0:
                    store.set(f"{order}/done", b"")
                else:
                    facts[first.__name__] = not store.check([f"{order}/done"])
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"rank 0 alone may read {self}"))
            facts["file"] = ps.read_file_dist(path).read()
        facts["missing"] = attempt(ps.read_file_dist, missing).kind
        with pytest.raises(ZeroDivisionError if rank == 0 else ps.RemoteError), ps.master_first():
            assert rank == 0
            _ = 1 / 0
        total = torch.ones(1)
        dist.all_reduce(total)
        facts["total"] = total.item()
        facts["world"] = ps.try_get_world_group()
    facts["afterwards"] = ps.read_file_dist(path).read()
    return facts


def test_utilities_over_a_default_group_of_the_user_s(pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    facts = pools(2).run(_utilities, str(path), str(tmp_path / "missing"), timeout_s=DEADLINE_S)
    for rank, found in enumerate(facts):
        assert found == {
            "who": (rank, 2),
            "first": (rank == 0, rank == 0),
            "master_first": rank == 0,
            "local_master_first": rank == 0,
            "file": b"content",
            "missing": "FileNotFoundError" if rank == 0 else "RemoteError",
            "total": 2.0,
            "world": None,
            "afterwards": b"content",
        }


def _all_to_all() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with default_group("all_to_all"):
        rank, size = dist.get_rank(), dist.get_world_size()
        sub = dist.new_group([0, 1])
        for name, group in (("default", None), ("sub", sub)):
            x = (torch.arange(24.0).view(4, 6) + 100 * rank).requires_grad_()
            y = ps.all_to_all(x.T, group, 0, 1)
            facts[name] = torch.equal(
                y, torch.cat([(torch.arange(24.0).view(4, 6) + 100 * r).T.chunk(size)[rank] for r in range(size)], 1)
            )
            (y * (rank + 1)).sum().backward()
            expected = torch.cat([torch.full((3, 4), r + 1.0) for r in range(size)]).T
            facts[f"{name} gradient"] = torch.equal(x.grad, expected)  # type: ignore[arg-type]
        rows = torch.arange(3 + rank, dtype=torch.bfloat16) + 10 * rank
        uneven = ps.all_to_all(
            rows, input_split_sizes=[1, 2 + rank], output_split_sizes=[1, 1] if rank == 0 else [2, 3]
        )
        facts["uneven"] = uneven.tolist()
        facts["refused"] = [
            attempt(ps.all_to_all, torch.ones(3)).kind,
            attempt(ps.all_to_all, torch.ones(2), "tp").kind,
            attempt(ps.all_to_all, torch.ones(2), None, 1).kind,
        ]
        inputs = [2, 2] if rank == 0 else [1, 3]
        facts["mismatch"] = attempt(
            ps.all_to_all, x.detach()[:, 0], input_split_sizes=inputs, output_split_sizes=[2, 2]
        )
        dist.destroy_process_group(sub)
    facts["without"] = ps.all_to_all(rows) is rows
    with world(2):
        facts["coordinator"] = ps.all_to_all(torch.arange(2.0) + 10 * rank, ps.get_tp_group()).tolist()
    return facts


def test_all_to_all_over_any_group(pools: Pools) -> None:
    for rank, facts in enumerate(pools(2).run(_all_to_all, timeout_s=DEADLINE_S)):
        mismatch = facts.pop("mismatch")
        assert mismatch.kind == "CommunicationError"
        assert mismatch.text.isascii()
        assert not any(word in mismatch.text for word in (".cc:", "GLHF")), mismatch
        assert facts == {
            "default": True,
            "default gradient": True,
            "sub": True,
            "sub gradient": True,
            "uneven": [0.0, 10.0] if rank == 0 else [1.0, 2.0, 11.0, 12.0, 13.0],
            "refused": ["InvalidArgumentError"] * 3,
            "without": True,
            "coordinator": [0.0, 10.0] if rank == 0 else [1.0, 11.0],
        }


def _out() -> dict[str, bool]:
    torch._dynamo.reset()
    group = ps.get_tp_group()
    size, rank = group.world_size, group.rank_in_group
    x = torch.arange(6.0).view(2, 3) + rank
    facts = {}
    compiled = torch.compile(lambda x, out: group.all_gather(x, 1, out=out) * 2, fullgraph=True, backend="aot_eager")
    for dim in (0, 1, -1):
        shape = [2, 3]
        shape[dim] *= size
        for kind, out in (("plain", torch.empty(shape)), ("strided", torch.empty(shape[::-1]).T)):
            facts[f"{kind} {dim}"] = group.all_gather(x, dim, out=out) is out and torch.equal(
                out, group.all_gather(x, dim)
            )
    out = torch.empty(2, 3 * size)
    facts["compiled"] = torch.equal(compiled(x, out), 2 * group.all_gather(x, 1)) and torch.equal(
        out, group.all_gather(x, 1)
    )
    facts["0-d"] = torch.equal(group.all_gather(torch.tensor(float(rank)), out=torch.empty(size)), torch.arange(2.0))
    refused = [
        torch.empty(2, 3),
        torch.empty(2, 3 * size, dtype=torch.float64),
        torch.empty(2, 1).expand(2, 3 * size),
        3,
    ]
    facts["refused"] = [attempt(group.all_gather, x, 1, out=out).kind for out in refused] == [
        "InvalidArgumentError"
    ] * 4
    y = x.clone().requires_grad_()
    group.all_gather(y, 1, out=torch.empty(2, 3 * size)).sum().backward()
    facts["gradient"] = torch.equal(y.grad, torch.full((2, 3), float(size)))  # type: ignore[arg-type]
    return facts


def test_all_gather_into_a_tensor(pools: Pools) -> None:
    for facts in pools(2).run(_out, tp=2, timeout_s=DEADLINE_S):
        assert all(facts.values()), facts


def test_tensor_dicts_in_a_group_of_one() -> None:
    tensors = {"x": torch.ones(1)}
    group = ps.simulated_group([3], 3)
    assert group.send_tensor_dict(tensors) is tensors
    assert group.send_tensor_dict(tensors, 0) is tensors
    assert group.recv_tensor_dict() is group.recv_tensor_dict(0) is None
    for wrong in (
        lambda: group.send_tensor_dict(tensors, 1), lambda: group.recv_tensor_dict(3),
        lambda: group.isend_tensor_dict(tensors, 1), lambda: group.irecv_tensor_dict(3),
        lambda: group.isend_tensor_dict([1]),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(ps.InvalidArgumentError):
            wrong()
    sending, receiving = group.isend_tensor_dict(tensors), group.irecv_tensor_dict()
    assert sending.is_completed() and receiving.is_completed() and sending.has_ended
    assert sending.wait() is receiving.wait() is None
    assert not group.supports_process_group


def test_tensor_dicts_in_a_group_of_one_are_as_vllms() -> None:
    names = ("send_tensor_dict", "recv_tensor_dict", "isend_tensor_dict", "irecv_tensor_dict")
    theirs: dict[str, Any] = {"torch": torch}
    exec(VLLM.cut(*names, strip_decorators=True), theirs)
    alone, group, tensors = SimpleNamespace(world_size=1), ps.simulated_group([3], 3), {"x": torch.ones(1)}
    send, recv, isend, irecv = (theirs[name] for name in names)
    assert send(alone, tensors) is tensors and group.send_tensor_dict(tensors) is tensors
    assert recv(alone) is group.recv_tensor_dict() is None
    assert list(isend(alone, tensors)) == list(group.isend_tensor_dict(tensors)) == []
    received, handles, finish = group.irecv_tensor_dict()
    assert (received, handles, finish) == irecv(alone)


def _alone() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with no_launcher():
        ps.init_distributed_environment()
        ps.initialize_model_parallel()
        tp = ps.get_tp_group()
        facts["free"] = not dist.is_initialized() and tp.all_reduce(torch.ones(1)).item() == 1.0
        facts["supports"] = tp.supports_process_group
        tp.barrier()
        dist.init_process_group("gloo")  # uses the variables that init left for env://
        owners = dist.group.WORLD
        facts["owner's is taken"] = tp.device_group is owners
        ps.destroy_distributed_environment()
        facts["owner's stays"] = dist.is_initialized() and dist.group.WORLD is owners
        dist.destroy_process_group()
        ps.init_distributed_environment()
        ps.initialize_model_parallel()
        total = torch.ones(1)
        dist.all_reduce(total, group=ps.get_tp_group().device_group)
        facts["mesh"] = ps.get_device_mesh().mesh_dim_names
        ps.destroy_distributed_environment()
        ps.destroy_distributed_environment()
        facts["gone"] = not dist.is_initialized()
    return facts


def test_a_world_of_one_leaves_the_default_group_free(pools: Pools) -> None:
    facts = {"free": True, "supports": True, "owner's is taken": True, "owner's stays": True, "mesh": ("world",)}
    assert pools(1).run(_alone, timeout_s=DEADLINE_S) == [{**facts, "gone": True}]


def _alone_among_others() -> list[float]:
    with environment():
        with no_launcher():
            ps.init_distributed_environment(1, 0)
        ps.initialize_model_parallel()
        try:
            with default_group("engines"):
                total, own = torch.ones(1), torch.ones(1)
                dist.all_reduce(total)
                dist.all_reduce(own, group=ps.get_tp_group().device_group)
                return [total.item(), own.item()]
        finally:
            ps.destroy_distributed_environment()


def test_worlds_of_one_in_a_default_group_of_more(pools: Pools) -> None:
    assert pools(2).run(_alone_among_others, timeout_s=DEADLINE_S) == [[2.0, 1.0]] * 2


def test_who_am_i_before_init() -> None:
    with no_launcher():
        place = ps.get_process_environment()
        assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (0, 0, 1, 1)
    with no_launcher(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4"):
        place = ps.get_process_environment()
        assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (5, 1, 8, 4)
    with no_launcher(SLURM_PROCID="3", SLURM_LOCALID="1", SLURM_NTASKS="4", SLURM_STEP_ID="0"):
        place = ps.get_process_environment()
        assert (place.rank, place.local_rank, place.world_size) == (3, 1, 4)


def _explicit_address(port: int) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    with no_launcher():
        ps.init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank)
        place = ps.get_process_environment()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        found = [os.environ.get(name) for name in names]
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, 2, is_master=False, timeout=timedelta(seconds=30))
        store.set(f"by env {rank}", b"")
        store.wait([f"by env {other}" for other in range(2)], timedelta(seconds=30))
        ps.get_world_group().barrier()
        ps.destroy_distributed_environment()
        return {
            "found": found,
            "left": [os.environ.get(name) for name in names],
            "place": (place.rank, place.local_rank, place.world_size, place.local_world_size),
        }


def test_an_explicit_address_is_exported(pools: Pools) -> None:
    with dist_port() as port:
        pass
    for rank, facts in enumerate(pools(2).run(_explicit_address, port, timeout_s=DEADLINE_S)):
        assert facts == {
            "found": [str(rank), str(rank), "2", "127.0.0.1", str(port)],
            "left": [None] * 5,
            "place": (rank, rank, 2, 2),
        }


@contextmanager
def dist_port() -> Iterator[int]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def _log() -> str:
    logging.getLogger("of a worker").info("said")
    return logging.getLogger().handlers[0].formatter._fmt  # type: ignore[union-attr,return-value]


def test_an_inline_worker_logs_as_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    (form,) = ps.launch(_log, 1, log_level="INFO")
    assert "rank 0" in form
    assert "rank 0 INFO of a worker: said" in capfd.readouterr().err
    assert (list(root.handlers), root.level) == before


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    place = ps.ProcessEnvironment(5, 3, 8, 4, None, None, "explicit")
    with pytest.raises(ps.InvalidArgumentError, match="PARALLEL_STATE_SHARE_GPUS=on"):
        startup.device_of("nccl", place)
    assert taken == []
    monkeypatch.setenv("PARALLEL_STATE_SHARE_GPUS", "on")
    assert startup.device_of("nccl", place) == torch.device("cuda", 1)
    assert taken == [1]


def _one_gpu_each(uuids: list[str], allowed: list[str | None]) -> tuple[str, str, list[str]]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger, real = logging.getLogger("parallel_state"), startup.uuid_of
    with world(2):
        group = ps.get_world_group()
        on_gpu = SimpleNamespace(
            device=torch.device("cuda", 0), world_size=group.world_size, rank=group.rank, context=group.context
        )
        startup.uuid_of = lambda _: uuids[group.rank]
        logger.addHandler(handler)
        try:
            with environment(PARALLEL_STATE_SHARE_GPUS=allowed[group.rank]):
                outcome = attempt(startup.check_shared_gpus, on_gpu)
        finally:
            startup.uuid_of = real
            logger.removeHandler(handler)
        group.barrier()
    return outcome.kind, outcome.text, told


@pytest.mark.parametrize("allowed", [[None, None], ["on", None], ["on", "on"]], ids=["refused", "one may", "both may"])
def test_ranks_that_see_one_gpu_each_and_have_the_same(pools: Pools, allowed: list[str | None]) -> None:
    results = pools(2).run(_one_gpu_each, ["GPU-1", "GPU-1"], allowed, timeout_s=DEADLINE_S)
    if allowed == [None, None]:
        for kind, text, told in results:
            assert kind == "InvalidArgumentError" and not told
            assert "global ranks [0, 1] share GPU GPU-1" in text and "PARALLEL_STATE_SHARE_GPUS=on" in text
    else:
        assert [kind for kind, *_ in results] == ["ok", "ok"]
        assert [len(told) for *_, told in results] == [1, 0]
        assert "share GPU GPU-1" in results[0][2][0]


def test_ranks_that_see_one_gpu_each_of_their_own(pools: Pools) -> None:
    results = pools(2).run(_one_gpu_each, ["GPU-1", "GPU-2"], [None, None], timeout_s=DEADLINE_S)
    assert results == [("ok", "None", [])] * 2


def _custom_all_reduce() -> list[bool]:
    with world(2):
        found = []
        for arguments in ({}, {"use_custom_allreduce": False}, {"use_custom_allreduce": True}):
            for device in (True, False):
                group = ps.init_model_parallel_group([[0, 1]], 0, "gloo", use_device_communicator=device, **arguments)
                found.append(group.context.custom_all_reduce)
                group.destroy()
        ps.set_custom_all_reduce(False)
        try:
            group = ps.init_model_parallel_group([[0, 1]], 0, "gloo")
            found.append(group.context.custom_all_reduce)
            differ = attempt(ps.init_model_parallel_group, [[0, 1]], 0, "gloo", use_custom_allreduce=ps.get_rank() == 0)
            found.append(differ.kind == "ConfigMismatchError")
            group.destroy()
        finally:
            ps.set_custom_all_reduce(True)
        return found


def test_custom_all_reduce_of_one_group(pools: Pools) -> None:
    expected = [True, False, False, False, True, False, False, True]
    assert pools(2).run(_custom_all_reduce, timeout_s=DEADLINE_S) == [expected] * 2


def test_an_nccl_group_does_not_tell_who_shares_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    with pytest.raises(ps.InvalidArgumentError, match="needs a group for CPU tensors"):
        ps.in_the_same_node_as(group)


def _meshes() -> dict[str, Any]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("parallel_state")
    log.addHandler(handler)
    try:
        with world(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1):
            dense, again, experts = ps.get_device_mesh(), ps.get_device_mesh(), ps.get_device_mesh(experts=True)
            return {
                "dense": (dense.mesh_dim_names, again is dense),
                "experts": (experts.mesh_dim_names, experts.mesh.tolist()),
                "group": experts["ep"].get_group() is ps.get_ep_group().device_group,
                "named": attempt(ps.get_device_mesh, "ep", experts=True).kind,
                "told": [text for text in records if "experts=True" in text],
            }
    finally:
        log.removeHandler(handler)


def test_the_mesh_names_what_it_leaves_out(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_meshes, timeout_s=DEADLINE_S)):
        told = facts.pop("told")
        assert len(told) == (rank == 0)
        assert all("leaves out" in text and "ep" in text for text in told)
        assert facts == {
            "dense": (("dp_shard", "tp"), True),
            "experts": (("efsdp", "ep"), [[0, 1], [2, 3]]),
            "group": True,
            "named": "InvalidArgumentError",
        }
