"""The life of the process-wide groups: made once, asked for by every name, destroyed, and made again otherwise.

How ranks find each other is in test_rendezvous; which ranks are in which group, and groups beside the process-wide
ones, in test_parallel_groups.
"""

from __future__ import annotations

import gc
import logging
import os
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from parallel_state import state
from parallel_state.environment import ProcessEnvironment
from tests.contract.attempts import LAUNCHER, Outcome, attempt, environment, no_launcher
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SOON_S = 10.0  # what must not wait for a timeout of 60 s; the machine may be busy
GETTERS = ("world", "tp", "pp", "dp")


def kinds(outcomes: list[Outcome]) -> set[str]:
    return {outcome.kind for outcome in outcomes}


def launcher_variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in LAUNCHER}


# The world.


def _world_by_env() -> dict[str, Any]:
    before = launcher_variables()
    ps.init_distributed_environment()
    world = ps.get_world_group()
    facts = {
        "rank": (world.rank, world.rank_in_group, world.local_rank, ps.get_rank()),
        "size": (world.world_size, world.size, ps.get_world_size()),
        "ranks": world.ranks,
        "device": str(world.device),
        "sum": world.all_reduce(torch.tensor([float(world.rank)])).tolist(),
        "first": (ps.is_global_first_rank(), ps.is_rank_zero(), ps.is_local_first_rank()),
        "nodes": (ps.get_node_count(), ps.get_nodes()),
        "one group": world.device_group is world.cpu_group is dist.group.WORLD,
        "unchanged": launcher_variables() == before,
    }
    ps.destroy_distributed_environment()
    return {**facts, "ended": not dist.is_initialized() and launcher_variables() == before}


def test_a_world_by_torchruns_environment(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_world_by_env, timeout_s=DEADLINE_S)):
        assert facts == {
            "rank": (rank,) * 4,
            "size": (4, 4, 4),
            "ranks": [0, 1, 2, 3],
            "device": "cpu",
            "sum": [6.0],
            "first": (rank == 0,) * 3,
            "nodes": (1, [[0, 1, 2, 3]]),
            "one group": True,
            "unchanged": True,
            "ended": True,
        }


def _alone() -> dict[str, Any]:
    with no_launcher():
        before = dict(os.environ)
        first = (ps.is_global_first_rank(), ps.is_rank_zero(), ps.is_local_first_rank())
        sockets = _sockets()
        ps.init_distributed_environment()
        ps.initialize_model_parallel()
        x = torch.ones(3)
        facts = {
            "first": (first, (ps.is_global_first_rank(), ps.is_local_first_rank())),
            "sizes": [ps.get_world_size(), ps.get_tp_group().world_size, ps.get_pp_group().world_size],
            "same tensor": ps.get_tp_group().all_reduce(x) is x,
            "nodes": ps.get_nodes(),
            "listens": len(_sockets() - sockets),
            "exported": {name: os.environ[name] for name in set(os.environ) - set(before)},
        }
        ps.destroy_distributed_environment()
        return {**facts, "taken back": dict(os.environ) == before}


def _sockets() -> set[str]:
    """What listens in this process, by its inode."""
    listening = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table) as lines:
            listening |= {f"socket:[{line.split()[9]}]" for line in lines if line.split()[3] == "0A"}
    return {link for link in map(_link, os.listdir("/proc/self/fd")) if link in listening}


def _link(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # the descriptor of the listing itself
        return ""


def test_alone_needs_no_address(pools: Pools) -> None:
    """Without a launcher every process is a world of its own; what init exported for env:// is taken back."""
    for facts in pools(4).run(_alone, timeout_s=DEADLINE_S):
        exported = facts.pop("exported")
        assert facts == {
            "first": ((True, True, True), (True, True)),
            "sizes": [1, 1, 1],
            "same tensor": True,
            "nodes": [[0]],
            "listens": 1,  # gloo's; the store is in memory
            "taken back": True,
        }
        assert {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items() <= exported.items()


def _first_before_init() -> tuple[Any, ...]:
    answers = (ps.is_rank_zero(), ps.is_global_first_rank(), ps.is_local_first_rank())
    with environment(LOCAL_RANK=str(int(os.environ["RANK"]) % 2), LOCAL_WORLD_SIZE="2"):
        return answers, ps.is_local_first_rank(), attempt(ps.get_node_count).kind


def test_first_ranks_are_known_before_init(pools: Pools) -> None:
    for rank, (answers, local, nodes) in enumerate(pools(4).run(_first_before_init, timeout_s=DEADLINE_S)):
        assert answers == (rank == 0,) * 3
        assert local == (rank % 2 == 0)
        assert nodes == "GroupNotInitializedError"


def _variables_that_init_adds() -> tuple[dict[str, str], list[str], bool]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with environment(RANK=None, WORLD_SIZE=None, LOCAL_WORLD_SIZE=None):
        before = dict(os.environ)
        ps.init_distributed_environment(size, rank)
        added = {name: value for name, value in os.environ.items() if name not in before}
        os.environ["WORLD_SIZE"] = "99"  # the program's own from now on
        ps.destroy_distributed_environment()
        left = sorted(set(os.environ) - set(before))
        del os.environ["WORLD_SIZE"]
        ended = attempt(ps.init_distributed_environment, size, rank, backend="nonsense")
        return added, left, ended.kind == "InvalidArgumentError" and dict(os.environ) == before


def test_exported_variables_are_taken_back(pools: Pools) -> None:
    """Also by an init that fails; one that the program has changed since is the program's."""
    for rank, (added, left, clean) in enumerate(pools(4).run(_variables_that_init_adds, timeout_s=DEADLINE_S)):
        assert added == {"RANK": str(rank), "WORLD_SIZE": "4"}
        assert left == ["WORLD_SIZE"]
        assert clean


def _join(name: str, backend: str | None) -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    timeout = timedelta(seconds=SOON_S)
    dist.init_process_group(backend, store=dist.PrefixStore(name, agent), rank=rank, world_size=size, timeout=timeout)
    default = dist.group.WORLD
    init = ps.init_distributed_environment
    refused = [attempt(init, size + 1, rank), attempt(init, size, (rank + 1) % size), attempt(init, backend="mpi")]
    init()
    ps.initialize_model_parallel(2)
    total = ps.get_tp_group().all_reduce(torch.tensor([float(rank)]))
    joined = ps.get_world_group().device_group is default
    ps.destroy_distributed_environment()
    stays = dist.is_initialized() and dist.group.WORLD is default
    flag = torch.ones(1)
    dist.all_reduce(flag)
    dist.destroy_process_group()
    return {"refused": refused, "total": total.item(), "joined": joined, "stays": stays, "sum": flag.item()}


@pytest.mark.parametrize("backend", ["gloo", None])
def test_joins_a_default_group_that_is_there(pools: Pools, backend: str | None) -> None:
    """Found with another size, rank or backend than asked for, it is refused and left alone; destroy leaves it too."""
    results = pools(4).run(_join, f"join/{uuid.uuid4()}", backend, timeout_s=DEADLINE_S)
    for rank, facts in enumerate(results):
        size, other, backend_refused = facts.pop("refused")
        assert kinds([size, other, backend_refused]) == {"ConfigMismatchError"}
        assert f"rank {rank} of 4" in size.text
        assert f"rank {rank} of 5" in size.text
        assert f"rank {(rank + 1) % 4} of 4" in other.text
        assert "'mpi'" in backend_refused.text
        assert facts == {"total": [1.0, 1.0, 5.0, 5.0][rank], "joined": True, "stays": True, "sum": 4.0}


def test_the_device_of_a_joined_group_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a default group has NCCL where there is CUDA: its device is then the GPU."""
    place = ProcessEnvironment(1, 1, 2, 2, None, None, "torchrun")
    assert state._device_of("undefined", place) == torch.device("cpu")
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert state._device_of("undefined", place) == torch.device("cuda", 1)
    assert state._device_of("gloo", place) == torch.device("cpu")
    assert chosen == [1]


def _wrong_arguments() -> dict[str, Outcome]:
    init = ps.init_distributed_environment
    with environment(PARALLEL_STATE_BACKEND="GLOO2"):
        by_setting = attempt(init)
    return {
        "rank without world size": attempt(init, rank=1),
        "world size without rank": attempt(init, 4),
        "rank too large": attempt(init, 2, 2),
        "backend": attempt(init, backend="nonsense"),
        "backend by setting": by_setting,
        "nccl without a GPU": attempt(init, backend="nccl"),
        "timeout zero": attempt(init, timeout=0),
        "timeout negative": attempt(init, timeout=timedelta(seconds=-1)),
        "timeout nan": attempt(init, timeout=float("nan")),
        "timeout without end": attempt(init, timeout=float("inf")),
        "method": attempt(init, distributed_init_method="127.0.0.1:29500"),
        "nothing made": attempt(lambda: (dist.is_initialized(), ps.try_get_world_group())),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nccl is a right choice")
def test_wrong_arguments_of_init(pools: Pools) -> None:
    parts = {
        "rank without world size": ["world_size and rank", "both or neither", "-1 and 1"],
        "world size without rank": ["both or neither", "4 and -1"],
        "rank too large": ["rank must be in 0 … 1, but is 2"],
        "backend": ["backend", "gloo", "'nonsense'"],
        "backend by setting": ["PARALLEL_STATE_BACKEND", "gloo", "'GLOO2'"],
        "nccl without a GPU": ["'nccl'", "CUDA", "use 'gloo'"],
        "timeout zero": ["timeout must be a positive number of seconds, but is 0"],
        "timeout negative": ["timeout must be a positive number of seconds"],
        "timeout nan": ["but is nan"],
        "timeout without end": ["but is inf"],
        "method": ["'env://'", "'tcp://HOST:PORT'", "'127.0.0.1:29500'"],
    }
    for results in pools(4).run(_wrong_arguments, timeout_s=DEADLINE_S):
        assert results.pop("nothing made").text == "(False, None)"
        assert results.keys() == parts.keys()
        for name, outcome in results.items():
            assert outcome.kind == "InvalidArgumentError", (name, outcome)
            assert all(part in outcome.text for part in parts[name]), (name, outcome)
            assert outcome.seconds < SOON_S


def _incomplete_environments() -> dict[str, Outcome]:
    outcomes = {}
    for variables in (
        {"WORLD_SIZE": None},
        {"RANK": None},
        {"RANK": "four"},
        {"RANK": "4"},
        {"WORLD_SIZE": "0"},
        {"MASTER_PORT": None},
        {"MASTER_PORT": "70000"},
        {"MASTER_ADDR": None, "LOCAL_WORLD_SIZE": None},
    ):
        with environment(**variables):
            outcomes[" ".join(f"{k}={v}" for k, v in variables.items())] = attempt(ps.init_distributed_environment)
    return outcomes


def test_an_incomplete_environment(pools: Pools) -> None:
    for outcomes in pools(4).run(_incomplete_environments, timeout_s=DEADLINE_S):
        assert len(outcomes) == 8
        for setting, outcome in outcomes.items():
            name, _, value = setting.split()[0].partition("=")
            assert outcome.kind == "SettingError", (setting, outcome)
            assert name in outcome.text
            assert value == "None" or value in outcome.text
            assert outcome.seconds < SOON_S


def _bad_settings() -> list[Outcome]:
    outcomes = []
    for name in ("PARALLEL_STATE_TIMEOUT_S", "PARALLEL_STATE_START_TIMEOUT_S"):
        with environment(**{name: "soon"}):
            outcomes.append(attempt(ps.init_distributed_environment))
    ps.init_distributed_environment()
    with environment(PARALLEL_STATE_BARRIER_TIMEOUT_S="-1"):
        outcomes.append(attempt(ps.initialize_model_parallel))
        outcomes.append(attempt(ps.get_tp_group))
    ps.initialize_model_parallel(2)
    ps.destroy_distributed_environment()
    return outcomes


def test_a_bad_setting_is_told_by_whoever_reads_it(pools: Pools) -> None:
    for *outcomes, getter in pools(4).run(_bad_settings, timeout_s=DEADLINE_S):
        assert [outcome.kind for outcome in outcomes] == ["SettingError"] * 3
        for outcome, name in zip(outcomes, ("TIMEOUT_S", "START_TIMEOUT_S", "BARRIER_TIMEOUT_S"), strict=True):
            assert outcome.text.startswith(f"PARALLEL_STATE_{name} must be a positive number of seconds")
        assert getter.kind == "GroupNotInitializedError", "the groups of a failed init are gone"


def _unknown_settings() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("parallel_state").addHandler(handler)
    try:
        with environment(PARALLEL_STATE_TIMEOUT="5"):
            ps.init_distributed_environment()
    finally:
        logging.getLogger("parallel_state").removeHandler(handler)
    ps.destroy_distributed_environment()
    return messages


def test_a_setting_that_nobody_knows_is_warned_about(pools: Pools) -> None:
    for messages in pools(4).run(_unknown_settings, timeout_s=DEADLINE_S):
        assert messages == ["PARALLEL_STATE_TIMEOUT is not a setting of parallel_state and has no effect"]


# Its division.


def _twice_and_too_early() -> dict[str, Outcome]:
    outcomes = {"groups before world": attempt(ps.initialize_model_parallel, 2)}
    outcomes["world group before"] = attempt(ps.init_world_group, [0, 1, 2, 3], 0, "gloo")
    ps.init_distributed_environment()
    world = ps.get_world_group()
    outcomes["world twice"] = attempt(ps.init_distributed_environment)
    outcomes["world group twice"] = attempt(ps.init_world_group, [0, 1, 2, 3], 0, "gloo")
    ps.initialize_model_parallel(2)
    tp = ps.get_tp_group()
    outcomes["groups twice"] = attempt(ps.initialize_model_parallel, 2)
    outcomes["still there"] = attempt(lambda: (ps.get_world_group() is world, ps.get_tp_group() is tp))
    outcomes["still work"] = attempt(lambda: tp.all_reduce(torch.ones(1)).item())
    ps.destroy_distributed_environment()
    return outcomes


def test_init_twice_and_too_early(pools: Pools) -> None:
    expected = {
        "groups before world": ("GroupNotInitializedError", "init_distributed_environment() before"),
        "world group before": ("GroupNotInitializedError", "init_world_group"),
        "world twice": ("AlreadyInitializedError", "destroy_distributed_environment() first"),
        "world group twice": ("AlreadyInitializedError", "destroy it first"),
        "groups twice": ("AlreadyInitializedError", "destroy_model_parallel() first"),
        "still there": ("ok", "(True, True)"),
        "still work": ("ok", "2.0"),
    }
    for outcomes in pools(4).run(_twice_and_too_early, timeout_s=DEADLINE_S):
        assert {name: outcome.kind for name, outcome in outcomes.items()} == {n: k for n, (k, _) in expected.items()}
        for name, outcome in outcomes.items():
            assert expected[name][1] in outcome.text, outcome


def _misfits() -> dict[str, Outcome]:
    rank = int(os.environ["RANK"])
    ps.init_distributed_environment()
    init = ps.initialize_model_parallel
    outcomes = {
        "3 of 4": attempt(init, 3),
        "8 of 4": attempt(init, 2, 4),
        "zero": attempt(init, 0),
        "product": attempt(init, 2, 1, 1),
        "order": attempt(init, 2, order="tp"),
        "order's axes": attempt(init, 2, order="tp-dp-pp-ep"),
        "two or four": attempt(init, 2 if rank == 0 else 4),
        "one is wrong": attempt(init, 3 if rank == 2 else 2),
        "orders": attempt(init, 2, order="tp-pp-dp" if rank == 3 else "tp-dp-pp"),
        "timeouts": attempt(init, 2, timeout=5 + (rank == 1)),
        "axis backend": attempt(init, 2, axis_backends={"xp": "gloo"}),
    }
    ps.set_custom_all_reduce(rank != 3)
    outcomes["custom all-reduce"] = attempt(init, 2)
    ps.set_custom_all_reduce(True)
    outcomes["none made"] = attempt(lambda: (ps.model_parallel_is_initialized(), ps.try_get_tp_group()))
    outcomes["then"] = attempt(init, 2, order="tp-pp-dp")
    outcomes["works"] = attempt(lambda: ps.get_tp_group().all_reduce(torch.ones(1)).item())
    ps.destroy_distributed_environment()
    return outcomes


def test_sizes_that_do_not_fit_are_refused_on_every_rank(pools: Pools) -> None:
    """At once, with what each rank asked for; the world can be divided afterwards."""
    parts = {
        "3 of 4": ("LayoutError", ["4 ranks", "tp=3 = 3", "[1, 2, 4]"]),
        "8 of 4": ("LayoutError", ["4 ranks", "tp=2 × pp=4 = 8"]),
        "zero": ("LayoutError", ["'tp' must be a positive integer", "is 0"]),
        "product": ("LayoutError", ["world size, 4", "tp=2 = 2", "factor of 2"]),
        "order": ("LayoutError", ["'tp'", "lacks 'dp', whose size is 2"]),
        "order's axes": ("LayoutError", ["'ep', which is no axis", "tp, dp, pp"]),
        "two or four": ("ConfigMismatchError", ["tp=2 × dp=2 × pp=1 on rank 0", "tp=4 × dp=1 × pp=1 on rank 1"]),
        "one is wrong": ("ConfigMismatchError", ["tp=2 × dp=2 × pp=1 on rank 0", "tp=3", "on rank 2"]),
        "orders": ("ConfigMismatchError", ["tp=2 × dp=2 × pp=1 on rank 0", "tp=2 × pp=1 × dp=2 on rank 3"]),
        "timeouts": ("ConfigMismatchError", ["timeout_s", "5.0 on rank 0", "6.0 on rank 1"]),
        "axis backend": ("LayoutError", ["tp, dp, pp", "'xp'"]),
        "custom all-reduce": ("ConfigMismatchError", ["custom_all_reduce", "True on rank 0", "False on rank 3"]),
        "none made": ("ok", ["(False, None)"]),
        "then": ("ok", []),
        "works": ("ok", ["2.0"]),
    }
    for rank, outcomes in enumerate(pools(4).run(_misfits, timeout_s=DEADLINE_S)):
        for name, outcome in outcomes.items():
            kind, texts = parts[name]
            assert outcome.kind == kind, (name, outcome)
            assert all(text in outcome.text for text in texts), (name, outcome)
            assert outcome.seconds < SOON_S
            assert kind != "ConfigMismatchError" or f"this is rank {rank}" in outcome.text


def _one_rank_stays_away() -> Outcome | None:
    ps.init_distributed_environment(timeout=2)
    return attempt(ps.initialize_model_parallel, 2) if ps.get_rank() != 3 else None


def test_a_rank_that_never_divides_the_world(pools: Pools) -> None:
    """The others give up at the timeout of an operation."""
    *outcomes, _ = pools(4).run(_one_rank_stays_away, timeout_s=DEADLINE_S)
    for outcome in outcomes:
        assert outcome.kind in ("CollectiveTimeoutError", "PeerDiedError"), outcome
        assert "world" in outcome.text
        assert outcome.seconds < 2 + SOON_S


def _ensure() -> dict[str, Outcome]:
    ps.init_distributed_environment()
    ensure = ps.ensure_model_parallel_initialized
    outcomes = {"makes": attempt(ensure, 2, 2)}
    groups = ps.get_parallel_groups()
    outcomes |= {
        "same": attempt(ensure, 2, 2),
        "same with dp": attempt(ensure, 2, 2, 1),
        "rest": attempt(ensure, 2, 2, -1),
        "tp differs": attempt(ensure, 4, 2),
        "pp differs": attempt(ensure, 2, 1),
        "dp differs": attempt(ensure, 2, 2, 2),
        "kept": attempt(lambda: ps.get_parallel_groups() is groups),
    }
    ps.destroy_distributed_environment()
    return outcomes


def test_ensure_model_parallel_initialized(pools: Pools) -> None:
    for outcomes in pools(4).run(_ensure, timeout_s=DEADLINE_S):
        for name, asked in (("tp differs", "tp=4"), ("pp differs", "pp=1"), ("dp differs", "dp=2")):
            outcome = outcomes.pop(name)
            assert outcome.kind == "ConfigMismatchError"
            assert all(part in outcome.text for part in ("tp=2 × dp=1 × pp=2", asked, "destroy_model_parallel"))
        assert outcomes.pop("kept").text == "True"
        assert {name: outcome.kind for name, outcome in outcomes.items()} == dict.fromkeys(outcomes, "ok")
        assert outcomes.keys() == {"makes", "same", "same with dp", "rest"}


# Its end.


def _after_destroy() -> dict[str, Any]:
    ps.init_distributed_environment()
    ps.initialize_model_parallel(2, 2)
    tp, world, dp = ps.get_tp_group(), ps.get_world_group(), ps.get_dp_group()
    token, x = tp._token, torch.ones(2)

    def op(group: str) -> torch.Tensor:
        return torch.ops.parallel_state.all_reduce(x, token, "sum", group)

    worked = op(tp.unique_name).tolist()
    ps.destroy_model_parallel()
    ps.destroy_model_parallel()
    outcomes = {
        "all_reduce": attempt(tp.all_reduce, x),
        "all_gather": attempt(tp.all_gather, x),
        "barrier": attempt(tp.barrier),
        "broadcast_object": attempt(tp.broadcast_object, 1),
        "send_object": attempt(tp.send_object, 1),
        "broadcast_tensor_dict": attempt(tp.broadcast_tensor_dict, {"x": x}),
        "op": attempt(op, tp.unique_name),
        "op on a group of one": attempt(op, dp.unique_name),
    }
    alive = attempt(lambda: world.all_reduce(x).tolist())
    tp.destroy()
    ps.destroy_distributed_environment()
    ps.destroy_distributed_environment()
    outcomes |= {"world": attempt(world.all_reduce, x), "sub-group": attempt(world.make_sub_group, [0, 1])}
    getters = {f"get_{name}_group": attempt(getattr(ps, f"get_{name}_group")) for name in GETTERS}
    getters["get_parallel_groups"] = attempt(ps.get_parallel_groups)
    name, gone = tp.unique_name, weakref.ref(tp)
    del tp
    gc.collect()
    outcomes["op by the name alone"] = attempt(op, name)
    return {
        "worked": worked,
        "alive": alive.text,
        "freed": gone() is None,
        "outcomes": outcomes,
        "getters": getters,
        "never made": attempt(op, "tp:999"),
        "initialized": (dist.is_initialized(), ps.model_parallel_is_initialized(), ps.is_initialized()),
        "none": [getattr(ps, f"try_get_{name}_group")() for name in GETTERS],
    }


def test_use_after_destroy(pools: Pools) -> None:
    """Getters say what to call first; a group that was kept, and its name in an op, that it was destroyed."""
    for facts in pools(4).run(_after_destroy, timeout_s=DEADLINE_S):
        assert facts["worked"] == [2.0, 2.0]
        assert facts["alive"] == "[4.0, 4.0]"
        assert facts["freed"]
        for name, outcome in facts["outcomes"].items():
            assert outcome.kind == "GroupDestroyedError", (name, outcome)
            assert "destroyed" in outcome.text
            assert outcome.seconds < SOON_S
        for name, outcome in facts["getters"].items():
            assert outcome.kind == "GroupNotInitializedError", (name, outcome)
            assert "first" in outcome.text
            assert ("init_distributed" if "world" in name else "initialize_model_parallel()") in outcome.text
        assert facts["never made"].kind == "GroupNotInitializedError"
        assert "'tp:999'" in facts["never made"].text
        assert facts["initialized"] == (False, False, False)
        assert facts["none"] == [None] * 4


def _again_with_other_sizes(sizes: list[tuple[int, int]]) -> list[tuple[list[int], list[int], float, str]]:
    found = []
    ps.init_distributed_environment()
    for tp, pp in sizes:
        ps.initialize_model_parallel(tp, pp)
        groups = ps.get_parallel_groups()
        total = groups.tp.all_reduce(torch.tensor([float(ps.get_rank())])).item()
        found.append((groups.tp.ranks, groups.pp.ranks, total, groups.tp.unique_name))
        ps.destroy_model_parallel()
    ps.cleanup_dist_env_and_memory()
    return found


def test_other_sizes_on_the_same_world(pools: Pools) -> None:
    sizes = [(2, 2), (4, 1), (1, 4), (2, 1), (1, 1), (2, 2)]
    for rank, found in enumerate(pools(4).run(_again_with_other_sizes, sizes, timeout_s=DEADLINE_S)):
        for (tp, pp), (tp_ranks, pp_ranks, total, _) in zip(sizes, found, strict=True):
            assert len(tp_ranks) == tp
            assert len(pp_ranks) == pp
            assert rank in tp_ranks
            assert total == sum(tp_ranks)
        assert len({name for *_, name in found}) == len(sizes), "a stale name is no other group's"


def _again_and_again(times: int, kept_default_group: str | None) -> list[tuple[int, int, int]]:
    """Open descriptors, threads and c10d groups: after the first worlds, and after all."""
    if kept_default_group is not None:
        agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(kept_default_group, agent)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=4)
    counts = []
    for number in range(times):
        ps.init_distributed_environment()
        ps.initialize_model_parallel(2, 2)
        ps.get_tp_group().all_reduce(torch.ones(1))
        ps.get_pp_group().all_gather_object(number)
        ps.get_dp_group().device_group  # of one rank, made when it is asked for  # noqa: B018
        ps.destroy_distributed_environment()
        if number in (2, times - 1):
            gc.collect()
            groups = len(dist.distributed_c10d._world.pg_map)
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), groups))
    if kept_default_group is not None:
        dist.destroy_process_group()
    return counts


@pytest.mark.parametrize(("times", "joins"), [(30, False), (10, True)])
def test_descriptors_and_threads_stay_flat(pools: Pools, times: int, joins: bool) -> None:
    """Many worlds in one process, each with its default group, or all of them over one that is not ours."""
    name = f"kept/{uuid.uuid4()}" if joins else None
    for first, last in pools(4).run(_again_and_again, times, name, timeout_s=DEADLINE_S):
        assert last[0] <= first[0] + 2, "descriptors"
        assert last[1] <= first[1] + 1, "threads"
        assert last[2] == first[2] == (1 if joins else 0), "c10d's groups"
