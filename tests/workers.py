"""Pools of processes that start once per world size and run one function after another.

`pool.run(function, argument, …, tp=2, pp=2)` runs a function on every rank. If the function raises on any rank, the
test fails with every traceback. If the deadline passes, the ranks are killed. Functions must be at module level.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE_S = 3.0
_STARTS = threading.Lock()
_ENDED = "the process ended"
PRELOADED = (
    "torch",
    "torch.distributed",
    "parallel_state",
    "parallel_state.groups.world",
    "device_communicators.cpu.host_memory",
)
"""Modules that the fork server imports. They must not call CUDA, because no forked rank could then use CUDA."""
COMPILING = "any test that compiles"
_SLOW_IMPORTS = {
    ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"): (
        "test_torch_parallelism", "test_hybrid_sharding", "test_device_mesh", "test_transformers"
    ),
    ("torch._dynamo", "torch._decomp.decompositions_for_jvp"): (
        "test_c10d", "test_c10d_on_hosts", "test_compat_megatron", "test_fused_norm", "test_gradients", "test_hosts",
        "test_trace", "test_transforms",
    ),
    ("tests.compile.compiler_preload", "torch.distributed.fsdp"): (
        "test_bench_command", "test_benchmarks", "test_c10d_launchers"
    ),
    ("tests.compile.compiler_preload",): (
        COMPILING, "test_c10d_programs", "test_collectives_ranks", "test_compile", "test_compiled_bits",
        "test_fused_models", "test_graph_breaks", "test_messages_past_python", "test_ops_registration",
        "test_seed_rows", "test_symmetric_tensors", "test_tensor_dicts",
    ),
    ("transformers.models.llama.modeling_llama",): ("test_c10d_programs", "test_fused_models", "test_transformers"),
}  # fmt: skip
"""Maps modules that take seconds to import to the tests that need them. The fork server imports these modules, but not
if torch has CUDA: torch's symmetric memory then looks for Triton, which can call CUDA.
"""
modules_of_tests: set[str] = set()
"""The test files of this run, without `.py`. Set once the tests are known."""
modules_of_new_ranks: set[str] = set()
"""Test modules that start new ranks. The fork server imports these, which saves 13 ms a rank."""


def fork_context() -> Any:
    import torch

    context = multiprocessing.get_context("forkserver")
    slow = [modules for modules, tests in _SLOW_IMPORTS.items() if not modules_of_tests.isdisjoint(tests)]
    also = (*sum(slow, ()), *sorted(modules_of_new_ranks)) if torch.version.cuda is None else ()
    context.set_forkserver_preload([*PRELOADED, *also, "tests.preload"])
    return context


class WorkersFailedError(AssertionError):
    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))
        self.errors = errors


class WorkerPool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._store: Any = None

    def run(
        self, function: Callable[..., Any], *args: Any, tp: int | None = None, pp: int = 1, timeout_s: float = 120.0
    ) -> list[Any]:
        self._begin(function, args, None if tp is None else (tp, pp))
        results, errors = self._collect(timeout_s, GRACE_S)
        if errors:
            self.kill()
            raise WorkersFailedError(errors)
        return [results[rank] for rank in range(self.world_size)]

    def survivors(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> dict[int, Any]:
        self._begin(function, args, None)
        try:
            results, errors = self._collect(timeout_s, timeout_s)
        finally:
            self.kill()
        raised = {rank: text for rank, text in errors.items() if text != _ENDED}
        if raised:
            raise WorkersFailedError(raised)
        return results

    def _begin(self, function: Callable[..., Any], args: tuple[Any, ...], layout: tuple[int, int] | None) -> None:
        ended = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
        if ended:
            self.kill()
            raise WorkersFailedError(dict.fromkeys(ended, "the process has ended since the last run"))
        if not self._processes:
            self._start()
        task = pickle.dumps((function, args, layout))
        for connection in self._connections:
            connection.send_bytes(task)

    def _collect(self, timeout_s: float, grace_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        pending = dict(enumerate(self._connections))
        while pending and time.monotonic() < deadline:
            ready = wait(list(pending.values()), timeout=deadline - time.monotonic())
            for rank, connection in list(pending.items()):
                if connection in ready:
                    del pending[rank]
                    try:
                        ok, value = pickle.loads(connection.recv_bytes())
                    except EOFError:
                        ok, value = False, _ENDED
                    (results if ok else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + grace_s)
        errors.update(dict.fromkeys(pending, f"no answer within {timeout_s} s"))
        return results, errors

    def _start(self) -> None:
        context = fork_context()
        self._serve_store()
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            target, args = self._target(rank)
            process = context.Process(
                target=target, args=(*args, theirs, self._environment(rank)), daemon=True, name=f"rank-{rank}"
            )
            with _STARTS:
                process.start()
                # A start joins all children started before, but each rank belongs to its pool's thread.
                multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)

    def _serve_store(self) -> None:
        import torch.distributed as dist

        # The parent serves the store, like torchrun: no port is guessed, and worlds can follow each other.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port if self._store is not None else 0),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PARALLEL_STATE_TIMEOUT_S": "60",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }

    def _target(self, rank: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return serve, ()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None


def serve(connection: Connection, environment: dict[str, str]) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    layout = None
    while True:
        try:
            function, args, wanted = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            if wanted is None or wanted != layout:
                layout = _lay_out(wanted, layout)
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            data = pickle.dumps(answer)
        except Exception:
            data = pickle.dumps((False, f"the result can't be pickled:\n{traceback.format_exc()}"))
        connection.send_bytes(data)


def _lay_out(wanted: tuple[int, int] | None, layout: tuple[int, int] | None) -> tuple[int, int] | None:
    import parallel_state as ps

    ps.destroy_model_parallel()
    if wanted is None or layout is None:  # the function before can have left a world
        ps.destroy_distributed_environment()
    if wanted is None:
        return None
    if layout is None:
        ps.init_distributed_environment(backend=os.environ.get("RANKS_BACKEND", "gloo"))
    ps.initialize_model_parallel(*wanted)
    return wanted
