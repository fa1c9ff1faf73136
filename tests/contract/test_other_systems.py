"""Simulates a system other than Linux: the standard library loses its Linux-only parts before the import. Another
system's torch, sockets and file systems are not covered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240

PROGRAM = r"""
import builtins, fcntl, importlib, multiprocessing, os, pkgutil, select, selectors, signal, socket, sys, tempfile, time
import torch, torch.distributed

ONLY_LINUX = {
    os: ("sched_", "pidfd", "eventfd", "EFD_", "memfd", "MFD_", "posix_fallocate", "posix_fadvise", "splice", "SPLICE",
         "O_TMPFILE", "O_PATH", "O_DIRECT", "P_PIDFD", "setns", "unshare", "getrandom", "copy_file_range"),
    socket: ("SO_PEERCRED", "SO_PASSCRED", "SO_BINDTODEVICE", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "NETLINK_",
             "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "TCP_INFO", "AF_VSOCK", "AF_PACKET"),
    fcntl: ("F_SETSIG", "F_GETSIG", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_", "F_SETPIPE_SZ", "F_OFD_"),
    select: ("epoll", "EPOLL"),
    signal: ("pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo"),
}
for module, prefixes in ONLY_LINUX.items():
    for name in [name for name in dir(module) if name.startswith(prefixes)]:
        delattr(module, name)
selectors.DefaultSelector = selectors.PollSelector

def hiding(function):
    def hidden(path, *args, **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "hidden by the test", path)
        return function(path, *args, **options)
    return hidden

builtins.open = hiding(open)
for name in ("open", "stat", "listdir", "scandir", "readlink"):
    setattr(os, name, hiding(getattr(os, name)))
sys.platform = "darwin"

import parallel_state as ps
import device_communicators as dc
assert all(getattr(ps, name) is not None for name in ps.__all__)
for package in (ps, dc):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:  # of a plug-in, which its engine loads
                if error.name not in ("vllm", "torchft"):
                    raise

# All is imported, nothing has been started: the ranks are forked from here, and what they print is kept apart.
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        break
else:
    for rank, pid in enumerate(ranks):
        print(rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.exit()
for descriptor, kind in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{rank}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), descriptor)
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
for again in (True, False):
    ps.init_distributed_environment()
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    tp = ps.get_tp_group()
    explained = tp.explain()
    assert "the compiled library needs Linux, and this is darwin" in explained, explained
    assert "exits of ranks are detected at deadlines, or when a gloo connection breaks" in explained, explained
    assert ps.get_nodes() == [[0, 1]]
    x = torch.arange(4.0) + rank
    assert tp.all_reduce(x).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert tp.all_gather(x, 0).tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
    assert tp.reduce_scatter(x, 0).tolist() == [[1.0, 3.0], [5.0, 7.0]][rank]
    assert tp.all_to_all(x).tolist() == [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]][rank]
    assert tp.broadcast(x, 1).tolist() == [1.0, 2.0, 3.0, 4.0]
    tp.barrier()
    sent = {"hidden": torch.arange(3.0), "step": 7}
    got = tp.broadcast_tensor_dict(sent if rank == 0 else None, 0)
    assert got["step"] == 7 and got["hidden"].tolist() == [0.0, 1.0, 2.0]
    if rank == 0:
        tp.send_tensor_dict(sent, 1)
        tp.send(x, 1)
    else:
        assert tp.recv_tensor_dict(0)["hidden"].tolist() == [0.0, 1.0, 2.0]
        assert tp.recv((4,), torch.float32, 0).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert tp.broadcast_object(("a", rank), 0) == ("a", 0)
    if again:
        ps.destroy_model_parallel()
        ps.destroy_distributed_environment()
left = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("parallel_state-k")]
assert not left, left
print("all done", flush=True)
if rank == 1:  # its end is a launcher's, whose leash a thread must watch here
    from parallel_state.launch.worker import _die_with_launcher
    leash, held = os.pipe()
    _die_with_launcher(leash, "rank-1")
    os.close(held)
    signal.pause()
try:
    tp.barrier()
    tp.barrier()
except ps.CommunicationError as error:  # gloo's connection broke: nothing else tells of an end here
    print("failed:", error, flush=True)
"""


def test_two_ranks_without_what_only_linux_has(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary"),
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "PARALLEL_STATE_TIMEOUT_S": "30",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out, other_out, err, other_err = ((tmp_path / name).read_text() for name in ("0.out", "1.out", "0.err", "1.err"))
    assert "all done" in out, err
    assert "all done" in other_out, other_err
    assert done.stdout.splitlines() == ["0 0", "1 -9"], other_err
    assert re.search(r"failed: barrier (number \d+ )?of group 'tp:", out), err
    for text in (err, other_err):
        assert "runs without shared memory" not in text
