from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import unescape
from pathlib import Path

import pytest
import torch.distributed as dist

from device_communicators.c10d import creation
from parallel_state.tools.debug_page import DebugPage
from tests.failure.test_waiting_at_start import ROOT, free_port
from tests.hosts import INTERFACE, Hosts, HostsFailedError, problem

DEADLINE_S = 60.0
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import parallel_state as ps
from parallel_state.tools.debug_page import DebugPage

def read_next_batch():
    print("late", flush=True)
    sys.stdin.readline()

dist.init_process_group("parallel_state")
rank, x = dist.get_rank(), torch.ones(4)
dist.barrier()
if len(sys.argv) > 1:
    from torch.distributed.debug import start_debug_server
    start_debug_server(port=int(sys.argv[1]), handlers=[DebugPage()])
else:
    page = DebugPage()
calls = [lambda: dist.all_reduce(x), lambda: dist.recv(x, 1) if rank == 0 else dist.send(x, 0)]
if os.environ.get("WITH_COORDINATORS"):
    ps.init_distributed_environment()
    calls.append(lambda: ps.get_world_group().all_reduce(x))
if hasattr(dist.distributed_c10d, "_new_window"):  # from torch 2.15 on
    window = dist.distributed_c10d._new_window(x)
    calls.append(lambda: window.wait_signal(1, False) if rank == 0 else window.signal(0, False))
for call in calls:
    if rank == 1:
        read_next_batch()
    call()
print("done", flush=True)
sys.stdin.readline()
"""

ON_HOSTS = """
import sys
import torch
import torch.distributed as dist
from parallel_state.tools.debug_page import DebugPage
from torch.distributed.debug import start_debug_server

def read_next_batch():
    print("late", flush=True)
    sys.stdin.readline()

dist.init_process_group("parallel_state")
rank, x = dist.get_rank(), torch.ones(4)
far = dist.new_group([2, 3])
dist.barrier()
start_debug_server(port=int(sys.argv[1]), handlers=[DebugPage()])
if rank == 2:
    read_next_batch()
dist.all_reduce(x)
if rank == 2:
    read_next_batch()
if rank >= 2:
    dist.all_reduce(x, group=far)
dist.all_reduce(x)
print("done", flush=True)
sys.stdin.readline()
"""


@contextmanager
def _ranks(
    program: str, prefixes: Sequence[Sequence[str]], *arguments: str, **variables: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """`prefixes`: words before each rank's command."""
    creation.load()  # before any deadline starts
    size = str(len(prefixes))
    fixed = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
             "PYTHONPATH": str(ROOT), "TORCH_FR_DUMP_ON_TIMEOUT": "0", **variables}  # fmt: skip
    ranks = [
        subprocess.Popen([*prefix, sys.executable, "-c", program, *arguments],
                         env={**os.environ, **fixed, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        for rank, prefix in enumerate(prefixes)
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for process in ranks:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _until(look: Callable[[], str], *words: str) -> str:
    """Waits for a text of `look` with all `words`. A rank is shown as idle after a second without calls."""
    until = time.monotonic() + DEADLINE_S
    while not all(each in (text := look()) for each in words):
        assert time.monotonic() < until, text
        time.sleep(0.1)
    return text


def _check(look: Callable[[], str], ranks: list[subprocess.Popen[str]], calls: list[str]) -> None:
    for call in calls:
        assert _next_line(ranks[1]) == "late"
        _until(look, f"ranks [0] wait in {call}", f"pid {ranks[1].pid}", "in no call of a group", "read_next_batch")
        _go_on(ranks[1])
    assert _next_line(ranks[1]) == "done"


HAS_WINDOWS = hasattr(dist.distributed_c10d, "_new_window")
SIGNALS = ["wait_signal(src global rank 1)"] if HAS_WINDOWS else []
TWO: list[list[str]] = [[], []]
CALLS = [
    "all_reduce of [4] float32 of group '0' for ranks [1]",
    "recv(src global rank 1) of [4] float32 of group '0' for ranks [1]",
    "all_reduce of [4] float32 of group 'world:0' for ranks [1]",
]


def test_calls_of_both_kinds_of_groups_are_in_one_record() -> None:
    with _ranks(PROGRAM, TWO, WITH_COORDINATORS="1") as ranks:
        page = DebugPage()
        page._pid = str(ranks[0].pid)
        _check(page.dump, ranks, CALLS + SIGNALS)


@pytest.fixture
def _torchs_server() -> None:
    if importlib.util.find_spec("torch.distributed.debug") is None:
        pytest.skip("needs torch >= 2.14")
    pytest.importorskip("jinja2")
    pytest.importorskip("tabulate")


@pytest.mark.usefixtures("_torchs_server")
def test_the_debug_server_shows_who_is_late(tmp_path: Path) -> None:
    port = free_port()

    def look() -> str:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/parallel_state", timeout=10) as answer:
                page = unescape(answer.read().decode())
        except OSError as error:
            return str(error)
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        return page

    with _ranks(PROGRAM, TWO, str(port)) as ranks:
        _check(look, ranks, CALLS[:2] + SIGNALS)
        text = _until(look, "No rank is awaited")
        assert "Ranks [1] are awaited" not in text and f"pid {ranks[0].pid}" in text
        with urllib.request.urlopen(f"http://localhost:{port}/parallel_state", timeout=10) as answer:
            raw = answer.read().decode()
        assert "<!DOCTYPE html>" in raw and 'content="light dark"' in raw and "default-src 'none'" in raw


@pytest.mark.usefixtures("_torchs_server")
def test_the_debug_server_shows_ranks_of_other_hosts() -> None:
    if (reason := problem()) is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    port = "25999"
    fetch = f"import urllib.request as r; print(r.urlopen('http://localhost:{port}/parallel_state', timeout=10).read())"

    def look() -> str:
        try:
            page = hosts.run_on(0, f'{sys.executable} -I -S -c "{fetch}"')
        except HostsFailedError as error:
            return str(error)
        return unescape(ast.literal_eval(page).decode())

    with Hosts(2) as hosts:
        prefixes = [["nsenter", "-t", str(hosts.pid(host)), "--net", "--uts", "--mount"] for host in (0, 0, 1, 1)]
        with _ranks(ON_HOSTS, prefixes, port, MASTER_ADDR=hosts.addresses[0], GLOO_SOCKET_IFNAME=INTERFACE) as ranks:
            late = f'<td>2</td><td class="soft">parallel-state-host-1, pid {ranks[2].pid}</td><td>is '
            assert _next_line(ranks[2]) == "late"
            text = _until(look, "ranks [0, 1, 3] wait in all_reduce of [4] float32 of group '0' for ranks [2]",
                          f"{late}in no call of a group, at ", "read_next_batch")  # fmt: skip
            assert "4 ranks on 2 hosts" in text and "Ranks [2] are awaited" in text
            assert text.index(late) < text.index(f"parallel-state-host-0, pid {ranks[0].pid}")
            _go_on(ranks[2])
            assert _next_line(ranks[2]) == "late"
            waits = ["ranks [3] wait in all_reduce of [4] float32 of group '1' for ranks [2]", "ranks [0, 1] wait in "]
            _until(look, *waits, "Ranks [2, 3] are awaited", f"{late}in no call of a group, at ", "read_next_batch")
            ranks[2].send_signal(signal.SIGSTOP)
            text = _until(look, *waits, f"{late}stopped by a signal")
            ranks[2].send_signal(signal.SIGCONT)
            _go_on(ranks[2])
            assert [_next_line(rank) for rank in ranks] == ["done"] * 4
