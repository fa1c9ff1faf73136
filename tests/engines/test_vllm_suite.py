"""vLLM's own tests with our names, from a source tree (PARALLEL_STATE_VLLM_SOURCE). `cuda` becomes `cpu`, and
our ranks replace Ray's workers. Tests of vLLM's internals are omitted."""

from __future__ import annotations

import ast
import contextlib
import os
import runpy
import socket
import sys
import time
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_state.compat import vllm
from tests.engines.running import source

WORKERS = {
    "all_reduce_test_worker": (2, 1),
    "reduce_scatter_test_worker": (2, 1),
    "all_gather_test_worker": (2, 1),
    "broadcast_tensor_dict_test_worker": (2, 1),
    "send_recv_tensor_dict_test_worker": (1, 2),
    "send_recv_test_worker": (1, 2),
}
STATELESS = ("cpu_worker", "broadcast_worker", "allgather_worker")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def init_environment(tp: int, pp: int, rank: int, port: str) -> None:
    vllm.init_distributed_environment(tp * pp, rank, f"tcp://localhost:{port}", rank, "nccl")
    vllm.ensure_model_parallel_initialized(tp, pp)


class _Names(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        own = {"get_open_port": free_port, "get_ip": lambda: "127.0.0.1"}
        return own[name] if name in own else getattr(vllm, name)


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    device = "vllm.distributed.device_communicators"
    names = ("vllm", "vllm.distributed", device, f"{device}.shm_broadcast", "vllm.distributed.parallel_state",
             "vllm.distributed.utils", "vllm.utils", "vllm.utils.network_utils", "vllm.utils.system_utils")  # fmt: skip
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    sys.modules.update({name: _Names(name) for name in names})
    for name in names:
        sys.modules[name].__path__ = []  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def functions(file: Path, *names: str) -> dict[str, Any]:
    tree = ast.parse(file.read_text(encoding="utf-8").replace('"cuda"', '"cpu"').replace('f"cuda:{rank}"', '"cpu"'))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and (not names or node.name in names)]
    for node in found:
        node.decorator_list = []
    assert not names or {node.name for node in found} == set(names), f"{file} has changed"
    namespace: dict[str, Any] = {
        **vars(vllm), "torch": torch, "dist": dist, "pytest": pytest, "os": os, "time": time, "timedelta": timedelta,
        "init_test_distributed_environment": init_environment,
    }  # fmt: skip
    annotations = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*annotations, *found], type_ignores=[]), str(file), "exec"), namespace)
    return namespace


def _rank() -> int:
    return int(os.environ["RANK"])


def _comm_ops(file: Path, name: str, tp: int, pp: int, port: int) -> None:
    set_device = torch.accelerator.set_device_index
    torch.accelerator.set_device_index = lambda device: None
    try:
        given = types.SimpleNamespace(delenv=lambda *args, **kwargs: None)
        functions(file, name)[name](given, tp, pp, _rank(), str(port))
    finally:
        torch.accelerator.set_device_index = set_device
        vllm.cleanup_dist_env_and_memory()


@pytest.mark.parametrize("name", WORKERS)
def test_comm_ops(name: str, pools: Any) -> None:
    file = source("vllm") / "tests/distributed/test_comm_ops.py"
    tp, pp = WORKERS[name]
    pools(2).run(_comm_ops, file, name, tp, pp, free_port())


def _stateless(file: Path, name: str, ports: tuple[int, int]) -> None:
    functions(file, name)[name](_rank(), 4, *ports)


@pytest.mark.parametrize("name", STATELESS)
def test_utils(name: str, pools: Any) -> None:
    file = source("vllm") / "tests/distributed/test_utils.py"
    pools(4).run(_stateless, file, name, (free_port(), free_port()))


def _cpu_all_reduce(file: Path, name: str, ports: list[int]) -> None:
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        functions(file, "_make_input", name)[name](_rank(), int(os.environ["WORLD_SIZE"]), *ports)
    finally:
        vllm.cleanup_dist_env_and_memory()


@pytest.mark.parametrize(("name", "size"), [("_worker", 2), ("_worker", 3), ("_worker", 6), ("_timeout_worker", 2)])
def test_cpu_all_reduce(name: str, size: int, pools: Any) -> None:
    file = source("vllm") / "tests/distributed/test_cpu_all_reduce.py"
    if not file.exists():
        pytest.skip("vLLM has this test from 0.33 on")
    ports = [free_port() for _ in range(1 if name == "_timeout_worker" else 2)]
    pools(size).run(_cpu_all_reduce, file, name, ports)


def _script(file: Path, port: int) -> None:
    os.environ["MASTER_PORT"], os.environ["MASTER_ADDR"] = str(port), "127.0.0.1"
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with in_place():
        try:
            script = runpy.run_path(str(file), run_name="__main__")
            dist.barrier()  # the rank that serves the script's store exits first
            del script
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("name", ["test_same_node", "test_node_count"])
def test_scripts(name: str, pools: Any) -> None:
    pools(4).run(_script, source("vllm") / f"tests/distributed/{name}.py", free_port())


def _broadcast(file: Path, port: int, messages: int) -> None:
    import random

    import numpy as np

    os.environ["MASTER_PORT"], os.environ["MASTER_ADDR"] = str(port), "127.0.0.1"
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    dist.init_process_group("gloo")
    try:
        names = functions(file, "worker_fn", "get_arrays")
        names |= {"random": random, "time": time, "np": np, "get_open_port": free_port}
        arrays = names["get_arrays"]
        names["get_arrays"] = lambda count, seed: arrays(min(count, messages), seed)
        names["worker_fn"]()
    finally:
        dist.destroy_process_group()


def test_shm_broadcast(pools: Any) -> None:
    pools(4).run(_broadcast, source("vllm") / "tests/distributed/test_shm_broadcast.py", free_port(), 1000)


def test_pipeline_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    file = source("vllm") / "tests/distributed/test_pipeline_partition.py"
    with in_place():
        names = runpy.run_path(str(file))
    names["test_custom_layer_partition"](monkeypatch)
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    (cases,) = [mark for mark in names["test_uneven_auto_partition"].pytestmark if mark.name == "parametrize"]
    assert len(cases.args[1]) > 10
    for case in cases.args[1]:
        names["test_uneven_auto_partition"](*case)
