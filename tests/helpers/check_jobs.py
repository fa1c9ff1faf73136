"""Runs `check` as jobs on the hosts of `tests.hosts`. A rank is a fork that enters its host's namespaces. A
`Shim` simulates faults before the command begins: versions, clock, a slow core, a hang."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts import INTERFACE, Hosts, enter
from tests.workers import fork_context

Shim = Callable[[], object]
_DEADLINE_S = 60.0


@dataclass
class Ended:
    codes: list[int | None]
    outputs: list[str]
    errors: list[str]
    seconds: float
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def findings(self) -> list[dict[str, Any]]:
        return list(self.report.get("findings", ()))

    def find(self, code: str) -> dict[str, Any] | None:
        found = next((each for each in self.findings if each["code"] == code), None)
        if found is None:
            for text in self.errors:
                for severity in ("INFO", "WARNING", "ERROR"):
                    _, there, rest = text.partition(f"{severity} {code} ")
                    if there and "    do:  " in rest:
                        said, _, after = rest.partition("    why: ")
                        fix = after.partition("    do:  ")[2].partition("\n\n")[0]
                        return {"code": code, "severity": severity.lower(), "found": said, "fix": fix, "ranks": []}
        return found

    def __str__(self) -> str:
        said = "\n".join(f"--- rank {rank}\n{text[-3000:]}" for rank, text in enumerate(self.errors) if text)
        shown = "\n".join(f"{each['severity']} {each['code']}: {each['found']}" for each in self.findings)
        return f"exit codes {self.codes} after {self.seconds:.1f} s\n{shown}\n{said}"


def run_check(
    hosts: Hosts | None,
    placement: Sequence[int],
    *arguments: str,
    environments: Mapping[int, Mapping[str, str | None]] | None = None,
    shims: Mapping[int, Shim] | None = None,
    everywhere: Mapping[str, str | None] | None = None,
    absent: Sequence[int] = (),
    port: int = 21_000,
) -> Ended:
    """Runs `check` with one rank for each host in `placement`, except `absent` ranks. Unsets variables of None."""
    context = fork_context()
    began = time.monotonic()
    address = hosts.addresses[placement[0]] if hosts is not None else "127.0.0.1"
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        os.chmod(folder, 0o777)
        processes: dict[int, Any] = {}
        for rank, host in enumerate(placement):
            if rank in absent:
                continue
            environment: dict[str, str | None] = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(placement)),
                "LOCAL_RANK": str(placement[:rank].count(host)),
                "LOCAL_WORLD_SIZE": str(placement.count(host)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **({"GLOO_SOCKET_IFNAME": INTERFACE} if hosts is not None else {}),
                **(everywhere or {}),
                **((environments or {}).get(rank, {})),
            }
            words = ["--quick", *arguments, "--json", *(["--timeout", "20"] if "--timeout" not in arguments else [])]
            args = (
                None if hosts is None else hosts.pid(host),
                environment,
                words,
                (shims or {}).get(rank),
                os.path.join(folder, str(rank)),
            )
            processes[rank] = context.Process(target=_run_rank, args=args, daemon=True)
            processes[rank].start()
        try:
            for process in processes.values():
                process.join(max(0.1, began + _DEADLINE_S - time.monotonic()))
        finally:
            for process in processes.values():
                process.kill()
                process.join()
        seconds = time.monotonic() - began
        outputs, errors = (
            [_content(Path(folder) / f"{rank}.{kind}") for rank in range(len(placement))] for kind in ("out", "err")
        )
        codes = [processes[rank].exitcode if rank in processes else None for rank in range(len(placement))]
        ended = Ended(codes, outputs, errors, seconds)
        reports = [text for text in outputs if text.startswith("{")]
        if reports:
            ended.report = json.loads(reports[0])
        return ended


def _content(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _run_rank(
    host_pid: int | None, environment: dict[str, str | None], words: list[str], shim: Shim | None, path: str
) -> None:
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{path}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    if host_pid is not None:
        enter(host_pid)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_CACHE_HOME", "LANG") if name in os.environ}
    os.environ.clear()
    os.environ.update({**kept, **{name: value for name, value in environment.items() if value is not None}})
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if shim is not None:
        shim()
    from parallel_state.__main__ import main

    code = 1
    try:
        code = main(["check", *words])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        with contextlib.suppress(ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
