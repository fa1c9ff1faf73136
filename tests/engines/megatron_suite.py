"""Program: Megatron's own test of its parallel state in eight ranks. python megatron_suite.py SOURCE
stock|ours FOLDER writes FOLDER/RANK.json: [[test, outcome, what it said], …]. CUDA and NCCL are answered as
on a machine with one GPU per rank; an empty module replaces Megatron's `training`, an unused import."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS = 8
TIMEOUT = timedelta(seconds=60)
PATIENCE_S = 180.0


def main(source: Path, which: str, folder: Path) -> None:
    sys.path.insert(0, str(source))
    if which == "ours":
        from parallel_state.compat import megatron

        megatron.install()
    unused = types.ModuleType("megatron.training.argument_utils")
    for name in ("gpt_config_from_args", "hybrid_config_from_args", "pretrain_cfg_container_from_args"):
        setattr(unused, name, None)
    sys.modules["megatron.training"] = types.ModuleType("megatron.training")
    sys.modules["megatron.training.argument_utils"] = unused
    import megatron.core

    assert (megatron.core.parallel_state.__name__ == "megatron.core.parallel_state") == (which == "stock")
    stand_in_for_cuda("gloo" if which == "stock" else "parallel_state")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            try:
                run(source, which, folder / f"{rank}.json")
            finally:
                os._exit(0)
        children.append(child)
    await_all(children, folder)


def await_all(children: list[int], folder: Path) -> None:
    """Kills ranks after a time without a finished test: gloo can wait forever."""
    left, progress = set(children), time.monotonic()
    seen: list[int] = []
    while left:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        sizes = [path.stat().st_size for path in sorted(folder.glob("*.json"))]
        if sizes != seen:
            seen, progress = sizes, time.monotonic()
        if time.monotonic() - progress > PATIENCE_S:
            for child in left:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.2)


def stand_in_for_cuda(backend: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.cuda.device_count = lambda: RANKS  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init(backend_: str | None = None, **options: Any) -> None:
        backend_ = options.pop("backend", backend_)
        init_process_group(backend if backend_ == "nccl" else backend_, **{"timeout": TIMEOUT, **options})

    def group(ranks: Any = None, **options: Any) -> Any:
        if options.get("backend") == "nccl":
            options |= {"backend": backend, "timeout": options.get("timeout") or TIMEOUT}
        return new_group(ranks, **options)

    dist.init_process_group, dist.new_group = init, group  # type: ignore[assignment]


class Outcomes:
    def __init__(self, which: str, path: Path) -> None:
        self._which, self._path, self._found = which, path, list[list[str]]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._found.append([report.nodeid.split("::")[-1], report.outcome, str(report.longrepr or "")[-2000:]])
            self._path.write_text(json.dumps(self._found))

    def pytest_runtest_teardown(self, item: Any) -> None:
        """Megatron doesn't destroy its groups, so gloo would have hundreds of threads by the tenth test."""
        import torch.distributed as dist

        if self._which == "stock" and dist.is_initialized():
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)


def run(source: Path, which: str, path: Path) -> None:
    import pytest

    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(source)]
    file = source / "tests" / "unit_tests" / "test_parallel_state.py"
    pytest.main([*options, str(file)], plugins=[Outcomes(which, path)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
